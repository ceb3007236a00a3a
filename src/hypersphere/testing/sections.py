r"""The contract of sections of recipes: what a run needs of one, tried in runs of a few steps.

A member's own ``contract`` declares ``recipe``, the overrides of ``digits-softmax`` that put it to use; without them it
is named with its defaults. ``first`` says that recipes have had it since their first version.
"""

from __future__ import annotations

import json
import math
import tempfile
import typing
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo
from torch import Tensor

from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract

CONTRACT = Contract("section", "sections", "hypersphere.recipe:sections")
SHORT = (
    *("train.steps=4", "train.checkpoint_every=2", "train.log_every=1", "train.tensorboard=false"),
    *("train.keep_checkpoints=9", "data.batch_size=32", "model.width=4", "evaluate.every=2"),
)


def overrides(name: str) -> list[str]:
    """What puts the member to use in a recipe."""
    return list(CONTRACT.fact(name, "recipe", (f"{key(name)}={{}}",)))


def key(name: str) -> str:
    """Its key in a recipe."""
    return CONTRACT.entry(name).name.replace("-", "_")


def plan(name: str, *more: str) -> Any:
    """A short recipe that has it."""
    from hypersphere import recipe

    return recipe.load("digits-softmax", [*SHORT, *overrides(name), *more])


class StoppedError(Exception):
    """A run was stopped on purpose."""


def train(folder: Path, chosen: Any, stop: int | None = None, *, checked: bool = False) -> Any:
    """A run of the recipe, or the rest of one; it fails after the step ``stop``."""
    from hypersphere.runs import RunFolder
    from hypersphere.train import Callback, Trainer

    class Watch(Callback):
        def on_step(self, trainer: Any, step: int) -> None:
            if checked and step == 1:
                _look(trainer)
            if step == stop:
                raise StoppedError

    device = torch.device("cpu")
    run = RunFolder(folder) if folder.exists() else RunFolder.create(folder, chosen, device)
    trainer = Trainer(chosen, run, device, callbacks=[Watch()])
    with suppress(StoppedError):
        trainer.fit()
    return trainer


def _look(trainer: Any) -> None:
    """Change a batch once more, as device work alone."""
    images = trainer.data.train.images[:4]
    x = trainer.preprocess(images) if hasattr(trainer, "preprocess") else images
    for work in trainer.works.values():
        with numeric.Host(values=False):
            found = work.samples(x, trainer.data.train.labels[:4], torch.Generator().manual_seed(0))
        assert found.shape == x.shape, f"the samples become {tuple(found.shape)}, were {tuple(x.shape)}"
        numeric.finite([found], "samples")


@lru_cache(1)  # the member that is looked at
def _trained(name: str, _: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State and rows of a run without an interruption, which is loaded again, too."""
    import hypersphere as hs

    with tempfile.TemporaryDirectory() as folder:
        trainer = train(Path(folder) / "run", plan(name), checked=True)
        images = trainer.data.test.images[:3]
        found = hs.load(trainer.run.path).embed(images)
        numeric.close(found, trainer.system.embed(images), 1e-6, "features of a loaded run")
        return outcome(trainer)


def trained(name: str) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """State and rows of a run without an interruption."""
    return _trained(name, CONTRACT.entry(name).factory)


def outcome(trainer: Any) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Copies of all tensors of a run, and its rows without what clocks say."""
    rows = [{k: v for k, v in row.items() if k not in ("time", "images_per_second")} for row in trainer.run.rows()]
    return {k: v.detach().clone() for k, v in trainer.state().items()}, rows


@CONTRACT.check
def may_be_left_out(name: str) -> None:
    """Recipes without it are what they were before it came: their hashes do not know it."""
    common.needs_workbench()
    from hypersphere import recipe
    from hypersphere.recipe.hash import Later

    kind, default = CONTRACT.entry(name).factory.field()  # type: ignore[attr-defined]
    held = default.default if isinstance(default, FieldInfo) else default
    if not CONTRACT.fact(name, "first", False):
        marks = [mark for mark in typing.get_args(kind)[1:] if isinstance(mark, Later)]
        assert [mark.means for mark in marks] == [held], "its absence must be marked: Annotated[..., Later(default)]"
    assert key(name) in recipe.load("digits-softmax").model_dump()
    assert plan(name).hash != recipe.load("digits-softmax", list(SHORT)).hash, "a recipe that has it has the same hash"


@CONTRACT.check
def explains_its_keys(name: str) -> None:
    """It is a pydantic model that refuses unknown keys, and every key of its own is explained."""
    kind: Any = CONTRACT.entry(name).factory
    assert isinstance(kind, type) and issubclass(kind, BaseModel)
    if issubclass(kind, RootModel):
        return
    for field, info in kind.model_fields.items():
        assert field == "name" or info.description, f"the key {field} has no description"


@CONTRACT.check
def trains(name: str) -> None:
    """A run of a few steps ends with finite tensors and rows that JSON holds, and is loaded as it was."""
    state, rows = trained(name)
    numeric.finite([t for t in state.values() if t.is_floating_point()], "the state of a run")
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        bad = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        assert not bad, f"{bad} of a row are no numbers"


@CONTRACT.check
def goes_on_where_it_was(name: str) -> None:
    """A run that failed between two checkpoints ends as one that did not, to the last bit."""
    wanted, rows = trained(name)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "run", plan(name), stop=3)
        torch.rand(7)
        found, again = outcome(train(Path(folder) / "run", plan(name)))
    assert found.keys() == wanted.keys(), f"the state has {sorted(found.keys() ^ wanted.keys())} or not"
    for tensor, value in found.items():
        assert torch.equal(value.nan_to_num(), wanted[tensor].nan_to_num()), f"{tensor} of a resumed run differs"
    assert again == rows, f"rows of a resumed run differ: {again} should be {rows}"


@CONTRACT.check
def can_be_written_and_read(name: str) -> None:
    """A resolved recipe is the same again when it is read."""
    from hypersphere import recipe

    first = plan(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(first.to_yaml(), encoding="utf-8")
        again = recipe.load(file)
    assert again.hash == first.hash, "its hash changes"
    assert again.to_yaml() == first.to_yaml()


common.add(CONTRACT, example=False, signature=False)

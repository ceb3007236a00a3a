"""The end of learning by validation samples, against the rule of `early_stop` on the rows of a run without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hypersphere import recipe
from hypersphere.energy import MHE, select
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.tasks.graphs.evaluation import early_stop
from hypersphere.train import Callback, Trainer

CPU = torch.device("cpu")
SHORT = ["train.steps=24", "train.tensorboard=false", "model.width=4", "train.log_every=1", "data.validation=200"]
RESTLESS = ["optimiser.lr=0.8", "data.batch_size=16"]


def trainer(folder: Path, *overrides: str, callbacks=()) -> Trainer:
    plan = recipe.load("digits-softmax", [*SHORT, *RESTLESS, *overrides])
    return Trainer(plan, RunFolder.create(folder, plan, CPU), CPU, callbacks=callbacks)


class Losses(Callback):
    """What the rule looks at, and the weights, after every step."""

    def __init__(self, decay: float, energy: float = 0.0) -> None:
        self.decay, self.energy, self.losses, self.weights = decay, energy, [], []

    def on_step(self, trainer, step):
        trainer.model.eval()
        with torch.no_grad():
            test = trainer.data.test
            scores = trainer.head.logits(trainer.model(trainer.preprocess(test.images)))
            loss = F.cross_entropy(scores, test.labels)
            weights = [p for part in (trainer.model, trainer.head) for p in part.parameters()]
            loss += self.decay / 2 * sum(weight.square().sum() for weight in weights)
            loss += self.energy * MHE()(select(trainer.model, output=None))
        trainer.model.train()
        self.losses.append(float(loss))
        self.weights.append(torch.cat([weight.detach().flatten() for weight in weights]))


@pytest.mark.parametrize(("patience", "decay", "energy"), [(2, 0.0, 0.0), (4, 0.02, 0.0), (3, 0.02, 30.0)])
def test_learning_ends_where_the_rule_says_and_no_weight_moves_from_then_on(tmp_path, patience, decay, energy):
    plain, stopped = Losses(decay, energy), Losses(decay, energy)
    term = f"regularisers=[{{name: mhe, weight: {energy}}}]"
    trainer(tmp_path / "plain", f"optimiser.weight_decay={decay}", term, callbacks=[plain]).fit()
    end = early_stop(plain.losses, patience)
    assert patience + 1 < end < len(plain.losses)  # or there would be nothing to see
    changes = (f"optimiser.weight_decay={decay}", f"early_stop.patience={patience}", term)
    run = trainer(tmp_path / "stopped", *changes, callbacks=[stopped])
    run.fit()
    assert torch.equal(stopped.weights[end - 1], plain.weights[end - 1])
    assert all(torch.equal(later, stopped.weights[end - 1]) for later in stopped.weights[end:])
    assert not torch.equal(plain.weights[end], plain.weights[end - 1])
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert [row["early_stop"] for row in rows] == [0.0] * (end - 1) + [float(end)] * (len(rows) - end + 1)


def test_a_run_that_was_stopped_knows_it_when_it_goes_on(tmp_path):
    class Cut(Callback):
        def on_step(self, trainer, step):
            if step == 20:
                raise KeyboardInterrupt

    changes = ("early_stop.patience=2", "train.checkpoint_every=10")
    whole = trainer(tmp_path / "whole", *changes)
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", *changes, callbacks=[Cut()]).fit()
    run = RunFolder(tmp_path / "cut")
    again = Trainer(whole.recipe, run, CPU)
    again.fit()
    assert again.works["early_stop"].ended == whole.works["early_stop"].ended > 0
    assert all(torch.equal(value, whole.state()[name]) for name, value in again.state().items())


def test_without_samples_to_validate_it_says_so(tmp_path):
    with pytest.raises(RecipeError, match=re.escape("early_stop needs validation nodes or data.validation")):
        trainer(tmp_path / "run", "data.validation=0", "early_stop={}").fit()
    with pytest.raises(RecipeError, match=r"early_stop\.patience"):
        recipe.load("digits-softmax", ["early_stop.patience=0"])

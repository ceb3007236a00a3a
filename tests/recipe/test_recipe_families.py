"""Optimisers, schedules and augmentations of a user's own, named in recipes."""

from __future__ import annotations

import math

import pytest
import torch

from hypersphere import recipe, runs
from hypersphere.data.augmentations import Augmentation, augmentations
from hypersphere.optimisers import optimisers
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.schedules import schedules
from hypersphere.train import Trainer

CPU = torch.device("cpu")
SHORT = ("train.steps=6", "train.log_every=1", "train.checkpoint_every=3", "train.tensorboard=false")


def fit(folder, *overrides):
    plan = recipe.load("digits-softmax", [*SHORT, *overrides])
    run = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)
    run.fit()
    return run


class Signed(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients."""

    def __init__(self, groups, decay):
        super().__init__(groups, {"decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["decay"])
                p.sub_(group["lr"] * mean.sign())


@pytest.fixture
def own():
    @optimisers.register("signed")
    def signed(groups, *, decay_rate: float = 0.5, momentum: float = 0.7) -> torch.optim.Optimizer:
        """Steps by signs."""
        signed.seen = (decay_rate, momentum)
        return Signed(groups, decay_rate)

    @schedules.register("sawtooth")
    def sawtooth(*, period: int = 2, final: float = 0.25):
        """Up and down."""
        return lambda step, progress: final + (1 - final) * (step % period) / period

    yield signed
    optimisers.remove("signed")
    schedules.remove("sawtooth")


def test_an_own_optimiser_trains_and_resumes(own, tmp_path):
    options = ("optimiser.name=signed", "optimiser.decay_rate=0.25", "optimiser.lr=0.01")
    run = fit(tmp_path / "run", *options)
    assert isinstance(run._step.optimiser, Signed) and own.seen == (0.25, 0.9)
    assert any(name.endswith("head.weight.mean") for name in run.state())
    plan = run.recipe
    again = RunFolder.create(tmp_path / "again", plan, CPU)
    first = Trainer(plan, again, CPU)
    first.prepare()
    for _ in range(3):
        first.take_step()
    Trainer(plan, again, CPU).fit()
    states = [RunFolder(tmp_path / name).latest_checkpoint() / "state.safetensors" for name in ("run", "again")]
    assert states[0].read_bytes() == states[1].read_bytes()


def test_options_of_an_own_optimiser_are_typed_with_their_own_defaults(own):
    chosen = recipe.check({"optimiser": {"name": "signed"}}).optimiser
    assert chosen.options == {"decay_rate": 0.5} and chosen.momentum == 0.7
    assert recipe.check({}).optimiser.momentum == 0.9
    assert recipe.load("digits-softmax", ["optimiser.name=signed", "optimiser.momentum=0.1"]).optimiser.momentum == 0.1
    with pytest.raises(RecipeError, match=r"optimiser\.decay_rate should be a valid number"):
        recipe.load("digits-softmax", ["optimiser.name=signed", "optimiser.decay_rate=much"])
    with pytest.raises(RecipeError, match=r"optimiser\.decay_rat is not a known key\. Did you mean 'decay_rate'\?"):
        recipe.load("digits-softmax", ["optimiser.name=signed", "optimiser.decay_rat=1"])
    with pytest.raises(RecipeError, match=r"optimiser\.name unknown optimiser 'adan'\. Did you mean 'adam'\?"):
        recipe.load("digits-softmax", ["optimiser.name=adan"])


def test_an_own_schedule_is_followed(own, tmp_path):
    run = fit(tmp_path / "run", "schedule={name: sawtooth, final: 0.5, warmup: 2}", "optimiser.lr=0.1")
    rates = [row["lr"] for row in run.run.rows() if row["split"] == "train"]
    assert rates == pytest.approx([0.05, 0.1, 0.05, 0.075, 0.05, 0.075])
    plan = recipe.load("digits-softmax", ["regularisers=[{name: orthogonal, schedule: {name: sawtooth, period: 4}}]"])
    assert plan.regularisers[0].schedule.at(3, 10) == 0.25 + 0.75 * 0.75


def test_own_members_change_the_hash(own):
    hashes = {
        recipe.load("digits-softmax", [*o]).hash for o in ((), ("schedule=sawtooth",), ("optimiser.name=signed",))
    }
    assert len(hashes) == 3
    periods = {recipe.load("digits-softmax", [f"schedule={{name: sawtooth, period: {n}}}"]).hash for n in (2, 3)}
    assert len(periods) == 2


def test_schedules_are_the_formulas():
    def at(step, **options):
        return recipe.Schedule(**options).at(step, 110)

    assert [at(s, name="linear", final=0.5, warmup=10) for s in (4, 10, 60, 110)] == [0.5, 1.0, 0.75, 0.5]
    assert at(60, name="cosine", warmup=10) == pytest.approx(0.5) and at(110, name="cosine", warmup=10) == 0.0
    assert at(35, name="cosine", warmup=10) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert [at(s, name="steps", milestones=(50, 100)) for s in (49, 50, 100)] == pytest.approx([1.0, 0.1, 0.01])
    assert at(70) == 1.0


def test_an_optimiser_of_matrices_is_one_of_those_that_keep_them_orthogonal(own, tmp_path):
    plan = recipe.load("digits-opt", [*SHORT, "orthogonal=ogd", "optimiser.name=signed"])
    with pytest.raises(RecipeError, match=r"optimiser\.name must be one of sgd, adam, adamw where matrices"):
        Trainer(plan, RunFolder.create(tmp_path / "run", plan, CPU), CPU).prepare()


def test_an_own_augmentation_changes_training_images_alone(tmp_path):
    class Shade(Augmentation):
        """Images times a number."""

        draws = 2

        def __init__(self, *, least: float = 0.5) -> None:
            self.least = least

        def __call__(self, samples, draws):
            seen.append(draws)
            return samples * (self.least + (1 - self.least) * draws[0]).view(-1, 1, 1, 1)

    seen = []
    augmentations.register("shade")(Shade)
    try:
        part = "data.augment.parts=[{name: shade, least: 0.25}]"
        plain = recipe.load("digits-softmax").hash
        assert recipe.load("digits-softmax", ["data.augment.parts=[]"]).hash == plain
        assert recipe.load("digits-softmax", [part]).hash != plain
        run = fit(tmp_path / "run", part, "train.steps=2")
        assert len(seen) == 2 and seen[0].shape == (2, run.recipe.data.batch_size)
        images = run.data.train.images[:6]
        preprocess, batch = run.preprocess, run.recipe.data.batch_size
        whole = preprocess.augmented(images[:4], torch.Generator().manual_seed(1), 4, slice(0, 4))
        half = preprocess.augmented(images[2:4], torch.Generator().manual_seed(1), 4, slice(2, 4))
        assert torch.equal(whole[2:], half) and not torch.equal(whole, preprocess(images[:4])) and batch > 4
        expected = preprocess(images[:4]) * (0.25 + 0.75 * seen[2][0]).view(-1, 1, 1, 1)
        torch.testing.assert_close(whole, expected)
        with pytest.raises(RecipeError, match=r"data\.augment\.parts\.0\.lest is not a known key\. Did you mean"):
            recipe.load("digits-softmax", ["data.augment.parts=[{name: shade, lest: 1}]"])
        clouds = recipe.load("shapes-pointnet", ["data.augment.parts=[shade]"])
        with pytest.raises(RecipeError, match=r"data\.augment\.parts\.0 must be left out here"):
            runs.build(clouds, (3, 128), 8)
    finally:
        augmentations.remove("shade")

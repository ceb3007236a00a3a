"""The momentum of batch normalisation that decays over a run, against torch's own momentum set by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hypersphere import recipe
from hypersphere.nn import recalibrate
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.sections.batch_norm import BatchNorm
from hypersphere.train import Callback, Trainer
from hypersphere.train.distributed import synchronise_statistics

CPU = torch.device("cpu")
SHORT = ["train.steps=9", "train.tensorboard=false", "model.width=4", "data.batch_size=32", "train.log_every=1"]
DECAY = ["batch_norm.every=2", "batch_norm.floor=0.1"]


def trainer(folder: Path, device: torch.device, *overrides: str, callbacks=()) -> Trainer:
    plan = recipe.load("digits-softmax", [*SHORT, *overrides])
    return Trainer(plan, RunFolder.create(folder, plan, device), device, callbacks=callbacks)


def norms(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)]


class ByHand(Callback):
    """Sets torch's momentum before each step: 1/2 halved every two steps, at least 0.1."""

    def on_start(self, trainer, step):
        self.on_step(trainer, 0)

    def on_step(self, trainer, step):
        for layer in norms(trainer.model):
            layer.momentum = [0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1, 0.1, 0.1][step]


def compare(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-5) -> None:
    assert norms(wanted)
    for one, other in zip(norms(found), norms(wanted), strict=True):
        torch.testing.assert_close(one.running_mean, other.running_mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(one.running_var, other.running_var, rtol=tolerance, atol=tolerance)
        assert one.num_batches_tracked == other.num_batches_tracked


def test_the_momentum_is_that_of_the_published_code():
    """get_bn_decay of PointNet, in float64: batches of 32 clouds and 200,000 clouds to a halving."""
    part = BatchNorm(every=6250)
    for step in range(0, 100_000, 977):
        bn_momentum = 0.5 * 0.5 ** (step * 32 // 200_000)
        assert part.at(step) == 1 - min(0.99, 1 - bn_momentum) or part.at(step) == pytest.approx(
            1 - min(0.99, 1 - bn_momentum), abs=1e-15
        )
    assert (part.at(0), part.at(6249), part.at(6250), part.at(10**6)) == (0.5, 0.5, 0.25, 0.01)


def test_a_run_has_the_statistics_of_torch_with_that_momentum(tmp_path):
    found, wanted = (
        trainer(tmp_path / "found", CPU, *DECAY),
        trainer(tmp_path / "wanted", CPU, callbacks=[ByHand()]),
    )
    found.fit(), wanted.fit()
    compare(found.model, wanted.model)
    usual = trainer(tmp_path / "usual", CPU)
    usual.fit()
    with pytest.raises(AssertionError):
        compare(found.model, usual.model)
    rows = [row for row in found.run.rows() if row["split"] == "train"]
    shown = [row["batch_norm_momentum"] for row in rows]
    assert shown == pytest.approx([0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1, 0.1, 0.1])


def work_on(model: nn.Module, part: BatchNorm):
    plan = SimpleNamespace(model=SimpleNamespace(name="own"))
    return part.train(SimpleNamespace(recipe=plan, model=model, head=nn.Identity(), device=CPU))


def test_several_passes_in_a_step_count_in_turn_and_their_gradients_are_right():
    torch.manual_seed(0)
    first, second = torch.randn(8, 3), 2 + torch.randn(8, 3)
    found, wanted = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.3)
    work = work_on(nn.Sequential(found), BatchNorm(momentum=0.3, every=1, floor=0.3))
    work.before(5, 0.1)
    inputs = []
    for layer in (found, wanted):
        x, y = first.clone().requires_grad_(), second.clone().requires_grad_()
        (layer(x).pow(3).sum() + layer(y).exp().sum()).backward()
        inputs.append((x.grad, y.grad))
    compare(nn.Sequential(found), nn.Sequential(wanted))
    torch.testing.assert_close(inputs[0], inputs[1])


def test_evaluation_and_recalibration_are_left_alone():
    torch.manual_seed(0)
    x = torch.randn(16, 3) * 3 + 1
    found, wanted = nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(3))
    work_on(found, BatchNorm(every=1)).before(1, 0.1)
    before = {key: value.clone() for key, value in found.state_dict().items()}
    found.eval()(x)
    assert all(torch.equal(value, before[key]) for key, value in found.state_dict().items())
    recalibrate(found, [x]), recalibrate(wanted, [x])
    torch.testing.assert_close(found[0].running_mean, x.mean(0))
    torch.testing.assert_close(found[0].running_var, wanted[0].running_var)


def test_statistics_over_processes_follow_it_too(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 3) * 3 + 1
    found, wanted = nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(3, momentum=0.25))
    work_on(found, BatchNorm(every=1)).before(1, 0.1)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        synchronise_statistics(found)
        found(x), wanted(x)
    finally:
        torch.distributed.destroy_process_group()
    compare(found, wanted)


def test_mistakes_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"batch_norm must be left out for model\.name = 'digits-cnn', which has no"):
        trainer(tmp_path / "run", CPU, *DECAY, "model.norm=identity").fit()
    with pytest.raises(RecipeError, match=r"batch_norm\.floor must not exceed batch_norm\.momentum = 0\.5, got 0\.6"):
        recipe.load("digits-softmax", ["batch_norm={every: 5, floor: 0.6}"])
    with pytest.raises(RecipeError, match=r"batch_norm\.every"):
        recipe.load("digits-softmax", ["batch_norm={}"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", [["train.capture=true"], ["train.capture=true", "train.compile=true"]])
def test_a_captured_step_follows_the_momentum(tmp_path, mode):
    device = torch.device("cuda", 0)
    found = trainer(tmp_path / "found", device, *DECAY, *mode)
    wanted = trainer(tmp_path / "wanted", device, "train.capture=false", callbacks=[ByHand()])
    found.fit(), wanted.fit()
    compare(found.model, wanted.model, 1e-3)

"""Digits of losses at near pairs, near centres and poles, against references in float64 that take differences."""

import warnings

import pytest
import torch

import hypersphere as hs


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(name, *sizes, seed=1, **options):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that are small on purpose
        return hs.losses.create(name, *sizes, **options)


def off(found, wanted):
    """Largest error by the largest number."""
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())


# ------------------------------------------------------------------------------------------------ pairs


@pytest.mark.parametrize("norm", [10, 100, 1000])
@pytest.mark.parametrize("one_class", [True, False])
def test_contrastive_keeps_the_digits_of_near_pairs_of_long_features(norm, one_class):
    """Three pairs 1e-2 apart, of one class and of two, at equal and opposite directions."""
    start = norm * torch.nn.functional.normalize(draw(3, 16), dim=1)
    x = torch.cat([start, start + 1e-2 * torch.nn.functional.normalize(draw(3, 16, seed=1), dim=1)]).float()
    y = torch.tensor([0, 1, 2, 0, 1, 2]) if one_class else torch.arange(6)
    leaf = x.clone().requires_grad_()
    penalty = build("contrastive", 16, 6, m=1.0, pair_weight=1.0).penalty(hs.losses.Batch.of(leaf, y))
    (gradient,) = torch.autograd.grad(penalty, leaf)
    wide = x.double().requires_grad_()
    i, j = torch.triu_indices(6, 6, 1)
    distance = (wide[i] - wide[j]).norm(dim=1)
    wanted = (torch.where(y[i] == y[j], distance**2, (1 - distance).relu() ** 2) / 2).mean()
    (expected,) = torch.autograd.grad(wanted, wide)
    assert off(penalty, wanted) < 1e-5
    assert off(gradient, expected) < 1e-5


# ------------------------------------------------------------------------------------------------ types


def test_the_common_bias_of_sphereface2_is_not_rounded_where_it_is_divided():
    head = build("sphereface2", 8, 5, s=30.0).to(torch.bfloat16)
    assert head.offset().dtype == torch.float32
    assert float(head.offset().detach()) == pytest.approx(float(head.common_bias.detach()) / 30.0, rel=1e-6)


def test_schedules_have_the_digits_of_their_head():
    """A third of the way of a ramp and of an annealer: in a head in float64, to its precision."""
    x, y = draw(4, 8), torch.tensor([0, 1, 2, 3])
    found = []
    for size, start, gamma in (
        (hs.losses.Ramp(0.0, 1.0, length=3), 7.0, 0.3),
        (hs.losses.Ramp(0.0, 1.0, milestones=(1, 5, 6)), 7.0, 0.3),
        (1 / 3, 7.0 / 1.3, 0.0),
    ):
        annealer = hs.losses.LambdaAnnealer(start, gamma, minimum=0.0)
        found.append(float(build("cosface", 8, 5, s=4.0, m=size, annealer=annealer).double()(x, y).detach()))
    assert found[:2] == pytest.approx([found[2]] * 2, rel=1e-13)

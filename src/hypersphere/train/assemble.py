"""From what a recipe describes to a step: the work of its sections, their terms, parameter groups and the optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from hypersphere.data.preprocess import Preprocess
from hypersphere.recipe import Training, Work
from hypersphere.recipe.section import kinds
from hypersphere.train.averages import Averages
from hypersphere.train.batches import BatchOrder, make_batches
from hypersphere.train.distributed import World, sharded
from hypersphere.train.objective import Objective
from hypersphere.train.optimiser import make_optimiser, parameter_groups
from hypersphere.train.step import Step


def works_of(run: Training) -> dict[str, Work]:
    """What the sections of a recipe do in training, by section."""
    works = {}
    for key, kind in kinds().items():
        section = run.recipe.sections().get(key)
        with run.recipe.blamed(key):
            work = kind.without(run) if section is None else section.train(run)
        if work is not None:
            works[key] = work
    return works


def make_step(run: Training, works: Mapping[str, Work], averages: Averages, order: BatchOrder, world: World) -> Step:
    """The step of a run.

    Args:
        run: What is trained.
        works: What sections do in it.
        averages: Moving averages of the parameters.
        order: Which samples each step sees.
        world: This process among all.
    """
    recipe, train, preprocess = run.recipe, run.recipe.train, cast(Preprocess, run.preprocess)
    terms = {title: term for work in works.values() for title, term in work.terms().items()}
    objective = Objective(run.model, run.head, terms).to(run.device)
    for work in works.values():
        work.joined(terms)
    with recipe.blamed("optimiser"):
        groups = parameter_groups(run.model, run.head, recipe.optimiser, run.device)
    for work in works.values():
        work.group(groups)
    with recipe.blamed("optimiser"):
        optimiser = make_optimiser(groups, recipe.optimiser)
    for work in works.values():
        work.start(optimiser)
    forward = sharded(objective, world)
    if train.compile:
        forward = torch.compile(forward)
        preprocess.change = torch.compile(preprocess.change)  # type: ignore[method-assign]
    return Step(
        objective,
        forward,
        preprocess,
        make_batches(run.data.train, order, run.device, world, recipe.data.workers),
        optimiser,
        [*works.values()],
        precision=train.precision,
        batch_size=recipe.data.batch_size,
        world=world,
        seed=recipe.seed,
        clip_norm=train.clip_norm,
        averages=averages,
        channels_last=train.channels_last,
    )

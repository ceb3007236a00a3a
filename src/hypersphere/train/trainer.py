"""The trainer: from a recipe to a run folder with metrics, checkpoints and an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.data import Dataset
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.evaluate import Outputs
from hypersphere.losses import MarginSoftmax
from hypersphere.metrics.processes import agreed
from hypersphere.neurons import whole
from hypersphere.optim import row_parameters
from hypersphere.recipe import Recipe, RecipeError, Training
from hypersphere.runs import RunError, RunFolder, System, atomic_write, build, load_data
from hypersphere.runs.evaluation import metrics_of, outputs_of, write_evaluation
from hypersphere.runs.system import described
from hypersphere.train.assemble import make_step, works_of
from hypersphere.train.averages import Averages
from hypersphere.train.batches import BatchOrder
from hypersphere.train.callbacks import Callback, TensorBoard
from hypersphere.train.distributed import SHARDED_FROM, World, divides_head, whole_head
from hypersphere.train.records import DivergedError, Records, diverged
from hypersphere.train.signals import Interrupted, Stop
from hypersphere.train.state import load_divided, state_of, tell_restored
from hypersphere.train.step import CapturedStep, Step


class Trainer:
    """Trains what a recipe describes.

    Everything that a step changes is a tensor in :meth:`state`; everything random is a function of the seed and the
    step. A checkpoint is therefore that state and a step number, and a resumed run repeats the uninterrupted one.

    Args:
        recipe: What to do.
        run: Where results go; an existing run is continued from its last checkpoint.
        device: Where to compute.
        data_root: Where data sets are looked for.
        callbacks: What else should happen; run in the main process only.
        world: This process among all.
        data: The recipe's data set, where it is in memory already.

    Example:
        >>> import tempfile
        >>> from hypersphere import recipe
        >>> plan = recipe.load("digits-softmax", ["train.steps=2", "train.tensorboard=false"])
        >>> device = torch.device("cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = RunFolder.create(Path(folder) / "run", plan, device)
        ...     metrics = Trainer(plan, run, device).fit()
        >>> sorted(metrics)
        ['accuracy', 'cross_entropy', 'eer', 'energy', 'mean_angle', 'min_centre_angle']
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        device: torch.device,
        *,
        data_root: Path | None = None,
        callbacks: Sequence[Callback] = (),
        world: World | None = None,
        data: Dataset | None = None,
    ) -> None:
        self.recipe, self.run, self.device = recipe, run, device
        self.world = world or World()
        if recipe.evaluate.recalibrate and self.world.size > 1:
            raise RecipeError("evaluate.recalibrate needs a single process")
        self.data_root = data_root
        self.data = load_data(recipe, data_root) if data is None else data
        self.model, self.head, self.preprocess = self._build(self.data)
        self.order = self._make_order()
        facts = described(self.data)
        parts = (self.model, self.head, self.preprocess, self.data.class_names)
        self.system = System(*parts, recipe, self.data.train.shape, facts["images"], device, recipe.name)
        self.callbacks = list(callbacks) if self.world.main else []
        if recipe.train.tensorboard and self.world.main:
            self.callbacks.append(TensorBoard())
        self.averages = Averages([*self.model.parameters(), *self.head.parameters()], recipe.train.ema)
        self.step_number = 0
        self._stop = Stop()

    # ------------------------------------------------------------------------------------------- building

    def _make_order(self) -> BatchOrder:
        batch_size = self.recipe.data.batch_size
        try:
            self.world.share(batch_size, even=getattr(self.head, "shards", None) is None)
            return BatchOrder(len(self.data.train), batch_size, self.recipe.seed)
        except ArgumentError as error:
            raise self.recipe.blame(error, "data") from error

    def _build(self, data: Dataset) -> tuple[nn.Module, MarginSoftmax, Preprocess]:
        """Model, head and preprocessing, which is measured on the training images, on the device."""
        recipe = self.recipe
        model, head, preprocess = build(recipe, data.train.shape, len(data.class_names), data.context)
        if data.train.holds_images:
            preprocess.measure(data.train)
        elif recipe.data.normalise != "none":
            raise RecipeError(f"data.normalise must be 'none' for {recipe.data.name!r}, whose samples are no images")
        model, head, preprocess = model.to(self.device), head.to(self.device), preprocess.to(self.device)
        if self.world.size == 1:  # also where it is one of several processes that trains alone, to measure with
            head.sync_statistics = False
        asked = recipe.train.parallel.head
        if not isinstance(head, MarginSoftmax):  # of two players, which has no classes
            return model, head, preprocess
        if asked == "shard" and head.spec.sparse:  # clipping and norms look at gradients of whole tensors
            raise RecipeError("train.parallel.head must be 'replicate' with loss.sparse=true, got 'shard'")
        if divides_head(asked, head.classes, self.world) and not head.spec.sparse:
            if recipe.train.precision == "fp16":
                raise RecipeError("train.precision must be 'bf16' or 'fp32' with train.parallel.head=shard, got 'fp16'")
            head.shard(equal_batches=recipe.data.batch_size % self.world.size == 0)
        return model, head, preprocess

    def _capture(self) -> bool:
        asked = self.recipe.train.capture
        sparse = row_parameters(self.model) | row_parameters(self.head)
        possible = self.device.type == "cuda" and self.world.size == 1 and not sparse
        if asked and not possible:
            raise RecipeError("train.capture needs a CUDA device, a single process and dense gradients")
        return possible if asked is None else asked

    @property
    def division(self) -> str:
        """How the processes divide the work, and why, for people."""
        size, classes = self.world.size, getattr(self.head, "classes", 0)
        asked = self.recipe.train.parallel.head
        how = "its classes divided among them" if getattr(self.head, "shards", None) else "whole on each"
        limit = f"{classes:,} classes, divided from {SHARDED_FROM * size:,}"
        return f"{size} processes share each batch; the head: {how} ({limit if asked is None else 'as asked for'})"

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms."""
        return self._step.objective.terms

    # ---------------------------------------------------------------------------------------------- state

    def weights(self) -> dict[str, Tensor]:
        """The tensors that a trained model consists of, by name."""
        return self.system.weights() | self.averages.state()

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by name."""
        return state_of(self.weights(), self.works, self._step)

    def _resume(self) -> None:
        """Go on from the last checkpoint, or from the start."""
        if self.world.main:
            self.run.clean()
        self.world.barrier()
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is not None:
            self.run.check_plugins()
            state = self.state()
            saved = load_divided(checkpoint, state, self.recipe)
            tell_restored(self.works, state)
            self.step_number, self._records.pending = saved["step"], saved["pending"]
        measured = any(row["step"] == self.step_number and row["split"] == "test" for row in self.run.rows())
        self._unmeasured = self.step_number > 0 and self._evaluating() and not measured
        self.world.barrier()
        if self.world.main:
            if checkpoint is not None:
                self.run.note_conditions(self.device, self.step_number)
            self.run.rewind(self.step_number)
            self.run.write_facts(status="running", finished=None, **described(self.data))

    # ------------------------------------------------------------------------------------------- training

    def fit(self) -> dict[str, float]:
        """Train to the end of the recipe, from the last checkpoint on; returns the final test metrics."""
        with self.run.locked() if self.world.main else nullcontext():
            self._fit()
        metrics: dict[str, float] = self.run.evaluation()["metrics"]
        return metrics

    def _fit(self) -> None:
        self.prepare()
        status = "failed"
        try:
            self._notify("on_start", self.step_number)
            self._measure_sections(start=True)
            with self._stop.listening(alone=self.world.size == 1):
                if self._unmeasured:  # it failed after the step of the checkpoint
                    self._evaluate()
                while self.step_number < self.recipe.train.steps:
                    self.take_step()
            status = "finished"
        except DivergedError:
            status = "diverged"
            raise
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
            raise
        finally:
            self._notify("on_end", status)
            if self.world.main:
                self.run.finish(status, self.step_number)
                self.run.write_csv()

    def prepare(self) -> None:
        """Build the step, load the last checkpoint and capture the step where that is possible.

        The model was converted and rotated when it was built. The order of the rest: the work of sections, their terms
        and the parameter groups, the optimiser, several processes and compilation, the checkpoint, the capture.
        """
        parts = (self.model, self.head, self.preprocess, self.device, self.data)
        run = Training(self.recipe, *parts, keep=self._keep, replaced=self.averages.replaced)
        self.works = works_of(run)
        self._step = make_step(run, self.works, self.averages, self.order, self.world)
        self._records = Records(self._step, self.recipe.train.log_every, self.run)
        self._resume()
        self._train_mode()
        self._runner: Step | CapturedStep = self._step
        if self._capture() and self.step_number < self.recipe.train.steps:
            self._runner = CapturedStep(self._step, self.state(), self.step_number)

    def take_step(self) -> None:
        """Take the next step, and log, evaluate and save where they are due."""
        train = self.recipe.train
        self._step.scale_rates(self.recipe.schedule.at(self.step_number, train.steps))
        self._run_step()
        self._records.note()
        self.step_number += 1
        for work in self.works.values():
            work.after(self.step_number)
        self._notify("on_step", self.step_number)
        last = self.step_number == train.steps
        stopping = self._stop.signal is not None
        logging = last or self.step_number % train.log_every == 0
        evaluating = self._evaluating()
        saving = last or stopping or self.step_number % train.checkpoint_every == 0
        if logging or evaluating or saving:
            self._records.collect(self.step_number)
        if logging:
            self._log()
        if evaluating:
            self._evaluate()
        # After everything else: what precedes a checkpoint is never done twice.
        if saving:
            self._save()
        if self._stop.signal is not None and not last:
            raise Interrupted(
                f"stopped after step {self.step_number}; go on with `hypersphere resume {self.run.path}`",
                self._stop.signal,
            )

    def _evaluating(self) -> bool:
        """Whether the test metrics are due after this step."""
        every = self.recipe.evaluate.every
        return self.step_number == self.recipe.train.steps or (every > 0 and self.step_number % every == 0)

    def _run_step(self) -> None:
        try:
            self._runner.run(self.step_number)
        except ArgumentError as error:  # on a CPU the head looks at its features
            if error.argument != "features":
                raise
            if self.world.size == 1:
                self._records.collect(self.step_number)  # an earlier step may be where it began
            raise diverged(self.run, self.step_number + 1, "the features became non-finite", ["model"]) from error

    def _train_mode(self) -> None:
        self.model.train()
        self.head.train()

    def _log(self) -> None:
        """Write one row with the means since the last one."""
        means = self._records.means()
        if not means:
            return
        row: dict[str, Any] = {"step": self.step_number, "split": "train", **means}
        row["lr"] = float(self._step.optimiser.param_groups[0]["lr"])
        row |= self.head.schedules()
        for work in self.works.values():
            row |= work.logged()
        self._write("on_log", row)

    def _evaluate(self) -> None:
        """Write a row of test metrics, or keep the training where that fails: it could not be done again as easily."""
        try:
            self._measure()
        except DivergedError:
            raise
        except Interrupted:  # in a network that was trained to measure with
            self._save()
            raise
        except Exception as error:
            self._save()
            if not isinstance(error, HypersphereError):
                raise
            again = f"when that is set right, `hypersphere resume {self.run.path}` measures and goes on"
            raise RunError(f"{error}\nTraining is kept up to step {self.step_number}: {again}") from error

    def _measure(self) -> None:
        """Write a row of test metrics, which all processes measure together."""
        with self.averages.in_place(), whole_head(self.head), agreed(self.world.group):
            self._measure_all()
        self._train_mode()

    def _measure_all(self) -> None:
        outputs = self.outputs()
        if not bool(outputs.features.isfinite().all()):
            raise diverged(self.run, self.step_number, "the features of test images became non-finite", ["model"])
        metrics = self.metrics(outputs)
        if self.step_number == self.recipe.train.steps:
            with self.averages.in_place():
                write_evaluation(self.run, self.system, outputs, metrics, self.step_number)
        # Last: a row says that the evaluation need not be done again.
        self._write("on_evaluate", {"step": self.step_number, "split": "test", **metrics})
        self._measure_sections()

    def _measure_sections(self, start: bool = False) -> None:
        """Write the rows that sections measure; of the start, unless that was done before an interruption."""
        done = {row["split"] for row in self.run.rows()} if start and self.world.main else set()
        for work in self.works.values() if self.world.main else ():
            if work.split is not None and work.split not in done:
                with self.averages.in_place():
                    row = work.measured(self.step_number)
                self._write("on_measure", {"step": self.step_number, "split": work.split, **row})

    def _save(self) -> None:
        state = {name: whole(tensor) for name, tensor in self.state().items()}
        if self.world.main:
            extra = {"recipe_hash": self.recipe.hash, "pending": self._records.pending}
            folder = self.run.save_checkpoint(self.step_number, state, extra, self.recipe.train.keep_checkpoints)
            self.run.write_facts(step=self.step_number)
            self.run.write_csv()
            self._notify("on_checkpoint", folder)
        self.world.barrier()

    def _keep(self, name: str, content: Mapping[str, Any]) -> None:
        with atomic_write(self.run.path / name) as file:
            json.dump(content, file)

    def _write(self, hook: str, row: dict[str, Any]) -> None:
        if self.world.main:
            self.run.append(row)
            self._notify(hook, row)

    def _notify(self, hook: str, value: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, value)

    # ----------------------------------------------------------------------------------------- evaluation

    def outputs(self) -> Outputs:
        """Features and scores of the test split, and of the unseen classes where there are any."""
        with self.averages.in_place():
            return outputs_of(self.system, self.data, self.data_root, self.world.group)

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """What the recipe asks to measure."""
        with self.averages.in_place():
            return metrics_of(self.system, outputs)

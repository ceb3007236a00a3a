"""The trainer: from a recipe to a run folder with metrics, checkpoints and an evaluation."""

from __future__ import annotations

import math
import signal
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypersphere import orthogonal
from hypersphere.attacks import AdversarialBatch, attacks
from hypersphere.data import Dataset
from hypersphere.data.preprocess import Preprocess
from hypersphere.energy import MHE, Regulariser, energies, select
from hypersphere.energy.report import Report, report
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.evaluate import Outputs
from hypersphere.losses import MarginSoftmax
from hypersphere.nn import project_weights
from hypersphere.optim import OGD
from hypersphere.recipe import Recipe, RecipeError
from hypersphere.runs import RunError, RunFolder, System, build, load_checkpoint, load_data
from hypersphere.runs.evaluation import metrics_of, outputs_of, write_evaluation
from hypersphere.runs.seeds import derive_seed
from hypersphere.runs.system import described
from hypersphere.train.batches import BatchOrder, make_batches
from hypersphere.train.callbacks import Callback, EnergyLog, OrthogonalityLog, TensorBoard
from hypersphere.train.distributed import World, synchronise_statistics
from hypersphere.train.optimiser import learning_rate, make_optimiser, parameter_groups
from hypersphere.train.step import CapturedStep, Objective, Step, output_layer

SETTLE_EVERY = 100
"""Steps between two looks at the matrices of rotations."""
MIN_LOSS_SCALE = 2.0**-10
"""A loss scale below this means that gradients overflow however small they are made."""


class DivergedError(HypersphereError):
    """The loss or a gradient is no longer a number."""

    exit_code = 1


class Interrupted(HypersphereError):  # noqa: N818 (not an error of anyone's)
    """Training was asked to stop; ``signal_number`` says how."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


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
    ) -> None:
        self.recipe, self.run, self.device = recipe, run, device
        self.world = world or World()
        if recipe.evaluate.recalibrate and self.world.size > 1:
            raise RecipeError("evaluate.recalibrate needs a single process")
        self.data_root = data_root
        self.data = load_data(recipe, data_root)
        self.order = self._make_order()
        self.model, self.head, self.preprocess = self._build(self.data)
        facts = described(self.data)
        parts = (self.model, self.head, self.preprocess, self.data.class_names)
        self.system = System(*parts, recipe, self.data.train.shape, facts["images"], device, recipe.name)
        self.callbacks = list(callbacks) if self.world.main else []
        if recipe.train.tensorboard and self.world.main:
            self.callbacks.append(TensorBoard())
        if recipe.evaluate.energy and self.world.main:
            self.callbacks.append(EnergyLog())
        if recipe.orthogonal is not None and self.world.main:
            self.callbacks.append(OrthogonalityLog())
        self._stop_signal: int | None = None
        self._averages = [p.detach().clone() for p in self._parameters()] if recipe.train.ema is not None else None
        self.step_number = 0
        self._pending: list[list[float]] = []  # recorded steps that no metric row covers yet

    # ------------------------------------------------------------------------------------------- building

    def _make_order(self) -> BatchOrder:
        batch_size = self.recipe.data.batch_size
        try:
            self.world.share(batch_size)
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
        return model.to(self.device), head.to(self.device), preprocess.to(self.device)

    def _objective(self) -> Objective:
        """Model, head and regularisers, whose state is there and on the device."""
        recipe = self.recipe
        regularisers: dict[str, tuple[nn.Module, float, str]] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(recipe.seed, "regularisers"))
            for index, part in enumerate(recipe.regularisers):
                title = part.name if part.name not in regularisers else f"{part.name}-{index}"
                regularisers[title] = (recipe.build(energies, ("regularisers", index)), part.weight, part.target)
                try:  # one by one, to know which one is to blame
                    Objective(self.model, self.head, {title: regularisers[title]}).to(self.device).prepare()
                except ArgumentError as error:
                    raise recipe.blame(error, "regularisers", index) from error
        turned = recipe.orthogonal
        if turned is not None and turned.penalty:
            energy = orthogonal.Penalty(squared=turned.penalty_squared)
            regularisers["orthogonality"] = (energy, turned.penalty, "model")
        return Objective(self.model, self.head, regularisers).to(self.device)

    def _make_step(self) -> Step:
        recipe, train = self.recipe, self.recipe.train
        objective = self._objective()
        forward: Any = objective
        if self.world.size > 1:
            synchronise_statistics(objective)
            with warnings.catch_warnings():
                # Newer torch has another name for the option, which older torch does not know.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated")
                forward = DistributedDataParallel(objective, broadcast_buffers=False)
        if train.compile:
            forward = torch.compile(forward)
            self.preprocess.change = torch.compile(self.preprocess.change)  # type: ignore[method-assign]
        rates: dict[str, Any] = {}
        if recipe.orthogonal is not None:
            rates = {"rotation_lr": recipe.orthogonal.lr, "rotation_decay": recipe.orthogonal.weight_decay}
        try:
            groups = parameter_groups(self.model, self.head, recipe.optimiser, self.device, objective.energies, **rates)
        except ArgumentError as error:
            raise recipe.blame(error, "optimiser") from error
        return Step(
            objective,
            forward,
            self.preprocess,
            make_batches(self.data.train, self.order, self.device, self.world, recipe.data.workers),
            make_optimiser(groups, recipe.optimiser),
            precision=train.precision,
            batch_size=recipe.data.batch_size,
            world=self.world,
            seed=recipe.seed,
            clip_norm=train.clip_norm,
            averages=None if self._averages is None or train.ema is None else (self._averages, train.ema),
            channels_last=train.channels_last,
            adversary=self._adversary(),
        )

    def _adversary(self) -> AdversarialBatch | None:
        part = self.recipe.adversary
        if part is None:
            return None
        if not self.data.train.holds_images:
            raise RecipeError(f"adversary must be left out for {self.recipe.data.name!r}, whose samples are no images")
        augment = self.recipe.data.augment
        if self.recipe.data.normalise == "pixel" and (augment.crop or augment.flip or augment.vertical_flip):
            message = "where images are cropped or flipped together with the mean image: their pixels are not known"
            raise RecipeError(f"data.normalise must not be 'pixel' with an adversary {message}")
        return AdversarialBatch(self.recipe.build(attacks, ("adversary",)), part.share, self.preprocess)

    def _parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters(), *self.head.parameters()]

    def _capture(self) -> bool:
        asked = self.recipe.train.capture
        possible = self.device.type == "cuda" and self.world.size == 1
        if asked and not possible:
            raise RecipeError("train.capture needs a CUDA device and a single process")
        return possible if asked is None else asked

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms."""
        return self._step.objective.terms

    # ---------------------------------------------------------------------------------------------- state

    def weights(self) -> dict[str, Tensor]:
        """The tensors that a trained model consists of, by name."""
        found = self.system.weights()
        if self._averages is not None:
            found |= {f"average.{index}": tensor for index, tensor in enumerate(self._averages)}
        return found

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by name."""
        found = self.weights()
        learned = self._step.objective.energies.state_dict(keep_vars=True)
        found |= {f"regularisers.{name}": value for name, value in learned.items() if isinstance(value, Tensor)}
        names: dict[Tensor, str] = {tensor: name for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}
        for parameter, values in self._step.optimiser.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    found[f"optimiser.{names[parameter]}.{key}"] = value
        scaler = self._step.scaler
        if scaler.is_enabled():
            assert scaler._scale is not None and scaler._growth_tracker is not None
            found |= {"scaler.scale": scaler._scale, "scaler.growth": scaler._growth_tracker}
        return found

    def _resume(self) -> None:
        """Go on from the last checkpoint, or from the start."""
        if self.world.main:
            self.run.clean()
        self.world.barrier()
        checkpoint = self.run.latest_checkpoint()
        if checkpoint is not None:
            state = self.state()
            saved = load_checkpoint(checkpoint, state, self.recipe)
            # Not all that a regulariser saves is a tensor that it holds.
            prefix = "regularisers."
            learned = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            self._step.objective.energies.load_state_dict(learned, strict=False)
            self.step_number, self._pending = saved["step"], saved["pending"]
        measured = any(row["step"] == self.step_number and row["split"] == "test" for row in self.run.rows())
        self._unmeasured = self.step_number > 0 and self._evaluating() and not measured
        self.world.barrier()
        if self.world.main:
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
            with self._signals():
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
        """Build the step, load the last checkpoint and capture the step where that is possible."""
        self._step = self._make_step()
        if self.recipe.orthogonal is not None and self.recipe.orthogonal.every:
            seed = derive_seed(self.recipe.seed, "coordinates")
            optimiser = self._step.optimiser
            self._resampling = orthogonal.Resampling(self.model, self.recipe.orthogonal.every, optimiser, seed)
        self._resume()
        self._train_mode()
        self._runner: Step | CapturedStep = self._step
        if self._capture() and self.step_number < self.recipe.train.steps:
            self._runner = CapturedStep(self._step, self.state(), self.step_number)
        self._history = torch.zeros(self.recipe.train.log_every, len(self._step.columns), device=self.device)
        self._recorded = 0

    def take_step(self) -> None:
        """Take the next step, and log, evaluate and save where they are due."""
        train = self.recipe.train
        factor = learning_rate(self.recipe.schedule, train.steps, self.step_number)
        for group in self._step.optimiser.param_groups:
            group["lr"].fill_(group["base_lr"] * factor)
        self._step.rate = self._step.optimiser.param_groups[0]["base_lr"] * factor
        for index, part in enumerate(self.recipe.regularisers):
            if part.schedule is not None:
                weight = part.weight * learning_rate(part.schedule, train.steps, self.step_number)
                self._step.objective.weights[index].fill_(weight)
        self._run_step()
        self._history[self._recorded].copy_(self._step.record, non_blocking=True)
        self._recorded += 1
        self.step_number += 1
        project = self.recipe.project
        if project.every and self.step_number % project.every == 0:
            project_weights(self.model, project.s)  # in place, behind the step: a captured one stays as it is
        self._keep_orthogonal()
        self._notify("on_step", self.step_number)
        last = self.step_number == train.steps
        stopping = self._stop_signal is not None
        logging = last or self.step_number % train.log_every == 0
        evaluating = self._evaluating()
        saving = last or stopping or self.step_number % train.checkpoint_every == 0
        if logging or evaluating or saving:
            self._collect()
        if logging:
            self._log()
        if evaluating:
            self._evaluate()
        # After everything else: what precedes a checkpoint is never done twice.
        if saving:
            self._save()
        if stopping and not last:
            assert self._stop_signal is not None
            raise Interrupted(
                f"stopped after step {self.step_number}; go on with `hypersphere resume {self.run.path}`",
                self._stop_signal,
            )

    def _evaluating(self) -> bool:
        """Whether the test metrics are due after this step."""
        every = self.recipe.evaluate.every
        return self.step_number == self.recipe.train.steps or (every > 0 and self.step_number % every == 0)

    def _keep_orthogonal(self) -> None:
        """Draw new coordinates to turn, and set right what rounding has done to matrices, where it is due."""
        part = self.recipe.orthogonal
        if part is not None and part.every and self.step_number % part.every == 0:
            self._resampling.draw(self.step_number // part.every)
            redrawn = set(self._resampling.parameters())
            for average, parameter in zip(self._averages or (), self._parameters(), strict=self._averages is not None):
                if parameter in redrawn:  # what was averaged was a turn of other coordinates
                    average.copy_(parameter.detach())
        if self.step_number % SETTLE_EVERY == 0:
            for module in (self.model, self.head):
                orthogonal.settle(module)
            if isinstance(self._step.optimiser, OGD):
                self._step.optimiser.orthogonalise()

    def _run_step(self) -> None:
        try:
            self._runner.run(self.step_number)
        except ArgumentError as error:  # on a CPU the head looks at its features
            if error.argument != "features":
                raise
            if self.world.size == 1:
                self._collect()  # an earlier step may be where it began
            raise self._diverged(self.step_number + 1, "the features became non-finite", ["model"]) from error

    def _train_mode(self) -> None:
        self.model.train()
        self.head.train()

    def _collect(self) -> None:
        """Fetch the records of the last steps from the device and look at them: the only wait in training."""
        rows = self.world.mean(self._history[: self._recorded]).double().tolist()
        first = self.step_number - self._recorded
        self._recorded = 0
        scaler = self._step.scaler
        if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            raise self._diverged(self.step_number, "every gradient overflows in fp16", self._step.groups)
        for offset, row in enumerate(rows):
            self._check_finite(first + offset + 1, dict(zip(self._step.columns, row, strict=True)))
        self._pending += rows

    def _check_finite(self, step: int, record: dict[str, float]) -> None:
        bad = [name for name, value in record.items() if not math.isfinite(value)]
        terms = [name for name in bad if name in self.terms]
        # With a loss scaler, an overflowing gradient is skipped and the scale lowered: part of its work.
        harmless = self._step.scaler.is_enabled() and all(name.startswith("grad_norm/") for name in bad)
        if not bad or harmless:
            return
        if terms:
            what = f"{terms[0]!r} became {record[terms[0]]}"
        elif any(name.startswith("grad_norm/") for name in bad):
            what = "the gradient became non-finite"
        else:
            what = "the weights became non-finite"
        groups = dict.fromkeys(name.split("/", 1)[1] for name in bad if name not in self.terms)
        raise self._diverged(step, what, list(groups))

    def _diverged(self, step: int, what: str, groups: Sequence[str]) -> DivergedError:
        where = f" (parameter group {', '.join(map(repr, groups))})" if groups else " (all gradients were still finite)"
        checkpoint = self.run.latest_checkpoint()
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there was no checkpoint yet"
        return DivergedError(
            f"training diverged at step {step}: {what}{where}; {kept}. "
            "Start a new run with a lower optimiser.lr, train.clip_norm=1 or schedule.warmup"
        )

    def _log(self) -> None:
        """Write one row with the means since the last one."""
        if not self._pending:
            return
        means = torch.tensor(self._pending, dtype=torch.float64).mean(0).tolist()
        row: dict[str, Any] = {"step": self.step_number, "split": "train"}
        values = dict(zip(self._step.columns, means, strict=True))
        row["total"] = sum(values[term] for term in self.terms)
        row |= values
        row["lr"] = float(self._step.optimiser.param_groups[0]["lr"])
        row |= self.head.schedules()
        objective = self._step.objective
        weights = zip(objective.energies, self.recipe.regularisers, objective.weights.tolist(), strict=False)
        row |= {f"weight/{title}": weight for title, part, weight in weights if part.schedule is not None}
        self._pending = []
        self._write("on_log", row)

    def _evaluate(self) -> None:
        """Write a row of test metrics, or keep the training where that fails: it could not be done again as easily."""
        try:
            self._measure()
        except DivergedError:
            raise
        except Exception as error:
            self._save()
            if not isinstance(error, HypersphereError):
                raise
            again = f"when that is set right, `hypersphere resume {self.run.path}` measures and goes on"
            raise RunError(f"{error}\nTraining is kept up to step {self.step_number}: {again}") from error

    def _measure(self) -> None:
        """Write a row of test metrics; the other processes wait for the main one."""
        if self.world.main:
            outputs = self.outputs()
            if not bool(outputs.features.isfinite().all()):
                raise self._diverged(self.step_number, "the features of test images became non-finite", ["model"])
            metrics = self.metrics(outputs)
            if self.step_number == self.recipe.train.steps:
                with self._averaged():
                    write_evaluation(self.run, self.system, outputs, metrics, self.step_number)
            # Last: a row says that the evaluation need not be done again.
            self._write("on_evaluate", {"step": self.step_number, "split": "test", **metrics})
        self.world.barrier()
        self._train_mode()

    def _save(self) -> None:
        if self.world.main:
            extra = {"recipe_hash": self.recipe.hash, "pending": self._pending}
            folder = self.run.save_checkpoint(self.step_number, self.state(), extra, self.recipe.train.keep_checkpoints)
            self.run.write_facts(step=self.step_number)
            self.run.write_csv()
            self._notify("on_checkpoint", folder)
        self.world.barrier()

    def _write(self, hook: str, row: dict[str, Any]) -> None:
        if self.world.main:
            self.run.append(row)
            self._notify(hook, row)

    def _notify(self, hook: str, value: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, value)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn Ctrl-C and a polite kill into a stop after the current step, with a checkpoint."""

        def note(number: int, frame: types.FrameType | None) -> None:
            if self._stop_signal is not None:
                raise KeyboardInterrupt  # asked twice: stop at once
            self._stop_signal = number

        # Several processes would stop at different steps; other threads cannot receive signals.
        alone = self.world.size == 1 and threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if alone else ()
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ----------------------------------------------------------------------------------------- evaluation

    def outputs(self) -> Outputs:
        """Features and scores of the test split, and of the unseen classes where there are any."""
        with self._averaged():
            return outputs_of(self.system, self.data, self.data_root)

    def metrics(self, outputs: Outputs) -> dict[str, float]:
        """What the recipe asks to measure."""
        with self._averaged():
            return metrics_of(self.system, outputs)

    def energies(self, energy: Regulariser | None = None) -> Report:
        """Energy of every layer of the model and of the head, beside the least there is and that of random directions.

        Args:
            energy: Energy to measure; by default in half space with s = 2, the same for all runs to be compared.
        """
        energy = energy or MHE(half_space=True)
        layers = select(self.model, output=None)
        if getattr(self.head, "centres", 1) == 1:
            layers += output_layer(self.head)
        with self._averaged():
            return report(layers, energy)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put the moving averages in place of the weights, where there are any."""
        if self._averages is None:
            yield
            return
        parameters = [p.detach() for p in self._parameters()]
        trained = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(parameters, trained)

"""Images a second of a whole CIFAR-size training step, plain and captured in one CUDA graph, in one run.

The step is the trainer's own: batch and augmentation on the device, forward, backward, SGD with momentum, the
record of losses and norms. On a GPU machine:

    python benchmarks/train_step.py --rows docs/rows/train_step.json

On a CPU it runs a smaller case and is only good for ratios.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import tempfile
import time
from pathlib import Path

import torch

from hypersphere import recipe
from hypersphere.data import Dataset, TensorSplit
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import RunFolder, code_version, pick_device
from hypersphere.train import Trainer

FLOPS_PER_IMAGE = 959e6
"""Forward and backward of CNN-9 (64/96/128) on a 32x32 image: three times 2 x 160 M multiply-adds."""

WAYS = {
    "plain loop, fp32": {},
    "plain loop, bf16": {"precision": "bf16", "channels_last": True},
    "torch.compile, bf16": {"precision": "bf16", "channels_last": True, "compile": True},
    "captured, fp32": {"capture": True},
    "captured, bf16": {"precision": "bf16", "channels_last": True, "capture": True},
    "captured and compiled, bf16": {"precision": "bf16", "channels_last": True, "compile": True, "capture": True},
    "captured and compiled, fp16": {"precision": "fp16", "channels_last": True, "compile": True, "capture": True},
}


def synthetic(images: int) -> Dataset:
    """Random images of CIFAR-100's shape; speed does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(100, (images,), generator=generator)
    split = TensorSplit(pixels, labels)
    return Dataset("synthetic", tuple(map(str, range(100))), split, split)


class BenchmarkTrainer(Trainer):
    """A trainer on synthetic data."""

    def _load_data(self, root: Path | None) -> Dataset:
        return synthetic(50_000 if self.device.type == "cuda" else 2_000)


def prepared(way: dict[str, object], batch: int, device: torch.device, folder: Path) -> Trainer:
    """A trainer that is ready to take steps."""
    plan = recipe.check(
        {
            "data": {"name": "cifar100", "batch_size": batch, "augment": {"crop": 4, "flip": True}},
            "model": {"name": "plain-cnn", "dim": 256},
            "loss": {"name": "softmax"},
            "optimiser": {"lr": 0.01},
            "train": {"steps": 10**6, "tensorboard": False, "capture": False, **way},
        }
    )
    trainer = BenchmarkTrainer(plan, RunFolder.create(folder, plan, device), device)
    trainer.prepare()
    return trainer


def images_per_second(trainer: Trainer, steps: int) -> float:
    """Speed over ``steps`` steps, waiting for the device at the end only (and where the trainer logs)."""
    synchronise = torch.cuda.synchronize if trainer.device.type == "cuda" else (lambda: None)
    synchronise()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.take_step()
    synchronise()
    return steps * trainer.recipe.data.batch_size / (time.perf_counter() - start)


def main() -> None:
    """Print the table, and write rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rows", type=Path, help="JSON file for docs/rows")
    parser.add_argument("--steps", type=int, default=0, help="timed steps a repetition")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    gpu = device.type == "cuda"
    steps = arguments.steps or (300 if gpu else 2)
    ways = WAYS if gpu else {name: way for name, way in WAYS.items() if "captured" not in name and "fp32" in name}
    hardware = torch.cuda.get_device_name() if gpu else "CPU"
    print(f"{hardware}, torch {torch.__version__}, {code_version()}")
    rows = []
    for batch in (128, 512) if gpu else (32,):
        scratch = Path(tempfile.mkdtemp())
        trainers = {name: prepared(way, batch, device, scratch / str(i)) for i, (name, way) in enumerate(ways.items())}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for trainer in trainers.values():
            images_per_second(trainer, min(steps, 60))
        # Round-robin: a change of clocks meets every way alike.
        for _ in range(5 if gpu else 1):
            for name, trainer in trainers.items():
                speeds[name].append(images_per_second(trainer, steps))
        shutil.rmtree(scratch)
        print(f"\nCNN-9 64/96/128, 100 classes, batch {batch}")
        for name, values in speeds.items():
            middle = sorted(values)[len(values) // 2]
            ratio = middle / sorted(speeds["plain loop, fp32"])[len(values) // 2]
            spread = (max(values) - min(values)) / middle
            print(
                f"{name:32s} {middle:10,.0f} images/s  {ratio:5.2f} x plain  spread {spread:.1%}"
                f"  {middle * FLOPS_PER_IMAGE / 1e12:6.1f} TFLOP/s"
            )
            rows.append(
                ResultRow(
                    kind="benchmark",
                    group=f"Whole training step, CNN-9 at 32x32, batch {batch}",
                    what=name,
                    metric="images/s",
                    unit="",
                    mean=middle,
                    interval=None,
                    seeds=(0,),
                    command="python benchmarks/train_step.py",
                    version=code_version(),
                    hardware=f"{hardware}, torch {torch.__version__}",
                    date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                    note=f"median of {len(values)} interleaved repetitions of {steps} steps: augmentation, forward, "
                    "backward, SGD with momentum and the logging of losses and norms included",
                )
            )
    if arguments.rows:
        write_rows(arguments.rows, rows)


if __name__ == "__main__":
    main()

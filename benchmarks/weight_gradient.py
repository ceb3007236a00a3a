"""What the gradient by class weights changes in training: through the division by their norms, or the raw one.

    python benchmarks/weight_gradient.py --seeds 3

trains recipes with both, and prints a table: mean and standard deviation over the seeds, and the mean norm of the class
weights at the end, which is no part of the function.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import hypersphere as hs
from hypersphere import recipe
from hypersphere.runs.folder import RunFolder
from hypersphere.train import Trainer

METRICS = {"accuracy": ("accuracy, %", 100.0), "mean_angle": ("angle to own centre, °", 1.0), "eer": ("EER, %", 100.0)}


def measured(name: str, option: str, seed: int, folder: Path, epochs: int | None) -> dict[str, float]:
    """Metrics of one run."""
    overrides = [f"loss.weight_gradient={option}", f"seed={seed}"]
    overrides += [] if epochs is None else [f"train.epochs={epochs}"]
    plan, cpu = recipe.load(name, overrides), torch.device("cpu")
    run = RunFolder.create(folder / f"{name}-{option}-{seed}", plan, cpu)
    Trainer(plan, run, cpu).fit()
    return {**run.evaluation()["metrics"], "norm": hs.load(run.path).head.weight.norm(dim=1).mean().item()}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["digits-a-softmax", "digits-arcface"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=None)
    options = parser.parse_args()
    columns = [title for title, _ in METRICS.values()]
    print(f"| recipe | weight_gradient | {' | '.join(columns)} | norm of the weights |\n|{'---|' * (3 + len(columns))}")
    for name in options.recipes:
        for option in ("tangent", "raw"):
            with tempfile.TemporaryDirectory() as folder:
                runs = [measured(name, option, seed, Path(folder), options.epochs) for seed in range(options.seeds)]
            cells = []
            for metric, factor in [*((key, factor) for key, (_, factor) in METRICS.items()), ("norm", 1.0)]:
                values = torch.tensor([run[metric] * factor for run in runs], dtype=torch.float64)
                cells.append(f"{values.mean():.2f} ± {values.std():.2f}")
            print(f"| {name} | {option} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

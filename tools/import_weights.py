"""Turn published weights, stored as plain arrays, into a safetensors file or a run that hypersphere reads.

The arrays have the names and shapes of the network's ``state_dict``; all of them must fit.

Example:
    python tools/import_weights.py copies/mobilefacenet_112x96_casia.npz mobilefacenet.safetensors
    python tools/import_weights.py copies/mobilefacenet_112x96_casia.npz runs/mobilefacenet --run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from hypersphere import losses, models, recipe
from hypersphere.data.preprocess import Preprocess
from hypersphere.runs import RunFolder


def read(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """The arrays of an npz file as the state of ``model``, whose own they must be."""
    with np.load(path) as arrays:
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise SystemExit(f"{path} has no weights of this network: {error}") from error
    return state


def write_run(folder: Path, name: str, model: nn.Module, shape: tuple[int, int, int], classes: int) -> None:
    """A run with these weights at step 0; its classifier, of which the weights know nothing, is random."""
    plan = recipe.check(
        {
            "name": name,
            "help": "Published weights.",
            "data": {"name": "celeba-subset", "normalise": "half"},
            "model": {"name": name},
            "loss": {"name": "softmax"},
        }
    )
    run = RunFolder.create(folder, plan, torch.device("cpu"))
    head = losses.create("softmax", model.dim, classes)
    parts = {"model": model, "head": head, "preprocess": Preprocess(shape, "half", plan.data.augment)}
    tensors = {f"{part}.{key}": value for part, module in parts.items() for key, value in module.state_dict().items()}
    run.save_checkpoint(0, tensors, {"pending": []}, keep=1)
    run.write_facts(shape=shape, images=True, class_names=[str(number) for number in range(classes)])
    run.finish("finished", 0)


def main() -> None:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="npz file of the weights")
    parser.add_argument("target", type=Path, help="safetensors file, or folder of the run, to write")
    parser.add_argument("--model", default="mobilefacenet", help="name of the network")
    parser.add_argument("--shape", type=int, nargs=3, default=(3, 112, 96), help="channels, height and width")
    parser.add_argument("--run", action="store_true", help="write a run, which commands take")
    parser.add_argument("--classes", type=int, default=282, help="classes of the data of the run")
    arguments = parser.parse_args()
    channels, height, width = arguments.shape
    model = models.create(arguments.model, (channels, height, width))
    state = read(arguments.source, model)
    if arguments.run:
        write_run(arguments.target, arguments.model, model, (channels, height, width), arguments.classes)
    else:
        safetensors.torch.save_file(state, arguments.target)
    print(f"{arguments.target}: {len(state)} tensors of {arguments.model}")


if __name__ == "__main__":
    main()

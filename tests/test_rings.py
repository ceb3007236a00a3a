"""The core stands alone: it runs where nothing but torch and numpy is installed."""

import os
import subprocess
import sys
from pathlib import Path

import hypersphere

ROOT = Path(hypersphere.__file__).parent
CORE = {
    *("errors", "registry", "geometry", "angular", "margins", "selection", "neurons"),
    *("losses", "energy", "nn", "orthogonal"),
    *("optim", "optimisers", "schedules", "metrics", "diagnostics", "landscape", "attacks"),
}

BLOCKED = [
    "pydantic",
    "yaml",
    "typer",
    "rich",
    "safetensors",
    "sklearn",
    "PIL",
    "plotly",
    "matplotlib",
    "tensorboard",
    "lightning",
    "scipy",
    "pytorch_metric_learning",
]
PROGRAM = f"""
import sys

sys.modules.update(dict.fromkeys({BLOCKED!r}))  # as if not installed, for those who look before they import, too
try:
    import pydantic
except ImportError:
    pass
else:
    raise SystemExit("the block does not work")

import torch
import hypersphere as hs

assert not any(m.startswith("hypersphere.") for m in sys.modules)  # nothing before it is used
for name in hs.__all__:
    getattr(hs, name)
for name in set(hs.losses.losses) - {{"gan"}}:  # which takes no labels
    loss = hs.losses.create(name, 8, 5)(torch.randn(4, 8, requires_grad=True), torch.tensor([0, 4, 2, 2]))
    loss.backward()
    assert loss.isfinite()
hs.energy.MHE()(hs.nn.factory("linear")(3, 4)).backward()
for name in hs.nn.operators:
    layer = hs.nn.create(name, "linear")(3, 4)
    (layer(torch.randn(2, 3)).sum() + hs.energy.Orthonormal()(layer)).backward()
scores, same = torch.linspace(0, 1, 40), torch.arange(40) % 2 == 0
assert hs.metrics.verification_summary(scores, same, fars=[0.5], samples=10)["auc"].value < 1
assert hs.metrics.identify(torch.eye(2), [0, 1], torch.eye(2), [0, 1]).rank.tolist() == [1, 1]
assert hs.metrics.lfw10(torch.randn(40, 3), torch.randn(40, 3), same, torch.arange(40) // 20).folds
episodes = torch.eye(3).view(1, 3, 1, 3)
assert hs.metrics.classify(episodes, episodes, "nearest").flatten().tolist() == [0, 1, 2]
assert hs.schedules.create("cosine")(50, 0.5) == 0.5
hs.optimisers.create("sgd", [dict(params=[layer.weight], lr=torch.tensor(0.1))]).step()
assert hs.metrics.feature_distance(torch.randn(9, 2), torch.randn(9, 2)) > 0
print(*sorted(m for m in sys.modules if m.startswith("hypersphere.")))
for needy in (lambda: hs.load("run"), lambda: hs.testing.check("margin", "additive-angle"), hs.testing.contracts):
    try:
        needy()
    except ModuleNotFoundError as error:
        assert str(error).endswith('is not installed: pip install "hypersphere[workbench]"'), error
    else:
        raise SystemExit("this needs the workbench")
"""


def test_core_runs_without_the_packages_of_the_workbench():
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {module.split(".")[1] for module in done.stdout.split()}
    assert loaded == CORE

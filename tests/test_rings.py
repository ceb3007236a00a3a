"""The core stands alone: torch, numpy, the standard library and nothing of the workbench."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import hypersphere

ROOT = Path(hypersphere.__file__).parent
CORE = {
    *("errors", "registry", "geometry", "angular", "margins", "losses", "energy", "nn", "orthogonal"),
    *("optim", "metrics", "diagnostics", "landscape", "attacks"),
}
ALLOWED = {"torch", "triton", "numpy", "hypersphere"} | sys.stdlib_module_names


def source_of(module):
    """File of a module of the package, or None where the name is not a module."""
    path = ROOT.parent.joinpath(*module.split("."))
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.exists()), None)


def imports_of(path):
    """Every module that a file imports anywhere in it, as absolute dotted names."""
    parts = list(path.relative_to(ROOT.parent).with_suffix("").parts)
    package = parts[:-1]  # of a package's __init__ this is the package itself
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if name.startswith("hypersphere") and source_of(name):
                    yield name


def test_core_sources_import_only_torch_numpy_and_the_standard_library():
    queue = [ROOT / "__init__.py"]
    for name in CORE:
        queue += sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / f"{name}.py"]
    assert len(queue) > len(CORE)
    seen = set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports_of(path):
            first, *rest = module.split(".")
            assert first in ALLOWED, f"{path.relative_to(ROOT)} imports {module}"
            if first == "hypersphere":
                assert not rest or rest[0] in CORE, f"{path.relative_to(ROOT)} reaches the workbench: {module}"
                queue += filter(None, [source_of(module)])


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
print(*sorted(m for m in sys.modules if m.startswith("hypersphere.")))
"""


def test_core_runs_without_the_packages_of_the_workbench():
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {module.split(".")[1] for module in done.stdout.split()}
    assert loaded == CORE

"""Packages stand on each other in one order, and know of each other what is public."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import hypersphere

ROOT = Path(hypersphere.__file__).parent

# Each line may import what stands on the lines above it; those on one line do not import each other.
CORE = (
    ("errors",),
    ("registry",),
    ("geometry",),
    ("angular",),
    ("margins",),
    ("neurons",),
    ("selection",),
    ("nn",),
    ("energy",),
    ("orthogonal",),
    ("losses",),
    ("optim", "optimisers", "schedules"),
    ("metrics",),
    ("diagnostics", "landscape", "attacks"),
)
WORKBENCH = (
    ("plugins",),
    ("data",),
    ("models",),
    ("evaluate",),
    ("recipes",),
    ("recipe",),  # names members of all the families above
    ("sections",),
    ("drawing",),
    ("runs",),
    ("train",),
    ("plot", "report"),
    ("results",),
    ("templates",),  # plugins as users write them
    ("cli",),
    ("tasks",),  # none of which imports another one, and all of which are found by their names
    ("reproduce",),  # whose commands are found by name, as those of tasks
    ("__main__",),
)
RANK = {package: rank for rank, line in enumerate((*CORE, *WORKBENCH)) for package in line}
BESIDE = "testing"  # may import everything and is imported by nothing
ALLOWED = {"torch", "triton", "numpy", "hypersphere"} | sys.stdlib_module_names
CORE_NAMES = {package for line in CORE for package in line}

# What is still to be moved: (module, name that it should not know).
EXCEPTIONS: set[tuple[str, str]] = set()


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def package_of(name):
    """``energy`` of ``hypersphere.energy.base``; each task is a package of its own; empty for the package itself."""
    parts = name.split(".")[1:]
    return ".".join(parts[: 2 if parts[:1] == ["tasks"] else 1])


class Module:
    """What a file of the package imports, which private names it takes by a dot, and which names it defines."""

    def __init__(self, source, name, is_package=False):
        self.name, self.package = name, package_of(name)
        tree = ast.parse(source)
        inside = name.split(".") if is_package else name.split(".")[:-1]
        members = {
            text
            for node in ast.walk(tree)
            for name, value in registered(node)
            if name == "members"
            for text in ast.walk(value)
        }
        self.imports, self.attributes, self.defined = set(), set(), set()
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    self.imports |= {alias.name for alias in node.names}
                case ast.ImportFrom():
                    base = inside[: len(inside) + 1 - node.level] if node.level else []
                    module = ".".join([*base, *([node.module] if node.module else [])])
                    self.imports |= {f"{module}.{alias.name}" for alias in node.names}
                case ast.Constant(value=str(text)) if text.isidentifier() and is_private(text):
                    self.defined.add(text)  # by setattr or as a buffer, maybe
                case ast.Constant(value=str(text)) if node not in members and is_module(text):
                    self.imports.add(text)  # for importlib, maybe; only registries may name who comes later
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.defined.add(node.name)
                case ast.Name(ctx=ast.Store()):
                    self.defined.add(node.id)
                case ast.Attribute(ctx=ast.Store()):
                    self.defined.add(node.attr)
                case ast.Attribute() if is_private(node.attr):
                    self.attributes.add(node.attr)


def registered(node):
    """Keywords of a call, and defaults of a function's arguments, by name."""
    if isinstance(node, ast.keyword):
        yield node.arg, node.value
    elif isinstance(node, ast.arguments):
        plain = (*node.posonlyargs, *node.args)[::-1]
        yield from ((a.arg, value) for a, value in zip(plain, node.defaults[::-1], strict=False))


def is_module(text):
    """Whether a text is the dotted name of a module of the package."""
    if not re.fullmatch(r"hypersphere(\.\w+)+", text):
        return False
    path = ROOT.parent.joinpath(*text.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


@cache
def modules():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found.append(Module(path.read_text("utf-8"), ".".join(parts[:-1] if is_package else parts), is_package))
    return found


def faults_of_order(module):
    """Names that a module imports of packages that do not stand below its own."""
    own = module.package
    if own in ("", BESIDE):  # the package itself imports when asked, which another test holds
        return
    for name in module.imports:
        other = package_of(name)
        first, other_first = own.partition(".")[0], other.partition(".")[0]
        if not name.startswith("hypersphere.") or other in (own, "__version__"):
            continue
        if other_first == BESIDE or RANK.get(first, 0) <= RANK.get(other_first, len(RANK)):
            yield name


# Attributes of torch's and of Python's own classes with which members of ours may share their names.
FOREIGN = {*dir(nn.Module()), *dir(torch.Tensor), *dir(torch.optim.Optimizer), *dir(ast.AST), "_fields"}


def faults_of_privacy(module, others):
    """Private names of other packages that a module imports or takes from an object of theirs."""
    for name in module.imports:
        theirs = name.startswith("hypersphere.") and package_of(name) != module.package
        if theirs and any(map(is_private, name.split("."))):
            yield name
    own = {name for other in others if other.package == module.package for name in other.defined}
    for name in module.attributes - own - FOREIGN:
        home = next((other.name for other in others if name in other.defined), None)
        if home is not None:
            yield f"{home}.{name}"


def faults_of_core(module):
    """Names that a module of the core imports of other libraries than torch and numpy, or of the workbench."""
    for name in module.imports:
        first = name.partition(".")[0]
        if first not in ALLOWED or (first == "hypersphere" and package_of(name) not in (*CORE_NAMES, "__version__")):
            yield name


def test_every_package_has_its_place():
    found = {module.package.partition(".")[0] for module in modules()}
    assert found - {"", BESIDE} <= set(RANK)


def test_a_package_imports_what_stands_below_it_and_is_public():
    found = [
        (module.name.removeprefix("hypersphere."), name)
        for module in modules()
        for name in (*faults_of_order(module), *faults_of_privacy(module, modules()))
    ]
    new = sorted((module, name) for module, name in found if (module, package_of(name)) not in EXCEPTIONS)
    assert not new, f"imported from above, or private: {new}"


def test_the_core_imports_torch_numpy_and_the_standard_library_only():
    core = [module for module in modules() if module.package in CORE_NAMES]
    assert len(core) > 50
    assert [(module.name, name) for module in core for name in faults_of_core(module)] == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import hypersphere.train", "hypersphere.train"),
        ("def f():\n    from hypersphere.train import Trainer", "hypersphere.train.Trainer"),
        ("from hypersphere import train", "hypersphere.train"),
        ("from ..train import step", "hypersphere.train.step"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hypersphere.cli", "hypersphere.cli"),
        ("import_module('hypersphere.report')", "hypersphere.report"),
        ("from hypersphere.tasks.clouds import data", "hypersphere.tasks.clouds.data"),
        ("from hypersphere.testing import check", "hypersphere.testing.check"),
        ("from hypersphere import geometry", None),
        ("from hypersphere.models.networks import models", None),
        ("Registry('model', members=('hypersphere.tasks.*.models', 'hypersphere.report.sections'))", None),
    ],
)
def test_an_import_upwards_is_seen(source, fault):
    module = Module(source, "hypersphere.models.mine")
    assert list(faults_of_order(module)) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from hypersphere.geometry import _unit", "hypersphere.geometry._unit"),
        ("from hypersphere import _kernels", "hypersphere._kernels"),
        ("from hypersphere import geometry\ngeometry._unit(x)", "hypersphere.geometry._unit"),
        ("def f(thing):\n    return thing._unit(1)", "hypersphere.geometry._unit"),
        ("def f(tensor):\n    return tensor._version", None),
        ("class Mine:\n    def _unit(self):\n        return self._unit()", None),
    ],
)
def test_a_private_name_of_another_package_is_seen(source, fault):
    theirs = Module("def _unit(x):\n    return x._version", "hypersphere.geometry")
    module = Module(source, "hypersphere.models.mine")
    assert list(faults_of_privacy(module, [theirs, module])) == ([fault] if fault else [])


def test_tasks_do_not_import_each_other():
    module = Module("from hypersphere.tasks.clouds.data import unit_ball", "hypersphere.tasks.graphs.data")
    assert list(faults_of_order(module)) == ["hypersphere.tasks.clouds.data.unit_ball"]
    assert list(faults_of_order(Module(module.name, "hypersphere.tasks.clouds.figures"))) == []

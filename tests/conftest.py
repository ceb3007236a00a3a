"""One seed and one thread for every test; Hypothesis draws the same examples each time. And what tests share."""

import sys

import hypothesis
import pytest
import torch

import hypersphere as hs
from helpers.browser import browser  # noqa: F401 - a fixture
from helpers.command_line import Result
from hypersphere import cli, plugins

hypothesis.settings.register_profile("hypersphere", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("hypersphere")


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def start(monkeypatch, capsys):
    """Starts the entry point as the installed command does, in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["hypersphere", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Result(stopped.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def no_plugins(monkeypatch):
    """No plugin is loaded, and what a test loads is gone afterwards."""
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(plugins, "_named", {})
    monkeypatch.setattr(plugins, "_failed", set())
    modules = set(sys.modules)
    before = {registry: {entry.name for entry in registry.entries()} for registry in hs.registry.registries()}
    yield
    for registry, entry in list(plugins._new(before)):
        registry.remove(entry.name)
    for name in set(sys.modules) - modules:
        if name.startswith(("hypersphere_plugin_", "own_")):  # libraries are loaded once a process
            del sys.modules[name]

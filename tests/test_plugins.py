"""Plugins: loaded once, all or nothing, with the place of a mistake."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys

import pytest

import hypersphere as hs
from helpers.plugins import MARGIN, write
from hypersphere import plugins
from hypersphere.nn import operators
from hypersphere.plugins import PluginError

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_a_file_is_loaded_once_and_recorded(tmp_path):
    file = write(tmp_path, "mine.py", MARGIN.format(name="test-mine"))
    plugin = plugins.load(str(file))
    assert (plugin.name, plugin.path) == ("mine", file.resolve())
    assert plugin.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert plugin.members == (("margin", "test-mine"),)
    assert plugins.load(file) is plugin and plugins.loaded() == (plugin,)
    copy = write(tmp_path, "elsewhere/copy.py", file.read_text())
    assert plugins.load(copy) is plugin  # the same code under another name
    assert plugins.plugin_of(hs.margins.margins, "TEST-MINE-TOO") is plugin
    assert plugins.plugin_of(hs.margins.margins, "none") is None
    assert plugin.record() == {
        "name": "mine",
        "path": str(file.resolve()),
        "digest": plugin.digest,
        "members": [["margin", "test-mine"]],
    }


def test_a_file_that_changed_is_refused(tmp_path):
    file = write(tmp_path, "mine.py", MARGIN.format(name="test-mine"))
    plugins.load(file)
    file.write_text(file.read_text() + "\n# more\n")
    with pytest.raises(PluginError, match="has changed since it was loaded"):
        plugins.load(file)


@pytest.mark.parametrize(
    ("mistake", "line", "text"),
    [
        ("1 / 0\n", 15, "ZeroDivisionError: division by zero"),
        ("def broken(:\n", 15, "SyntaxError: "),
        ('hs.margins.margins.register("none")(Mine)\n', 15, "name 'none' is already a registered margin"),
        ("import no_such_module_at_all\n", 15, "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
    ],
)
def test_a_file_that_fails_leaves_nothing_and_names_the_line(tmp_path, mistake, line, text):
    file = write(tmp_path, "half.py", MARGIN.format(name="test-half") + mistake)
    known, modules = list(hs.margins.margins), set(sys.modules)
    with pytest.raises(PluginError) as caught:
        plugins.load(file)
    assert str(caught.value).startswith(f"plugin {file}, line {line}: {text}")
    assert list(hs.margins.margins) == known and "test-half-too" not in hs.margins.margins
    assert plugins.loaded() == () and set(sys.modules) == modules
    file.write_text(MARGIN.format(name="test-half"))  # mended, it loads
    assert plugins.load(file).members == (("margin", "test-half"),)


def test_what_is_not_there(tmp_path):
    with pytest.raises(PluginError, match=r"plugin '.*nowhere\.py': there is no such file"):
        plugins.load(tmp_path / "nowhere.py")
    for name in ("no_such_module", "hypersphere.no_such", "not a name"):
        with pytest.raises(PluginError, match=f"plugin '{name}': there is no installed plugin or module of this name"):
            plugins.load(name)


def test_a_module_and_a_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "own_margins.py", MARGIN.format(name="test-module"))
    write(tmp_path, "own_package/__init__.py", "from own_package import inner\n")
    inner = write(tmp_path, "own_package/inner.py", MARGIN.format(name="test-inner") + "1 / 0\n")
    assert plugins.load("own_margins").members == (("margin", "test-module"),)
    with pytest.raises(PluginError, match=rf"^plugin {inner}, line 15: ZeroDivisionError"):
        plugins.load("own_package")
    assert "test-inner" not in hs.margins.margins
    inner.write_text(MARGIN.format(name="test-inner") + "# mended\n")
    plugin = plugins.load("own_package")
    assert plugin.members == (("margin", "test-inner"),) and plugin.path == tmp_path / "own_package"


def test_installed_plugins(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "own_installed.py", MARGIN.format(name="test-installed"))
    point = importlib.metadata.EntryPoint("spheres", "own_installed", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (point,) if group == plugins.GROUP else ())
    (plugin,) = plugins.load_installed()
    assert (plugin.name, plugin.members) == ("spheres", (("margin", "test-installed"),))
    assert plugins.load("spheres") is plugin and plugins.load("own_installed") is plugin
    with pytest.raises(PluginError, match=r"Did you mean 'spheres'\? Installed plugins: spheres\."):
        plugins.load("sphere")


def test_an_own_operator_with_inherited_annotations(tmp_path):
    """They are texts, and the names in them are those of the parent's module."""
    text = '''from __future__ import annotations
from dataclasses import dataclass
from torch import Tensor
from hypersphere.nn import operators
from hypersphere.nn.operators import Operator

@operators.register("test-square-root")
@dataclass(frozen=True)
class SquareRoot(Operator):
    """Square root of the lengths.

    Args:
        power: Exponent of the lengths.
    """

    power: float = 0.5
'''
    plugins.load(write(tmp_path, "operator_of_mine.py", text))
    options = {option.name: option for option in operators["test-square-root"].options}
    assert {option.name for option in operators["sphere"].options} | {"power"} == set(options)
    angular = next(option for option in operators["sphere"].options if option.name == "angular")
    assert options["angular"] == angular and options["power"].annotation is float

"""Requirements for fastloop's own plugins. test_conformance.py tests the requirements for all plugins.

Modules:
    plugins/fastloop_plugins/default_plugins.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.plugins.installed import installed, is_own, load
from fastloop_plugins.default_plugins import DEFAULT_PLUGINS

OURS = [name for name, point in installed().items() if is_own(point)]


def test_required_plugins_are_installed():
    assert {"amp", "compile", "checkpoint-best", "dataloader-workers"} < set(OURS)
    assert set(DEFAULT_PLUGINS) < set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_plugin_module_has_a_docstring(name):
    text = Path(sys.modules[load(name).__module__].__file__).read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))


def test_importing_plugins_imports_no_torch():
    code = (
        f"import sys; from fastloop.plugins.resolve import load; [load(name) for name in {OURS!r}]; print('torch' in "
        "sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
        ).stdout.strip()
        == "False"
    )

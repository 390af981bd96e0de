"""What holds for every plugin of ours."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.options import describe, parse
from fastloop.plugin import Plugin
from fastloop.registry import installed, load

OURS = [name for name, point in installed().items() if point.dist is not None and point.dist.name == "fastloop"]


def test_there_are_the_plugins_of_the_mission():
    assert {"amp", "compile", "checkpoint-best", "dataloader-workers"} < set(OURS)
    assert {point.name for point in importlib.metadata.entry_points(group="fastloop.defaults")} < set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_it_is_declared_documented_and_its_options_take_their_own_defaults(name):
    cls = load(name)
    assert issubclass(cls, Plugin)
    assert cls.name == name
    module = sys.modules[cls.__module__]
    assert "plugins:" in (module.__doc__ or ""), "the module docstring shows a recipe snippet"
    assert f"- {name}" in (module.__doc__ or "")
    for field, row in zip(dataclasses.fields(cls.Config), describe(cls.Config), strict=True):
        assert row.help, f"{name}.{row.name} says what it does"
        if field.default is not dataclasses.MISSING:
            parse(cls.Config, {field.name: field.default}, name)


@pytest.mark.parametrize("name", OURS)
def test_it_keeps_to_a_size_that_reads_in_one_sitting(name):
    text = Path(sys.modules[load(name).__module__].__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 190
    assert ast.get_docstring(ast.parse(text))


def test_importing_all_of_them_imports_no_torch():
    code = f"import sys; from fastloop.registry import load; [load(name) for name in {OURS!r}]; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"

"""A file that a recipe names may import the modules beside it.

Modules:
    core/fastloop/recipe/importing.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fastloop.recipe import make_recipe
from fastloop.recipe.importing import import_file


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_file_imports_its_neighbour_from_another_folder():
    Path("job").mkdir()
    Path("job/neighbour_of_recipe.py").write_text("VALUE = 3\n")
    Path("job/code.py").write_text("from neighbour_of_recipe import VALUE\n")
    module = import_file("code.py", make_recipe({"output": "run"}, Path("job/recipe.yaml")), "model.module")
    assert module.VALUE == 3


def test_a_neighbour_does_not_hide_an_installed_module():
    Path("job").mkdir()
    Path("job/torchmetrics.py").write_text("raise RuntimeError('the wrong one')\n")
    Path("job/json.py").write_text("raise RuntimeError('the wrong one')\n")
    Path("job/code.py").write_text("import json, torchmetrics\n")
    module = import_file("code.py", make_recipe({"output": "run"}, Path("job/recipe.yaml")), "model.module")
    assert module.torchmetrics.MetricCollection is not None

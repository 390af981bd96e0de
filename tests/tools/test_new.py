"""``fastloop new plugin``: the files that it writes, and its errors. tests/packages/ tests the package itself.

Modules:
    plugins/fastloop_tools/new/_files.py
    plugins/fastloop_tools/new/command.py
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import partial
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fastloop import __version__
from fastloop.cli.plugins import KEYWORD
from fastloop.testing import assert_problem
from fastloop_tools.new import command
from fastloop_tools.new.command import LICENSES, TAKEN, described, first_unsupported, render


@pytest.fixture
def new(cli):
    """``new("night-watch")`` -> exit code, stdout, stderr."""
    return partial(cli, "new", "plugin")


def test_new_writes_package_and_prints_next_steps(new):
    code, out, _ = new("night-watch")
    assert code == 0
    written = {str(path.relative_to("night-watch")) for path in Path("night-watch").rglob("*") if path.is_file()}
    assert written == {
        ".github/workflows/ci.yaml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "recipe.yaml",
        "src/night_watch/__init__.py",
        "tests/conftest.py",
        "tests/test_night_watch.py",
    }
    assert set(written) < {line.removeprefix("night-watch/") for line in out.splitlines()}
    assert out.endswith(
        "Next steps:\n  cd night-watch\n  pip install -e '.[test]'\n  pytest\n  fastloop train recipe.yaml\n"
    )


def test_new_task_writes_the_rows_and_a_task_in_place_of_the_plugin(cli):
    assert cli("new", "task", "ticket-pairs")[0] == 0
    written = {str(path.relative_to("ticket-pairs")) for path in Path("ticket-pairs").rglob("*") if path.is_file()}
    plugin = {path.replace("night", "ticket").replace("watch", "pairs") for path in render("night-watch")}
    assert written == plugin | {"pairs.csv"}
    source = Path("ticket-pairs/src/ticket_pairs/__init__.py").read_text(encoding="utf-8")
    assert "class TicketPairs(TextTask):" in source
    assert "lowest" not in "".join(render("ticket-pairs", task=True).values())  # of the plugin's template


def test_help(new):
    code, out, _ = new("--help")
    assert code == 0
    assert all(option in out for option in ("--folder", "--license", "--author"))


def test_the_package_asks_for_this_fastloop_and_names_its_author(new):
    assert new("night-watch", "--folder", "here/it/goes", "--author", 'Ada "the first" Ünal \\')[0] == 0
    project = tomllib.loads(Path("here/it/goes/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["authors"] == [{"name": 'Ada "the first" Ünal \\'}]
    assert project["entry-points"]["fastloop.plugins"] == {"night-watch": "night_watch:NightWatch"}
    (wanted,) = project["dependencies"]
    versions = SpecifierSet(wanted.removeprefix("fastloop-train"))
    assert versions.contains(__version__, prereleases=True)
    assert not versions.contains("99.0")


@pytest.mark.parametrize(("version", "first"), [("0.1.0", "0.2"), ("0.2.0", "0.4"), ("0.9.3", "0.11"), ("1.4.0", "2")])
def test_a_package_supports_versions_in_which_deprecated_names_work(version, first):
    assert first_unsupported(Version(version)) == first


def test_a_package_carries_the_keyword_by_which_plugins_are_found():
    assert KEYWORD in tomllib.loads(render("night-watch")["pyproject.toml"])["project"]["keywords"]


def test_description_and_options_have_one_source(monkeypatch):
    files = render("night-watch")
    source = (
        files["src/night_watch/__init__.py"]
        .replace("Records the lowest", "Keeps the lowest")
        .replace("two reads", "two looks")
    )
    found = described(source.replace("default=10", "default=7"), "NightWatch")
    monkeypatch.setattr(command, "described", lambda *_: found)
    changed = render("night-watch")
    assert "A fastloop plugin that keeps the lowest training loss of a run, and its step.\n" in changed["README.md"]
    assert "| `every` | int | 7 | Steps between two looks of the loss. |\n" in changed["README.md"]
    description = tomllib.loads(changed["pyproject.toml"])["project"]["description"]
    assert description == "A fastloop plugin that keeps the lowest training loss of a run, and its step"
    assert "| `every` | int | 10 | Steps between two reads of the loss. |\n\n" in files["README.md"]


@pytest.mark.parametrize("license", LICENSES)
def test_licenses(license):
    files = render("night-watch", license, "Ada Lovelace")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project.get("license", "none") == license
    assert ("LICENSE" in files) == (license != "none")
    if license != "none":
        assert re.search(r"Copyright (\(c\) )?20\d\d,? Ada Lovelace\n", files["LICENSE"])


@pytest.mark.parametrize("task", [False, True], ids=["plugin", "task"])
@pytest.mark.parametrize("name", sorted(word.lower() for word in TAKEN) + ["a1-b2"])
def test_new_class_names_do_not_shadow_imports(name, task):
    files = render(name, task=task)
    module = ast.parse(files[f"src/{name.replace('-', '_')}/__init__.py"])
    *_, cls = (node.name for node in module.body if isinstance(node, ast.ClassDef))
    assert cls not in TAKEN
    assert task or f"import {cls}\n" in files[f"tests/test_{name.replace('-', '_')}.py"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["My_Plugin"], "wrong-format 'My_Plugin' 'my-plugin'?"),
        (["../up"], "wrong-format '../up' 'up'?"),
        (["9"], "wrong-format '9' 'my-plugin'"),
        (["amp"], "name-taken 'amp' fastloop-train"),
        (["json"], "name-taken 'json' 'my-json'"),
        (["class"], "name-taken 'class'"),
        (["night-watch", "--license", "mit"], "unknown-choice --license 'mit' Apache-2.0 BSD-3-Clause MIT none"),
        (["night-watch", "--license", "Apache-2"], "unknown-choice --license 'Apache-2' 'Apache-2.0'?"),
        (["night-watch", "--author", "Ada\nLovelace"], "wrong-format --author"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_new_rejects_invalid_arguments_and_writes_nothing(new, arguments, expected):
    code, out, err = new(*arguments)
    assert (code, out) == (2, "")
    assert_problem(err, expected)
    assert not list(Path().iterdir())


def test_no_file_is_overwritten(new):
    Path("night-watch").mkdir()
    Path("night-watch/README.md").write_text("mine")
    code, _, err = new("night-watch")
    assert code == 2
    assert_problem(err, "folder-not-empty night-watch README.md --folder")
    assert [path.name for path in Path("night-watch").iterdir()] == ["README.md"]
    assert Path("night-watch/README.md").read_text() == "mine"


def test_new_reports_invalid_folder(new):
    Path("file").write_text("")
    code, _, err = new("night-watch", "--folder", "file/package")
    assert code == 2
    assert_problem(err, "folder-not-writable file/package")


def test_new_ignores_folder_with_module_name(new, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("watch").mkdir()
    assert new("watch")[0] == 0

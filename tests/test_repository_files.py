"""Files that code hosts read: they parse, and agree with the project."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from declared_attributes import ParsedClass, parse_classes, undeclared
from longest_first import LONGEST

ROOT = Path(__file__).parent.parent
PACKAGE_FOLDERS = [
    file.parent
    for pattern in ("core", "plugins", "packages/*/src")
    for folder in sorted(ROOT.glob(pattern))
    for file in sorted(folder.rglob("__init__.py"))
]
"""The folders of modules that are installed."""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """The parsed modules that are installed."""
    files = [file for folder in PACKAGE_FOLDERS for file in folder.glob("*.py")]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def load(path: str):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_workflows_call_the_projects_own_script():
    workflow = load(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": "bash .ci/run"}
    assert job["env"]["PYTHON"] == "python${{ matrix.python }}", "the Makefile makes its environment with it"
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert versions == f">={min(job['strategy']['matrix']['python'])}"
    assert load(".github/workflows/release.yml")["jobs"].keys() == {"build", "sbom", "attest", "publish"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_ci_runs_every_test_once():
    script = (ROOT / ".ci/run").read_text()
    targets = [line.partition(" ")[2] for line in script.splitlines() if line.startswith("run_tests ")]
    shown = subprocess.run(
        ["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    ).stdout
    marks = [line.rpartition(" -m ")[2] for line in shown.splitlines() if "-m pytest" in line]
    assert marks == ['"not slow"', "slow"]


def test_files_that_workers_begin_with_have_slow_tests():
    for file in LONGEST:
        assert "pytest.mark.slow" in (ROOT / file).read_text(encoding="utf-8"), file


TESTED_FOLDERS = ("tests", "packages/*/tests", "examples/*/tests")
WAITS = {"run", "check_call", "check_output", "communicate"}
"""Functions of ``subprocess`` that wait for the end of a process."""


def waits_without_limit(code: str) -> list[int]:
    """The lines of calls that wait for a process, however long it takes."""
    lines: list[int] = []
    if "subprocess" not in code and "communicate" not in code:
        return lines  # most files: parsing all of them takes a second
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in WAITS:
            continue
        of_module = isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess"
        has_limit = any(keyword.arg == "timeout" for keyword in node.keywords)
        if (of_module or node.func.attr == "communicate") and not has_limit:
            lines.append(node.lineno)
    return lines


def test_waits_without_a_limit_are_listed():
    code = "subprocess.run(a)\nsubprocess.run(a, timeout=1)\nb.communicate()\nb.communicate(timeout=1)\nforked.run(c)"
    assert waits_without_limit(code) == [1, 3]


def test_tests_wait_for_no_process_for_ever():
    """A test that hangs would otherwise end without the output of the process."""
    files = [file for folder in TESTED_FOLDERS for part in ROOT.glob(folder) for file in part.rglob("*.py")]
    assert len(files) > 300
    waits = {str(file.relative_to(ROOT)): waits_without_limit(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in waits.items() if lines} == {}


def test_the_citation_has_the_packages_version_and_license():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = load("CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_mypy_checks_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    sources = [ROOT / "core", ROOT / "plugins", *sorted(ROOT.glob("packages/*/src"))]
    found = {source.relative_to(ROOT).as_posix() for source in sources}
    assert found <= set(settings["mypy_path"])
    packages = {file.parent for source in sources for file in source.glob("*/__init__.py")}
    checked = {path for pattern in settings["files"] for path in ROOT.glob(pattern)}
    assert {package for package in packages if checked.isdisjoint({package, *package.parents})} == set()


def test_templates_and_hooks_parse():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
    hooks = [hook["entry"] for repository in load(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    assert all(entry.split()[0].removeprefix(".venv/bin/") in makefile for entry in hooks)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_set_up_says_how_long_it_takes():
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert re.match(r'echo "Setting up .+ pip .+ some minutes', done.stdout), "pip prints nothing"


def test_no_file_is_too_long():
    files = [file for folder in ("core", "plugins") for file in (ROOT / folder).rglob("*.py")]
    assert {
        file.name: count for file in files if (count := len(file.read_text(encoding="utf-8").splitlines())) > 500
    } == {}


def unlisted_modules(folder: Path) -> set[str]:
    """The modules and the folders in a folder that the docstring of its ``__init__`` does not name."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    listed = set(re.findall(r"\w+", docstring or ""))
    modules = {file.stem for file in folder.glob("*.py")}
    modules |= {init.parent.name for init in folder.glob("*/__init__.py")}
    return modules - listed - {"__init__", "__main__"}


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_each_folder_names_its_modules(folder):
    assert unlisted_modules(folder) == set(), f"List these in the docstring of {folder}/__init__.py."


def listed_modules(test_file: Path) -> list[str]:
    """The modules that a test file lists in its docstring, below the line ``Modules:``."""
    docstring = ast.get_docstring(ast.parse(test_file.read_text(encoding="utf-8"))) or ""
    _, _, section = docstring.partition("\n\nModules:\n")
    return section.split()


def test_each_module_has_one_test_file():
    modules = set()
    for folder in PACKAGE_FOLDERS:
        if "packages" not in folder.relative_to(ROOT).parts:
            modules |= {str(file.relative_to(ROOT)) for file in folder.glob("*.py") if not file.stem.startswith("__")}
    test_files: dict[str, list[str]] = defaultdict(list)
    for test_file in sorted((ROOT / "tests").rglob("test_*.py")):
        for module in listed_modules(test_file):
            test_files[module].append(str(test_file.relative_to(ROOT)))
    assert test_files.keys() == modules, "List each module below 'Modules:' in the docstring of the file that tests it."
    assert {module: files for module, files in test_files.items() if len(files) > 1} == {}


def test_a_class_name_is_used_once(trees):
    places: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


HIDDEN_CONDITIONS = (
    "for name in names if names else ():\n    pass",
    "lines = [name for name in ([] if hidden else names)]",
    "text = 'more' * (count > 1)",
    "rows = [row] * (not rows)",
    "text += bool(start) * f' of {start}'",
)
"""Statements that ``hidden_conditions`` finds."""


def is_empty(node: ast.AST) -> bool:
    """Whether an expression is an empty tuple, list or dict."""
    if isinstance(node, ast.Tuple | ast.List):
        return not node.elts
    return isinstance(node, ast.Dict) and not node.keys


def is_condition(node: ast.AST) -> bool:
    """Whether an expression is a comparison, a negation, or a call of ``bool``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "bool"
    return isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def is_text_or_list(node: ast.AST) -> bool:
    """Whether an expression is a text, a list or a tuple."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def hidden_conditions(tree: ast.Module) -> list[int]:
    """The lines with a loop over nothing unless a condition holds, or a text or list times a condition."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.IfExp):
            if is_empty(node.iter.body) or is_empty(node.iter.orelse):
                lines.append(node.iter.lineno)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(is_condition, sides)) and any(map(is_text_or_list, sides)):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("statement", HIDDEN_CONDITIONS)
def test_a_hidden_condition_is_found(statement):
    assert hidden_conditions(ast.parse(statement)) == [1]


def test_conditions_are_if_statements(trees):
    places = []
    for file, tree in trees.items():
        for line in hidden_conditions(tree):
            places.append(f"{file.relative_to(ROOT)}:{line}")
    assert places == []


SETS_LATER = """
class Base:
    known: int

class Plugin(Base):
    def __init__(self):
        self.first = 0

    def hook(self):
        self.known, self.first = 1, 2
        self.late = 3

class Loader(DataLoader):
    def hook(self):
        self._of_the_library = None
"""


def test_an_attribute_that_a_hook_adds_is_found():
    classes = {parsed.name: parsed for parsed in parse_classes(ast.parse(SETS_LATER))}
    found = {name: undeclared(parsed, classes) for name, parsed in classes.items()}
    assert found == {"Base": {}, "Plugin": {"late": 11}, "Loader": {}}


def test_every_attribute_is_declared_where_its_class_begins(trees):
    classes: dict[str, ParsedClass] = {}
    files: dict[str, Path] = {}
    for file, tree in trees.items():
        for parsed in parse_classes(tree):
            classes[parsed.name] = parsed
            files[parsed.name] = file
    places = []
    for name, parsed in classes.items():
        for attribute, line in undeclared(parsed, classes).items():
            places.append(f"{files[name].relative_to(ROOT)}:{line}: {name}.{attribute}")
    assert places == []

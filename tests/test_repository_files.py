"""Files that code hosts read: they parse, and agree with the project."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


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
    shown = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    marks = [line.rpartition(" -m ")[2] for line in shown.splitlines() if "-m pytest" in line]
    assert marks == ['"not slow"', "slow"]


def test_the_citation_has_the_packages_version_and_license():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = load("CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_templates_and_hooks_parse():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= form.keys(), path
    hooks = [hook["entry"] for repository in load(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    makefile = (ROOT / "Makefile").read_text()
    assert all(entry.split()[0].removeprefix(".venv/bin/") in makefile for entry in hooks)


def test_no_file_is_too_long():
    files = [file for folder in ("core", "plugins") for file in (ROOT / folder).rglob("*.py")]
    assert {
        file.name: count for file in files if (count := len(file.read_text(encoding="utf-8").splitlines())) > 500
    } == {}

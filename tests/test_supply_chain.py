"""The supply chain of CI and releases: pinned hashes, a software bill of materials, signed releases."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pinned import pins, with_pinned_versions

ROOT = Path(__file__).parent.parent
UNHASHED = {"torch"}
"""Indexes serve different builds of one version. SECURITY.md has the reason."""


@pytest.fixture(scope="module")
def sbom():
    """The script .ci/sbom.py as a module."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / ".ci" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hashes() -> dict[str, tuple[str, list[str]]]:
    """Package -> version and SHA-256 sums, of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *sums = line.split("--hash=sha256:")
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = (
                str(parsed.specifier).removeprefix("=="),
                [item.strip() for item in sums],
            )
    return found


def test_every_pinned_package_but_torch_has_hashes():
    found = hashes()
    assert {name: version for name, (version, _) in found.items()} == {
        name: version for name, version in pins().items() if name not in UNHASHED
    }, "run `make hashes` and commit requirements.txt"
    for name, (_, sums) in found.items():
        assert sums, name
        assert all(re.fullmatch("[0-9a-f]{64}", item) for item in sums), name
        assert len(set(sums)) == len(sums), name


@pytest.mark.slow
@with_pinned_versions
def test_hashes_cover_everything_that_the_tests_need(sbom):
    # Python's venv brings pip
    needed = set(sbom.needed_packages("fastloop-train", ["dev"])) - {"fastloop-train", "pip"} - UNHASHED
    assert len(needed) > 100
    missing = sorted(needed - set(hashes()))
    assert not missing, "pip would install these without hashes: add them to constraints.txt, and run `make hashes`"


def test_make_installs_by_hashes_before_anything_else():
    makefile = (ROOT / "Makefile").read_text()
    rule = makefile[makefile.index("$(VENV)/ready: ") :].partition("\n\n")[0]
    tools, packages, project = re.findall(r"pip install .*", rule)
    assert "--require-hashes" in tools
    assert "--no-deps --no-build-isolation --require-hashes --requirement requirements.txt" in packages
    assert "--no-build-isolation --constraint constraints.txt" in project, (
        "an isolated build would download its tools without hashes"
    )


@with_pinned_versions
def test_sbom_lists_what_a_run_needs(sbom):
    found = json.loads(sbom.sbom("fastloop-train"))  # raises if it does not fit the schema
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    root = found["metadata"]["component"]
    assert (root["name"], root["version"], root["licenses"]) == (
        "fastloop-train",
        project["version"],
        [{"license": {"id": project["license"]}}],
    )
    versions = {component["name"]: component["version"] for component in found["components"]}
    direct = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    assert direct <= set(versions)
    assert not {"pytest", "mypy", "fastloop-train"} & set(versions), "neither tools for development nor fastloop itself"
    pinned = pins()
    assert {name: version for name, version in versions.items() if name in direct} == {
        name: pinned[name] for name in direct
    }
    edges = {item["ref"]: set(item.get("dependsOn", ())) for item in found["dependencies"]}
    assert edges[root["bom-ref"]] == {f"{name}=={versions[name]}" for name in direct}
    assert f"numpy=={versions['numpy']}" in edges[f"accelerate=={versions['accelerate']}"]
    assert all(
        component["purl"] == f"pkg:pypi/{name}@{versions[name]}"
        for component in found["components"]
        if (name := component["name"])
    )


def workflow_jobs() -> dict[str, dict[str, Any]]:
    """FILE.JOB -> job, of all workflows."""
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    return {
        f"{path.stem}.{name}": job for path in files for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    }


def test_release_is_attested_and_stores_no_token():
    jobs = workflow_jobs()
    steps = {step["uses"].partition("@")[0]: step.get("with") for step in jobs["release.attest"]["steps"]}
    assert steps["actions/attest-build-provenance"] == {"subject-path": "dist/*"}
    assert steps["actions/attest-sbom"] == {"subject-path": "dist/*", "sbom-path": "sbom/fastloop.cdx.json"}
    assert jobs["release.publish"]["steps"][-1]["with"] == {"attestations": True}
    assert [step["run"] for job in ("build", "sbom") for step in jobs[f"release.{job}"]["steps"] if "run" in step][
        1:
    ] == [
        "make dist",
        "make sbom",
    ]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    assert "sbom/fastloop.cdx.json" in (ROOT / "Makefile").read_text()


def test_actions_are_pinned_by_commit():
    for name, job in workflow_jobs().items():
        for action in (step["uses"] for step in job["steps"] if "uses" in step):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), f"{name}: {action}: a tag can be moved to other code"


def test_jobs_that_sign_or_publish_install_nothing():
    signing = {name: job for name, job in workflow_jobs().items() if "id-token" in job.get("permissions", {})}
    assert sorted(signing) == ["release.attest", "release.publish"]
    for name, job in signing.items():
        assert not [step for step in job["steps"] if "run" in step or "checkout" in step["uses"]], name
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path


@pytest.mark.slow
def test_release_files_are_built_by_hashed_tools_alone(tmp_path):
    """A pip that stops at an unhashed package; the source distribution has every file that a reader of the repository
    needs."""
    copy = tmp_path / "copy"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True, timeout=600
    ).stdout.split("\0")[:-1]
    for file in files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    release = os.environ | {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name"}
    subprocess.run(
        ["make", "dist", f"PYTHON={sys.executable}"],
        cwd=copy,
        check=True,
        capture_output=True,
        env=release,
        timeout=600,
    )
    names = {"fastloop_train", *(path.name.replace("-", "_") for path in (ROOT / "packages").iterdir())}
    assert {path.name.partition("-")[0] for path in (copy / "dist").glob("*.whl")} == names
    (source,) = (copy / "dist").glob("fastloop_train-*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"SECURITY.md", "CITATION.cff", "CHANGELOG.md", "LICENSE", "requirements.txt"} <= packed
    (wheel,) = (copy / "dist").glob("fastloop_train-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
        assert "fastloop/recipes/recipe.schema.json" in archive.namelist()
    assert "Project-URL: Documentation, https://github.com/owner/name/blob/v" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")] == []
    assert re.search(r"!\[[^]]+\]\(https://github\.com/owner/name/raw/v[^)]+\.svg\)", text)
    listed = subprocess.run(
        [copy / "build/dist/bin/pip", "list", "--format=json"], capture_output=True, check=True, timeout=600
    ).stdout
    assert len(json.loads(listed)) < 12


def test_audit_runs_every_day():
    audit = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text())
    assert "schedule" in audit[True], "YAML reads the key `on` as true"
    (job,) = audit["jobs"].values()
    command = "pip-audit --strict --requirement constraints.txt"
    assert command in job["steps"][-1]["run"], "without --strict, packages that could not be audited count as safe"
    assert command in (ROOT / "Makefile").read_text()

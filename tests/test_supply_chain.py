"""The supply chain of CI and releases: pinned hashes, a software bill of materials, signed releases."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
UNHASHED = {"torch"}
"""Indexes serve different builds of one version. docs/decisions/0037 has the reason."""


@pytest.fixture(scope="module")
def sbom():
    """The script .ci/sbom.py as a module."""
    spec = importlib.util.spec_from_file_location("sbom", ROOT / ".ci" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins() -> dict[str, str]:
    """Package -> version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==") for requirement in found}


def hashes() -> dict[str, tuple[str, list[str]]]:
    """Package -> version and SHA-256 sums, of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            requirement, *sums = line.split("--hash=sha256:")
            parsed = Requirement(requirement)
            found[canonicalize_name(parsed.name)] = str(parsed.specifier).removeprefix("=="), [item.strip() for item in sums]
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


def test_hashes_cover_everything_that_the_tests_need(sbom):
    needed = set(sbom.needed_packages("fastloop-train", ["dev"])) - {"fastloop-train", "pip"} - UNHASHED  # Python's venv brings pip
    assert len(needed) > 100
    missing = sorted(needed - set(hashes()))
    assert not missing, "pip would install these without hashes: add them to constraints.txt, and run `make hashes`"


def test_make_installs_by_hashes_before_anything_else():
    makefile = (ROOT / "Makefile").read_text()
    rule = makefile[makefile.index("$(VENV)/ready: ") :].partition("\n\n")[0]
    tools, packages, project = re.findall(r"pip install .*", rule)
    assert "--require-hashes" in tools
    assert "--no-deps --no-build-isolation --require-hashes --requirement requirements.txt" in packages
    assert "--no-build-isolation --constraint constraints.txt" in project, "an isolated build would download its tools without hashes"


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
    assert {name: version for name, version in versions.items() if name in direct} == {name: pinned[name] for name in direct}
    edges = {item["ref"]: set(item.get("dependsOn", ())) for item in found["dependencies"]}
    assert edges[root["bom-ref"]] == {f"{name}=={versions[name]}" for name in direct}
    assert f"numpy=={versions['numpy']}" in edges[f"accelerate=={versions['accelerate']}"]
    assert all(component["purl"] == f"pkg:pypi/{name}@{versions[name]}" for component in found["components"] if (name := component["name"]))


def test_release_is_attested_and_stores_no_token():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    steps = {step.get("uses", step.get("run")).partition("@")[0]: step.get("with") for step in jobs["build"]["steps"]}
    assert "make dist sbom" in steps
    assert steps["actions/attest-build-provenance"] == {"subject-path": "dist/*"}
    assert steps["actions/attest-sbom"] == {"subject-path": "dist/*", "sbom-path": "sbom/fastloop.cdx.json"}
    assert jobs["build"]["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}
    assert "secrets." not in text
    assert "sbom/fastloop.cdx.json" in (ROOT / "Makefile").read_text()


def test_audit_runs_every_day():
    audit = yaml.safe_load((ROOT / ".github/workflows/audit.yml").read_text())
    assert "schedule" in audit[True], "YAML reads the key `on` as true"
    (job,) = audit["jobs"].values()
    command = "pip-audit --strict --requirement constraints.txt"
    assert command in job["steps"][-1]["run"], "without --strict, packages that could not be audited count as safe"
    assert command in (ROOT / "Makefile").read_text()

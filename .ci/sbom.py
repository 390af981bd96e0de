"""Write a software bill of materials (SBOM, CycloneDX 1.6) of fastloop and the packages that a run of it needs.

    python .ci/sbom.py sbom/fastloop.cdx.json

It lists the packages of `pip install fastloop-train`, without extras, in the versions that are installed here: those
that CI tests. `cyclonedx-py environment` would list the development tools of the environment, too. Both use the library
cyclonedx-python-lib.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version


def needed_packages(name: str, extras: Iterable[str] = ()) -> dict[str, set[str]]:
    """Package -> the packages that it requires on this platform, for ``name`` with its extras and everything that it
    needs."""
    found: dict[str, set[str]] = {}
    waiting: list[tuple[str, frozenset[str]]] = [(name, frozenset(extras))]
    seen = set(waiting)
    while waiting:
        package, wanted = waiting.pop()
        needed = found.setdefault(package, set())
        for requirement in map(Requirement, distribution(package).requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
                other = canonicalize_name(requirement.name), frozenset(requirement.extras)
                needed.add(other[0])
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
    return found


def component(package: Distribution, kind: ComponentType) -> Component:
    """A package as a component. The version is without torch's local suffix, such as ``+cpu``."""
    name, version = canonicalize_name(package.metadata["Name"]), Version(package.version).public
    classifiers = (
        text.split(" :: ")[-1]
        for text in package.metadata.get_all("Classifier") or ()
        if text.startswith("License :: ")
    )
    license_name = package.metadata.get("License-Expression") or next(classifiers, "")
    return Component(
        name=name,
        version=version,
        type=kind,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        description=re.sub(r"\s+", " ", package.metadata.get("Summary") or "") or None,
        licenses=[LicenseFactory().make_from_string(license_name)] if license_name else [],
    )


def sbom(name: str) -> str:
    """The SBOM of an installed package, as JSON."""
    needs = needed_packages(name)
    kinds = {package: ComponentType.APPLICATION if package == name else ComponentType.LIBRARY for package in needs}
    components = {package: component(distribution(package), kind) for package, kind in kinds.items()}
    bom = Bom(components=[found for package, found in components.items() if package != name])
    bom.metadata.component = components[name]
    for package, needed in needs.items():
        bom.register_dependency(components[package], [components[other] for other in sorted(needed)])
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"the SBOM of {name} does not fit the schema of CycloneDX 1.6: {problem}")
    return text


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(sbom("fastloop-train") + "\n", encoding="utf-8")

"""Make this checkout importable as an installed fastloop: writes metadata with entry points to a folder for PYTHONPATH.

No build needed.

python3 benchmarks/gpu/install.py FOLDER
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def write_metadata(folder: Path, source: Path = ROOT) -> Path:
    """Write ``NAME-VERSION.dist-info`` of the distribution in ``source`` to a folder."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}"]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    groups = {"console_scripts": project.get("scripts", {}), **project["entry-points"]}
    entries = []
    for group, points in groups.items():
        entries.append(f"[{group}]")
        entries += [f"{name} = {value}" for name, value in points.items()]
        entries.append("")
    (info / "entry_points.txt").write_text("\n".join(entries))
    return info


if __name__ == "__main__":
    for source in (ROOT, *(ROOT / "packages").iterdir()):
        write_metadata(Path(sys.argv[1]), source)

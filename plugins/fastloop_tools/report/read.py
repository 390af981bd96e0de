"""Reads the output of ``train``, ``sweep``, ``bench`` and ``profile``. Skips missing files; raises an error that names a broken one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastloop.errors import UsageError
from fastloop.recipe import safe_yaml as plain

NUMBERS = (
    *("steps", "peak_memory_bytes", "samples_per_second", "tokens_per_second"),
    *(f"{part}_seconds" for part in ("train", "evaluate", "save", "startup", "compile")),
)
"""Keys of a summary that the page shows as numbers."""
Points = list[tuple[float, float]]
"""(step, value) of each point."""


@dataclass
class Trained:
    """A run folder.

    Attributes:
        name: A short name, unique on the page.
        lines: Value -> its points, by the names in ``metrics.jsonl``: ``loss``, ``samples_per_second``, ..., ``validation accuracy``.
    """

    folder: Path
    name: str
    summary: dict[str, Any] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, Points] = field(default_factory=dict)


@dataclass
class Found:
    """The contents of the page."""

    runs: list[Trained] = field(default_factory=list)
    ablations: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    profiles: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    sweeps: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def read(folders: Iterable[Path]) -> Found:
    """Read everything in the given folders.

    Raises:
        UsageError: A folder contains none of these outputs, or a file cannot be read.
    """
    found = Found()
    names: dict[str, int] = {}
    for folder in folders:
        name = folder.name or str(folder.resolve().name)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        if _is_run(folder):
            found.runs.append(_run(folder, name))
        elif (folder / "sweep.json").is_file():
            sweep = _json(folder / "sweep.json")
            found.sweeps.append((name, sweep))
            found.runs += [_run(member, member.name) for member in _members(sweep, folder) if _is_run(member)]
        elif (folder / "bench.json").is_file():
            found.ablations.append((name, _json(folder / "bench.json")))
        elif (folder / "profile.json").is_file():
            found.profiles.append((name, _json(folder / "profile.json")))
        else:
            what = "contains no run, sweep, ablation or profile" if folder.is_dir() else "no such folder"
            raise UsageError(f"{folder}: {what}. Expected an output folder of `fastloop train`, `sweep`, `bench` or `profile`.")
    return found


def _is_run(folder: Path) -> bool:
    """Whether a folder is that of a run which has logged or ended."""
    return (folder / "recipe.yaml").is_file() and ((folder / "metrics.jsonl").is_file() or (folder / "summary.json").is_file())


def _members(sweep: Mapping[str, Any], folder: Path) -> list[Path]:
    """The run folders of a sweep, in its order.

    Raises:
        UsageError: The record of the sweep has another form than `fastloop sweep` writes.
    """
    try:
        numbers = [point[key] for point in sweep["points"] for key in ("mean", "deviation") if point[key] is not None]
        numbers += [
            value for point in sweep["points"] if point["difference"] for value in point["difference"].values() if value is not None
        ]
        texts = [sweep["monitor"], *(point["point"] for point in sweep["points"])]
        if all(map(_is_number, numbers)) and all(isinstance(text, str) for text in texts):
            return [folder / str(run["name"]) for run in sweep["runs"]]
    except (KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{folder / 'sweep.json'}: expected the runs and points that `fastloop sweep` writes.")


def _run(folder: Path, name: str) -> Trained:
    run = Trained(folder, name)
    if (folder / "summary.json").is_file():
        run.summary = _json(folder / "summary.json")
        _check_summary(run.summary, folder / "summary.json")
    try:
        recipe = plain.load((folder / "recipe.yaml").read_text(encoding="utf-8"), str(folder / "recipe.yaml"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / 'recipe.yaml'}: cannot be read: {error}.") from None
    run.recipe = recipe if isinstance(recipe, dict) else {}
    if (folder / "metrics.jsonl").is_file():
        try:
            content = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{folder / 'metrics.jsonl'}: cannot be read: {error}.") from None
        for number, line in enumerate(content.splitlines(), start=1):
            try:
                point = json.loads(line)
                step, split = int(point.pop("step")), point.pop("split", None)
                values = {key: float(value) for key, value in point.items() if _is_number(value)}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                raise UsageError(f"{folder / 'metrics.jsonl'}, line {number}: expected one JSON object with a step, and numbers.") from None
            for key, value in values.items():
                run.lines.setdefault(f"{split} {key}" if split else key, []).append((step, value))
    return run


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_summary(summary: Mapping[str, Any], path: Path) -> None:
    """Raise an error for values of other types than those that the page shows."""
    numbers = {key: value for split in ("validation", "test") for key, value in _mapping(summary.get(split), path).items()}
    numbers |= {key: summary.get(key) for key in NUMBERS}
    wrong = [
        f"{key}: found {value!r:.60}, expected a number" for key, value in numbers.items() if value is not None and not _is_number(value)
    ]
    if not isinstance(summary.get("plugins") or [], list):
        wrong.append("plugins: expected a list")
    if wrong:
        raise UsageError(f"{path}: {wrong[0]}.")


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value or {}, Mapping):
        raise UsageError(f"{path}: found {value!r:.60}, expected metrics and their values.")
    return value or {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected one JSON object.")
    return found


def flat(values: Any, where: str = "") -> dict[str, str]:
    """A recipe's dotted keys -> values as text. Plugins are keyed by name, not by position."""
    if isinstance(values, Mapping):
        found: dict[str, str] = {}
        for key, value in values.items():
            found |= flat(value, f"{where}.{key}" if where else str(key))
        return found or ({where: "{}"} if where else {})
    if where == "plugins" and isinstance(values, list):
        named = {name: options for entry in values for name, options in (entry.items() if isinstance(entry, Mapping) else [(entry, {})])}
        return {f"plugins.{name}": "off" if options is False else _options(options) for name, options in named.items()}
    return {where: json.dumps(values) if isinstance(values, list) else str(values)}


def _options(options: Any) -> str:
    return ", ".join(f"{key}: {value}" for key, value in options.items()) if isinstance(options, Mapping) and options else "on"


def differences(runs: list[Trained]) -> list[tuple[str, list[str]]]:
    """The keys in which recipes differ, with the value of each run. Ignores the output folder."""
    recipes = [flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != "output")
    rows = [(key, [recipe.get(key, "") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]

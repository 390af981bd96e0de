"""The grid of a sweep: the lists of values on the command line, and the run of each point and seed."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastloop.errors import UsageError
from fastloop_tools.trials.runs import TrialRun, as_read

CLOSING = {"[": "]", "{": "}", "(": ")"}
LONGEST_VALUE = 40
"""Characters of a value in a folder's name. File systems limit a name to 255 bytes."""


@dataclass
class Grid:
    """The lists of values of a command line, by key, and the overrides of all points."""

    axes: dict[str, list[str]] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def runs(self, seeds: Sequence[int | None], folds: Sequence[int | None] = (None,)) -> list[TrialRun]:
        """All runs. Each seed and fold covers the grid before the next one begins, so an early stop leaves complete
        pairs."""
        points = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        short = short_names(self.axes)
        runs = []
        for seed in seeds:
            for fold in folds:
                for point in points:
                    runs.append(TrialRun(folder_name(point, seed, short, fold), point, seed, fold=fold))
        return runs


def short_names(keys: Collection[str]) -> dict[str, str]:
    """Key -> its name in folders: the last part, or the whole key if the last parts of two keys are equal.

    ``train.lr`` becomes ``lr``. ``plugins.ema.warmup`` beside ``plugins.lr-scheduler.warmup`` stays as it is.
    """
    last_parts = [key.rpartition(".")[2] for key in keys]
    names = {}
    for key, last_part in zip(keys, last_parts, strict=True):
        names[key] = last_part if last_parts.count(last_part) == 1 else key
    return names


def parse(overrides: Iterable[str]) -> Grid:
    """Divide overrides into those with a list of values and the others.

    Raises:
        UsageError: A list has an empty value, or equal ones such as 1e-3 and 0.001, a key occurs twice, or the list is
            one of output folders.
    """
    grid = Grid()
    keys: set[str] = set()
    for item in overrides:
        key, _, text = item.partition("=")
        if key in keys:
            raise UsageError(
                f"{key} occurs twice. Separate its values by commas: {key}=A,B.", code="repeated-key", place=item
            )
        keys.add(key)
        values = split_values(text)
        if len(values) == 1:
            grid.fixed.append(item)
            continue
        if "" in values or len(set(values)) < len(values):
            raise UsageError(
                code="repeated-value",
                place=item,
                found="an empty or repeated value",
                expected=f"different values, such as {key}=A,B",
            )
        _check_different(item, key, values)
        if key == "output":
            raise UsageError(
                "expected one folder. Each run gets a folder of its own in it.", code="wrong-format", place=item
            )
        grid.axes[key] = values
    return grid


def _check_different(item: str, key: str, values: Iterable[str]) -> None:
    """Check that a recipe reads values as different ones: 1e-3 and 0.001 would train the same point twice."""
    earlier: dict[str, str] = {}
    for value in values:
        read = as_read(key, value)
        if read in earlier:
            raise UsageError(
                f"{earlier[read]} and {value} are the same value.",
                code="repeated-value",
                place=item,
                remedy="Remove one.",
            )
        earlier[read] = value


def split_values(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes: ``[1,2],[3,4]`` into ``[1,2]`` and ``[3,4]``."""
    parts = [""]
    quote = ""  # the open one
    expected_brackets: list[str] = []  # that close the open ones, the innermost last
    for character in text:
        if character == "," and not expected_brackets and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            if character == quote:
                quote = ""
        elif character in "'\"" and parts[-1].strip() == character:  # not the apostrophe in a word
            quote = character
        elif character in CLOSING:
            expected_brackets.append(CLOSING[character])
        elif expected_brackets and character == expected_brackets[-1]:
            expected_brackets.pop()
    return [part.strip() for part in parts]


def folder_name(point: Mapping[str, str], seed: int | None, short: Mapping[str, str], fold: int | None = None) -> str:
    """A readable name such as ``lr-1e-5_seed-123``. A value that a file name cannot hold is shortened, and its hash is
    added."""
    parts = []
    for key, value in point.items():
        readable = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII).strip("-.")[:LONGEST_VALUE]
        if readable != value:
            readable += f"-{hashlib.sha256(value.encode()).hexdigest()[:4]}"
        parts.append(f"{short[key]}-{readable}")
    if seed is not None:
        parts.append(f"seed-{seed}")
    if fold is not None:
        parts.append(f"fold-{fold}")
    return "_".join(parts) or "run"

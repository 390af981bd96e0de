"""The files of the plugin ``sample-audit``: one a process, a line an optimizer step, read back an epoch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN = 5
"""Ids that a message names."""


class Files:
    """``rank-R.jsonl`` of every process that ever took part in a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_until: dict[Path, int] = {}  # where in each file the epoch under way begins

    def path(self, rank: int) -> Path:
        """The file of one process."""
        return self.folder / f"rank-{rank}.jsonl"

    def ranks(self) -> list[int]:
        """Those that have a file."""
        return sorted(int(path.stem.removeprefix("rank-")) for path in self.folder.glob("rank-*.jsonl"))

    def cut(self, rank: int, step: int) -> None:
        """Keep the lines of the steps before ``step``: those after it happen again."""
        kept = 0
        with self.path(rank).open("rb+") as file:
            for line in file:
                try:
                    if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                        break
                except ValueError:  # it was cut off
                    break
                kept += len(line)
            file.truncate(kept)

    def batches(self, epoch: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Rank, step and what was recorded of each micro-batch of an epoch."""
        for rank in self.ranks():
            with self.path(rank).open("rb") as file:
                file.seek(self.read_until.get(self.path(rank), 0))
                for line in map(json.loads, file):
                    if line["epoch"] == epoch:
                        yield from ((rank, line["step"], batch) for batch in line["batches"])

    def epoch_ended(self) -> None:
        """All that is written from here on is of later epochs."""
        self.read_until = {path: path.stat().st_size for path in map(self.path, self.ranks())}

    def places(self, epoch: int, ids: list[int]) -> list[str]:
        """Each id, with who read it and when."""
        found: dict[int, list[str]] = {number: [] for number in ids}
        for rank, step, batch in self.batches(epoch):
            reader = f"rank {rank}" if batch["worker"] < 0 else f"rank {rank} worker {batch['worker']}"
            for number in batch["ids"]:
                if number in found:
                    found[number].append(f"{reader} at step {step}")
        return [f"{number}: {' and '.join(places)}" for number, places in found.items()]


@dataclass
class Findings:
    """What is wrong with an epoch: sample ids that did not come, those that came more than once, and how many the dataset does not have."""

    size: int
    missing: list[int]
    repeated: list[int]
    unknown: int

    def text(self, files: Files, epoch: int) -> str:
        """In words; nothing when there is nothing."""
        parts = []
        if self.missing:
            parts.append(f"{len(self.missing)} of {self.size} samples are missing ({_some(self.missing, ', ')})")
        if self.repeated:
            places = files.places(epoch, self.repeated[:SHOWN]) + self.repeated[SHOWN:]
            parts.append(f"{len(self.repeated)} came more than once ({_some(places, '; ')})")
        if self.unknown:
            parts.append(f"{self.unknown} have ids that a dataset of {self.size} does not have")
        return ", ".join(parts)


def check(ids: Iterable[list[int]], size: int, complete: bool) -> Findings:
    """Whether ids from 0 to ``size`` came once; ``complete``: all of them should have. Holds a number a sample, and one list at a time."""
    import numpy as np

    times, unknown = np.zeros(size, np.int32), 0
    for some in ids:
        numbers = np.array(some, np.int64)
        known = numbers[(numbers >= 0) & (numbers < size)]
        np.add.at(times, known, 1)
        unknown += len(numbers) - len(known)
    missing = np.flatnonzero(times == 0).tolist() if complete else []
    return Findings(size, missing, np.flatnonzero(times > 1).tolist(), unknown)


def _some(values: list[Any], separator: str) -> str:
    return separator.join([*map(str, values[:SHOWN]), *["..."] * (len(values) > SHOWN)])

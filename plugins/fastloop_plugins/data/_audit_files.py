"""Files of the plugin ``sample-audit``: one for each process, a line for each step, read one epoch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.problem import agree, counted_of
from fastloop.runtime.files import no_follow

SHOWN = 5
"""Ids that a message lists at most."""


class AuditFiles:
    """The files ``rank-R.jsonl`` of every process that ever took part in a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_until: dict[Path, int] = {}  # offset in each file at which the current epoch begins

    def path(self, rank: int) -> Path:
        """The file of one process."""
        return self.folder / f"rank-{rank}.jsonl"

    def ranks(self) -> list[int]:
        """Ranks that have a file."""
        return sorted(int(path.stem.removeprefix("rank-")) for path in self.folder.glob("rank-*.jsonl"))

    def cut(self, rank: int, step: int) -> None:
        """Keep only the lines before ``step``: the run repeats the later steps."""
        size = 0  # bytes of the lines to keep
        with open(self.path(rank), "rb+", opener=no_follow) as file:
            for line in file:
                try:
                    if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                        break
                except ValueError:  # a partial line
                    break
                size += len(line)
            file.truncate(size)

    def batches(self, epoch: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield rank, step and the record of each micro-batch of an epoch."""
        for rank in self.ranks():
            with self.path(rank).open("rb") as file:
                file.seek(self.read_until.get(self.path(rank), 0))
                for line in map(json.loads, file):
                    if line["epoch"] != epoch:
                        continue
                    for batch in line["batches"]:
                        yield rank, line["step"], batch

    def epoch_ended(self) -> None:
        """Skip everything written so far in later reads."""
        self.read_until = {path: path.stat().st_size for path in map(self.path, self.ranks())}

    def locate(self, epoch: int, ids: list[int]) -> list[str]:
        """Describe each id: which process read it, and at which step."""
        places: dict[int, list[str]] = {number: [] for number in ids}
        for rank, step, batch in self.batches(epoch):
            reader = f"rank {rank}" if batch["worker"] < 0 else f"rank {rank} worker {batch['worker']}"
            for number in batch["ids"]:
                if number in places:
                    places[number].append(f"{reader} at step {step}")
        return [f"{number}: {' and '.join(locations)}" for number, locations in places.items()]


@dataclass
class EpochProblems:
    """Problems of an epoch: ids that are missing, ids that occurred more than once, and the number of ids outside the
    dataset.

    Attributes:
        lost: Missing samples whose ids are not known.
    """

    size: int
    missing: list[int]
    repeated: list[int]
    unknown: int
    lost: int = 0

    def text(self, files: AuditFiles, epoch: int) -> str:
        """A description for messages; empty if there is no problem."""
        parts = []
        if self.missing:
            verb = agree(len(self.missing), "is", "are")
            parts.append(
                f"{counted_of(len(self.missing), self.size, 'samples')} {verb} missing ({_first(self.missing, ', ')})"
            )
        if self.lost:
            parts.append(f"{counted_of(self.lost, self.size, 'samples')} {agree(self.lost, 'is', 'are')} missing")
        if self.repeated:
            locations = files.locate(epoch, self.repeated[:SHOWN]) + self.repeated[SHOWN:]
            parts.append(f"{len(self.repeated)} came more than once ({_first(locations, '; ')})")
        if self.unknown:
            parts.append(f"{self.unknown} have ids that a dataset of {self.size} does not have")
        return ", ".join(parts)


def check(ids: Iterable[list[int]], size: int, complete: bool, passes: bool = False) -> EpochProblems:
    """Check that each id below ``size`` occurs once, at least once only if ``complete``. Memory: one number a sample
    and one list.

    Args:
        passes: Whether ids count the passes over sources that start again. Then only the number of ids is known, and
            memory is one sorted list of all ids.
    """
    import numpy as np

    if passes:
        every_id = np.concatenate([np.empty(0, np.int64), *(np.array(of_batch, np.int64) for of_batch in ids)])
        every_id.sort()
        repeats_last = every_id[1:] == every_id[:-1]
        repeated = np.unique(every_id[1:][repeats_last]).tolist()
        lost = max(size - len(every_id), 0) if complete else 0
        return EpochProblems(size, missing=[], repeated=repeated, unknown=0, lost=lost)
    times = np.zeros(size, np.int32)
    unknown = 0
    for of_batch in ids:
        numbers = np.array(of_batch, np.int64)
        known = numbers[(numbers >= 0) & (numbers < size)]
        np.add.at(times, known, 1)
        unknown += len(numbers) - len(known)
    missing = np.flatnonzero(times == 0).tolist() if complete else []
    return EpochProblems(size, missing, np.flatnonzero(times > 1).tolist(), unknown)


def _first(values: Sequence[object], separator: str) -> str:
    """The first ``SHOWN`` values, for messages."""
    shown = [str(value) for value in values[:SHOWN]]
    if len(values) > SHOWN:
        shown.append("...")
    return separator.join(shown)

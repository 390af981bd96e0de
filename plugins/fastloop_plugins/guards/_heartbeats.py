"""Heartbeat files of the processes of a run. The ``watchdog`` of every process reads all of them."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fastloop.runtime import files

LISTED = 8
"""Maximum number of processes that a message describes."""


@dataclass(frozen=True)
class Heartbeat:
    """The progress of a process, as its file has it. Times are seconds since the epoch of ``time.time``.

    Attributes:
        moves: How many times the process made progress.
        step: Optimizer steps that it completed.
        where: The part of the step in which it is.
        since: When it came there.
        written: When it wrote the file.
    """

    moves: int
    step: int
    where: str
    since: float
    written: float


class RankHeartbeats:
    """Progress of this process, and, from the other processes' files, the process that blocks the run.

    Args:
        folder: Folder of the heartbeat files, shared by all processes.
        timeout: Seconds without progress that are too many. A process that wrote no heartbeat for half of it does not
            respond.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self.folder = folder
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.moves = 0
        self.where = ""
        self.since = 0.0

    def move(self, where: str) -> None:
        """Record that this process made progress."""
        self.moves += 1
        self.where = where
        self.since = time.monotonic()

    def seconds_idle(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.since

    def write(self, step: int) -> None:
        """Write this process's heartbeat file."""
        now = time.time()
        heartbeat = Heartbeat(
            moves=self.moves,
            step=step,
            where=self.where,
            since=now - self.seconds_idle(),
            written=now,
        )
        files.write(self._file(self.rank), json.dumps(asdict(heartbeat)), durable=False, hidden=True)

    def diagnose(self) -> str:
        """Describe the processes that block the run: those that do not respond, else those with the least progress."""
        heartbeats = self._read()
        now = time.time()
        silent = []
        for rank in range(self.world_size):
            if rank not in heartbeats or now - heartbeats[rank].written > self.timeout / 2:
                silent.append(rank)
        least = min(heartbeat.moves for heartbeat in heartbeats.values())
        behind = [rank for rank, heartbeat in heartbeats.items() if heartbeat.moves == least]
        not_begun = Heartbeat(moves=0, step=0, where="not yet begun", since=now, written=now)
        lines = []
        for rank in (silent or behind)[:LISTED]:
            heartbeat = heartbeats.get(rank, not_begun)
            line = (
                f"process {rank} of {self.world_size} has made no progress for {now - heartbeat.since:.0f} seconds: "
                f"at step {heartbeat.step + 1}, {heartbeat.where}."
            )
            if rank in silent:
                line += " It does not respond: it is stopped, has ended, is inside native code, or its machine is lost."
            lines.append(line)
        return " ".join(lines)

    def _read(self) -> dict[int, Heartbeat]:
        """Rank -> the heartbeat of each process that has written one."""
        heartbeats = {}
        for rank in range(self.world_size):
            path = self._file(rank)
            if path.is_file():
                heartbeats[rank] = Heartbeat(**json.loads(path.read_text()))
        return heartbeats

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.json"

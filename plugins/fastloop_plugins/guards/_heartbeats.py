"""Heartbeat files of the processes of a run. The ``watchdog`` of every process reads all of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fastloop.runtime import files


class RankHeartbeats:
    """Progress of this process, and, from the other processes' files, the process that blocks the run.

    Args:
        folder: Folder of the heartbeat files, shared by all processes.
        timeout: Seconds without progress that are too many. A process that wrote no heartbeat for half of it does not
            respond.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self.folder, self.rank, self.world_size, self.timeout = folder, rank, world_size, timeout
        self.moves, self.where, self.since = 0, "", 0.0

    def move(self, where: str) -> None:
        """Record that this process made progress."""
        self.moves, self.where, self.since = self.moves + 1, where, time.monotonic()

    def seconds_idle(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.since

    def write(self, step: int) -> None:
        """Write this process's heartbeat file."""
        now = time.time()
        heartbeat = {
            "moves": self.moves,
            "step": step,
            "where": self.where,
            "since": now - self.seconds_idle(),
            "written": now,
        }
        files.write(self.folder / f"rank-{self.rank}.json", json.dumps(heartbeat), durable=False, hidden=True)

    def diagnose(self) -> str:
        """Describe the processes that block the run: those that do not respond, else those with the least progress."""
        heartbeats: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            path = self.folder / f"rank-{rank}.json"
            if path.is_file():
                heartbeats[rank] = json.loads(path.read_text())
        now = time.time()
        silent = [
            rank
            for rank in range(self.world_size)
            if rank not in heartbeats or now - heartbeats[rank]["written"] > self.timeout / 2
        ]
        least = min(heartbeat["moves"] for heartbeat in heartbeats.values())
        behind = [rank for rank, heartbeat in heartbeats.items() if heartbeat["moves"] == least]
        lines = []
        for rank in (silent or behind)[:8]:
            heartbeat = heartbeats.get(rank, {"step": 0, "where": "not yet begun", "since": now})
            reasons = "it is stopped, has ended, is inside native code, or its machine is lost"
            stopped = f" It does not respond: {reasons}." if rank in silent else ""
            lines.append(
                f"process {rank} of {self.world_size} has made no progress for {now - heartbeat['since']:.0f} seconds: "
                f"at step {heartbeat['step'] + 1}, {heartbeat['where']}.{stopped}"
            )
        return " ".join(lines)

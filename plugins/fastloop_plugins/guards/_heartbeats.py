"""Where each process of a run stands: files beside each other that the plugin ``watchdog`` of every process reads."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from fastloop.runtime import files


class RankHeartbeats:
    """Where this process stands, and, from what the others tell, who holds up the run.

    Args:
        folder: Of the files, which all processes share.
        timeout: Seconds without a move that are too many; one that told nothing for half of it does not answer.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self.folder, self.rank, self.world_size, self.timeout = folder, rank, world_size, timeout
        self.moves, self.where, self.since = 0, "", 0.0

    def move(self, where: str) -> None:
        """This process got somewhere."""
        self.moves, self.where, self.since = self.moves + 1, where, time.monotonic()

    def stood(self) -> float:
        """Seconds since its last move."""
        return time.monotonic() - self.since

    def tell(self, step: int) -> None:
        """Write it down for the others."""
        now = time.time()
        place = {"moves": self.moves, "step": step, "where": self.where, "since": now - self.stood(), "told": now}
        files.write(self.folder / f"rank-{self.rank}.json", json.dumps(place))

    def verdict(self) -> str:
        """Who holds up the run: a process that does not even tell its place, else the one that came least far."""
        places: dict[int, dict[str, Any]] = {}
        for rank in range(self.world_size):
            path = self.folder / f"rank-{rank}.json"
            if path.is_file():
                places[rank] = json.loads(path.read_text())
        now = time.time()
        silent = [rank for rank in range(self.world_size) if rank not in places or now - places[rank]["told"] > self.timeout / 2]
        least = min(place["moves"] for place in places.values())
        behind = [rank for rank, place in places.items() if place["moves"] == least]
        lines = []
        for rank in (silent or behind)[:8]:
            place = places.get(rank, {"step": 0, "where": "not yet begun", "since": now})
            stopped = " It does not answer: it is stopped, gone, or inside native code." if rank in silent else ""
            lines.append(
                f"process {rank} of {self.world_size} has not moved for {now - place['since']:.0f} seconds: "
                f"at step {place['step'] + 1}, {place['where']}.{stopped}"
            )
        return " ".join(lines)

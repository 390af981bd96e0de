"""A cache for the logits of texts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastloop_distill.rows import TeacherRows

if TYPE_CHECKING:
    from fastloop import Run

ENTRY = 300
"""Bytes of an entry beside its logits: the key and two Python objects."""


class Cache:
    """The logits of texts by the hash of their token ids, on the CPU.

    Args:
        room: Bytes of all entries; 0: no cache. A full cache keeps its entries.

    Attributes:
        active: Whether it is used. Trials before training would fill it in other batches, whose logits have other bits.
        known: Hash of a text -> its logits.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.active = False
        self.known = dict[int, Tensor]()

    def logits(self, rows: TeacherRows, count: int, compute: Callable[[dict[str, Tensor]], Any]) -> Tensor:
        """The logits of the first ``count`` rows, (count, C). ``compute`` gives the output for rows."""
        if not (self.active and self.room):
            computed: Tensor = compute(rows.inputs).logits[:count]
            return computed
        keys = rows.keys()[:count]
        texts = {key: self.known[key] for key in keys if key in self.known}
        missing = [row for row, key in enumerate(keys) if key not in self.known]
        if missing:
            inputs = {name: value[missing] for name, value in rows.inputs.items()}
            logits = compute(inputs).logits.cpu()
            new = dict[int, Tensor]()
            for row, row_logits in zip(missing, logits, strict=True):
                new[keys[row]] = row_logits.clone()  # a view would keep the logits of all rows
            most = self.room // (ENTRY + logits[0].nbytes)
            free = max(most - len(self.known), 0)
            self.known.update(islice(new.items(), free))
            texts |= new
        return torch.stack([texts[key] for key in keys]).to(rows.real.device)

    def save(self, run: Run) -> dict[str, Any]:
        """The entries of each process. With them, a resumed run computes no text again in a batch that gives other
        bits. Every process must call it."""
        keys = torch.tensor(list(self.known))
        logits = torch.stack(list(self.known.values())) if self.known else torch.empty(0, 0)
        return {"known": run.processes.all_gather_object((keys, logits))}

    def load(self, state: dict[str, Any], run: Run) -> None:
        """Take the result of ``save``; on another number of processes, the entries of all."""
        by_process = state["known"]
        if len(by_process) == run.world_size:
            by_process = [by_process[run.processes.rank]]
        self.known = {}
        for keys, logits in by_process:
            self.known.update(zip(keys.tolist(), logits.clone(), strict=True))

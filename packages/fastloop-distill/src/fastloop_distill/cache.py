"""A cache for the logits of texts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastloop_distill.rows import TeacherRows

ENTRY = 300
"""Bytes of an entry beside its logits: the key and two Python objects."""


class Cache:
    """The logits of texts by the hash of their token ids, on the CPU.

    Args:
        room: Bytes; full, it keeps what it has.

    Attributes:
        active: Trials before training would fill it in other batches, whose logits have other bits.
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
        new = dict[int, Tensor]()
        missing = [place for place, key in enumerate(keys) if key not in self.known]
        if missing:
            logits = compute({name: value[missing] for name, value in rows.inputs.items()}).logits.cpu()
            for place, logits_of_text in zip(missing, logits, strict=True):
                new[keys[place]] = logits_of_text.clone()
            fitting = self.room // (ENTRY + logits[0].nbytes) - len(self.known)
            self.known.update(islice(new.items(), max(fitting, 0)))
        every_logit = [self.known[key] if key in self.known else new[key] for key in keys]
        return torch.stack(every_logit).to(rows.real.device)

    def save(self, processes: Any) -> dict[str, Any]:
        """The entries of each process. With them, a resumed run computes no text again in a batch that gives other
        bits. Every process must call it."""
        values = torch.stack([*self.known.values()]) if self.known else torch.empty(0, 0)
        return {"known": processes.all_gather_object((torch.tensor([*self.known]), values))}

    def load(self, state: dict[str, Any], processes: Any) -> None:
        """Take the result of ``save``; on another number of processes, the entries of all."""
        entries = state["known"]
        rank = processes.rank
        own = entries if len(entries) != processes.world_size else entries[rank : rank + 1]
        self.known = {}
        for keys, values in own:
            self.known.update(zip(keys.tolist(), values.clone(), strict=True))

"""The sample ids of each micro-batch of an epoch."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from fastloop.data.block_order import BlockAnnouncer, draw_block_order

AHEAD = 16
"""Micro-batches whose samples a dataset begins to read from its disk before they are needed: enough to keep a disk
busy, and few megabytes of memory."""


class MicroBatchIds(list[int]):
    """The sample ids of one micro-batch.

    Attributes:
        seed: Seed of a worker's random numbers while it reads the samples.
        epoch: The training epoch that it is in; None: an evaluation reads it.
        is_of_first_step: Whether it is in the first step of the epoch.
        is_filler: Whether the process has no share of this micro-step; see ``FillerCandidates``.
        is_last_micro_batch: Whether it is its step's last on this process.
    """

    seed: int = 0
    epoch: int | None = None
    is_of_first_step: bool = False
    is_filler: bool = False
    is_last_micro_batch: bool = False


class StepSampler(Sampler[MicroBatchIds]):
    """Sample ids of every micro-batch of this process in an epoch, from the position that ``set_position`` set on.

    Args:
        size: Samples of an epoch: of the dataset or of ``user_order``.
        batch_size: Samples of an optimizer step, over all processes.
        micro_batch_size: Samples of a micro-batch on one process.
        shuffle: Whether to permute the ids and to pass a generator to ``arrange``, in training. Otherwise the ids are
            sorted.
        arrange: Reorders ids; see ``Settings``, without its first argument.
        split_step: Divides a step's ids into micro-batches; see ``Settings``, without its first argument.
        pieces: Number of micro-batches to cut each micro-batch of ``split_step`` into.
        user_order: Epoch -> sample ids, for the order of a user's sampler; None: fastloop's.
        full_batch_size: Drop the last samples of an epoch that do not fill a batch of this size; 0: keep all.
        shuffle_block: With ``shuffle``: permute the ids in blocks of this many, see ``draw_block_order``; None: the
            epoch as a whole.

    Attributes:
        drawn: Samples of an epoch before the last ones are dropped.
        size: Samples used per epoch: a multiple of ``full_batch_size``, if it is not 0.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
        arrange: Callable[[list[int], int, torch.Generator | None], list[int]] | None = None,
        split_step: Callable[[list[int], int], list[list[int]]] | None = None,
        pieces: int = 1,
        user_order: Callable[[int], list[int]] | None = None,
        full_batch_size: int = 0,
        shuffle_block: int | None = None,
    ) -> None:
        self.drawn = size
        self.size = size
        if full_batch_size > 0:
            self.size = size // full_batch_size * full_batch_size  # 64 of 67 samples, in batches of 8
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.arrange = arrange
        self.split_step = split_step
        self.pieces = pieces
        self.user_order = user_order
        self.shuffle_block = shuffle_block
        self.epoch = 0
        self.start = 0

    def set_position(self, epoch: int, start: int) -> None:
        """Let ``__iter__`` begin in an epoch, after its first ``start`` samples."""
        self.epoch = epoch
        self.start = start

    def order(self, epoch: int | None = None) -> Sequence[int]:
        """All sample ids in the order of an epoch; None: the current one. Without ``arrange``, each takes 4 bytes, or 8
        in a dataset of 2 billion samples."""
        epoch = self.epoch if epoch is None else epoch
        generator = torch.Generator().manual_seed(self.seed + epoch) if self.shuffle else None
        ids: Sequence[int] = range(self.drawn)
        if self.user_order is not None:
            ids = self.user_order(epoch)
        elif generator is not None and self.shuffle_block is not None:
            ids = draw_block_order(self.drawn, self.shuffle_block, generator).data
        elif generator is not None:
            kind = torch.int32 if self.drawn < 2**31 else torch.int64  # both give the same permutation
            ids = torch.randperm(self.drawn, generator=generator, dtype=kind).numpy().data
        ids = ids[: self.size]
        return ids if self.arrange is None else self.arrange(list(ids), self.batch_size, generator)

    def fingerprint(self, epoch: int = 0) -> str:
        """A string that changes with the samples and their order in an epoch; empty for all samples in the default
        order."""
        parts = []
        if self.size < self.drawn:
            parts.append(f"{self.size} of an epoch's {self.drawn} taken")
        if self.shuffle and self.shuffle_block is not None:
            parts.append(f"shuffled in blocks of {self.shuffle_block}")
        # Evaluations have no order to compare: a run that resumes begins an evaluation from its first sample. There,
        # ``shuffle`` is False and ``arrange`` gets no generator.
        is_default = self.user_order is None and (self.arrange is None or not self.shuffle)
        if not is_default:
            digest = hashlib.sha256(np.array(self.order(epoch), np.int64).tobytes()).hexdigest()[:12]
            parts.append(f"{self.drawn} drawn in the order {digest}")
        return " ".join(parts)

    def steps(self, first: int = 0) -> Iterator[tuple[int, list[list[int]]]]:
        """Yield the position of each step's first sample in the epoch, and the micro-batches of all processes.

        With a batch of 8 samples and micro-batches of 3, a step has micro-batches of 3, 3 and 2 samples.
        """
        order = self.order()
        for start in range(first, self.size, self.batch_size):
            ids = list(order[start : start + self.batch_size])
            if self.split_step is not None:
                micro_batches = []
                for part in self.split_step(ids, self.world_size):
                    micro_batches += cut(part, math.ceil(len(part) / self.pieces))
                yield start, micro_batches
            elif len(ids) <= self.micro_batch_size:
                yield start, [ids]
            else:
                yield start, cut(ids, self.micro_batch_size)

    def __iter__(self) -> Iterator[MicroBatchIds]:
        """Yield the micro-batches of this process.

        Processes take them in turns: with 5 micro-batches and 2 processes, rank 0 has the first, third and fifth, and
        rank 1 the second and fourth. It also reads the fifth, as a filler without samples of its own.
        """
        for start, parts in self.steps(self.start):
            for first in range(0, len(parts), self.world_size):
                own = first + self.rank
                is_filler = own >= len(parts)
                ids = MicroBatchIds(parts[first] if is_filler else parts[own])
                ids.is_filler = is_filler
                ids.is_last_micro_batch = first + self.world_size >= len(parts)
                if self.shuffle:
                    ids.epoch = self.epoch
                ids.is_of_first_step = start == 0
                # in a step that starts at sample 80, with parts of 3, 3 and 2 samples, the third starts at sample 86
                position = start
                for part in parts[:own]:
                    position += len(part)
                ids.seed = hash((self.seed, self.epoch, position)) % 2**32
                yield ids


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Consecutive parts of ``size`` ids; the last one may have fewer."""
    return [ids[at : at + size] for at in range(0, len(ids), size)]


class AnnouncedMicroBatches(Sampler[MicroBatchIds]):
    """The micro-batches of a sampler in its order. A function gets each of them ``AHEAD`` micro-batches before.

    Args:
        announce: The function of ``DatasetProtocol.read_at_random``.
    """

    def __init__(self, sampler: StepSampler, announce: Callable[[Sequence[int]], None]) -> None:
        self.sampler = sampler
        self.announce = announce

    def __iter__(self) -> Iterator[MicroBatchIds]:
        announce = self.announce
        if self.sampler.shuffle_block is not None:
            announce = BlockAnnouncer(announce, self.sampler.drawn, self.sampler.shuffle_block)
        waiting = deque[MicroBatchIds]()
        for ids in self.sampler:
            announce(ids)
            waiting.append(ids)
            if len(waiting) > AHEAD:
                yield waiting.popleft()
        yield from waiting

"""A large split of which a run reads few rows: only these are tokenized before training.

If each row is one sample, the order of samples follows from their number, the seed and the epoch. So a run of few steps
reads the samples that it would read if all rows were tokenized, and computes the same numbers. Otherwise the number of
samples, from which their order is drawn, depends on the tokens of all rows. Then only a run that checks a recipe
tokenizes a part: the first rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop.splits import SPLITS
from fastloop_plugins._mapped import zeros
from fastloop_plugins.text.sequences import Sequences, hash_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop import Run
    from fastloop_plugins._cache import Flat
    from fastloop_plugins.text.split_encoder import SplitEncoder
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

LEFT_OUT = 16_384
"""Rows that a run does not read, from which on they are not tokenized. Fewer of them take about a second."""


@dataclass(frozen=True)
class FirstRows:
    """The first rows of each split, enough for a number of samples: for a run that only checks a recipe.

    Attributes:
        samples: The samples that the run reads of a split, given its name; None: all.
        count: Returns the number of samples that token ids of some rows give.
    """

    samples: Callable[[str], int | None]
    count: Callable[[Flat], int]


@dataclass(frozen=True)
class Needs:
    """The rows of each split that a run reads.

    Attributes:
        find: Returns the rows of a split, (rows,) int64, rising, given its name and its number of rows; None: all.
        about: All that ``find`` depends on beside its arguments: it is part of the name of a cache entry.
    """

    find: Callable[[str, int], NDArray[np.int64] | None]
    about: str


def find_needs(run: Run) -> Needs | None:
    """The rows that a run reads of each split, if each row is one sample. None: it reads all rows."""
    counts = {split: run.loaders.count_samples_to_read(split) for split in SPLITS}
    if not any(counts.values()):
        return None

    def find(split: str, total: int) -> NDArray[np.int64] | None:
        ids = run.loaders.find_samples_to_read(split, total)
        if ids is None or total - len(ids) < LEFT_OUT:
            return None
        ids.sort()
        return ids

    train = run.recipe.train
    about = [counts, train.seed, train.drop_last, train.batch_size, LEFT_OUT, run.settings.shuffle_block]
    return Needs(find, json.dumps(about))


@dataclass(frozen=True)
class NeededRows:
    """The rows of a split that are tokenized before training.

    Attributes:
        ids: (rows,) int64, their numbers in the split, rising.
        total: Rows of the split.
        open_encoder: Returns the encoder of all rows. If the cache has those of the run, this reads the data.
    """

    ids: NDArray[np.int64]
    total: int
    open_encoder: Callable[[], SplitEncoder]

    def announce(self, split: str) -> None:
        """Log how many rows are tokenized."""
        logger.info(
            "tokens: %s: %d of %d rows are tokenized: this run reads no others. Texts that are cut are counted among "
            "them", split, len(self.ids), self.total,
        )  # fmt: skip


class NeededSamples:
    """The samples of a split of which only some rows are tokenized.

    Any other sample is tokenized when it is read. All of them are when something asks for their lengths.

    Args:
        split: The split, with the labels of all rows.
        needed: Its rows that are tokenized.
        samples: The samples of these rows.
        build: Returns the samples of some rows, as ``TextTask.build_dataset``.

    Attributes:
        encoded: ``samples``, for checks that need no particular ones.
        labels: The label of every sample, as in ``Sequences``.
    """

    deterministic = True

    def __init__(
        self, split: Split, needed: NeededRows, samples: Sequences, build: Callable[[Split], Sequences]
    ) -> None:
        self.encoded = samples
        self.labels = split.labels
        self._split = split
        self._needed = needed
        self._build = build
        self._all: Sequences | None = None
        self._places: NDArray[np.int32] = zeros(needed.total, np.int32)  # in ``encoded``; -1: not there
        self._places[:] = -1
        self._places[needed.ids] = np.arange(len(needed.ids))

    def __len__(self) -> int:
        return self._needed.total

    def __reduce__(self) -> Any:
        return _itself, (self.complete(),)  # a data worker that is started, and not forked, cannot tokenize

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        if self._all is not None:
            return [self._all[index] for index in indices]
        places = self._places[list(indices)]
        is_missing = places < 0
        missing = np.asarray(indices, np.int64)[is_missing]
        others: Iterator[dict[str, Any]] = iter(())
        if len(missing):
            others = iter(self._encode(missing))
        samples = []
        for place in places.tolist():
            if place < 0:
                samples.append(next(others))
            else:
                samples.append(self.encoded[place])
        return samples

    def _encode(self, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
        """The samples of rows that were not tokenized before training."""
        labels = None if self.labels is None else self.labels[ids]
        samples = self._build(self._split.with_ids(self._needed.open_encoder().encode_some(ids), labels))
        return [samples[index] for index in range(len(ids))]

    def complete(self) -> Sequences:
        """All samples. The first call tokenizes them."""
        if self._all is None:
            self._all = self._build(self._split.with_ids(self._needed.open_encoder().encode(), self.labels))
        return self._all

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every sample."""
        return self.complete().lengths

    def fingerprint(self) -> str:
        """As that of all samples; see ``Sequences``."""
        return hash_samples(self, self._split.content)

    def read_at_random(self) -> Callable[[Sequence[int]], None] | None:
        """See ``fastloop.data.DatasetProtocol``."""
        start = self.encoded.read_at_random()
        if start is None:
            return None

        def start_reading(samples: Sequence[int]) -> None:
            places = self._places[list(samples)]
            is_encoded = places >= 0
            start(places[is_encoded].tolist())

        return start_reading


def propose_limit(rows: int, samples: int) -> None:
    """Log that a run of few steps tokenizes many rows that it does not read, and how to avoid that.

    Args:
        rows: Those of ``train``, which are about to be tokenized.
        samples: Samples that the run reads.
    """
    if rows - samples >= LEFT_OUT:
        logger.info(
            "tokens: train: all %d rows are tokenized, and this run reads %d samples. Their order is drawn from the "
            "number of all samples, which depends on the tokens of all rows. To tokenize fewer, and so to train on "
            "other samples: data.limit.train=ROWS", rows, samples,
        )  # fmt: skip


def _itself(samples: Sequences) -> Sequences:
    return samples

"""Datasets of token ids: in memory, or mapped from a cache on the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem
from fastloop.problem import agree, counted_of
from fastloop_plugins import _cache
from fastloop_plugins._mapped import RandomReads, cumsum, flat, mapping_of, spans, zeros

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins._cache import Flat

logger = logging.getLogger("fastloop")

HASHED = 2**24
"""Token ids that a fingerprint covers, approximately at most."""
PIECE = 2**14
"""Token ids of a piece that a fingerprint covers without a gap."""
PROBED = 64
"""Samples that a fingerprint covers beside a hash of the rows: other token ids of the same rows show in a few."""


class Sequences:
    """A map-style dataset of token ids in one array. Reading a sample is a slice, and workers share the memory.

    A sample has token ids and its label. Other columns of a file, such as an identifier, are not kept: a subclass adds
    further values of a row in ``__getitem__``.

    Args:
        ids: Token ids of all samples, end to end. If mapped from a file, only the parts in use are in memory.
        lengths: Tokens of every sample.
        labels: Label of every sample, if there are labels: classes (N,) int64, numbers (N,) float32, or 0 and 1 (N,
            classes) float32.
        typed: Whether each sample has its ids and then the type of each token; ``lengths`` counts both.

    Attributes:
        lengths: Tokens of every sample, used to group or pack samples.
        content: A hash of the rows, if each is one sample. The fingerprint is then known without the ids of all.
    """

    deterministic = True
    content = ""

    def __init__(
        self,
        ids: NDArray[np.int32],
        lengths: NDArray[np.int64],
        labels: NDArray[Any] | None = None,
        typed: bool = False,
    ) -> None:
        self.ids = ids
        self.labels = labels
        self.typed = typed
        self.lengths: NDArray[np.int64] = lengths
        if typed:
            self.lengths = np.floor_divide(lengths, 2, out=zeros(len(lengths), np.int64))
        self.ends: NDArray[np.int64] = cumsum(lengths)

    def __len__(self) -> int:
        return len(self.ends)

    def fingerprint(self) -> str:
        """A hash of lengths, labels and token ids; for large datasets, of evenly spaced pieces of the ids. With
        ``content``, see ``hash_samples``."""
        import hashlib

        if self.content:
            return hash_samples(self, self.content)
        digest = hashlib.blake2b(digest_size=8)
        for values in (self.lengths, self.labels):
            if values is None:
                continue
            for span in spans(len(values)):
                digest.update(np.ascontiguousarray(values[span]).data)
        # the first piece of every ``share``: with twice HASHED ids, every second piece
        share = max(-(-len(self.ids) // HASHED), 1)
        for start in range(0, len(self.ids), PIECE * share):
            digest.update(self.ids[start : start + PIECE].tobytes())
        return digest.hexdigest()

    def __getitem__(self, index: int) -> dict[str, Any]:
        end = self.ends[index]
        length = self.lengths[index]
        sample: dict[str, Any] = {"input_ids": self.ids[end - length : end]}
        if self.typed:
            sample = {
                "input_ids": self.ids[end - 2 * length : end - length],
                "token_type_ids": self.ids[end - length : end],
            }
        return sample | self.label(index)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]

    def read_at_random(self) -> Callable[[Sequence[int]], None] | None:
        """A function that begins to read samples ahead; see ``fastloop.data.DatasetProtocol``. None: the ids are in
        memory."""
        mapping = mapping_of(self.ids)
        if mapping is None:
            return None
        reads = RandomReads(self.ids, mapping)
        parts = 2 if self.typed else 1  # of a sample, as long as ``lengths`` says each

        def start_reading(samples: Sequence[int]) -> None:
            ends = self.ends[samples]
            reads.start(np.maximum(ends - parts * self.lengths[samples], 0), ends)

        return start_reading

    def label(self, index: int) -> dict[str, Any]:
        """The label of a sample, if there are labels."""
        if self.labels is None:
            return {}
        label = self.labels[index]
        return {"label": int(label) if self.labels.dtype == np.int64 else label}


def probed_samples(total: int) -> range:
    """The samples that a hash covers: ``PROBED`` at most, evenly spaced."""
    return range(0, total, -(-total // PROBED) or 1)


def hash_samples(dataset: Any, content: str) -> str:
    """A hash of the rows of a dataset, of their labels, and of some samples, evenly spaced.

    Args:
        dataset: Map-style, with ``labels`` and ``__getitems__``.
        content: A hash of the rows.
    """
    import hashlib

    digest = hashlib.blake2b(content.encode(), digest_size=8)
    if dataset.labels is not None:
        for span in spans(len(dataset)):
            digest.update(np.ascontiguousarray(dataset.labels[span]).data)
    for sample in dataset.__getitems__(probed_samples(len(dataset))):
        for value in sample.values():
            digest.update(np.asarray(value).tobytes())
    return digest.hexdigest()


def cache_token_ids(about: Iterable[str | bytes], rows: Iterable[Sequence[int]]) -> Flat:
    """The ids of all rows end to end, int32, and the length of each row, int64.

    Call it in ``build_datasets``, and declare the trait ``cached-token-ids``. In a run with `token-cache`, the ids are
    mapped from disk, and ``rows`` is read only if they are not there yet. Without the plugin, they are in memory.

    Args:
        about: Everything that determines the ids: the texts, the tokenizer, its options, a version of the code.
        rows: Ids of each text. An iterator, so that nothing is tokenized if the ids are cached.
    """
    folder = _cache.use_token_folder()
    if folder is None:
        return flat(rows)
    return _cache.read_or_write(folder, _cache.digest(["rows", *about]), lambda start: islice(rows, start, None))


def join_ids(parts: Iterable[tuple[Sequence[int], bool]]) -> list[int]:
    """One list for a row of several texts: ``2 * tokens + truncated`` of each text, and then the ids of each.

    For the ids ``[5, 6]`` and ``[7]``, of which the second is truncated: ``[4, 3, 5, 6, 7]``.

    Args:
        parts: The ids of each text, and whether truncation shortened it.
    """
    facts: list[int] = []
    tokens: list[int] = []
    for ids, is_cut in parts:
        facts.append(2 * len(ids) + int(is_cut))
        tokens += ids
    return facts + tokens


class ColumnSequences(Sequences):
    """Rows of several texts. A sample has the ids of each text by the name of its column, (tokens,) int32.

    Args:
        names: The columns.
        ids: The rows of ``join_ids``, end to end.
        lengths: Length of every row.
        labels: As for ``Sequences``.

    Attributes:
        lengths: Tokens of all texts of a row.
    """

    def __init__(
        self,
        names: Sequence[str],
        ids: NDArray[np.int32],
        lengths: NDArray[np.int64],
        labels: NDArray[Any] | None = None,
    ) -> None:
        super().__init__(ids, lengths, labels)
        self.names = tuple(names)
        count = len(names)
        self.borders: NDArray[np.int64] = zeros((len(lengths), count + 1), np.int64)
        self.lengths = np.subtract(lengths, count, out=zeros(len(lengths), np.int64))
        cut = np.zeros(count, np.int64)
        for span in spans(len(lengths)):
            starts = self.ends[span] - lengths[span]
            # (rows, columns) the first numbers of each row: [4, 3] of [4, 3, 5, 6, 7], whose borders are [2, 4, 5]
            facts = ids[starts[:, None] + np.arange(count)]
            self.borders[span] = np.cumsum(np.column_stack([starts + count, facts // 2]), axis=1)
            cut += (facts % 2).sum(0)
        self.cut = cut.tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        borders = self.borders[index]
        parts = zip(self.names, borders[:-1], borders[1:], strict=True)
        return {name: self.ids[start:end] for name, start, end in parts} | self.label(index)

    def warn(self, split: str, columns: Sequence[str], sizes: Sequence[tuple[str, int]]) -> None:
        """Log how many texts are cut.

        Args:
            columns: The name of each column's texts in messages.
            sizes: The option of ``data`` that limits each column, and its value.
        """
        for texts, count, (option, size) in zip(columns, self.cut, sizes, strict=True):
            if count:
                logger.warning(describe_cut(split, count, len(self), texts, size, option))


def describe_cut(split: str, count: int, total: int, texts: str, size: int, option: str = "max_length") -> Problem:
    """The warning about texts that are longer than the option of ``data`` allows: ``size`` tokens.

    Args:
        texts: Their name in the message, such as ``texts`` or ``inputs``.
    """
    return Problem(
        f"{counted_of(count, total, texts)} {agree(count, 'is', 'are')} cut at {size} tokens "
        f"(data.{option}): {count / total:.1%}.",
        code="texts-cut",
        place=f"data: {split}",
    )

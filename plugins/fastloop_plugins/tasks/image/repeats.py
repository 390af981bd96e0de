"""Images that repeat each other: within train, in train and another split, and in folders of different classes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastloop import Problem
from fastloop_plugins.rows.split_rows import hash_rows
from fastloop_plugins.text.repeats import ComparedSamples, Wording, describe_repeats

if TYPE_CHECKING:
    from fastloop_plugins.tasks.image.data import ImageFiles

logger = logging.getLogger("fastloop")

READ_BYTES = 2**30
"""Bytes of files to read at most: about two seconds on one CPU core."""


def find_repeated_images(splits: Mapping[str, ImageFiles], classes: Sequence[str]) -> list[Problem]:
    """Compare the files of ``train`` with each other and with those of the other splits, by their contents. Returns
    warnings, at most two.

    Only files of equal size can be equal, so only they are read: the smallest ones first, up to ``READ_BYTES``.

    Args:
        classes: Names of the classes, by ``ImageFiles.labels``.
    """
    paths = {split: [files.root / name for name in files.names] for split, files in splits.items()}
    digests = _digests(list(chain.from_iterable(paths.values())))
    samples = {}
    for split, listed in paths.items():
        contents = [digests.get(path, str(path)) for path in listed]  # a file that is not read equals no other
        samples[split] = ComparedSamples(hash_rows(contents)[:, 0], np.asarray(splits[split].labels))
    wording = Wording(
        samples="images",
        contents="images",
        show=lambda split, index: str(paths[split][index]),
        name_label=lambda label: repr(classes[int(label)]),
        remove="Remove these files unless they are intended",
    )
    return describe_repeats(samples, wording)


def _digests(paths: Sequence[Path]) -> dict[Path, str]:
    """Path -> a hash of the content, for the files whose size another one has."""
    sizes = np.array([path.stat().st_size for path in paths], np.int64)
    distinct, counts = np.unique(sizes, return_counts=True)
    totals = np.cumsum(np.where(counts > 1, distinct * counts, 0))
    read = (counts > 1) & (totals <= READ_BYTES)
    left_out = int(counts[(counts > 1) & ~read].sum())
    if left_out:
        logger.info(
            "data: %d images are not compared with others of their size: that would read more than %d MiB",
            left_out,
            READ_BYTES // 2**20,
        )
    chosen = [paths[index] for index in np.flatnonzero(np.isin(sizes, distinct[read])).tolist()]
    with ThreadPoolExecutor(4) as pool:  # files are read, and hashed, without the GIL
        return dict(zip(chosen, pool.map(_digest, chosen), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

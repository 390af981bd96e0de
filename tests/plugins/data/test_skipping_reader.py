"""Samples that cannot be read are left out of their micro-batch, in threads and workers alike.

Modules:
    plugins/fastloop_plugins/data/_skipping_reader.py
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from fastloop.data.datasets import FillerCandidates
from fastloop.data.sampler import MicroBatchIds
from fastloop.errors import DataError
from fastloop.testing import expect_problem
from fastloop_plugins.data._skipping_reader import FILLER_ATTEMPTS, SkippingReader


class Rows(Dataset[int]):
    """Ids as samples; some cannot be read."""

    def __init__(self, *bad: int, size: int = 300) -> None:
        self.bad, self.size = bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"row {index} is spoilt")
        return index


def read(*ids: int, rows: Rows) -> Any:
    return SkippingReader(rows).__getitems__(MicroBatchIds(ids))


def test_a_readable_micro_batch_is_that_of_the_plain_reader():
    samples = read(5, 3, 5, rows=Rows())
    assert (samples, samples.ids, samples.unreadable) == ([5, 3, 5], (5, 3, 5), ())


def test_each_unreadable_sample_is_reported_with_its_reason():
    samples = read(5, 3, 7, 3, rows=Rows(3))
    assert (samples, samples.ids) == ([5, 7], (5, 7))
    assert samples.unreadable == 2 * ((3, "ValueError: row 3 is spoilt"),)


def test_the_next_readable_sample_fills_a_micro_batch_without_one():
    (sample,) = samples = read(298, 299, rows=Rows(298, 299, 0))
    assert isinstance(sample, FillerCandidates)
    assert sample == [1]
    assert samples.ids == ()
    assert [index for index, _ in samples.unreadable] == [298, 299]


def test_without_a_filler_the_run_ends():
    with expect_problem(f"sample-unreadable 4 ValueError row {FILLER_ATTEMPTS}", DataError):
        read(4, rows=Rows(*range(300)))

"""Mapped token ids: which parts of a file the system reads, and when.

Modules:
    plugins/fastloop_plugins/_mapped.py
    plugins/fastloop_plugins/text/sequences.py
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_helpers import TINY, make_run

from fastloop_plugins._cache import read, read_or_write
from fastloop_plugins._mapped import RandomReads, join_parts, mapping_of, stored
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.text.sequences import Sequences

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads facts about mappings from Linux")
PAGE = mmap.PAGESIZE // 4
"""Token ids of a page."""


def has_random_advice(array: np.ndarray[Any, Any]) -> bool:
    """Whether the system has the advice of random reads for the memory of an array."""
    address = stored(array).__array_interface__["data"][0]
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split(" ")[0].partition("-")
        if last:
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and line.startswith("VmFlags:"):
            return "rr" in line.split()
    raise AssertionError("the array is in no mapping")


def pages_in_memory(array: np.ndarray[Any, Any]) -> list[bool]:
    """Whether each page of a mapped array, which begins at a page, is in memory."""
    found = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
    address = ctypes.c_void_p(array.__array_interface__["data"][0])
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(array.nbytes), found) == 0
    return [bool(page & 1) for page in found]


@linux
def test_a_shuffled_split_has_the_advice_of_random_reads_and_one_read_in_order_has_not():
    for name in ("train.csv", "validation.csv"):
        rows = "".join(f"film number {index} of {name},{index % 2}\n" for index in range(40))
        Path(name).write_text("text,label\n" + rows)
    data = {"files": {"train": "train.csv", "validation": "validation.csv"}, "label": "label", "max_length": 16}
    model = {"config": TINY, "tokenizer": {"kind": "word"}}
    run = make_run("text-classification", model, data, [TokenCache(folder="cache")])
    assert has_random_advice(run.datasets["train"].ids)
    assert not has_random_advice(run.datasets["validation"].ids)


@linux
@pytest.mark.parametrize("wanted", [[5, 40, 41], range(8, 56)], ids=["a batch", "a block of 192 KiB"])
def test_reading_ahead_reads_the_pages_of_the_samples_and_no_others(tmp_path, wanted):
    count = 64
    read_or_write(tmp_path, "entry", lambda start: [range(PAGE)] * (count - start))
    flat = read(tmp_path / "entry")
    assert flat is not None
    dataset = Sequences(*flat)
    file = os.open(tmp_path / "entry" / "ids.bin", os.O_RDONLY)
    for _ in range(50):  # pages that the system still writes are not dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if not any(pages_in_memory(dataset.ids)):
            break
        time.sleep(0.01)
    os.close(file)
    if any(pages_in_memory(dataset.ids)):
        pytest.skip("this file system keeps all files in memory")
    start_reading = dataset.read_at_random()
    assert start_reading is not None
    start_reading(wanted)
    expected = [page in wanted for page in range(count)]
    for _ in range(500):
        if pages_in_memory(dataset.ids) == expected:
            break
        time.sleep(0.01)
    assert pages_in_memory(dataset.ids) == expected
    assert dataset[40]["input_ids"].tolist() == list(range(PAGE))


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="the platform accepts no advice")
def test_parts_at_both_ends_of_a_view_of_a_mapping_can_be_read_ahead(tmp_path):
    np.arange(5000, dtype=np.int32).tofile(tmp_path / "ids")
    whole = np.memmap(tmp_path / "ids", dtype=np.int32, mode="r")
    views = [np.asarray(whole), whole[1::2], whole[3:], whole[:1]]
    for view in views:
        mapping = mapping_of(view)
        assert mapping is not None
        reads = RandomReads(view, mapping)
        reads.start(np.array([0, len(view) - 1]), np.array([1, len(view) + 9]))
        assert view[-1] == whole[view[-1]]


@pytest.mark.parametrize(
    ("starts", "ends", "joined"),
    [
        ([], [], []),
        ([0, 100, 200, 900], [110, 200, 240, 950], [(0, 240), (900, 950)]),
        ([0, 0, 0], [40, 80, 20], [(0, 80)]),
        ([900, 0, 100], [950, 100, 120], [(900, 950), (0, 120)]),
    ],
)
def test_neighbors_are_read_ahead_as_one_part(starts, ends, joined):
    assert join_parts(starts, ends) == joined


def test_ids_in_memory_have_nothing_to_read_ahead():
    dataset = Sequences(np.arange(10, dtype=np.int32), np.array([4, 6]))
    assert mapping_of(dataset.ids) is None
    assert dataset.read_at_random() is None

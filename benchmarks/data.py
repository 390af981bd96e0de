"""Data of any size: reading of token ids that are mapped from a disk, and starts of trainings on many rows.

    python benchmarks/data.py reads                      # 1 million rows, about 0.8 GB
    mkdir /sys/fs/cgroup/memory/small && echo 700M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
    python benchmarks/data.py reads --rows 3000000 --cgroup /sys/fs/cgroup/memory/small     # more than memory may hold
    python benchmarks/data.py starts                     # 0.2 and 1 million rows
    python benchmarks/data.py starts --rows 10000000 --arms texts     # adds rows to the tables

``reads`` writes an entry of ``token-cache``, and reads it through the loader of a run, each time in a fresh process:
batches of 32 rows, without workers and without training. ``cold``: the system has dropped the file from memory;
``warm``: it has read all of it. ``default advice`` is a mapping without advice: the system reads megabytes around each
page that is missing. ``random`` has the advice to read single pages, and ``random, ahead`` also begins to read each
batch 16 batches before: that is how fastloop reads a training split. ``random, in blocks`` has ``data.shuffle_block:
1024``. Evaluation reads ``in order``, with the default advice. A pass ends after ``--seconds``. ``KiB a row`` is what
the process had the disk read, for each row of the cold pass: other load does not change it. With ``--cgroup``, each
process joins that group of Linux, whose limit of memory covers the pages of the file, too. The default advice is fast
only if all of the file soon is in memory.

``starts`` writes a JSONL file with texts of 4 to 20 words, and trains a tiny model on it for 100 steps of 32 rows, with
``token-cache``, in a fresh process; and a second time, with the cache of the first. A tenth of the rows is held out.
The tokenizer is a saved one, as with a pretrained model. Seconds and CPU seconds are those from the imported libraries
to the first step. Memory is the anonymous memory of the process and its children, each shared page once, sampled every
20 ms (``Pss_Anon`` of ``smaps_rollup``). A sample during which a process started or ended does not count. The same
training on 1,000 rows is subtracted. ``cached MB`` is the size of the cache. ``cores of others`` are those that
other processes used meanwhile: beside them, only memory and CPU time can be compared. ``scan`` decodes each line with
``json.loads``, and keeps nothing. ``tokenizer`` gives the texts to the tokenizer's backend in one thread, three times;
the fastest counts.

The files are removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOKENS = 200
"""Tokens of a row on average."""
BATCH = 32
"""Rows of a batch."""
BLOCK = 1024
"""Rows of a block."""
ARMS = ("default advice", "random", "random, ahead", "random, in blocks", "in order")


def write_entry(folder: Path, rows: int) -> None:
    """Write rows of 100 to 300 random ids as an entry of the cache."""
    from fastloop_plugins._cache import read_or_write

    draw = np.random.default_rng(0)

    def ids() -> Iterator[Sequence[int]]:
        for length in draw.integers(TOKENS // 2, TOKENS * 3 // 2, rows).tolist():
            yield np.arange(length, dtype=np.int32)  # type: ignore[misc]

    read_or_write(folder, "rows", lambda start: islice(ids(), start, None))


def drop_from_memory(path: Path) -> None:
    """Have the system drop a file's pages. They are written already."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def bytes_read() -> int:
    """Bytes that the system has read from disks for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, count = line.partition(": ")
        if name == "read_bytes":
            return int(count)
    raise ValueError("/proc/self/io has no read_bytes")


def measure(arm: str, folder: Path, cold: bool, seconds: float) -> dict[str, Any]:
    """Read batches in this process."""
    from _measure import memory

    from fastloop import Batch, Settings
    from fastloop.data import Loader
    from fastloop_plugins import _cache
    from fastloop_plugins.text.sequences import Sequences

    class Plain(Sequences):
        """Rows that the system reads with its default advice."""

        def read_at_random(self) -> Callable[[Sequence[int]], None] | None:
            return None

    class NotAhead(Sequences):
        """Rows of which the system reads single pages, when they are needed."""

        def read_at_random(self) -> Callable[[Sequence[int]], None] | None:
            super().read_at_random()
            return None

    def collate(samples: list[Any]) -> Batch:
        return Batch(
            {}, tokens=sum(int(sample["input_ids"].sum() >= 0) * len(sample["input_ids"]) for sample in samples)
        )

    if cold:
        drop_from_memory(folder / "rows" / "ids.bin")
    else:
        with (folder / "rows" / "ids.bin").open("rb") as file:
            while file.read(2**24):
                pass
    flat = _cache.read(folder / "rows")
    assert flat is not None
    kind = {"default advice": Plain, "random": NotAhead}.get(arm, Sequences)
    settings = Settings(shuffle_block=BLOCK if arm == "random, in blocks" else None)
    loader = Loader(
        kind(*flat), collate, settings, batch_size=BATCH, micro_batch_size=BATCH, rank=0, world_size=1, seed=0,
        shuffle=arm != "in order",
    )  # fmt: skip
    rows = tokens = 0
    before = bytes_read()
    start = time.perf_counter()
    for batch in loader.batches():
        rows += batch.samples
        tokens += batch.tokens
        if time.perf_counter() - start > seconds:
            break
    taken = time.perf_counter() - start
    return {
        "arm": arm, "cold": cold, "rows": rows, "tokens": tokens, "seconds": taken, "peak": memory("VmHWM"),
        "read": bytes_read() - before,
    }  # fmt: skip


def run_reads(options: argparse.Namespace) -> None:
    """Measure every arm of reading, and write the results."""
    from _measure import load, machine, show_machine, spawn, table, write, write_section

    reads = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_entry(Path(name), options.rows)
        size = (Path(name) / "rows" / "ids.bin").stat().st_size
        for cold in ("cold", "warm"):
            for arm in ARMS:
                arguments = ["reads", "--folder", name, "--seconds", options.seconds, "--measure", arm, cold]
                arguments += [] if options.cgroup is None else ["--cgroup", options.cgroup]
                reads.append(spawn([Path(__file__).resolve(), *arguments]))
                print(reads[-1], flush=True)
    facts = machine("torch", "numpy")
    limit = None
    if options.cgroup is not None:
        limit = int((options.cgroup / "memory.limit_in_bytes").read_text())
    name = "data" if limit is None else "data_limited"
    write(name, {"machine": facts, "rows": options.rows, "bytes": size, "limit": limit, "reads": reads})
    rows = []
    for arm in ARMS:
        cells = [arm]
        for is_cold in (True, False):
            row = next(row for row in reads if (row["arm"], row["cold"]) == (arm, is_cold))
            cells += [f"{row['rows'] / row['seconds']:,.0f}", f"{row['tokens'] / row['seconds'] / 1e6:.2f}"]
            if is_cold:
                cells.append(f"{row['read'] / 1024 / row['rows']:.2f}")
        rows.append(cells)
    head = ["", "cold, rows/s", "million tokens/s", "KiB a row", "warm, rows/s", "million tokens/s"]
    text = [
        "Reading of token ids that are mapped from a disk: rows a second in random and in file order, cold and warm. "
        "Script: `benchmarks/data.py reads`.",
        "",
        f"A file of {size / 1e9:.2f} GB with {options.rows:,} rows, in batches of {BATCH}"
        + (
            ""
            if limit is None
            else f", in a process that may use {limit / 1e9:.2f} GB of memory, cached pages included"
        )
        + ". The script's docstring describes the rows of the table.",
        "",
        table(head, rows),
        "",
        f"{show_machine(facts)} {load(reads)}",
    ]
    title = "Token ids on a disk" if limit is None else "Token ids larger than memory"
    write_section(title, "\n".join(text))


def main() -> None:
    """Measure reading, or starts."""
    import _data_starts as starts

    parser = argparse.ArgumentParser()
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("reads", help="token ids that are mapped from a disk")
    part.add_argument("--rows", type=int, default=1_000_000, help="rows of the file")
    part.add_argument("--seconds", type=float, default=10.0, help="end a pass after this time")
    part.add_argument("--folder", help="folder on the disk to measure; default: that of temporary files")
    part.add_argument("--cgroup", type=Path, help="group of Linux with a limit of memory, which the processes join")
    part.add_argument("--measure", nargs=2, metavar=("ARM", "COLD"), help=argparse.SUPPRESS)
    part = parts.add_parser("starts", help="starts of trainings on many rows")
    part.add_argument("--rows", type=int, nargs="+", default=[200_000, 1_000_000], help="rows of the files")
    part.add_argument("--arms", nargs="+", choices=starts.ARMS, default=list(starts.ARMS), help="arms to measure")
    part.add_argument("--measure", choices=starts.ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "starts" and options.measure:
        print(json.dumps(starts.measure_start(options.measure)))
    elif options.part == "starts":
        starts.run_starts(Path(__file__).resolve(), options.rows, options.arms)
    elif options.measure:
        arm, cold = options.measure
        if options.cgroup is not None:
            (options.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(measure(arm, Path(options.folder), cold == "cold", options.seconds)))
    else:
        run_reads(options)


if __name__ == "__main__":
    main()

"""Peak memory and speed of `data.streaming`, for files of growing size.

    python benchmarks/streaming.py                        # 0.5 and 2 GB
    python benchmarks/streaming.py --sizes 0.5 2 8 20     # needs as much disk as the largest; removes it
    python benchmarks/streaming.py --sizes 20 --kinds rows.parquet --minutes 20     # adds one row to the table

Generates shards of 250 MB, and reads each size once in a fresh process, without training and without data workers. With
``--minutes``, a pass stops after that time: row groups of all files are shuffled, so it has then read a part of the
rows of every file. ``rows`` is ``text-classification`` on rows of 10,000 characters. They are truncated to 4 tokens, so
that reading takes most of the time. ``blocks`` is ``causal-lm`` with ``data.blocks``, which tokenizes every character
twice: once at the start to count tokens, and once to read. Memory is that of the process, as Linux counts it: its peak,
and the growth of its resident memory after the first 50,000 samples (0.5 GB of rows).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROW = 10_000
"""Characters of a row."""
SHARD = 25_000
"""Rows of a shard: 250 MB."""
GROUP = 1000
"""Rows of a row group."""
NAMES = ("bad", "good")
FIRST = 50_000
"""Samples before the growth of memory is measured: the buffer and all lanes are full by then."""
KINDS = {"rows.parquet": 1, "rows.jsonl": 4, "blocks.parquet": 40}
"""Kind of samples -> divisor of each size: slower kinds read less."""


def write_shards(folder: Path, rows: int, suffix: str) -> None:
    """Shards of rows of text, most of them different."""
    import numpy as np
    import pyarrow
    from pyarrow import parquet

    draw = np.random.default_rng(0)
    words = np.array(["fine", "dull", "film", "bore", "lovely", "number", "indeed", "a", "and", "of"])
    base = " ".join(draw.choice(words, 400_000))
    schema = pyarrow.schema({"text": pyarrow.string(), "label": pyarrow.string()})
    for first in range(0, rows, SHARD):
        path = folder / f"shard-{first // SHARD:03}{suffix}"
        tables = []
        for _ in range(first, min(first + SHARD, rows), GROUP):
            starts = draw.integers(0, len(base) - ROW, GROUP)
            tables.append(
                {
                    "text": [base[start : start + ROW] for start in starts],
                    "label": [NAMES[start % 2] for start in starts],
                }
            )
        if suffix == ".parquet":
            with parquet.ParquetWriter(path, schema, use_dictionary=False, compression="none") as file:
                for table in tables:
                    file.write_table(pyarrow.table(table, schema), row_group_size=GROUP)
            continue
        with path.open("w") as lines:
            for table in tables:
                lines.writelines(
                    json.dumps(dict(zip(table, row, strict=True))) + "\n" for row in zip(*table.values(), strict=True)
                )


def measure(kind: str, minutes: float, paths: list[str]) -> dict[str, Any]:
    """Read files once in this process, for ``minutes`` at most."""
    from _measure import memory
    from streaming_helpers import LANGUAGE, classify, data_section
    from text_helpers import make_run

    start = time.perf_counter()
    buffer = {"shuffle_buffer": 500, "lanes": 8}
    if kind.startswith("blocks"):
        model = LANGUAGE | {"tokenizer": {"kind": "word", "vocab_size": 300}}
        run = make_run("causal-lm", model, data_section(paths, buffer | {"blocks": True, "max_length": 64}))
    else:
        run = classify(paths, max_length=4, **buffer)
    built = time.perf_counter()
    cpu = time.process_time()
    samples = 0
    first = None
    for batch in run.train_loader.batches():
        samples += batch.samples
        if first is None and samples >= FIRST:
            first = memory("VmRSS")
        if time.perf_counter() - built > 60 * minutes:
            break
    end = time.perf_counter()
    used = time.process_time() - cpu
    sizes = {
        "samples": samples,
        "rows": len(run.datasets["train"]),
        "bytes": sum(Path(path).stat().st_size for path in paths),
    }
    growth = {} if first is None else {"growth": memory("VmRSS") - first}
    return {
        "kind": kind,
        **sizes,
        "startup": built - start,
        "seconds": end - built,
        "cpu": used,
        "peak": memory("VmHWM"),
        **growth,
    }


def report(results: list[dict[str, Any]], facts: str) -> str:
    """The results in markdown."""
    from _measure import table

    head = [
        "files",
        "GB",
        "GB read",
        "samples read",
        "peak MiB",
        "growth, MiB",
        "start, s",
        "MB/s",
        "samples/s",
        "MB per CPU second",
    ]
    rows = []
    for row in results:
        read = row["bytes"] * row["samples"] / row.get("rows", row["samples"])
        speed = [read / 1e6 / row["seconds"], row["samples"] / row["seconds"], read / 1e6 / row["cpu"]]
        sizes = [f"{row['bytes'] / 1e9:.2f}", f"{read / 1e9:.2f}", row["samples"], f"{row['peak'] / 2**20:.0f}"]
        growth = f"{row['growth'] / 2**20:.0f}" if "growth" in row else "-"
        rows.append([f"`{row['kind']}`", *sizes, growth, f"{row['startup']:.1f}", *(f"{value:.0f}" for value in speed)])
    most = max(row["bytes"] for row in results) / 1e9
    lines = [
        "Written by `python benchmarks/streaming.py`, which describes how it measures; the largest size here is "
        f"{most:.1f} GB."
    ]
    if any(row["samples"] < row.get("rows", 0) for row in results):
        lines.append("The passes that read fewer GB than their files have were ended by `--minutes`.")
    lines += [
        "One process reads, without training and without data workers. Starting includes all imports.",
        "",
        table(head, rows),
        "",
        facts,
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure every size and kind, and write the results."""
    from _measure import RESULTS, load, machine, show_machine, spawn, write, write_section

    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="GB of each pass")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        help="kinds to measure; the results of others stay",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="end a pass after this time")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.minutes, options.measure[1:])))
        return
    path = RESULTS / "streaming.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    results: list[dict[str, Any]] = []
    for kind in options.kinds:
        part = KINDS[kind]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            suffix = Path(kind).suffix
            for size in sorted(options.sizes):
                rows = round(size * 1e9 / part / ROW / GROUP) * GROUP
                for path in folder.iterdir():
                    path.unlink()
                write_shards(folder, rows, suffix)
                os.chdir(folder)
                arguments = ["--minutes", options.minutes, "--measure", kind, *sorted(map(str, folder.iterdir()))]
                results.append(spawn([Path(__file__).resolve(), *arguments]))
                os.chdir(HERE)
                print(results[-1], flush=True)
    measured = {(row["kind"], row["bytes"]) for row in results}
    results += [row for row in kept if (row["kind"], row["bytes"]) not in measured]
    results.sort(key=lambda row: (list(KINDS).index(row["kind"]), row["bytes"]))
    facts = machine("torch", "transformers", "tokenizers", "pyarrow")
    write("streaming", {"machine": facts, "rows": results})
    write_section("Streams", report(results, f"{show_machine(facts)} {load(results)}"))


if __name__ == "__main__":
    main()

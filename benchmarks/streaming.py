"""Peak memory and speed of `data.streaming`, for files of growing size.

    python benchmarks/streaming.py                        # 0.5 and 2 GB
    python benchmarks/streaming.py --sizes 0.5 2 8 20     # needs as much disk as the largest; removes it

Generates shards of 250 MB, and reads each size once in a fresh process, without training and without data workers. ``rows`` is
``text-classification`` on rows of 10,000 characters. They are truncated to 4 tokens, so that reading takes most of the time. ``blocks`` is
``causal-lm`` with ``data.blocks``, which tokenizes every character twice: once at the start to count tokens, and once to read. Memory is
the peak of the process, as Linux counts it.
"""

from __future__ import annotations

import argparse
import json
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
            tables.append({"text": [base[start : start + ROW] for start in starts], "label": [NAMES[start % 2] for start in starts]})
        if suffix == ".parquet":
            with parquet.ParquetWriter(path, schema, use_dictionary=False, compression="none") as file:
                for table in tables:
                    file.write_table(pyarrow.table(table, schema), row_group_size=GROUP)
            continue
        with path.open("w") as lines:
            for table in tables:
                lines.writelines(json.dumps(dict(zip(table, row, strict=True))) + "\n" for row in zip(*table.values(), strict=True))


def measure(kind: str, paths: list[str]) -> dict[str, Any]:
    """Read files once in this process."""
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
    built, cpu, samples = time.perf_counter(), time.process_time(), 0
    for batch in run.train_loader.batches():
        samples += batch.samples
    end, used = time.perf_counter(), time.process_time() - cpu
    sizes = {"samples": samples, "bytes": sum(Path(path).stat().st_size for path in paths)}
    return {"kind": kind, **sizes, "startup": built - start, "seconds": end - built, "cpu": used, "peak": memory("VmHWM")}


def report(found: list[dict[str, Any]], facts: str) -> str:
    """The results in markdown."""
    from _measure import table

    head = ["read", "GB", "samples", "peak MiB", "start, s", "MB/s", "samples/s", "MB per CPU second"]
    rows = []
    for row in found:
        speed = [row["bytes"] / 1e6 / row["seconds"], row["samples"] / row["seconds"], row["bytes"] / 1e6 / row["cpu"]]
        size, peak = f"{row['bytes'] / 1e9:.2f}", f"{row['peak'] / 2**20:.0f}"
        rows.append([f"`{row['kind']}`", size, row["samples"], peak, f"{row['startup']:.1f}", *(f"{value:.0f}" for value in speed)])
    most = max(row["bytes"] for row in found) / 1e9
    lines = [f"Written by `python benchmarks/streaming.py`, which describes how it measures; the largest size here is {most:.1f} GB."]
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
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="keep the last results of other kinds")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], options.measure[1:])))
        return
    path = RESULTS / "streaming.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    found: list[dict[str, Any]] = [row for row in kept if row["kind"] not in options.kinds]
    for kind in options.kinds:
        part = KINDS[kind]
        with tempfile.TemporaryDirectory() as name:
            folder, suffix = Path(name), Path(kind).suffix
            for size in sorted(options.sizes):
                rows = round(size * 1e9 / part / ROW / GROUP) * GROUP
                for path in folder.iterdir():
                    path.unlink()
                write_shards(folder, rows, suffix)
                os.chdir(folder)
                found.append(spawn([Path(__file__).resolve(), "--measure", kind, *sorted(map(str, folder.iterdir()))]))
                os.chdir(HERE)
                print(found[-1], flush=True)
    facts = machine("torch", "transformers", "tokenizers", "pyarrow")
    write("streaming", {"machine": facts, "rows": found})
    write_section("Memory and speed", report(found, f"{show_machine(facts)} {load(found)}"), HERE.parent / "docs" / "streaming.md")


if __name__ == "__main__":
    main()

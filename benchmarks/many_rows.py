"""Start of training on many short rows: seconds to the first step and peak memory, in memory and streamed.

    python benchmarks/many_rows.py                       # 10 million rows, about 0.7 GB
    python benchmarks/many_rows.py --rows 1000000        # fewer

Writes one JSONL file, and trains ``text-classification`` with a tiny model for one step, each time in a fresh process:
with ``data.streaming`` and without it, and each of them a second time, which reads what ``token-cache`` kept of the
first. ``in memory, 100 steps`` has ``train.max_steps: 100``, so that only the rows of these steps are tokenized. The
tokenizer is a saved one, as with a pretrained model. Seconds count from the start of the process, so they include all
imports. ``scan`` decodes every line of the file with ``json.loads``, and keeps nothing. The first batch of a stream
fills its shuffle buffer. The files are removed at the end.
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

START = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

MODEL = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
SHORT = "in memory, 100 steps"
ARMS = ("scan", "streamed", "in memory", SHORT)
NAMES = (("dull", "bad"), ("fine", "good"))
AT_ONCE = 100_000
"""Rows to write at once."""


def write_rows(path: Path, count: int) -> None:
    """Different rows of some ten words in all, with one of two labels."""
    with path.open("w") as file:
        for first in range(0, count, AT_ONCE):
            rows = ((n, *NAMES[n % 2]) for n in range(first, min(first + AT_ONCE, count)))
            file.writelines(f'{{"text": "a {word} film, number {n}", "label": "{label}"}}\n' for n, word, label in rows)


def measure(arm: str) -> dict[str, Any]:
    """Scan the file, or train one step on it, in this process."""
    from _measure import memory

    if arm == "scan":
        with Path("rows.jsonl").open() as file:
            for line in file:
                json.loads(line)
        return {"start": time.perf_counter() - START, "peak": memory("VmHWM")}
    from text_helpers import make_run

    from fastloop.loop import take_step
    from fastloop_plugins.data.token_cache import TokenCache

    data: dict[str, Any] = {"files": {"train": "rows.jsonl", "validation": "few.jsonl"}, "label": "label"}
    data |= {"streaming": True} if arm == "streamed" else {}
    model = {"config": MODEL | {"max_position_embeddings": 32}, "tokenizer": "words"}
    length = {"max_steps": 100} if arm == SHORT else {"epochs": 1}
    run = make_run(
        "text-classification", model, data | {"max_length": 16}, [TokenCache(folder=f"cache-{arm}")],
        batch_size=32, **length,
    )  # fmt: skip
    take_step(run, next(iter(run.train_loader.steps(0, 0))))
    return {"start": time.perf_counter() - START, "peak": memory("VmHWM")}


def main() -> None:
    """Measure every arm, and write the results."""
    from _measure import load, machine, show_machine, spawn, table, write, write_section

    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the file")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to measure")
    parser.add_argument("--measure", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    results = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        from checkpoint_helpers import tokenizer

        write_rows(Path("rows.jsonl"), options.rows)
        write_rows(Path("few.jsonl"), 1000)
        tokenizer(path="few.jsonl").save_pretrained("words")
        size = Path("rows.jsonl").stat().st_size
        for arm in options.arms:
            for start in ("first", "second")[: 1 if arm == "scan" else 2]:
                row = spawn([Path(__file__).resolve(), "--measure", arm])
                results.append({"arm": arm, "start_number": start, "rows": options.rows, "bytes": size} | row)
                print(results[-1], flush=True)
        os.chdir(Path(__file__).resolve().parent)
    facts = machine("torch", "transformers", "tokenizers", "pyarrow")
    write("many-rows", {"machine": facts, "rows": results})
    rows = [
        [f"{row['arm']}, {row['start_number']} start", f"{row['start']:.0f}", f"{row['peak'] / 2**20:.0f}"]
        for row in results
    ]
    text = [
        f"Written by `python benchmarks/many_rows.py`, which describes how it measures: {options.rows:,} rows of text "
        f"in one JSONL file of {size / 1e9:.2f} GB, `text-classification`, with `token-cache`. The scan decodes lines.",
        "Without streaming, the first start tokenizes all texts, which are in a temporary file. The second maps the "
        "token ids from the cache. In training, the place of a row in the order of an epoch takes 4 bytes of memory. "
        "A run of 100 steps tokenizes only the rows of these steps.",
        "",
        table(["", "s to the first step", "peak MiB"], rows),
        "",
        f"{show_machine(facts)} {load(results)}",
    ]
    write_section("Start with many rows", "\n".join(text))


if __name__ == "__main__":
    main()

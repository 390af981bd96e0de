"""Rows per second from a file to training samples: fastloop, `datasets.map`, and TRL's packing after it.

    python benchmarks/tokenization.py                  # 50,000 generated rows
    python benchmarks/tokenization.py --rows 200000 --rounds 5

Every arm reads the same JSONL file in a fresh process and without a cache, with the same fast tokenizer, and ends with
blocks of 512 tokens. ``fastloop`` runs `causal-lm` with `token-cache`. ``again`` is its next start, which maps the
cached ids. ``datasets.map`` tokenizes batches of 1,000 rows and puts them end to end, with one process, which uses the
tokenizer's threads, and with one process per core. ``trl`` is `datasets.map`, and then TRL's `pack_dataset` with the
strategy ``wrapped``; it is left out if TRL is not installed. Arms run in turn, once per round, and the figure is the
median.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))

BLOCK = 512
"""Tokens of a block."""
WORDS = 200
"""Words of a row: about the length of a review."""


def write_rows(path: Path, rows: int) -> None:
    """Rows of random words, with the frequencies of a language: the n-th word has the weight 1 / n."""
    import numpy as np

    draw = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(draw.choice(letters, draw.integers(2, 10))) for _ in range(20_000)])
    share = 1 / np.arange(1, len(words) + 1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write(json.dumps({"text": " ".join(draw.choice(words, WORDS, p=share / share.sum()))}) + "\n")


def write_model(folder: Path, rows: Path) -> None:
    """A tiny GPT-2 with a BPE tokenizer of 8,000 tokens, trained on the first rows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    with rows.open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(2000), strict=False)]
    tokenizer = train_tokenizer(TrainedTokenizer(kind="bpe", vocab_size=8000), texts, False)
    tokenizer.save_pretrained(folder)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": BLOCK, "vocab_size": len(tokenizer)}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def run_fastloop(folder: Path) -> tuple[float, int]:
    """Seconds of ``build_datasets``, and the number of blocks."""
    from fastloop import Plugin, hookimpl
    from fastloop.lifecycle import build
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    class Clock(Plugin):
        name = "clock"
        seconds = 0.0

        @hookimpl(wrapper=True, tryfirst=True)
        def build_datasets(self) -> Any:
            start = time.perf_counter()
            result = yield
            self.seconds = time.perf_counter() - start
            return result

    clock = Clock()
    recipe = make_recipe(
        {
            "model": {"name": str(folder / "model")},
            "data": {"files": {"train": str(folder / "rows.jsonl")}, "max_length": BLOCK, "validation_fraction": 0},
            "train": {"device": "cpu", "max_steps": 1},
            "plugins": [{"token-cache": {"folder": str(folder / "cache")}}, {"progress": False}],
        }
    )
    run = build(resolve(recipe), extra=[clock])
    return clock.seconds, len(run.datasets["train"])


def run_datasets(folder: Path, processes: int | None, pack: bool) -> tuple[float, int]:
    """Seconds of `datasets.map`, and the number of blocks."""
    import datasets
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    start = time.perf_counter()
    rows: Any = datasets.load_dataset(
        "json", data_files=str(folder / "rows.jsonl"), split="train", cache_dir=str(folder / "datasets")
    )

    def tokenize(batch: Any) -> dict[str, Any]:
        encoded = tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]
        ids = [[*row, tokenizer.eos_token_id] for row in encoded]
        if pack:
            return {"input_ids": ids}
        flat = list(chain.from_iterable(ids))
        return {"input_ids": [flat[first : first + BLOCK] for first in range(0, len(flat), BLOCK)]}

    blocks = rows.map(tokenize, batched=True, remove_columns=["text"], num_proc=processes)
    if pack:
        from trl import pack_dataset

        blocks = pack_dataset(blocks, BLOCK, strategy="wrapped")
    return time.perf_counter() - start, len(blocks)


ARMS = {
    "fastloop": lambda folder: run_fastloop(folder),
    "fastloop, again": lambda folder: run_fastloop(folder),
    "datasets.map": lambda folder: run_datasets(folder, None, False),
    "datasets.map, a process per core": lambda folder: run_datasets(folder, os.cpu_count(), False),
    "datasets.map and TRL's packing": lambda folder: run_datasets(folder, None, True),
}


def main() -> None:
    """Run the arms in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(ARMS[options.arm](options.folder)))
        return
    arms = [arm for arm in ARMS if "TRL" not in arm or importlib.util.find_spec("trl") is not None]
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    blocks = dict[str, int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", options.rows)
        write_model(folder / "model", folder / "rows.jsonl")
        for _ in range(options.rounds):
            for cache in ("cache", "datasets"):
                subprocess.run(["rm", "-rf", folder / cache], check=True)
            for arm in arms:
                if arm.startswith("datasets"):
                    subprocess.run(["rm", "-rf", folder / "datasets"], check=True)
                command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                spent, blocks[arm] = json.loads(done.stdout.splitlines()[-1])
                seconds[arm].append(spent)
    print(f"{options.rows:,} rows of {WORDS} words, {os.cpu_count()} cores\n")
    print("| arm | seconds | rows/s | fastloop is faster by | blocks |\n|---|---|---|---|---|")
    first = statistics.median(seconds["fastloop"])
    for arm in arms:
        middle = statistics.median(seconds[arm])
        print(f"| {arm} | {middle:.2f} | {options.rows / middle:,.0f} | {middle / first:.2f}x | {blocks[arm]:,} |")


if __name__ == "__main__":
    main()

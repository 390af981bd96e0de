"""Command 3: the published job by the command line, from texts to the written model.

    bash benchmarks/gpu/all.sh job

``fastloop train`` runs the recipe ``distilbert_imdb``: 3 epochs of 35,000 reviews with the plugins that ``auto``
selects on the machine, an evaluation of 5,000 reviews after each epoch, and the export of the best one. The model is
DistilBERT's architecture with random weights. The texts are those of IMDB, as BERT's tokenizer decodes their tokens:
in lower case, and cut after 512 tokens. Each run is a fresh process, from the start of Python to its end:

* cold: without compiled code and cached tokens.
* warm: with the compiled code of the runs before. It tokenizes the texts again.
* cached: with the compiled code and the tokens of the runs before.
* seed-1, seed-2: like cached, with other seeds. With the recipe's own seed there are three, if time is left.

The caches stay in ``build/gpu-job``, so that a later command on the same machine starts warm. A run that is not done
when the budget ends is recorded as ``cut``, with the steps that it has logged.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from _measure import ROOT
from _reviews import VOCABULARY, Reviews, build_model
from _suite import (
    DATA,
    ENDING_SECONDS,
    Budget,
    Records,
    command_budget,
    facts,
    find_device,
    options,
    read_reviews,
    run_limited,
    scratch,
)

RUN_SECONDS = {"cold": 125.0, "warm": 72.0, "cached": 68.0}
"""Seconds that a run is expected to take at most on an H200. A run with another seed is ``cached``."""
SEEDS = (1, 2)
"""Seeds beside the recipe's own."""


def load_tokenizer() -> Any:
    """BERT's tokenizer from the archive of the reviews. Without it, one whose tokens are whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    file = DATA / "reviews" / "tokenizer.json"
    if file.exists():
        return PreTrainedTokenizerFast(tokenizer_file=str(file), **special)  # type: ignore[no-untyped-call]
    ids = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}  # as in BERT's vocabulary
    words = {index: f"w{index}" for index in range(VOCABULARY)} | {index: name for name, index in ids.items()}
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in words.items()}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)  # type: ignore[no-untyped-call]


def write_texts(reviews: Reviews, tokenizer: Any, file: Path) -> int:
    """Write reviews as rows with ``text`` and ``label``; returns the number of characters."""
    rows = [reviews.row(index).tolist() for index in range(len(reviews))]
    texts = tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)
    lines = (json.dumps({"text": text, "label": int(label)}) for text, label in zip(texts, reviews.labels, strict=True))
    file.write_text("\n".join(lines) + "\n")
    return sum(map(len, texts))


def train_command(data: Path, length: int, folder: Path, seed: int | None) -> list[str]:
    """The command that trains on ``data``, and writes to ``folder``. Without a seed it has the recipe's own."""
    command = [sys.executable, "-m", "fastloop", "train", str(ROOT / "recipes" / "distilbert_imdb.yaml")]
    command += [
        f"model.name={data / 'model'}",
        "data.name=null",
        "data.module=_reviews:read_texts",
        f"data.arguments.folder={data}",
    ]
    command += [f"data.max_length={length}", f"output={folder}"]
    if seed is not None:
        command.append(f"train.seed={seed}")
    return command


def read_run(folder: Path, log: Path) -> dict[str, Any]:
    """A part of the summary of a run, its plugins, its seed and its warnings."""
    summary = json.loads((folder / "summary.json").read_text())
    spans = (
        "startup_seconds",
        "compile_seconds",
        "train_seconds",
        "evaluate_seconds",
        "save_seconds",
        "validation",
        "compile",
        "steps",
    )
    warnings = [line for line in log.read_text().splitlines() if "warning" in line.lower()]
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    chosen = [entry if isinstance(entry, str) else next(iter(entry)) for entry in recipe["plugins"]]
    return {
        "plugins": chosen,
        "seed": recipe["train"]["seed"],
        "warnings": warnings,
        **{key: summary[key] for key in spans if key in summary},
    }


def logged_steps(folder: Path) -> int:
    """The steps of a run until its last log point, also while it is incomplete."""
    log = folder / "metrics.jsonl"
    steps = 0
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(json.JSONDecodeError):  # the run was killed while it wrote the line
            steps = max(steps, json.loads(line).get("step", 0))
    return steps


def run_job(name: str, command: list[str], folder: Path, caches: Path, records: Records, budget: Budget) -> None:
    """Run the command in a fresh process and record it as ``job``, ``cut`` or ``error``."""
    cache = name if name in RUN_SECONDS else "cached"
    log = folder.with_suffix(".log")
    started = time.perf_counter()
    status = run_limited(command, log, budget.left() - 2 - ENDING_SECONDS, {"XDG_CACHE_HOME": str(caches)})
    seconds = time.perf_counter() - started
    if status is None:
        records.cut(name, "job", budget, wall_seconds=seconds, steps=logged_steps(folder), cache=cache)
        return
    if status:
        records.error(name, "job", f"{log.read_text()[-2000:]}\nended with {status}", log)
        return
    run = read_run(folder, log)
    spans = ", ".join(
        f"{span} {run[f'{span}_seconds']:.1f}" for span in ("startup", "compile", "train", "evaluate", "save")
    )
    shown = f"{seconds:.1f} s from start to end: {spans}; accuracy {run['validation']['accuracy']:.3f}"
    records.add("job", shown, name=name, variant="auto", cache=cache, wall_seconds=seconds, **run)


def main() -> None:
    """Write the model and the texts, and run the command."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--caches", nargs="*", choices=list(RUN_SECONDS), default=list(RUN_SECONDS), help="runs (default: all)"
        )
        parser.add_argument(
            "--seeds", nargs="*", type=int, default=list(SEEDS), help="seeds of further runs (default: 1 2)"
        )
        parser.add_argument("--work", type=Path, help="folder of the texts and caches (default: build/gpu-job)")

    settings = options(__doc__, prepare)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as fastloop sets it; all.sh turns it off
    budget = command_budget(settings.seconds)
    records = Records(settings.results / "gpu-job.jsonl")
    device = find_device()
    model = "tiny" if settings.tiny else "distilbert"
    records.add("facts", **facts(device), tiny=settings.tiny, model=model)
    work = settings.work or ROOT / "build" / ("gpu-job-tiny" if settings.tiny else "gpu-job")
    work.mkdir(parents=True, exist_ok=True)
    with scratch() as folder:
        splits, length = read_reviews(35_000, settings.tiny)
        tokenizer = load_tokenizer()
        characters = {}
        for split, reviews in splits.items():
            characters[split] = write_texts(reviews, tokenizer, work / f"{split}.jsonl")
        build_model(model).save_pretrained(work / "model")
        tokenizer.save_pretrained(work / "model")
        records.add(
            "texts",
            name="texts",
            reviews={split: len(reviews) for split, reviews in splits.items()},
            characters=characters,
        )
        caches = work / "caches"
        runs: dict[str, int | None] = dict.fromkeys(settings.caches)
        runs |= {f"seed-{seed}": seed for seed in settings.seeds}
        for name, seed in runs.items():
            needed = RUN_SECONDS.get(name, RUN_SECONDS["cached"]) / (10 if settings.tiny else 1)
            if not budget.fits(needed):
                records.skip(name, "job", needed, budget)
                continue
            if name == "cold":
                shutil.rmtree(caches, ignore_errors=True)
            elif name == "warm":
                shutil.rmtree(caches / "fastloop" / "tokens", ignore_errors=True)
            command = train_command(work, length, folder / name, seed)
            run_job(name, command, folder / name, caches, records, budget)

    from report import show_text_job

    print(f"\n{show_text_job(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" for line in records.lines))


if __name__ == "__main__":
    main()

"""Command 3: the published job by the command line, from texts to the written model.

    bash benchmarks/gpu/all.sh job

``fastloop train`` runs the recipe ``distilbert_imdb``: 3 epochs of 35,000 reviews with the plugins that ``auto``
selects on the machine, an evaluation of 5,000 reviews after each epoch, and the export of the best one. The model is
DistilBERT's architecture with random weights. The texts are those of IMDB, as BERT's tokenizer decodes their tokens:
in lower case, and cut after 512 tokens. Each run is a fresh process, from the start of Python to its end:

* cold: without compiled code and cached tokens.
* warm: with the compiled code of the run before. It tokenizes the texts again.
* cached: with the compiled code and the tokens of the runs before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from _measure import ROOT
from _reviews import VOCABULARY, Reviews, build_model
from _suite import DATA, Budget, Records, facts, find_device, options, read_reviews, scratch

RUN_SECONDS = {"cold": 120.0, "warm": 60.0, "cached": 60.0}
"""Seconds that a run is expected to take at most."""


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
        return PreTrainedTokenizerFast(tokenizer_file=str(file), **special)
    ids = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}  # as in BERT's vocabulary
    words = {index: f"w{index}" for index in range(VOCABULARY)} | {index: name for name, index in ids.items()}
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in words.items()}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def write_texts(reviews: Reviews, tokenizer: Any, file: Path) -> int:
    """Write reviews as rows with ``text`` and ``label``; returns the number of characters."""
    rows = [reviews.row(index).tolist() for index in range(len(reviews))]
    texts = tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True)
    lines = (json.dumps({"text": text, "label": int(label)}) for text, label in zip(texts, reviews.labels, strict=True))
    file.write_text("\n".join(lines) + "\n")
    return sum(map(len, texts))


def train(data: Path, length: int, folder: Path, environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run the command; returns the seconds that it took, and a part of its summary.

    Raises:
        subprocess.SubprocessError: It failed, or was not done after ``timeout`` seconds.
    """
    command = [sys.executable, "-m", "fastloop", "train", str(ROOT / "recipes" / "distilbert_imdb.yaml")]
    command += [
        f"model.name={data / 'model'}",
        "data.name=null",
        "data.module=_reviews:read_texts",
        f"data.arguments.folder={data}",
    ]
    command += [f"data.max_length={length}", f"output={folder}"]
    started, log = time.perf_counter(), folder.with_suffix(".log")
    with log.open("w") as file:
        subprocess.run(
            command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT, timeout=timeout, check=True
        )
    seconds, summary = time.perf_counter() - started, json.loads((folder / "summary.json").read_text())
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
    listed = yaml.safe_load((folder / "recipe.yaml").read_text())["plugins"]
    chosen = [entry if isinstance(entry, str) else next(iter(entry)) for entry in listed]
    return {
        "wall_seconds": seconds,
        "plugins": chosen,
        "warnings": warnings,
        **{key: summary[key] for key in spans if key in summary},
    }


def main() -> None:
    """Write the model and the texts, and run the command."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--caches", nargs="+", choices=list(RUN_SECONDS), default=list(RUN_SECONDS), help="runs (default: all)"
        )

    settings = options(__doc__, prepare)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"  # as fastloop sets it; all.sh turns it off
    budget, records, device = Budget(settings.seconds), Records(settings.results / "gpu-job.jsonl"), find_device()
    model = "tiny" if settings.tiny else "distilbert"
    records.add("facts", **facts(device), tiny=settings.tiny, model=model)
    with scratch() as folder:
        splits, length = read_reviews(35_000, settings.tiny)
        tokenizer, characters = load_tokenizer(), {}
        for split, reviews in splits.items():
            characters[split] = write_texts(reviews, tokenizer, folder / f"{split}.jsonl")
        build_model(model).save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        records.add(
            "texts",
            name="texts",
            reviews={split: len(reviews) for split, reviews in splits.items()},
            characters=characters,
        )
        caches = folder / "caches"
        for name in settings.caches:
            if not budget.fits(RUN_SECONDS[name] / (10 if settings.tiny else 1)):
                records.add(
                    "skipped", name=name, why=f"{RUN_SECONDS[name]:.0f} s may be needed, {budget.left():.0f} are left"
                )
                continue
            if name != "cached":
                shutil.rmtree(caches / "fastloop" / ("tokens" if name == "warm" else ""), ignore_errors=True)
            try:
                found = train(folder, length, folder / name, {"XDG_CACHE_HOME": str(caches)}, budget.left() - 2)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                log = folder / f"{name}.log"
                records.error(name, "job", f"{log.read_text()[-2000:]}\n{error}", log)
                continue
            spans = ", ".join(
                f"{span} {found[f'{span}_seconds']:.1f}" for span in ("startup", "compile", "train", "evaluate", "save")
            )
            shown = (
                f"{found['wall_seconds']:.1f} s from start to end: {spans}; accuracy "
                f"{found['validation']['accuracy']:.3f}"
            )
            records.add("job", shown, name=name, variant="auto", cache=name, **found)

    from report import show_text_job

    print(f"\n{show_text_job(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" for line in records.lines))


if __name__ == "__main__":
    main()

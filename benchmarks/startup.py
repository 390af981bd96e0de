"""How long do commands take to start?

    python benchmarks/startup.py                 # about three minutes on two cores

* commands: the list of commands, `fastloop plan quickstart`, and `fastloop train quickstart` until its first step is
  done, without and with the plugin `auto`. A plugin in a file ends the process after that step.
* torch: a process that imports torch, and ends.
* bare script: a script that imports torch and transformers, builds the quickstart's model and an AdamW optimizer, and
  trains one step on random token ids. It reads no data, trains no tokenizer and evaluates nothing. `fastloop train`
  does all of that, and collects garbage less often while it imports libraries.

Each sample is a fresh process. Rounds alternate between ascending and descending order of the arms, and a first round
warms the disk cache. Processor time is user and system time of the process. The figures are medians over the rounds,
with their range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _measure import RESULTS, load, machine, rounds, run_command, show_machine, source, table, write, write_section

PROBE = '''
"""Ends the process after the first step."""
import os
from fastloop import Plugin, hookimpl

class FirstStep(Plugin):
    name = "first-step"

    @hookimpl
    def after_step(self):
        os._exit(0)
'''
BARE = """
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

config = DistilBertConfig(vocab_size=219, dim=96, n_layers=3, n_heads=4, hidden_dim=192, max_position_embeddings=64)
model = DistilBertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
model(input_ids=torch.randint(0, 219, (32, 40)), labels=torch.zeros(32, dtype=torch.long)).loss.backward()
optimizer.step()
"""
TRAIN = ("-m", "fastloop", "train", "quickstart", "--with", "first_step.py")
ARMS = {
    "the list of commands (`--help`)": ("-m", "fastloop", "--help"),
    "`fastloop plan quickstart`": ("-m", "fastloop", "plan", "quickstart"),
    "torch": ("-c", "import torch"),
    "bare script, first step": ("bare.py",),
    "`fastloop train quickstart`, first step": TRAIN,
    "the same with `--with auto`": (*TRAIN, "--with", "auto"),
}


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="rounds (default 7)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder for the JSON; with another folder, docs do not change"
    )
    options = parser.parse_args()
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first_step.py").write_text(PROBE)
        Path(folder, "bare.py").write_text(BARE)
        home = Path.cwd()
        os.chdir(folder)
        for command in ARMS.values():
            run_command(command)
        for number, arm in rounds(list(ARMS), options.repeats):
            samples.append({"round": number, "arm": arm} | run_command(ARMS[arm]))
        os.chdir(home)
    results = {"machine": machine("torch", "transformers", "accelerate", "fastloop-train"), "samples": samples}
    print(write("startup", results, options.results.resolve()))
    shown = report(results)
    print(shown)
    if options.results == RESULTS:
        write_section("Start-up", shown)


def report(results: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    rows = []
    for arm in ARMS:
        own = [row for row in results["samples"] if row["arm"] == arm]
        cells = [arm]
        for kind in ("processor", "wall"):
            values = [row[kind] for row in own]
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
        rows.append(cells)
    return "\n\n".join(
        [
            source(__doc__, __file__),
            table(["command", "processor, s", "wall, s"], rows),
            "Medians of fresh processes, with their range. "
            f"{show_machine(results['machine'])} {load(results['samples'])}",
        ]
    )


if __name__ == "__main__":
    main()

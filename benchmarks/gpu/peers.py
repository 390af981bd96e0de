"""Command 5: fastloop and its peers in one run on a GPU, then the cost of a step in each.

    bash benchmarks/gpu/all.sh peers

* The work is that of command 2: DistilBERT's architecture, IMDB's token ids, 12 reviews a step. `benchmarks/_arms.py`
  lists the arms; all read one file. fastloop is the recipe ``distilbert_imdb_gpu``, or another variant of command 2.
* Each arm is a process that is started and warmed up once, for two epochs where it compiles. Windows are whole epochs,
  with the device synchronized at both ends. Rounds are interleaved, A B C, C B A; ratios are formed inside a round.
* Before the rounds, 20 steps count the waits for the device, and 20 more record the kernels. Neither is timed.
* Compile seconds are those of the warm-up: cold with an empty folder of compiled code; warm in a second process, with
  the same folder.
* TFLOP/s count operations on real tokens only, padding left out, over seconds.
* The cost of a step: ``benchmarks/overhead.py`` on the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _arms import ARMS, NEEDS
from _measure import ROOT, rounds
from _reviews import save, spread
from _suite import (
    Budget,
    Records,
    command_budget,
    facts,
    find_device,
    options,
    read_reviews,
    record_ceilings,
    scratch,
)
from _workers import (
    chunks,
    held_at_once,
    measure,
    probe,
    workers,
)
from ablation import BATCH, HELD, VARIANTS, WORKER_BYTES, shrunk

COMPILED = ("hf-trainer-compile", "fastloop")
AGAIN_SECONDS = 60.0
"""Seconds of a second start of the compiled arms."""
OVERHEAD_SECONDS = 150.0
"""Seconds reserved for the cost of a step."""


def step_cost(device: str, tiny: bool, records: Records, budget: Budget, folder: Path) -> None:
    """Run ``overhead.py``."""
    target = folder / "overhead.json"
    seconds = budget.left() - 5
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "overhead.py"),
        "--device",
        device,
        "--seconds",
        str(seconds),
        "--json",
        str(target),
    ]
    command += (
        ["--rounds", "1", "--steps", "20", "--repeats", "1"]
        if tiny
        else ["--rounds", "3", "--steps", "500", "--repeats", "2"]
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        output = done.stderr
        failed = done.returncode
    except subprocess.TimeoutExpired as error:
        output = str(error)
        failed = 1
    if target.exists():
        for row in json.loads(target.read_text())["summary"]:
            records.add("overhead", f"{row['us_per_step']:.0f} us a step", name=row["arm"], **row)
    if failed:
        records.error("overhead", "cost of a step", output)


def main() -> None:
    """Run the rounds, the probes, the second starts and the step cost."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
        parser.add_argument(
            "--variant", choices=list(VARIANTS), default="packing-graphs", help="fastloop's variant of command 2"
        )
        parser.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
        parser.add_argument("--steps", type=int, help="steps of 12 a window (default 192)")
        parser.add_argument(
            "--hold", type=int, help="workers that are held at once (default: by the memory of the GPU; 4 on a CPU)"
        )
        parser.add_argument(
            "--overhead", action=argparse.BooleanOptionalAction, default=True, help="the cost of a step too"
        )

    settings = options(__doc__, prepare)
    budget = command_budget(settings.seconds)
    records = Records(settings.results / "gpu-peers.jsonl")
    device = find_device()
    cuda = device == "cuda"
    machine = facts(device)
    repeats = settings.rounds or (1 if settings.tiny else 3)
    hold = settings.hold or held_at_once(machine.get("memory_bytes"), WORKER_BYTES, HELD)
    steps = settings.steps or (4 if settings.tiny else 192)
    model = "tiny" if settings.tiny else "distilbert"
    variant = shrunk(VARIANTS[settings.variant]) if settings.tiny else VARIANTS[settings.variant]
    listed = [{name: dict(given)} for name, given in variant.plugins.items()]
    records.add(
        "facts", **machine, tiny=settings.tiny, steps=steps, model=model, variant=settings.variant, plugins=listed
    )
    missing = [arm for arm in settings.arms if importlib.util.find_spec(NEEDS.get(arm, "torch")) is None]
    for arm in missing:
        records.add("skipped", name=arm, why=f"{NEEDS[arm]} is not installed")
    arms = [arm for arm in settings.arms if arm not in missing]

    with scratch() as folder:
        record_ceilings(records, device, 0.2 if settings.tiny else 1.5)
        splits, longest = read_reviews(steps * BATCH, settings.tiny)
        source = splits["train"]
        reviews = folder / "window.npz"
        save(reviews, train=source.keep(spread(source.lengths, steps * BATCH, seed=1)))

        def start(arm: str) -> tuple[dict[str, Any], dict[str, str], int]:
            plugins = listed if arm == "fastloop" else []
            given = {
                "arm": arm,
                "reviews": str(reviews),
                "model": model,
                "device": device,
                "plugins": plugins,
                "max_length": longest,
            }
            given |= {"compile_backend": "aot_eager"} if settings.tiny else {}
            environment = {
                "TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled-{arm}"),
                **(variant.environment if plugins else {}),
            }
            return given, environment, 2 if arm in COMPILED else 1

        kept = OVERHEAD_SECONDS if cuda and settings.overhead else 0.0
        for names in chunks(arms, hold):
            with workers(
                {arm: start(arm) for arm in names}, folder, records, budget, len(names) if cuda else 2
            ) as ready:
                probe(ready, sorted(names, key=lambda arm: arm != "fastloop"), records, budget, kept)
                for number, arm in rounds(names, repeats):
                    measure(ready, arm, "measure", records, budget, round=number)
        again = [arm for arm in arms if arm in COMPILED]
        if not budget.fits(kept + AGAIN_SECONDS):
            for arm in again:
                records.skip(arm, "second start", kept + AGAIN_SECONDS, budget)
        elif again:
            (folder / "again").mkdir()
            with workers(
                {arm: start(arm) for arm in again}, folder / "again", records, budget, len(names) if cuda else 2
            ):
                pass
        if settings.overhead and budget.fits(30):
            step_cost(device, settings.tiny, records, budget, folder)
        elif settings.overhead:
            records.skip("overhead", "cost of a step", 30, budget)

    from report import show_peers

    print(f"\n{show_peers(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" for line in records.lines))


if __name__ == "__main__":
    main()

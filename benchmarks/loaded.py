"""The same fine-tuning on an idle machine and beside a busy program, by fastloop and by its peers.

    python benchmarks/loaded.py --repeats 3 --steps 6        # about 20 minutes on two cores
    python benchmarks/loaded.py --busy 1 --arms hf-trainer fastloop

The work and the arms equal ``peers.py``. An arm runs twice in a round: alone, and beside ``--busy`` processes. Each of
these keeps one core busy while the arm trains. fastloop runs with the plugins of ``peers.py`` and ``cpu-affinity``, and
once without it, as ``fastloop-spinning``. The slowdown compares runs of the same round: samples/s alone, divided by
samples/s beside the busy processes. Rounds are interleaved, A B C, C B A. The machine must be idle otherwise. The
results record the load of other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
from _arms import NEEDS
from _measure import (
    RESULTS,
    ROOT,
    caution,
    machine,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    spawn,
    table,
    write,
    write_section,
)
from _reviews import minilm

SPINNING = "fastloop-spinning"
ARMS = ("bare", "hf-trainer", "lightning", SPINNING, "fastloop")


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute without end, until the context is left."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(1.0 if processes else 0.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def summary(results: list[dict[str, dict[str, Any]]], arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Results of each arm over the rounds, and the same as a table."""
    rows = []
    lines = []
    for arm in arms:
        idle = [one[f"{arm} idle"]["samples_per_second"] for one in results]
        busy = [one[f"{arm} busy"]["samples_per_second"] for one in results]
        row: dict[str, Any] = {
            "arm": arm,
            "idle": statistics.median(idle),
            "busy": statistics.median(busy),
            "slowdown": ratio(idle, busy),
        }
        if "fastloop" in arms:
            ours = [one["fastloop busy"]["samples_per_second"] for one in results]
            row["fastloop_over_it"] = ratio(ours, busy)
        rows.append(row)
        over = show_ratio(row["fastloop_over_it"]) if "fastloop_over_it" in row and arm != "fastloop" else ""
        lines.append([f"`{arm}`", f"{row['idle']:.2f}", f"{row['busy']:.2f}", show_ratio(row["slowdown"]), over])
    head = ["arm", "samples/s, idle", "samples/s, busy", "slowdown", "speedup of fastloop over the arm, busy"]
    return rows, table(head, lines)


def main() -> None:
    """Run all arms and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps measured (default 6)")
    parser.add_argument("--busy", type=int, default=1, help="busy processes (default 1)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="folder with train.parquet"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    options = parser.parse_args()
    source = options.data / "train.parquet"
    if not source.is_file():
        parser.error(f"{source}: no such file. --data names the folder.")
    minilm()
    arms = [arm for arm in options.arms if importlib.util.find_spec(NEEDS.get(arm, "torch")) is not None]
    plain = {"OMP_NUM_THREADS": None, "OMP_WAIT_POLICY": None, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    results: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.repeats)]
    with tempfile.TemporaryDirectory() as temporary:
        for number, arm in rounds(arms, options.repeats):
            folder = Path(temporary) / str(number)
            if not folder.exists():
                folder.mkdir()
                peers.draw(source, folder, options.steps, number)
            for state, count in (("idle", 0), ("busy", options.busy)):
                extra = ["--plugins", "cpu-affinity"] if arm == "fastloop" else []
                with busy_processes(count):
                    name = arm.removesuffix("-spinning")
                    own = [Path(peers.__file__), "--arm", name, "--data", folder, "--seed", number, *extra]
                    row = spawn(own, plain)
                results[number][f"{arm} {state}"] = row | {"arm": arm, "state": state}
                print(f"round {number + 1} {arm:20} {state} {row['samples_per_second']:6.2f} samples/s", flush=True)

    rows, shown = summary(results, arms)
    facts = machine(*peers.PACKAGES) | {"device": f"{machine()['cpu']} (CPU)"}
    record = {
        "machine": facts,
        "busy": options.busy,
        "steps": options.steps,
        "batch": peers.BATCH,
        "summary": rows,
        "rounds": results,
    }
    print(f"\n{shown}\n\n{write('loaded', record, options.results)}")
    if options.results == RESULTS:
        said = (
            f"{show_machine(facts)} {options.repeats} rounds of {options.steps} steps, beside {options.busy} busy "
            "process."
        )
        given = "fastloop's plugins: those of the section Peers, and `cpu-affinity`, which `fastloop-spinning` lacks."
        parts = [source(__doc__, __file__), shown, f"{said} {caution(options.repeats)}", given]
        write_section("Beside a busy program", "\n\n".join(parts))


if __name__ == "__main__":
    main()

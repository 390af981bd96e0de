"""Check every subset of seven plugins: it trains like the plain run, or `fastloop plan` names the plugin to leave out.

    python benchmarks/matrix.py                # all 128 subsets, about 15 minutes on two cores; writes docs/matrix.md
    python benchmarks/matrix.py --sample       # five of them, for CI; writes nothing

A subset with a strategy (ddp, fsdp, deepspeed) runs in two processes, any other in one. The recipe trains a small
transformer from scratch on texts of 4 to 40 words, without dropout, for 32 optimizer steps. The largest relative
difference of a step's loss to the plain run is limited by the numerics class of the plugins: bitwise 0, reassociated
1e-5, reduced-precision 0.1. Each row is for four subsets: with and without checkpoint-best and dataloader-workers.

The model has no plan for `tensor-parallel`: `tests/plugins/strategies/test_tensor_parallel.py` trains another one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

PLUGINS = ("amp", "compile", "ddp", "fsdp", "deepspeed", "checkpoint-best", "dataloader-workers")
STRATEGIES = ("ddp", "fsdp", "deepspeed")
OPTIONS: dict[str, dict[str, Any]] = {
    "amp": {"dtype": "bf16"},
    "checkpoint-best": {"monitor": "accuracy"},
    "dataloader-workers": {"num_workers": 1},
}
LIMIT = 300
"""Seconds in which a command ends; most take ten."""
BANDS = {"bitwise": 0.0, "reassociated": 1e-5, "reduced-precision": 0.1}
SAMPLE = (
    (),
    ("amp", "ddp", "checkpoint-best", "dataloader-workers"),
    ("fsdp", "checkpoint-best"),
    ("amp", "deepspeed"),
    ("ddp", "fsdp"),
)
"""Subsets for CI: each plugin but ``compile`` trains, each strategy with another plugin, and two strategies are
refused."""
MODEL = {
    "model_type": "distilbert",
    "dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 64,
    "max_position_embeddings": 64,
}
MODEL |= {"initializer_range": 0.1, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}


def recipe(plugins: tuple[str, ...], output: str) -> dict[str, Any]:
    """The recipe of a subset."""
    return {
        "model": {"config": MODEL, "tokenizer": {"kind": "word"}},
        "data": {
            "files": {"train": "train.jsonl", "validation": "test.jsonl", "test": "test.jsonl"},
            "label": "label",
            "max_length": 64,
        },
        "train": {
            "epochs": 2,
            "batch_size": 16,
            "micro_batch_size": 4,
            "lr": 2e-3,
            "max_grad_norm": 1.0,
            "save_every": 8,
            "log_every": 1,
        }
        | {"device": "cpu"},
        "plugins": [{name: OPTIONS.get(name, {})} for name in plugins] + [{"progress": False}],
        "output": output,
    }


def write_texts(folder: Path) -> None:
    """Two kinds of text of 4 to 40 words, with few words that depend on the label."""
    for split, size, seed in (("train", 256, 0), ("test", 64, 1)):
        chance = random.Random(seed)
        rows = []
        for index in range(size):
            words = [f"word{chance.randrange(150)}" for _ in range(chance.randrange(3, 40))]
            words.insert(
                chance.randrange(len(words)), chance.choice((("fine", "lovely"), ("dull", "dreadful"))[index % 2])
            )
            rows.append(json.dumps({"text": " ".join(words), "label": index % 2}))
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def fastloop(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command line, in a new process.

    Raises:
        SystemExit: It did not end in ``LIMIT`` seconds. The message has the stacks of its processes.
    """
    from fastloop.testing.time_limits import OutOfTime, run_limited

    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fastloop", *arguments]
    try:
        return run_limited(command, LIMIT, cwd=folder, env=environment)
    except OutOfTime as error:
        sys.exit(f"{' '.join(arguments)} did not end in {LIMIT} seconds:\n{error.output}{error.errors}")


def numerics(plugins: tuple[str, ...]) -> str:
    """The numerics class of a set: that of its weakest plugin."""
    from fastloop.plugins.installed import load

    classes = {load(name).numerics for name in plugins}
    return next((name for name in reversed(BANDS) if name in classes), "bitwise")


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "split" not in line]


def spread(folder: Path, plain: list[float]) -> float:
    """The same largest difference for two other seeds; the smaller of both."""
    spreads = []
    for seed in (1, 2):
        tree = recipe((), f"seed{seed}")
        tree["train"]["seed"] = seed
        (folder / "seed.yaml").write_text(yaml.safe_dump(tree))
        done = fastloop("train", "seed.yaml", folder=folder)
        assert done.returncode == 0, done.stderr
        spreads.append(
            max(abs(ours - theirs) / theirs for ours, theirs in zip(losses(folder / f"seed{seed}"), plain, strict=True))
        )
    return min(spreads)


def study(plugins: tuple[str, ...], folder: Path, plain: list[float]) -> dict[str, Any]:
    """Run a subset, and describe the result."""
    name = "+".join(plugins) or "none"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe(plugins, name)))
    processes = 2 if set(plugins) & set(STRATEGIES) else 1
    started = ("--nproc", "2") if processes == 2 else ()
    if len(set(plugins) & set(STRATEGIES)) > 1:
        plan = fastloop("plan", f"{name}.yaml", *started, folder=folder)
        if plan.returncode == 2:
            message = next(line for line in plan.stderr.splitlines() if line.startswith("error: "))
            return {"plugins": plugins, "outcome": "refused", "message": message.removeprefix(f"error: {name}.yaml: ")}
    done = fastloop("train", f"{name}.yaml", *started, folder=folder)
    if done.returncode:
        return {"plugins": plugins, "outcome": "failed", "message": done.stderr.strip().splitlines()[-1]}
    own = losses(folder / name)
    plain = plain or own
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(own, plain, strict=True))
    kind = numerics(plugins)
    return {
        "plugins": plugins,
        "outcome": "trains" if difference <= BANDS[kind] else "leaves its band",
        "processes": processes,
        "class": kind,
        "difference": difference,
        "losses": own,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The results in markdown, without the names of plugins that promise the same bits: a row is for all subsets that
    differ in these."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["outcome"] != "refused":
            names = tuple(name for name in row["plugins"] if numerics((name,)) != "bitwise")
            groups.setdefault(names, []).append(row)
    lines = ["| plugins | class | largest difference |", "|---|---|---|"]
    for names, same in groups.items():
        bad = "".join(
            f" **{' '.join(row['plugins'])}: {row['outcome']}**" for row in same if row["outcome"] != "trains"
        )
        difference = max((row["difference"] for row in same if "difference" in row), default=float("nan"))
        lines.append(f"| {' '.join(names) or 'none'} | {numerics(names)} | {difference:.1e}{bad} |")
    lines += ["", "Refused by `fastloop plan`, with its message:", ""]
    messages = {row["message"]: None for row in rows if row["outcome"] == "refused"}
    return "\n".join([*lines, *(f"- {message}" for message in messages)]) + "\n"


def main() -> None:
    """Run and report. Exits with 1 if a subset neither trains within its bound nor is rejected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", action="store_true", help="five subsets only, written nowhere")
    options = parser.parse_args()
    subsets: list[tuple[str, ...]] = []
    for size in range(len(PLUGINS) + 1):
        subsets += itertools.combinations(PLUGINS, size)
    rows: list[dict[str, Any]] = []
    plain: list[float] = []
    seeds = 0.0
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        for plugins in SAMPLE if options.sample else subsets:
            row = study(plugins, Path(folder), plain)
            if not rows:
                plain = row["losses"]
                seeds = spread(Path(folder), plain)
            rows.append(row)
            print(
                f"{'+'.join(plugins) or 'none':70} {row['outcome']:10} {row.get('difference', '')} "
                f"{row.get('message', '')}",
                flush=True,
            )
    outcomes = Counter(row["outcome"] for row in rows)
    counts = {outcome: outcomes[outcome] for outcome in ("trains", "refused", "leaves its band", "failed")}
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print(f"{len(rows)} subsets: {told}")
    if not options.sample:
        text = (
            "# Which plugins work together\n\n"
            f"Generated by `make matrix` ({Path(__file__).name}): {len(rows)} subsets, {told}. "
            f"The plain run's loss falls from {plain[0]:.3f} to {plain[-1]:.3f}; another seed changes some step's by "
            f"{seeds:.0%}.\n\n"
            f"{__doc__.partition('writes nothing')[2].strip()}\n\n{table(rows)}"
        )
        (Path(__file__).parent.parent / "docs" / "matrix.md").write_text(text)
    sys.exit(bool(counts["failed"] or counts["leaves its band"]))


if __name__ == "__main__":
    main()

"""Slow runs with one planted cause each: what `fastloop profile` suggests and estimates, measured by `bench --select`.

    python benchmarks/planted.py                   # about fifteen minutes on two cores
    python benchmarks/planted.py --only data padding

* data: a dataset whose samples take 5 ms each to read.
* padding: texts of about 20 tokens, padded to 256.
* precision: matrices of 1024 in fp32 on a machine that multiplies bf16 faster.
* allocator: texts of 20 to 400 tokens, so that every step has other shapes, and the system's allocator.
* dropout: a transformer with torch's dropout, and texts of 250 to 400 tokens.
* graph break: a compiled model that reads a number from a tensor in its forward, so that it runs uncompiled.
* lagging process: two processes, one of which reads slowly, so that the other waits for it.

All data is generated. An edit is kept if it is faster, in up to three pairs. Each estimate is made just before
the edit is tried. Its error is the estimate divided by the measured factor, minus one. Its sign is right if the
measured factors are above one, too. An estimate below 1.1, which fastloop shows as "about 1", and factors on both sides
of one have no sign.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from _measure import RESULTS, machine, show_machine, source, table, write, write_section

from fastloop_tools.profile.suggestions import ABOUT_ONE, show_speedup

CODE = """
import os
import random
import time
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

class Scaled(Net):
    def forward(self, x):
        x = x[:, None, :].repeat(1, 128, 1)
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y) * torch.sigmoid(x) + torch.exp(-y * y) * torch.cos(x) + nn.functional.softplus(x - y)
            x = x / max(1.0, x.detach().abs().max().item())
        return x.mean(1)

class Numbers(Dataset):
    def __init__(self, width, sleep, rank):
        self.width = width
        self.sleep = sleep if rank is None or int(os.environ.get("RANK", 0)) == rank else 0.0

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.sleep)
        return torch.full((self.width,), index / 4096), index % 3

def numbers(width=64, sleep=0.0, rank=None):
    return {"train": Numbers(width, sleep, rank)}

def texts(shortest=10, longest=30, count=2000):
    chance = random.Random(0)
    words = [f"word{number}" for number in range(500)]
    texts = [" ".join(chance.choices(words, k=chance.randrange(shortest, longest))) for _ in range(count)]
    return {"train": [{"text": text, "label": index % 2} for index, text in enumerate(texts)]}
"""
TRANSFORMER = {
    "model_type": "distilbert",
    "dim": 256,
    "n_layers": 3,
    "n_heads": 8,
    "hidden_dim": 1024,
    "max_position_embeddings": 512,
}
CALM = TRANSFORMER | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}


def numbers(
    batch: int, plugins: list[Any], model: dict[str, Any] | None = None, name: str = "Net", **data: Any
) -> dict[str, Any]:
    """A recipe of a small network."""
    return {
        "model": {"module": f"planted.py:{name}", "arguments": model or {}},
        "data": {"module": "planted.py:numbers", "arguments": data},
        "train": {"batch_size": batch, "device": "cpu", "epochs": 100},  # long enough for one-time costs
        "plugins": [{"module": {"loss": "cross_entropy"}}, *plugins],
    }


def texts(config: dict[str, Any], data: dict[str, Any], plugins: list[Any], **arguments: Any) -> dict[str, Any]:
    """A recipe of a small transformer."""
    return {
        "model": {"config": config, "tokenizer": {"kind": "word"}},
        "data": {
            "module": "planted.py:texts",
            "arguments": arguments,
            "label": "label",
            "validation_fraction": 0.0,
            **data,
        },
        "train": {"batch_size": 12, "device": "cpu"},
        "plugins": plugins,
    }


@dataclass(frozen=True)
class Planted:
    """A slow run with one cause.

    Attributes:
        recipe: The recipe of the run.
        cures: Plugins that are right to be suggested first.
        arguments: Further arguments of the commands.
    """

    recipe: dict[str, Any]
    cures: set[str]
    arguments: list[str] = field(default_factory=list)


BF16: list[Any] = [{"amp": {"dtype": "bf16"}}]
PLANTED = {
    "data": Planted(numbers(16, ["allocator"], sleep=0.005), {"dataloader-workers"}),
    "padding": Planted(
        texts(CALM, {"max_length": 256, "padding": "max_length"}, ["allocator", "fused-optimizer"]),
        {"packing", "text-classification"},
    ),
    "precision": Planted(
        numbers(2048, ["allocator", "fused-optimizer"], {"width": 1024, "depth": 8}, width=1024), {"amp"}
    ),
    "allocator": Planted(
        texts(
            CALM,
            {"max_length": 400},
            [*BF16, "packing", "attention", "cls-last-layer", "fused-optimizer"],
            shortest=20,
            longest=400,
        ),
        {"allocator"},
    ),
    "dropout": Planted(
        texts(
            TRANSFORMER,
            {"max_length": 400},
            [*BF16, "packing", "attention", "allocator", "cls-last-layer", "fused-optimizer"],
            shortest=250,
            longest=400,
        ),
        {"fast-dropout"},
    ),
    "graph break": Planted(
        numbers(64, ["compile", "allocator", "fused-optimizer"], {"width": 32, "depth": 6}, "Scaled", width=32),
        {"compile"},
    ),
    "lagging process": Planted(
        numbers(
            64, ["ddp", "allocator", "fused-optimizer"], {"width": 768, "depth": 8}, sleep=0.003, rank=1, width=768
        ),
        {"dataloader-workers"},
        ["--nproc", "2"],
    ),
}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Profile one of the runs, and apply edits if possible."""
    planted = PLANTED[name]
    (folder / "planted.py").write_text(CODE)
    (folder / "planted.yaml").write_text(yaml.safe_dump(planted.recipe, sort_keys=False))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    started = time.perf_counter()
    window = ["--steps", "8", "--seconds", "3", "--warmup", "3"]
    for command in (
        ["profile", "planted.yaml", "--output", "seen"],
        ["bench", "planted.yaml", "--select", "planted.fast.yaml"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "fastloop", *command, *window, *planted.arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    # the folder is gone afterwards
    profiled = json.loads((folder / "seen" / "profile.json").read_text().replace(f"{folder}/", ""))
    record = json.loads((folder / "planted.fast.json").read_text())
    first = profiled["suggestions"][0]["plugin"] if profiled["suggestions"] else ""
    lag = None
    for line in (folder / "seen" / "profile.md").read_text().splitlines():
        if "lags" in line:
            lag = line
            break
    kept_plugins = {trial["plugin"] for trial in record["trials"] if trial["kept"]}
    return {
        "name": name,
        "seconds": time.perf_counter() - started,
        "first": first,
        "named": first in planted.cures,
        "verdicts": profiled["suggestions"],
        "seen": profiled["profile"],
        "trials": record["trials"],
        "check": record["check"],
        "lag": lag,
        "cured": bool(kept_plugins & planted.cures),
    }


def error(trial: dict[str, Any]) -> float:
    """The relative error of an estimate: 0.1 if it is 10% above the measured factor."""
    return float(trial["estimate"] / statistics.median(trial["ratios"]) - 1)


def sign(trial: dict[str, Any]) -> str:
    """Whether an estimate has the sign of the measured effect: `right` or `wrong`; empty if the measured range contains
    1, or if the estimate is about 1."""
    low = min(trial["ratios"])
    high = max(trial["ratios"])
    if low <= 1 <= high or trial["estimate"] < ABOUT_ONE:
        return ""
    return "right" if low > 1 else "wrong"


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """Results of earlier runs, by name."""
    file = folder / "planted.json"
    if not file.exists():
        return {}
    return {result["name"]: result for result in json.loads(file.read_text())["runs"]}


def describe(result: dict[str, Any]) -> list[str]:
    """The row of a run in the table."""
    suggestion = "the lagging process" if result["lag"] else result["first"].strip("- ")
    is_cause = "yes" if result["named"] else "no"
    first_edit = ["", "", "", "", ""]
    if result["trials"]:
        trial = result["trials"][0]
        measured = [trial["why"], "", ""]
        ratios = trial["ratios"]
        if ratios:
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            measured = [spread, f"{error(trial):+.0%}", sign(trial)]
        first_edit = [f"`{trial['edit']}`", show_speedup(trial["estimate"]), *measured]
    return [result["name"], suggestion, is_cause, *first_edit, "yes" if result["cured"] else "no"]


def show(result: dict[str, Any]) -> None:
    """Print a run and its edits."""
    first = result["first"] or "-"
    print(f"{result['name']}: first {first}, named {result['named']}, cured {result['cured']}, ", end="")
    print(f"{result['seconds']:.0f} s", flush=True)
    for trial in result["trials"]:
        measured = [round(ratio, 2) for ratio in trial["ratios"]]
        print(f"    {trial['edit']}: estimate {trial['estimate']:.2f}, measured {measured}", flush=True)


def main() -> None:
    """Run all, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(PLANTED),
        default=list(PLANTED),
        help="all by default; the others keep the figures that they have",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    options = parser.parse_args()
    facts = machine("torch", "transformers", "fastloop-train")
    rows = read_results(options.results)
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = run(name, Path(folder))
        ordered = [rows[known] for known in PLANTED if known in rows]
        print(write("planted", {"machine": facts, "runs": ordered}, options.results))
        show(rows[name])
    ordered = [rows[known] for known in PLANTED if known in rows]
    tried = [trial for result in rows.values() for trial in result["trials"] if trial["ratios"]]
    signs = [sign(trial) for trial in tried]
    median_error = statistics.median(abs(error(trial)) for trial in tried)
    errors = f"The median error of the estimates is {median_error:.0%}, without its sign. {signs.count('right')} have "
    errors += f"the sign of the effect, {signs.count('wrong')} do not, {signs.count('')} have none."
    shown = table(
        ["planted", "suggestion", "is the cause", "first edit", "x estimate", "x measured", "error", "sign", "cured"],
        [describe(result) for result in ordered],
        4,
    )
    print(f"{shown}\n{errors}")
    if options.results == RESULTS and rows.keys() == PLANTED.keys():
        about = source(__doc__, __file__)
        pairs = f"Factors are medians of the pairs, with their range. {show_machine(facts)}"
        write_section("Planted slow runs", "\n\n".join([about, shown, errors, pairs]))


if __name__ == "__main__":
    main()

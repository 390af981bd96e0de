"""Command 4: a language model on a GPU, by fastloop and by nanoGPT's step.

    bash benchmarks/gpu/all.sh lm

* The work: GPT-2 with 124M parameters from random weights, 16 x 1,024 generated tokens a step.
  `benchmarks/_blocks.py` describes the model and the tokens, `benchmarks/_language_arms.py` the step of ``plain``:
  PyTorch with ``torch.compile``.
* fastloop: ``compile`` and ``graphs`` (CUDA graphs) without changes of the loss; ``auto``: the plugins that ``auto``
  selects on an H200; ``fused-loss``: the same with the head and the loss computed in chunks; ``muon``: the plugins
  that ``auto`` selects for Muon. An arm with the same plugins as an earlier one is not measured again, and one with a
  plugin that is not installed is left out.
* Each arm is a process that is started and warmed up for 30 steps. Then 20 steps count its waits for the device, and 20
  more record its kernels. A window is 100 steps, with the device synchronized at both ends.
* Rounds are interleaved, A B C, C B A, if the device has memory for all arms. With 80 GiB, one arm is held at a time.
* The validation loss is measured after an arm's last round, by the same code for all.
* MFU: tokens/s times nanoGPT's count of operations for a token, over the product of two matrices that this machine
  reached (record ``ceilings``), and over NVIDIA's figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from _blocks import SIZES, Size, generate, token_flops
from _measure import rounds
from _suite import (
    Budget,
    Records,
    command_budget,
    facts,
    find_device,
    options,
    record_ceilings,
    scratch,
    select_on_h200,
)
from _workers import (
    HELD_ON_CPU,
    chunks,
    measure,
    probe,
    workers,
)

from fastloop.recipe import make_recipe
from fastloop_plugins._own_plugins import own_plugins

VALIDATION = 64
"""Blocks of the validation split: 65,472 targets."""
MUON = {"name": "Muon", "momentum": 0.95}
EAGER: dict[str, Any] = {"amp": {"dtype": "bf16"}, "device-prefetch": {}, "fused-optimizer": {}}


def auto_plugins(size: Size, optimizer: str = "AdamW") -> dict[str, Any]:
    """The plugins that ``auto`` selects on an H200 for the recipe of an arm."""
    tree = {
        "model": {"config": size.config, "tokenizer": {"kind": "word"}},
        "data": {"files": {"train": "train.txt"}, "max_length": size.length},
        "train": {"batch_size": size.batch, "optimizer": {"name": optimizer}},
    }
    return select_on_h200(make_recipe(tree))


def make_arms(size: Size) -> dict[str, dict[str, Any]]:
    """Name of an arm -> a part of its specification for ``worker.py``, with the plugins as name -> options."""
    auto = auto_plugins(size)
    arms: dict[str, dict[str, Any]] = {
        "plain": {"arm": "plain"},
        "compile": {"plugins": EAGER | {"compile": {}}},
        "graphs": {"plugins": EAGER | {"compile": {"mode": "reduce-overhead"}}},
        "auto": {"plugins": auto},
        "fused-loss": {"plugins": auto | {"fused-loss": {}}},
        "muon": {"plugins": auto_plugins(size, "Muon"), "optimizer": MUON},
    }
    return {name: {"arm": "fastloop", **given} for name, given in arms.items()}


def leave_out(arms: dict[str, dict[str, Any]], names: list[str], records: Records) -> dict[str, dict[str, Any]]:
    """The arms of these names, without repeated ones and those whose plugins are not installed, which are
    recorded."""
    kept: dict[str, dict[str, Any]] = {}
    for name in names:
        missing = [plugin for plugin in arms[name].get("plugins", ()) if plugin not in own_plugins()]
        same = next((other for other in kept if kept[other] == arms[name]), None)
        if missing:
            records.add("skipped", name=name, why=f"the plugin {', '.join(missing)} is not installed")
        elif same is not None:
            records.add("skipped", name=name, why=f"it has the same plugins as {same}")
        else:
            kept[name] = arms[name]
    return kept


def arms_at_once(memory_bytes: int | None) -> int:
    """How many arms are held at once. With less than 120 GiB, it is one: the memory of six arms together is known, and
    that of each with its CUDA graphs is not."""
    if memory_bytes is None:
        return HELD_ON_CPU
    return 6 if memory_bytes > 120 * 2**30 else 1


def listed(plugins: Mapping[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """Plugins in the form of a recipe. With ``--tiny``, the compiler compiles no kernels, which takes minutes on a
    busy CPU."""
    return [
        {name: {**given, "backend": "aot_eager", "mode": "default"} if tiny and name == "compile" else given}
        for name, given in plugins.items()
    ]


def run_rounds(
    specs: Mapping[str, Any], settings: argparse.Namespace, hold: int, folder: Path, records: Records, budget: Budget
) -> None:
    """Run the probes and windows of all arms, round by round, and then the validation."""
    parallel = max(2, (os.cpu_count() or 2) // 2)
    for names in chunks(specs, hold):
        with workers({name: specs[name] for name in names}, folder, records, budget, parallel) as ready:
            probe(ready, names, records, budget, kept=0.0)
            for number, name in rounds(names, settings.rounds):
                measure(ready, name, "measure", records, budget, round=number)
            for name in names:
                measure(ready, name, "validate", records, budget)


def main() -> None:
    """Run the arms."""
    known = make_arms(SIZES["gpt2"])

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--arms", nargs="+", choices=list(known), default=list(known))
        parser.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
        parser.add_argument(
            "--hold", type=int, help="arms that are held at once (default: all with 120 GiB on a GPU, else one)"
        )

    settings = options(__doc__, prepare)
    budget = command_budget(settings.seconds)
    records = Records(settings.results / "gpu-lm.jsonl")
    device = find_device()
    settings.rounds = settings.rounds or (1 if settings.tiny else 3)
    name = "tiny" if settings.tiny else "gpt2"
    size = SIZES[name]
    machine = facts(device)
    hold = settings.hold or arms_at_once(machine.get("memory_bytes"))
    work: dict[str, Any] = {"batch": size.batch, "length": size.length, "token_flops": token_flops(size)}
    records.add("facts", **machine, tiny=settings.tiny, steps=size.steps, model=name, **work)
    arms = leave_out(make_arms(size), settings.arms, records)
    with scratch() as folder:
        record_ceilings(records, device, 0.2 if settings.tiny else 1.5)
        # one for the warm-up and the probes
        tokens = folder / "tokens.npz"
        windows = settings.rounds + 1
        arrays: dict[str, Any] = {
            "train": generate(windows * size.steps * size.batch, size, seed=0),
            "validation": generate(VALIDATION, size, seed=1),
        }
        np.savez(tokens, **arrays)
        specs = {}
        for arm, given in arms.items():
            spec = {
                **given,
                "size": name,
                "device": device,
                "tokens": str(tokens),
                "plugins": listed(given.get("plugins", {}), settings.tiny),
            }
            spec |= {"compile_backend": "aot_eager"} if settings.tiny else {}
            specs[arm] = (spec, {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled-{arm}")}, 1)
        run_rounds(specs, settings, hold, folder, records, budget)

    from report import show_lm

    print(f"\n{show_lm(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" for line in records.lines))


if __name__ == "__main__":
    main()

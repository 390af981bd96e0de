"""One language model for fastloop and for a plain loop, on any device. All arms train on the same number of generated
tokens.

* plain: the step of nanoGPT's ``train.py``: ``torch.compile`` of model and loss, bf16 autocast, batches drawn at
  random places into pinned memory while the device computes, clipped gradients, fused AdamW. It needs no checkout of
  nanoGPT: the model is transformers' own.
* fastloop: a recipe with given plugins.

All arms have the learning rate, weight decay, betas and clipping of nanoGPT's GPT-2, without a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from _blocks import SIZES, BlockTask, Size, build_model, validation_loss, write_tokenizer
from _windows import Windows
from numpy.typing import NDArray

LR = 6e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
NORM = 1.0
WARMUP_STEPS = 30
"""Steps of the window ``warmup`` at most: the compiler and CUDA graphs are done after three of one shape."""


def is_full(windows: Windows, size: Size) -> bool:
    """Whether a window has all its steps."""
    if windows.command is None:
        return False
    steps = min(WARMUP_STEPS, size.steps) if windows.command == "warmup" else size.steps
    return len(windows.losses) >= steps


@dataclass(kw_only=True)
class LanguageWork:
    """The work of an arm.

    Attributes:
        size: A name of ``SIZES``.
        device: ``cpu`` or ``cuda``.
        folder: Folder that the arm may write to.
        tokens: A file of ``_blocks``.
        plugins: For fastloop: plugins, in the form of a recipe.
        optimizer: For fastloop: ``train.optimizer``.
        compile_backend: For the plain loop.
    """

    size: str
    device: str
    folder: Path
    tokens: Path
    seed: int = 0
    plugins: list[Any] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "AdamW", "betas": list(BETAS)})
    compile_backend: str = "inductor"

    def load(self, split: str) -> NDArray[np.uint16]:
        """Read a split of the tokens."""
        with np.load(self.tokens) as arrays:
            tokens: NDArray[np.uint16] = arrays[split]
        return tokens


def adamw_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """nanoGPT's groups of parameters: no weight decay for vectors."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def next_token_loss(model: Any, ids: Any, targets: Any) -> tuple[Any, Any]:
    """The forward of nanoGPT's ``GPT`` with a model of transformers: (batch, tokens) ids and targets -> logits, mean
    loss."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=ids, use_cache=False).logits
    return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_plain(work: LanguageWork, windows: Windows) -> None:
    """nanoGPT's loop. Its gradient scaler does nothing in bf16, and is left out."""
    import torch

    torch.set_float32_matmul_precision("high")  # as the script does
    size = SIZES[work.size]
    tokens = work.load("train").ravel()
    model = build_model(size).to(work.device)
    compiled = torch.compile(next_token_loss, backend=work.compile_backend)
    optimizer = torch.optim.AdamW(adamw_groups(model, WEIGHT_DECAY), lr=LR, betas=BETAS, fused=True)
    chance = torch.Generator().manual_seed(work.seed)

    def draw() -> tuple[Any, Any]:
        """Blocks at random places, and their next tokens: of the tokens 5 6 7 8 at length 3, [5 6 7] and [6 7 8]."""
        places = torch.randint(len(tokens) - size.length, (size.batch,), generator=chance)
        parts = [tokens[place : place + size.length + 1].astype(np.int64) for place in places.tolist()]
        longer = torch.from_numpy(np.stack(parts))
        ids = longer[:, :-1].contiguous()
        targets = longer[:, 1:].contiguous()
        if work.device == "cuda":
            ids = ids.pin_memory().to(work.device, non_blocking=True)
            targets = targets.pin_memory().to(work.device, non_blocking=True)
        return ids, targets

    def validate() -> float:
        return validation_loss(model.state_dict(), size, work.load("validation"), work.device)

    ids, targets = draw()
    for _ in count():
        if windows.command is None:
            windows.begin(validate)
        windows.batch({"input_ids": ids})
        with torch.autocast(work.device, dtype=torch.bfloat16):
            _, loss = compiled(model, ids, targets)
        ids, targets = draw()  # while the device computes
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        windows.step(loss)
        if is_full(windows, size):
            windows.end(model)


def prepare_recipe(work: LanguageWork) -> Any:
    """Build the recipe of fastloop's arm."""
    from fastloop.recipe import make_recipe

    size = SIZES[work.size]
    folder = work.folder / "tokenizer"
    train = {
        "epochs": 1000,
        "batch_size": size.batch,
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "decay_biases_and_norms": False,
        "max_grad_norm": NORM,
        "optimizer": work.optimizer,
        "seed": work.seed,
        "save_every": None,
        "device": "auto" if work.device == "cuda" else "cpu",
    }
    tokenizer = folder if folder.exists() else write_tokenizer(folder, size)
    return make_recipe(
        {
            "model": {"config": size.config, "tokenizer": str(tokenizer)},
            # in whose place BlockTask reads a file
            "data": {"module": "_blocks:generate", "text": "text", "max_length": size.length},
            "train": train,
            "plugins": work.plugins,
            "output": str(work.folder / "fastloop"),
        }
    )


def run_fastloop(work: LanguageWork, windows: Windows) -> None:
    """Train as ``fastloop train`` does with this recipe."""
    from fastloop import Plugin, Run, hookimpl
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve

    size = SIZES[work.size]

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def before_step(self, run: Run, batches: Any) -> None:
            if windows.command is None:
                weights = run.unwrap_model().state_dict()

                def validate() -> float:
                    return validation_loss(weights, size, work.load("validation"), work.device)

                windows.begin(validate)
            for batch in batches:
                windows.batch(batch.inputs, batch.samples)

        @hookimpl
        def after_step(self, run: Run, loss: Any) -> None:
            windows.step(loss)
            if is_full(windows, size):
                windows.end(run.unwrap_model())

    recipe = prepare_recipe(work)
    with open_run(resolve(recipe, objects=[BlockTask(work.load("train")), Watch()])) as run:
        execute(run)


LANGUAGE_ARMS = {"plain": run_plain, "fastloop": run_fastloop}


def restart_language(work: LanguageWork) -> None:
    """Restart this process with the environment variables that plugins need, as ``fastloop train`` does."""
    from fastloop.cli import startup

    startup.start_again(startup.resolve_early(prepare_recipe(work), [BlockTask(None)]))

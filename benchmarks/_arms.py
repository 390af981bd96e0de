"""One fine-tuning task for fastloop and its peers, on any device.

Each arm trains epochs over the same tokenized reviews.

* naive: fp32, every review padded to 512, torch's default AdamW.
* bare: a PyTorch script: bf16 autocast, dynamic padding, ``AdamW(fused=True)``.
* hf-trainer: ``Trainer`` with bf16, ``train_sampling_strategy="group_by_length"``, ``DataCollatorWithPadding``, its own
  fused AdamW.
* hf-trainer-compile: the same with ``torch_compile=True``.
* lightning: ``Trainer(precision="bf16-mixed")``, dynamic padding, ``AdamW(fused=True)``.
* fastloop: a recipe with given plugins.

All arms use AdamW at 5e-5 and the model's own dropout. No arm clips gradients, saves or evaluates. On CUDA, all peers
read batches with two workers into pinned memory. They pad to a multiple of 8 tokens, as transformers' documentation
recommends for tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _reviews import MAX_LENGTH, Reviews, ReviewTask, build_model, padder
from _windows import Windows

LR = 5e-5


@dataclass(kw_only=True)
class Work:
    """The work of an arm.

    Attributes:
        model: Model name, as for ``build_model``.
        device: ``cpu`` or ``cuda``.
        folder: Folder that the arm may write to.
        epochs: Number of epochs; each is a window.
        batch_size: Samples in an optimizer step.
        padding: For fastloop: ``longest`` (of each batch) or ``max_length``.
        max_length: Tokens of the longest review.
        plugins: For fastloop: plugins, in the form of a recipe.
        compile_backend: For ``hf-trainer-compile``.
    """

    model: str
    device: str
    folder: Path
    epochs: int = 1
    batch_size: int = 12
    seed: int = 0
    padding: str = "longest"
    max_length: int = MAX_LENGTH
    plugins: list[Any] = field(default_factory=list)
    compile_backend: str = "inductor"

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device == "cuda"


Arm = Callable[[Work, Reviews, Windows], None]


def collator(work: Work, padding: str = "longest") -> Any:
    """A collator of transformers."""
    from transformers import DataCollatorWithPadding

    return DataCollatorWithPadding(
        padder(), padding=padding, max_length=work.max_length, pad_to_multiple_of=8 if work.cuda else None
    )


def loader(work: Work, reviews: Reviews, padding: str = "longest") -> Any:
    """A torch data loader."""
    from torch.utils.data import DataLoader

    faster = {"num_workers": 2, "persistent_workers": True, "pin_memory": True} if work.cuda else {}
    return DataLoader(reviews, batch_size=work.batch_size, shuffle=True, collate_fn=collator(work, padding), **faster)  # type: ignore[arg-type]


def run_naive(work: Work, reviews: Reviews, windows: Windows) -> None:
    script(work, reviews, windows, bf16=False, padding="max_length", fused=False)


def run_bare(work: Work, reviews: Reviews, windows: Windows) -> None:
    script(work, reviews, windows, bf16=True, padding="longest", fused=True)


def script(work: Work, reviews: Reviews, windows: Windows, bf16: bool, padding: str, fused: bool) -> None:
    """The training loop of PyTorch's and transformers' tutorials."""
    import torch

    model = build_model(work.model).to(work.device)
    batches = loader(work, reviews, padding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=fused or None)
    for _ in range(work.epochs):
        windows.begin()
        for batch in batches:
            inputs = {name: tensor.to(work.device, non_blocking=True) for name, tensor in batch.items()}
            windows.batch(inputs)
            with torch.autocast(work.device, dtype=torch.bfloat16, enabled=bf16):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            windows.step(loss)
        windows.end(model)


def run_hf_trainer(work: Work, reviews: Reviews, windows: Windows, compiles: bool = False) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watched(Trainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
            windows.batch(inputs)
            self.loss = super().training_step(model, inputs, *rest, **more)
            return self.loss

    class Watch(TrainerCallback):
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            windows.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            windows.step(trainer.loss)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            windows.end(model)

    model = build_model(work.model)
    arguments = TrainingArguments(
        output_dir=str(work.folder / "hf"),
        num_train_epochs=work.epochs,
        per_device_train_batch_size=work.batch_size,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        bf16=True,
        train_sampling_strategy="group_by_length",
        torch_compile=compiles,
        torch_compile_backend=work.compile_backend if compiles else None,
        use_cpu=not work.cuda,
        seed=work.seed,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=work.cuda,
        dataloader_num_workers=2 if work.cuda else 0,
        dataloader_persistent_workers=work.cuda,
    )
    trainer = Watched(
        model=model, args=arguments, train_dataset=reviews, data_collator=collator(work), callbacks=[Watch()]
    )
    trainer.train()


def run_hf_trainer_compile(work: Work, reviews: Reviews, windows: Windows) -> None:
    run_hf_trainer(work, reviews, windows, compiles=True)


def run_lightning(work: Work, reviews: Reviews, windows: Windows) -> None:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(work.model)

        def on_train_epoch_start(self) -> None:
            windows.begin()

        def training_step(self, batch: Any, _: int) -> Any:
            windows.batch(batch)
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            windows.step(outputs["loss"])

        def on_train_epoch_end(self) -> None:
            windows.end(self.model)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0, fused=True)

    lightning.Trainer(
        max_epochs=work.epochs,
        accelerator="gpu" if work.cuda else "cpu",
        devices=1,
        precision="bf16-mixed",
        enable_checkpointing=False,
        default_root_dir=work.folder / "lightning",
    ).fit(Module(), loader(work, reviews))


def prepare_fastloop(work: Work, splits: Mapping[str, Reviews]) -> tuple[Any, ReviewTask]:
    """Build the recipe and the task of fastloop's arm."""
    from fastloop.recipe import make_recipe

    recipe = make_recipe(
        {
            "train": {
                "epochs": work.epochs,
                "batch_size": work.batch_size,
                "eval_batch_size": 8 * work.batch_size,
                "lr": LR,
                "seed": work.seed,
                "save_every": None,
                "device": "auto" if work.cuda else "cpu",
            },
            "plugins": work.plugins,
            "output": str(work.folder / "fastloop"),
        }
    )
    return recipe, ReviewTask(splits, work.model, work.padding, work.max_length)


def run_fastloop(work: Work, reviews: Reviews, windows: Windows) -> None:
    """Train as ``fastloop train`` does with this recipe."""
    from fastloop import Plugin, hookimpl
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def before_epoch(self) -> None:
            windows.begin()

        @hookimpl
        def before_step(self, batches: Any) -> None:
            for batch in batches:
                windows.batch(batch.inputs, batch.samples)

        @hookimpl
        def after_step(self, loss: Any) -> None:
            windows.step(loss)

        @hookimpl
        def after_epoch(self, run: Any) -> None:
            windows.end(run.unwrap_model())

    recipe, task = prepare_fastloop(work, {"train": reviews})
    with open_run(resolve(recipe, objects=[task, Watch()])) as run:
        execute(run)


ARMS: dict[str, Arm] = {
    "naive": run_naive,
    "bare": run_bare,
    "hf-trainer": run_hf_trainer,
    "hf-trainer-compile": run_hf_trainer_compile,
    "lightning": run_lightning,
    "fastloop": run_fastloop,
}
NEEDS = {"hf-trainer": "accelerate", "hf-trainer-compile": "accelerate", "lightning": "lightning"}


def restart_for_fastloop(work: Work) -> None:
    """Restart this process with the environment variables that plugins need, as ``fastloop train`` does."""
    from fastloop.cli import startup

    recipe, task = prepare_fastloop(work, {})
    startup.start_again(startup.resolve_early(recipe, [task]))

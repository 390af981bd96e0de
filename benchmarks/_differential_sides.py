"""Both sides of ``differential.py``: fastloop and its peers train the same row, and record tokens, masks and losses.

    python _differential_sides.py fastloop FOLDER chat dpo
    python _differential_sides.py peers FOLDER chat dpo

writes ``FOLDER/SIDE.jsonl``, one object for each row with and without adapters. A side has a process of its own: each
changes functions of transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _differential_rows import ADAPTER, BATCH, MAX_LENGTH, ROWS, SAMPLES, STEPS, Row

from fastloop.problem import typed_clause

LEARNING_RATES = {False: 1e-4, True: 1e-3}
"""Whether there are adapters -> learning rate."""
IGNORED = -100
NEW_WEIGHTS = ("lora_A", "score.", "classifier.")
"""Parts of the names of weights that are drawn at random. Both sides set them to the same values."""


@dataclass(kw_only=True)
class Numbers:
    """The numbers of a training.

    Attributes:
        ids: The token ids of each sequence of the first steps, in the order of the batches.
        masks: Which of them have a loss, as 0 and 1; empty if the task has no such mask. The first token of a sequence
            counts as 0, because nothing predicts it.
        losses: The loss of each step.
        trained: Number of weights that get a gradient.
        error: The error that ended the training; empty if none did.
    """

    ids: list[list[int]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trained: int = 0
    error: str = ""


def count_trained(model: Any) -> int:
    """The number of weights with a gradient. Others, such as a pooler that no loss reads, do not change."""
    return sum(weight.numel() for weight in model.parameters() if weight.grad is not None)


def set_new_weights(model: Any) -> None:
    """Give weights that were drawn at random values that depend on their order and shape only."""
    import torch

    seen = 0
    for name, weight in model.named_parameters():
        kind = next((part for part in NEW_WEIGHTS if part in name), None)
        if kind is None:
            continue
        place = 0
        if kind == "lora_A":  # a head may be there twice: as it is built, and as PEFT trains it
            seen += 1
            place = seen
        generator = torch.Generator().manual_seed(place)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)


def unpadded(rows: Any, mask: Any) -> list[list[int]]:
    """The rows of a padded batch without padding; without a mask, as they are."""
    if mask is None:
        return [list(map(int, row)) for row in rows]
    lists = []
    for row, real in zip(rows, mask, strict=True):
        lists.append(list(map(int, row[real.bool()])))
    return lists


def without_first(masks: list[list[int]]) -> list[list[int]]:
    return [[0, *row[1:]] for row in masks]


def write_samples(row: Row, folder: Path) -> Path:
    path = folder / f"{row.samples}.jsonl"
    lines = [json.dumps(sample) for sample in SAMPLES[row.samples](STEPS * BATCH)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# -- fastloop ----------------------------------------------------------------------------------------------------------


def make_recorder(numbers: Numbers) -> Any:
    """A plugin that records a training, which reads the samples in the order of the file."""
    from torch.utils.data import BatchSampler, SequentialSampler

    from fastloop import Plugin, hookimpl

    class Recorder(Plugin):
        name = "recorder"

        @hookimpl
        def build_sampler(self, run: Any, split: str) -> Any:
            return BatchSampler(SequentialSampler(run.datasets[split]), BATCH, drop_last=False)

        @hookimpl
        def before_fit(self, run: Any) -> None:
            model = run.unwrap_model()
            set_new_weights(model)
            dataset = run.datasets["train"]
            batch = run.loaders.collators["train"]([dataset[0]])
            # batches of `causal-lm` have no mask of their padding, so its samples are recorded
            self.reads_samples = "input_ids" in dataset[0] and "targets" in batch.inputs
            if self.reads_samples:
                for index in range(min(len(dataset), STEPS * BATCH)):
                    self.record_sample(dataset[index])

        def record_sample(self, sample: Mapping[str, Any]) -> None:
            ids = [int(token) for token in sample["input_ids"]]
            numbers.ids.append(ids)
            if "targets" in sample:  # the target of a token is the next token
                numbers.masks.append([0, *(int(token >= 0) for token in sample["targets"][:-1])])
            else:
                numbers.masks.append([0] + [1] * (len(ids) - 1))

        @hookimpl
        def before_step(self, batches: list[Any]) -> None:
            if self.reads_samples:
                return
            for batch in batches:
                inputs = batch.inputs
                mask = batch.inputs.get("attention_mask")
                numbers.ids += unpadded(inputs["input_ids"], mask)
                if "completion" in inputs:  # 1 where the next token is one of a completion
                    rows = unpadded(inputs["completion"], mask)
                    numbers.masks += [[0, *row[:-1]] for row in rows]

        @hookimpl
        def after_backward(self, run: Any) -> None:
            numbers.trained = count_trained(run.unwrap_model())

        @hookimpl
        def after_step(self, loss: Any) -> None:
            numbers.losses.append(float(loss))

    return Recorder()


def train_fastloop(row: Row, adapters: bool, model: Path, folder: Path) -> Numbers:
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    numbers = Numbers()
    plugins: list[Any] = [] if row.task is None else [row.task]
    if adapters:
        plugins.append({"lora": ADAPTER})
    files = {"files": {"train": str(write_samples(row, folder))}}
    recipe = make_recipe(
        {
            "model": {"name": str(model)},
            "data": files | {"max_length": MAX_LENGTH, "validation_fraction": 0.0} | row.data,
            "train": {
                "epochs": 1,
                "batch_size": BATCH,
                "max_steps": STEPS,
                "lr": LEARNING_RATES[adapters],
                "save_every": None,
                "device": "cpu",
            },
            "plugins": plugins,
            "output": str(folder / "run"),
        }
    )
    with open_run(resolve(recipe, objects=[make_recorder(numbers)])) as run:
        execute(run)
    shutil.rmtree(folder / "run")  # an export of a language model is large
    return numbers


# -- the peers ---------------------------------------------------------------------------------------------------------


def make_recording(trainer: Any, numbers: Numbers) -> Any:
    """A trainer of transformers that records its inputs and losses."""

    class Recording(trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            record_inputs(inputs, numbers)
            result = super().training_step(model, inputs, *arguments, **more)
            numbers.trained = count_trained(model)
            return result

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            result = super().compute_loss(model, inputs, *arguments, **more)
            loss = result[0] if isinstance(result, tuple) else result
            numbers.losses.append(float(loss))
            return result

        def get_batch_sampler(self, dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
            from sentence_transformers.base.sampler import DefaultBatchSampler
            from torch.utils.data import SequentialSampler

            return DefaultBatchSampler(SequentialSampler(dataset), batch_size=batch_size, drop_last=drop_last)

    return Recording


def record_inputs(inputs: Mapping[str, Any], numbers: Numbers) -> None:
    """Record a batch of TRL."""
    if "input_ids" not in inputs:
        return
    mask = inputs.get("attention_mask")
    numbers.ids += unpadded(inputs["input_ids"], mask)
    if "labels" in inputs and inputs["labels"].shape == inputs["input_ids"].shape:
        numbers.masks += without_first(unpadded(inputs["labels"] != IGNORED, mask))
    elif "completion_mask" in inputs:
        numbers.masks += without_first(unpadded(inputs["completion_mask"], mask))


def arguments_of(row: Row, adapters: bool, folder: Path) -> dict[str, Any]:
    """Arguments of every trainer: fp32, AdamW without weight decay, a constant learning rate, no clipping."""
    return {
        "output_dir": str(folder / "peer"),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LEARNING_RATES[adapters],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **row.given,
    }


def adapter_config(kind: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type=kind, r=ADAPTER["r"], lora_alpha=ADAPTER["alpha"], lora_dropout=0.0)


def read_dataset(row: Row, folder: Path) -> Any:
    from datasets import Dataset

    path = write_samples(row, folder)
    return Dataset.from_list([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def train_trl(row: Row, adapters: bool, model: Path, folder: Path) -> Numbers:
    """Train with one of TRL's trainers."""
    import torch
    import transformers
    import trl

    numbers = Numbers()
    is_reward = row.peer == "RewardTrainer"
    config = getattr(trl, row.peer.replace("Trainer", "Config"))
    auto = transformers.AutoModelForSequenceClassification if is_reward else transformers.AutoModelForCausalLM
    options = {"num_labels": 1} if is_reward else {}
    policy = auto.from_pretrained(model, dtype=torch.float32, **options)
    more: dict[str, Any] = {}
    if adapters:
        more["peft_config"] = adapter_config("SEQ_CLS" if is_reward else "CAUSAL_LM")
    elif row.peer in ("DPOTrainer", "KTOTrainer"):
        more["ref_model"] = auto.from_pretrained(model, dtype=torch.float32)
    arguments = arguments_of(row, adapters, folder) | {"max_length": MAX_LENGTH}
    if row.task is not None:
        arguments |= {key: value for key, value in next(iter(row.task.values())).items() if key == "beta"}
    trainer = make_recording(getattr(trl, row.peer), numbers)(
        model=policy,
        args=config(**arguments),
        train_dataset=read_dataset(row, folder),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        **more,
    )
    set_new_weights(trainer.model)
    trainer.train()
    return numbers


def record_forward(transformer: Any, numbers: Numbers) -> None:
    """Record the tokens of each forward pass of a Transformer of Sentence Transformers."""

    def record(module: Any, features: tuple[Mapping[str, Any]]) -> None:
        numbers.ids.extend(unpadded(features[0]["input_ids"], features[0].get("attention_mask")))

    transformer.register_forward_pre_hook(record)


def train_sentence_transformers(row: Row, adapters: bool, model: Path, folder: Path) -> Numbers:
    """Train with one of the trainers of Sentence Transformers."""
    import sentence_transformers
    from sentence_transformers.cross_encoder import losses as of_pairs
    from sentence_transformers.sentence_transformer import losses as of_vectors

    numbers = Numbers()
    if row.peer == "CrossEncoderTrainer":
        encoder: Any = sentence_transformers.CrossEncoder(str(model), num_labels=1, max_length=MAX_LENGTH, device="cpu")
        kind = "SEQ_CLS"
        loss = of_pairs.BinaryCrossEntropyLoss
        arguments = sentence_transformers.CrossEncoderTrainingArguments
    else:
        encoder = sentence_transformers.SentenceTransformer(str(model), device="cpu")
        encoder.max_seq_length = MAX_LENGTH
        kind = "FEATURE_EXTRACTION"
        loss = of_vectors.MultipleNegativesRankingLoss
        arguments = sentence_transformers.SentenceTransformerTrainingArguments
    if adapters:
        encoder.add_adapter(adapter_config(kind))
    set_new_weights(encoder)
    record_forward(encoder[0], numbers)
    trainer = make_recording(getattr(sentence_transformers, row.peer), numbers)(
        model=encoder,
        args=arguments(**arguments_of(row, adapters, folder)),
        train_dataset=read_dataset(row, folder).rename_columns({"score": "label"} if "label" in row.data else {}),
        loss=loss(encoder),
    )
    trainer.train()
    return numbers


PEERS: dict[str, Callable[[Row, bool, Path, Path], Numbers]] = {
    "SFTTrainer": train_trl,
    "DPOTrainer": train_trl,
    "KTOTrainer": train_trl,
    "RewardTrainer": train_trl,
    "SentenceTransformerTrainer": train_sentence_transformers,
    "CrossEncoderTrainer": train_sentence_transformers,
}
"""Trainer -> function that trains a row with it."""


def main(side: str, folder: Path, names: list[str]) -> None:
    """Train the rows of these names, and write their numbers."""
    with (folder / f"{side}.jsonl").open("w", encoding="utf-8") as file:
        for row in ROWS:
            for adapters in (False, True):
                if row.name not in names:
                    continue
                model = folder / row.model
                train = PEERS[row.peer]
                own = folder / f"{side}-{row.name}-{'lora' if adapters else 'full'}"
                own.mkdir(exist_ok=True)
                try:
                    numbers = (train_fastloop if side == "fastloop" else train)(row, adapters, model, own)
                except Exception as error:  # the table shows it, and the other rows are still compared
                    traceback.print_exc()
                    numbers = Numbers(error=typed_clause(error))
                file.write(json.dumps({"row": row.name, "adapters": adapters, **asdict(numbers)}) + "\n")
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

"""The tasks of benchmarks/architectures.py: their data, and the same training and prediction in plain PyTorch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _tiny_models import IMAGE
from torch import Tensor
from torch.nn.functional import cross_entropy

ROWS = 24
"""Training samples."""
BATCH = 8
"""Samples of a step."""
EPOCHS = 1
SEED = 7
LR = 0.02
"""Learning rate of SGD."""
MOMENTUM = 0.9
NORM = 1.0
"""Norm to which gradients are clipped."""
LONGEST = 22
"""Words of a text at most; it has one at least."""
WORDS = [f"w{index}" for index in range(40)]
CLASSES = "ABC"
IGNORED = -100
MEAN = 0.5
"""Mean of all colors, by which images are normalized."""
STD = 0.25
"""Standard deviation of all colors, by which images are normalized."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of fastloop, and its loss in plain PyTorch.

    Attributes:
        auto: The Auto class of transformers.
        data: The ``data`` section of the recipe, without files.
        inputs: Rows and tokenizer -> the arguments of the model, padded as the tokenizer pads.
        targets: Rows, tokenizer and inputs -> a target for each row of logits, or -100.
    """

    auto: str
    data: dict[str, Any]
    inputs: Callable[[Sequence[Row], Any], dict[str, Tensor]]
    targets: Callable[[Sequence[Row], Any, dict[str, Tensor]], Tensor]


def make_tokenizer(padding_side: str = "right") -> Any:
    """A tokenizer of ``WORDS`` that puts a text between [CLS] and [SEP]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, **names, bos_token="[CLS]", eos_token="[SEP]", padding_side=padding_side
    )


def write_data(folder: Path) -> None:
    """Write ``train.jsonl`` and ``validation.jsonl`` with the columns of all text tasks, and images of three
    classes."""
    from PIL import Image

    for split, size in (("train", ROWS), ("validation", BATCH)):
        chance = random.Random(split)
        rows = []
        for index in range(size):
            words = [chance.choice(WORDS) for _ in range(1 + (index * 7 + len(split)) % LONGEST)]
            cut = max(1, len(words) // 3)
            row = {
                "text": " ".join(words),
                "label": CLASSES[index % 3],
                "words": words,
                "tags": [CLASSES[int(word[1:]) % 3] for word in words],
                "prompt": " ".join(words[:cut]),
                "completion": " " + " ".join([*words[cut:], "w1"]),
                "target": " ".join(words[::-2]),
            }
            rows.append(json.dumps(row))
            image = Image.new("RGB", (IMAGE, IMAGE))
            image.putdata([draw_color(chance) for _ in range(IMAGE * IMAGE)])
            place = folder / "images" / split / CLASSES[index % 3]
            place.mkdir(parents=True, exist_ok=True)
            image.save(place / f"{index:02}.png")
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")


def draw_color(chance: random.Random) -> tuple[int, int, int]:
    """Red, green and blue from 0 to 255."""
    red = chance.randrange(256)
    green = chance.randrange(256)
    blue = chance.randrange(256)
    return red, green, blue


def read_rows(folder: Path, split: str, images: bool) -> list[Row]:
    """The rows of a split, in fastloop's order."""
    if not images:
        return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    paths = sorted((folder / "images" / split).glob("*/*.png"))
    return [{"image": path, "label": path.parent.name} for path in paths]


# -- inputs and targets ------------------------------------------------------------------------------------------------


def text_inputs(rows: Sequence[Row], tokenizer: Any, padding_side: str | None = None) -> dict[str, Tensor]:
    """Padded token ids and their mask. Without ``padding_side``, the tokenizer's own side is padded."""
    encoded = tokenizer([row["text"] for row in rows], padding=True, padding_side=padding_side, return_tensors="pt")
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def tag_inputs(rows: Sequence[Row], tokenizer: Any) -> dict[str, Tensor]:
    """As ``text_inputs``, padded on the right: T5Gemma reads padding on the left, on the side of its own tokenizer."""
    return text_inputs(rows, tokenizer, "right")


def classes(rows: Sequence[Row], tokenizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The class of each row."""
    return torch.tensor([CLASSES.index(row["label"]) for row in rows])


def tags(rows: Sequence[Row], tokenizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The tag of each token that is a word."""
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    is_special = torch.isin(inputs["input_ids"], torch.tensor(tokenizer.all_special_ids))
    classes_of_words: list[int] = []
    for row in rows:
        classes_of_words += [CLASSES.index(tag) for tag in row["tags"]]
    targets[~is_special] = torch.tensor(classes_of_words)
    return targets.flatten()


def completion_ids(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, with the token that begins a text, and of the completion with its end token."""
    prompt, completion = tokenizer([row["prompt"], row["completion"]], add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *prompt], [*completion, tokenizer.eos_token_id]


def language_inputs(rows: Sequence[Row], tokenizer: Any) -> dict[str, Tensor]:
    """Prompts with completions, padded on the right: no token attends to a later one."""
    ids = []
    for row in rows:
        prompt, completion = completion_ids(row, tokenizer)
        ids.append(torch.tensor([*prompt, *completion]))
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(line) for line in ids], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask}


def next_tokens(rows: Sequence[Row], tokenizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """For each token the next one, if it belongs to a completion.

    For a prompt [1 2] and a completion [3 4], the ids are [1 2 3 4] and the targets [- 3 4 -].
    """
    targets = torch.full_like(inputs["input_ids"], IGNORED)
    for line, row in zip(targets, rows, strict=True):
        prompt, completion = completion_ids(row, tokenizer)
        first = len(prompt) - 1
        line[first : first + len(completion)] = torch.tensor(completion)
    return targets.flatten()


def pair_inputs(rows: Sequence[Row], tokenizer: Any) -> dict[str, Tensor]:
    """Padded token ids of texts, and of targets as labels."""
    labels = tokenizer([row["target"] for row in rows], padding=True, padding_side="right", return_tensors="pt")
    ids = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, IGNORED)
    return text_inputs(rows, tokenizer) | {"labels": ids}


def pair_targets(rows: Sequence[Row], tokenizer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The tokens of the targets."""
    return inputs["labels"].flatten()


def pixels(rows: Sequence[Row], tokenizer: Any) -> dict[str, Tensor]:
    """Normalized images."""
    import numpy as np
    from PIL import Image

    images = [torch.from_numpy(np.array(Image.open(row["image"]))).permute(2, 0, 1) for row in rows]
    return {"pixel_values": (torch.stack(images).float() / 255 - MEAN) / STD}


COLUMNS = {"text": "text", "max_length": LONGEST + 2}
TASKS = {
    "text-classification": Task(
        "AutoModelForSequenceClassification", COLUMNS | {"label": "label"}, text_inputs, classes
    ),
    "token-classification": Task(
        "AutoModelForTokenClassification",
        {"words": "words", "tags": "tags", "max_length": LONGEST + 2},
        tag_inputs,
        tags,
    ),
    "causal-lm": Task(
        "AutoModelForCausalLM",
        {"prompt": "prompt", "completion": "completion", "max_length": LONGEST + 3},
        language_inputs,
        next_tokens,
    ),
    "seq2seq": Task(
        "AutoModelForSeq2SeqLM",
        COLUMNS | {"target": "target", "max_target_length": LONGEST + 2},
        pair_inputs,
        pair_targets,
    ),
    "image-classification": Task(
        "AutoModelForImageClassification",
        {
            "image_size": IMAGE,
            "crop_fraction": 1.0,
            "mean": [MEAN] * 3,
            "std": [STD] * 3,
            "augment": {"crop": False, "flip": 0},
        },
        pixels,
        classes,
    ),
}
"""Name of the task's plugin -> the task."""


# -- training and prediction -------------------------------------------------------------------------------------------


def load(folder: Path, task: Task) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder."""
    import transformers

    model = getattr(transformers, task.auto).from_pretrained(folder, dtype=torch.float32)
    return model, None if "Image" in task.auto else transformers.AutoTokenizer.from_pretrained(folder)


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The batches that fastloop documents: one permutation an epoch."""
    for epoch in range(EPOCHS):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED + epoch))
        for start in range(0, len(rows), BATCH):
            yield [rows[index] for index in order[start : start + BATCH].tolist()]


def loss_of(model: Any, task: Task, rows: Sequence[Row], tokenizer: Any) -> Tensor:
    """The mean cross entropy over the targets of a batch."""
    inputs = task.inputs(rows, tokenizer)
    classifies = "Classification" in task.auto
    options = {} if classifies else {"use_cache": False}
    logits = model(**inputs, **options).logits
    return cross_entropy(logits.flatten(0, -2).float(), task.targets(rows, tokenizer, inputs))


def autocast(bf16: bool) -> Any:
    """A context that computes in bf16, or one that does nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bf16)


def train(
    folder: Path, task: Task, rows: Sequence[Row], seed: int = SEED, bf16: bool = False, nudge: float = 0.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in a plain loop. Returns the losses of all steps, and the weights.

    Args:
        seed: Seed of the random numbers that a model draws in training, even without dropout.
        nudge: Relative standard deviation of a change of all weights before training, to find out what rounding does.
    """
    model, tokenizer = load(folder, task)
    torch.manual_seed(seed)
    if nudge:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + nudge * torch.randn_like(weight))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    model.train()
    losses = []
    for batch in batches(rows):
        with autocast(bf16):
            loss = loss_of(model, task, batch, tokenizer)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@torch.no_grad()
def predict(folder: Path, task: Task, rows: Sequence[Row]) -> list[Tensor]:
    """The logits of each row, computed one by one, so that nothing is padded."""
    model, tokenizer = load(folder, task)
    model.eval()
    return [model(**task.inputs([row], tokenizer)).logits[0] for row in rows]


@torch.no_grad()
def evaluate(folder: Path, task: Task, rows: Sequence[Row], bf16: bool) -> float:
    """The loss of all rows as one batch."""
    model, tokenizer = load(folder, task)
    model.eval()
    with autocast(bf16):
        return float(loss_of(model, task, rows, tokenizer))


def generate(folder: Path, task: Task, texts: Sequence[str], tokens: int) -> list[str]:
    """The greedy continuation of each text, one by one."""
    model, tokenizer = load(folder, task)
    model.eval()
    is_decoder = "Causal" in task.auto
    generated = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=not is_decoder, return_tensors="pt")["input_ids"]
        if is_decoder:  # a prompt begins as in training, and has no end
            ids = torch.nn.functional.pad(ids, (1, 0), value=tokenizer.bos_token_id)
        mask = torch.ones_like(ids)
        written = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)[0]
        if is_decoder:
            written = written[ids.shape[1] :]  # without the prompt
        generated.append(tokenizer.decode(written, skip_special_tokens=True))
    return generated

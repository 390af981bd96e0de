"""Each task as a recipe, and the same training by torch alone.

The loss of a step is one formula: a sum over its samples, divided by the sum of their weights. A recipe gives the same
numbers, however micro-batches and processes divide the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import plain_metrics
import torch
from plain_data import CLASSES, LENGTH, ROWS, load_model
from plain_losses import (
    BLOCK,
    Loss,
    add,
    blocks,
    no_terms,
    of_answer,
    of_block,
    of_class,
    of_image,
    of_masked,
    of_names,
    of_number,
    of_tags,
    of_target,
    of_text,
)
from plain_metrics import MORE_OF_CLASSES, MORE_OF_NAMES, MORE_OF_NUMBERS, MORE_OF_TAGS, Metrics
from torch import Tensor, nn

from fastloop.testing.runs import Trained, train

STEPS = 3
BATCH = 6
LR = 0.05
MOMENTUM = 0.9
DECAY = 0.1
MAX_NORM = 0.5
SEED = 7
TRAIN: Mapping[str, Any] = {
    "max_steps": STEPS, "batch_size": BATCH, "optimizer": {"name": "SGD", "momentum": MOMENTUM}, "lr": LR,
    "weight_decay": DECAY, "max_grad_norm": MAX_NORM, "eval_batch_size": 4, "seed": SEED, "device": "cpu",
    "save_every": None,
}  # fmt: skip
WEIGHTS = (1.0, 2.5, 0.25)
"""Class weights, which differ a lot: a mean of means would be wrong by several percent."""
SMOOTHING = 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, and its loss by torch alone.

    Attributes:
        model: A name in ``MODELS``.
        task: The task and its options.
        data: The section ``data``.
        plugins: Other plugins.
        section: The section ``model``; empty: the folder of the model.
        metrics: Those of an evaluation.
        samples: Number of samples.
    """

    model: str
    task: Mapping[str, Any]
    data: Mapping[str, Any]
    loss: Loss
    metrics: Metrics = plain_metrics.of_nothing
    plugins: Sequence[Any] = ()
    section: Mapping[str, Any] = field(default_factory=dict)
    samples: Callable[[], int] = lambda: ROWS


FILES: Mapping[str, Any] = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": LENGTH}
ANSWERS = FILES | {"prompt": "prompt", "completion": "answer", "max_length": 2 * LENGTH}
TARGETS = FILES | {"target": "target", "max_target_length": LENGTH}
LABELLED = FILES | {"label": "class"}
BALANCED = tuple(ROWS / (len(CLASSES) * count) for count in (11, 3, 3))
"""Class weights of ``balanced``: samples / (classes * samples of the class)."""
IMAGES: Mapping[str, Any] = {"images": "images", "augment": {"crop": False, "flip": 0}}


def classify(loss: Any, **options: Any) -> Case:
    return Case(
        model="classifier",
        task={"text-classification": {"loss": loss, "metrics": MORE_OF_CLASSES}},
        data=LABELLED,
        loss=of_class(**options),
        metrics=plain_metrics.of_class,
    )


READ_WHOLE: Mapping[str, Case] = {
    "class": classify("cross_entropy"),
    "class, smoothing": classify({"label_smoothing": SMOOTHING}, smoothing=SMOOTHING),
    "class, weights": classify({"class_weights": list(WEIGHTS)}, weights=WEIGHTS),
    "class, balanced and smoothing": classify(
        {"class_weights": "balanced", "label_smoothing": SMOOTHING}, weights=BALANCED, smoothing=SMOOTHING
    ),
    "class, focal": classify(
        {"name": "focal", "gamma": 1.5, "class_weights": list(WEIGHTS)}, weights=WEIGHTS, gamma=1.5
    ),
    "classes": Case(
        model="classifier",
        task={"text-classification": {"metrics": MORE_OF_NAMES}},
        data=FILES | {"label": "names", "label_type": "classes"},
        loss=of_names,
        metrics=plain_metrics.of_names,
    ),
    "number": Case(
        model="regressor",
        task={"text-classification": {"metrics": MORE_OF_NUMBERS}},
        data=FILES | {"label": "number", "label_type": "number"},
        loss=of_number,
        metrics=plain_metrics.of_number,
    ),
    "tags": Case(
        model="tagger",
        task={"token-classification": {"metrics": MORE_OF_TAGS}},
        data=FILES | {"words": "words", "tags": "tags"},
        loss=of_tags(),
        metrics=plain_metrics.of_tags,
    ),
    "tags of all tokens, weights and smoothing": Case(
        model="tagger",
        task={
            "token-classification": {
                "label_tokens": "all",
                "metrics": MORE_OF_TAGS,
                "loss": {"class_weights": list(WEIGHTS), "label_smoothing": SMOOTHING},
            }
        },
        data=FILES | {"words": "words", "tags": "tags"},
        loss=of_tags(every=True, weights=WEIGHTS, smoothing=SMOOTHING),
        metrics=plain_metrics.of_tags,
    ),
    "blocks of texts": Case(
        model="gpt",
        task={"causal-lm": {}},
        data=FILES | {"max_length": BLOCK},
        loss=of_block,
        metrics=plain_metrics.of_blocks,
        samples=lambda: len(blocks()),
    ),
    "answers": Case(
        model="gpt",
        task={"causal-lm": {}},
        data=ANSWERS,
        loss=of_answer,
        metrics=plain_metrics.of_texts,
    ),
    "answers, packed": Case(
        model="gpt",
        task={"causal-lm": {}},
        data=ANSWERS,
        loss=of_answer,
        metrics=plain_metrics.of_texts,
        plugins=["packing"],
    ),
    "targets of T5": Case(
        model="t5",
        task={"seq2seq": {}},
        data=TARGETS,
        loss=of_target("", "[PAD]"),
        metrics=plain_metrics.of_target("", "[PAD]"),
    ),
    "targets of BART, forced BOS": Case(
        model="bart",
        task={"seq2seq": {}},
        data=TARGETS,
        loss=of_target("<s>", "</s>"),
        metrics=plain_metrics.of_target("<s>", "</s>"),
    ),
    "targets of mBART": Case(
        model="mbart",
        task={"seq2seq": {}},
        data=TARGETS,
        loss=of_target("", "last"),
        metrics=plain_metrics.of_target("", "last"),
    ),
    "image": Case(
        model="vit",
        task={"image-classification": {"metrics": MORE_OF_CLASSES}},
        data=IMAGES,
        loss=of_image(),
        metrics=plain_metrics.of_image,
    ),
    "image, weights and smoothing": Case(
        model="vit",
        task={
            "image-classification": {
                "loss": {"class_weights": list(WEIGHTS), "label_smoothing": SMOOTHING},
                "metrics": MORE_OF_CLASSES,
            }
        },
        data=IMAGES,
        loss=of_image(weights=WEIGHTS, smoothing=SMOOTHING),
        metrics=plain_metrics.of_image,
    ),
    "masked tokens": Case(
        model="masked",
        task={"module": {}},
        data={"module": "plain_data:masked_samples"},
        loss=of_masked,
        section={"module": "plain_data:make_masked"},
    ),
    "next tokens, smoothing": Case(
        model="gpt",
        task={"module": {"loss": {"name": "cross_entropy", "label_smoothing": SMOOTHING}}},
        data={"module": "plain_data:text_samples"},
        loss=of_text(smoothing=SMOOTHING),
        section={"module": "plain_data:make_gpt"},
    ),
    "targets of T5, smoothing": Case(
        model="t5",
        task={"module": {"loss": {"name": "cross_entropy", "label_smoothing": SMOOTHING}}},
        data={"module": "plain_data:pair_samples"},
        loss=of_target("", "[PAD]", smoothing=SMOOTHING),
        section={"module": "plain_data:make_pair_model"},
    ),
}
"""Name -> case. The samples of all cases are drawn in the same order."""
STREAMED = {
    "class, weights": {},
    "number": {},
    "tags of all tokens, weights and smoothing": {},
    "blocks of texts": {"blocks": True},
    "answers": {},
    "targets of BART, forced BOS": {},
}
"""Name of a case whose rows are also read as a stream, in their order -> further keys of ``data``."""


def as_stream(case: Case, keys: Mapping[str, Any]) -> Case:
    """The case with rows that are read while it trains."""
    return replace(case, data={**case.data, "streaming": True, "shuffle_buffer": 0, **keys})


CASES = {**READ_WHOLE, **{f"{name}, streamed": as_stream(READ_WHOLE[name], STREAMED[name]) for name in STREAMED}}
"""Name -> case."""


def train_case(name: str, micro_batch: int, *strategy: str) -> Trained:
    """Train a case on this process, which may be one of several."""
    case = CASES[name]
    recipe = {
        "model": case.section or {"name": case.model},
        "data": case.data,
        "train": TRAIN | {"micro_batch_size": micro_batch},
        "plugins": [case.task, *case.plugins, *strategy, {"log": False}, {"progress": False}],
        "output": f"runs/{name} {micro_batch} {''.join(strategy)}",
    }
    return train(recipe)


def train_cases(names: Sequence[str], micro_batch: int, strategy: str) -> dict[str, Trained]:
    """Name of a case -> its training as one of several processes."""
    return {name: train_case(name, micro_batch, strategy) for name in names}


# -- the reference -----------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Reference:
    """A training by torch alone.

    Attributes:
        losses: The loss of each step.
        gradients: Name -> the clipped gradient of the first step.
        weights: Name -> parameter after the last step.
        evaluated: The loss of all samples and the metrics with them.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    evaluated: dict[str, float]


def mean_of(case: Case, model: Any, indices: Iterable[int]) -> Tensor:
    """The loss of some samples."""
    sum_of = no_terms()
    for index in indices:
        sum_of = add(sum_of, case.loss(model, index))
    return sum_of[0] / sum_of[1]


def steps(case: Case) -> Iterator[list[int]]:
    """The samples of each step in the order that fastloop documents: one permutation an epoch, or that of a stream."""
    order = torch.randperm(case.samples(), generator=torch.Generator().manual_seed(SEED)).tolist()
    if "streaming" in case.data:
        order = list(range(case.samples()))
    for number in range(STEPS):
        yield order[number * BATCH : (number + 1) * BATCH]


def train_plainly(case: Case) -> Reference:
    """Train a case by torch alone, with the formulas of SGD and of clipping."""
    model: nn.Module = load_model(case.model)
    parameters = dict(model.named_parameters())
    velocity: dict[str, Tensor] = {}
    losses = []
    gradients: dict[str, Tensor] = {}
    for step in steps(case):
        loss = mean_of(case, model, step)
        losses.append(loss.item())
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        own = {name: gradient for name, gradient in zip(parameters, found, strict=True) if gradient is not None}
        norm = torch.stack([gradient.square().sum() for gradient in own.values()]).sum().sqrt()
        clipped = {name: gradient * min(1.0, MAX_NORM / norm.item()) for name, gradient in own.items()}
        gradients = gradients or clipped
        with torch.no_grad():
            for name, gradient in clipped.items():
                change = gradient + DECAY * parameters[name]
                velocity[name] = MOMENTUM * velocity[name] + change if name in velocity else change
                parameters[name] -= LR * velocity[name]
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    with torch.no_grad():
        loss_of_all = mean_of(case, model, range(case.samples())).item()
        evaluated = {"loss": loss_of_all, **case.metrics(model, loss_of_all)}
    return Reference(losses=losses, gradients=gradients, weights=weights, evaluated=evaluated)

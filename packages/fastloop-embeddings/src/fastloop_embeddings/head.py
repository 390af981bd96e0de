"""The layers after a model: pooling of the vectors of tokens, and the modules Dense and Normalize."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fastloop import RecipeError
from fastloop_plugins.text import pool, split
from fastloop_plugins.toolkit import clause
from torch import Tensor, nn
from torch.nn import functional

from fastloop_embeddings.modules import POOLINGS, WEIGHTS, ModuleEntry, SentenceModules

NAME = "sentence_head"
"""The attribute of the model that holds a head with weights."""


def divide_by_root(states: Tensor) -> Tensor:
    return states.sum(0) / math.sqrt(len(states))


def weigh_by_place(states: Tensor) -> Tensor:
    """The mean of tokens, where token n of a text counts n times, from 1."""
    weights = torch.arange(1, len(states) + 1, device=states.device, dtype=states.dtype)
    return (states * weights[:, None]).sum(0) / weights.sum()


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda states: states.max(0).values,
    "mean_sqrt_len_tokens": divide_by_root,
    "weightedmean": weigh_by_place,
}
"""Pooling mode -> vector of the states of one text, (tokens, D). ``pool`` of fastloop has the other modes."""


def pool_modes(states: Tensor, batch: Mapping[str, Any], modes: Sequence[str]) -> Tensor:
    """The vectors of each text by every mode, joined: (texts, modes * D) float32."""
    named = {mode: how for how, mode in POOLINGS.items()}
    parts = []
    for mode in modes:
        if mode in named:
            parts.append(pool(states, batch, named[mode]))  # type: ignore[arg-type]
        else:
            reduce = REDUCTIONS[mode]
            parts.append(torch.stack([reduce(text.float()) for text in split(states, batch)]))
    return torch.cat(parts, dim=1)


class Dense(nn.Module):
    """The module Dense: a linear layer and an activation function.

    Its weights are parameters of its own, so that plugins which replace the model's ``nn.Linear`` layers leave it as it
    is.

    Args:
        weights: The content of its ``model.safetensors``.
    """

    def __init__(self, weights: Mapping[str, Tensor], activation: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights["linear.weight"].float())
        self.bias = nn.Parameter(weights["linear.bias"].float()) if "linear.bias" in weights else None
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        projected = functional.linear(vectors.to(self.weight.dtype), self.weight, self.bias)
        result: Tensor = self.activation(projected).float()
        return result

    def exported(self) -> dict[str, Tensor]:
        """The weights, on the CPU, by the names that Sentence Transformers gives them."""
        weights = {"linear.weight": self.weight}
        if self.bias is not None:
            weights["linear.bias"] = self.bias
        weights |= {f"activation_function.{name}": value for name, value in self.activation.named_parameters()}
        return {name: value.detach().cpu().contiguous() for name, value in weights.items()}


class Normalize(nn.Module):
    """The module Normalize: vectors of length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors)


class Head(nn.Module):
    """The modules Dense and Normalize of a model, in order. ``stages`` has one for each of ``SentenceModules``."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, vectors: Tensor) -> Tensor:
        for stage in self.stages:
            vectors = stage(vectors)
        return vectors


def build_head(modules: SentenceModules, size: int, where: str) -> Head:
    """Build the head of pooled vectors with ``size`` numbers.

    Raises:
        RecipeError: A Dense does not fit, or its files cannot be used.
    """
    stages: list[nn.Module] = []
    for module in modules.stages:
        if module.kind == "Normalize":
            stages.append(Normalize())
        else:
            stages.append(load_dense(modules, module, size, where))
            size = int(module.config["out_features"])
    return Head(stages)


def load_dense(modules: SentenceModules, module: ModuleEntry, size: int, where: str) -> Dense:
    """The module Dense with the weights in its folder, for vectors with ``size`` numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    assert modules.folder is not None  # modules made from options have no Dense
    place = modules.folder / module.path
    shape = (module.config["out_features"], module.config["in_features"])
    if shape[1] != size:
        raise RecipeError(
            f"found {shape[1]}, and its input has {size} numbers.",
            code="wrong-shape",
            place=f"{where}: {place}/config.json: in_features",
        )
    activation = find_activation(module.config.get("activation_function"), f"{where}: {place}/config.json")
    try:
        weights = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise RecipeError(
            f"cannot be read: {clause(error)}.", code="file-unreadable", place=f"{where}: {place / WEIGHTS}"
        ) from None
    expected: dict[str, tuple[int, ...]] = {"linear.weight": shape}
    for name, value in activation.state_dict().items():
        expected[f"activation_function.{name}"] = tuple(value.shape)
    if module.config.get("bias", True):
        expected["linear.bias"] = shape[:1]
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != expected:
        raise RecipeError(
            code="wrong-shape", place=f"{where}: {place / WEIGHTS}", found=f"weights {shapes}", expected=str(expected)
        )
    for name, parameter in activation.named_parameters():
        parameter.data.copy_(weights[f"activation_function.{name}"])
    return Dense(weights, activation)


TANH = "torch.nn.modules.activation.Tanh"
"""The activation function of a Dense that names none."""


def find_activation(name: str | None, where: str, default: str = TANH) -> nn.Module:
    """The activation function with the name that Sentence Transformers writes, such as
    ``torch.nn.modules.activation.Tanh``; None: the default.

    Raises:
        RecipeError: It is none of torch.
    """
    name = name or default
    known = {"torch.nn.modules.linear.Identity": "Identity", "torch.nn.Identity": "Identity"}
    for class_name in nn.modules.activation.__all__:
        known[f"torch.nn.modules.activation.{class_name}"] = class_name
        known[f"torch.nn.{class_name}"] = class_name
    try:
        activation: nn.Module = getattr(nn, known[name])()
    except (KeyError, TypeError):  # TypeError: it needs arguments, such as MultiheadAttention
        raise RecipeError(
            f"the activation function {name!r} is not supported.",
            code="unsupported-model",
            place=where,
            remedy="Use another base.",
        ) from None
    return activation


@contextmanager
def without_head(model: nn.Module) -> Iterator[None]:
    """Take the head out of the model inside the block."""
    owners = [module for module in model.modules() if NAME in dict(module.named_children())]
    heads = [getattr(owner, NAME) for owner in owners]
    for owner in owners:
        delattr(owner, NAME)
    try:
        yield
    finally:
        for owner, head in zip(owners, heads, strict=True):
            owner.add_module(NAME, head)


def is_sharded(head: Head) -> bool:
    """Whether a process holds only a part of the weights. Then they are complete only inside the model's own forward
    pass."""
    return any(parameter.numel() == 0 or hasattr(parameter, "full_tensor") for parameter in head.parameters())

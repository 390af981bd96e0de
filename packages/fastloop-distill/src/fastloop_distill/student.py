"""The student: its layers, and its outputs in training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastloop import RecipeError
from torch import nn

PROJECTIONS = "distill_projections"
"""Name of the student's module that maps hidden states to the teacher's width. An exported model has none."""


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter."""
    return next(weight.dtype for weight in model.parameters() if weight.is_floating_point())


def keep_layers(model: Any, layers: list[int], where: str) -> None:
    """Keep only these layers of a model of transformers, counted from 0, and change its configuration accordingly.

    Raises:
        RecipeError: There is no such layer, or the model has not one list of layers.
    """
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    lists = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            lists.append(module)
    if layers[-1] >= count or len(lists) != 1:
        raise RecipeError(
            code="out-of-range",
            place=where,
            found=f"{layers}, and {type(model).__name__} has {len(lists)} list of {count} layers",
            expected="one list with all of them, counted from 0",
        )
    modules = [lists[0][layer] for layer in layers]
    del lists[0][:]
    lists[0].extend(modules)
    for place, layer in enumerate(modules):
        part: Any
        for part in layer.modules():
            if hasattr(part, "layer_idx"):  # by which a cache of keys and values finds it
                part.layer_idx = place
    layer_types = getattr(config, "layer_types", None)
    if isinstance(layer_types, list):
        config.layer_types = [layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)


def pair_layers(model: Any, teacher: Any, layers: list[int], where: str) -> list[int]:
    """The teacher's layer for each one of the student, from 0: the listed ones, or evenly spread with the last one.

    For 3 layers of a teacher with 12, these are 3, 7 and 11.

    Args:
        teacher: Its configuration.
        layers: The option ``teacher_layers``; empty: spread evenly.
    """
    own_count = model.config.get_text_config().num_hidden_layers
    teacher_count = teacher.get_text_config().num_hidden_layers
    pairs = layers or [(layer + 1) * teacher_count // own_count - 1 for layer in range(own_count)]
    if len(pairs) != own_count or not all(0 <= layer < teacher_count for layer in pairs):
        raise RecipeError(
            f"found {pairs}, expected one of the teacher's {teacher_count} layers for each of {own_count}.",
            code="out-of-range",
            place=f"{where}.teacher_layers",
        )
    return pairs


def add_projections(model: Any, teacher: Any) -> None:
    """Let the student learn to map the hidden states of each layer to another width of the teacher's."""
    own_config = model.config.get_text_config()
    teacher_config = teacher.get_text_config()
    if own_config.hidden_size == teacher_config.hidden_size:
        return
    projections = nn.ModuleDict()  # no list: plugins find the layers of a model by its ModuleList
    for layer in range(own_config.num_hidden_layers):
        projections[str(layer)] = nn.Linear(own_config.hidden_size, teacher_config.hidden_size, bias=False)
    model.add_module(PROJECTIONS, projections)


@contextmanager
def without_projections(model: Any) -> Iterator[None]:
    """Leave the projections out of the model's weights inside this context."""
    owners = [module for module in model.modules() if PROJECTIONS in module._modules]
    projections = [owner._modules.pop(PROJECTIONS) for owner in owners]
    try:
        yield
    finally:
        for owner, projection in zip(owners, projections, strict=True):
            owner.add_module(PROJECTIONS, projection)


class Student:
    """Records the outputs of a model in training.

    Args:
        states: Whether to record hidden states, too.

    Attributes:
        output: The newest one. It has logits, and hidden states.
    """

    def __init__(self, model: Any, states: bool) -> None:
        self.output: Any = None
        self.known = [(module, {*module._forward_hooks}) for module in model.modules()]
        self.inputs = {"output_hidden_states": states}
        for module in model.modules():  # with `lora`, the language model is inside of the model
            if hasattr(module, "keeps_logits"):
                module.keeps_logits = True
        self.before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def _before_forward(self, model: Any, args: Any, inputs: dict[str, Any]) -> Any:
        if not is_training(model):
            return None
        return args, inputs | self.inputs

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if not is_training(model):
            return
        projections = getattr(model, PROJECTIONS, None)
        if projections is not None:
            embeddings, *states = output.hidden_states
            mapped = [projection(state) for projection, state in zip(projections.values(), states, strict=True)]
            output.hidden_states = (embeddings, *mapped)
        self.output = output

    def close(self) -> None:
        """Remove the hooks, and those with which transformers records hidden states."""
        self.before.remove()
        for module, known in self.known:
            for key in module._forward_hooks.keys() - known:
                del module._forward_hooks[key]
            vars(module).pop("_output_capturing_hooks_installed", None)


def is_training(model: nn.Module) -> bool:
    """Whether a pass of the model belongs to a training step."""
    return model.training and torch.is_grad_enabled()

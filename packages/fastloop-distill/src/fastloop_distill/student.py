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


def keep_layers(model: Any, layers: list[int], where: str) -> None:
    """Keep only these layers of a model of transformers, counted from 0, and change its configuration accordingly.

    Raises:
        RecipeError: There is no such layer, or the model has not one list of layers.
    """
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    if layers[-1] >= count or len(lists) != 1:
        found = f"{type(model).__name__} has {len(lists)} list of {count} layers"
        raise RecipeError(
            code="out-of-range",
            place=where,
            found=f"{layers}, and {found}",
            expected="one list with all of them, counted from 0",
        )
    kept = [lists[0][layer] for layer in layers]
    del lists[0][:]
    lists[0].extend(kept)
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # by which a cache of keys and values finds it
                module.layer_idx = place
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        config.layer_types = [kinds[layer] for layer in layers]
    config.num_hidden_layers = len(layers)


def pair_layers(model: Any, teacher: Any, given: list[int], where: str) -> list[int]:
    """The teacher's layer for each one of the student, from 0: the given ones, or spread evenly, the last one included.

    Args:
        teacher: Its configuration.
    """
    ours, theirs = (config.get_text_config().num_hidden_layers for config in (model.config, teacher))
    pairs = given or [(layer + 1) * theirs // ours - 1 for layer in range(ours)]
    if len(pairs) != ours or not all(0 <= layer < theirs for layer in pairs):
        found = f"found {pairs}, expected one of the teacher's {theirs} layers for each of {ours}"
        raise RecipeError(f"{found}.", code="out-of-range", place=f"{where}.teacher_layers")
    return pairs


def add_projections(model: Any, teacher: Any) -> None:
    """Let the student learn to map the hidden states of each layer to another width of the teacher's."""
    ours, theirs = (config.get_text_config() for config in (model.config, teacher))
    if ours.hidden_size != theirs.hidden_size:
        sizes = (ours.hidden_size, theirs.hidden_size)
        layers = {str(layer): nn.Linear(*sizes, bias=False) for layer in range(ours.num_hidden_layers)}
        model.add_module(PROJECTIONS, nn.ModuleDict(layers))  # plugins find the layers of a model by its ModuleList


@contextmanager
def without_projections(model: Any) -> Iterator[None]:
    """Leave the projections out of the model's weights inside this context."""
    found = [(each, each._modules.pop(PROJECTIONS)) for each in model.modules() if PROJECTIONS in each._modules]
    try:
        yield
    finally:
        for owner, projections in found:
            owner.add_module(PROJECTIONS, projections)


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
        self.inputs, model.keeps_logits = {"output_hidden_states": states}, True  # those of a language model
        self.before = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        model.register_forward_hook(self._after_forward)

    def _before_forward(self, model: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return (args, inputs | self.inputs) if is_training(model) else None

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if not is_training(model):
            return
        if (projections := getattr(model, PROJECTIONS, None)) is not None:
            first, *states = output.hidden_states
            mapped = (layer(each) for layer, each in zip(projections.values(), states, strict=True))
            output.hidden_states = (first, *mapped)
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

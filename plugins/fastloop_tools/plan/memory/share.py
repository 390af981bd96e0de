"""The part of a recipe's model that one process has: its weights, and the activations of a fake step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, Problem, RecipeError
from fastloop.memory_estimates import Weight
from fastloop.problem import clause
from fastloop_plugins.models.blocks import transformer_blocks
from fastloop_tools.plan.memory.activations import PASSES, Activations, extrapolate, micro_step, state_bytes
from fastloop_tools.plan.memory.change import CHECKPOINTING
from fastloop_tools.plan.memory.model import FakeRun, explain, make_fake, quiet

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("fastloop")


class ModelShare:
    """The part of a model that one process has.

    Args:
        fake: The built model, perhaps divided.
        options: The options of the plugin for activation checkpointing.
        counter: The result of ``divide_model`` or ``divide_sequences``; None: nothing is divided.

    Attributes:
        weights: The parameters; see ``weights_of``.
        second_bytes: Bytes of models beside the trained one.
    """

    def __init__(self, fake: FakeRun, options: Mapping[str, Any], counter: Any) -> None:
        self.fake = fake
        self.options = options
        self.counter = counter
        self.weights = weights_of(fake, None)
        self.second_bytes = sum(tensor.nbytes for tensor in fake.second_weights)
        self._measured: dict[tuple[bool, bool], Activations] = {}

    def activations(self, casts: set[bool]) -> dict[tuple[bool, bool], Activations]:
        """The result of the first call of ``measure``."""
        if not self._measured:
            self._measured = measure(self.fake, self.options, self.counter, casts)
        return self._measured


def weights_of(fake: FakeRun, blocks: list[str] | None, known: tuple[Weight, ...] = ()) -> tuple[Weight, ...]:
    """The parameters of a model, with the state that the optimizer has for each.

    Args:
        blocks: Classes of the repeated blocks; None: found automatically.
        known: The weights of an earlier call, whose optimizer state is used.

    Raises:
        RecipeError: The optimizer cannot step fake tensors.
    """
    model = fake.run.unwrap_model()
    optimizer = fake.run.optimizer
    block_of: dict[int, int] = {}  # id of a parameter -> index of its block
    for index, block in enumerate(transformer_blocks(model, blocks)):
        for weight in block.parameters():
            block_of[id(weight)] = index
    parameters = list(model.parameters())
    if known:
        pairs = zip(known, parameters, strict=True)
        return tuple(replace(weight, block=block_of.get(id(parameter))) for weight, parameter in pairs)
    try:
        state = state_bytes(optimizer, fake.mode)
    except Exception as error:
        raise RecipeError(
            f"{type(optimizer).__name__} cannot step without memory for weights: {clause(error)}.",
            code="unsupported-optimizer",
            place=f"{fake.run.recipe.where}: train.optimizer",
            remedy="Plan with another optimizer, such as train.optimizer=AdamW.",
        ) from error
    group_of: dict[int, int] = {}
    state_of: dict[int, int] = {}
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            group_of[id(weight)] = number
            state_of[id(weight)] = state[index]
            index += 1
    weights = []
    for parameter in parameters:
        weights.append(
            Weight(
                shape=tuple(parameter.shape),
                itemsize=parameter.itemsize,
                state=state_of.get(id(parameter), 0),
                trained=parameter.requires_grad,
                block=block_of.get(id(parameter)),
                group=group_of.get(id(parameter), 0),
            )
        )
    return tuple(weights)


def measure(
    fake: FakeRun, options: Mapping[str, Any], share: Any, casts: set[bool]
) -> dict[tuple[bool, bool], Activations]:
    """(checkpointing, whether weights have the dtype of autocast) -> the activations of a fake step.

    Args:
        options: The options of the plugin for activation checkpointing.
        share: A result of ``divide_model``, if a strategy has divided the model.
        casts: Dtypes to measure: True is that of autocast.

    Raises:
        RecipeError: The model reads values of tensors.
    """
    import torch

    run = fake.run
    model = fake.run.unwrap_model()
    dtypes = {False: torch.float32}
    if fake.precision != "no":
        dtypes[True] = torch.bfloat16 if fake.precision == "bf16" else torch.float16
    measured: dict[tuple[bool, bool], Activations] = {}
    errors: dict[bool, Exception] = {}

    def loss(called: Any) -> torch.Tensor:
        value: torch.Tensor = run.hooks.compute_loss(run=run, model=called, batch=fake.batch).loss
        return value

    def step() -> Activations:
        inputs = [fake.batch, fake.second_weights]
        if share is None:
            return micro_step(model, loss, inputs, fake.precision, fake.mode)
        before = share.sent
        activations = micro_step(model, loss, inputs, fake.precision, fake.mode)
        return replace(activations, sent=(share.sent - before) / PASSES)

    for checkpointing in (False, True):
        if checkpointing and not recompute_blocks(fake, options):
            break
        for cast, dtype in dtypes.items():
            is_unwanted = len(dtypes) > 1 and cast not in casts
            if cast in errors or is_unwanted:
                continue
            has_other_dtype = next(model.parameters()).dtype != torch.float32
            if dtype is not torch.float32 or cast != has_other_dtype:
                make_fake(model, fake.mode, dtype)
            # autocast keeps its copies of weights until the end of forward, where recomputed blocks save none
            has_copies = checkpointing and not cast and len(dtypes) > 1
            try:
                with quiet("torch._subclasses.fake_tensor", logging.CRITICAL):  # it logs tracebacks
                    measured[checkpointing, cast] = step() if has_copies else extrapolate(model, step)
            except Exception as error:
                errors[cast] = error
    if not measured:
        reason = next(iter(errors.values()))
        raise RecipeError(explain(reason), code="unsupported-model", place=run.recipe.where) from reason
    for cast, reason in errors.items():
        _warn_of_no_rows(fake, fake.precision if cast else "fp32", reason)
    if fake.precision == "no":  # the dtype of autocast is that of the weights
        for (checkpointing, _), activations in list(measured.items()):
            measured[checkpointing, True] = activations
    return measured


def _warn_of_no_rows(fake: FakeRun, dtype: str, reason: Exception) -> None:
    """Warn that the strategies that keep weights in a dtype are left out."""
    logger.warning(
        Problem(
            f"no rows of strategies that keep weights in {dtype}: {clause(reason)}.",
            code="not-measured",
            place=fake.run.recipe.where,
        )
    )


def recompute_blocks(fake: FakeRun, options: Mapping[str, Any]) -> bool:
    """Apply activation checkpointing to the blocks of the model. Returns whether it has blocks."""
    from fastloop.plugins.installed import load

    model = fake.run.unwrap_model()
    try:
        if not transformer_blocks(model, options.get("blocks")):
            return False
    except PluginError:
        return False
    plugin: Any = load(CHECKPOINTING)(**options)
    plugin.before_prepare(run=fake.run, model=model)
    return True

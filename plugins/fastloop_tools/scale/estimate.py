"""The estimates of a recipe: every variant of every strategy, with and without activation checkpointing."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from fastloop import PluginError, RecipeError, Strategy
from fastloop_plugins.kernels._blocks import transformer_blocks
from fastloop_plugins.strategies._memory_layout import Layout, Weight
from fastloop_plugins.strategies._tensor_group import CONFLICTS
from fastloop_tools.scale.activations import PASSES, Activations, extrapolate, micro_step, state_bytes
from fastloop_tools.scale.change import CHECKPOINTING, Command, smallest_change
from fastloop_tools.scale.model import FakeRun, explain, make_fake, open_fake, quiet

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")


@dataclass(frozen=True, kw_only=True)
class MemoryVariant:
    """A strategy with its options. Sizes are bytes of one process.

    Attributes:
        name: In the table.
        plugin: The strategy plugin.
        options: Its options.
        checkpointing: Whether activations are recomputed.
        listed: Whether the recipe selects this variant.
        weights: Weights and buffers.
        gradients: Gradients.
        optimizer: Optimizer state, with a strategy's own copy of weights.
        activations: The most that forward and backward hold beside all others.
        saved: The part of ``activations`` that forward keeps for backward.
        buckets: Gathered weights and buffers of communication, at the time when they and the activations are most.
        kept: The part of ``buckets`` that is also held when the optimizer is about to step.
        total: The sum, without ``kept`` and ``saved``.
        host: Bytes in the host's memory.
        wire: Bytes that the process sends in an optimizer step.
        samples: Samples of a micro-batch of the process.
        flops: Floating-point operations in an optimizer step.
        fits: Whether ``total`` fits; None without ``--device-memory``.
        seconds: Time of an optimizer step if communication hides behind computation, or the reverse; None if unknown.
    """

    name: str
    plugin: str
    options: Mapping[str, Any]
    checkpointing: bool
    listed: bool
    weights: float
    gradients: float
    optimizer: float
    activations: float
    saved: float
    buckets: float
    kept: float
    total: float
    host: float
    wire: float
    samples: int
    flops: float
    fits: bool | None
    seconds: float | None


@dataclass(kw_only=True)
class Estimate:
    """The memory and the traffic of a recipe under each strategy.

    Attributes:
        recipe: The recipe's name.
        processes: Number of processes.
        parameters: Number of parameters.
        precision: ``no``, ``bf16`` or ``fp16``.
        batch: Shapes of the measured micro-batch's tensors, which has ``micro_batch_size`` samples.
        micro_steps: Micro-batches of an optimizer step on one process.
        device_memory: Bytes of a device; None: not given.
        variants: All variants.
        smallest_change: The variant that fits with the fewest changes of the recipe; None: none fits, or no change is
            needed.
    """

    recipe: str
    processes: int
    parameters: int
    precision: str
    batch: list[list[int]]
    micro_batch_size: int
    micro_steps: int
    device_memory: float | None
    variants: list[MemoryVariant] = field(default_factory=list)
    smallest_change: MemoryVariant | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def estimate(
    recipe: Recipe,
    nproc: int,
    nnodes: int = 1,
    memory: float | None = None,
    flops: float | None = None,
    bandwidth: float | None = None,
    command: Command | None = None,
) -> Estimate:
    """Estimate every variant of every strategy for a recipe.

    Args:
        nproc: Processes of one machine.
        nnodes: Machines.
        memory: Bytes of a device.
        flops: Floating-point operations that a device does in a second.
        bandwidth: Bytes that a process sends in a second.
        command: The recipe's command; a change that it does not accept is not suggested. None: the recipe is made in
            Python.

    Raises:
        RecipeError: The model cannot be built or trained with fake tensors.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    from fastloop.data.loaders import micro_batches
    from fastloop.distributed.groups import check_groups, count_sharing
    from fastloop.plugins.resolve import resolve

    resolved, processes = resolve(recipe, any_machine=True), nproc * nnodes
    recipe, plugins = resolved.recipe, resolved.plugins
    plugins.hooks.check_recipe(recipe=recipe, plugins=plugins)
    settings = plugins.configure(recipe)
    check_groups(recipe, settings, processes)
    sharing = count_sharing(processes, settings.processes_per_batch)
    group = processes // sharing  # processes of the recipe's run that train on the same samples
    micro_batch_size, micro_steps = micro_batches(recipe, sharing)
    listed = {name: dict(options) for name, options in recipe.plugins.items() if isinstance(options, dict)}
    divider = sequence_divider(recipe, listed)
    context = group if divider is not None else 1
    with ExitStack() as opened:

        @cache
        def build(samples: int, strategy: Any = None, size: int = 1) -> ModelShare:
            with quiet() if build.cache_info().misses > 1 else nullcontext():
                fake = opened.enter_context(open_fake(resolved, settings.mixed_precision, samples))
            model, counter = fake.run.unwrap_model(), None
            if size > 1:
                counter = strategy.divide_model(model, size, fake.precision, recipe.where)
            elif context > 1:
                counter = divider.divide_sequences(model, context)
            return ModelShare(fake, listed.get(CHECKPOINTING, {}), counter)

        whole = build(micro_batch_size)
        result = Estimate(
            recipe=recipe.where,
            processes=processes,
            parameters=sum(weight.elements for weight in whole.weights),
            precision=settings.mixed_precision,
            batch=[list(leaf.shape) for leaf in tree_leaves(whole.fake.batch) if isinstance(leaf, torch.Tensor)],
            micro_batch_size=micro_batch_size,
            micro_steps=micro_steps,
            device_memory=memory,
        )
        for name, cls in strategies(recipe):
            options, sizes = listed.get(name, {}), {1}
            if hasattr(cls, "divisions"):
                sizes = {*cls.divisions(processes, nproc), *([group] if name in listed and context == 1 else [])}
            for size in sorted(sizes):
                if size > 1 and (context > 1 or CONFLICTS.keys() & listed.keys()):
                    continue  # the run would be refused
                try:
                    samples, steps = micro_batches(recipe, processes // max(size, context))
                except RecipeError:
                    continue  # likewise, and the recipe's own strategy is checked above
                try:
                    share = build(samples, cls, size) if size > 1 else build(samples)
                except PluginError:
                    if name in listed and size == group:
                        raise
                    continue
                layout = Layout(
                    weights=weights_of(share.fake, options.get("blocks"), share.weights),
                    buffers=sum(buffer.nbytes for buffer in share.fake.run.unwrap_model().buffers()),
                    processes=processes // size,
                    per_node=max(1, nproc // size),
                    tensor=size,
                    micro_steps=steps,
                    precision=settings.mixed_precision,
                    samples=samples,
                    device="cpu" if recipe.train.device == "cpu" else "cuda",
                    options=options,
                )
                rows = list(cls.estimate_memory(layout))
                # all strategies use the same undivided model
                casts = {False, True} if size == 1 else {bool(row.get("weights_cast")) for row in rows}
                activations = share.activations(casts)
                for row in rows:
                    row["name"] += f" x context {context}" * (context > 1)
                    for checkpointing in (False, True):
                        if (checkpointing, bool(row.get("weights_cast"))) not in activations:
                            continue
                        found = activations[checkpointing, bool(row.get("weights_cast"))]
                        is_listed = name in listed and row.get("listed", True)
                        chosen = is_listed and checkpointing == (CHECKPOINTING in listed)
                        result.variants.append(
                            _variant(row, name, found, checkpointing, chosen, layout, memory, flops, bandwidth)
                        )

    def accepts(variant: MemoryVariant) -> bool:
        return command is None or command.changed(recipe, variant, result.variants).is_accepted()

    result.smallest_change = smallest_change(result.variants, accepts)
    return result


class ModelShare:
    """The part of a model that one process has.

    Args:
        fake: The built model, perhaps divided.
        options: The options of the plugin for activation checkpointing.
        counter: The result of ``divide_model`` or ``divide_sequences``; None: nothing is divided.

    Attributes:
        weights: The parameters; see ``weights_of``.
    """

    def __init__(self, fake: FakeRun, options: Mapping[str, Any], counter: Any) -> None:
        self.fake, self.options, self.counter = fake, options, counter
        self.weights = weights_of(fake, None)
        self._found: dict[tuple[bool, bool], Activations] = {}

    def activations(self, casts: set[bool]) -> dict[tuple[bool, bool], Activations]:
        """The result of the first call of ``measure``."""
        if not self._found:
            self._found = measure(self.fake, self.options, self.counter, casts)
        return self._found


def sequence_divider(recipe: Recipe, listed: Mapping[str, Any]) -> Any:
    """The plugin of a recipe that divides the tokens of sequences; None: there is none."""
    from fastloop.plugins.resolve import load_listed

    return next((cls for name in listed if hasattr(cls := load_listed(recipe, name), "divide_sequences")), None)


def _variant(
    row: Mapping[str, Any],
    plugin: str,
    found: Activations,
    checkpointing: bool,
    listed: bool,
    layout: Layout,
    memory: float | None,
    flops: float | None,
    bandwidth: float | None,
) -> MemoryVariant:
    parts = {name: float(row[name]) for name in ("weights", "gradients", "optimizer", "buckets")}
    parts["buckets"] = max(parts["buckets"], float(row.get("alone", 0)) - found.peak)
    total, work = sum(parts.values()) + found.peak, found.flops * layout.micro_steps
    wire = float(row["wire"]) + found.sent * layout.micro_steps
    known = flops is not None and bandwidth is not None
    return MemoryVariant(
        name=row["name"],
        plugin=plugin,
        options=row["options"],
        checkpointing=checkpointing,
        listed=listed,
        **parts,
        activations=found.peak,
        saved=found.saved,
        kept=float(row.get("kept", 0)),
        total=total,
        host=float(row.get("host", 0)),
        wire=wire,
        samples=layout.samples,
        flops=work,
        fits=None if memory is None else total <= memory,
        seconds=max(work / flops, wire / bandwidth) if known else None,  # type: ignore[operator]
    )


def strategies(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The strategies: fastloop's own, and those that the recipe lists."""
    from fastloop.plugins.installed import load
    from fastloop.plugins.resolve import load_listed
    from fastloop_plugins._own_plugins import own_plugins

    found = {name: load(name) for name in own_plugins()}
    found |= {name: load_listed(recipe, name) for name, options in recipe.plugins.items() if options is not False}
    for name, cls in found.items():
        if issubclass(cls, Strategy):
            yield name, cls


def weights_of(fake: FakeRun, blocks: list[str] | None, known: tuple[Weight, ...] = ()) -> tuple[Weight, ...]:
    """The parameters of a model, with the state that the optimizer has for each.

    Args:
        blocks: Classes of the repeated blocks; None: found automatically.
        known: The weights of an earlier call, whose optimizer state is used.
    """
    model, optimizer = fake.run.unwrap_model(), fake.run.optimizer
    part = {
        id(weight): index
        for index, block in enumerate(transformer_blocks(model, blocks))
        for weight in block.parameters()
    }
    parameters = list(model.parameters())
    if known:
        return tuple(
            replace(weight, block=part.get(id(parameter))) for weight, parameter in zip(known, parameters, strict=True)
        )
    try:
        state = state_bytes(optimizer, fake.mode)
    except Exception as error:
        raise RecipeError(
            f"{fake.run.recipe.where}: train.optimizer: {type(optimizer).__name__} cannot step without memory for "
            "weights: "
            f"{str(error).splitlines()[0]}. Plan with another optimizer, such as train.optimizer=AdamW."
        ) from error
    stepped = [(number, weight) for number, group in enumerate(optimizer.param_groups) for weight in group["params"]]
    places = {id(weight): (number, state[index]) for index, (number, weight) in enumerate(stepped)}
    found = []
    for parameter in parameters:
        group, size = places.get(id(parameter), (0, 0))
        trained = parameter.requires_grad
        shape = tuple(parameter.shape)
        found.append(
            Weight(
                shape=shape,
                itemsize=parameter.itemsize,
                state=size,
                trained=trained,
                block=part.get(id(parameter)),
                group=group,
            )
        )
    return tuple(found)


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

    from fastloop.plugins.installed import load

    run, model = fake.run, fake.run.unwrap_model()
    dtypes = {False: torch.float32} | (
        {True: torch.bfloat16 if fake.precision == "bf16" else torch.float16} if fake.precision != "no" else {}
    )
    found: dict[tuple[bool, bool], Activations] = {}
    errors: dict[bool, Exception] = {}

    def loss(called: Any) -> torch.Tensor:
        value: torch.Tensor = run.hooks.compute_loss(run=run, model=called, batch=fake.batch).loss
        return value

    def step() -> Activations:
        before = share.sent if share is not None else 0.0
        one = micro_step(model, loss, fake.batch, fake.precision, fake.mode)
        return replace(one, sent=(share.sent - before) / PASSES if share is not None else 0.0)

    for checkpointing in (False, True):
        if checkpointing:
            try:
                if not transformer_blocks(model, options.get("blocks")):
                    break
            except PluginError:
                break
            load(CHECKPOINTING)(**options).before_prepare(run=run, model=model)  # type: ignore[attr-defined]
        for cast, dtype in dtypes.items():
            if cast in errors or (len(dtypes) > 1 and cast not in casts):
                continue
            if dtype is not torch.float32 or cast != (next(model.parameters()).dtype != torch.float32):
                make_fake(model, fake.mode, dtype)
            # autocast keeps its copies of weights until the end of forward, where recomputed blocks save none
            has_copies = checkpointing and not cast and len(dtypes) > 1
            try:
                with quiet("torch._subclasses.fake_tensor", logging.CRITICAL):  # it logs tracebacks
                    found[checkpointing, cast] = step() if has_copies else extrapolate(model, step)
            except Exception as error:
                errors[cast] = error
    if not found:
        reason = next(iter(errors.values()))
        raise RecipeError(f"{run.recipe.where}: {explain(reason)}") from reason
    for cast, reason in errors.items():
        logger.warning(
            "%s: no rows of strategies that keep weights in %s: %s",
            run.recipe.where,
            fake.precision if cast else "fp32",
            str(reason).splitlines()[0],
        )
    if fake.precision == "no":
        found |= {(checkpointing, True): value for (checkpointing, _), value in list(found.items())}
    return found

"""The estimates of a recipe: every variant of every strategy, with and without activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastloop import Layout, MemoryEstimate, PluginError, RecipeError, Strategy
from fastloop_plugins.strategies._tensor_group import CONFLICTS
from fastloop_tools.plan.memory.activations import Activations
from fastloop_tools.plan.memory.change import CHECKPOINTING, Command, smallest_change
from fastloop_tools.plan.memory.model import open_fake, quiet
from fastloop_tools.plan.memory.share import ModelShare, weights_of

if TYPE_CHECKING:
    from fastloop.data.loaders import MicroBatches
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.settings import Settings


@dataclass(frozen=True, kw_only=True)
class MemoryVariant(MemoryEstimate):
    """A variant of a strategy, with or without activation checkpointing, on the recipe's model.

    Attributes:
        plugin: The strategy plugin.
        checkpointing: Whether activations are recomputed.
        listed: Whether the recipe selects this variant.
        saved: The part of ``activations`` that forward keeps for backward.
        samples: Samples of a micro-batch of the process.
        flops: Floating-point operations in an optimizer step.
        fits: Whether ``total`` fits; None without ``--device-memory``.
        seconds: Time of an optimizer step if communication hides behind computation, or the reverse; None if unknown.
    """

    plugin: str
    checkpointing: bool
    saved: float
    samples: int
    flops: float
    fits: bool | None
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields and the total as JSON values."""
        return asdict(self) | {"total": self.total}


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
        change = self.smallest_change
        return {
            **vars(self),
            "variants": [variant.to_dict() for variant in self.variants],
            "smallest_change": None if change is None else change.to_dict(),
        }


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """The device to plan for.

    Attributes:
        memory: Its bytes; None: not given.
        flops: Floating-point operations that it does in a second; None: not given.
        bandwidth: Bytes that a process sends in a second; None: not given.
    """

    memory: float | None = None
    flops: float | None = None
    bandwidth: float | None = None

    def seconds(self, flops: float, sent_bytes: float) -> float | None:
        """The time of a step, if computation and communication overlap; None: unknown."""
        if self.flops is None or self.bandwidth is None:
            return None
        return max(flops / self.flops, sent_bytes / self.bandwidth)


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
    from fastloop.plugins.resolve import resolve

    resolved = resolve(recipe, any_machine=True)
    recipe = resolved.recipe
    resolved.plugins.hooks.check_recipe(recipe=recipe, plugins=resolved.plugins)
    limits = DeviceLimits(memory=memory, flops=flops, bandwidth=bandwidth)
    with ExitStack() as stack:
        estimator = Estimator(resolved, nproc, nnodes, limits, stack)
        result = estimator.describe()
        for name, cls in strategies(recipe):
            result.variants += estimator.variants_of(name, cls)

    def accepts(variant: MemoryVariant) -> bool:
        return command is None or command.changed(recipe, variant, result.variants).is_accepted()

    result.smallest_change = smallest_change(result.variants, accepts)
    return result


class Estimator:
    """Builds a recipe's model, or the share of it that one process has, and estimates the variants of a strategy.

    Args:
        nproc: Processes of one machine.
        nnodes: Machines.
        stack: Closes the built runs.

    Raises:
        RecipeError: The processes do not divide the batch.
    """

    def __init__(
        self, resolved: ResolvedRecipe, nproc: int, nnodes: int, limits: DeviceLimits, stack: ExitStack
    ) -> None:
        from fastloop.data.loaders import divide_step
        from fastloop.distributed.groups import check_groups, count_sharing

        self.resolved = resolved
        self.recipe = resolved.recipe
        self.nproc = nproc
        self.processes = nproc * nnodes
        self.limits = limits
        self.settings: Settings = resolved.plugins.configure(self.recipe)
        self.listed = {name: dict(options) for name, options in self.recipe.plugins.items() if options is not False}
        check_groups(self.recipe, self.settings, self.processes)
        sharing = count_sharing(self.processes, self.settings.processes_per_batch)
        self.micro_batches = divide_step(self.recipe, sharing)
        self.group = self.processes // sharing
        """Processes of the recipe's run that train on the same samples."""
        self.divider = sequence_divider(self.recipe, self.listed)
        self.context = self.group if self.divider is not None else 1
        """Processes that divide the tokens of a sequence."""
        self._stack = stack
        self._built: dict[tuple[int, str, int], ModelShare] = {}

    def describe(self) -> Estimate:
        """The estimate of the recipe, without variants.

        Raises:
            RecipeError: The model cannot be built with fake tensors.
        """
        import torch
        from torch.utils._pytree import tree_leaves

        whole = self._build(self.micro_batches.size)
        tensors = [leaf for leaf in tree_leaves(whole.fake.batch) if isinstance(leaf, torch.Tensor)]
        return Estimate(
            recipe=self.recipe.where,
            processes=self.processes,
            parameters=sum(weight.elements for weight in whole.weights),
            precision=self.settings.mixed_precision,
            batch=[list(tensor.shape) for tensor in tensors],
            micro_batch_size=self.micro_batches.size,
            micro_steps=self.micro_batches.steps,
            device_memory=self.limits.memory,
        )

    def variants_of(self, name: str, cls: type[Strategy]) -> Iterator[MemoryVariant]:
        """The variants of a strategy.

        Raises:
            RecipeError: The model cannot be trained with fake tensors.
            PluginError: The recipe lists a strategy that cannot divide the model.
        """
        from fastloop.data.loaders import divide_step

        for size in self._divisions(name, cls):
            try:
                micro_batches = divide_step(self.recipe, self.processes // max(size, self.context))
            except RecipeError:
                continue  # the run would be refused; the constructor has checked the recipe's own strategy
            try:
                share = self._build(micro_batches.size, cls if size > 1 else None, size)
            except PluginError:
                if name in self.listed and size == self.group:
                    raise
                continue
            layout = self._layout(share, name, size, micro_batches)
            rows = []
            for row in cls.estimate_memory(layout):
                rows.append(replace(row, weights=row.weights + share.second_bytes))
            # all strategies use the same undivided model, so that both dtypes are measured at once
            casts = {False, True} if size == 1 else {row.weights_cast for row in rows}
            activations = share.activations(casts)
            for row in rows:
                for checkpointing in (False, True):
                    measured = activations.get((checkpointing, row.weights_cast))
                    if measured is not None:
                        yield self._variant(row, name, measured, checkpointing, layout)

    def _divisions(self, name: str, cls: Any) -> list[int]:
        """The numbers of processes that a strategy divides a layer over, in ascending order."""
        if not hasattr(cls, "divisions"):
            return [1]
        sizes = set(cls.divisions(self.processes, self.nproc))
        if name in self.listed and self.context == 1:
            sizes.add(self.group)
        if self.context > 1 or CONFLICTS.keys() & self.listed.keys():
            sizes &= {1}  # a run that divides layers would be refused
        return sorted(sizes)

    def _build(self, samples: int, strategy: Any = None, size: int = 1) -> ModelShare:
        """The share of the model that one process has, built once for each number of samples, strategy and size.

        Args:
            samples: Samples of a micro-batch.
            strategy: The strategy that divides the layers; None: none does.
            size: The processes that it divides them over.
        """
        key = (samples, "" if strategy is None else strategy.name, size)
        if key in self._built:
            return self._built[key]
        is_first = not self._built
        with nullcontext() if is_first else quiet():
            fake = self._stack.enter_context(open_fake(self.resolved, self.settings.mixed_precision, samples))
        counter = None
        model = fake.run.unwrap_model()
        if strategy is not None:
            counter = strategy.divide_model(model, size, fake.precision, self.recipe.where)
        elif self.divider is not None and self.context > 1:
            counter = self.divider.divide_sequences(model, self.context)
        self._built[key] = ModelShare(fake, self.listed.get(CHECKPOINTING, {}), counter)
        return self._built[key]

    def _layout(self, share: ModelShare, name: str, size: int, micro_batches: MicroBatches) -> Layout:
        options = self.listed.get(name, {})
        return Layout(
            weights=weights_of(share.fake, options.get("blocks"), share.weights),
            buffers=sum(buffer.nbytes for buffer in share.fake.run.unwrap_model().buffers()),
            processes=self.processes // size,
            per_node=max(1, self.nproc // size),
            tensor=size,
            micro_steps=micro_batches.steps,
            precision=self.settings.mixed_precision,
            samples=micro_batches.size,
            device="cpu" if self.recipe.train.device == "cpu" else "cuda",
            options=options,
        )

    def _variant(
        self, row: MemoryEstimate, plugin: str, measured: Activations, checkpointing: bool, layout: Layout
    ) -> MemoryVariant:
        """A row of the table: the estimate of a strategy, with the measured activations."""
        is_listed = plugin in self.listed and row.listed
        flops = measured.flops * layout.micro_steps
        sent_bytes = row.sent_bytes + measured.sent * layout.micro_steps
        complete = replace(row, activations=measured.peak)
        return MemoryVariant(
            name=row.name if self.context == 1 else f"{row.name} x context {self.context}",
            plugin=plugin,
            options=row.options,
            checkpointing=checkpointing,
            listed=is_listed and checkpointing == (CHECKPOINTING in self.listed),
            weights=row.weights,
            gradients=row.gradients,
            optimizer=row.optimizer,
            activations=measured.peak,
            saved=measured.saved,
            buckets=complete.largest_buckets,
            buckets_kept=row.buckets_kept,
            host=row.host,
            weights_cast=row.weights_cast,
            sent_bytes=sent_bytes,
            samples=layout.samples,
            flops=flops,
            fits=None if self.limits.memory is None else complete.total <= self.limits.memory,
            seconds=self.limits.seconds(flops, sent_bytes),
        )


def sequence_divider(recipe: Recipe, listed: Mapping[str, Any]) -> Any:
    """The plugin of a recipe that divides the tokens of sequences; None: there is none."""
    from fastloop.plugins.resolve import load_listed

    for name in listed:
        cls = load_listed(recipe, name)
        if hasattr(cls, "divide_sequences"):
            return cls
    return None


def strategies(recipe: Recipe) -> Iterator[tuple[str, type[Strategy]]]:
    """The strategies by name: fastloop's own, and those that the recipe lists."""
    from fastloop.plugins.installed import load
    from fastloop.plugins.resolve import load_listed
    from fastloop_plugins._own_plugins import own_plugins

    classes = {name: load(name) for name in own_plugins()}
    for name, options in recipe.plugins.items():
        if options is not False:
            classes[name] = load_listed(recipe, name)
    for name, cls in classes.items():
        if issubclass(cls, Strategy):
            yield name, cls

"""A recipe's model, optimizer and batch without memory for weights: built on the meta device, then of fake tensors."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastloop import FastloopError, RecipeError, Strategy, hookimpl
from fastloop.errors import causes
from fastloop.problem import clause

if TYPE_CHECKING:
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.run import Run

BUILDING = (
    "configure", "build_datasets", "build_sampler", "build_collator", "build_model", "before_prepare",
    "build_optimizer",
)  # fmt: skip
"""A plugin takes part in the estimate if it implements one of these hooks."""
META_WORDS = ("meta tensor", "Meta tensor", "meta device", "device meta", "FakeTensor", "fake tensor")
"""Parts of torch's errors about tensors without memory."""
LEFT_OUT = ("activation-checkpointing", "compile")
"""Plugins that do not take part: the first is estimated separately, and the second would compile the fake step."""
BATCHES = 16
"""Batches of which the largest is measured."""


class FakeModel(Strategy):
    """Builds the model on the meta device, and makes its parameters fake tensors before the optimizer is built."""

    name = "fake-model"
    sets_precision = True  # it leaves the model as it is

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    @hookimpl(wrapper=True, trylast=True)
    def build_model(self) -> Generator[None, Any, Any]:
        with torch.device("meta"):
            return (yield)

    @hookimpl(trylast=True)
    def before_prepare(self, model: nn.Module) -> None:
        make_fake(model, self.mode)

    def prepare(self, run: Run, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return model, optimizer


def make_fake(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> None:
    """Replace parameters and buffers, in place, by fake tensors of the CPU. Tied weights stay tied.

    Args:
        dtype: The dtype of the new floating-point parameters; None: their own.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    wanted = (
                        dtype
                        if dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                        else tensor.dtype
                    )
                    with mode:
                        fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")
                    made[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake,
                        tensor,
                    )
                table[name] = made[id(tensor)][0]


def fake_second_models(run: Run, mode: FakeTensorMode) -> list[Tensor]:
    """Make the models fake that plugins keep beside the trained one, and return their parameters and buffers."""
    tensors = list[Tensor]()
    for plugin in run.plugins:
        with torch.device("meta"):
            models = plugin.second_models(run)
        for model in models:
            make_fake(model, mode)
            tensors += [*model.parameters(), *model.buffers()]
    return tensors


@dataclass(frozen=True)
class FakeRun:
    """A built run whose model consists of fake tensors.

    Attributes:
        run: The run; ``unwrap_model()`` is the model, and ``optimizer`` steps its parameters.
        batch: The inputs of one micro-batch of one process, as fake tensors.
        second_weights: Parameters and buffers of models beside the trained one, which each process has in whole.
        mode: The mode that the tensors belong to.
        precision: ``no``, ``bf16`` or ``fp16``.
    """

    run: Run
    batch: Any
    second_weights: list[Tensor]
    mode: FakeTensorMode
    precision: str


@contextmanager
def open_fake(resolved: ResolvedRecipe, precision: str, samples: int) -> Iterator[FakeRun]:
    """Build a recipe's model and optimizer, and read a micro-batch. It reads the data as a run does.

    Raises:
        RecipeError: The model cannot be built on the meta device.
    """
    from fastloop.lifecycle import open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    recipe = resolved.recipe
    plugins = resolved.plugins
    building = set[str]()  # plugins that take part in building the model
    for hook in BUILDING:
        building.update(plugin.name for plugin, _ in plugins.each(hook))
    needed = []
    for plugin in plugins:
        changes_model = plugin.name in building and plugin.slot not in ("strategy", "precision")
        if plugin.name in LEFT_OUT:
            continue
        if plugin.slot == "task" or (changes_model and not plugin.read_only):
            needed.append(plugin.name)
    tree = recipe.to_dict()
    tree["train"] |= {"batch_size": samples, "micro_batch_size": samples, "device": "cpu"}
    with tempfile.TemporaryDirectory(prefix="fastloop-plan-") as scratch, ExitStack() as stack:
        single = resolve(make_recipe(tree | {"output": f"{scratch}/run"}, recipe.source), any_machine=True)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            run = stack.enter_context(open_run(single.with_only(needed), [FakeModel(mode)]))
        except FastloopError as error:
            if not _is_of_meta(error):
                raise
            raise RecipeError(explain(error), code="unsupported-model", place=recipe.where) from error
        batches = list(islice(run.train_loader.batches(), BATCHES))
        run.loaders.close()
        inputs = max((batch.inputs for batch in batches), key=_elements)

        def as_fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf

        fake = torch.utils._pytree.tree_map(as_fake, inputs)
        yield FakeRun(run, fake, fake_second_models(run, mode), mode, precision)


@contextmanager
def quiet(name: str = "fastloop", level: int = logging.ERROR) -> Iterator[None]:
    """Log only errors inside the block, which repeats what is logged already.

    Args:
        name: The logger.
        level: The lowest level to log.
    """
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(level)
    try:
        yield
    finally:
        log.setLevel(before)


def explain(error: BaseException) -> str:
    """The message for a model that has no fake step."""
    return (
        f"the model cannot be built and trained without memory for its weights: {clause(error)}. "
        "`fastloop plan` builds it on torch's meta device, where tensors have no values. Do not read values of tensors "
        "while the model is built or in its forward, or leave a plugin out with --without."
    )


def _is_of_meta(error: BaseException) -> bool:
    for cause in causes(error):
        message = str(cause)
        if any(words in message for words in META_WORDS):
            return True
    return False


def _elements(inputs: Any) -> int:
    return sum(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor))

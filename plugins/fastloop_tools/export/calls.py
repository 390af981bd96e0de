"""How a task calls its model: the arguments of real forward passes, and the axes of each that may change."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastloop.errors import UsageError
from fastloop.splits import PREDICT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastloop.recipe import Recipe
    from fastloop.run import Run

BATCHES = 3
"""Real batches to compare."""
SHAPES = ((4, 12), (3, 7))
"""Texts and tokens of each synthetic batch."""
TOKENS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Arguments of transformers models with one value for each token, (batch, sequence)."""


@dataclasses.dataclass
class Calls:
    """Forward passes of a model.

    Attributes:
        tensors: The tensor arguments of each pass, by name.
        constants: The other arguments, which are the same in each.
        axes: Argument -> axis -> the name of its size, for the axes whose size may change.
        synthetic: Whether the batches are of random tokens, since no split of the recipe's data can be read.
    """

    tensors: list[dict[str, Tensor]]
    constants: dict[str, Any]
    axes: dict[str, dict[int, str]]
    synthetic: bool

    def variants(self) -> Iterator[dict[str, Tensor]]:
        """The passes, and cuts of them: the first row, and two rows with half of the tokens. Each set of shapes
        once."""
        yielded = set()
        for call in self.tensors:
            for cut in (call, self._cut(call, rows=1), self._cut(call, rows=2, halves_tokens=True)):
                shapes = tuple(tensor.shape for tensor in cut.values())
                if shapes not in yielded:
                    yielded.add(shapes)
                    yield cut

    def _cut(self, call: dict[str, Tensor], rows: int, halves_tokens: bool = False) -> dict[str, Tensor]:
        """The first rows of a pass, and maybe the first half of their tokens."""
        cut = {}
        for name, tensor in call.items():
            for axis, size in self.axes[name].items():
                if size == "batch":
                    tensor = tensor[:rows]
                elif size.endswith("sequence") and halves_tokens:
                    tensor = tensor.narrow(axis, 0, max(1, tensor.shape[axis] // 2))
            cut[name] = tensor
        return cut


@contextmanager
def open_exported(recipe: Recipe, names: Iterable[str] = ("test", "validation", "train")) -> Iterator[tuple[Run, bool]]:
    """Open a run with the exported model of ``recipe.inference`` on the CPU, for the first of the splits that can be
    read. Only the task's plugin takes part.

    Yields:
        The run, and whether its split can be read.

    Raises:
        UsageError: The recipe or the model is wrong, or the task needs data to build its model.
    """
    from fastloop.plugins.resolve import load_listed
    from fastloop_tools.inference.chunks import Chunks
    from fastloop_tools.inference.target import open_inference

    inference = recipe.inference
    assert inference is not None
    task = {}
    for name, options in recipe.plugins.items():
        if options is False or load_listed(recipe, name).slot == "task":
            task[name] = options
    recipe = dataclasses.replace(recipe, plugins=task, train=dataclasses.replace(recipe.train, device="cpu"))
    splits = [dataclasses.replace(inference, split=split) for split in names]
    text = dataclasses.replace(inference, split=PREDICT, source=[""], chunk=1)
    problem: UsageError | None = None
    with ExitStack() as stack:
        for tried in [*splits, text]:
            extra = [Chunks(None)] if tried is text else []
            try:
                run = stack.enter_context(open_inference(dataclasses.replace(recipe, inference=tried), extra))
                break
            except UsageError as error:
                if tried is not text:
                    problem = error  # in the end that of the training split, which every recipe has
        else:
            assert problem is not None
            raise problem
        yield run, tried is not text


def record(run: Run, has_data: bool) -> Calls:
    """Record how the task calls its model: in the first batches of the split, or with random tokens.

    Args:
        run: A run of ``open_exported``, with ``has_data``.

    Raises:
        UsageError: There is no data for a model that does not read tokens, or an argument is neither a tensor nor a
            constant.
    """
    model = run.unwrap_model().eval()
    if has_data:
        return _describe(model, list(_calls(run, run.loaders.first_split)), synthetic=False)
    assert run.recipe.inference is not None
    assert run.recipe.inference.model is not None
    return _describe(model, list(_synthetic(model, run.recipe.inference.model)), synthetic=True)


@torch.no_grad()
def _calls(run: Run, split: str) -> Iterator[dict[str, Any]]:
    """The arguments of each forward pass in the first batches of a split, by name."""
    from fastloop import loop
    from fastloop.evaluation_results import evaluating

    model = run.unwrap_model()
    signature = inspect.signature(model.forward)
    calls: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                others = dict(arguments.pop(name, {}))
                others.pop("targets", None)  # of the loss that `causal-lm` adds to the forward
                arguments |= others
        calls.append(arguments)

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with evaluating(run.model):
            for batch in islice(loop.evaluation_batches(run, run.eval_loaders[split]), BATCHES):
                run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    finally:
        handle.remove()
    yield from calls


def _synthetic(model: nn.Module, folder: Path) -> Iterator[dict[str, Any]]:
    """Batches of random tokens, as the model's tokenizer encodes them.

    Raises:
        UsageError: The model does not read tokens.
    """
    from transformers import AutoTokenizer

    taken = inspect.signature(model.forward).parameters
    if "input_ids" not in taken or "decoder_input_ids" in taken:
        raise UsageError(
            f"{type(model).__name__} needs batches of the recipe's data, and no split of it can be read.",
            code="wrong-batch",
            place=str(folder),
            expected="data that can be read, or a model that takes input_ids alone",
            remedy="Make the files of the recipe's data readable here, or give a RECIPE that names other data.",
        )
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    for count, length in SHAPES:
        ids = [torch.randint(len(tokenizer), (max(1, length - row),), generator=generator) for row in range(count)]
        encoded = tokenizer(
            [tokenizer.decode(row) for row in ids],
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        )
        yield {name: value for name, value in encoded.items() if name in taken}


def _describe(model: nn.Module, calls: list[dict[str, Any]], synthetic: bool) -> Calls:
    """Separate tensors from constants, and find the axes that change.

    Raises:
        UsageError: An argument is neither a tensor nor a constant.
    """
    taken = inspect.signature(model.forward).parameters
    prepare: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    for call in calls:
        if prepare is not None and call.get("labels") is not None and call.get("decoder_input_ids") is None:
            call["decoder_input_ids"] = prepare(labels=call["labels"])
        if "labels" in call and ("labels" not in taken or taken["labels"].default is not inspect.Parameter.empty):
            del call["labels"]  # a model needs no labels to predict
    tensors = []
    for call in calls:
        tensors.append({name: value for name, value in call.items() if isinstance(value, Tensor)})
    constants = {name: value for name, value in calls[0].items() if name not in tensors[0] and value is not None}
    if "use_cache" in taken:
        constants["use_cache"] = False
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str):
            raise UsageError(
                f"{type(model).__name__} cannot be exported: its argument {name!r} is a {type(value).__name__}.",
                code="unsupported-model",
                expected="tensors",
            )
    axes: dict[str, dict[int, str]] = {}
    for name, first in tensors[0].items():
        shapes = [call[name].shape for call in tensors if name in call]
        axes[name] = {}
        for axis in range(first.dim()):
            if axis == 0:
                axes[name][axis] = "batch"
            elif len({shape[axis] for shape in shapes}) > 1:
                axes[name][axis] = f"{name}_{axis}"
        if name.removeprefix("decoder_") in TOKENS and first.dim() == 2:
            axes[name][1] = "decoder_sequence" if name.startswith("decoder_") else "sequence"
    return Calls([call for call in tensors if call.keys() == axes.keys()], constants, axes, synthetic)

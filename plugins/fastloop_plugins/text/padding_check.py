"""Check before training that padding changes no result: a text alone, and the same text beside a longer one.

Most models ignore padding. XLNet reads the last position, so its texts are padded on the left. FNet, CANINE, ConvBERT,
Nyströmformer and YOSO mix padding into each text: a warning gives the measured change, and features that depend on
equal results are refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Problem, RecipeError
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.models.checks import on_all_processes

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from fastloop import Run
    from fastloop_plugins.text.batches import Width
    from fastloop_plugins.text.model import TextModel

logger = logging.getLogger("fastloop")

PROBE = ("one two three four five six seven eight", "one two three")
"""Texts for the trial of a model. The shorter one is padded."""

ROUNDING = 1e-3
"""Largest change of a logit by rounding, as a share of the largest logit. Measured on transformers 5.23's models with
large random weights: rounding gives up to 1.4e-4, padding that a model reads 3.7e-3 and more, unless ``CONTENT`` shows
it."""

CONTENT = 1e-5
"""A smaller change than ``ROUNDING`` is rounding, unless other vectors at padding change more than this. Masked vectors
change nothing, bit by bit, except that a mixture of experts computes in other groups: 2e-7. ConvBERT gives 5.7e-5 and
more from 64 features on."""

CONTINUATION = 8
"""Number of new tokens in the trial of a language model. GIT and DeepSeek-V4 give the first one correctly, and later
ones wrongly."""

ALIKE = "pad all texts alike: data.padding=max_length"
"""With it, a text has the same padding in each batch."""


@dataclass(frozen=True)
class PaddingSide:
    """The side to pad texts on.

    Attributes:
        left: Whether it is the left one.
        change: How much padding changes logits even there, as a share of the largest logit; 0: it does not.
        replaces_left: Whether it is the right one, and the tokenizer pads on the left, where padding changes logits.
    """

    left: bool
    change: float
    replaces_left: bool = False


def check_padding(
    run: Run, model: nn.Module, text_model: TextModel, width: Width, make: Callable[[], Mapping[str, Tensor]]
) -> None:
    """Set the side of padding that changes no logit; the right one if both do or none does. Every process must call it.

    The exported tokenizer pads on the same side, unless its own one changes no logit either: a pipeline of transformers
    pads the texts of its batches there.

    Args:
        width: The width of the task's batches, whose ``left`` is set.
        make: Returns the model's inputs for a long and a short text: ``input_ids`` and ``attention_mask`` of shape (2,
            tokens), int64, and others. With ``labels``, the logits are of their tokens, and padding stays on the right.

    Raises:
        RecipeError: Padding changes logits on both sides, and the run divides steps into micro-batches, groups texts by
            length or predicts several texts at once.
    """

    tokenizer = text_model.tokenizer

    def find() -> PaddingSide:
        width.left = False
        inputs = make()
        on_the_right = padding_change(model, inputs)
        can_be_left = "labels" not in inputs
        if on_the_right > 0 and not can_be_left:
            return PaddingSide(left=False, change=on_the_right)
        if on_the_right == 0 and tokenizer.padding_side == "right":
            return PaddingSide(left=False, change=0.0)
        width.left = True
        on_the_left = padding_change(model, make())
        if on_the_right == 0:
            return PaddingSide(left=False, change=0.0, replaces_left=on_the_left > 0)
        if on_the_left == 0:
            return PaddingSide(left=True, change=0.0)
        return PaddingSide(left=False, change=on_the_right)

    side = on_all_processes(run, model, text_model.where, find)
    if side is None:
        side = PaddingSide(left=False, change=0.0)
    width.left = side.left
    if side.left:
        set_padding_side(tokenizer, "left")
        logger.info("%s needs texts that are padded on the left", type(model).__name__)
    if side.replaces_left:
        set_padding_side(tokenizer, "right")
        logger.info(
            "%s needs texts that are padded on the right: the exported tokenizer pads there, and no longer on the left",
            type(model).__name__,
        )
    if not width.always:
        report_padding(run, model, side.change)


def set_padding_side(tokenizer: PreTrainedTokenizerBase, side: Literal["left", "right"]) -> None:
    """Let a tokenizer pad on a side, for users of the exported model."""
    tokenizer.padding_side = side
    tokenizer.init_kwargs["padding_side"] = side  # all that save_pretrained writes


def report_padding(run: Run, model: nn.Module, change: float) -> None:
    """Refuse what divides a step's samples, or warn, if padding changes logits by the share ``change``; 0: it does not.

    Raises:
        RecipeError: It does, and the run divides steps into micro-batches, groups texts by length or predicts several
            texts at once.
    """
    if not change:
        return
    effect = (
        f"{type(model).__name__} reads padding: beside a longer text, it changes the logits of a short one by "
        f"{percent(change)}"
    )
    refuse_batched_predictions(run, effect, f", or {ALIKE}")
    if run.loaders.micro_steps > 1 and run.loaders.micro_batch_size > 1:
        raise RecipeError(
            f"found {run.loaders.micro_batch_size}. {effect}, so micro-batches change what is trained.",
            code="padding-dependent",
            place=f"{run.recipe.where}: train.micro_batch_size",
            remedy=f"Remove it, or {ALIKE}.",
        )
    if "length-bucketing" in run.plugins.names() and "length-bucketing" not in run.recipe.selected:
        raise RecipeError(
            f"{effect}.",
            code="padding-dependent",
            place=f"{run.recipe.where}: plugins.length-bucketing",
            remedy=f"Remove length-bucketing, or {ALIKE}.",
        )
    logger.warning(
        Problem(
            f"{effect}. Results depend on the texts that share a batch.",
            code="padding-dependent",
            remedy=f"To avoid it, {ALIKE}.",
        )
    )


def check_prompts(run: Run, model: Any, inputs: Mapping[str, Tensor], where: str, max_new_tokens: int) -> None:
    """Raise an error if a language model continues a prompt otherwise when it is padded on the left beside a longer
    one.

    Args:
        inputs: ``input_ids`` and ``attention_mask`` of two prompts, (2, tokens) int64.
        max_new_tokens: Tokens that the model has positions for behind a prompt, and that a prediction has at most.

    Raises:
        RecipeError: It does, and the run predicts several prompts at once.
    """

    count = min(CONTINUATION, max_new_tokens)

    def logits_of_last(ids: Tensor, mask: Tensor) -> list[Tensor]:
        """The logits of each new token of the last prompt."""
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return [logits[-1] for logits in generated.logits]

    def find() -> float:
        ids = inputs["input_ids"]
        mask = inputs["attention_mask"]
        is_real = mask[-1].bool()
        padded = logits_of_last(ids, mask)
        alone = logits_of_last(ids[-1:, is_real], mask[-1:, is_real])
        change = 0.0
        for with_padding, without_padding in zip(padded, alone, strict=True):
            change = max(change, relative_change(with_padding, without_padding))
            if int(with_padding.argmax()) != int(without_padding.argmax()):  # further logits are those of other texts
                break
        return change

    change = on_all_processes(run, model, where, find) or 0.0
    if change > ROUNDING:
        effect = (
            f"{type(model).__name__} reads padding: beside a longer prompt, it changes the logits of a short "
            f"one by {percent(change)}"
        )
        refuse_batched_predictions(run, effect)


def refuse_batched_predictions(run: Run, effect: str, remedy: str = "") -> None:
    """Raise an error if the run predicts several texts at once.

    Raises:
        RecipeError: It does.
    """
    inference = run.recipe.inference
    if inference is None or not inference.chunk:
        return
    size = run.recipe.train.eval_batch_size or run.loaders.micro_batch_size
    if min(size, len(run.datasets[run.loaders.first_split])) > 1:
        raise RecipeError(
            f"batches have up to {size} texts. {effect}, so a prediction depends on the other texts of its batch. "
            f"Predict one text at a time: train.eval_batch_size=1{remedy}.",
            code="padding-dependent",
            place=f"{run.recipe.where}: train.eval_batch_size",
        )


def padding_change(model: Any, inputs: Mapping[str, Tensor]) -> float:
    """How much padding changes the logits of the shortest text of a batch, as a share of the largest logit; 0 if only
    by rounding."""
    mask = inputs.get("attention_mask")
    labels = inputs.get("labels")
    if mask is None:
        return 0.0
    row = int(mask.sum(1).argmin())
    is_real = mask[row].bool()
    alone: dict[str, Tensor] = {}  # the inputs of the shortest text without padding
    for name, value in inputs.items():
        if value.shape == mask.shape and name != "attention_mask":
            alone[name] = value[row][is_real][None]
    has_logits = is_real
    if labels is not None:
        has_logits = labels[row] != IGNORED
        alone["labels"] = labels[row][has_logits][None]

    def padded_logits() -> Tensor:
        of_text = results(model(**inputs))[row]
        return of_text[has_logits] if of_text.dim() > 1 else of_text

    try:
        logits_alone = results(model(**alone))[0]
    except Exception:  # the model takes only some lengths, so the text cannot be computed without padding
        return 0.0
    try:
        logits = padded_logits()
    except Exception:  # a model may take padding on one side only
        return math.inf
    change = relative_change(logits, logits_alone)
    if change > ROUNDING:
        return change
    if change <= CONTENT:
        return 0.0
    with other_padding(model, mask):
        by_content = relative_change(padded_logits(), logits)
    return change if by_content > CONTENT else 0.0


def results(output: Any) -> Tensor:
    """The logits of a model's output; of a model without a head, the hidden states; of other heads, all values of each
    token, (texts, tokens, values)."""
    import torch

    for name in ("logits", "last_hidden_state"):
        values: Tensor | None = getattr(output, name, None)
        if values is not None:
            return values
    return torch.stack([value for value in output.values() if value.dim() == 2], dim=-1)


@contextmanager
def other_padding(model: Any, mask: Tensor) -> Iterator[None]:
    """Give the model random vectors at padding inside the block, if it has an embedding of tokens. Token ids stay:
    models find a text's end by them."""
    import torch
    from torch import Tensor, nn

    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.shape[:2] != mask.shape:
            return output
        return torch.where(mask[..., None].bool(), output, torch.randn_like(output))

    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Module):
        yield
        return
    handle = embedding.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def relative_change(values: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value; infinite if one of them is NaN."""
    share = float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(share) else share


def percent(share: float) -> str:
    """A share with two digits, such as 3.4% or 0.00051%."""
    return f"{100 * share:.0f}%" if share >= 1 else f"{100 * share:.2g}%"

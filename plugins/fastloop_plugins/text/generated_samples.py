"""Samples while training: fixed validation prompts with the texts that the model generates for them.

They go to the console, to ``log.txt``, and by ``run.log_rows`` to the run folder, the report, TensorBoard and trackers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fastloop import RecipeError
from fastloop.problem import counted

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

SHOWN = 80
"""Characters of a text on the console: a line shows three texts."""


@dataclass(frozen=True)
class GeneratedSample:
    """A validation prompt with the text that the model generated.

    Attributes:
        prompt: The prompt as the model sees it, with special tokens.
        answer: The generated text.
        expected: The text of the validation split. In a chat, it ends where the model ends an answer.
        ended: Whether the model ended the text; otherwise it reached the largest number of new tokens.
    """

    prompt: str
    answer: str
    expected: str
    ended: bool


def check_samples(run: Run, task: str) -> None:
    """Raise an error if the option ``samples`` has no prompts.

    Args:
        task: The name of the task that has the option.

    Raises:
        RecipeError: There is no validation split.
    """
    if "validation" not in run.datasets:
        raise RecipeError(
            "there is no validation split, which has the prompts.",
            code="unknown-split",
            place=f"{run.recipe.where}: plugins.{task}.samples",
            remedy="Give data.validation_fraction, or remove samples.",
        )


def spread(total: int, count: int) -> list[int]:
    """At most ``count`` of ``total`` numbers from 0, evenly spaced.

    For 10 and 4, it is ``[0, 2, 5, 7]``.
    """
    count = min(count, total)
    return [index * total // count for index in range(count)]


def log_samples(run: Run, samples: Sequence[GeneratedSample], seconds: float) -> None:
    """Log samples of the current weights.

    Args:
        seconds: How long the model took to write them.
    """
    if not run.is_main:
        return
    for sample in samples:
        end = "" if sample.ended else " (not ended)"
        logger.info(
            "samples: step %d: %s -> %s%s, expected %s",
            run.state.step, shorten(sample.prompt, at_start=True), shorten(sample.answer), end,
            shorten(sample.expected),
        )  # fmt: skip
    logger.info("samples: %s at step %d took %.1f s", counted(len(samples), "text"), run.state.step, seconds)
    run.log_rows("samples", [asdict(sample) for sample in samples])


def shorten(text: str, at_start: bool = False) -> str:
    """A text in quotes for one line of the console.

    Args:
        at_start: Leave out the start of a long text, not its end.
    """
    if len(text) <= SHOWN:
        return repr(text)
    if at_start:
        return "..." + repr(text[-SHOWN:])
    return repr(text[:SHOWN]) + "..."

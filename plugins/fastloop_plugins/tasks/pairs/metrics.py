"""Metrics of the texts that a model generates for an evaluated split."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastloop_plugins.text.next_token_loss import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop import Run

GENERATED = ("exact_match", "bleu", "chrf")
"""Names of the metrics."""


def generated_metrics(
    run: Run, split: str, tokenizer: Any, generate: Callable[[dict[str, Tensor]], list[str]]
) -> dict[str, float]:
    """Compare generated texts with the decoded targets of a split. Every process must call it, and gets the metrics of
    all samples.

    Args:
        generate: A batch -> a text for each sample.

    Returns:
        ``exact_match``, the share of equal texts; ``bleu`` (4-grams of words separated by spaces, Papineni et al.,
        2002) and ``chrf`` (6-grams of characters, Popovic, 2015), both of the whole split. All are between 0 and 1.
    """
    import torch
    from torchmetrics.functional.text import bleu_score, chrf_score

    from fastloop import loop
    from fastloop.evaluation_results import evaluating

    pairs: list[tuple[str, str]] = []
    with evaluating(run.model), torch.no_grad():
        for batch in loop.evaluation_batches(run, run.eval_loaders[split]):
            texts, labels = generate(batch.inputs), batch.inputs["labels"]
            targets = tokenizer.batch_decode(
                labels.masked_fill(labels == IGNORED, tokenizer.pad_token_id), skip_special_tokens=True
            )
            pairs += list(zip(texts, targets, strict=True)) if batch.samples else []
    pairs = [pair for part in run.processes.all_gather_object(pairs) for pair in part]
    generated, targets = [text for text, _ in pairs], [[target] for _, target in pairs]
    return {
        "exact_match": sum(text == target for text, target in pairs) / len(pairs),
        "bleu": bleu_score(generated, targets).item(),
        # a tensor: no scores of sentences
        "chrf": float(chrf_score(generated, targets, n_word_order=0)),  # type: ignore[arg-type]
    }

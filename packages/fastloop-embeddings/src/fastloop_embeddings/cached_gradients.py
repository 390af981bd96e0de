"""A step whose loss compares all of its rows, however micro-batches and processes divide it.

Gao et al., 2021, https://arxiv.org/abs/2101.06983. A first pass computes the vectors of all rows without gradients.
Their loss gives a gradient for each, and a second pass, with the same dropout, propagates it into the weights. A step
costs one more forward pass, and needs the memory of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop import Batch, Run
    from torch import Tensor


class CachedGradients:
    """The gradients of a step's loss by the vectors, for the second pass.

    Args:
        columns: Texts of a row.
        vectors: ``vectors(model, inputs)`` computes those of the texts of a batch, (columns * rows, D).
        loss: ``loss(columns, scores, keys)``, of the vectors of each column, (rows, D), scores, (rows,) or None, and a
            number for each text, (rows, columns).
    """

    def __init__(self, columns: int, vectors: Callable[..., Tensor], loss: Callable[..., Tensor]) -> None:
        self.columns = columns
        self.vectors = vectors
        self.loss = loss
        self.waiting: list[Tensor] = []  # gradients of each micro-batch
        self.value: Tensor  # the loss of the whole step

    def step(self, run: Run, batches: list[Batch]) -> Tensor | None:
        """Do a step that micro-batches or processes divide, or return None for another one: ``train_step``."""
        import torch
        from fastloop.runtime.random_states import random_states, restore_random_states

        processes = run.loaders.processes  # those that share the rows of a step
        if len(batches) == 1 and processes.world_size == 1:
            return None
        states = random_states()
        with torch.no_grad():
            # a process without a share of a micro-step computes one that does not count: it has no samples
            vectors = [self.rows(self.vectors(run.model, batch.inputs))[: batch.samples] for batch in batches]
        restore_random_states(states)
        keys = [self.row_keys(batch.inputs)[: batch.samples] for batch in batches]
        scores = [batch.inputs["labels"][: batch.samples] for batch in batches if "labels" in batch.inputs]
        every = processes.all_gather_object([torch.cat(parts).cpu() for parts in (vectors, keys, scores) if parts])
        leaf, all_keys, *rest = (torch.cat(parts).to(run.device) for parts in zip(*every, strict=True))
        self.value = self.loss(leaf.requires_grad_().unbind(1), rest[0] if rest else None, all_keys)
        (gradient,) = torch.autograd.grad(self.value, leaf)
        of_processes = torch.split(gradient, [len(rows) for rows, *_ in every])
        parts = torch.split(of_processes[processes.rank], [len(rows) for rows in vectors])
        # the core weights the loss of a micro-batch by its share of the step's rows, which the factor reverses
        self.waiting = [part * (len(leaf) / max(len(part), 1)) for part in parts]
        try:
            loss = run.accumulate_gradients(batches)
        finally:
            self.waiting = []
        run.apply_gradients(loss)
        return loss

    def next_loss(self, vectors: Tensor) -> Tensor:
        """A loss of the next micro-batch with the cached gradients and the value of the whole step."""
        gradients = self.waiting.pop(0)
        product = (self.rows(vectors)[: len(gradients)] * gradients).sum()
        return product - product.detach() + self.value.detach()

    def rows(self, vectors: Tensor) -> Tensor:
        """The vectors of each row, (rows, columns, D)."""
        return vectors.view(self.columns, -1, vectors.shape[1]).transpose(0, 1)

    def row_keys(self, inputs: Mapping[str, Any]) -> Tensor:
        """The number of each text of the rows of a batch, (rows, columns)."""
        keys: Tensor = inputs["keys"]
        return keys.view(self.columns, -1).T

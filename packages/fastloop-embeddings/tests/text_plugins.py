"""Plugins for the tests of both tasks."""

import torch
from fastloop import Plugin, hookimpl
from fastloop.runtime.random_states import random_states, restore_random_states

from fastloop_embeddings.embedding import Embedding


class FullMemory(Plugin):
    """A device without memory for more than 24 texts of training."""

    name = "full-memory"

    @hookimpl(wrapper=True)
    def compute_loss(self, run, batch):
        if run.model.training and len(batch["keys"]) > 24:
            raise MemoryError("can't allocate memory")
        return (yield)


class Checked(Embedding):
    """Compares each step's gradients with those of one backward pass through all micro-batches, with dropout."""

    name = "checked"

    @hookimpl
    def train_step(self, run, batches):
        states = random_states()
        self.expected, other = (self.gradients(run, batches) for _ in range(2))
        restore_random_states(states)
        self.other = relative(other, self.expected)
        return super().train_step(run=run, batches=batches)

    def gradients(self, run, batches):
        rows = [self.cached.rows(self.vectors(run.model, batch.inputs)) for batch in batches]
        weights = [weight for weight in run.model.parameters() if weight.requires_grad]
        keys = torch.cat([self.cached.row_keys(batch.inputs) for batch in batches])
        return torch.autograd.grad(self.batch_loss(torch.cat(rows).unbind(1), None, keys), weights)

    @hookimpl
    def after_backward(self, run):
        found = relative([weight.grad for weight in run.model.parameters() if weight.requires_grad], self.expected)
        print(f"difference {found:.1e}, with other masks {self.other:.1e}")
        assert found < 1e-4 < 1e-2 < self.other


def relative(found, expected):
    """The norm of the difference, relative to that of ``expected``."""
    one, other = (torch.cat([each.flatten() for each in gradients]) for gradients in (found, expected))
    return ((one - other).norm() / other.norm()).item()

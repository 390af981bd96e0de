"""Torch's Muon with one batched operation for all matrices of a shape, instead of about 35 for each matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, optim

STACKED = 2**26
"""Elements of a stack of matrices at most, which has three copies in bf16: 400 MiB. Larger matrices fill the device one
by one."""


class BatchedMuon(optim.Muon):
    """``torch.optim.Muon`` with the same arguments, state and numbers, up to the rounding of batched matrix
    products."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights that have gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            self._init_group(group, weights, gradients, momenta)
            if weights:
                update_weights(weights, gradients, momenta, group)
        return loss


def update_weights(
    weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], group: Mapping[str, Any]
) -> None:
    """Change matrices and momenta in place.

    Args:
        weights: Each (rows, columns). Gradients and momenta have the same shapes.
        group: The options of a group of ``torch.optim.Muon``.
    """
    lr = float(group["lr"])
    momentum = group["momentum"]
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    updates = list(torch._foreach_lerp(gradients, momenta, momentum)) if group["nesterov"] else momenta
    if weights[0].dtype == torch.float32:
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    else:  # on a CPU, _foreach_mul_ rounds the factor to bf16 first: 0.997 becomes 0.996
        torch._foreach_add_(weights, weights, alpha=-lr * group["weight_decay"])
    for places in stack_places(updates):
        stack = stack_in_bf16([updates[place] for place in places])
        stack = orthogonalize_(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        chosen = [weights[place] for place in places]
        scale = adjust_scale(group["adjust_lr_fn"], *chosen[0].shape)
        torch._foreach_add_(chosen, stack.to(chosen[0].dtype).unbind(), alpha=-lr * scale)


def stack_places(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yield the places of matrices of one shape, dtype and device that form a stack."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        alike[matrix.shape, matrix.dtype, matrix.device].append(place)
    for (shape, _, _), places in alike.items():
        size = max(1, STACKED // shape.numel())
        for first in range(0, len(places), size):
            yield places[first : first + size]


def stack_in_bf16(matrices: list[Tensor]) -> Tensor:
    """A new tensor of matrices of one shape, in bf16: (matrices, rows, columns)."""
    stack = torch.empty((len(matrices), *matrices[0].shape), dtype=torch.bfloat16, device=matrices[0].device)
    torch._foreach_copy_(stack.unbind(), matrices)  # rounds while it copies
    return stack


def orthogonalize_(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration in bf16 on each matrix, of (matrices, rows, columns), as ``torch.optim.Muon`` computes it
    on one. It computes in the memory of the stack, and in three tensors that all iterations share.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    a, b, c = coefficients
    is_tall = stack.size(1) > stack.size(2)
    stack = stack.mT if is_tall else stack
    stack.div_(torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp(min=eps))
    count, rows, _ = stack.shape
    gram = stack.new_empty(count, rows, rows)
    polynomial = torch.empty_like(gram)
    result = torch.empty_like(stack)
    for _ in range(steps):
        torch.bmm(stack, stack.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(stack, polynomial, stack, beta=a, out=result)
        stack, result = result, stack
    return stack.mT if is_tall else stack


def adjust_scale(rule: str | None, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this shape. ``rule`` is torch's ``adjust_lr_fn``."""
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))

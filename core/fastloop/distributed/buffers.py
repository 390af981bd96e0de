"""Persistent buffers, such as the running statistics of batch norm: every process gets those of process 0.

A forward pass in train mode may change buffers by its own samples. Checkpoints and exported models hold the buffers of
process 0, so the other processes must train and evaluate with them, too.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastloop.distributed.processes import Processes
from fastloop.distributed.tensors import as_bytes

TRIALS = 2
"""Training passes before which processes compare buffers: the second one finds what the first one changed."""


class SharedBuffers:
    """The persistent buffers of a model that several processes train.

    Buffers that the first pass changes are broadcast before each later pass. Buffers that it does not change cost
    nothing after the second pass, until an evaluation or a save finds that they have changed since. Every process must
    make the same calls.

    Args:
        model: The model as built, on its device.
        strategy_shares: Whether the prepared model broadcasts its buffers before each training pass.
    """

    def __init__(self, model: nn.Module, processes: Processes, strategy_shares: bool) -> None:
        self._processes = processes
        self._strategy_shares = strategy_shares
        self._places = persistent_buffers(model) if processes.world_size > 1 else []
        self._trials = TRIALS
        self._training_changes_them = strategy_shares
        self._digest_before: bytes | None = None

    def before_pass(self) -> None:
        """Share the buffers before the first forward of a training pass, if passes change them."""
        if not self._places or self._strategy_shares:
            return
        if not self._training_changes_them:
            if self._trials == 0:
                return
            self._trials -= 1
        self.share()

    def share(self) -> None:
        """Give every process the buffers of process 0, if they may differ."""
        if not self._places:
            return
        if not self._training_changes_them and self._digest_before is not None:
            changed = torch.tensor(float(self._digest() != self._digest_before))
            if not self._processes.all_reduce_sum(changed):
                return
            self._training_changes_them = True
        self._broadcast()
        if not self._training_changes_them:
            self._digest_before = self._digest()

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Exchange the bytes of all buffers on a device at once."""
        for buffers in self._by_device().values():
            together = torch.cat([as_bytes(buffer) for buffer in buffers])
            self._processes.broadcast(together)
            if self._processes.is_main:
                continue
            sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
            for buffer, part in zip(buffers, torch.split(together, sizes), strict=True):
                # the clone aligns the bytes, so that they can be read as another dtype
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def _digest(self) -> bytes:
        digest = hashlib.sha256()
        for buffers in self._by_device().values():
            for buffer in buffers:
                digest.update(as_bytes(buffer).cpu().numpy().data)
        return digest.digest()

    def _by_device(self) -> dict[torch.device, list[Tensor]]:
        groups: dict[torch.device, list[Tensor]] = {}
        for module, name in self._places:
            buffer = module.get_buffer(name)  # a forward may replace the tensor
            groups.setdefault(buffer.device, []).append(buffer)
        return groups


def persistent_buffers(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The module and the name of each buffer that ``state_dict`` holds, without those that processes divide."""
    places = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not isinstance(buffer, DTensor):
                places.append((module, name))
    return places

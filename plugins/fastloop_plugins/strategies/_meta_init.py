"""Initialize the full model in the main process only: the others build it on the meta device and receive shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run


class MetaInit:
    """Keeps the main process's weights while the parameters of every process move to the meta device."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.model = model
        self.is_main = run.is_main
        names: dict[int, list[str]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(id(tensor), []).append(name)
        self.tied = [group for group in names.values() if len(group) > 1]
        self.parameters = dict(model.named_parameters()) if run.is_main else {}
        self.buffers = dict(model.named_buffers())
        model.to("meta")
        self._tie()

    def _tie(self) -> None:
        """Restore tied weights: ``to`` creates a separate tensor for each name."""
        for first, *others in self.tied:
            owner, _, name = first.rpartition(".")
            tensor = getattr(self.model.get_submodule(owner), name)
            for other in others:
                owner, _, name = other.rpartition(".")
                setattr(self.model.get_submodule(owner), name, tensor)

    def share(self, device: Any) -> None:
        """Send every process its shards, one weight at a time."""
        import torch
        from torch.distributed.tensor import distribute_tensor

        self.model.to_empty(device=device)
        self._tie()
        with torch.no_grad():
            part: Any
            for name, part in self.model.named_parameters():
                full = (
                    self.parameters[name].detach().to(part.device)
                    if self.is_main
                    else torch.empty(part.shape, dtype=part.dtype, device=part.device)
                )
                part.copy_(distribute_tensor(full, part.device_mesh, part.placements))
            for name, buffer in self.model.named_buffers():
                if self.is_main:
                    buffer.copy_(self.buffers[name])
                torch.distributed.broadcast(buffer, src=0)

"""The meshes of ``fsdp``: the processes that shard a model, and those that divide each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastloop import PluginError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fastloop import Run


@dataclass(frozen=True)
class Meshes:
    """The processes of a run, by what they do with the model.

    Attributes:
        shard: The processes to shard over. It has one dimension, or with ``shard_within`` two: (copies of the model,
            shards of one).
        tensor: Consecutive processes that divide each layer; None: layers are not divided.
    """

    shard: DeviceMesh
    tensor: DeviceMesh | None

    @property
    def shards(self) -> int:
        """The number of shards of a weight."""
        return self.shard.size(self.shard.ndim - 1)


def make_meshes(run: Run, shard_within: int | None, tensor: int | None) -> Meshes:
    """Make the meshes of a run.

    For 8 processes, ``shard_within=4`` and ``tensor=2``, there are 2 copies of the model, of 2 shards each, and each
    shard is divided over 2 processes: (replicate, shard, tensor) is (2, 2, 2).

    Raises:
        PluginError: The sizes do not divide the number of processes.
    """
    from torch.distributed.device_mesh import init_device_mesh

    where = f"{run.recipe.where}: plugins.fsdp.shard_within"
    world_size = run.world_size
    tensor_size = min(tensor or 1, world_size)
    copy_size = shard_within or world_size
    if world_size % copy_size:
        divisors = [str(size) for size in range(2, world_size + 1) if world_size % size == 0]
        raise PluginError(
            f"{world_size} processes are not a multiple of {copy_size}.",
            code="not-divisible",
            place=where,
            expected=f"one of: {', '.join(divisors)}",
        )
    if copy_size % tensor_size:
        raise PluginError(
            f"{copy_size} processes are not a multiple of the {tensor_size} of plugins.fsdp.tensor.",
            code="not-divisible",
            place=where,
        )
    sizes = {"shard": copy_size // tensor_size}
    if world_size > copy_size:
        sizes = {"replicate": world_size // copy_size, **sizes}
    if tensor_size > 1:
        sizes["tensor"] = tensor_size
    mesh = init_device_mesh(run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Meshes(
        shard=mesh["replicate", "shard"] if "replicate" in sizes else mesh["shard"],
        tensor=mesh["tensor"] if "tensor" in sizes else None,
    )

"""The bytes and the norm of tensors.

Modules:
    core/fastloop/distributed/tensors.py
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fastloop.distributed.tensors import as_bytes, total_norm

TENSORS: dict[str, Tensor] = {
    "float": torch.tensor([1.0, float("nan"), -0.0]),
    "bfloat16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(12.0)[::5],
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "number": torch.tensor(3),
    "bool": torch.tensor([True, False]),
    "empty": torch.empty(2, 0),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "needs a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_the_elements_in_order(name):
    tensor = TENSORS[name]
    found = as_bytes(tensor)
    assert (found.dtype, found.dim(), found.numel()) == (torch.uint8, 1, tensor.numel() * tensor.element_size())
    back = found.clone().view(tensor.dtype).view(tensor.shape)
    assert torch.equal(back.nan_to_num(7.0), tensor.detach().resolve_conj().nan_to_num(7.0))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


GROUPS: dict[str, list[Tensor]] = {
    "one": [draw(5)],
    "several shapes": [draw(5), draw(2, 3), draw(4, 2, 3)],
    "a number": [torch.tensor(3.0), draw(2)],
    "sparse with a row twice": [
        torch.sparse_coo_tensor([[1, 3, 1]], draw(3, 2), (4, 2), check_invariants=True),
        draw(5),
    ],
    "infinite": [draw(5), torch.tensor([float("inf"), 1.0])],
    "empty": [torch.empty(0), draw(2)],
}


def norm_as_one_vector(tensors: list[Tensor]) -> Tensor:
    """The norm of all elements, in float64."""
    return torch.cat([tensor.to_dense().double().reshape(-1) for tensor in tensors]).norm()


@pytest.mark.parametrize("name", GROUPS)
def test_total_norm_is_that_of_all_tensors_as_one_vector(name):
    norm = total_norm(tensor for tensor in GROUPS[name])
    assert norm.dim() == 0
    torch.testing.assert_close(norm.double(), norm_as_one_vector(GROUPS[name]), rtol=1e-6, atol=0.0)


def norm_of_shards() -> float:
    """``total_norm`` of two tensors that are sharded over different meshes, and of one that is not."""
    torch.distributed.init_process_group("gloo")
    row = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1))
    tensors = [
        distribute_tensor(draw(3, 4), row, [Shard(0)]),
        distribute_tensor(draw(6, 2), square, [Shard(1), Replicate()]),
        draw(5),
    ]
    norm = float(total_norm(tensors))
    torch.distributed.destroy_process_group()
    return norm


def test_total_norm_of_shards_over_different_meshes_is_that_of_the_full_tensors(processes):
    first, second = processes(2, norm_of_shards)
    expected = norm_as_one_vector([draw(3, 4), draw(6, 2), draw(5)])
    assert first.result == second.result == pytest.approx(float(expected), rel=1e-6)

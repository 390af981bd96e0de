"""The bytes of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastloop.distributed.tensors import as_bytes

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

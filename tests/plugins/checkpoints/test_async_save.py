"""The copies of ``async-save``: once a tensor, into memory that later saves reuse, without waiting for the device.

Modules:
    plugins/fastloop_plugins/checkpoints/async_save.py
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulated_device import DeviceTensor, compute
from torch.utils._python_dispatch import TorchDispatchMode

from fastloop import checkpoint
from fastloop_plugins.checkpoints.async_save import AsyncSave, HostCopies, snapshot

WEIGHT = torch.arange(12.0).reshape(3, 4)
MODEL = {"weight": WEIGHT, "tied": WEIGHT, "transposed": WEIGHT.T, "half": WEIGHT.bfloat16()}
STATE = {"step": 3, "optimizer": [{"momentum": torch.ones(3, 4)}, (torch.tensor(7),)]}


class Operations(TorchDispatchMode):
    """Counts operations, and records where the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return compute(func, args, kwargs or {}, self.waits)


def assert_copied(copies):
    model, state = copies
    assert model.keys() == MODEL.keys()
    for name, tensor in MODEL.items():
        assert torch.equal(model[name], tensor)
        assert model[name].dtype == tensor.dtype
    assert state["step"] == 3
    assert torch.equal(state["optimizer"][0]["momentum"], STATE["optimizer"][0]["momentum"])
    assert torch.equal(state["optimizer"][1][0], torch.tensor(7))


def test_later_steps_change_no_copy():
    model = {"weight": WEIGHT.clone()}
    ((copies, _), _) = snapshot(model, {}, HostCopies())
    model["weight"].zero_()
    assert torch.equal(copies["weight"], WEIGHT)


def test_a_later_save_copies_each_tensor_once_and_allocates_nothing():
    buffers = HostCopies()
    first, _ = snapshot(MODEL, STATE, buffers)
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.buffers.items()}
    with Operations() as counted:
        second, _ = snapshot(MODEL, STATE, buffers)
    assert counted.names.count("copy_") == 6
    assert not {"empty", "_to_copy", "clone"} & set(counted.names)
    assert addresses == {name: tensor.data_ptr() for name, tensor in buffers.buffers.items()}
    assert_copied(first)
    assert_copied(second)


def test_a_tensor_of_another_shape_gets_other_memory():
    buffers = HostCopies()
    snapshot(MODEL, STATE, buffers)
    ((copies, _), _) = snapshot({"weight": torch.ones(5)}, {}, buffers)
    assert torch.equal(copies["weight"], torch.ones(5))
    assert buffers.buffers.keys() == {"model.weight"}, "nothing else is kept"


@pytest.mark.parametrize("saves", [1, 2])
def test_the_host_does_not_wait_for_the_device(saves):
    buffers = HostCopies()
    with Operations() as counted:
        for _ in range(saves):
            copies, _ = snapshot({name: DeviceTensor(tensor) for name, tensor in MODEL.items()}, STATE, buffers)
        assert counted.waits == []
        DeviceTensor(WEIGHT).to("cpu", copy=True)
        assert len(counted.waits) == 1, "the mode sees a copy that waits"
    assert_copied(copies)


def test_a_checkpoint_that_does_not_fit_into_memory_twice_is_written_before_training_continues(tiny_run, monkeypatch):
    free = SimpleNamespace(available=1000)
    monkeypatch.setattr("fastloop_plugins.checkpoints.async_save.psutil.virtual_memory", lambda: free)
    plugin = AsyncSave()
    result = tiny_run([plugin], epochs=2)
    assert plugin.is_too_large
    assert not plugin.copies.buffers
    saved, _ = checkpoint.read(max((result.trainer.run.folder / "checkpoints").iterdir()))
    assert all(torch.equal(saved[name], result.weights[name]) for name in result.weights)


def test_copies_that_reuse_memory_need_no_more(monkeypatch):
    buffers = HostCopies()
    snapshot(MODEL, STATE, buffers)
    monkeypatch.setattr(
        "fastloop_plugins.checkpoints.async_save.psutil.virtual_memory", lambda: SimpleNamespace(available=0)
    )
    assert_copied(snapshot(MODEL, STATE, buffers)[0])
    with pytest.raises(MemoryError):
        snapshot(MODEL, STATE, HostCopies())

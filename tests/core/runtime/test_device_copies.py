"""One copy takes the small tensors of a training batch to the device, and changes none of their bits.

Modules:
    core/fastloop/runtime/device_copies.py
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from emulated_device import DEVICE, STREAM, DeviceTensor, EmulatedDevice, emulation
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins import resolve as registry
from fastloop.recipe import make_recipe
from fastloop.runtime.device_copies import SMALL, gather_small, to_device
from fastloop.testing import LANGUAGE, TEXTS, VECTORS, write_texts
from fastloop_plugins.kernels._compiling import mark_dynamic

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found"),
    pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter"),
]

Pair = namedtuple("Pair", "first second")


class Named(dict):
    """A dict with a name of its own, such as transformers' BatchEncoding."""

    name = "a batch"


def all_kinds() -> dict[str, Any]:
    """Leaves of every kind that a collator may return."""
    numbers = torch.Generator().manual_seed(0)
    return {
        "ids": torch.randint(0, 99, (3, 7), generator=numbers),
        "ends": torch.arange(5, dtype=torch.int32),
        "mask": torch.tensor([[True, False, True]]),
        "label": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(3, generator=numbers).to(torch.bfloat16),
        "eighth": torch.randn(5, generator=numbers).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 2, generator=numbers, dtype=torch.complex128),
        "not a number": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "part": torch.arange(10)[4:7],
        "large": torch.arange(SMALL // 4 + 1, dtype=torch.int32),
        "nested": [(torch.ones(3), "text"), [torch.zeros(2, dtype=torch.uint8)]],
        "named": Pair(torch.ones(2), 3),
        "own": Named(rows=torch.arange(3)),
        "weight": nn.Parameter(torch.ones(2)),
        "learned": torch.ones(2, requires_grad=True),
        "texts": ["a", "b"],
        "longest": 7,
        "none": None,
    }


def bits(tensor: Tensor) -> bytes:
    host = tensor.host if isinstance(tensor, DeviceTensor) else tensor
    return host.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if host.numel() else b""


def moved(inputs: Any) -> tuple[Any, int]:
    """A batch on the emulated device, and the number of copies."""
    gathered, buffer = gather_small(inputs)
    before = STREAM.received
    arrived, _ = to_device(gathered, buffer, DEVICE, non_blocking=True)
    return arrived, STREAM.received - before


def test_every_leaf_arrives_as_it_would_in_a_copy_of_its_own():
    inputs = all_kinds()
    with emulation([]):
        ours, copies = moved(inputs)
        before = STREAM.received
        theirs = send_to_device(inputs, DEVICE, non_blocking=True)
        expected_copies = STREAM.received - before
    assert list(ours) == list(theirs)
    apart = ("eighth", "transposed", "large", "named", "own", "weight", "learned")
    assert copies == 1 + len(apart)
    assert expected_copies == 10 + len(apart)  # torch copies no empty tensor
    for name, expected in theirs.items():
        assert type(ours[name]) is type(expected), name
    assert ours.pop("own")["rows"].host.equal(theirs.pop("own")["rows"].host)
    for leaf, expected in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if not isinstance(expected, Tensor):
            assert leaf == expected
            continue
        assert leaf.device == DEVICE
        assert (leaf.dtype, leaf.shape, leaf.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert bits(leaf) == bits(expected)
        assert leaf.requires_grad == expected.requires_grad


def test_parts_are_aligned():
    with emulation([]):
        gathered, buffer = gather_small({str(size): torch.ones(size, dtype=torch.int64) for size in (1, 8, 63, 64)})
    starts = [part.storage_offset() * 8 for part in gathered.values()]
    assert starts == [0, 64, 128, 640]
    assert buffer is not None
    assert buffer.nbytes == 640 + 64 * 8
    assert all(part.untyped_storage().data_ptr() == buffer.data_ptr() for part in gathered.values())


@pytest.mark.parametrize(
    "inputs",
    [torch.ones(3), {"one": torch.ones(3), "text": "a"}, (torch.ones(SMALL), torch.ones(1)), "text", None],
    ids=["tensor", "one tensor", "one small tensor", "text", "none"],
)
def test_fewer_than_two_small_tensors_need_no_buffer(inputs):
    with emulation([]):
        gathered, buffer = gather_small(inputs)
    assert gathered is inputs
    assert buffer is None


def test_a_tensor_that_was_replaced_or_cut_after_it_was_pinned_arrives():
    with emulation([]):
        gathered, buffer = gather_small({"ids": torch.arange(12).view(3, 4), "labels": torch.arange(3)})
        changed = {"ids": gathered["ids"][:, 1:3], "labels": torch.tensor([7, 8]), "more": gathered["labels"] + 1}
        arrived, _ = to_device(changed, buffer, DEVICE, non_blocking=True)
    assert arrived["ids"].host.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert arrived["labels"].host.tolist() == [7, 8]
    assert arrived["more"].host.tolist() == [1, 2, 3]


def test_a_change_of_one_part_in_place_is_none_of_the_others_for_autograd():
    with emulation([]):
        gathered, buffer = gather_small({"numbers": torch.arange(3.0), "labels": torch.arange(3)})
    parts, _ = to_device(gathered, buffer, torch.device("cpu"), non_blocking=False)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * parts["numbers"]).sum()  # backward needs the numbers
    parts["labels"].add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 1.0, 2.0]
    assert not parts["numbers"]._is_view()


@pytest.mark.parametrize(
    ("dynamic", "marks"), [(True, False), (None, True), (None, False)], ids=["dynamic", "any shape", "automatic"]
)
def test_a_compiler_builds_as_many_graphs_as_for_tensors_of_their_own(dynamic, marks):
    """Packed rows of 3 to 130 tokens: an offset in a buffer must not be taken for a number of tokens."""
    from torch._dynamo.testing import CompileCounter

    def model(ids: Tensor, positions: Tensor, ends: Tensor, labels: Tensor) -> Tensor:
        states = (ids + positions).float().cumsum(1)[0]
        return (states[ends[1:-1].long() - 1] * labels).sum()

    graphs = []
    for shares_buffer in (False, True):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, dynamic=dynamic)
        for tokens in (64, 65, 3, 130, 128, 127, 10, 96):
            batch = (
                torch.arange(tokens).repeat(1, 1),
                torch.arange(tokens).repeat(1, 1),
                torch.tensor([0, 2, tokens, tokens], dtype=torch.int32),
                torch.tensor([1, 2]),
            )
            if shares_buffer:
                with emulation([]):
                    gathered, buffer = gather_small(batch)
                batch, _ = to_device(gathered, buffer, torch.device("cpu"), non_blocking=False)
                assert batch[1].data_ptr() - batch[0].data_ptr() == -(-tokens * 8 // 64) * 64
            if marks:
                mark_dynamic(batch)
            torch.testing.assert_close(compiled(*batch), model(*batch))
            ids, _, *others = batch  # one that is no part of the buffer, such as a mask of ones
            compiled(ids, torch.ones_like(ids), *others)
        graphs.append(counter.frame_count)
    torch._dynamo.reset()
    assert graphs[1] == graphs[0] <= 2


class Losses(Plugin):
    """Keeps the loss of each step."""

    name = "losses"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[bytes] = []

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.losses.append(bits(loss))


@pytest.mark.parametrize(
    ("task", "plugins"),
    [
        pytest.param(TEXTS, (), marks=pytest.mark.slow),
        pytest.param(TEXTS, ("packing",), marks=pytest.mark.slow),
        pytest.param(LANGUAGE, ("packing",), marks=pytest.mark.slow),
        (VECTORS, ()),
    ],
    ids=["padded texts", "packed texts", "packed language", "tuples"],
)
def test_a_training_batch_takes_one_copy_and_trains_to_the_same_bits(task, plugins, monkeypatch):
    write_texts(Path())
    runs = []
    for pin_memory in (False, True):
        device, losses = EmulatedDevice(pin_memory), Losses()
        settings = {"epochs": 1, "batch_size": 8, "micro_batch_size": 4, "lr": 1e-3, "device": "cpu"}
        recipe = make_recipe(
            {**task, "plugins": [*task.get("plugins", ()), *plugins, {"progress": False}], "train": settings}
            | {"output": f"run-{pin_memory}"}
        )
        with device.emulate(monkeypatch):
            summary = execute(build(registry.resolve(recipe, objects=[device, losses])))
        runs.append((losses.losses, summary["validation"], device.copies))
    (apart, validation, many), (together, same_validation, one) = runs
    assert set(one) == {1}
    assert min(many) >= 2
    assert together == apart
    assert same_validation == validation


def test_batches_of_an_evaluation_are_copied_apart(monkeypatch):
    """Metrics keep the targets of several batches: each would keep a whole batch on the device."""
    write_texts(Path())
    inputs: list[Any] = []

    class Watch(Plugin):
        name = "watch"

        @hookimpl(wrapper=True)
        def compute_loss(self, run, batch):
            if not run.model.training:
                inputs.append(batch)
            return (yield)

    device = EmulatedDevice()
    recipe = make_recipe({**TEXTS, "train": {"max_steps": 1, "device": "cpu"}, "plugins": [], "output": "run"})
    with device.emulate(monkeypatch):
        execute(build(registry.resolve(recipe, objects=[device, Watch()])))
        assert inputs
        for batch in inputs:
            assert all(tensor.storage_offset() == 0 for tensor in batch.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_one_copy_takes_a_pinned_batch():
    inputs = {name: leaf for name, leaf in all_kinds().items() if name != "own"}
    gathered, buffer = gather_small(inputs)
    assert buffer is not None
    assert buffer.is_pinned()
    assert gathered["ids"].is_pinned()
    device = torch.device("cuda", 0)
    arrived, kept = to_device(gathered, buffer, device, non_blocking=True)
    for leaf, expected in zip(tree_leaves(arrived), tree_leaves(inputs), strict=True):
        if isinstance(expected, Tensor):
            assert leaf.device == device
            assert bits(leaf.cpu()) == bits(expected)
    assert kept is not None
    del kept
    torch.cuda.synchronize()
    others = [torch.full_like(arrived["large"], 7) for _ in range(8)]  # they would take the memory of a freed buffer
    assert len(others) == 8
    assert bits(arrived["ids"].cpu()) == bits(inputs["ids"])
    assert arrived["ids"].data_ptr() % 16 == arrived["ends"].data_ptr() % 16 == 0

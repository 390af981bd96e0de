"""Checkpoints: a loaded state equals the saved one, and a damaged checkpoint is reported and not used.

Modules:
    core/fastloop/checkpoint/store.py
    core/fastloop/runtime/step_folders.py
"""

from __future__ import annotations

import json
import pickletools
import random
import shutil
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fastloop import CheckpointError, checkpoint
from fastloop.checkpoint import MANIFEST, find_newest, pack, read, rotate, unpack, verify, write
from fastloop.runtime.random_states import random_states, restore_random_states
from fastloop.testing import expect_problem


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def save(step: int = 1, value: float = 1.0, run: str = "run") -> Path:
    return write(
        Path(run) / "checkpoints" / f"step-{step:08d}",
        {"weight": torch.full((64,), value)},
        {"step": step, "moment": torch.full((64,), value)},
    )


# -- packing -----------------------------------------------------------------------------------------------------------

TREES: dict[str, Any] = {
    "plain values": {"a": [1, 2.5, "x", None, True], "b": (), "c": {}, "big": 2**80, "text": "ü\n"},
    "infinities": [float("inf"), float("-inf"), float("nan")],
    "tuples in lists": [(1, (2, [3])), ()],
    "keys of any kind": {0: "a", "0": "b", (1, 2): {None: 3}, 1.5: 4},
    "keys that look like ours": {"__tensor__": 1, "x": {"__tuple__": [1]}},
    "tensors": {
        "bf16": torch.randn(3).bfloat16(),
        "bool": torch.tensor([True]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
    },
    "strided tensors": [torch.arange(12).view(3, 4).t(), torch.arange(12)[::3], torch.zeros(1).expand(5)],
    "keys whose paths meet": {
        "a": {"b": torch.tensor(1), "b.c": torch.tensor(2)},
        "a.b": torch.tensor(3),
        0: torch.tensor(4),
        "0": torch.tensor(5),
    },
    "arrays": {
        "f": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "u": np.arange(3, dtype=np.uint32),
        "zero": np.array(2),
        "big": np.arange(3, dtype=">i4"),
    },
    "an optimizer": {
        "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(2, 2)}},
        "param_groups": [{"betas": (0.9, 0.99), "params": [0]}],
    },
    "random states": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_checkpoint_round_trip(tree):
    write(Path("step-1"), {}, {"tree": tree})
    _, state = read(Path("step-1"))
    if isinstance(tree, dict) and "big" in tree and isinstance(tree["big"], np.ndarray):
        tree = tree | {"big": tree["big"].astype("=i4")}  # the same numbers in this machine's order of bytes
    assert same(state["tree"], tree)


def test_checkpoint_accepts_read_only_arrays_and_scalars():
    array = np.arange(3.0)
    array.flags.writeable = False
    tensors: dict[str, Tensor] = {}
    packed = pack({"array": array, "scalar": np.float32(0.5), "count": np.int64(3)}, tensors, "state")
    assert same(unpack(json.loads(json.dumps(packed)), tensors), {"array": np.arange(3.0), "scalar": 0.5, "count": 3})


@pytest.mark.parametrize(
    "value",
    [{1}, b"bytes", object(), Path("x"), len, np.array(["a"]), np.array([object()])],
    ids=lambda value: type(value).__name__,
)
def test_unsupported_value_is_rejected_with_its_path(value):
    with pytest.raises(TypeError, match=r"^state\.plugins\.ema\.1\.deep: a \w+ "):
        pack({"plugins": {"ema": [0, {"deep": value}]}}, {}, "state")


def test_a_state_that_cannot_be_saved_leaves_the_earlier_checkpoint():
    save(1)
    with pytest.raises(TypeError):
        write(Path("run/checkpoints/step-00000001"), {}, {"bad": {1}})
    assert read(find_newest(Path("run"))[0])[1]["step"] == 1


def test_tied_shared_and_strided_weights_keep_their_values():
    whole = torch.arange(24.0).view(4, 6)
    tied = nn.Parameter(torch.randn(3, 3))
    model = {
        "a": tied,
        "b": tied,
        "row": whole[1],
        "column": whole[:, 2],
        "turned": whole.t(),
        "all": whole,
        "empty": torch.empty(0),
        "none": torch.empty(0),
    }
    write(Path("step-1"), model, {})
    loaded, _ = read(Path("step-1"))
    assert set(loaded) == set(model)
    assert all(same(loaded[name], tensor.detach().contiguous()) for name, tensor in model.items())
    loaded["a"].add_(1)
    assert torch.equal(loaded["b"], tied)  # each has its own copy
    # a row is saved as a row, not with all it is a view of
    assert (Path("step-1") / "model.safetensors").stat().st_size < 2000


def test_random_states_hold_the_current_cuda_device_only(monkeypatch):
    """The run may resume where fewer devices are visible."""
    restored = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr("torch.cuda.set_rng_state", restored.append)
    monkeypatch.setattr("torch.cuda.get_rng_state_all", lambda: [torch.tensor([7]), torch.tensor([8])])
    states = random_states()
    restore_random_states(states)
    assert restored == [torch.tensor([7])]


def test_random_states_are_restored():
    states = random_states()
    drawn = (random.random(), np.random.rand(), torch.rand(1).item())
    restore_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_a_checkpoint_is_four_files_and_none_is_a_pickle():
    folder = save()
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST,
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]
    for path in folder.iterdir():
        with pytest.raises(Exception):  # noqa: B017
            list(pickletools.genops(path.read_bytes()))
    assert set(load_file(folder / "state.safetensors")) == {"state.moment"}
    json.loads((folder / "state.json").read_text())


# -- damage ------------------------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def flip(folder: Path) -> None:
    path = folder / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_manifest(**changes: Any) -> Any:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"].update(changes)
        (folder / MANIFEST).write_text(
            json.dumps({"files": {name: facts for name, facts in manifest["files"].items() if facts}})
        )

    return edit


OUTSIDE = {"bytes": 7, "sha256": "239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5"}  # of b"payload"
DAMAGE: dict[str, tuple[Any, str]] = {
    "truncated": (truncate, "model.safetensors"),
    "one bit": (flip, "state.safetensors"),
    "a file gone": (lambda folder: (folder / "state.json").unlink(), "state.json"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json"),
    "half a manifest": (lambda folder: (folder / MANIFEST).write_text('{"files": {'), "manifest.json"),
    "another manifest": (lambda folder: (folder / MANIFEST).write_text("[1]"), "manifest.json"),
    "an empty manifest": (
        lambda folder: (folder / MANIFEST).write_text('{"files": {}}'),
        "manifest.json model.safetensors",
    ),
    "a file not listed": (edit_manifest(**{"state.json": None}), "manifest.json state.json"),
    "a way out": (edit_manifest(**{"../outside": OUTSIDE}), "../outside"),
    "a longer way out": (edit_manifest(**{"x/../../outside": OUTSIDE}), "x/../../outside"),
    "the folder above": (edit_manifest(**{"..": OUTSIDE}), ".."),
}


@pytest.mark.parametrize(("harm", "files"), DAMAGE.values(), ids=DAMAGE.keys())
def test_corrupt_checkpoint_is_skipped_with_a_message(harm, files):
    whole, harmed = save(1), save(2)
    (harmed.parent / "outside").write_bytes(b"payload")
    assert find_newest(Path("run")) == (harmed, [])
    harm(harmed)
    found, skipped = find_newest(Path("run"))
    assert found == whole
    (line,) = skipped
    first, *others = files.split()
    assert line.startswith(f"{harmed}: damaged ({first} ")
    assert all(name in line for name in others)
    with expect_problem(f"damaged-checkpoint {harmed}: {first} --resume {whole}", CheckpointError):
        find_newest(harmed)  # named outright, nothing takes its place


def test_a_named_checkpoint_that_is_damaged_or_absent_proposes_an_earlier_intact_one():
    first = save(1)
    with expect_problem("no-checkpoint step-00000003: step-00000001", CheckpointError):
        find_newest(first.with_name("step-00000003"))
    second, third = save(2), save(3)
    truncate(second)
    truncate(third)
    with expect_problem(f"damaged-checkpoint {third}: model.safetensors `--resume {first}`", CheckpointError):
        find_newest(third)
    truncate(first)
    with expect_problem(f"damaged-checkpoint {third}: model.safetensors without", CheckpointError):
        find_newest(third)
    shutil.copytree(third, "elsewhere")
    with expect_problem("damaged-checkpoint elsewhere: model.safetensors without", CheckpointError):
        find_newest(Path("elsewhere"))


def test_an_absolute_name_in_a_manifest_leads_nowhere():
    harmed = save(1)
    Path("outside").write_bytes(b"payload")
    edit_manifest(**{str(Path("outside").resolve()): OUTSIDE})(harmed)
    assert "outside is missing" in str(verify(harmed))


def test_missing_checkpoint_error_describes_expected_files():
    with expect_problem("no-checkpoint", CheckpointError):
        find_newest(Path("nowhere"))
    truncate(save(1))
    with expect_problem("damaged-checkpoint step-00000001", CheckpointError):
        find_newest(Path("run"))


def test_a_checkpoint_that_was_copied_elsewhere_is_found_by_its_own_path():
    shutil.copytree(save(3), "elsewhere")
    assert find_newest(Path("elsewhere")) == (Path("elsewhere"), [])


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_rotation_keeps_the_newest_and_touches_nothing_else():
    for step in (5, 10, 99999999, 100000000):
        save(step)
    kept = Path("run/checkpoints")
    shutil.copytree(kept / "step-00000010", kept / "step-00000010-good")
    (kept / "best").mkdir()
    (kept / ".step-00000011.partial").mkdir()
    # by number
    assert [path.name for path in checkpoint.checkpoints(Path("run"))][-2:] == ["step-99999999", "step-100000000"]
    rotate(Path("run"), 2, 100000000)
    assert sorted(path.name for path in kept.iterdir()) == [
        "best",
        "step-00000010-good",
        "step-100000000",
        "step-99999999",
    ]


def test_a_step_saved_again_takes_its_own_place():
    save(1, 1.0)
    save(1, 2.0)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-00000001"]
    assert read(find_newest(Path("run"))[0])[0]["weight"][0] == 2.0


@pytest.mark.parametrize("when", ["before the new one is in place", "before the old one is removed"])
def test_kill_during_second_save_of_a_step_loses_neither(when, monkeypatch):
    save(1, 1.0)
    rename, remove = Path.rename, shutil.rmtree

    def cut_rename(self: Path, target: Path) -> Path:
        if target.name == "step-00000001":
            raise KeyboardInterrupt
        return rename(self, target)

    def cut_remove(path: Path, ignore_errors: bool = False) -> None:
        if path.name.endswith(".old.partial") and path.exists():
            raise KeyboardInterrupt
        remove(path, ignore_errors)

    with monkeypatch.context() as patch:
        if when.startswith("before the new"):
            patch.setattr(Path, "rename", cut_rename)
        else:
            patch.setattr(shutil, "rmtree", cut_remove)
        with pytest.raises(KeyboardInterrupt):
            save(1, 2.0)
    found, _ = find_newest(Path("run"))
    model, state = read(found)
    assert model["weight"][0] == state["moment"][0] == 2.0


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from fastloop.checkpoint import find_newest, read, rotate, write

torch.set_num_threads(1)
run, chance, step = Path("run"), random.Random(0), 0
for _ in range(20):
    pipe, child_end = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            value = torch.full((20000,), float(step))
            for again in range(1 + step % 2):  # every other step twice, as at the end of an epoch
                write(run / "checkpoints" / f"step-{step:08d}", {"weight": value}, {"step": step, "moment": value})
                rotate(run, 1, step)
                os.write(child_end, step.to_bytes(4, "big"))
    os.close(child_end)
    finished = int.from_bytes(os.read(pipe, 4), "big")
    assert finished  # it saves at all
    time.sleep(chance.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while last := os.read(pipe, 4):
        finished = int.from_bytes(last, "big")
    os.close(pipe)
    found, skipped = find_newest(run)
    model, state = read(found)
    assert not skipped, skipped
    assert state["step"] >= finished, (state["step"], finished)
    assert model["weight"].eq(state["step"]).all() and state["moment"].eq(state["step"]).all(), found
    step = state["step"]
    print(found.name)
"""


@pytest.mark.slow
def test_a_kill_at_any_time_leaves_a_whole_checkpoint_no_older_than_the_last_finished():
    script = Path("kills.py")
    script.write_text(KILLS)
    done = forked.run(str(script))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 20
    save(99999999)
    rotate(Path("run"), 1, 99999999)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-99999999"]  # what the kills left is gone

"""Losses and gradients that are NaN, infinite or far from the others: stop, skip, rollback and spikes of ``nan-guard``.

Its ``max_loss`` is tested in ``tests/plugins/guards/test_nan_guard.py``.

Modules:
    plugins/fastloop_plugins/guards/_numbers.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from fastloop import Plugin, PluginError, hookimpl
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.guards._numbers import NotFinite, Spikes


class Rows(Dataset):
    """67 samples, of which some hold a bad number."""

    def __init__(self, bad: tuple[int, ...] = (), value: float = float("nan")) -> None:
        self.data, self.bad, self.value = tiny_data(), bad, value

    def __len__(self) -> int:
        return 67

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.data[index]
        return (torch.full_like(inputs, self.value) if index in self.bad else inputs), target


class BadGradient(Plugin):
    """Makes the gradients of some steps infinite; their losses are as always."""

    name = "bad-gradient"

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    @hookimpl
    def after_backward(self, run: Any) -> None:
        if run.state.step in self.steps:
            next(run.model.parameters()).grad[0, 0] = float("inf")


class BadBatch(Plugin):
    """Makes the inputs NaN of the steps at some places: epoch, and samples of it before."""

    name = "bad-batch"

    def __init__(self, *places: tuple[int, int]) -> None:
        super().__init__()
        self.places = places

    @hookimpl
    def before_step(self, run: Any, batches: list[Any]) -> None:
        if (run.state.epoch, run.state.epoch_samples) in self.places:
            batches[0].inputs[0].fill_(float("nan"))


class Scaler(Plugin):
    """Loss scaling as fp16 has it, with the CPU's GradScaler. ``overflow``: steps whose gradients are infinite."""

    name = "scaler"

    def __init__(self, *overflow: int) -> None:
        super().__init__()
        self.overflow = overflow

    @hookimpl
    def after_prepare(self, run: Any) -> None:
        from accelerate.optimizer import AcceleratedOptimizer

        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        run.optimizer = AcceleratedOptimizer(run.optimizer, device_placement=False, scaler=run.accelerator.scaler)

    @hookimpl
    def after_backward(self, run: Any) -> None:
        if run.state.step in self.overflow:
            next(run.model.parameters()).grad.fill_(float("inf"))


def order(epoch: int = 0) -> list[int]:
    return torch.randperm(67, generator=torch.Generator().manual_seed(123 + epoch)).tolist()


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "bad_batches.jsonl"
    if not path.exists():
        return []
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def finite(weights: dict[str, torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


# -- stop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nan_loss_stops_before_weights_change(tiny_run, tmp_path, value):
    """NaN or infinity in a sample: the run ends before its weights change, and names the samples"""
    bad = order()[20]
    model = tiny_model()
    with expect_problem("not-finite step 3: bad_batches.jsonl", NotFinite) as raised:
        tiny_run(["nan-guard"], model=model, data=Rows((bad,), value), output=tmp_path / "run")
    assert raised.value.exit_code == 1
    assert finite(model.state_dict())
    (line,) = lines(tmp_path / "run")
    assert line["ids"] == order()[16:24]
    assert bad in line["ids"]
    assert (line["what"], line["step"], line["epoch"]) == ("not finite", 3, 0)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["nan-guard"]["not_finite"]) == ("failed", 1)


class Stream(IterableDataset):
    """The samples of ``Rows`` in order, without a length."""

    def __init__(self, *bad: int) -> None:
        self.rows = Rows(bad)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(len(self.rows)):
            yield self.rows[index]


def test_the_last_step_of_a_stream_names_no_position_after_its_end(tiny_run, tmp_path):
    """NaN in the short last step of an iterable dataset: the positions end with the data"""
    with expect_problem("not-finite step 9:", NotFinite):
        tiny_run(["nan-guard"], data=Stream(65), output=tmp_path / "run")
    assert lines(tmp_path / "run")[0]["ids"] == [64, 65, 66]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_nan_gradient_stops_run(tiny_run, clip):
    """an infinite gradient under a finite loss: found before the optimizer steps"""
    model = tiny_model()
    with expect_problem("not-finite step 6: inf", NotFinite) as raised:
        tiny_run(["nan-guard", BadGradient(5)], model=model, max_grad_norm=clip)
    loss, norm = re.findall(r" (-?\d[\d.e-]*|nan|inf)[,;]", raised.value.problem.text)
    assert (math.isfinite(float(loss)), norm) == (True, "inf")
    assert finite(model.state_dict())


def test_without_the_plugin_the_weights_are_lost(tiny_run):
    """control: without the plugin, a single such sample makes all weights NaN"""
    assert not finite(tiny_run(data=Rows((order()[20],))).weights)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_it_changes_nothing_while_all_is_finite(tiny_run, clip):
    """control: where all is finite, the same bits as without the plugin"""
    plain, watched = (tiny_run(plugins, max_grad_norm=clip) for plugins in ([], [{"nan-guard": {"action": "skip"}}]))
    assert plain.losses == watched.losses
    assert all(torch.equal(plain.weights[name], watched.weights[name]) for name in plain.weights)
    assert watched.summary["nan-guard"] == {"not_finite": 0, "acted": 0, "overflows": 0, "spikes": 0}


# -- skip --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["decided on the host", "decided on the device"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_skipped_step_leaves_everything_as_it_was(tiny_run, tmp_path, fused, optimizer):
    """NaN with action skip: weights, optimizer and batch norm stay"""
    before: list[dict[str, torch.Tensor]] = []

    class Watches(Plugin):
        name = "watches"

        @hookimpl
        def after_step(self, run: Any) -> None:
            if run.state.step in (2, 3):
                parts = {f"model.{name}": tensor.clone() for name, tensor in run.model.state_dict().items()}
                state = run.optimizer.state_dict()["state"]
                parts |= {
                    f"{i}.{name}": torch.as_tensor(value).clone()
                    for i, values in state.items()
                    for name, value in values.items()
                }
                before.append(
                    {name: tensor for name, tensor in parts.items() if not name.endswith("num_batches_tracked")}
                )

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    plugins = [{"nan-guard": {"action": "skip"}}, Watches(), *(["fused-optimizer"] if fused else [])]
    data = Rows((order()[20],))
    ran = tiny_run(plugins, model=model, data=data, optimizer=optimizer, epochs=1, output=tmp_path / "run")
    assert before[0].keys() == before[1].keys()
    assert all(torch.equal(before[0][name], before[1][name]) for name in before[0])
    assert finite(ran.weights)
    assert ran.summary["status"] == "completed"
    assert ran.summary["nan-guard"] | {"spikes": 0} == {"not_finite": 1, "acted": 1, "overflows": 0, "spikes": 0}
    assert lines(tmp_path / "run")[0]["ids"] == order()[16:24]


def test_skipping_is_bounded(tiny_run):
    """NaN beyond plugins.nan-guard.limit with action skip: the run ends"""
    bad = tuple(order()[::8])
    with expect_problem("not-finite plugins.nan-guard.limit 3", NotFinite):
        tiny_run([{"nan-guard": {"action": "skip", "limit": 3}}], data=Rows(bad))


# -- rollback ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saving", [[], ["async-save"]], ids=["plain", "async"])
def test_rollback_continues_without_the_batch(tiny_run, tmp_path, saving):
    """NaN with action rollback: the newest checkpoint is loaded, and the run ends as if without that batch"""
    plugins = ["checkpoint-best", {"ema": {"decay": 0.9}}, {"lr-scheduler": {"schedule": "cosine"}}]

    class LeavesOut(Plugin):
        """The control: a run that never met the batch."""

        name = "leaves-out"

        @hookimpl
        def before_fit(self, run: Any) -> None:
            run.state.left_out = [[1, 32]]

    arguments = {"save_every": 4, "epochs": 3}
    control = tiny_run([*plugins, LeavesOut()], **arguments)
    ran = tiny_run(
        [{"nan-guard": {"action": "rollback"}}, *plugins, *saving, BadBatch((1, 32))],
        output=tmp_path / "run",
        **arguments,
    )
    assert ran.summary["status"] == "completed"
    assert ran.summary["nan-guard"]["acted"] == 1
    assert all(torch.equal(ran.weights[name], control.weights[name]) for name in control.weights)
    assert ran.losses == [*control.losses[:13], *control.losses[12:]]  # step 13 is done twice
    for key in ("steps", "samples", "epochs", "validation", "best"):
        assert ran.summary[key] == control.summary[key]
    assert ran.summary["steps"] == 26
    assert [line["ids"] for line in lines(tmp_path / "run")] == [order(1)[32:40]]


def test_second_rollback_skips_both_batches_and_is_bounded(tiny_run, tmp_path):
    """NaN in several batches with action rollback: each is left out, up to the limit"""
    bad = BadBatch((1, 16), (1, 32), (2, 0))
    ran = tiny_run([{"nan-guard": {"action": "rollback", "limit": 3}}, bad], output=tmp_path / "run", epochs=3)
    assert finite(ran.weights)
    assert ran.trainer.run.state.left_out == [[1, 16], [1, 32], [2, 0]]
    assert [line["ids"] for line in lines(tmp_path / "run")] == [order(1)[16:24], order(1)[32:40], order(2)[:8]]
    assert (ran.summary["steps"], ran.summary["nan-guard"]["acted"]) == (27 - 3, 3)
    with expect_problem("not-finite plugins.nan-guard.limit 2", NotFinite):
        tiny_run([{"nan-guard": {"action": "rollback", "limit": 2}}, bad], epochs=3)


def test_resumed_run_after_rollback_skips_the_batch(tiny_run, tmp_path):
    """resumed after a rollback: skipped samples stay skipped, bit for bit"""
    plugins = [{"nan-guard": {"action": "rollback"}}, BadBatch((1, 32))]
    arguments: dict[str, Any] = {"save_every": 4, "epochs": 3}
    whole = tiny_run(plugins, **arguments)
    tiny_run(plugins, output=tmp_path / "run", max_steps=16, **arguments)
    ran = tiny_run(plugins, output=tmp_path / "run", resume=True, **arguments)
    assert ran.losses == whole.losses[-len(ran.losses) :]
    assert all(torch.equal(ran.weights[name], whole.weights[name]) for name in whole.weights)


def test_rollback_without_checkpoint_is_reported(tiny_run, caplog):
    """NaN before the first checkpoint with action rollback: the run stops with the reason"""
    with expect_problem("not-finite step 3:", NotFinite):
        tiny_run([{"nan-guard": {"action": "rollback"}}], data=Rows((order()[20],)))
    assert_problem(caplog, "no-checkpoint checkpoints")


def test_a_sample_audit_of_a_run_that_may_go_back_is_refused(tiny_run):
    """rollback beside a sample audit: refused before anything is written"""
    with expect_problem("excluded-plugin 'sample-audit'", PluginError):
        tiny_run([{"nan-guard": {"action": "rollback"}}, "sample-audit"])


# -- what is no failure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["stop", "skip", "rollback"])
def test_an_overflow_of_fp16_is_loss_scaling_and_no_failure(tiny_run, tmp_path, action):
    """infinite gradients under loss scaling: the step is skipped and counted, and the run continues"""
    ran = tiny_run([{"nan-guard": {"action": action}}, Scaler(4, 9)], output=tmp_path / "run")
    assert ran.summary["status"] == "completed"
    assert ran.summary["nan-guard"] == {"not_finite": 0, "acted": 0, "overflows": 2, "spikes": 0}
    assert lines(tmp_path / "run") == []


def test_a_loss_that_is_no_number_is_a_failure_under_loss_scaling_too(tiny_run):
    """NaN in a sample under loss scaling: the run stops, or skips it"""
    data = Rows((order()[20],))
    with expect_problem("not-finite step 3: nan", NotFinite):
        tiny_run(["nan-guard", Scaler()], data=data)
    assert finite(tiny_run([{"nan-guard": {"action": "skip"}}, Scaler()], data=data).weights)


@pytest.mark.parametrize("stopped_at", [2, 5, 6, 11])
def test_the_scale_and_its_growth_tracker_are_identical_after_resume(tiny_run, tmp_path, stopped_at):
    """a stop after any step: loss scaling continues as if undisturbed"""

    class Keeps(Plugin):
        name = "keeps"

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[float, int]] = []

        @hookimpl
        def before_step(self, run: Any) -> None:
            state = run.accelerator.scaler.state_dict()
            self.seen.append((state["scale"], state["_growth_tracker"]))

    whole, resumed = Keeps(), Keeps()
    undisturbed = tiny_run([Scaler(4, 9), whole])
    tiny_run([Scaler(4, 9)], output=tmp_path / "run", max_steps=stopped_at)
    again = tiny_run([Scaler(4, 9), resumed], output=tmp_path / "run", resume=True)
    assert resumed.seen == whole.seen[stopped_at:]
    assert len({scale for scale, _ in whole.seen}) > 2
    assert len({tracker for _, tracker in resumed.seen}) > 1
    assert again.losses == undisturbed.losses[stopped_at:]


# -- spikes ------------------------------------------------------------------------------------------------------------


def test_spike_is_recorded_and_run_continues(tiny_run, tmp_path):
    """a loss far above the others: recorded with its samples"""
    bad = order(2)[20]
    ran = tiny_run(["nan-guard"], data=Rows((bad,), 300.0), epochs=3, output=tmp_path / "run", lr=1e-4)
    assert ran.summary["status"] == "completed"
    (line,) = [line for line in lines(tmp_path / "run") if line["epoch"] == 2]
    assert (line["what"], line["step"], bad in line["ids"]) == ("spike", 21, True)
    assert line["loss"] > line["usual"]
    assert ran.summary["nan-guard"]["spikes"] == len(lines(tmp_path / "run"))


def test_a_spike_does_not_hide_the_next():
    """eleven spikes in a row: the last is still one"""
    spikes, noise = Spikes(50, 8.0), torch.randn(200, generator=torch.Generator().manual_seed(0)).tolist()
    assert all(spikes.add(1 + 0.1 * value) is None for value in noise)
    assert all(spikes.add(9.0) is not None for _ in range(11))
    assert spikes.add(1.1) is None

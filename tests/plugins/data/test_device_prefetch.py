"""device-prefetch: batches are copied ahead.

Modules:
    plugins/fastloop_plugins/data/device_prefetch.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastloop import Batch, Plugin, hookimpl
from fastloop.testing import assert_problem
from fastloop_plugins.data.device_prefetch import DevicePrefetch, one_ahead


def test_on_a_cpu_it_says_that_there_is_nothing_to_copy(tiny_run, caplog):
    result = tiny_run([DevicePrefetch()], epochs=1, device="cpu")
    assert_problem(caplog, "no-effect device-prefetch: cpu:")
    assert result.trainer.run.settings.placing is None


def test_check_run_warns_if_neither_workers_nor_a_thread_read_ahead(tiny_run, caplog):
    run = tiny_run(epochs=1).trainer.run
    plugin = DevicePrefetch()
    plugin.kind = "cuda"
    plugin.check_run(run)
    assert_problem(caplog, "no-effect")
    caplog.clear()
    run.datasets["train"].deterministic = run.loaders.collators["train"].deterministic = True
    plugin.check_run(run)
    assert not caplog.text


def test_an_item_is_handed_on_when_the_next_one_is_there():
    lines: list[str] = []

    def items() -> Iterator[int]:
        for item in range(3):
            lines.append(f"got {item}")
            yield item

    for item in one_ahead(items()):
        lines.append(f"used {item}")
    assert lines == ["got 0", "got 1", "used 0", "got 2", "used 1", "used 2"]
    assert list(one_ahead([])) == []


class Ahead(Plugin):
    """Places steps one ahead, on any device."""

    name = "ahead"

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    @hookimpl
    def configure(self) -> dict[str, Any]:
        def placing(steps: Any, place: Any) -> Any:
            def placed(step: list[Batch]) -> list[Batch]:
                self.lines.append(f"placed {len(step)}")
                return place(step)  # type: ignore[no-any-return]

            return one_ahead(map(placed, steps))

        return {"placing": placing}

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        self.lines.append("step")


def test_steps_placed_ahead_train_the_same_and_a_run_goes_on_where_it_stopped(tiny_run, tmp_path):
    plain = tiny_run(micro_batch_size=4)
    ahead = Ahead()
    result = tiny_run([ahead], micro_batch_size=4)
    assert result.losses == plain.losses
    assert ahead.lines[:4] == ["placed 2", "placed 2", "step", "placed 2"]
    tiny_run([Ahead()], micro_batch_size=4, max_steps=5, save_every=5, output=tmp_path / "cut")
    rest = tiny_run([Ahead()], micro_batch_size=4, output=tmp_path / "cut", resume=True)
    assert rest.losses == plain.losses[5:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_on_a_stream_of_their_own_train_the_same(tiny_run, workers):
    loading = {"dataloader-workers": {"num_workers": workers}}
    plain, ours = tiny_run([loading]), tiny_run([loading, DevicePrefetch()])
    assert ours.trainer.run.settings.placing is not None
    assert ours.losses == plain.losses
    assert ours.recorder.metrics == plain.recorder.metrics

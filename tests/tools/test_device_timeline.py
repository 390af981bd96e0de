"""The device's timeline, from a small trace in the format that torch 2.11 exports on CUDA.

Modules:
    plugins/fastloop_tools/trials/timeline.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from fastloop.runtime.regions import region
from fastloop_tools.trials.timeline import build_timeline, read_timeline

TRACE = Path(__file__).with_name("cuda_trace.json")


def microseconds(values):
    return {name: round(1e6 * value, 3) for name, value in values.items()}


def test_kernels_count_once_and_under_the_region_that_launched_them():
    timeline = read_timeline(TRACE)
    # The optimizer's first kernel overlaps the last 20 us of the backward kernel, which started first.
    assert microseconds(timeline.busy) == {"to device": 10, "loss": 150, "backward": 200, "optimizer": 90}
    assert sum(timeline.busy.values()) + sum(timeline.idle.values()) == pytest.approx(timeline.seconds)


def test_operations_have_the_time_of_their_kernels_and_not_of_their_launches():
    timeline = read_timeline(TRACE)
    assert microseconds(timeline.operations) == {
        "aten::copy_": 10,
        "aten::addmm": 100,
        "aten::gelu": 50,
        "aten::mm": 200,
        "aten::_fused_adamw_": 70,
        "triton_poi_fused_add_0": 40,  # launched by a graph: the trace names no operation
    }


def test_annotations_on_the_device_are_no_kernels():
    timeline = read_timeline(TRACE)
    assert timeline.seconds == pytest.approx(600e-6)
    assert timeline.idle_share == pytest.approx(150 / 600)
    # Nothing runs before the first copy at 110, from 120 to 150 and from 550 to 560.
    assert microseconds(timeline.idle) == {"data": 100, "to device": 10, "loss": 30, "other": 10}


def test_idle_time_takes_what_the_profiler_added():
    timeline = read_timeline(TRACE)
    # without the profiler: 450 us of kernels, so 75 us idle instead of 150
    regions = microseconds(timeline.regions(525e-6))
    assert regions == {"to device": 10, "loss": 150, "backward": 200, "optimizer": 90, "data": 50, "launch": 25}
    assert sum(timeline.regions(300e-6).values()) == pytest.approx(300e-6)


def test_a_trace_without_kernels_is_idle():
    timeline = build_timeline([{"ph": "X", "cat": "user_annotation", "name": "fastloop/loss", "ts": 5.0, "dur": 10.0}])
    assert timeline.idle_share == 1
    assert timeline.regions(1.0) == {"launch": pytest.approx(1.0)}
    assert build_timeline([]).regions(1.0) == {}


def test_this_torch_writes_regions_as_the_reader_expects(tmp_path):
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler, region("loss"):
        torch.randn(8, 8) @ torch.randn(8, 8)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    timeline = read_timeline(tmp_path / "trace.json")
    assert set(timeline.idle) == {"loss"}
    assert timeline.seconds > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_of_a_real_device_are_connected(tmp_path):
    device = torch.device("cuda")
    weight = torch.randn(4096, 4096, device=device, requires_grad=True)
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
        for _ in range(3):
            with region("loss"):
                loss = (weight @ weight).relu().sum()
            with region("backward"):
                loss.backward()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    timeline = read_timeline(tmp_path / "trace.json")
    assert set(timeline.busy) >= {"loss", "backward"}
    assert timeline.busy["backward"] > timeline.busy["loss"], "two products against one"
    assert {"aten::mm", "aten::relu"} <= timeline.operations.keys() or {
        "aten::mm",
        "aten::clamp_min",
    } <= timeline.operations.keys()
    assert timeline.idle_share < 0.9

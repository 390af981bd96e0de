"""`fastloop profile`: in slow runs with one planted cause each, the first suggestion is that cause.

Modules:
    core/fastloop/speedup_estimates.py
    plugins/fastloop_tools/profile/command.py
    plugins/fastloop_tools/profile/page.py
    plugins/fastloop_tools/profile/suggestions.py
    plugins/fastloop_tools/trials/profile_observer.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
import yaml
from torch._C._autograd import DeviceType

from fastloop.cli import main
from fastloop.plugins.installed import load
from fastloop.recipe import make_recipe
from fastloop.speedup_estimates import StepProfile
from fastloop_cpu._cpu_attention import unavailable
from fastloop_plugins.observe._machine_speed import fault_seconds, peaks
from fastloop_tools.profile import page
from fastloop_tools.profile.suggestions import suggest
from fastloop_tools.trials.timeline import build_host_timeline

CODE = """
import os
import time
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Module):
    def __init__(self, cut=False):
        super().__init__()
        self.layers, self.cut = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), cut

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        if self.cut and x.sum() > 1e9:  # nothing a compiler can keep in its graph
            x = 2 * x
        return x

class Numbers(Dataset):
    def __init__(self, sleep=0.0, rank=None):
        self.sleep = sleep if rank is None or int(os.environ.get("RANK", 0)) == rank else 0.0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.sleep)
        return torch.full((32,), float(index)), index % 3

def data(**options):
    return {"train": Numbers(**options)}
"""

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""As many workers are proposed at most: beyond that torch warns."""


@pytest.fixture
def recipe() -> Callable[..., str]:
    """Write a recipe of a small net: its path. ``data`` and ``model`` are arguments of theirs."""
    Path("net.py").write_text(CODE)

    def put(*plugins: Any, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> str:
        tree = {
            "model": {"module": "net.py:Net", "arguments": model or {}},
            "data": {"module": "net.py:data", "arguments": data or {}},
            "train": {"batch_size": 8, "device": "cpu"},
            "plugins": [{"module": {"loss": "cross_entropy"}}, *plugins],
        }
        Path("tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return "tiny.yaml"

    return put


@pytest.fixture
def profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, dict[str, Any]]]:
    """Run the command in this process; returns the exit code, the output, and profile.json."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rich._console", None)

    def call(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["fastloop", "profile", *arguments, "--output", "seen"])
        with pytest.raises(SystemExit) as exited:
            main()
        captured, written = capsys.readouterr(), Path("seen/profile.json")
        return (
            int(exited.value.code or 0),
            captured.out + captured.err,
            json.loads(written.read_text()) if written.exists() else {},
        )

    return call


SHORT = ("--steps", "4", "--seconds", "0", "--warmup", "1", "--profile-steps", "2")


@pytest.mark.slow
def test_profile_suggests_workers_first_for_slow_dataset(recipe, profile):
    code, out, record = profile(recipe(data={"sleep": 0.005}), *SHORT)
    assert code == 0, out
    assert record["suggestions"][0]["plugin"] == "dataloader-workers"
    assert record["suggestions"][0]["edit"] == f"plugins: + dataloader-workers: {{num_workers: {CORES}}}"
    seen = record["profile"]
    assert 0.04 <= seen["regions"]["data"] <= seen["seconds"] * (1 + 1e-9)
    waiting = seen["regions"]["data"]
    assert record["suggestions"][0]["seconds"] == pytest.approx(
        waiting - (waiting / CORES - (seen["seconds"] - waiting)), rel=0.01
    )
    assert sum(seen["regions"].values()) == pytest.approx(seen["seconds"], rel=0.05)
    assert "dataloader-workers" in out
    assert "fastloop bench tiny.yaml --select tiny.fast.yaml" in out
    assert "| data |" in Path("seen/profile.md").read_text()
    page = Path("seen/profile.html").read_text()
    assert "<title>Profile of " in page
    for name in (*seen["regions"], "dataloader-workers"):
        assert name in page
    assert not Path("runs").exists()
    events = json.loads(Path("seen/rank0.trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "fastloop/optimizer" for event in events if event.get("cat") == "user_annotation") == 2


@pytest.mark.slow
def test_profile_suggests_less_after_applied_edit(recipe, profile):
    workers = {"dataloader-workers": {"num_workers": CORES}}
    code, out, record = profile(recipe(workers, data={"sleep": 0.005}), *SHORT, "--warmup", "4")
    assert code == 0, out
    assert "dataloader-workers" not in [found["plugin"] for found in record["suggestions"]], (
        "it has as many as there are processors"
    )


@pytest.mark.slow
def test_a_graph_break_is_shown_with_its_line(recipe, profile):
    line = 1 + CODE.splitlines().index(
        "        if self.cut and x.sum() > 1e9:  # nothing a compiler can keep in its graph"
    )
    code, out, record = profile(recipe({"compile": {"backend": "eager"}}, model={"cut": True}), *SHORT)
    assert code == 0, out
    assert {cut["where"].rpartition("/")[2] for cut in record["profile"]["graph_breaks"]} == {f"net.py:{line}"}
    assert f"net.py:{line}" in out


@pytest.mark.slow
def test_profile_names_lagging_process_with_reason(recipe):
    command = ["-m", "fastloop", "profile", recipe("ddp", data={"sleep": 0.005, "rank": 1}), "--nproc", "2"]
    done = forked.run(*command, *SHORT, "--output", "seen")
    assert done.returncode == 0, done.stderr
    page_ = Path("seen/profile.md").read_text()
    assert "process 1 lags" in page_
    assert ": its data" in page_
    record = json.loads(Path("seen/profile.json").read_text())
    assert record["suggestions"][0]["plugin"] == "dataloader-workers"
    assert len(record["profile"]["ranks"]) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--steps", "0"], "--steps"), (["output=elsewhere"], "give --output elsewhere instead")],
)
def test_a_wrong_argument_is_refused(recipe, profile, arguments, expected):
    code, out, _ = profile(recipe(), *arguments)
    assert code == 2
    assert expected in out


# -- estimates, from figures -------------------------------------------------------------------------------------------

TEXT = {
    "model": {"config": {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}},
    "data": {"module": "net.py:data", "label": "label"},
}


def told(figures: dict[str, Any], plugins: Iterable[Any] = (), **data: Any) -> list[tuple[str, str]]:
    """Plugin and edit of each verdict on a text recipe."""
    Path("net.py").write_text(CODE)
    tree = {**TEXT, "data": {**TEXT["data"], **data}, "train": {"device": "cpu"}, "plugins": list(plugins)}
    usual = {"device": "cpu", "seconds": 1.0, "regions": {"loss": 0.4, "backward": 0.5, "optimizer": 0.01}, "layers": 0}
    found, _ = suggest(StepProfile(**(usual | figures)), make_recipe(tree))
    return [(verdict.plugin, verdict.edit) for verdict in found]


@pytest.mark.parametrize(
    ("figures", "data", "first"),
    [
        ({"padded": 6144, "longest": 5000, "real": 1500}, {}, ("packing", "plugins: + packing")),
        ({"padded": 6144, "longest": 1500, "real": 1500}, {"padding": "max_length"}, ("packing", "plugins: + packing")),
        (
            {"operations": {"aten::addmm": 0.6}, "peaks": {"fp32": 1e11, "bf16": 6e11}},
            {},
            ("amp", "plugins: + amp"),
        ),
        ({"page_faults": 500_000, "fault_seconds": 1e-6}, {}, ("allocator", "plugins: + allocator")),
        ({"operations": {"aten::bernoulli_": 0.4}}, {}, ("fast-dropout", "plugins: + fast-dropout")),
        ({"regions": {"loss": 0.1, "optimizer": 0.9}}, {}, ("fused-optimizer", "plugins: + fused-optimizer")),
        ({"layers": 2}, {}, ("cls-last-layer", "plugins: + cls-last-layer")),
        (
            {"operations": {"aten::mm": 0.1, "aten::gelu": 0.8}, "counts": {"aten::gelu": 50}},
            {},
            ("compile", "plugins: + compile"),
        ),
        ({"cores": 8, "threads": 1}, {}, ("cpu-affinity", "plugins: + cpu-affinity")),
        ({"operations": {"aten::_scaled_dot_product_attention": 0.4}}, {}, ("attention", "plugins: + attention")),
        ({"operations": {"aten::convolution_backward": 0.5}}, {}, ("channels-last", "plugins: + channels-last")),
    ],
)
def test_suggestions_for_each_observation(monkeypatch, figures, data, first):
    monkeypatch.delenv("OMP_NUM_THREADS")  # which cpu-affinity follows
    assert told(figures, **data)[0] == first
    assert first[0] not in [plugin for plugin, _ in told(figures, [first[0]], **data)], "what is listed is not proposed"


def test_suggestions_include_disabled_plugins_and_omit_useless_ones():
    figures = {"page_faults": 500_000, "fault_seconds": 1e-6}
    assert told(figures, [{"allocator": False}])[0] == ("allocator", "plugins: + allocator")
    seen = StepProfile(device="cpu", seconds=1.0, **figures)
    found, _ = suggest(
        seen, make_recipe({**TEXT, "train": {"device": "cpu"}, "plugins": [{"allocator": False}]}), ["allocator"]
    )
    assert "allocator" not in [verdict.plugin for verdict in found]


def test_no_suggestions_without_possible_speedup():
    assert told({}) == []


def test_padding_to_a_length_can_be_undone_in_the_recipe():
    figures = {"padded": 6144, "longest": 3000, "real": 3000}
    assert ("text-classification", "data.padding=longest") in told(figures, padding="max_length")


def test_suggestion_to_compile_whole_graph_despite_read_number():
    cut = {
        "where": "net.py:7",
        "reason": "Unsupported Tensor.item() call with capture_scalar_outputs=False",
        "count": 1,
    }
    figures = {"operations": {"aten::gelu": 0.8}, "graph_breaks": [cut]}
    assert ("compile", "plugins.compile.capture_scalars=True") in told(figures, ["compile"])
    assert "compile" not in [plugin for plugin, _ in told(figures, [{"compile": {"capture_scalars": True}}])]
    assert "compile" not in [plugin for plugin, _ in told({"operations": {"aten::gelu": 0.8}}, ["compile"])]


def test_estimate_for_cpu_bound_reading_is_below_waiting():
    from fastloop_plugins.data.dataloader_workers import DataLoaderWorkers

    usual = {"device": "cpu", "seconds": 1.0, "regions": {"data": 0.5, "loss": 0.5}, "cores": 2, "threads": 2}
    sleeps, reads = (
        DataLoaderWorkers.estimate_speedup(StepProfile(**usual, reading=seconds), make_recipe({}))
        for seconds in (0.0, 0.5)
    )
    assert sleeps.seconds == pytest.approx(0.5)
    assert reads.seconds == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("seconds", "products", "calls", "flops", "measured"),
    [
        (0.5308, 0.3125, 31, 98.8e9, 1.92),
        (0.0290, 0.0130, 80, 3.9e9, 0.34),
        (0.0250, 0.0015, 23, 0.3e9, 0.95),
        (0.1442, 0.0109, 31, 0.9e9, 0.99),
    ],
    ids=["precision", "padding, packed", "graph break", "lagging process"],
)
def test_estimate_of_amp_has_the_sign_of_what_was_measured(seconds, products, calls, flops, measured):
    """Profiles and speedups are those of benchmarks/results/planted.json, on a processor with AMX."""
    from fastloop_plugins.precision.amp import Amp

    figures: dict[str, Any] = {
        "operations": {"aten::addmm": products},
        "counts": {"aten::addmm": calls},
        "flops": flops,
    }
    profile = StepProfile(device="cpu", seconds=seconds, peaks={"fp32": 3.6e11, "bf16": 2.3e12}, **figures)
    estimate = Amp.estimate_speedup(profile, make_recipe({}))
    assert (estimate.seconds > 0) == (measured > 1)


@pytest.mark.parametrize(
    ("name", "share"), [("packing", 0.75), ("length-bucketing", 0.8 * 0.5), ("text-classification", 0.5)]
)
def test_estimates_of_padding_leave_out_the_time_between_operations(name, share):
    """Half of 200 positions are behind the longest sample of a batch, and half of the others are padding, too."""
    profile = StepProfile(
        device="cuda",
        seconds=1.0,
        regions={"loss": 0.4, "backward": 0.6},
        between_operations={"loss": 0.3, "backward": 0.5, "log.after_step": 0.1},
        padded=200,
        longest=100,
        real=50,
    )
    padding = "max_length" if name == "text-classification" else "longest"
    estimate = load(name).estimate_speedup(profile, make_recipe({"data": {"padding": padding}}))
    assert estimate.seconds == pytest.approx(share * 0.2)


def test_no_suggestion_if_startup_cost_exceeds_savings():
    figures = {"operations": {"aten::gelu": 0.8}, "counts": {"aten::gelu": 1000}}
    assert "compile" not in [plugin for plugin, _ in told(figures | {"total_steps": 10})]
    assert "compile" in [plugin for plugin, _ in told(figures | {"total_steps": 1000})]


def test_profile_rejects_invalid_arguments(monkeypatch):
    from fastloop_plugins.memory.allocator import Allocator

    monkeypatch.setattr(Allocator, "conflicts", {"amp": "They were planted as enemies."})
    Path("net.py").write_text(CODE)
    seen = StepProfile(device="cpu", seconds=1.0, page_faults=500_000, fault_seconds=1e-6)
    found, refused = suggest(seen, make_recipe({**TEXT, "train": {"device": "cpu"}, "plugins": ["amp"]}))
    assert "allocator" not in [verdict.plugin for verdict in found]
    assert "planted as enemies" in refused["allocator"]


# -- figures, from events ----------------------------------------------------------------------------------------------


def event(
    name: str, start: float, end: float, device: Any = DeviceType.CPU, thread: int = 1, late: bool = False
) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, thread=thread, is_async=late)


def micro(seconds: dict[Any, float]) -> dict[Any, float]:
    """Microseconds, without zeros."""
    return {name: round(1e6 * value, 3) for name, value in seconds.items() if round(1e6 * value, 3)}


def test_region_time_excludes_inner_regions():
    events = [
        event("fastloop/data", 0, 10),
        event("fastloop/evaluate", 10, 100),
        event("fastloop/loss", 20, 50),
        event("aten::mm", 21, 49),
        event("fastloop/log.after_step", 60, 70),
        event("fastloop/optimizer", 110, 120),
    ]
    host = build_host_timeline(events)
    assert micro(host.regions) == {"data": 10, "evaluate": 60, "loss": 30, "optimizer": 10, "other": 10}
    assert micro(host.hooks) == {"log.after_step": 10}
    assert build_host_timeline([]).scale(1.0).regions == {}


def test_each_moment_of_a_step_belongs_to_one_event():
    compiled = "## Call CompiledFxGraph fyli3sfn2kzhzgtn5hejyo ##"
    events = [
        event("aten::randn", -5, -1),  # before the window
        event("fastloop/data", 0, 20),
        event("fastloop/loss", 20, 60),
        event("aten::linear", 22, 50),
        event("aten::addmm", 25, 48),
        event("aten::addmm", 25, 48, DeviceType.CUDA),
        event(compiled, 50, 54),
        event("fastloop/backward", 60, 90),
        event("fastloop::attention_backward", 62, 70),
        event("gloo:all_reduce", 65, 80, late=True),  # ends in a thread of gloo
        event("aten::copy_", 82, 85, thread=2),
        event("fastloop/log.after_step", 94, 100),
    ]
    host = build_host_timeline(events)
    assert micro(host.operations) == {
        "aten::linear": 5,
        "aten::addmm": 23,
        "inductor::kernels": 4,
        "fastloop::attention_backward": 8,
        "gloo:all_reduce": 10,
        "aten::copy_": 3,
    }
    assert micro(host.between_operations) == {"data": 20, "loss": 8, "backward": 9, "log.after_step": 6, "other": 4}
    assert micro(host.work) == micro(host.regions) | {"backward": 20}
    assert sum(host.seconds.values()) == pytest.approx(100e-6)
    halved = host.scale(60e-6)  # 20 of 100 were data, which a profiler does not stretch
    assert micro(halved.regions) == {"data": 20, "loss": 20, "backward": 15, "other": 5}
    assert halved.operations["aten::addmm"] == pytest.approx(11.5e-6)


KERNELS = ("fastloop::attention_forward", "fastloop::attention_backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "named"),
    [
        ("", ("aten::bernoulli_",)),
        ("amp,packing,fast-dropout,cpu-attention", ("fastloop::random_bits", *KERNELS)),
    ],
    ids=["plain", "own kernels"],
)
def test_operations_add_up_to_the_step(profile, plugins, named):
    if "cpu-attention" in plugins and (reason := unavailable()) is not None:
        pytest.skip(f"cpu-attention: {reason}")
    small = ("data.arguments.train=400", "model.config.dim=64", "model.config.n_heads=2", "train.device=cpu")
    chosen = ("--without", "checkpoint-best", *(("--with", plugins) if plugins else ()))
    code, out, record = profile("quickstart", *small, *chosen, *SHORT)
    assert code == 0, out
    seen = record["profile"]
    operations, between = seen["operations"], seen["between_operations"]
    assert all(operations[name] > 0 for name in named)
    assert all(seen["counts"][name] == 3 for name in named if name in KERNELS), "one call for each layer"
    assert sum(operations.values()) + sum(between.values()) == pytest.approx(seen["seconds"])
    assert sum(seen["regions"].values()) == pytest.approx(seen["seconds"])
    assert between["other"] < 0.1 * seen["seconds"], "some time of a loaded machine is between operations"
    table = Path("seen/profile.md").read_text().partition("## Operations")[2].partition("\n\nBetween")[0].strip()
    shares = [line.split("|")[3].strip() for line in table.splitlines()[2:]]
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=1)
    assert table.splitlines()[-1].startswith("| not attributed |")
    assert shares[-1] == f"{between['other'] / seen['seconds']:.1%}"


@pytest.mark.slow
def test_peaks_and_faults_are_measured():
    found = peaks(torch.device("cpu"), ("fp32",))
    assert 1e8 < found["fp32"] < 1e14
    assert 1e-9 < fault_seconds(1024) < 1e-3


def test_page_shows_whether_allocated_memory_is_flat():
    seen = StepProfile(device="cuda", seconds=0.1, reserved=[100 * 2**20, 100 * 2**20], idle=0.3)
    assert any("flat" in line for line in page.facts(seen))
    assert any("30%" in line for line in page.facts(seen))
    assert not any("launch" in line for line in page.facts(seen))
    seen.regions = {"loss": 0.05, "launch": 0.05}
    assert any("waits 50% of a step for the host to launch" in line for line in page.facts(seen))
    seen.reserved[1] *= 3
    assert any("a sawtooth, 100 to 300 MiB" in line for line in page.facts(seen))

"""`fastloop plan --device-memory`: its estimates equal real tensors, the papers' formulas, and torch's own sharding.

Modules:
    core/fastloop/memory_estimates.py
    plugins/fastloop_plugins/strategies/_memory_ddp.py
    plugins/fastloop_plugins/strategies/_memory_zero.py
    plugins/fastloop_tools/plan/memory/activations.py
    plugins/fastloop_tools/plan/memory/command.py
    plugins/fastloop_tools/plan/memory/estimate.py
    plugins/fastloop_tools/plan/memory/model.py
    plugins/fastloop_tools/plan/memory/share.py
    plugins/fastloop_tools/plan/memory/sizes.py
    plugins/fastloop_tools/plan/memory/table.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scale_runs
import torch
import yaml
from checkpoint_helpers import save_checkpoint, text_recipe, write_rows
from long_form import LONG
from scale_runs import ENCODER, saved_by_a_real_step, sharding_of_torch, tiny
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from fastloop.cli import app
from fastloop.cli.option_table import describe
from fastloop.errors import RecipeError, UsageError
from fastloop.memory_estimates import Layout, Weight
from fastloop.plugins.declared_options import options_of
from fastloop.recipe import Recipe
from fastloop.testing import assert_problem
from fastloop_plugins.strategies import _memory_ddp, _memory_fsdp, _memory_zero
from fastloop_plugins.strategies.fsdp import FSDP
from fastloop_tools.plan.memory.activations import Activations, LiveBytes, equal_blocks, extrapolate, micro_step
from fastloop_tools.plan.memory.change import smallest_change
from fastloop_tools.plan.memory.estimate import MemoryVariant, estimate
from fastloop_tools.plan.memory.sizes import format_size, parse_bytes, unit_for

CHECKPOINTING = "activation-checkpointing"
BF16 = [{"amp": {"dtype": "bf16"}}]
PRECISIONS: dict[str, list[Any]] = {"bf16": BF16}
if LONG:
    PRECISIONS["fp32"] = []


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(("A", "B"))


def variant(
    recipe: Recipe, name: str = "ddp", checkpointing: bool = False, processes: int = 1, **options: Any
) -> MemoryVariant:
    found = estimate(recipe, processes, **options)
    return next(row for row in found.variants if row.name == name and row.checkpointing == checkpointing)


# -- activations -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "precision", "checkpointing"),
    [("encoder", [], False), ("encoder", BF16, True), ("decoder", [], True), ("decoder", BF16, False)],
    ids=["encoder", "encoder-bf16-checkpointing", "decoder-checkpointing", "decoder-bf16"],
)
def test_a_fake_forward_saves_the_bytes_of_a_real_one(kind, precision, checkpointing):
    plugins = [*precision, *[CHECKPOINTING] * checkpointing]
    real = saved_by_a_real_step(tiny(kind, *plugins))
    assert variant(tiny(kind, *plugins), checkpointing=checkpointing).saved == pytest.approx(real, rel=0.05)


@pytest.mark.slow
def test_activation_checkpointing_saves_less_and_computes_more():
    found = {row.checkpointing: row for row in estimate(tiny("decoder"), 1).variants if row.name == "ddp"}
    plain, less = found[False], found[True]
    assert less.saved < 0.5 * plain.saved
    assert less.activations < plain.activations
    assert 1.1 < less.flops / plain.flops < 1.4  # a third forward for all but the head


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_the_peak_of_a_step_is_that_of_the_allocator(fake):
    """Torch's profiler records each allocation. Both count the gradients of weights here."""
    from contextlib import nullcontext

    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)]
    model, inputs = torch.nn.Sequential(*layers), torch.randn(64, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model(inputs).pow(2).mean().backward()
    changes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    mode = FakeTensorMode() if fake else nullcontext()
    with mode:
        if fake:
            model = torch.nn.Sequential(
                torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256), torch.nn.LayerNorm(256)
            )
            inputs = torch.randn(64, 256)
        model.zero_grad()
        with LiveBytes([*model.parameters(), inputs]) as counted:
            model(inputs).pow(2).mean().backward()
    assert counted.peak == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_few_equal_blocks_stand_for_all(plugins, monkeypatch):
    """Six blocks, of which two and three are computed, give the numbers of all six."""
    monkeypatch.setitem(scale_runs.LLAMA, "num_hidden_layers", 6)
    whole: list[Activations] = []
    counts: list[int] = []

    def compute_both(model: Any, step: Any) -> Activations:
        whole.append(step())
        counts.clear()
        assert extrapolate(model, step) == whole[-1]
        assert counts == [2, 3]
        model.model.layers[4].mlp.more = 1
        assert equal_blocks(model) is None
        del model.model.layers[4].mlp.more
        return whole[-1]

    def count_blocks(model: Any, *arguments: Any) -> Activations:
        counts.append(len(model.model.layers))
        return micro_step(model, *arguments)

    monkeypatch.setattr("fastloop_tools.plan.memory.share.extrapolate", compute_both)
    monkeypatch.setattr("fastloop_tools.plan.memory.share.micro_step", count_blocks)
    estimate(tiny("decoder", "fsdp", *plugins), 4)
    assert len({step.saved for step in whole}) >= 4  # with recomputed blocks, and shares of tensor 2


# -- formulas ----------------------------------------------------------------------------------------------------------


def large(count: int = 512, rows: int = 8192, columns: int = 1024, **fields: Any) -> Layout:
    """A model of equal weights in 64 blocks, with 8 bytes of Adam's state an element: 4.3e9 parameters by default."""
    weights = [
        Weight(shape=(rows, columns), state=8 * rows * columns, block=index // (count // 64)) for index in range(count)
    ]
    return Layout(weights=tuple(weights), **fields)


def held(row: Any) -> float:
    return row.weights + row.gradients + row.optimizer


@pytest.mark.parametrize("processes", [64, 1024])
def test_zero_holds_what_its_paper_says(processes):
    """Rajbhandari et al. 2020, section 5, for mixed precision with Adam: 2 + 2 + 12 bytes a parameter; sections 7.2: 2
    and 3 volumes."""
    layout = large(4096, 1024, 1024, processes=processes, per_node=8, micro_steps=2, precision="fp16")
    count = sum(weight.elements for weight in layout.weights)
    paper = {1: 4 + 12 / processes, 2: 2 + 14 / processes, 3: 16 / processes}
    for stage, bytes_each in paper.items():
        assert held(_memory_zero.stage(layout, stage, half=True)) == pytest.approx(bytes_each * count, rel=0.01), stage
    once = large(4096, 1024, 1024, processes=processes, precision="fp16")
    volumes = {1: 2, 2: 2, 3: 3}
    for stage, volume in volumes.items():
        assert _memory_zero.stage(once, stage, half=True).sent_bytes == pytest.approx(volume * 2 * count, rel=0.02), (
            stage
        )


@pytest.mark.parametrize("processes", [64, 1024])
def test_ddp_and_fsdp_hold_and_send_what_their_papers_say(processes):
    """16 bytes a parameter, whole or sharded. All-reduce: 2 volumes (Li et al. 2020); fsdp: 3 (Zhao et al. 2023,
    section 3.2)."""
    layout = large(processes=processes)
    count = sum(weight.elements for weight in layout.weights)
    (ddp,), (fsdp, *_, offload) = _memory_ddp.estimate(layout), _memory_fsdp.estimate(layout)
    assert held(ddp) == 16 * count
    assert ddp.sent_bytes == pytest.approx(2 * 4 * count, rel=0.02)
    assert held(fsdp) == pytest.approx(16 * count / processes)
    assert fsdp.sent_bytes == pytest.approx(3 * 4 * count, rel=0.02)
    assert held(offload) == 0
    assert offload.host == held(fsdp)


def test_fsdp_within_machines_holds_more_and_sends_the_gradients_shards_between_them():
    """Hybrid sharding (Zhao et al. 2023, section 3.2.2): shards over 8 processes; their gradients are all-reduced
    between 4 machines."""
    layout = large(processes=32, per_node=8)
    count = sum(weight.elements for weight in layout.weights)
    assert ("hsdp" in [row.name for row in _memory_fsdp.estimate(layout)]) == (
        "shard_within" in [row.name for row in describe(options_of(FSDP))]
    )
    hybrid = _memory_fsdp.sharded(layout, 8)
    assert held(hybrid) == pytest.approx(16 * count / 8)
    assert hybrid.sent_bytes == pytest.approx(3 * 4 * count * 7 / 8 + 2 * 3 / 4 * 4 * count / 8)


def test_bf16_gathers_half_the_bytes_and_reduces_in_the_dtype_of_the_option():
    layout = large(processes=64, precision="bf16")
    volume = 4 * sum(weight.elements for weight in layout.weights) * layout.share
    assert _memory_fsdp.sharded(layout, 64).sent_bytes == pytest.approx(2 * volume)
    half = large(processes=64, precision="bf16", options={"reduce_dtype": "bf16"})
    assert _memory_fsdp.sharded(half, 64).sent_bytes == pytest.approx(1.5 * volume)
    held_back = large(processes=64, micro_steps=4, options={"hold_gradients": True})
    assert _memory_fsdp.sharded(held_back, 64).sent_bytes == pytest.approx(9 * volume)


def test_options_of_ddp_change_its_buckets_and_traffic():
    (plain,), (copies,), (half,) = (
        _memory_ddp.estimate(large(processes=8, options=options))
        for options in ({}, {"gradient_as_bucket_view": False}, {"compress": "bf16"})
    )
    assert plain.buckets == 0
    assert copies.buckets == copies.buckets_kept == plain.gradients
    assert half.sent_bytes == plain.sent_bytes / 2
    assert half.buckets == 25 * 2**20


@pytest.mark.slow
def test_fsdp_at_a_large_world_size_has_the_shards_and_traffic_of_the_plugin(processes):
    world_size = 1024
    (ended,) = processes(1, sharding_of_torch, world_size)
    assert ended.code == 0, ended.output
    loaded = scale_runs.recipe(device="auto", batch_size=world_size)
    row = variant(loaded, "fsdp", processes=world_size)
    for name, found in ended.result.items():
        assert getattr(row, name) == pytest.approx(found, rel=0.01), name


# -- the command -------------------------------------------------------------------------------------------------------


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def file() -> str:
    Path("recipe.yaml").write_text(yaml.safe_dump(tiny("decoder", "ddp").to_dict()))
    return "recipe.yaml"


@pytest.mark.slow
def test_the_table_fits_80_columns_and_names_the_smallest_change(file):
    found = plan(
        file,
        "--nproc",
        "2",
        "--nnodes",
        "2",
        "--device-memory",
        "1200KiB",
        "--device-flops",
        "1e12",
        "--bandwidth",
        "1GB/s",
    )
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    names = [line.split()[0] for line in lines if line]
    assert {"*ddp", "fsdp", "zero-0", "zero-1", "zero-2", "zero-3"} <= set(names)
    assert "fits seconds" in found.stdout
    row = next(line.split() for line in lines if line.startswith("*ddp"))
    assert row[-2] == "no"


@pytest.mark.parametrize("command", [[], ["--nproc", "2"]])
def test_without_its_options_plan_shows_the_plugins(file, command):
    found = plan(file, *command)
    assert found.exit_code == 0
    assert "numerics" in found.stdout
    assert "bucket" not in found.stdout


@pytest.mark.slow
def test_json_has_every_variant_with_all_parts(file):
    found = plan(file, "--nproc", "4", "--device-memory", "1GiB", "--json", "-")
    result = json.loads(found.stdout)
    assert result["processes"] == 4
    assert result["smallest_change"] is None  # the recipe fits
    for row in result["variants"]:
        parts = sum(row[name] for name in ("weights", "gradients", "optimizer", "activations", "buckets"))
        assert row["total"] == pytest.approx(parts)
        assert row["fits"] is True
    assert [row["name"] for row in result["variants"] if row["listed"]] == ["ddp"]
    assert {row["checkpointing"] for row in result["variants"]} == {True, False}


@pytest.mark.slow
def test_the_smallest_change_fits_and_changes_the_least():
    variants = estimate(tiny("decoder", "ddp"), 4).variants
    totals = {(row.name, row.checkpointing): row.total for row in variants}
    plain, less = totals["ddp", False], totals["ddp", True]
    assert less < plain

    def change(memory: float) -> MemoryVariant | None:
        return smallest_change([replace(row, fits=row.total <= memory) for row in variants])

    one = change((less + plain) / 2)
    assert one is not None
    assert one.fits
    assert (one.plugin == "ddp") + (not one.checkpointing) == 1  # one change, not both
    assert change(plain) is None
    assert change(1000.0) is None


@pytest.mark.slow
def test_nothing_fits_is_reported_with_the_least(file):
    found = plan(file, "--device-memory", "1KiB")
    assert "Nothing fits." in found.stdout
    assert "smaller train.micro_batch_size (now 8)" in found.stdout


@pytest.mark.slow
def test_step_times_are_the_larger_of_computation_and_communication():
    rows = estimate(tiny("decoder"), 2, flops=1e12, bandwidth=1e6).variants
    assert all(row.seconds == max(row.flops / 1e12, row.sent_bytes / 1e6) for row in rows)
    assert {row.seconds == row.sent_bytes / 1e6 for row in rows} == {True}  # such a link is slower than such a device


@pytest.mark.slow
def test_a_checkpoint_folder_gives_the_sizes_of_its_model():
    model = save_checkpoint(AutoModelForSequenceClassification, ENCODER, num_labels=2)
    count = sum(parameter.numel() for parameter in model.parameters())
    row = variant(text_recipe("text-classification", "checkpoint", {"label": "label"}))
    assert row.gradients == 4 * count
    assert row.optimizer == 8 * count


@pytest.mark.slow
def test_a_strategy_of_a_file_shows_its_own_estimate():
    Path("halves.py").write_text(
        "from fastloop import MemoryEstimate, Strategy\n\n\n"
        "class Halves(Strategy):\n    name = 'halves'\n\n"
        "    @classmethod\n    def estimate_memory(cls, layout):\n"
        "        half = layout.weight_bytes / 2\n"
        "        yield MemoryEstimate(name='halves', weights=half, gradients=half, optimizer=2 * half, "
        "sent_bytes=layout.processes)\n"
    )
    found = estimate(tiny("decoder", "./halves.py"), 4)
    (row,) = [row for row in found.variants if row.listed]
    assert (row.name, row.sent_bytes, row.weights) == ("halves", 4, row.optimizer / 2)
    assert {"ddp", "fsdp"} <= {row.name for row in found.variants}


@pytest.mark.slow
def test_frozen_weights_have_no_gradients_and_no_state():
    whole, frozen = variant(tiny("encoder")), variant(tiny("encoder", {"freeze": {"match": "bert.encoder.*"}}))
    assert frozen.weights == whole.weights
    assert frozen.gradients < whole.gradients
    assert frozen.optimizer == 2 * frozen.gradients


@pytest.mark.slow
def test_the_state_of_the_optimizer_is_that_of_the_recipe():
    assert variant(tiny("encoder", optimizer="SGD")).optimizer == 0
    momentum = variant(tiny("encoder", optimizer={"name": "SGD", "momentum": 0.9}))
    assert momentum.optimizer == momentum.gradients


@pytest.mark.slow
def test_a_model_that_reads_values_is_refused_with_the_reason():
    Path("mine.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Reads(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n\n"
        "    def forward(self, x):\n        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)\n\n\n"
        "class Builds(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n        "
        "print(self.weight.sum().item())\n\n"
        "def data():\n    return {'train': [(torch.ones(4), 0)] * 8}\n"
    )
    tree = {
        "data": {"module": "mine.py:data"},
        "plugins": [{"module": {"loss": "cross_entropy"}}],
        "train": {"device": "cpu"},
    }
    for name in ("Reads", "Builds"):
        Path("recipe.yaml").write_text(
            yaml.safe_dump(tree | {"model": {"module": f"mine.py:{name}"}, "train": {"batch_size": 8}})
        )
        found = plan("recipe.yaml", "--device-memory", "1GiB")
        assert isinstance(found.exception, RecipeError), found.output
        assert "fastloop plan" in str(found.exception)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device-memory", "much"], "wrong-format --device-memory much 0 80GiB"),
        (["--device-flops", "1e12"], "missing-value --device-flops --bandwidth"),
        (["--device-flops", "-1", "--bandwidth", "1GB/s"], "out-of-range 0"),
    ],
)
def test_wrong_options_are_refused(file, arguments, expected):
    found = plan(file, *arguments)
    assert isinstance(found.exception, UsageError)
    assert_problem(found.exception.problem, expected)


def test_sizes_are_read_and_written():
    assert parse_bytes("80GiB", "x") == 80 * 2**30
    assert parse_bytes("50GB", "x") == 50e9
    assert parse_bytes("400Gbit", "x") == 50e9
    assert parse_bytes("8e9", "x") == 8e9
    assert unit_for(3 * 2**30) == ("GiB", 2.0**30)
    assert [format_size(value) for value in (0, 0.123, 12.34, 1234.5)] == ["0", "0.12", "12.3", "1234"]

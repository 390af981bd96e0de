"""ddp and fsdp on real processes: 1, 2 and 4 processes compute the same run, and any of them can resume it.

Modules:
    plugins/fastloop_plugins/strategies/ddp.py
    plugins/fastloop_plugins/strategies/fsdp.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from long_form import LONG
from safetensors.torch import load_file
from strategy_helpers import COMPILER, logged_norms, of_this_form, same, save_at_end
from strategy_runs import MODELS, all_of, data

from fastloop import Plugin, PluginError, checkpoint, hookimpl
from fastloop.testing import ProcessResult, assert_problem, expect_problem

pytestmark = [pytest.mark.slow, *COMPILER]

MICRO = {"micro_batch_size": 2}
UNCLIPPED: dict[str, Any] = {"train": MICRO | {"max_grad_norm": None, "log_every": 4}, "log": {}}
HSDP = {"fsdp": {"shard_within": 2}}
COMPILE = {"compile": {"backend": "aot_eager", "cache": False}}


def run(name: str, *plugins: Any, resume: str | None = None, step: int = 4, **more: Any) -> dict[str, Any]:
    """A run for ``strategy_runs.py``; ``resume`` names the run that it resumes from, at ``step``."""
    return {"name": name, "plugins": ["lr-scheduler", *plugins], "train": {}, "model": "deep", **more} | (
        {"resume": f"{resume}/checkpoints/step-{step:08d}"} if resume else {}
    )


PLAIN = [
    run("plain"),
    run("plain uneven", data="uneven"),
    run("plain stream", data="stream", train={"max_steps": 15}),
    run("plain weighted", data="weighted"),
    run("plain ema", {"ema": {"decay": 0.5}}),
    run("plain bf16", {"amp": {"dtype": "bf16"}}),
    run("plain eval", model_mode="eval"),
    run("plain unclipped", **UNCLIPPED),
    run("plain overflow", overflow=True),
]
TWO = [
    *(run(f"{name} 2", name) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 accumulated", name, train=MICRO, exchanges=True) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 uneven", name, train=MICRO, data="uneven") for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 stream", name, train=MICRO | {"max_steps": 15}, data="stream") for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 weighted", name, train=MICRO, data="weighted") for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 ema", name, {"ema": {"decay": 0.5}}) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 bf16", name, {"amp": {"dtype": "bf16"}}) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 compiled", name, COMPILE) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 best", name, {"checkpoint-best": {"monitor": "loss"}}) for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 eval", name, model_mode="eval") for name in ("ddp", "fsdp")),
    *(run(f"{name} 2 unclipped", name, **UNCLIPPED) for name in ("ddp", "fsdp")),
    run("ddp options", {"ddp": {"gradient_as_bucket_view": False, "bucket_cap_mb": 1}}, train=MICRO),
    run("ddp static", {"ddp": {"static_graph": True}}),
    run("ddp static refused", {"ddp": {"static_graph": True}}, train=MICRO),
    run("ddp compressed", {"ddp": {"compress": "bf16"}}),
    run("ddp compressed fp16", {"ddp": {"compress": "fp16"}}),
    run("ddp batch norm", "ddp", model="normed"),
    run("fsdp batch norm", {"fsdp": {"blocks": ["Linear"]}}, model="normed"),
    run("ddp unused refused", "ddp", model="unused"),
    run("ddp unused", {"ddp": {"find_unused_parameters": True}}, model="unused"),
    run("ddp overflow", "ddp", overflow=True),
    run("ddp overflow to ddp", "ddp", overflow=True, resume="ddp overflow"),
    run("fsdp held", {"fsdp": {"hold_gradients": True}}, train=MICRO, exchanges=True),
    run("fsdp bf16 weights", {"fsdp": {"param_dtype": "bf16"}}, model="uniform"),
    run("fsdp bf16 gradients", {"fsdp": {"reduce_dtype": "bf16"}}),
    run("fsdp fp32 weights", {"fsdp": {"param_dtype": "fp32"}}, {"amp": {"dtype": "bf16"}}),
    run("fsdp kept", {"fsdp": {"reshard_after_forward": False}}),
    run("fsdp classes", {"fsdp": {"blocks": ["LayerNorm", "Block"]}}),
    run("fsdp tied", {"fsdp": {"blocks": ["Linear"]}}),
    run("fsdp 2 async", "fsdp", "async-save"),
    run("fsdp no such class", {"fsdp": {"blocks": ["Linaer"]}}),
    run("fsdp meta", {"fsdp": {"meta_device": True}}),
    run("fsdp regional", "fsdp", {"compile": {"backend": "aot_eager", "cache": False, "regional": True}}),
    run("plain to fsdp 2", "fsdp", resume="plain"),
    run("fsdp 2 to fsdp 2", "fsdp", resume="fsdp 2"),
    run("fsdp 2 to ddp 2", "ddp", resume="fsdp 2"),
    run("ddp 2 to fsdp 2", "fsdp", resume="ddp 2"),
    run("fsdp 2 ema again", "fsdp", {"ema": {"decay": 0.5}}, resume="fsdp 2 ema"),
]
FOUR = [
    *(run(f"{name} 4", name) for name in ("ddp", "fsdp")),
    *(run(f"{name} 4 uneven", name, train={"micro_batch_size": 1}, data="uneven") for name in ("ddp", "fsdp")),
    run("fsdp 2 to fsdp 4", "fsdp", resume="fsdp 2"),
    run("ddp 2 to ddp 4", "ddp", resume="ddp 2"),
    run("hsdp 4", HSDP),
    run("hsdp 4 uneven", HSDP, train={"micro_batch_size": 1}, data="uneven"),
    run("hsdp 4 accumulated", HSDP, train={"micro_batch_size": 1}, exchanges=True),
    run(
        "hsdp 4 held",
        {"fsdp": {"shard_within": 2, "hold_gradients": True}},
        train={"micro_batch_size": 1},
        exchanges=True,
    ),
    run("fsdp 4 of one group", {"fsdp": {"shard_within": 4}}),
    run("hsdp 4 meta", {"fsdp": {"shard_within": 2, "meta_device": True}}),
    run("hsdp 4 async", HSDP, "async-save"),
    run("fsdp 2 async to fsdp 4", "fsdp", resume="fsdp 2 async"),
    run("hsdp 4 refused", {"fsdp": {"shard_within": 3}}),
    run("hsdp 4 to hsdp 4", HSDP, resume="hsdp 4"),
    run("fsdp 2 to hsdp 4", HSDP, resume="fsdp 2"),
    run("fsdp 2 uneven to ddp 4", "ddp", resume="fsdp 2 uneven", data="uneven"),
]
TWO_AFTER_FOUR = [run("hsdp 4 to ddp 2", "ddp", resume="hsdp 4"), run("hsdp 4 to fsdp 2", "fsdp", resume="hsdp 4")]
AFTER = [
    run("hsdp 4 to ddp 2 to plain", resume="hsdp 4 to ddp 2", step=8),
    *(run(f"{name} to plain", resume=name) for name in ("ddp 2", "fsdp 2", "ddp 4", "fsdp 4", "hsdp 4")),
    run("fsdp 2 stream to plain", resume="fsdp 2 stream", data="stream", train={"max_steps": 15}),
    run("fsdp 2 ema to plain", {"ema": {"decay": 0.5}}, resume="fsdp 2 ema"),
    run("fsdp 2 async to plain", resume="fsdp 2 async"),
    run("one ddp", "ddp"),
    run("one fsdp", "fsdp"),
]

LONG_ONLY = {
    "ddp compressed fp16",
    "ddp 2 eval",
    "fsdp classes",
    "ddp 4 uneven",
    "fsdp 4 uneven",
    "fsdp 4 of one group",
}
LONG_ONLY |= {"ddp 2 to ddp 4", "fsdp 2 to fsdp 4", "hsdp 4 held", "hsdp 4 meta", "fsdp 2 async to plain"}
LONG_ONLY |= {"ddp 2 bf16", "ddp 2 best", "ddp 2 compiled", "ddp 2 ema", "fsdp 2 bf16", "fsdp 2 best"}
LONG_ONLY |= {"ddp 2 stream", "ddp 2 uneven", "ddp 2 weighted", "ddp 4", "ddp 4 to plain"}
LONG_ONLY |= {"hsdp 4 uneven", "hsdp 4 async", "hsdp 4 to fsdp 2", "hsdp 4 to plain"}
"""Runs of the long form: another one has the same option, the other strategy or more.
``test_plugins_on_two_processes.py`` compares `amp`, `checkpoint-best`, `compile` and `ema` under both strategies."""
chosen = partial(of_this_form, long_only=LONG_ONLY)
STARTS = [(1, PLAIN), (2, chosen(TWO)), (4, chosen(FOUR)), (2, chosen(TWO_AFTER_FOUR)), (1, chosen(AFTER))]
"""Number of processes, and the runs of one start."""
save_at_end(
    (runs for _, runs in STARTS),
    16,
    keep=[run["name"] for _, runs in STARTS for run in runs if "exchanges" in run or "async" in run["name"]],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def ended(processes: Callable[..., list[ProcessResult]], folder: Path) -> list[ProcessResult]:
    """The first process of each start: one, two and four processes, then one that resumes their runs."""
    return [processes(count, all_of, runs, folder=folder)[0] for count, runs in STARTS]


@pytest.fixture(scope="module")
def results(ended: list[ProcessResult]) -> dict[str, dict[str, Any]]:
    """Results by name."""
    return {name: result for process in ended for name, result in process.result.items()}


@pytest.mark.parametrize("name", chosen(["ddp 2", "ddp 4", "fsdp 2", "fsdp 4", "hsdp 4"]))
def test_numbers_are_those_of_one_process(results, folder, name):
    same(results[name], results["plain"], 1e-6)
    assert len(results["plain"]["losses"]) == 16
    assert sum(results["plain"]["losses"][-4:]) < 0.9 * sum(results["plain"]["losses"][:4])  # it learns
    weights, plain = (load_file(folder / run / "model" / "model.safetensors") for run in (name, "plain"))
    assert weights.keys() == plain.keys()
    assert all(torch.allclose(weights[key], plain[key], rtol=1e-5, atol=1e-6) for key in plain)


@pytest.mark.parametrize(
    ("name", "plain"),
    chosen([
        *((f"{name} 2 {what}", plain) for name in ("ddp", "fsdp") for what, plain in [
            ("accumulated", "plain"), ("uneven", "plain uneven"), ("stream", "plain stream"),
            ("weighted", "plain weighted"), ("ema", "plain ema"), ("compiled", "plain"),
            ("eval", "plain"), ("best", "plain"),
        ]),
        *((f"{name} 4 uneven", "plain uneven") for name in ("ddp", "fsdp", "hsdp")),
        ("hsdp 4 accumulated", "plain"), ("hsdp 4 held", "plain"), ("hsdp 4 meta", "plain"),
        ("fsdp 4 of one group", "plain"), ("ddp options", "plain"), ("ddp static", "plain"),
        ("fsdp held", "plain"), ("fsdp kept", "plain"), ("fsdp classes", "plain"), ("fsdp meta", "plain"),
        ("fsdp regional", "plain"),
    ]),
)  # fmt: skip
def test_options_and_other_plugins_change_no_numbers(results, name, plain):
    same(results[name], results[plain], 1e-6)


@pytest.mark.parametrize("name", ["fsdp 2 compiled", "fsdp regional"])
def test_sharded_blocks_are_compiled_without_a_graph_break(results, name):
    counts = results[name]["compile"]
    assert counts["failure"] is None
    assert counts["graphs"] > 0
    assert counts["graph_breaks"] == 0


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_gradient_norm_is_that_of_one_process_and_is_logged_without_clipping(results, folder, name):
    same(results[f"{name} 2 unclipped"], results["plain unclipped"], 1e-6)
    for run in (f"{name} 2 unclipped", "plain unclipped"):
        assert logged_norms(folder / run) == {step: results[run]["norms"][step - 1] for step in (4, 8, 12, 16)}


@pytest.mark.parametrize(
    "name",
    chosen(
        [
            "ddp 2 bf16",
            "fsdp 2 bf16",
            "ddp compressed",
            "ddp compressed fp16",
            "fsdp bf16 weights",
            "fsdp bf16 gradients",
            "fsdp fp32 weights",
        ]
    ),
)
def test_half_precision_is_near_fp32_and_is_not_it(results, name):
    same(results[name], results["plain"], 3e-2, keys=("losses", "metrics"))
    assert results[name]["losses"] != pytest.approx(results["plain"]["losses"], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    chosen(
        [
            *(f"{name} to plain" for name in ("ddp 2", "fsdp 2", "ddp 4", "fsdp 4", "hsdp 4")),
            *("hsdp 4 to hsdp 4", "hsdp 4 to fsdp 2", "fsdp 2 to hsdp 4", "hsdp 4 to ddp 2"),
            *(
                "plain to fsdp 2",
                "fsdp 2 to fsdp 2",
                "fsdp 2 to ddp 2",
                "ddp 2 to fsdp 2",
                "fsdp 2 to fsdp 4",
                "ddp 2 to ddp 4",
            ),
            *("fsdp 2 async to fsdp 4", "fsdp 2 async to plain"),
        ]
    ),
)
def test_resume_under_another_strategy_and_number_of_processes(results, name):
    assert len(results[name]["losses"]) == 12
    same(results[name], results["plain"], 1e-6)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fsdp 2 uneven to ddp 4", "plain uneven"),
        ("fsdp 2 stream to plain", "plain stream"),
        ("fsdp 2 ema to plain", "plain ema"),
        ("fsdp 2 ema again", "plain ema"),
    ],
)
def test_resume_under_another_strategy_restores_data_position_and_plugin_state(results, name, plain):
    same(results[name], results[plain], 1e-6)


def test_hybrid_shards_resume_with_ddp_and_then_in_one_process(results):
    assert len(results["hsdp 4 to ddp 2 to plain"]["losses"]) == 8
    same(results["hsdp 4 to ddp 2 to plain"], results["plain"], 1e-6)


@pytest.mark.parametrize("name", ["fsdp 2", "hsdp 4"])
def test_resume_with_same_processes_is_bitwise(results, name):
    assert results[f"{name} to {name}"]["losses"] == results[name]["losses"][4:]


@pytest.mark.parametrize("name", ["one ddp", "one fsdp"])
def test_in_one_process_a_strategy_changes_nothing(results, name):
    for key in ("losses", "norms", "metrics"):
        assert results[name][key] == results["plain"][key]


def test_gradients_are_exchanged_once_a_step(results):
    """16 steps of two micro-steps: ddp exchanges once per step, and fsdp by default at each micro-step (three blocks
    and the rest)."""
    names = chosen(["ddp 2 accumulated", "fsdp 2 accumulated", "fsdp held", "hsdp 4 accumulated", "hsdp 4 held"])
    sums = {name: results[name]["exchanges"]["gloo:all_reduce"] for name in names}
    # The loss, weights and requests of each step; of evaluations; before and after saves; requests of the start; of
    # the end.
    numbers = 3 * 16 + 3 * 2 + 2 * 5 + 1 + 1
    assert sums["ddp 2 accumulated"] == 16 + numbers
    # fsdp agrees on the order of the blocks, and their end, in the first step and evaluation
    norms, numbers = 16, numbers + 2 * 4
    assert sums["fsdp held"] == 16 * 4 + norms + numbers  # gloo has no reduce-scatter of its own
    assert sums["fsdp 2 accumulated"] == 2 * 16 * 4 + norms + numbers
    # within a group each time, between groups once a step
    assert sums["hsdp 4 accumulated"] == 2 * 16 * 4 + 16 * 4 + norms + numbers
    assert not LONG or sums["hsdp 4 held"] == 16 * 4 + 16 * 4 + norms + numbers


def test_an_overflow_on_one_process_skips_the_step_on_all(results):
    """Each step, all processes have the same loss scale: see ``Overflow``."""
    ours, resumed, plain = (results[name] for name in ("ddp overflow", "ddp overflow to ddp", "plain overflow"))
    assert ours["scales"] == plain["scales"] == [1024.0] * 2 + [512.0] * 4 + [1024.0] * 4 + [2048.0] * 4 + [4096.0] * 2
    assert ours["skipped"] == plain["skipped"] == 1
    assert resumed["scales"] == ours["scales"][4:]
    assert resumed["losses"] == ours["losses"][4:]
    same(ours, plain, 1e-2, keys=("losses", "metrics"))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_batch_norm_is_evaluated_with_the_statistics_that_are_exported(results, folder, name):
    model = MODELS["normed"]().eval()
    model.load_state_dict(load_file(folder / f"{name} batch norm/model/model.safetensors"))
    inputs, targets = data(30, 1).tensors
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    assert results[f"{name} batch norm"]["metrics"][-1] == pytest.approx(loss.item(), rel=1e-6)


def test_weights_that_are_not_used_are_named_or_found(results):
    error = results["ddp unused refused"]["error"]
    for part in ("step 1", "unused (weight, bias)", "Set plugins.ddp.find_unused_parameters: true"):
        assert part in error
    assert "error" not in results["ddp unused"]


def test_a_graph_that_is_static_cannot_be_accumulated_over(results):
    assert (
        "plugins.ddp.static_graph: torch cannot accumulate gradients with it" in results["ddp static refused"]["error"]
    )


def test_a_class_that_the_model_lacks_is_refused(results):
    assert (
        "plugins.fsdp.blocks: the model has no module of class 'Linaer'. Did you mean 'Linear'?"
        in results["fsdp no such class"]["error"]
    )


def test_processes_that_groups_cannot_share_are_refused(results):
    message = "recipe: plugins.fsdp.shard_within: 4 processes are not a multiple of 3. Expected one of: 2, 4."
    assert results["hsdp 4 refused"]["error"].endswith(message)


def test_offload_to_the_host_is_refused_on_a_cpu(cli):
    code, _, err = cli(
        "plan", "quickstart", "train.device=cpu", "plugins.fsdp.cpu_offload=true", "--with", "fsdp", "--nproc", "2"
    )
    assert code == 2
    assert_problem(err, "requirement-missing 'fsdp' cuda xpu cpu --without fsdp")


class Half(Plugin):
    """Sets the precision, as ``amp`` does where the device can compute in fp16."""

    name = "half"

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {"mixed_precision": "fp16"}


def test_fp16_is_refused_with_fsdp(tiny_run):
    with expect_problem("unsupported-precision plugins.fsdp: bf16 'fp16'", PluginError):
        tiny_run(["fsdp", Half()], device="cpu")


def test_tied_weights_in_two_blocks_are_refused(results):
    assert "the weight 'tied.weight' is tied to one outside its block" in results["fsdp tied"]["error"]


def test_a_sharded_checkpoint_holds_no_pickle(folder, results):
    saved = folder / "fsdp 2/checkpoints/step-00000004"
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors"}
    assert len([path for path in files if path.parent.name == "sharded"]) >= 2
    model, state = checkpoint.read(saved)
    plain_model, plain_state = checkpoint.read(folder / "plain/checkpoints/step-00000004")
    assert all(torch.allclose(model[name], plain_model[name], rtol=1e-5, atol=1e-6) for name in plain_model | model)
    assert state["optimizer"]["state"].keys() == plain_state["optimizer"]["state"].keys()


@pytest.mark.parametrize("name", ["fsdp 2", "hsdp 4"] if LONG else ["fsdp 2"])
def test_shards_saved_in_the_background_are_those_saved_in_the_foreground(results, folder, name):
    assert results[f"{name} async"]["losses"] == results[name]["losses"]
    for step in (4, 8, 12, 16):
        ours, theirs = (folder / run / "checkpoints" / f"step-{step:08d}" for run in (f"{name} async", name))
        assert checkpoint.verify(ours) is None
        names = sorted(path.name for path in (theirs / "sharded").iterdir())
        assert len(names) == (2 if name == "fsdp 2" else 4)
        for file in names:
            background, foreground = load_file(ours / "sharded" / file), load_file(theirs / "sharded" / file)
            assert background.keys() == foreground.keys()
            assert all(background[key].equal(foreground[key]) for key in foreground), (step, file)


def test_nothing_is_said_that_the_user_need_not_know(ended):
    said = [line for process in ended[1:3] for line in process.output.splitlines()]
    # the profiler of some releases of torch warns
    warnings = [line for line in said if not re.search("profiler|_warn_once|gpuGetDeviceCount", line)]
    assert warnings == 2 * [
        "batch norm uses only the samples of its own process, so results depend on the number of processes."
    ]

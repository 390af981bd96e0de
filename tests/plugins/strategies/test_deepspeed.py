"""deepspeed: ZeRO on two real processes computes what one process computes, and its checkpoints are like any run's.

Modules:
    plugins/fastloop_plugins/strategies/_deepspeed_state.py
    plugins/fastloop_plugins/strategies/deepspeed.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from long_form import LONG
from safetensors import safe_open
from safetensors.torch import load_file
from strategy_helpers import COMPILER, logged_norms, same, save_at_end
from strategy_runs import all_of

from fastloop import checkpoint
from fastloop.testing import ProcessResult

pytestmark = [
    pytest.mark.slow,
    *COMPILER,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

STAGES = (0, 1, 2, 3)
AUTOCAST, HALF_STAGES = (STAGES, (1, 2, 3)) if LONG else ((1, 3), (3,))
"""Stages that are tried in bf16, by autocast and by DeepSpeed: with sharded weights, and with whole ones."""
WHOLE, SHARDED, OFFLOADED = (STAGES, STAGES, (1, 2, 3)) if LONG else ((0, 3), (1, 3), (2,))
"""Stages of runs in which others do the same: with weights whole and sharded; with gradients whole and sharded; with
the optimizer on the host."""
TO, FROM = (STAGES, STAGES) if LONG else ((0, 2), (0, 1, 2))
"""Stages that resume from a run of one process, and those that it resumes from. Other runs resume from one stage in
another, and stage 3 from ``fsdp`` and back."""
WITH_FSDP = (1, 3) if LONG else (3,)
FSDP = {"fsdp": {"blocks": ["Linear"]}}
MICRO = {"micro_batch_size": 2}  # two processes, two micro-steps
UNCLIPPED: dict[str, Any] = {"train": MICRO | {"max_grad_norm": None, "log_every": 4}, "log": {}}
BF16 = {"plugins": ["lr-scheduler", {"amp": {"dtype": "bf16"}}]}
HALF = '{"bf16": {"enabled": true}, "train_batch_size": "auto"}'
TOO_HIGH = '{"fp16": {"initial_scale_power": 19}}'


def deepspeed(
    name: str, stage: int, resume: str | None = None, train: dict[str, Any] = MICRO, **more: Any
) -> dict[str, Any]:
    """A run for ``strategy_runs.py``; ``resume`` names the run that it resumes from, at step 4."""
    options = {"stage": stage, **more.pop("options", {})}
    run = {
        "name": name,
        "train": train,
        **more,
        "plugins": [*more.get("plugins", ["lr-scheduler"]), {"deepspeed": options}],
    }
    return run | ({"resume": f"{resume}/checkpoints/step-00000004"} if resume else {})


RUNS = [
    *(deepspeed(f"stage {stage}", stage) for stage in STAGES),
    *(deepspeed(f"plain to {stage}", stage, "plain") for stage in TO),
    *(deepspeed(f"unclipped {stage}", stage, **UNCLIPPED) for stage in SHARDED),
    *(deepspeed(f"twice {stage}", stage, twice="replace") for stage in SHARDED),
    *(
        deepspeed(f"twice offloaded {stage}", stage, twice="replace", options={"offload_optimizer": True})
        for stage in OFFLOADED
    ),
    *(deepspeed(f"added {stage}", stage, twice="add") for stage in STAGES),
    *(deepspeed(f"own loss {stage}", stage, model="own loss", data="named") for stage in WHOLE),
    deepspeed("1 to 3", 3, "stage 1"),
    deepspeed("3 to 2", 2, "stage 3"),
    *(
        {
            "name": f"{stage} to fsdp",
            "plugins": ["lr-scheduler", FSDP],
            "resume": f"stage {stage}/checkpoints/step-00000004",
        }
        for stage in WITH_FSDP
    ),
    {"name": "fsdp", "plugins": ["lr-scheduler", FSDP]},
    *(deepspeed(f"fsdp to {stage}", stage, "fsdp") for stage in WITH_FSDP),
    *(deepspeed(f"bf16 {stage}", stage, **BF16) for stage in AUTOCAST),
    deepspeed("bf16 outputs", 2, model="uniform", **BF16),  # the last layer's, and no operation in fp32 follows
    *(deepspeed(f"half {stage}", stage, options={"config": "half.json"}, **BF16) for stage in HALF_STAGES),
    deepspeed("half 3 to 2", 2, "half 3", options={"config": "half.json"}, **BF16),
    deepspeed("offloaded 2", 2, options={"offload_optimizer": True}),
    deepspeed("offloaded 3", 3, options={"offload_optimizer": True, "offload_parameters": True}),
    deepspeed("async 3", 3, plugins=["lr-scheduler", "async-save"]),
    deepspeed("async 3 to 1", 1, "async 3"),
    deepspeed("tuned 2", 2, options={"overlap_comm": False, "bucket_size": 64}),
    deepspeed("fp16 3", 3, fp16=True, options={"config": "too_high.json"}),
    deepspeed("fp16 3 to 1", 1, "fp16 3", fp16=True),
    deepspeed("from eval mode", 2, model_mode="eval", train={}),
    deepspeed("compiled 2", 2, plugins=["lr-scheduler", {"compile": {"backend": "aot_eager", "cache": False}}]),
    deepspeed("ema 3", 3, plugins=["ema"]),
    deepspeed("ema 2", 2, plugins=["lr-scheduler", {"ema": {"decay": 0.5}}]),
    deepspeed("odd accumulation", 2, options={"config": "accumulation.json"}),
    deepspeed("refused by DeepSpeed", 2, options={"config": "bad_zero.json"}),
]
save_at_end([RUNS], 16, keep=[f"stage {stage}" for stage in STAGES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are, and DeepSpeed's own options."""
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, text in {
        "half.json": HALF,
        "too_high.json": TOO_HIGH,
        "accumulation.json": '{"gradient_accumulation_steps": 7}',
        "bad_zero.json": '{"zero_optimization": {"reduce_bucket_size": "many"}}',
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def ended(processes: Callable[..., list[ProcessResult]], folder: Path) -> list[ProcessResult]:
    """The first process of each start: runs on one process, runs on two, then runs on one process that resume them."""
    plain, ema = {"plugins": ["lr-scheduler"]}, {"plugins": ["lr-scheduler", {"ema": {"decay": 0.5}}]}
    unclipped = {"name": "plain unclipped", "train": {"max_grad_norm": None}, **plain}
    added = {"name": "plain added", "twice": "add", **plain}
    own_loss = {"name": "plain own loss", "model": "own loss", "data": "named", **plain}
    before = [
        {"name": "plain", "train": {"micro_batch_size": 4}, **plain},
        unclipped,
        {"name": "plain ema", **ema},
        own_loss,
        added,
    ]
    after = [
        {"name": f"{stage} to plain", "resume": f"stage {stage}/checkpoints/step-00000004", **plain} for stage in FROM
    ]
    return [processes(count, all_of, runs, folder=folder)[0] for count, runs in ((1, before), (2, RUNS), (1, after))]


@pytest.fixture(scope="module")
def result(ended: list[ProcessResult]) -> Callable[[str], dict[str, Any]]:
    """A run's result by name."""
    found = {name: run for process in ended for name, run in process.result.items()}

    def of(name: str) -> dict[str, Any]:
        return found[name]

    return of


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_gives_the_numbers_of_one_process(result, folder, stage):
    same(result(f"stage {stage}"), result("plain"), 1e-6)
    assert len(result("plain")["losses"]) == 16
    assert sum(result("plain")["losses"][-4:]) < 0.8 * sum(result("plain")["losses"][:4])  # it learns
    weights, plain = (load_file(folder / name / "model" / "model.safetensors") for name in (f"stage {stage}", "plain"))
    assert weights.keys() == plain.keys()
    assert all(torch.allclose(weights[name], plain[name], rtol=1e-5, atol=1e-6) for name in plain)


@pytest.mark.parametrize("stage", SHARDED)
def test_the_gradient_norm_is_that_of_one_process_and_is_logged_without_clipping(result, folder, stage):
    run = result(f"unclipped {stage}")
    same(run, result("plain unclipped"), 1e-6)
    assert logged_norms(folder / f"unclipped {stage}") == {step: run["norms"][step - 1] for step in (4, 8, 12, 16)}


@pytest.mark.parametrize("stage", WHOLE)
def test_a_loss_that_the_model_returns_is_not_divided_by_deepspeed(result, stage):
    same(result(f"own loss {stage}"), result("plain own loss"), 1e-6)


@pytest.mark.parametrize(
    "name", [*(f"twice {stage}" for stage in SHARDED), *(f"twice offloaded {stage}" for stage in OFFLOADED)]
)
def test_a_second_pass_replaces_the_gradients_that_zero_grad_dropped(result, name):
    same(result(name), result("plain"), 1e-6)


def test_a_second_pass_adds_to_the_gradients_or_is_refused(result):
    for stage in (0, 3):
        same(result(f"added {stage}"), result("plain added"), 1e-6)
    for stage in (1, 2):
        assert (
            f"plugins.deepspeed.stage: {stage} keeps only the gradients of the last run.accumulate_grad"
            in result(f"added {stage}")["error"]
        )


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_that_of_a_run_without_it(ended, folder, stage):
    (model, state), (plain_model, plain_state) = (
        checkpoint.read(folder / name / "checkpoints" / "step-00000008") for name in (f"stage {stage}", "plain")
    )
    assert model.keys() == plain_model.keys()
    assert all(torch.allclose(model[name], plain_model[name], rtol=1e-5, atol=1e-6) for name in plain_model)
    optimizer, plain = state["optimizer"], plain_state["optimizer"]
    assert optimizer["param_groups"] == plain["param_groups"]
    assert optimizer["state"].keys() == plain["state"].keys()
    for number, entry in plain["state"].items():
        assert optimizer["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.allclose(optimizer["state"][number][key], value, rtol=1e-4, atol=1e-8), (number, key)


@pytest.mark.parametrize("name", [*(f"stage {stage}" for stage in STAGES), "async 3"])
def test_every_process_writes_its_shards(ended, folder, name):
    saved = folder / name / "checkpoints" / "step-00000008"
    files = {path.name: path.stat().st_size for path in (saved / "sharded").glob("*")}
    if name == "stage 0":
        assert not files  # each process has all weights
        return
    assert len(files) == 2
    with safe_open(saved / "model.safetensors", "pt") as whole:
        assert set(whole.keys()) == {"scale"}  # a buffer
    for key in ("model.first.weight", "state.optimizer.state.0.exp_avg"):
        rows = []
        for file in sorted(files):
            with safe_open(saved / "sharded" / file, "pt") as part:
                rows.append(part.get_slice(key).get_shape()[0])
        assert rows == [7, 6], key


@pytest.mark.parametrize(
    "name",
    [
        *(f"plain to {stage}" for stage in TO),
        *(f"{stage} to plain" for stage in FROM),
        *(f"{stage} to fsdp" for stage in WITH_FSDP),
        *(f"fsdp to {stage}" for stage in WITH_FSDP),
        *("1 to 3", "3 to 2"),
    ],
)
def test_resume_under_another_stage_or_none(result, name):
    assert len(result(name)["losses"]) == 12
    same(result(name), result("plain"), 1e-6)


@pytest.mark.parametrize(
    "name", ["offloaded 2", "offloaded 3", "async 3", "async 3 to 1", "tuned 2", "from eval mode", "compiled 2"]
)
def test_options_change_no_numbers(result, name):
    same(result(name), result("plain"), 1e-6)


def test_a_model_that_comes_in_eval_mode_is_trained_in_train_mode(result):
    assert result("from eval mode")["modes"] == [True] * 16


def test_the_model_is_compiled_in_one_piece(result):
    counts = result("compiled 2")["compile"]
    assert counts["failure"] is None
    assert counts["graphs"] == 2  # one to train, one to evaluate


@pytest.mark.parametrize(
    "name", [*(f"bf16 {stage}" for stage in AUTOCAST), *(f"half {stage}" for stage in HALF_STAGES)]
)
def test_bf16_is_near_fp32_and_is_not_it(result, name):
    same(result(name), result("plain"), 3e-2)
    assert result(name)["losses"] != pytest.approx(result("plain")["losses"], rel=1e-5)


def test_the_loss_of_outputs_in_bf16_is_computed_in_fp32(result):
    losses = torch.tensor(result("bf16 outputs")["losses"])
    assert not torch.equal(losses, losses.bfloat16().float())


def test_weights_in_half_precision_are_saved_in_fp32_and_go_on_as_if_not_interrupted(result, folder):
    model, _ = checkpoint.read(folder / "half 3" / "checkpoints" / "step-00000004")
    assert all(tensor.dtype == torch.float32 for tensor in model.values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in model.values())
    assert result("half 3 to 2")["losses"] == pytest.approx(result("half 3")["losses"][4:], rel=1e-4)


def test_fp16_skips_steps_that_overflow_and_keeps_its_scale(result, folder):
    run, resumed = result("fp16 3"), result("fp16 3 to 1")
    assert "error" not in run, run["error"]
    assert run["skipped"] >= 3
    assert run["skipped"] == run["norms"].count(float("inf"))
    _, state = checkpoint.read(folder / "fp16 3" / "checkpoints" / "step-00000004")
    assert state["scheduler"]["last_epoch"] == 4 - sum(norm == float("inf") for norm in run["norms"][:4])
    assert state["scaler"]["scale"] == 2.0 ** (19 - sum(norm == float("inf") for norm in run["norms"][:4]))
    assert resumed["norms"][:4] == pytest.approx(run["norms"][4:8], rel=1e-2)


def test_ema_works_where_the_weights_are_whole_and_is_refused_where_they_are_not(result):
    same(result("ema 2"), result("plain ema"), 1e-6)
    assert "'deepspeed' and 'ema': stage 3 shards the weights" in result("ema 3")["error"]


def test_contradiction_found_at_run_time_is_rejected(result):
    message = result("odd accumulation")["error"]
    assert "accumulation.json: gradient_accumulation_steps: is 7, and the number of micro-steps is 2" in message
    assert "bad_zero.json: DeepSpeed refuses this" in result("refused by DeepSpeed")["error"]
    assert "reduce_bucket_size" in result("refused by DeepSpeed")["error"]


@pytest.mark.parametrize("name", [run["name"] for run in RUNS])
def test_no_variable_is_left_in_the_environment(result, name):
    assert result(name).get("environment", []) == []


def test_nothing_is_said_that_the_user_need_not_know(ended):
    assert ended[1].output == ""

"""Processes that use different layers in a step, or leave one out, get the weights of one process and plain torch.

Modules:
    plugins/fastloop_plugins/strategies/_deepspeed_gradients.py
    plugins/fastloop_plugins/strategies/_fsdp_reduction.py
    plugins/fastloop_plugins/strategies/_gradients.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from strategy_helpers import COMPILER, same
from strategy_runs import all_of

from fastloop import checkpoint

pytestmark = [pytest.mark.slow, *COMPILER]

MICRO = {"micro_batch_size": 2}
CASES = ("routed", "routed unequal", "skipped")
ALL, ROUTED, UNEQUAL, SKIPPED = CASES, CASES[:1], CASES[1:2], CASES[2:]
STRATEGIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "ddp": ({"ddp": {"find_unused_parameters": True}}, ROUTED),
    "fsdp": ("fsdp", ALL),
    "fsdp held": ({"fsdp": {"hold_gradients": True}}, ROUTED),
    "fsdp nested": ({"fsdp": {"blocks": ["Block", "LayerNorm"]}}, SKIPPED),
}
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
if HAS_DEEPSPEED:
    STRATEGIES |= {
        "deepspeed 0": ({"deepspeed": {"stage": 0}}, ROUTED),
        "deepspeed 1": ({"deepspeed": {"stage": 1}}, ROUTED),
        "deepspeed 1 overlapped": ({"deepspeed": {"stage": 1, "overlap_comm": True, "bucket_size": 64}}, UNEQUAL),
        "deepspeed 2": ({"deepspeed": {"stage": 2}}, ALL),
        "deepspeed 2 offloaded": ({"deepspeed": {"stage": 2, "offload_optimizer": True}}, ROUTED),
        "deepspeed 3": ({"deepspeed": {"stage": 3}}, ALL),
        "deepspeed 3 gathered": ({"deepspeed": {"stage": 3, "config": "gathered.json"}}, SKIPPED),
    }
GATHERED = '{"zero_optimization": {"stage3_param_persistence_threshold": 0}}'
"""Gather the small weights of these models, too, module by module."""


def run(name: str, plugin: Any, case: str, resume: str | None = None) -> dict[str, Any]:
    """A run for ``strategy_runs.py``; ``resume`` names the run that it resumes from, at step 4."""
    found = {"name": f"{name}, {case}", "plugins": [plugin] if plugin else [], "model": case, "train": MICRO}
    return found | ({"resume": f"{resume}, {case}/checkpoints/step-00000004"} if resume else {})


PLAIN = [run("plain", None, case) for case in CASES]
TWO = [run(name, plugin, case) for name, (plugin, cases) in STRATEGIES.items() for case in cases]
RESUMED = {"plain to fsdp": ("fsdp", "plain")}
if HAS_DEEPSPEED:
    RESUMED |= {f"plain to {stage}": ({"deepspeed": {"stage": stage}}, "plain") for stage in (2, 3)}
    RESUMED |= {"1 to 3": ({"deepspeed": {"stage": 3}}, "deepspeed 1"), "3 to fsdp": ("fsdp", "deepspeed 3")}
TWO += [run(name, plugin, "routed", resume) for name, (plugin, resume) in RESUMED.items()]
AFTER = [
    run(f"{name} to plain", None, "routed", name)
    for name in STRATEGIES
    if name in ("fsdp", "deepspeed 2", "deepspeed 3")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    folder = tmp_path_factory.mktemp("unused")
    (folder / "gathered.json").write_text(GATHERED)
    return folder


@pytest.fixture(scope="module")
def results(processes: Callable[..., list[Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Results of the main process by name. The limit ends processes that wait for each other."""
    starts = ((1, PLAIN), (2, TWO), (1, AFTER))
    ended = [processes(count, all_of, runs, folder=folder)[0] for count, runs in starts]
    return {name: result for process in ended for name, result in process.result.items()}


@pytest.mark.parametrize("name", [run["name"] for run in (*TWO, *AFTER)])
def test_weights_losses_and_optimizer_state_are_those_of_one_process(results, folder, name):
    plain = f"plain, {name.partition(', ')[2]}"
    same(results[name], results[plain], 1e-5)
    weights, expected = (load_file(folder / run / "model" / "model.safetensors") for run in (name, plain))
    assert max((weights[key] - expected[key]).abs().max().item() for key in expected) < 1e-6
    states = [
        checkpoint.read(folder / run / "checkpoints" / "step-00000012")[1]["optimizer"]["state"]
        for run in (name, plain)
    ]
    ours, theirs = states
    assert ours.keys() == theirs.keys()  # a layer that was never used has none
    # used always, in half of the steps, or by chance
    assert {entry["step"].item() for entry in theirs.values()} > {6.0, 12.0}
    for number, entry in theirs.items():
        for key, value in entry.items():
            assert ours[number][key].allclose(value, rtol=1e-4, atol=1e-7), (number, key)


@pytest.mark.skipif(not HAS_DEEPSPEED, reason="deepspeed is not installed")
def test_a_layer_that_one_process_leaves_out_is_refused_where_backward_calls_it_again(processes, folder):
    plugins = [{"deepspeed": {"stage": 3}}, "activation-checkpointing"]
    ended = processes(2, all_of, [run("refused", None, "skipped") | {"plugins": plugins}], folder=folder)
    errors = [process.result["refused, skipped"]["error"] for process in ended]
    (named,) = [error for error in errors if error.startswith("PluginError")]  # the other process lost the connection
    assert "called 'blocks.1' where no process did in its first forward pass" in named or "left out 'blocks." in named
    assert named.endswith("Use ddp with find_unused_parameters, or plugins.deepspeed.stage: 2.")


@pytest.mark.parametrize(("name", "micro"), [("all at once", 4), ("accumulated", 2)])
def test_ddp_refuses_a_layer_that_one_process_leaves_out(processes, tmp_path, name, micro):
    """The process that leaves it out raises, before a collective operation that the other process does not call."""
    spec = {"name": name, "plugins": ["ddp"], "model": "left out", "train": {"micro_batch_size": micro}}
    first, second = processes(2, all_of, [spec], folder=tmp_path, limit=120.0)
    assert first.result[name]["error"].startswith("ProcessLost: process 0 of 2")
    error = second.result[name]["error"]
    for part in ("step 3", "middle (weight, bias)", "on process 1", "Set plugins.ddp.find_unused_parameters: true"):
        assert part in error


NEEDS_GRADIENTS: list[tuple[Any, int]] = [
    ("ddp", 4),
    ("ddp", 2),
    ({"ddp": {"find_unused_parameters": True}}, 4),
    ({"ddp": {"static_graph": True}}, 4),
    ("fsdp", 4),
    ({"fsdp": {"hold_gradients": True}}, 2),
]
"""Strategies that need a gradient on each process, and the samples of a micro-batch."""
if HAS_DEEPSPEED:
    NEEDS_GRADIENTS += [({"deepspeed": {"stage": stage}}, 4) for stage in (1, 2)]


@pytest.mark.parametrize("model", ["detached", "detached everywhere"])
@pytest.mark.parametrize(("plugin", "micro"), NEEDS_GRADIENTS)
def test_a_loss_that_depends_on_no_weight_is_refused(processes, tmp_path, model, plugin, micro):
    spec = {"name": "detached", "plugins": [plugin], "model": model, "train": {"micro_batch_size": micro}}
    ended = processes(2, all_of, [spec], folder=tmp_path, limit=120.0)
    first, second = (process.result["detached"]["error"] for process in ended)
    for part in ("step 3", "does not depend on any trained parameter", "on process 1", "Compute the loss from"):
        assert part in second
    if model == "detached":
        assert first.startswith("ProcessLost: process 0 of 2")
    else:
        assert "does not depend on any trained parameter of the model on process 0" in first

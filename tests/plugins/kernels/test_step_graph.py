"""The plugin ``step-graph``: a replayed step computes the numbers of one without a graph, to the bit.

On a CPU, ``OperationRecorder`` stands for CUDA graphs: it repeats a step's operations on the same tensors.

Modules:
    plugins/fastloop_plugins/kernels/_recorded_step.py
    plugins/fastloop_plugins/kernels/step_graph.py
"""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from operation_recorder import OperationRecorder
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training_runs import execute
from varlen_helpers import kernels_on_cpu

from fastloop import Output, Plugin, PluginError, Trainer, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import LANGUAGE, TEXTS, assert_problem, expect_problem, tiny_data, tiny_model, write_texts
from fastloop.testing.runs import STOPS_AT, InterruptAtStep
from fastloop_plugins.kernels.step_graph import WARM_UP, StepGraph

STATE = 1
"""Steps until the optimizer has its state, which begins the warm-up anew."""


class Recorded(StepGraph):
    """Records on a CPU."""

    requirements = ()
    recorder_class = OperationRecorder


class Direct(Recorded):
    """Computes every step without a graph."""

    @hookimpl
    def check_run(self, run: Any) -> None:
        super().check_run(run=run)
        self.may_record = lambda *_: False


def train(tiny_run: Any, plugin: Plugin | None, plugins: Any = (), **arguments: Any) -> Any:
    """Trains a tiny model with dropout by AdamW."""
    listed = [{"fused-optimizer": {}}, *plugins, *([] if plugin is None else [plugin])]
    torch.manual_seed(7)
    given = {"model": tiny_model(), "optimizer": "AdamW", "lr": 1e-2, "batch_size": 8, "epochs": 3, "device": "cpu"}
    given |= arguments
    return tiny_run(listed, **given)


def assert_equal(ours: Any, expected: Any) -> None:
    """Every loss, learning rate, metric and weight is the same, to the bit."""
    assert ours.losses == expected.losses
    assert ours.recorder.lrs == expected.recorder.lrs
    assert ours.recorder.metrics == expected.recorder.metrics
    for name, weight in expected.weights.items():
        assert torch.equal(ours.weights[name], weight), name


class Norms(Plugin):
    """Keeps the logged norms of gradients."""

    name = "norms"

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[tuple[int, float]] = []

    @hookimpl
    def log_scalars(self, scalars: dict[str, float], step: int) -> None:
        if "train/grad_norm" in scalars:
            self.norms.append((step, scalars["train/grad_norm"]))


SCHEDULE = {"lr-scheduler": {"schedule": "cosine", "warmup": 4}}


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_replayed_steps_are_equal_to_the_bit(tiny_run, max_grad_norm):
    """27 steps with dropout, a schedule, evaluations and log points in between. Each epoch ends with 3 samples."""
    settings = {"max_grad_norm": max_grad_norm, "evaluate_every": 5, "log_every": 4}
    ours, theirs = Norms(), Norms()
    recorded = train(tiny_run, Recorded(), [SCHEDULE, ours], **settings)
    direct = train(tiny_run, Direct(), [SCHEDULE, theirs], **settings)
    assert_equal(recorded, direct)
    assert ours.norms == theirs.norms
    assert [step for step, _ in ours.norms] == [4, 8, 12, 16, 20, 24]
    counts = recorded.summary["step_graph"]
    # the short batch of each epoch comes three times: it is never recorded
    assert counts == {"recorded": 1, "replayed_steps": 24 - WARM_UP - STATE, "other_steps": 3 + WARM_UP + STATE}
    assert direct.summary["step_graph"] == {"recorded": 0, "replayed_steps": 0, "other_steps": 27}


def test_it_trains_as_a_run_without_it_up_to_the_rounding_of_the_learning_rate(tiny_run):
    exact = {"lr": 2**-7}  # a float32 number
    assert_equal(train(tiny_run, Recorded(), **exact), train(tiny_run, None, **exact))
    ours, plain = train(tiny_run, Recorded(), [SCHEDULE]), train(tiny_run, None, [SCHEDULE])
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.recorder.lrs == plain.recorder.lrs


def test_dropout_differs_from_replay_to_replay(tiny_run):
    """One batch, and a learning rate below the rounding of weights: losses differ by dropout alone."""
    data = torch.utils.data.TensorDataset(torch.ones(8, 8), torch.zeros(8, dtype=torch.int64))
    result = train(tiny_run, Recorded(), data=data, lr=1e-12, epochs=12)
    assert result.summary["step_graph"]["replayed_steps"] == 12 - WARM_UP - STATE
    assert len(set(result.losses)) == 12


def test_a_resumed_run_ends_with_the_same_numbers(tiny_run):
    whole = train(tiny_run, Recorded(), [SCHEDULE], max_steps=24)
    train(tiny_run, Recorded(), [SCHEDULE, InterruptAtStep()], output="run", max_steps=24)
    resumed = train(tiny_run, Recorded(), [SCHEDULE], output="run", resume=True, max_steps=24)
    assert resumed.losses == whole.losses[STOPS_AT:]
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert resumed.summary["step_graph"]["replayed_steps"] > 0


class Changes(Plugin):
    """Changes what a graph contains, after step 12."""

    name = "changes"
    numerics = "changes-training"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step != 12:
            return
        model = run.unwrap_model()
        if self.kind == "optimizer state":  # as after a rollback
            run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        elif self.kind == "weights":
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        elif self.kind == "weight decay":
            run.optimizer.param_groups[0]["weight_decay"] = 0.3
        elif self.kind == "frozen":
            next(model.parameters()).requires_grad_(False)
        elif self.kind == "in place":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)


@pytest.mark.parametrize("kind", ["optimizer state", "weights", "weight decay", "frozen", "in place"])
def test_a_graph_that_no_longer_fits_is_recorded_anew(tiny_run, kind):
    recorded = train(tiny_run, Recorded(), [Changes(kind)])
    assert_equal(recorded, train(tiny_run, Direct(), [Changes(kind)]))
    assert recorded.summary["step_graph"]["recorded"] == (1 if kind == "in place" else 2)


def test_further_shapes_are_computed_without_a_graph(tiny_run, caplog):
    arguments = {"epochs": 6}
    with caplog.at_level(logging.WARNING, "fastloop"):
        recorded = train(tiny_run, Recorded(shapes=1), **arguments)
    assert_equal(recorded, train(tiny_run, Direct(), **arguments))
    assert recorded.summary["step_graph"]["recorded"] == 1
    assert caplog.text.count("batches of more than 1 shapes") == 1
    several = train(tiny_run, Recorded(), **arguments)
    assert several.summary["step_graph"]["recorded"] == 2


class Places(Plugin):
    """Makes the tensors of a batch parts of larger ones, and keeps where those begin that a step reads."""

    name = "places"
    recordable = True

    def __init__(self) -> None:
        super().__init__()
        self.given: set[int] = set()
        self.read: set[int] = set()

    @hookimpl
    def before_step(self, batches: Any) -> None:
        batches[0].inputs = [torch.cat([tensor[:1], tensor])[1:] for tensor in batches[0].inputs]
        self.given |= {tensor.storage_offset() for tensor in batches[0].inputs}

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any, batch: Any) -> Any:
        if run.model.training:
            self.read |= {tensor.storage_offset() for tensor in batch}
        return (yield)


def test_every_step_reads_tensors_that_begin_where_those_of_a_recording_do(tiny_run):
    """Compiled code would be compiled anew for others, and that cannot be recorded."""
    places = Places()
    result = train(tiny_run, Recorded(), [places])
    assert max(places.given) > 0
    assert places.read == {0}
    assert_equal(result, train(tiny_run, Recorded()))


class Boxed:
    """A value that a graph cannot compare."""


class Watches(Plugin):
    """Keeps the loss of each step."""

    name = "watches"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.losses.append(loss.item())


@pytest.mark.parametrize(
    ("task", "plugins"),
    [
        (TEXTS, [{"amp": {"dtype": "bf16"}}, "packing", "cls-last-layer"]),
        pytest.param(TEXTS, [{"amp": {"dtype": "bf16"}}], marks=pytest.mark.slow),
        pytest.param(LANGUAGE, ["neftune", {"lora": {"r": 2}}], marks=pytest.mark.slow),
    ],
    ids=["packed texts in bf16", "padded texts in bf16", "language model with LoRA"],
)
def test_steps_of_transformers_are_recorded_and_equal_to_the_bit(task, plugins, monkeypatch):
    """The stand-in refuses to read a number: so no step of these models does."""
    write_texts(Path())
    with kernels_on_cpu(monkeypatch):
        recorded, direct = (trained(task, plugins, plugin) for plugin in (Recorded(), Direct()))
    assert recorded[:2] == direct[:2]
    assert recorded[2]["recorded"] >= 1
    assert recorded[2]["replayed_steps"] >= 9
    assert direct[2]["replayed_steps"] == 0


def trained(task: Any, plugins: list[Any], plugin: Plugin) -> tuple[list[float], dict[str, float], dict[str, int]]:
    """Losses, validation metrics, and numbers of steps."""
    watches = Watches()
    settings = {"epochs": 4, "batch_size": 8, "lr": 1e-3, "max_grad_norm": 1.0, "device": "cpu"}
    data = task["data"] | {"padding": "max_length", "pad_to_multiple_of": 128}
    recipe = make_recipe(
        {
            **task,
            "data": data,
            "train": settings,
            "plugins": [*plugins, "fused-optimizer", SCHEDULE, {"progress": False}],
            "output": type(plugin).__name__,
        }
    )
    summary = execute(build(resolve(recipe, objects=[plugin, watches])))
    return watches.losses, summary["validation"], summary["step_graph"]


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_steps_of_several_micro_batches_are_equal_to_the_bit(tiny_run, max_grad_norm):
    settings = {"micro_batch_size": 4, "max_grad_norm": max_grad_norm}
    ours = train(tiny_run, Recorded(), [SCHEDULE], **settings)
    assert_equal(ours, train(tiny_run, Direct(), [SCHEDULE], **settings))
    assert ours.summary["step_graph"]["replayed_steps"] == 24 - WARM_UP - STATE


class Keeps(Plugin):
    """Keeps the tensors that it receives."""

    name = "keeps"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.inputs: list[tuple[Tensor, Tensor]] = []

    @hookimpl
    def before_step(self, batches: Any) -> None:
        features = batches[0].inputs[0]
        self.inputs.append((features, features.clone()))

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.losses.append(loss)


def test_losses_and_batches_that_a_plugin_keeps_stay_as_they_were(tiny_run):
    keeps = Keeps()
    result = train(tiny_run, Recorded(), [keeps])
    assert [loss.item() for loss in keeps.losses] == result.losses
    for kept, before in keeps.inputs:
        assert torch.equal(kept, before)


class Factors(Plugin):
    """Adds a value to each batch: a number that changes from batch to batch and is part of the loss, or an object."""

    name = "factors"
    numerics = "changes-training"
    recordable = True

    def __init__(self, with_box: bool) -> None:
        super().__init__()
        self.with_box = with_box

    @hookimpl(wrapper=True)
    def build_collator(self) -> Any:
        collate = yield

        def with_factor(samples: list[Any]) -> dict[str, Any]:
            inputs, labels = collate(samples)
            extra = Boxed() if self.with_box else None
            return {"inputs": inputs, "labels": labels, "factor": 1 + int(labels[0]), "extra": extra}

        return with_factor

    @hookimpl(tryfirst=True)
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        logits = model(batch["inputs"])
        return Output(batch["factor"] * cross_entropy(logits, batch["labels"]), logits, batch["labels"])


def test_a_batch_with_a_value_that_cannot_be_compared_is_computed_without_a_graph(tiny_run, caplog):
    with caplog.at_level(logging.WARNING, "fastloop"):
        result = train(tiny_run, Recorded(), [Factors(with_box=True)])
    assert result.summary["step_graph"]["replayed_steps"] == 0
    assert_problem(caplog, "no-graph")


def test_batches_that_differ_in_a_number_have_a_graph_each(tiny_run):
    plugins = [Factors(with_box=False)]
    ours = train(tiny_run, Recorded(), plugins)
    assert_equal(ours, train(tiny_run, Direct(), plugins))
    assert ours.summary["step_graph"]["recorded"] == 3


def test_checkpoints_and_schedules_have_the_numbers_of_the_host(tiny_run):
    result = train(tiny_run, Recorded(), [SCHEDULE], epochs=1)
    run = result.trainer.run
    (group,) = run.optimizer.param_groups
    assert isinstance(group["lr"], float)
    assert group["capturable"] is False


# -- what it refuses ---------------------------------------------------------------------------------------------------


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs / max(1.0, inputs.abs().max().item()))


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) * (2 if self.training and random.random() < 0.5 else 1)


def hooked() -> nn.Module:
    model = nn.Linear(8, 3)
    model.weight.register_hook(lambda gradient: gradient)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Reads, "step-not-recordable operation permitted"),
        (Draws, "step-not-recordable random host"),
        (hooked, "step-not-recordable 'weight'"),
    ],
    ids=["reads a number", "draws on the host", "gradient hook"],
)
def test_a_step_that_a_graph_cannot_hold_is_refused(tiny_run, model, reason):
    with expect_problem("step-not-recordable step-graph", PluginError) as raised:
        train(tiny_run, Recorded(), model=model())
    assert_problem(raised.value.problem, reason)


class Acts(Plugin):
    """Acts within each step."""

    name = "acts"

    @hookimpl
    def after_backward(self) -> None:
        pass


class HoldsSome(Plugin):
    """Leaves the last layer to an optimizer of its own."""

    name = "holds-some"
    numerics = "changes-training"

    @hookimpl
    def build_optimizer(self, model):
        return torch.optim.AdamW(list(model.parameters())[:-2], fused=True)


class Wraps(Plugin):
    """Acts around each loss."""

    name = "wraps"

    @hookimpl(wrapper=True)
    def compute_loss(self):
        return (yield)


@pytest.mark.parametrize(
    ("plugins", "arguments", "code", "names"),
    [
        (["nan-guard"], {}, "excluded-plugin", "nan-guard"),
        ([Acts()], {}, "excluded-plugin", "acts"),
        ([Wraps()], {}, "excluded-plugin", "wraps"),
        ([HoldsSome()], {}, "unsupported-optimizer", "3 (weight, bias)"),
        ([], {"optimizer": "SGD"}, "unsupported-optimizer", "SGD"),
        ([{"compile": {"mode": "reduce-overhead"}}], {}, "conflicting-values", "compile.mode"),
        ([{"activation-checkpointing": {}}], {}, "excluded-plugin", "activation-checkpointing"),
    ],
)
def test_what_needs_the_host_within_a_step_is_refused_by_name(tiny_run, plugins, arguments, code, names):
    with expect_problem(f"{code} step-graph {names}", PluginError):
        train(tiny_run, Recorded(), plugins, **arguments)


@pytest.mark.parametrize(
    "plugins", [[], [{"fused-optimizer": {"implementation": "foreach"}}]], ids=["plain", "foreach"]
)
def test_an_optimizer_that_is_not_fused_is_refused(tiny_run, plugins):
    with expect_problem("unsupported-optimizer step-graph fused-optimizer", PluginError):
        tiny_run([*plugins, Recorded()], optimizer="AdamW", device="cpu")


def test_an_optimizer_that_the_recipe_makes_fused_is_recorded(tiny_run):
    result = tiny_run([Recorded()], optimizer={"name": "AdamW", "fused": True}, device="cpu")
    assert result.summary["step_graph"]["replayed_steps"] > 0


def test_a_cpu_is_refused(tiny_run):
    with expect_problem("requirement-missing", PluginError):
        train(tiny_run, StepGraph())


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_cuda_graphs_compute_the_numbers_of_steps_without_them(tmp_path, compiled):
    """Dropout, clipping, a schedule, bf16 and evaluations in between; one step of an epoch is short."""
    from fastloop.testing import Recorder

    class DirectOnCuda(StepGraph):
        @hookimpl
        def check_run(self, run: Any) -> None:
            super().check_run(run=run)
            self.may_record = lambda *_: False

    results = {}
    for cls in (StepGraph, DirectOnCuda):
        torch.manual_seed(1)
        recorder = Recorder()
        plugins: list[Any] = [{"amp": {"dtype": "bf16"}}, {"fused-optimizer": {}}, SCHEDULE, cls(), recorder]
        if compiled:
            plugins.append({"compile": {}})
        data = tiny_data()
        summary = Trainer(
            tiny_model(), data, data, loss=cross_entropy, plugins=plugins, epochs=8, lr=1e-2, batch_size=8,
            optimizer="AdamW", max_grad_norm=0.5, evaluate_every=10, output=tmp_path / cls.__name__,
        ).fit()  # fmt: skip
        results[cls] = recorder.losses, [metrics["loss"] for _, metrics in recorder.metrics], summary["step_graph"]
    assert results[StepGraph][0] == pytest.approx(results[DirectOnCuda][0], rel=1e-6)
    assert results[StepGraph][1] == pytest.approx(results[DirectOnCuda][1], rel=1e-6)
    assert results[StepGraph][2]["recorded"] == 2
    assert results[StepGraph][2]["replayed_steps"] > 50

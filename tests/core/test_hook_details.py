"""Each statement of the section "Details" of docs/loop.md.

Modules:
    core/fastloop/unstepped.py
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fastloop import Plugin, PluginCrash, PluginError, hookimpl
from fastloop.testing import VECTORS, expect_problem, start, tiny_data, tiny_model, train


def plugin(plugin_name: str, **hooks: Any) -> Plugin:
    """A plugin with these hooks; the other values are attributes of its class."""
    marked = {
        key: value if hasattr(value, "fastloop_impl") or not callable(value) else hookimpl(value)
        for key, value in hooks.items()
    }
    return type(plugin_name, (Plugin,), {"name": plugin_name, **marked})()


# -- batches -----------------------------------------------------------------------------------------------------------


def test_before_step_may_replace_inputs_and_change_them_in_place(tiny_run):
    inputs, targets = tiny_data().tensors

    def replace(self, batches):
        for batch in batches:
            batch.inputs = [batch.inputs[0] * 2, batch.inputs[1]]

    def change(self, batches):
        for batch in batches:
            batch.inputs[0].mul_(2)

    expected = tiny_run(data=torch.utils.data.TensorDataset(inputs * 2, targets)).losses
    assert tiny_run([plugin("replaces", before_step=replace)]).losses == expected
    assert tiny_run([plugin("changes", before_step=change)]).losses == expected
    assert torch.equal(tiny_data().tensors[0], inputs), "a later epoch reads the samples again"


def test_before_step_may_set_loss_weight_and_each_loss_is_scaled_to_its_share(tiny_run):
    found: list[tuple[float, float]] = []
    step: list[float] = []

    def weights(self, batches):
        batches[0].loss_weight, batches[1].loss_weight = 3, 1

    plugins = [plugin("weights", before_step=weights), plugin("records", before_fit=recording(found))]
    plugins.append(plugin("steps", after_backward=lambda self, loss: step.append(loss.item())))
    model, (inputs, targets) = tiny_model(dropout=0.0), tiny_data(8).tensors
    order = torch.randperm(8, generator=torch.Generator().manual_seed(123))
    means = [cross_entropy(model(inputs[ids]), targets[ids]).item() for ids in order.split(4)]
    tiny_run(plugins, model=model, data=tiny_data(8), micro_batch_size=4, epochs=1, device="cpu")
    assert found == pytest.approx([means[0] * 3 / 4, means[1] / 4])
    assert step == pytest.approx([sum(found)])


def recording(found: list[float]) -> Any:
    """A hook that wraps the strategy's ``backward`` to keep the losses."""

    def before_fit(self, run):
        backward = run.strategy.backward

        def record(run, loss):
            found.append(loss.item())
            backward(run, loss)

        run.strategy.backward = record

    return before_fit


def backward_losses() -> tuple[list[float], list[float], list[dict[str, Any]]]:
    found: list[float] = []
    seen: list[dict[str, Any]] = []
    sections = {
        "plugins": [*VECTORS["plugins"], "ddp"],
        "train": {"batch_size": 8, "max_steps": 1, "device": "cpu"},
        "output": "run",
    }
    records = plugin("records", before_fit=recording(found))
    return found, train(VECTORS | sections, records, summaries(seen)).losses, seen


@pytest.mark.slow
def test_with_several_processes_shares_average_to_the_loss_of_the_step(tmp_path):
    (first, losses, seen), (second, _, others) = (ended.result for ended in start(2, backward_losses, folder=tmp_path))
    assert (first[0] + second[0]) / 2 == pytest.approx(losses[0])
    assert [summary["status"] for summary in seen + others] == ["completed"] * 2, "write_summary fires on each process"


# -- fp16 --------------------------------------------------------------------------------------------------------------


SCALE = 2.0**10
LARGE_SCALE = 2.0**17
"""More than float16 holds."""


def fp16(monkeypatch, scale: float = SCALE) -> Plugin:
    """Scales the loss as in fp16, on a CPU in float32: a power of two changes no digit."""

    def scaler(self, run):
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def prepared(self, run):  # Accelerate prepares fp16 on CUDA only, so switch it on after the model is prepared
        run.accelerator.native_amp = True
        monkeypatch.setattr(type(run.accelerator), "mixed_precision", property(lambda self: "fp16"))

    return plugin("fp16", before_prepare=scaler, after_prepare=prepared)


@pytest.mark.parametrize("max_norm", [None, 1e6])
def test_in_fp16_gradients_are_scaled_until_they_are_clipped(tiny_run, max_norm, monkeypatch):
    found: dict[str, float] = {}

    def norm(name):
        def hook(self, run):
            gradients = [weight.grad for weight in run.model.parameters()]
            found.setdefault(name, torch.nn.utils.get_total_norm(gradients).item())
            if name == "before_optimizer_step":
                found.setdefault("gradient_norm", run.gradient_norm().item())

        return hook

    def losses(self, loss):
        found.setdefault("loss", loss.item())

    hooks = {name: norm(name) for name in ("after_backward", "before_optimizer_step")}
    result = tiny_run(
        [fp16(monkeypatch), plugin("norms", **hooks), plugin("loss", after_backward=losses)],
        max_grad_norm=max_norm,
    )
    true = found["gradient_norm"]
    assert found["after_backward"] == pytest.approx(SCALE * true, rel=1e-4)
    assert found["before_optimizer_step"] == pytest.approx(true if max_norm else SCALE * true, rel=1e-4)
    assert found["loss"] == result.losses[0], "the loss is not scaled"


class OwnUpdates(Plugin):
    """Leaves some parameters out of ``run.optimizer``, and updates them by their gradients in ``after_step``."""

    name = "own-updates"

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.norms: list[float] = []

    @hookimpl
    def build_optimizer(self, model):
        first, *others = model.parameters()
        self.others = others
        return torch.optim.SGD([first], lr=0.1)

    @hookimpl
    def before_optimizer_step(self, run):
        self.norms.append(run.gradient_norm().item())
        if run.accelerator.scaler is not None:
            self.scale = run.accelerator.scaler.get_scale()

    @hookimpl
    def after_step(self):
        with torch.no_grad():
            for parameter in self.others:
                parameter -= 0.1 * parameter.grad / self.scale


class HalfBody(torch.nn.Module):
    """A head in float32 on a body in float16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head = torch.nn.Linear(16, 3)
        self.body = torch.nn.Linear(8, 16).half()

    def forward(self, inputs):
        return self.head(self.body(inputs.half()).float().relu())


MODELS = {"float32": tiny_model, "float16 body": HalfBody}


@pytest.mark.parametrize(
    ("model", "max_norm", "scale", "rounding"),
    [
        ("float32", None, SCALE, 1e-5),
        ("float32", 0.1, SCALE, 1e-5),
        ("float16 body", None, SCALE, 1e-2),
        ("float16 body", 0.1, SCALE, 1e-2),
        ("float16 body", 0.1, LARGE_SCALE, 1e-2),
    ],
)
def test_in_fp16_gradients_outside_of_the_optimizer_count_and_are_clipped_as_in_fp32(
    tiny_run, monkeypatch, model, max_norm, scale, rounding
):
    settings = {"max_grad_norm": max_norm, "epochs": 1}
    expected = OwnUpdates()
    single = tiny_run([expected], model=MODELS[model](), **settings)
    ours = OwnUpdates()
    half = tiny_run([fp16(monkeypatch, scale), ours], model=MODELS[model](), **settings)
    assert ours.norms == pytest.approx(expected.norms, rel=rounding)
    assert half.losses == pytest.approx(single.losses, rel=rounding)
    for name, weight in single.weights.items():
        torch.testing.assert_close(half.weights[name], weight, rtol=rounding, atol=rounding)


def test_in_fp16_clipping_keeps_the_digits_of_float16_gradients(tiny_run, monkeypatch):
    """They are multiplied by one factor. Divided by the loss scale, they would be near 6e-8, float16's smallest."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []

    def keep(self, run):
        before.append(run.unwrap_model().body.weight.grad.float())

    def read(self, run):
        after.append(run.unwrap_model().body.weight.grad.float())

    hooks = plugin("reads", after_backward=keep, before_optimizer_step=read)
    plugins = [fp16(monkeypatch, LARGE_SCALE), OwnUpdates(), hooks]
    tiny_run(plugins, model=HalfBody(), max_grad_norm=1e-5, max_steps=1)
    large = before[0].abs() > before[0].abs().max() / 100
    factors = after[0][large] / before[0][large]
    assert 0 < factors.mean() < 1
    torch.testing.assert_close(factors, factors.mean().expand_as(factors), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("model", MODELS)
def test_in_fp16_an_overflow_outside_of_the_optimizer_lowers_the_scale(tiny_run, monkeypatch, model):
    scales: list[float] = []

    def overflow(self, run):
        *_, last = run.model.parameters()
        last.grad.fill_(torch.inf)

    def read(self, run):
        scales.append(run.accelerator.scaler.get_scale())

    hooks = plugin("overflows", after_backward=overflow, after_step=read)
    plugins = [fp16(monkeypatch), OwnUpdates(), hooks]
    tiny_run(plugins, model=MODELS[model](), max_grad_norm=1.0, max_steps=1)
    assert scales == [SCALE / 2]


# -- order -------------------------------------------------------------------------------------------------------------


def test_marks_come_before_the_order_of_plugins(tiny_run):
    fired: list[str] = []

    def after_step(name, **marks):
        return plugin(
            name,
            after_step=hookimpl(**marks)(lambda self: fired.append(name)),
            runs_before=("plain-2",) * (name == "last-2"),
        )

    marks: dict[str, dict[str, bool]] = {"plain-1": {}, "last-1": {"trylast": True}, "first-1": {"tryfirst": True}}
    marks |= {"plain-2": {}, "last-2": {"trylast": True}, "first-2": {"tryfirst": True}}
    tiny_run([after_step(name, **options) for name, options in marks.items()], data=tiny_data(8), epochs=1)
    assert fired == ["first-1", "first-2", "plain-1", "plain-2", "last-2", "last-1"]


def test_wrappers_are_outside_of_other_implementations_whatever_their_marks(tiny_run):
    fired: list[str] = []

    def wrapper(name, **marks):
        def evaluate(self):
            fired.append(name)
            return (yield)

        return plugin(name, evaluate=hookimpl(wrapper=True, **marks)(evaluate))

    def evaluate(self):
        fired.append("implementation")

    plugins = [plugin("implementation", evaluate=hookimpl(tryfirst=True)(evaluate)), wrapper("last", trylast=True)]
    tiny_run(
        [*plugins, wrapper("outer"), wrapper("inner"), wrapper("first", tryfirst=True)], data=tiny_data(8), epochs=1
    )
    assert fired == ["first", "outer", "inner", "last", "implementation"]


# -- the summary -------------------------------------------------------------------------------------------------------

KEYS = {
    *(
        "status",
        "reason",
        "task",
        "steps",
        "epochs",
        "samples",
        "world_size",
        "device",
        "plugins",
        "disabled",
        "train_seconds",
        "startup_seconds",
    ),
    *(
        "compile_seconds",
        "evaluate_seconds",
        "save_seconds",
        "peak_memory_bytes",
        "validation",
        "test",
        "best",
        "checkpoints",
        "metric_modes",
        "model_metrics",
        "model_step",
        "model_weights",
        "save_errors",
    ),
    "recipe",
}
LATER = {"samples_per_second", "tokens_per_second", "versions"}


def summaries(seen: list[dict[str, Any]]) -> Plugin:
    return plugin("reads", write_summary=lambda self, summary: seen.append(dict(summary)))


def test_write_summary_gets_the_counters_and_the_newest_metrics(tiny_run):
    seen: list[dict[str, Any]] = []
    result = tiny_run([summaries(seen)])
    assert len(seen) == 1
    assert seen[0].keys() == KEYS
    assert result.summary.keys() == KEYS | LATER
    assert (seen[0]["status"], seen[0]["steps"], seen[0]["test"]) == ("completed", 18, None)
    assert seen[0]["validation"] == result.recorder.metrics[-1][1]


@pytest.mark.slow
def test_write_summary_fires_after_a_stop_and_after_a_failure(tiny_run, tmp_path):
    seen: list[dict[str, Any]] = []
    tiny_run([summaries(seen), plugin("stops", after_step=lambda self, run: run.state.request_stop("enough"))])
    assert (seen[0]["status"], seen[0]["reason"], seen[0]["steps"]) == ("stopped", "enough", 1)

    def fail(self):
        raise ValueError("on purpose")

    order: list[str] = []
    hooks = {name: (lambda self, name=name: order.append(name)) for name in ("write_summary", "teardown")}
    with expect_problem("plugin-crashed on purpose", PluginCrash):
        tiny_run(
            [plugin("fails", after_step=fail), plugin("order", **hooks), summaries(seen)], output=tmp_path / "failed"
        )
    assert order == ["write_summary", "teardown"]
    assert (seen[1]["status"], seen[1]["validation"]) == ("failed", None)
    assert json.loads((tmp_path / "failed/summary.json").read_text())["status"] == "failed"


def test_write_summary_does_not_fire_if_the_run_cannot_be_built(tiny_run):
    def fail(self):
        raise ValueError("on purpose")

    seen: list[dict[str, Any]] = []
    with expect_problem("plugin-crashed on purpose", PluginCrash):
        tiny_run([summaries(seen), plugin("fails", check_run=fail)])
    assert seen == []


@pytest.mark.parametrize(("yields", "problem"), [(0, "ended before its yield"), (2, "has a second yield")])
def test_a_wrapper_without_one_yield_is_named(yields, problem, tiny_run):
    def evaluate(self):
        result = {}
        for _ in range(yields):
            result = yield
        return result

    wrapper = plugin("twice", evaluate=hookimpl(wrapper=True)(evaluate))
    with expect_problem(f"invalid-wrapper 'twice' {problem}", PluginError):
        tiny_run([wrapper], data=tiny_data(8), epochs=1)

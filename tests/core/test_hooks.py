"""The contract that hookspecs.py states: which hooks there are, when they fire, and what they may change.

Modules:
    core/fastloop/hookspecs.py
    core/fastloop/run.py
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastloop import Output, Plugin, PluginCrash, PluginError, Trainer, checkpoint, hookimpl, hookspecs
from fastloop.checkpoint import saving
from fastloop.plugins.manager import PluginSet
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_plugins.checkpoints.async_save import HostCopies, snapshot

SPECS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "fastloop_spec")}


def test_every_hook_stands_in_the_annotated_loop_and_says_what_it_is():
    loop, heading, _ = (hookspecs.__doc__ or "").partition("\nKinds of hooks:\n")
    assert heading
    missing = [name for name in SPECS if not re.search(rf"\b{name}\b", loop)]
    assert not missing
    assert not [name for name, spec in SPECS.items() if not spec.__doc__]
    kinds = {name: (spec.__doc__ or "").partition(".")[0].partition(";")[0] for name, spec in SPECS.items()}
    assert {name for name, kind in kinds.items() if kind == "First"} == {
        name for name, spec in SPECS.items() if spec.fastloop_spec["firstresult"]
    }
    called_separately = {"environment", "configure", "save_state", "load_state", "teardown"}
    called_separately |= {name for name, kind in kinds.items() if kind == "Chain"}
    assert called_separately == set(hookspecs.UNWRAPPABLE_HOOKS)


def scribe(lines: list[str]) -> Plugin:
    """A plugin that records every hook by its name and, where it has one, its split. It wraps *first* hooks."""

    def implementation(name: str) -> Any:
        parameters = list(inspect.signature(SPECS[name]).parameters)
        namespace: dict[str, Any] = {"lines": lines}
        words = f"' '.join(filter(None, ('{name}', split)))" if "split" in parameters else f"'{name}'"
        wraps = SPECS[name].fastloop_spec["firstresult"]
        returns = "; return (yield)" if wraps else "; return {}" if name == "save_state" else ""
        exec(f"def {name}(self, {', '.join(parameters)}): lines.append({words}){returns}", namespace)
        return hookimpl(wrapper=wraps)(namespace[name])

    return type("Scribe", (Plugin,), {"name": "scribe"} | {name: implementation(name) for name in SPECS})()


def short_run(plugin: Plugin, output: str, **arguments: Any) -> Trainer:
    """Two epochs of two steps of two micro-steps; evaluation and saving at each epoch's end, and a test split."""
    settings = {"epochs": 2, "batch_size": 4, "micro_batch_size": 2, "max_grad_norm": 1.0, "lr": 0.1} | arguments
    plugins: list[Any] = [plugin, {"log": False}, {"progress": False}]
    loss = nn.functional.cross_entropy
    return Trainer(
        tiny_model(), tiny_data(8), tiny_data(4), tiny_data(4), plugins=plugins, loss=loss, output=output, **settings
    )


BUILD = """
    check_recipe
    configure
    build_datasets
    build_sampler train
    build_collator train
    build_sampler validation
    build_collator validation
    build_sampler test
    build_collator test
    build_model
    before_prepare
    build_optimizer
    build_scheduler
    after_prepare
    build_metrics
    check_run
"""
LOAD = """
    load_state
"""
STEP = """
        before_step
        train_step
            compute_loss
            compute_loss
        after_backward
        before_optimizer_step
        after_step
"""
EVALUATE = """
        before_evaluate validation
        evaluate validation
            compute_loss
            compute_loss
        after_evaluate validation
        log_scalars
"""
SAVE = """
        save_state
        write_checkpoint
"""
EPOCH = f"""
    before_epoch
        {STEP}
        {STEP}
    after_epoch
        {EVALUATE}
        {SAVE}
"""
END = """
    after_fit
    before_evaluate test
    evaluate test
        compute_loss
        compute_loss
    after_evaluate test
    log_scalars
    export_model
    write_summary
    teardown
"""


def calls(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_hooks_fire_in_the_order_that_the_annotated_loop_states():
    lines: list[str] = []
    short_run(scribe(lines), "run").fit()
    assert lines == calls(f"{BUILD} before_fit {EPOCH} {EPOCH} {END}".replace(" before_fit ", "\nbefore_fit\n"))


def test_a_resumed_run_loads_before_it_fits_and_goes_on_with_the_epoch():
    lines: list[str] = []
    short_run(scribe(lines), "run", max_steps=3).fit()  # stops inside the second epoch
    assert lines.count("after_epoch") == 1
    lines.clear()
    short_run(scribe(lines), "run", resume=True).fit()
    resumed = BUILD.replace("    build_datasets\n", "    before_resume\n    build_datasets\n")
    assert lines == calls(f"{resumed}{LOAD}before_fit\nbefore_epoch\n{STEP}\nafter_epoch\n{EVALUATE}\n{SAVE}\n{END}")


def test_a_plugin_that_had_nothing_to_save_is_resumed_without_a_word(caplog):
    class Forgetful(Plugin):
        name = "forgetful"

        @hookimpl
        def save_state(self) -> None: ...

        @hookimpl
        def load_state(self) -> None:
            raise AssertionError("there is nothing to load")

    short_run(Forgetful(), "run", max_steps=1).fit()
    assert short_run(Forgetful(), "run", resume=True).fit()["steps"] == 4
    assert "forgetful" not in caplog.text
    short_run(Forgetful(), "run", max_steps=1).fit()
    short_run(scribe([]), "run", resume=True).fit()
    assert_problem(caplog, "plugin-added 'scribe' 1")


def test_a_run_that_fails_tells_its_plugins_and_then_writes_its_summary():
    lines: list[str] = []

    class Broken(Plugin):
        name = "broken"

        @hookimpl(trylast=True)
        def after_backward(self) -> None:
            raise ValueError("broken")

    trainer = short_run(scribe(lines), "run")
    trainer.resolved = trainer.resolved.with_extra([Broken()])
    with expect_problem("plugin-crashed 'broken' test_hooks after_backward ValueError", PluginCrash):
        trainer.fit()
    assert lines[-4:] == ["after_backward", "recover", "write_summary", "teardown"]


def test_every_hook_gets_what_its_specification_says(tmp_path):
    """Names alone can lie: these are the arguments' values."""
    seen: dict[str, Any] = {}

    class Reader(Plugin):
        name = "reader"

        @hookimpl
        def before_epoch(self, run: Any) -> None:
            seen.setdefault("epochs", []).append(run.state.epoch)

        @hookimpl
        def after_backward(self, run: Any, loss: Any) -> None:
            gradients = [parameter.grad for parameter in run.model.parameters()]
            seen["complete"] = all(gradient is not None for gradient in gradients)
            seen["loss"] = (loss.dim(), loss.requires_grad)
            seen["norm"] = nn.utils.get_total_norm(gradients)

        @hookimpl
        def before_optimizer_step(self, run: Any, grad_norm: Any) -> None:
            clipped = nn.utils.get_total_norm([parameter.grad for parameter in run.model.parameters()])
            seen["clipped"] = (grad_norm.item() == pytest.approx(seen["norm"].item()), clipped.item() <= 0.01 + 1e-6)

        @hookimpl
        def after_step(self, run: Any) -> None:
            seen.setdefault("steps", []).append((run.state.step, run.state.epoch_samples, run.state.samples))

        @hookimpl
        def after_epoch(self, run: Any) -> None:
            seen.setdefault("completed", []).append(run.state.epoch)

        @hookimpl
        def export_model(self, folder: Path) -> None:
            seen["folder"] = folder

    short_run(Reader(), str(tmp_path / "run"), max_grad_norm=0.01).fit()
    assert seen["epochs"] == [0, 1]
    assert seen["completed"] == [1, 2]
    assert seen["steps"] == [(1, 4, 4), (2, 8, 8), (3, 4, 12), (4, 8, 16)]
    assert seen["loss"] == (0, False)
    assert seen["complete"]
    assert seen["clipped"] == (True, True)
    assert seen["folder"] == tmp_path / "run" / "model"


# -- what hooks may change ---------------------------------------------------------------------------------------------


class Norms(Plugin):
    """Records what torch computes of the unclipped gradients, what ``run.gradient_norm`` returns, and the strategy's
    methods that compute it."""

    name = "norms"

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[float] = []
        self.found: list[float] = []
        self.computed_by: list[str] = []

    @hookimpl
    def after_backward(self, run: Any) -> None:
        gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        self.expected.append(nn.utils.get_total_norm(gradients).item())

    @hookimpl
    def before_fit(self, run: Any) -> None:
        for name in ("gradient_norm", "clip_gradients"):
            setattr(run.strategy, name, self.recording(name, getattr(run.strategy, name)))

    def recording(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any) -> Any:
            self.computed_by.append(name)
            return method(*arguments)

        return record

    @hookimpl
    def before_optimizer_step(self, run: Any) -> None:
        first = run.gradient_norm()
        again = run.gradient_norm()
        assert (first.dim(), first is again) == (0, True)
        self.found.append(first.item())


@pytest.mark.slow
@pytest.mark.parametrize(("max_norm", "method"), [(None, "gradient_norm"), (0.01, "clip_gradients")])
def test_the_gradient_norm_is_computed_once_a_step_and_is_that_of_clipping(tiny_run, max_norm, method):
    norms = Norms()
    asked = tiny_run([norms], max_grad_norm=max_norm)
    assert norms.found == norms.expected
    assert norms.computed_by == [method] * 18
    plain = tiny_run(max_grad_norm=max_norm)
    assert asked.losses == plain.losses
    assert all(torch.equal(asked.weights[name], plain.weights[name]) for name in plain.weights)


def test_the_gradient_norm_leaves_finite_gradients_beside_an_infinite_one(tiny_run):
    class Infinite(Plugin):
        name = "infinite"
        runs_before = ("norms",)

        @hookimpl
        def after_backward(self, run: Any) -> None:
            next(run.model.parameters()).grad[0, 0] = float("inf")

        @hookimpl
        def before_optimizer_step(self, run: Any) -> None:
            assert run.gradient_norm().isinf()
            assert sum(int((~parameter.grad.isfinite()).sum()) for parameter in run.model.parameters()) == 1

    tiny_run([Infinite()], max_steps=1, evaluate_every=None)


def test_the_gradient_norm_of_sparse_gradients(tiny_run):
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 3, sparse=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.table((inputs > 0).long() * torch.arange(8)).sum(1)

    class Dense(Norms):
        @hookimpl
        def after_backward(self, run: Any) -> None:
            (weight,) = run.model.parameters()
            self.expected.append(weight.grad.to_dense().norm().item())

    norms = Dense()
    tiny_run([norms], model=Words(), optimizer="SGD")
    assert norms.found == pytest.approx(norms.expected, rel=1e-6)


@pytest.mark.parametrize("hook", ["after_backward", "after_step"])
def test_the_gradient_norm_is_refused_where_gradients_are_not_final(tiny_run, hook):
    def ask(self: Any, run: Any) -> None:
        run.gradient_norm()

    plugin = type("Asks", (Plugin,), {"name": "asks", hook: hookimpl(ask)})()
    with expect_problem("gradients-gone gradient_norm before_optimizer_step", PluginError):
        tiny_run([plugin])


class AsksWhenRepeated(Plugin):
    """Fails before the first update, recovers, and asks for the gradient norm before the step is repeated."""

    name = "asks-when-repeated"
    has_failed = False

    @hookimpl
    def before_step(self, run: Any) -> None:
        if self.has_failed:
            run.gradient_norm()

    @hookimpl
    def before_optimizer_step(self) -> None:
        self.has_failed = True
        raise MemoryError

    @hookimpl
    def recover(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)


def test_the_gradient_norm_of_a_failed_step_is_refused(tiny_run):
    with expect_problem("gradients-gone gradient_norm before_optimizer_step", PluginError):
        tiny_run([AsksWhenRepeated()])


def test_a_wrapper_sees_the_evaluation_from_both_sides_and_may_change_its_result(tiny_run):
    inside: list[str] = []

    class Around(Plugin):
        name = "around"

        @hookimpl(wrapper=True)
        def evaluate(self, run: Any, split: str) -> Iterator[None]:
            inside.append(f"before {split}")
            metrics = yield
            inside.append("after")
            return metrics | {"doubled": 2 * metrics["loss"]}

    class Task(Plugin):
        name = "counter"

        @hookimpl
        def compute_loss(self, run: Any, model: Any, batch: Any) -> Output | None:
            if not model.training:
                inside.append("batch")
            return None

    result = tiny_run([Around(), Task()], epochs=1)
    assert inside == ["before validation", *["batch"] * 4, "after"]
    metrics = result.summary["validation"]
    assert metrics["doubled"] == 2 * metrics["loss"]
    assert result.recorder.metrics == [("validation", metrics)]  # after_evaluate gets the changed ones


def test_the_first_result_in_the_recipes_order_wins_and_the_rest_are_not_asked():
    asked: list[str] = []

    def answer(name: str, result: dict[str, float] | None) -> Plugin:
        @hookimpl
        def evaluate(self: Plugin, run: Any, split: str) -> dict[str, float] | None:
            asked.append(self.name)
            return result

        return type(name, (Plugin,), {"name": name, "evaluate": evaluate})()

    resolution = PluginSet([answer("silent", None), answer("first", {"loss": 1.0}), answer("second", {"loss": 2.0})])
    assert resolution.hooks.evaluate(run=None, split="test") == {"loss": 1.0}
    assert asked == ["silent", "first"]


@pytest.mark.slow
def test_an_optimizer_argument_of_a_plugin_reaches_the_optimizer_and_no_later_run(tiny_run):
    class Betas(Plugin):
        name = "betas"

        @hookimpl
        def configure(self) -> dict[str, Any]:
            return {"optimizer": {"betas": (0.5, 0.6)}}

    class InPlace(Plugin):
        name = "in-place"

        @hookimpl
        def configure(self, settings: Any) -> None:
            settings.optimizer["betas"] = (0.5, 0.6)

    class Assigns(Plugin):
        name = "assigns"

        @hookimpl
        def configure(self, settings: Any) -> None:
            settings.num_workers = 2

    assert tiny_run([Betas()], epochs=1).trainer.run.optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    with expect_problem("plugin-crashed TypeError", PluginCrash):
        tiny_run([InPlace()], epochs=1)
    with expect_problem("plugin-crashed FrozenInstanceError 'num_workers'", PluginCrash):
        tiny_run([Assigns()], epochs=1)
    assert tiny_run(epochs=1).trainer.run.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_plugin_that_recovers_has_training_go_on_and_an_evaluation_begin_again(tiny_run):
    class Fails(Plugin):
        """In the third step, and in the second batch of the first evaluation; once each."""

        name = "fails"

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, str | None]] = []

        @hookimpl
        def before_step(self, run: Any) -> None:
            if run.state.step == 2 and not self.asked:
                raise OSError("in a step")

        @hookimpl
        def compute_loss(self, run: Any, model: Any, batch: Any) -> Output | None:
            if not model.training and len(self.asked) == 1:
                raise OSError("in an evaluation")
            return None

        @hookimpl
        def recover(self, run: Any, error: Exception, split: str | None) -> bool:
            self.asked.append((str(error), split))
            return True

    fails, plain = Fails(), tiny_run(epochs=1)
    result = tiny_run([fails], epochs=1)
    assert fails.asked == [("in a step", None), ("in an evaluation", "validation")]
    assert result.losses == plain.losses
    assert result.summary["validation"] == plain.summary["validation"]


@pytest.mark.slow
def test_a_plugin_that_writes_checkpoints_later_is_waited_for(tiny_run, tmp_path):
    class Late(Plugin):
        """Writes each checkpoint half a second later, in a thread."""

        name = "late"
        busy = 0

        @hookimpl
        def write_checkpoint(self, run: Any, folder: Path, model: Any, state: Any) -> Future[None]:
            def write(copies: Any) -> None:
                time.sleep(0.5)
                saving.write(run, folder, *copies)

            pool = ThreadPoolExecutor(1)
            written = pool.submit(write, snapshot(model, state, HostCopies())[0])
            pool.shutdown(wait=False)
            return written

        @hookimpl
        def after_step(self, run: Any) -> None:
            self.busy += run.saver.pending is not None

    late = Late()
    result = tiny_run([late], epochs=1, save_every=4, output=tmp_path / "run")
    assert result.summary["status"] == "completed"
    assert late.busy, "steps are done meanwhile"
    found, passed_over = checkpoint.find_newest(tmp_path / "run")
    assert (found.name, passed_over) == ("step-00000009", [])
    assert tiny_run([], epochs=2, save_every=4, output=tmp_path / "run", resume=True).summary["steps"] == 18

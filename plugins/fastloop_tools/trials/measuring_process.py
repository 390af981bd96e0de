"""The process of one measurement: ``python -m fastloop_tools.trials.measuring_process SPEC.json RESULT.json``.

The specification holds a full recipe and the parts to measure; see ``Spec``. The result holds the measurement, or an
error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastloop.cli import startup
from fastloop.cli.numerics import switch_dropout_off
from fastloop.errors import FastloopError, UsageError
from fastloop.plugins.plugin import Plugin, hookimpl
from fastloop.problem import Problem, counted
from fastloop.runtime import files

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.state import Batch


@dataclass(kw_only=True)
class Window:
    """The measured part of a training: ``warmup`` steps before it, at least ``steps`` steps (None: it ends with the
    recipe) and ``seconds``, and ``profile_steps`` steps after it under torch's profiler."""

    warmup: int = 0
    steps: int | None = None
    seconds: float = 0.0
    profile_steps: int = 0


@dataclass(kw_only=True)
class Spec(Window):
    """The specification of a measurement: a recipe in the form of ``Recipe.to_dict``, its file, which its paths are
    relative to, and whether dropout is active and evaluations run."""

    recipe: dict[str, Any]
    source: str | None
    dropout: bool = True
    evaluates: bool = False


class StepMeter(Plugin):
    """Measures a window of steps, as the first of all plugins. Waits for the device only at the ends of the window."""

    name = "bench-meter"

    def __init__(self, spec: Spec, warnings: WarningCollector) -> None:
        super().__init__()
        self.spec = spec
        self.warnings = warnings
        self.losses: list[Tensor] = []
        self.times: list[float] = []
        self.padded = 0
        self.complete = False
        self.window_start: tuple[int, int, int, int] = (0, 0, 0, 0)

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        if not self.spec.dropout:
            switch_dropout_off(model)

    @hookimpl(trylast=True)  # after the checks of the plugins under test
    def check_run(self, run: Run) -> None:
        if not self.spec.evaluates:
            run.eval_loaders.clear()

    @hookimpl
    def before_fit(self, run: Run) -> None:
        self._lap(run, wait=True)
        self._start_window(run)

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        for batch in batches:
            if isinstance(batch.inputs, Mapping) and "input_ids" in batch.inputs:
                self.padded += batch.inputs["input_ids"].numel()

    @hookimpl
    def after_step(self, run: Run, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())  # a CUDA graph overwrites its output
        step = run.state.step
        self._lap(run, wait=step in (1, self.spec.warmup, run.recipe.train.max_steps))
        if step == self.spec.warmup:
            self._start_window(run)
        if self._window_complete(run):
            self.complete = True
            self.times.pop()  # measured again after synchronization
            self._lap(run, wait=True)
            self._end_window(run)

    @hookimpl
    def after_fit(self, run: Run) -> None:
        self.warnings.listening = False  # later warnings are about the missing evaluations

    @hookimpl
    def export_model(self, folder: Path) -> Path:
        return folder  # prevents an export

    def _lap(self, run: Run, wait: bool) -> None:
        if wait and run.device.type != "cpu":
            import torch

            torch.accelerator.synchronize()
        self.times.append(perf_counter())

    def _end_window(self, run: Run) -> None:
        """Stop the run at the end of the window."""
        run.state.request_stop("measured")

    def _window_complete(self, run: Run) -> bool:
        """Whether the window has its steps, and its seconds on every process, so that it ends at the same step on
        all."""
        import torch

        spec = self.spec
        if self.complete or spec.steps is None or run.state.step < spec.warmup + spec.steps:
            return False
        late = self.times[-1] - self.times[spec.warmup] >= spec.seconds
        return int(run.processes.all_reduce_sum(torch.tensor(late, dtype=torch.int64))) == run.world_size

    def _start_window(self, run: Run) -> None:
        self.window_start = (run.state.step, run.state.samples, run.state.tokens, self.padded)

    def result(self, run: Run) -> dict[str, Any]:
        """The measurements since the start of the window.

        Raises:
            UsageError: No step was trained in the window.
        """
        step, samples, tokens, padded = self.window_start
        steps = run.state.step - step
        if steps < 1:
            raise UsageError(
                f"training ended after {counted(run.state.step, 'step')}, within the {self.spec.warmup} of "
                "the warm-up.",
                code="too-few-steps",
            )
        seconds = self.times[-1] - self.times[step]
        usual = seconds / steps
        spent = [after - before for before, after in pairwise(self.times)]
        return {
            "steps": steps,
            "seconds": seconds,
            "samples": run.state.samples - samples,
            "tokens": run.state.tokens - tokens,
            "padded_tokens": self.padded - padded,
            "seconds_a_step": usual,
            "warmup_extra_seconds": max(0.0, self.times[step] - self.times[0] - step * usual),
            "step_seconds": spent,
            "startup_seconds": run.clock.seconds["startup"],
            "peak_memory_bytes": peak(run),
            "losses": [float(loss) for loss in self.losses],
        }


class WarningCollector(logging.Handler):
    """Collects warnings of the core and of plugins, such as one that a plugin has nothing to do."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.listening = True
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not self.listening:
            return
        line = record.getMessage()
        if line not in self.lines:
            self.lines.append(line)


def peak(run: Run) -> int:
    """Peak memory of the run in bytes. On Linux it is that of this process: getrusage would include the peak of its
    parent."""
    from fastloop.runtime.memory import peak_memory

    status = Path("/proc/self/status")
    if run.device.type == "cpu" and status.exists():
        lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        if lines:
            return int(lines[0].split()[1]) * 1024
    return peak_memory(run.device)


def run_recipe(resolved: ResolvedRecipe, observer: Plugin) -> tuple[Run, dict[str, Any]]:
    """Run a recipe with a plugin; returns the run and its summary.

    Raises:
        KeyboardInterrupt: A signal stopped the run.
    """
    from fastloop.cli.startup import start_run

    with start_run(resolved, [observer]) as run:
        from fastloop.lifecycle import execute  # only here: it imports torch, which must not happen twice

        summary = execute(run)
    if run.interrupted is not None:
        raise KeyboardInterrupt
    return run, summary


def train_short(recipe: Recipe, observer: Plugin, off: Iterable[str], **train: Any) -> Run:
    """Train a few steps in a temporary run folder, without plugins that publish results; see ``run_recipe``.

    Args:
        observer: Ends the run.
        off: Further plugins to leave out.
        train: Keys of the ``train`` section to set.
    """
    from fastloop.cli.quick_checks import without_publishers
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    tree = recipe.to_dict()
    tree["train"] |= {"max_steps": 10**9, "epochs": None, "save_every": None}
    tree["train"] |= train
    plugins = recipe.plugins | dict.fromkeys(off, False) | without_publishers(recipe)
    tree["plugins"] = recipe.listed(plugins)
    with tempfile.TemporaryDirectory(prefix="fastloop-short-") as scratch:
        tree["output"] = f"{scratch}/run"
        run, _ = run_recipe(resolve(make_recipe(tree, recipe.source)), observer)
    return run


def whole_length(run: Run, epochs: int | None, max_steps: int | None) -> int | None:
    """Total steps of the recipe, of which a measurement trains only a few; None if unknown."""
    from fastloop.schedule import run_length

    return run_length(run.train_loader.steps_per_epoch(), epochs, max_steps)


def measure(spec: Spec, length: Mapping[str, Any]) -> dict[str, Any]:
    """Run one measurement. An error is returned as a result. ``length`` has the recipe's ``epochs`` and
    ``max_steps``."""
    from fastloop.cli.quick_checks import without_publishers
    from fastloop.recipe import make_recipe

    warnings = WarningCollector()
    logger = logging.getLogger("fastloop")
    logger.addHandler(warnings)
    logger.propagate = False
    try:
        recipe = make_recipe(spec.recipe, Path(spec.source) if spec.source else None)
        recipe = dataclasses.replace(recipe, plugins=recipe.plugins | without_publishers(recipe))
        resolved = startup.resolve_early(recipe)
        meter = StepMeter(spec, warnings)
        if spec.profile_steps:
            from fastloop_tools.trials.profile_observer import ProfileObserver

            meter = ProfileObserver(spec, warnings)
        run, summary = run_recipe(resolved, meter)
        whole = {"seconds": summary["train_seconds"], "steps": summary["steps"]}
        measured = whole if spec.evaluates else meter.result(run)
        measured |= {"total_steps": whole_length(run, **length), "summary": summary}
        if "profile" in measured:
            measured["profile"]["total_steps"] = measured["total_steps"]
    except Exception as error:
        kinds = {UsageError: "usage", FastloopError: "run", Exception: "crash"}
        kind = next(name for cls, name in kinds.items() if isinstance(error, cls))
        text = str(error).strip()
        if isinstance(error, FastloopError):
            problem = error.problem
        else:
            text = f"{type(error).__name__}: {text}"
            problem = Problem(text, code="crashed")
        return {"error": text.splitlines()[0], "kind": kind, "problem": problem.to_json()}
    finally:
        logger.removeHandler(warnings)
    return measured | {"warnings": warnings.lines}


def run_specification(source: Path, target: Path) -> None:
    """Read the specification in ``source``, run it, and write the result to ``target``."""
    startup.end_with_launcher()
    content = json.loads(source.read_text(encoding="utf-8"))
    length = content.pop("length")
    spec = Spec(**content)
    spec.recipe["output"] = str(source.with_name("run"))  # deleted with the result
    files.write(target, json.dumps(measure(spec, length)))


if __name__ == "__main__":
    run_specification(Path(sys.argv[1]), Path(sys.argv[2]))

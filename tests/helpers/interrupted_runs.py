"""Runs that are interrupted and resumed, each compared with the same run without a break: ``check_interrupted``.

The conformance suite does this for each plugin with its default options, after one step. Here are other options, models
and data, each kind of end, and any step. ``fault_runs`` ends a run within a step, a save or an evaluation.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import CODE

from fastloop import Plugin, PluginCrash, hookimpl
from fastloop.run import Run
from fastloop.runtime.platform_support import KILL
from fastloop.testing import Recorder, start, train
from fastloop.testing.promises import check_continuation
from fastloop.testing.runs import Trained

SAVES_EVERY = 2
"""Steps between the checkpoints of a run that ends without saving."""
ENDS = ("limit", "Ctrl-C", "SIGTERM", "error", "SIGKILL")
"""How a run ends: at ``train.max_steps``, by a signal after which it saves, or without saving."""
SAVED_ENDS = ("limit", "Ctrl-C", "SIGTERM")
QUIET: dict[str, Any] = {"log": False, "progress": False}
MODULE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:data"},
    "plugins": [{"module": {"loss": "cross_entropy"}}],
}
"""The model and data of ``recipe_runs``: two epochs of eight steps."""


def write_code() -> None:
    """Write the file that ``MODULE`` names."""
    Path("code.py").write_text(CODE)


def make_none() -> list[Plugin]:
    """No plugins given in Python."""
    return []


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        task: The sections ``model`` and ``data``, and maybe ``plugins``.
        plugins: Further entries of ``plugins``.
        train: Keys of ``train``.
        objects: Returns new plugins given in Python.
        write: Writes the files that the recipe names.
    """

    task: Mapping[str, Any] = field(default_factory=lambda: MODULE)
    plugins: Sequence[Any] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    objects: Callable[[], list[Plugin]] = make_none
    write: Callable[[], object] = write_code

    def fit(self, output: str, *objects: Plugin, resume: bool = False, **settings: Any) -> Trained:
        """Train, or resume a run."""
        self.write()
        plugins: dict[str, Any] = {}
        for entry in (*self.task.get("plugins", ()), *self.plugins):
            plugins |= {entry: {}} if isinstance(entry, str) else entry
        section = {"epochs": 2, "batch_size": 8, "lr": 0.05, "seed": 7, "device": "cpu", "save_every": None}
        tree = dict(self.task) | {"plugins": QUIET | plugins, "output": output}
        tree |= {"train": section | dict(self.train) | settings}
        return train(tree, *self.objects(), *objects, resume=Path(output) if resume else None)


class Interrupts(Plugin):
    """Ends its run after a step."""

    name = "interrupts"

    def __init__(self, end: str, step: int) -> None:
        super().__init__()
        self.end, self.step = end, step

    @hookimpl
    def after_step(self, run: Run) -> None:
        if run.state.step != self.step:
            return
        if self.end == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        elif self.end == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.end == "SIGKILL":
            os.kill(os.getpid(), KILL)
        else:
            raise OSError("a planted error")


def fit_until(case: Case, end: str, step: int, recorder: Recorder) -> None:
    """Train into the folder ``cut`` until the run ends after a step."""
    if end == "limit":
        case.fit("cut", recorder, max_steps=step, save_every=step)
    elif end in SAVED_ENDS:
        case.fit("cut", recorder, Interrupts(end, step))
    else:
        case.fit("cut", recorder, Interrupts(end, step), save_every=SAVES_EVERY)


def check_interrupted(case: Case, end: str, step: int) -> None:
    """Check that a run that ended after a step, and was resumed, has the numbers of one without a break.

    They are the losses, learning rates, weights and metrics, and the state of no plugin changes as it is loaded.
    """
    whole, recorder = case.fit("whole"), Recorder()
    if end == "SIGKILL":
        (ended,) = start(1, fit_until, case, end, step, recorder)
        assert ended.code == -KILL, ended.output
    else:
        with pytest.raises(PluginCrash) if end == "error" else nullcontext():
            fit_until(case, end, step, recorder)
        assert recorder.losses == whole.losses[:step]
    saved = step if end in SAVED_ENDS else (step - 1) // SAVES_EVERY * SAVES_EVERY
    newest = max(int(path.name.removeprefix("step-")) for path in Path("cut/checkpoints").glob("step-*"))
    assert newest == saved
    resumed = case.fit("cut", resume=True)
    broken = check_continuation(whole, resumed, f"ended after step {step} ({end})", saved)
    assert broken is None, broken
    assert resumed.lrs == whole.lrs[saved:]
    for split in ("validation", "test"):
        assert resumed.summary.get(split) == whole.summary.get(split)


def check_evaluation(cli: Any) -> None:
    """Check that ``fastloop evaluate`` of the resumed run of ``check_interrupted`` gives the metrics of the whole
    run."""
    code, _, err = cli("evaluate", "cut", "--split", "validation", "--json", "results.json")
    assert code == 0, err
    expected = json.loads(Path("whole/summary.json").read_text())["validation"]
    assert json.loads(Path("results.json").read_text())["metrics"] == pytest.approx(expected, rel=1e-6)

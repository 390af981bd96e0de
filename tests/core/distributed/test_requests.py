"""A request of one process: every process acts on it at the end of its step, or before training begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastloop import Plugin, hookimpl
from fastloop.testing import VECTORS, train

pytestmark = pytest.mark.slow

MADE_AT = 3
"""The step in which process 1 makes its request."""


class Requests(Plugin):
    """Makes a request on process 1, and keeps the step of each evaluation, save and end."""

    name = "requests"

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.steps: dict[str, list[int]] = {"trained": [], "evaluated": [], "saved": []}

    @hookimpl
    def before_fit(self, run: Any) -> None:
        if run.rank != 1:
            return
        if self.what == "stop before the first step":
            run.state.request_stop("enough")
        if self.what == "evaluate before the first step":
            run.state.request_evaluate()

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.steps["trained"].append(run.state.step)
        if run.rank != 1 or run.state.step != MADE_AT:
            return
        if self.what == "stop":
            run.state.request_stop("enough")
        if self.what == "save":
            run.state.request_save()
        if self.what == "evaluate":
            run.state.request_evaluate()

    @hookimpl
    def before_evaluate(self, run: Any) -> None:
        self.steps["evaluated"].append(run.state.step)

    @hookimpl
    def save_state(self, run: Any) -> None:
        self.steps["saved"].append(run.state.step)


def requested(what: str, resume: Path | None = None) -> tuple[dict[str, list[int]], list[float]]:
    """The steps of a run with a request, and its losses."""
    settings = {"max_steps": 6, "batch_size": 8, "evaluate_every": None, "save_every": None, "device": "cpu"}
    plugins = [{"module": {"loss": "cross_entropy"}}, "ddp", {"progress": False}]
    plugin = Requests(what)
    trained = train({**VECTORS, "train": settings, "plugins": plugins, "output": what}, plugin, resume=resume)
    return plugin.steps, trained.losses


def requested_in_turn() -> tuple[dict[str, dict[str, list[int]]], list[float], list[float]]:
    """The steps of a run with each request, the losses of a whole run, and those after its requested save."""
    steps = {}
    for what in ("stop", "save", "evaluate", "stop before the first step", "evaluate before the first step"):
        steps[what], whole = requested(what)
    _, rest = requested("save", resume=Path("save"))
    return steps, whole, rest


def test_a_request_of_one_process_takes_effect_at_the_end_of_its_step_on_all(processes, tmp_path):
    (first, whole, rest), (second, *_) = (ended.result for ended in processes(2, requested_in_turn, folder=tmp_path))
    assert first == second
    assert first["stop"]["trained"] == [1, 2, 3]
    assert first["save"]["saved"] == [MADE_AT]
    assert first["evaluate"]["evaluated"] == [MADE_AT, 6]
    assert first["stop before the first step"]["trained"] == []
    assert first["evaluate before the first step"]["evaluated"] == [0, 6]
    for what in ("save", "evaluate", "evaluate before the first step"):
        assert first[what]["trained"] == [1, 2, 3, 4, 5, 6]
    assert rest == whole[MADE_AT:], "the run resumes from the save as if it had not ended"

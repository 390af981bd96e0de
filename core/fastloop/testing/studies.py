"""The setup of a plugin for the conformance suite, and the results of its trainings."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from fastloop.cli.numerics import BOUNDS
from fastloop.errors import PluginError
from fastloop.plugins.installed import installed, is_own, load
from fastloop.plugins.plugin import Plugin
from fastloop.plugins.resolve import check_requirements, resolve
from fastloop.problem import clause
from fastloop.testing.runs import TRAININGS, Failed, Study, Trained, alone, dies, resumed_together, together, without
from fastloop.testing.starting import ProcessResult, failure, start
from fastloop.testing.tasks import TEXTS, VECTORS, write_texts


def strategies() -> list[str]:
    """fastloop's own plugins that let several processes train one model, or the plugins in FASTLOOP_TEST_STRATEGIES.

    A strategy of another package is tested by its own package: an error in it is none of the plugin under test."""
    wanted = os.environ.get("FASTLOOP_TEST_STRATEGIES")
    if wanted is not None:
        names = wanted.split(",")
    else:
        names = [name for name, point in installed().items() if is_own(point)]
    return list(_strategies_of(tuple(names)))


@cache
def _strategies_of(names: tuple[str, ...]) -> list[str]:
    """The plugins that are strategies."""
    strategies = []
    for name in names:
        try:
            if load(name).slot == "strategy":
                strategies.append(name)
        except PluginError:  # a broken strategy, which has its own tests
            continue
    return strategies


def strategies_for(plugin: str) -> list[str]:
    """The strategies to test a plugin with; a strategy is always tested with itself."""
    try:
        own = [plugin] if load(plugin).slot == "strategy" else []
    except PluginError:  # its tests report it
        own = []
    return list(dict.fromkeys([*strategies(), *own]))


class StudyResults:
    """The results of the trainings of one study. Each training that a check reads runs once, on first use.

    Args:
        where: A folder for the runs.
        plain: The results without the plugin; None: these are already without it.
        refuses: See ``Conformance``.
        checks: The selected checks, which decide what is trained.
    """

    def __init__(
        self,
        study: Study,
        where: Path,
        plain: StudyResults | None = None,
        refuses: Collection[str] = (),
        checks: Collection[str] = (),
    ) -> None:
        self.study = study
        self.where = where
        self._plain = plain
        self.refuses = refuses
        self._names: set[str] = set()  # of the trainings that the checks read
        for check in checks:
            if check in TRAININGS:
                self._names.update(TRAININGS[check])
            else:  # an author's own check may read each of them
                self._names.update(*TRAININGS.values())
        self._pairs: dict[str, list[ProcessResult]] = {}
        self._reasons: dict[str | None, str] = {}
        write_texts(where)

    @property
    def plain(self) -> StudyResults:
        """The results without the plugin."""
        assert self._plain is not None
        return self._plain

    @cached_property
    def plugin(self) -> type[Plugin]:
        """The plugin's class."""
        return load(self.study.plugin)

    @cached_property
    def killed(self) -> ProcessResult:
        """The process that was killed."""
        return start(1, dies, self.study, folder=self.where)[0]

    @cached_property
    def _alone(self) -> ProcessResult:
        if self._plain is None:
            return start(1, without, self.study, folder=self.where)[0]
        if "after the kill" in self._names:
            assert self.killed is not None  # its run is resumed
        return start(1, alone, self.study, self._names, folder=self.where)[0]

    def _together(self, strategy: str) -> list[ProcessResult]:
        if strategy not in self._pairs:
            self._pairs[strategy] = start(2, together, self.study, strategy, folder=self.where)
        return self._pairs[strategy]

    @cached_property
    def _resumed_together(self) -> list[ProcessResult]:
        return start(2, resumed_together, self.study, folder=self.where)

    def resolved(self, strategy: str | None = None) -> None:
        """Skip the test if the plugin cannot run on this machine or with a strategy, with the message that a user
        gets."""
        if strategy not in self._reasons:
            self._reasons[strategy] = self._why_unresolved(strategy)
        reason = self._reasons[strategy]
        if reason:
            pytest.skip(reason)

    def _why_unresolved(self, strategy: str | None) -> str:
        """Why the plugin cannot run on this machine or with a strategy; empty: it can."""
        try:
            resolved = resolve(self.study.recipe("run", strategy=strategy), any_machine=True)
        except PluginError as error:
            if strategy is None:
                raise
            return f"declared: {clause(error)}"
        assert resolved.plugins.manager is not None  # all its hooks exist
        try:
            check_requirements(resolved)
        except PluginError as error:
            return str(error)
        return ""

    def run(self, name: str) -> Any:
        """A completed training of one process; fails with its error."""
        if self._plain is not None:
            self.resolved()
        if self._alone.code != 0:
            pytest.fail(f"{self}: its process ended before its trainings did.\n{failure([self._alone])}", pytrace=False)
        if name not in self._alone.result:
            name = "ours"  # it failed, so the other trainings did not run
        training = self._alone.result[name]
        if isinstance(training, Failed):
            if training.refused and "one process" in self.refuses:
                pytest.skip(f"refused in one process: {training.error}")
            pytest.fail(f"{self}: the training {name!r} failed: {training.error}\n{training.trace}", pytrace=False)
        return training

    def pair(self, strategy: str) -> list[Trained]:
        """The trainings of two processes under a strategy, by rank."""
        if self._plain is not None:
            self.resolved(strategy=strategy)
        return self._of_each(self._together(strategy), strategy)

    def resumed_pair(self, name: str) -> list[Trained]:
        """One of the trainings that ``resumed_together`` does on two processes under this strategy, by rank."""
        return self._of_each(self._resumed_together, self.study.plugin, name)

    def _of_each(self, processes: list[ProcessResult], strategy: str, name: str | None = None) -> list[Trained]:
        if any(ended.code != 0 for ended in processes):
            pytest.fail(f"{self}: its two processes did not end well.\n{failure(processes)}", pytrace=False)
        trainings = [ended.result for ended in processes]
        if name is not None:
            trainings = [results[name] for results in trainings]
        cause = _find_cause(trainings)
        if cause is None:
            return trainings
        rank, training = cause
        if training.refused and (strategy in self.refuses or self._is_refused_without(strategy)):
            pytest.skip(f"refused with {strategy!r}: {training.error}")
        where = f"on process {rank} of two with {strategy!r}"
        pytest.fail(f"{self}: its training failed {where}: {training.error}\n{training.trace}", pytrace=False)

    def _is_refused_without(self, strategy: str) -> bool:
        """Whether a strategy refuses the task without the plugin, too."""
        ended = self._plain._together(strategy) if self._plain is not None else []
        return any(isinstance(process.result, Failed) and process.result.refused for process in ended)

    def __str__(self) -> str:
        return f"plugin {self.study.plugin!r}" if self.study.plugin else "without the plugin"


def _find_cause(trainings: list[Trained | Failed]) -> tuple[int, Failed] | None:
    """The rank and the error of the process that ended the training, before others lost the connection to it. None: it
    did not fail."""
    failed = [(rank, training) for rank, training in enumerate(trainings) if isinstance(training, Failed)]
    for rank, training in failed:
        if not training.lost_connection:
            return rank, training
    return failed[0] if failed else None


_PLAIN: dict[str, StudyResults] = {}
"""Setup without a plugin -> its results, shared by all plugins that are tested on the same setup."""


@pytest.fixture(scope="class")
def study_results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StudyResults:
    """Of one class of ``Conformance``."""
    ours = request.cls
    plugin = load(ours.plugin)
    common = {
        "requires": tuple(ours.requires),
        "device": ours.device,
        "still": BOUNDS.get(plugin.numerics, 0.0) > 0,
        "strategy_options": ours.strategy_options,
    }
    other = ours.task  # of the runs without the plugin
    if plugin.slot == "task":  # which need another one
        other = TEXTS if ours.task == VECTORS else VECTORS
    study = Study(plugin=ours.plugin, options=ours.options, task=ours.task, without=other, **common)
    plain = Study(plugin="", options={}, task=other, without=other, **common)
    if repr(plain) not in _PLAIN:
        _PLAIN[repr(plain)] = StudyResults(plain, tmp_path_factory.mktemp("plain"))
    names = [item.name for item in request.session.items if getattr(item, "cls", None) is ours]
    checks = {name.partition("[")[0].removeprefix("test_") for name in names}
    return StudyResults(study, tmp_path_factory.mktemp("conformance"), _PLAIN[repr(plain)], ours.refuses, checks)

"""The conformance suite for plugins: declarations, numerics class, state, several processes, and runs without them.

    from fastloop.testing import TEXTS, Conformance

    class TestConformance(Conformance):
        plugin = "my-plugin"
        options = {"strength": 2.0}     # of the plugin, if the defaults have no effect on a tiny task
        requires = ("other-plugin",)    # further plugins, in the runs with and without yours
        task = TEXTS                    # a recipe's model and data: VECTORS (the default), IMAGES, TEXTS or LANGUAGE

The trainings run once for a class, in separate processes. They take 20 steps each on the CPU, or on an accelerator with
the environment variable FASTLOOP_TEST_DEVICE=auto. The suite does not judge speed: ``test_cost`` records the time of a
step with and without the plugin as a property in pytest's report.

A check that cannot run is skipped, which is not a pass: a section of pytest's report lists each with its reason. If a
run is refused, the check fails, unless the plugin declares the refusal (``conflicts``, ``requirements``), the class
lists it in ``refuses``, or the strategy refuses the task without the plugin, too. If a plugin ends the training early
by ``run.state.request_stop``, its steps are compared, and a check that needs more of them is skipped.

Each training runs in a process of its own, because a plugin that leaves something behind must not change other tests.
The bounds of the numerics classes are those of ``fastloop.cli.numerics``, as for ``bench``.

Every other check runs, unless a class lists it in ``slow`` and pytest runs with ``-m "not slow"``. ``fastloop.testing``
sets and registers that marker for packages.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

import pytest

from fastloop.cli.option_table import describe
from fastloop.errors import RecipeError, UsageError, did_you_mean
from fastloop.options import parse
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, load
from fastloop.plugins.plugin import Numerics, listed_at
from fastloop.problem import clause, typed_clause
from fastloop.runtime.platform_support import KILL
from fastloop.testing.differences import few, unequal
from fastloop.testing.package_texts import leftovers
from fastloop.testing.promises import (
    REPAIRS,
    BrokenPromise,
    check_batch_norm,
    check_bits,
    check_continuation,
    check_effect,
    check_final_loss,
    check_gradients,
    check_losses,
    early_end,
)
from fastloop.testing.runs import DIES_AT, RELEASED_AFTER, SAVES_EVERY, SEEDS, STOPS_AT, Failed
from fastloop.testing.starting import failure
from fastloop.testing.studies import StudyResults, strategies_for
from fastloop.testing.tasks import VECTORS, with_batch_norm


class Conformance:
    """A test class for one plugin. Derive from it, and set at least ``plugin``."""

    plugin: ClassVar[str] = ""
    """Name of the plugin."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the plugin in the tests."""
    requires: ClassVar[Sequence[str | Mapping[str, Any]]] = ()
    """Further plugins, as a recipe lists them. The trainings without the plugin have them, too."""
    task: ClassVar[Mapping[str, Any]] = VECTORS
    """The task to train: a recipe's ``model`` and ``data``, and optionally ``plugins`` and ``train``."""
    device: ClassVar[str] = os.environ.get("FASTLOOP_TEST_DEVICE", "cpu")
    """``auto`` for a plugin that needs an accelerator; its tests run if one is available. FASTLOOP_TEST_DEVICE sets it
    for all others."""
    strategy_options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Strategy -> its options in the tests, with and without the plugin:
    ``{"ddp": {"find_unused_parameters": True}}``."""
    refuses: ClassVar[Collection[str]] = ()
    """Strategies with which a run is refused with a ``UsageError`` that no declaration announces. ``"one process"``,
    for a strategy: a run without a launcher is."""
    slow: ClassVar[Collection[str]] = ()
    """Checks that get the marker ``slow``, such as ``"killed"`` or ``"processes[fsdp]"``: ``pytest -m "not slow"``
    leaves them out."""

    def __init_subclass__(cls) -> None:
        checks = [name.removeprefix("test_") for name in dir(cls) if name.startswith("test_")]
        for name in cls.slow:
            check = name.partition("[")[0]  # of processes[fsdp]: processes
            if check not in checks:
                raise UsageError(
                    f"there is no check {check!r}.",
                    code="unknown-check",
                    place=f"{cls.__name__}.slow",
                    remedy=did_you_mean(check, checks),
                )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize ``test_processes`` by strategy. pytest calls it for each test of the class."""
        if "strategy" not in metafunc.fixturenames:
            return
        known = {"one process", *installed()}
        for name in (*self.strategy_options, *self.refuses):
            if name not in known:
                raise UsageError(
                    f"there is no strategy {name!r}.",
                    code="unknown-strategy",
                    place=str(type(self).__name__),
                    remedy=did_you_mean(name, known),
                )
        metafunc.parametrize("strategy", strategies_for(self.plugin))

    @pytest.fixture(autouse=True)
    def _named(self, request: pytest.FixtureRequest) -> None:
        """Record properties for tables that are made from reports."""
        request.node.user_properties.append(("plugin", self.plugin))

    def test_declared(self, study_results: StudyResults) -> None:
        """The name, entry point, numerics class and hooks are valid, and the plugin resolves with the plugins that it
        requires."""
        cls = study_results.plugin
        if cls.numerics not in typing.get_args(Numerics):
            self.broken(
                "a numerics class", f"{cls.numerics!r}", f"Expected one of: {', '.join(typing.get_args(Numerics))}"
            )
        if not cls.description:
            self.broken(
                "to say what it changes",
                "no docstring of its class",
                "Write one, whose first sentence `fastloop plan` shows",
            )
        study_results.resolved()

    def test_options(self) -> None:
        """Each option has a description, accepts its default, and rejects wrong types. An unknown option is an error
        with its path."""
        declared = options_of(load(self.plugin))
        where = f"recipe.yaml: plugins.{self.plugin}"
        for field, row in zip(dataclasses.fields(declared), describe(declared), strict=True):
            if not row.help:
                self.broken(
                    f"to document its option {row.name!r}",
                    "no help",
                    'Declare it by option("What it does.", ...)',
                )
            options = dict(self.options)
            if field.default_factory is not dataclasses.MISSING:
                options[field.name] = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                options[field.name] = field.default
            try:
                parse(declared, options, where)
            except RecipeError as error:
                self.broken(
                    f"a valid default of its option {row.name!r}", clause(error), "Give it one that the option takes"
                )
            self._refuses(
                {**self.options, field.name: object()},
                f"{where}.{field.name}",
                f"an object() for its option {row.name!r}",
            )
        self._refuses({**self.options, "no_such_option": 1}, f"{where}.no_such_option", "an unknown option")

    def _refuses(self, options: Mapping[str, Any], path: str, what: str) -> None:
        try:
            with listed_at(path.rpartition(".")[0]):
                load(self.plugin)(**options)
        except RecipeError as error:
            if path not in str(error):
                self.broken(
                    f"to refuse {what} by its path, {path}",
                    clause(error),
                    "Let `super().__init__(**options)` check options, and pass its errors on",
                )
        except Exception as error:
            self.broken(
                f"to refuse {what}",
                typed_clause(error),
                "Call `super().__init__(**options)` before anything else",
            )
        else:
            self.broken(
                f"to refuse {what}",
                "that it is taken",
                "Declare options by `name: TYPE = option(...)`, each with a narrow type",
            )

    def test_documented(self) -> None:
        """The module's docstring begins with a line about the plugin, and shows a recipe that lists it. README.md,
        pyproject.toml and recipe.yaml of its package describe this plugin, not the example of `fastloop new`. All
        problems are listed at once."""
        cls = load(self.plugin)
        text = inspect.getdoc(sys.modules[cls.__module__]) or ""
        problems = []
        if not text.partition("\n")[0].strip():
            problems.append(f"no docstring in {cls.__module__}: begin it with a line that says what the plugin is")
        if "plugins:" not in text or f"- {self.plugin}" not in text:
            problems.append(
                f"no recipe to copy in the docstring of {cls.__module__}: show `plugins:`, and below it "
                f"`- {self.plugin}`"
            )
        problems += leftovers(cls)
        if problems:
            self.broken("texts that describe it", "\n  ".join(["", *problems]), "\nWrite what this plugin does")

    def test_numerics(self, study_results: StudyResults) -> None:
        """The first step's gradients, the losses and the final metric keep the bounds of the numerics class.
        ``bitwise``: all metrics, the final weights and the random states are the same, too."""
        ours = study_results.run("ours")
        numerics = study_results.plugin.numerics
        if study_results.plugin.slot == "task":
            pytest.skip("it is a task: there is no training without it")
        ends_early = early_end(ours)
        plain = study_results.plain.run("plain")
        again = study_results.plain.run("plain again")
        self._require(check_losses(numerics, ours, plain, again))
        if numerics == "changes-training":
            return
        if numerics == "bitwise" and not ends_early:
            self._require(check_bits(ours, plain))
        self._require(check_gradients(numerics, ours, plain, again))
        if ends_early:
            pytest.skip(f"{ends_early}, so its final weights and metrics are not those of a whole training")
        seeds = []
        if numerics != "bitwise":
            seeds = [study_results.plain.run(f"seed {seed}") for seed in SEEDS]
        self._require(check_final_loss(numerics, ours, plain, seeds))

    def test_batch_norm(self, study_results: StudyResults) -> None:
        """Batch norm counts the passes through the model in train mode: a plugin that does not change the training adds
        none."""
        numerics = study_results.plugin.numerics
        if study_results.plugin.slot == "task" or numerics == "changes-training":
            pytest.skip("it is a task, or changes the training: nothing is promised about the statistics of batch norm")
        if with_batch_norm(self.task) is None:
            pytest.skip("the model of its task has no variant with batch norm; VECTORS and IMAGES have one")
        ours = study_results.run("batch norm")
        ends_early = early_end(ours)
        if ends_early:
            pytest.skip(f"{ends_early}, so it makes fewer passes")
        self._require(check_batch_norm(numerics, ours, study_results.plain.run("batch norm")))

    def test_saved_and_loaded(self, study_results: StudyResults) -> None:
        """An interrupted and resumed run ends with the same bits and the same plugin state as an uninterrupted one."""
        steps = len(study_results.run("interrupted").losses)
        if steps != STOPS_AT:
            self._skip_if_early(study_results, STOPS_AT)
            self.broken(
                f"more than {STOPS_AT} steps of training",
                f"a run that ends after {steps} steps",
                "Set `task` or `options` so that the run takes more steps",
            )
        whole = study_results.run("whole")
        resumed = study_results.run("resumed")
        self._require(check_continuation(whole, resumed, f"was interrupted after step {STOPS_AT}", STOPS_AT))

    def test_killed(self, study_results: StudyResults) -> None:
        """A new process that resumes a killed run ends with the same bits as an undisturbed run."""
        study_results.run("ours")
        if study_results.killed.code != -KILL:
            self._skip_if_early(study_results, DIES_AT)
            ended = study_results.killed.result
            reason = ended.error if isinstance(ended, Failed) else failure([study_results.killed])
            self.broken(
                f"to train up to step {DIES_AT}, in which its process is killed",
                reason,
                "It must train in a process of its own",
            )
        last_saved = DIES_AT // SAVES_EVERY * SAVES_EVERY  # saved at 4, 8 and 12, and killed in 14
        whole = study_results.run("whole")
        resumed = study_results.run("after the kill")
        self._require(check_continuation(whole, resumed, f"was killed in step {DIES_AT}", last_saved))

    def _skip_if_early(self, study_results: StudyResults, steps: int) -> None:
        """Skip a check that needs more than ``steps`` steps, if the plugin ends the training before."""
        ours = study_results.run("ours")
        ends_early = early_end(ours)
        if ends_early and len(ours.losses) <= steps:
            advice = "`options` or `task` of the test can let it train longer"
            pytest.skip(f"{ends_early}, and the check needs more than {steps}: {advice}")

    def test_processes(self, study_results: StudyResults, strategy: str) -> None:
        """The numerics class also holds on two processes, and both have the same weights. A strategy can save and
        resume there."""
        first, second = study_results.pair(strategy)
        where = f" on two processes with {strategy!r}"
        slot = study_results.plugin.slot
        numerics = "changes-training" if slot == "task" else study_results.plugin.numerics
        has_plain_pair = slot not in ("task", "strategy")
        if has_plain_pair:
            plain = study_results.plain.pair(strategy)[0]
        elif numerics == "changes-training":
            plain = first  # nothing is compared, and the strategy may refuse the task of the plain run
        else:
            plain = study_results.plain.run("plain")
        self._require(check_losses(numerics, first, plain, plain, where))
        if has_plain_pair:
            alone = (study_results.run("ours"), study_results.plain.run("plain"))
            self._require(check_effect(strategy, alone, (first, plain)))
        different = []
        if first.replicas != second.replicas:
            different.append("weights")
        if first.lrs != second.lrs:
            different.append("learning rates")
        if first.metrics != second.metrics:
            different.append("metrics")
        if different:
            self.broken(
                f"the same weights, learning rates and metrics on all processes{where}",
                f"other {few(different)}",
                "Let every process do the same",
            )
        if strategy == self.plugin:
            self._check_resumed_strategy(study_results, where)

    def _check_resumed_strategy(self, study_results: StudyResults, where: str) -> None:
        """Check that a strategy, on two processes, continues an interrupted run with the same bits."""
        wholes = study_results.resumed_pair("whole")  # in the order of training, so that the first failure is shown
        study_results.resumed_pair("interrupted")
        continuations = study_results.resumed_pair("resumed")
        event = f"was interrupted after step {STOPS_AT}"
        for rank, (whole, resumed) in enumerate(zip(wholes, continuations, strict=True)):
            self._require(check_continuation(whole, resumed, event, STOPS_AT, f",{where} (process {rank})"))

    def test_off(self, study_results: StudyResults) -> None:
        """A run without the plugin is the same before and after a run with it, and the plugin restores changed
        settings."""
        ours = study_results.run("ours")
        plain = study_results.plain.run("plain")
        off = study_results.run("off")
        changed = study_results.run("changed")
        if changed:
            self.broken(
                "to leave nothing behind when it is off",
                few(changed),
                "Restore it in teardown, the last hook of every run",
            )
        if ours.hooks and study_results.plugin.slot != "strategy":
            self.broken(
                "to leave no hook of a run on the model", few(ours.hooks), "Remove the handle of each hook in teardown"
            )
        if ours.kept > plain.kept:
            self.broken(
                "to keep no batch after its step",
                f"{ours.kept} tensors of the first step's batches, {RELEASED_AFTER} steps later",
                "Copy what later steps need",
            )
        if off.losses != plain.losses or unequal(off.weights, plain.weights):
            self.broken(
                "to leave nothing behind: a run without it after one with it is the same to the bit",
                f"the losses {few(off.losses)} instead of {few(plain.losses)}",
                REPAIRS["bitwise"],
            )

    def test_cost(self, study_results: StudyResults, request: pytest.FixtureRequest) -> None:
        """Record the median seconds of a step with and without the plugin, from alternating runs. It fails on no
        value."""
        study_results.run("ours")
        runs = {"without": ("before", "off"), "with": ("ours", "whole")}
        if study_results.plugin.slot == "task":
            del runs["without"]
        for name, names in runs.items():
            seconds: list[float] = []
            for run in names:
                seconds += study_results.run(run).seconds
            if not seconds:
                pytest.skip("it ends the training after one step")
            request.node.user_properties.append((f"seconds a step {name} it", median(seconds)))

    def _require(self, problem: BrokenPromise | None) -> None:
        """Fail if a promise is broken."""
        if problem is not None:
            self.broken(problem.promised, problem.difference, problem.repair)

    def broken(self, promised: str, found: str, repair: str) -> None:
        """Fail with the promise, the finding, and the remedy."""
        pytest.fail(f"plugin {self.plugin!r} promises {promised}. Found: {found}. {repair}.", pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``slow`` for packages that run with ``--strict-markers``."""
    config.addinivalue_line("markers", "slow: takes more than a few seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the checks that a class lists in ``slow``, before pytest selects tests by their markers."""
    for item in items:
        cls = getattr(item, "cls", None)
        if cls is not None and issubclass(cls, Conformance) and item.name.removeprefix("test_") in cls.slow:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection, which took an eighth of the tests' time."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the checks that did not run, with their reasons."""
    lines = []
    for report in terminalreporter.stats.get("skipped", ()):
        plugin = dict(report.user_properties).get("plugin")
        if plugin is None:  # another test
            continue
        check = report.nodeid.rpartition("::test_")[2]
        reason = report.longrepr[2].removeprefix("Skipped: ")
        lines.append(f"{plugin}: {check}: {reason}")
    if lines:
        terminalreporter.section("conformance: skipped checks, which are no passes")
    for line in lines:
        terminalreporter.line(line)

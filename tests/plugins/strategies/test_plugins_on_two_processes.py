"""Two processes train each plugin and each pair of plugins as one does: parameters, buffers, metrics and exports.

A plugin is a row of ``world_rows.py``, or stands there with the reason why it is not compared.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_helpers import COMPILER
from world_checks import differences, export_differences, summary_differences, tolerance
from world_rows import NOT_COMPARED, ROWS, UNPAIRED, Group, may_share, optimizer_groups, pair_groups, single_groups
from world_runs import Case, Ended, all_in_group_of_one, all_of

from fastloop.plugins.installed import installed, is_own, load
from fastloop.testing import ProcessResult
from fastloop.testing.tasks import write_texts

pytestmark = COMPILER

QUICK = ("amp", "text-classification")
"""Rows that the quick tests train: one that rounds, and one that pads."""


class Worlds:
    """The trainings of some groups in one process and in two.

    Attributes:
        folder: Has a run folder for each case.
        alone: Case -> the result of a single process.
        together: The same for each of the two.
    """

    def __init__(self, processes: Any, folder: Path, groups: list[Group]) -> None:
        self.folder, self.groups = folder, groups
        folder.mkdir(exist_ok=True)
        write_texts(folder)
        alone: dict[str, Case] = {}
        in_group: dict[str, Case] = {}
        for group in groups:
            if not group.strategies:
                alone[group.alone().name] = group.alone()
        for _, group, strategy in self.cases():
            case = group.reference(strategy)
            (alone if group.rounds_as_alone(strategy) else in_group)[case.name] = case
        together = [case for case, _, _ in self.cases()]
        self.alone: dict[str, Ended] = processes(1, all_of, [*alone.values()], folder=folder)[0].result
        if in_group:
            self.alone |= processes(1, all_in_group_of_one, [*in_group.values()], folder=folder)[0].result
        self.together: list[dict[str, Ended]] = [
            ended.result for ended in processes(2, all_of, together, folder=folder)
        ]

    def cases(self) -> list[tuple[Case, Group, str]]:
        """Each run of two processes, with its group and strategy."""
        cases = []
        for group in self.groups:
            for strategy in group.strategies:
                if importlib.util.find_spec("deepspeed") or strategy != "deepspeed":
                    cases.append((group.together(strategy), group, strategy))
        return cases

    @cached_property
    def problems(self) -> dict[str, list[str]]:
        """Case -> its differences from the single process."""
        problems = {}
        for case, group, strategy in self.cases():
            reference = group.reference(strategy)
            allowed, expected = tolerance(strategy), self.alone[reference.name]
            own = []
            for rank, results in enumerate(self.together):
                own += [f"process {rank}: {text}" for text in differences(results[case.name], expected, allowed)]
            first = self.together[0][case.name]
            if not first.error and not expected.error:
                own += summary_differences(first, expected, allowed)
                own += export_differences(self.folder / case.folder, self.folder / reference.folder, allowed)
            if own:
                problems[case.name] = own
        return problems


def test_each_plugin_is_a_row_or_says_why_it_is_not():
    ours = {name for name, point in installed().items() if is_own(point)}
    assert ROWS.keys() | NOT_COMPARED.keys() == ours, "add the plugin to ROWS of tests/helpers/world_rows.py"
    assert not ROWS.keys() & NOT_COMPARED.keys()


@pytest.mark.slow
def test_each_pair_that_a_recipe_may_hold_is_in_a_group():
    names = [name for name, row in ROWS.items() if row.task == "vectors" and name not in UNPAIRED]
    wanted = {frozenset(pair) for pair in combinations(names, 2) if may_share(pair)}
    held = set()
    for group in pair_groups():
        pairs = {frozenset(pair) for pair in combinations(group.plugins, 2)}
        assert all(may_share(pair) for pair in pairs), group.name
        held |= pairs
    assert wanted <= held
    assert frozenset({"lora", "token-cache"}) in held
    assert frozenset({"folds", "sample-audit"}) not in held


@pytest.mark.slow
def test_each_plugin_that_trains_with_fsdp_does():
    trained = set()
    for group in (*single_groups(), *pair_groups()):
        if "fsdp" in group.strategies:
            trained |= {*group.plugins}
    assert {name for name, row in ROWS.items() if "fsdp" in row.strategies} - {*UNPAIRED} <= trained


def test_declared_refusals_need_no_row():
    for name, row in ROWS.items():
        assert not row.refuses.keys() & load(name).conflicts.keys(), name


def test_some_plugins_train_as_in_one_process(processes: Callable[..., list[ProcessResult]], tmp_path: Path):
    groups = [Group(ROWS[name].task, (name,), ("ddp",)) for name in QUICK]
    assert Worlds(processes, tmp_path, groups).problems == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def singles(processes: Callable[..., list[ProcessResult]], folder: Path) -> Worlds:
    return Worlds(processes, folder / "singles", single_groups())


@pytest.fixture(scope="module")
def pairs(processes: Callable[..., list[ProcessResult]], folder: Path) -> Worlds:
    return Worlds(processes, folder / "pairs", pair_groups())


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(group.name for group in single_groups() if group.strategies))
def test_two_processes_train_a_plugin_as_one_does(singles: Worlds, name: str):
    assert {case: own for case, own in singles.problems.items() if f" {name} " in case} == {}


@pytest.mark.slow
def test_two_processes_train_pairs_of_plugins_as_one_does(pairs: Worlds):
    assert pairs.problems == {}


@pytest.mark.slow
def test_two_processes_step_each_optimizer_as_one_does(
    processes: Callable[..., list[ProcessResult]], folder: Path
) -> None:
    assert Worlds(processes, folder / "optimizers", optimizer_groups()).problems == {}


@pytest.mark.slow
def test_the_compared_model_has_trained_state_of_each_kind(singles: Worlds):
    ended = singles.alone[single_groups()[0].alone().name]
    assert ended.trained is not None
    before = ended.trained.gradients
    assert "frozen.weight" not in before
    assert ended.buffers["norm.running_mean"].any()
    assert ended.buffers["center.passes"] == 5
    assert ended.state["tied.weight"].equal(ended.state["again.weight"])


PLAIN = {"vectors": "module", "texts": "text-classification"}
"""Task -> the row that trains it without a further plugin."""
BITWISE = [
    name for name, row in ROWS.items() if row.task in PLAIN and not row.train and load(name).numerics == "bitwise"
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_plugins_leave_buffers_as_they_are_without_them(singles: Worlds, name: str):
    """``Conformance`` compares weights; the model of these rows has buffers that training changes."""
    task = ROWS[name].task
    ours = singles.alone[Group(task, (name,), ()).alone().name]
    expected = singles.alone[Group(task, (PLAIN[task],), ()).alone().name]
    assert {key for key, buffer in ours.buffers.items() if not buffer.equal(expected.buffers[key])} == set()
    assert {key for key, tensor in ours.state.items() if not tensor.equal(expected.state[key])} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amp", "cpu-layers"])
def test_gradients_of_fsdp_in_bf16_are_near_those_of_autocast(singles: Worlds, name: str):
    """The two round differently, see ``Group.rounds_as_alone``: by 0.4% in each operation (bf16 has 8 bits)."""
    group = Group(ROWS[name].task, (name,), ())
    sharded = singles.alone[group.reference("fsdp").name].trained
    alone = singles.alone[group.alone().name].trained
    assert sharded is not None
    assert alone is not None
    ours = torch.cat([sharded.gradients[key].flatten() for key in alone.gradients])
    expected = torch.cat([gradient.flatten() for gradient in alone.gradients.values()])
    assert 0 < (ours - expected).norm() < 0.1 * expected.norm()

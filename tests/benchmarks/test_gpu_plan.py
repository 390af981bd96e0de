"""The plan of the GPU suite: seconds, skipped and cut parts, and the workers that a device has memory for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import forked
import pytest
from gpu_suite import BENCHMARKS, read, run

pytestmark = pytest.mark.usefixtures("suite_modules")


def test_the_plan_fits_its_calls() -> None:
    import plan

    seconds = {part.name: part.seconds for part in plan.PLAN}
    assert list(seconds) == ["ablation", "lm", "job", "tests", "plugin-tests", "peers", "seeds"]
    assert plan.SETUP_SECONDS + sum(list(seconds.values())[:4]) <= plan.CALL_SECONDS <= 600
    assert all(part.least <= part.seconds for part in plan.PLAN)


@pytest.mark.parametrize(
    ("passed", "expected"),
    [(152, 140), (100, 192), (400, 140), (500, 80)],
    ids=["in time", "earlier parts were shorter", "they were longer", "little is left"],
)
def test_a_part_gets_the_seconds_that_earlier_ones_did_not_use(passed: float, expected: float) -> None:
    import _suite
    import plan

    budget = _suite.Budget(580, used=passed)
    seconds = plan.seconds_of(plan.PLAN[1], plan.SETUP_SECONDS + 140 + 140, budget)
    assert seconds == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize(
    ("gibibytes", "arms"), [(None, "plain graphs muon"), (140, "plain graphs muon"), (79, "plain graphs")]
)
def test_the_plan_leaves_out_what_80_gib_have_no_time_for(gibibytes: int | None, arms: str) -> None:
    import plan

    memory = None if gibibytes is None else gibibytes * 2**30
    options = {part.name: plan.options_of(part, memory) for part in plan.PLAN}
    assert options["lm"] == ("--arms", *arms.split(), "--rounds", "2")
    assert (options["peers"] is None) == (gibibytes == 79)
    assert options["ablation"] is not None


@pytest.mark.parametrize(("seconds", "started"), [pytest.param(23, ["tests"], marks=pytest.mark.slow), (3, [])])
def test_the_plan_skips_what_does_not_fit_and_ends_in_time(seconds: int, started: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    options = ["--tiny", "--start", "tests", "--seconds", str(seconds + 4), "--used", "4", "--results", str(tmp_path)]
    done = forked.run(str(BENCHMARKS / "gpu" / "plan.py"), *options, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # by the clock of the plan: a busy machine takes long to start the process
    ended = re.fullmatch(r".*: ([0-9]+) s", done.stdout.splitlines()[-1])
    assert ended is not None, done.stdout
    assert int(ended[1]) < seconds + 20
    skipped = [
        line["name"]
        for path in sorted(tmp_path.glob("*.jsonl"))
        for line in read(path)
        if line["kind"] == "skipped" and line["name"] in ("tests", "plugin-tests", "peers", "seeds")
    ]
    assert sorted(skipped + started) == ["peers", "plugin-tests", "seeds", "tests"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ablation", "lm", "job", "peers"])
def test_a_part_of_the_plan_without_time_records_what_it_skips(name: str, tmp_path: Path) -> None:
    import plan

    (part,) = (part for part in plan.PLAN if part.name == name)
    lines = run(part.script, tmp_path, *part.options, "--seconds", "5")
    kinds = {line["kind"] for line in lines}
    assert {"facts", "skipped"} <= kinds <= {"facts", "ceilings", "texts", "skipped"}


@pytest.mark.parametrize(
    ("gibibytes", "expected", "arms"), [(None, 4, 4), (140, 8, 6), (80, 8, 1), (24, 2, 1), (8, 1, 1)]
)
def test_as_many_workers_are_held_as_the_device_has_memory_for(gibibytes: int | None, expected: int, arms: int) -> None:
    import _workers
    import ablation
    import lm

    memory = None if gibibytes is None else gibibytes * 2**30
    assert _workers.held_at_once(memory, ablation.WORKER_BYTES, ablation.HELD) == expected
    assert lm.arms_at_once(memory) == arms


def test_a_window_that_does_not_fit_the_budget_is_skipped(tmp_path: Path) -> None:
    import _suite
    import _workers

    class Ready:
        window_seconds = 9.0

    records = _suite.Records(tmp_path / "records.jsonl")
    budget = _suite.Budget(100, used=80)
    ready: dict[str, Any] = {"baseline": Ready()}
    _workers.probe(ready, ["baseline"], records, budget, kept=15)
    _workers.measure(ready, "baseline", "measure", records, budget, kept=15, round=1)
    assert [(line["kind"], line["name"], line["command"]) for line in records.lines] == [
        ("skipped", "baseline", "syncs"),
        ("skipped", "baseline", "profile"),
        ("skipped", "baseline", "measure"),
    ]


def test_a_worker_that_the_budget_cuts_has_not_failed(tmp_path: Path) -> None:
    import _suite

    log = tmp_path / "worker.log"
    log.write_text("Traceback")
    records = _suite.Records(tmp_path / "records.jsonl")
    for error, used in ((_suite.Late("no reply"), 99), (_suite.Late("no reply"), 10), (_suite.Failure("died"), 99)):
        records.failure("baseline", "measure", error, log, _suite.Budget(100, used=used))
    assert [line["kind"] for line in records.lines] == ["cut", "error", "error"]


def test_nothing_starts_that_does_not_fit_the_budget(tmp_path: Path) -> None:
    import _suite
    import _workers

    records = _suite.Records(tmp_path / "records.jsonl")
    with _workers.workers({"one": ({}, {}, 1)}, tmp_path, records, _suite.Budget(10), parallel=1) as ready:
        assert not ready
    assert [line["kind"] for line in read(tmp_path / "records.jsonl")] == ["skipped"]

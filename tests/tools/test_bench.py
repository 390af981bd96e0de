"""`fastloop bench`.

The ablation runs for real: in processes of its own where that is the point, else in this one, which is quicker.

Modules:
    core/fastloop/cli/numerics.py
    plugins/fastloop_tools/bench/ablation.py
    plugins/fastloop_tools/bench/command.py
    plugins/fastloop_tools/bench/plan.py
    plugins/fastloop_tools/bench/report.py
    plugins/fastloop_tools/shared/changed_recipes.py
    plugins/fastloop_tools/trials/measure.py
    plugins/fastloop_tools/trials/measuring_process.py
    plugins/fastloop_tools/trials/pairs.py
    plugins/fastloop_tools/trials/statistics.py
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
import yaml
from torch import nn

from fastloop import UsageError
from fastloop.cli import main
from fastloop.cli.numerics import largest_difference
from fastloop.recipe import load_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.bench import ablation
from fastloop_tools.bench.ablation import check_numerics, variant_results
from fastloop_tools.bench.plan import make_ablation
from fastloop_tools.trials import pairs
from fastloop_tools.trials.measuring_process import Spec, measure, switch_dropout_off
from fastloop_tools.trials.statistics import break_even, interval, verdict

CODE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    train, validation = (TensorDataset(rows, rows[:, :3].argmax(1)) for rows in (inputs, inputs[:16]))
    return {"train": train, "validation": validation}
"""

PLUGINS = """
import os
import time
from dataclasses import dataclass
from fastloop import Plugin, hookimpl
from fastloop.plugins.plugin import Device

class Honest(Plugin):
    name = "honest"

class Lies(Plugin):
    "Says that it is exact, and trains at half the learning rate."
    name = "lies"

    @hookimpl
    def before_optimizer_step(self, run):
        for parameter in run.model.parameters():
            parameter.grad *= 0.5
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-3

class Fails(Plugin):
    name = "fails"

    @hookimpl
    def after_step(self, run):
        if run.state.step == 2:
            raise ValueError("no more")

class Dies(Plugin):
    name = "dies"

    @hookimpl
    def before_fit(self):
        os._exit(7)

class Hangs(Plugin):
    name = "hangs"

    @hookimpl
    def before_fit(self):
        time.sleep(600)

class Needy(Plugin):
    name = "needy"
    requirements = (Device("abacus"),)

class Asks(Plugin):
    name = "asks"
    requires = ("honest",)

class Stops(Plugin):
    "Ctrl-C, in the second repeat."
    name = "stops"

    @hookimpl
    def before_fit(self, run):
        if run.recipe.train.seed % 2:
            raise KeyboardInterrupt

class Diverges(Plugin):
    "NaN with the second seed, and an error with the third."
    name = "diverges"

    @hookimpl
    def before_step(self, run):
        if run.recipe.train.seed == 1:
            for parameter in run.model.parameters():
                parameter.data.fill_(float("nan"))
        if run.recipe.train.seed == 2:
            raise ValueError("no more")

class Early(Plugin):
    "Wants a variable from the start of the process."
    name = "early"

    @hookimpl
    def environment(self):
        return {"FASTLOOP_EARLY": "yes"}

    @hookimpl
    def write_summary(self, summary):
        summary["early"] = os.environ.get("FASTLOOP_EARLY") == "yes"
"""

NAMES = ("honest", "lies", "fails", "dies", "hangs", "needy", "asks", "stops", "early", "diverges")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write a recipe with plugins of a package that is installed here: ``recipe("honest", "lies")`` -> its path."""
    site = tmp_path / "site"
    metadata = site / "planted-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[fastloop.plugins]\n" + "".join(f"{name} = planted_plugins:{name.capitalize()}\n" for name in NAMES)
    )
    (site / "planted_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    Path("net.py").write_text(CODE)

    def put(*plugins: Any, **train: Any) -> str:
        tree = {
            "model": {"module": "net.py:Net"},
            "data": {"module": "net.py:data"},
            "train": {"epochs": 3, "batch_size": 8, "lr": 1e-2, "seed": 0, "device": "cpu", **train},
            "plugins": [{"module": {"loss": "cross_entropy"}}, *plugins],
        }
        Path("tiny.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return "tiny.yaml"

    yield put
    sys.modules.pop("planted_plugins", None)


Bench = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Run the command in this process; returns the exit code, the output, and bench.json. ``here=True``: its
    measurements as well."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("rich._console", None)

    def in_this_process(spec: Spec, length: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        started = time.monotonic()
        spec.recipe["output"] = str(tmp_path / f"measured{time.monotonic_ns()}")
        return measure(spec, length) | {"process_seconds": time.monotonic() - started, "foreign_load": 0.0}

    def call(*arguments: str, here: bool = True) -> tuple[int, str, dict[str, Any]]:
        if here:
            monkeypatch.setattr(pairs, "run_process", in_this_process)
            monkeypatch.setattr(pairs, "foreign_load", lambda: 0.0)
        monkeypatch.setattr(sys, "argv", ["fastloop", "bench", *arguments, "--output", "ablation"])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        written = Path("ablation/bench.json")
        record = json.loads(written.read_text()) if written.exists() else {}
        return int(exited.value.code or 0), captured.out + captured.err, record

    return call


CHECKS = ("metric-check", "optimizer-check")
"""Default plugins that check a run, which stay on in a measurement."""
SHORT = ("--steps", "3", "--seconds", "0", "--warmup", "1", "--repeats", "2")


def variants(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["title"]: row for row in record["variants"]}


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_measures_each_variant_in_new_processes_and_writes_results(recipe):
    done = forked.run("-m", "fastloop", "bench", recipe("early"), *SHORT, "--output", "ablation")
    record = json.loads(Path("ablation/bench.json").read_text())
    assert done.returncode == 0, done.stderr
    assert list(variants(record)) == ["baseline", "+ early"]
    for row in record["variants"]:
        assert len(row["measurements"]) == 2
        for found in row["measurements"]:
            # neither progress nor log
            assert found["summary"]["plugins"] == ["bench-meter", "module", *row["plugins"], *CHECKS]
            assert (found["steps"], found["samples"], len(found["losses"])) == (3, 24, 4)
            assert found["seconds"] > 0
            assert found["startup_seconds"] > 0
            assert found["peak_memory_bytes"] > 2**20
            assert found["total_steps"] == 24  # the recipe's own three epochs
            assert found["summary"]["validation"] is None
    base, early = (row["measurements"] for row in record["variants"])
    # the seed of a repeat is all variants'
    assert [found["losses"] for found in base] == [found["losses"] for found in early]
    assert all(found["summary"]["early"] for found in early)  # it was started again with what the plugin wants
    assert base[0]["losses"] != base[1]["losses"]
    assert record["complete"]
    assert record["versions"]["planted"] == "1.0"
    assert variants(record)["+ early"]["results"]["over_before"]["pairs"] == 2
    assert "too few repeats to tell" in Path("ablation/bench.md").read_text()
    (found,) = record["numerics"]
    assert (found["verdict"], found["difference"]) == ("holds", 0.0)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_bench_window_has_minimum_duration_and_earlier_results_are_kept(recipe, bench):
    Path("ablation").mkdir()
    Path("ablation/bench.json").write_text("years")
    code, out, record = bench(recipe("honest"), *SHORT, "--seconds", "0.2", "--repeats", "1", "--no-numerics")
    assert code == 0, out
    for row in record["variants"]:
        (found,) = row["measurements"]
        assert found["steps"] > 3
        assert 0.2 <= found["seconds"] < sum(found["step_seconds"])
        assert found["seconds"] - found["step_seconds"][-1] < 0.2  # and no longer
        assert found["summary"]["reason"] == "measured"
        assert len(found["losses"]) == 1 + found["steps"]
    assert "at least 3 steps and 0.2 s" in Path("ablation/bench.md").read_text()
    assert Path("ablation.1/bench.json").read_text() == "years"


@pytest.mark.slow
def test_bench_reports_killed_or_hanging_process_as_row(recipe):
    given = (
        recipe("dies", "hangs"),
        "--variants",
        "dies;hangs",
        *SHORT,
        "--repeats",
        "1",
        "--timeout",
        "20",
        "--no-numerics",
    )
    done = forked.run("-m", "fastloop", "bench", *given, "--output", "ablation")
    record = json.loads(Path("ablation/bench.json").read_text())
    assert done.returncode == 1
    assert variants(record)["+ dies"]["error"] == "the process ended with exit code 7: no output"
    assert "took more than 20 seconds" in variants(record)["hangs"]["error"]
    assert variants(record)["baseline"]["results"] is not None
    assert "exit code 7" in done.stdout


@pytest.mark.slow
def test_bench_ctrl_c_stops_worker_and_keeps_results(recipe):
    given = (recipe("hangs"), *SHORT, "--output", "ablation", "--variants", "honest;hangs", "--with", "honest")
    output = Path("said.txt")
    with output.open("w") as file:  # not forked: SIGINT must arrive as in a shell
        command = subprocess.Popen(
            [sys.executable, "-u", "-m", "fastloop", "bench", *given], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while "\nrepeat 1/2  + honest" not in output.read_text():
            assert command.poll() is None, output.read_text()
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        assert command.wait(300) == 130, output.read_text()
    finally:
        command.kill()
        command.wait()
    assert "The results so far are in ablation." in output.read_text()
    record = json.loads(Path("ablation/bench.json").read_text())
    assert not record["complete"]
    assert variants(record)["+ honest"]["results"]["samples_per_second"]["median"] > 0
    assert "Not complete" in Path("ablation/bench.md").read_text()


def test_bench_reports_disturbed_measurements(recipe, bench, monkeypatch):
    loads = iter([0.0, 0.4, 0.01, 0.3])

    def disturbed(spec: Spec, length: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        spec.recipe["output"] = f"measured{time.monotonic_ns()}"
        return measure(spec, length) | {"process_seconds": 0.0, "foreign_load": next(loads)}

    monkeypatch.setattr(pairs, "foreign_load", lambda: 0.0)
    monkeypatch.setattr(pairs, "run_process", disturbed)
    code, out, record = bench(recipe("honest"), *SHORT, "--no-numerics", here=False)
    assert code == 0, out
    assert out.count("of the machine meanwhile") == 2
    assert record["foreign_load"]["worst"] == 0.4
    assert "up to 40% during a measurement" in Path("ablation/bench.md").read_text()


def test_bench_interrupt_in_second_repeat_keeps_first(recipe, bench):
    code, out, record = bench(recipe("stops"), *SHORT)
    assert code == 130
    assert "The results so far are in ablation." in out
    assert [len(row["measurements"]) for row in record["variants"]] == [1, 1]


# -- variants ----------------------------------------------------------------------------------------------------------


def test_variants_add_plugins_in_recipe_order_then_leave_each_out(recipe):
    loaded = load_recipe(recipe("honest", "lies", "fails", "log"))
    found = make_ablation(loaded, (), leave_one_out=True)
    assert [(variant.title, variant.plugins, variant.before) for variant in found.variants] == [
        ("baseline", (), None),
        ("+ honest", ("honest",), "baseline"),
        ("+ lies", ("honest", "lies"), "+ honest"),
        ("+ fails", ("honest", "lies", "fails"), "+ lies"),
        ("all but honest", ("lies", "fails"), "+ fails"),
        ("all but lies", ("honest", "fails"), "+ fails"),
        ("all but fails", ("honest", "lies"), "+ fails"),
    ]
    assert len(found.measured()) == 6  # "all but fails" is the variant "+ lies", measured once


@pytest.mark.slow
def test_bench_reports_impossible_variant_and_continues(recipe, bench):
    code, out, record = bench(recipe("asks", "honest", "needy"), *SHORT)
    assert code == 0, out
    found = variants(record)
    assert "plugin 'asks' requires 'honest'" in found["+ asks"]["why_not"]
    assert found["+ honest"]["before"] == "baseline"
    assert "needs a device of type abacus; this run is on cpu" in found["+ needy"]["why_not"]
    assert "requires 'honest'" in found["all but honest"]["why_not"]
    assert found["all but asks"]["results"] is not None
    assert [(row["plugin"], row["verdict"]) for row in record["numerics"]] == [("asks", "holds"), ("honest", "holds")]
    assert record["numerics"][0]["control"] == ["honest"]
    assert "abacus" in out


def test_custom_variants_override_recipe(recipe, bench):
    code, out, record = bench(
        recipe("honest"), "--variants", "asks,honest;honest", *SHORT, "--no-leave-one-out", "--no-numerics"
    )
    assert code == 0, out
    assert [(row["title"], row["plugins"]) for row in record["variants"]] == [
        ("baseline", []),
        ("+ honest + asks", ["honest", "asks"]),
        ("honest", ["honest"]),
    ]
    assert record["numerics"] == []


def test_bench_reports_failing_plugin_as_row_and_continues(recipe, bench):
    code, out, record = bench(recipe("fails", "honest"), "--variants", "fails;honest", *SHORT)
    assert code == 1
    error = variants(record)["+ fails"]["error"]
    assert all(name in error for name in ("plugin 'fails' (planted 1.0)", "after_step: ValueError: no more"))
    assert variants(record)["+ fails"]["measurements"] == []
    assert variants(record)["honest"]["before"] == "baseline"
    assert variants(record)["honest"]["results"]["over_before"]["pairs"] == 2
    assert "plugin 'fails'" in out
    assert [row["verdict"] for row in record["numerics"]] == ["failed", "holds"]


@pytest.mark.parametrize(
    ("plugins", "arguments", "expected"),
    [
        ((), (), "nothing-to-measure"),
        (("honest", {"honest": {}}), (), "listed-twice"),
        (("asks",), (), "missing-plugin 'asks' 'honest'"),
        (({"honest": {"lr": 1}},), (), "unknown-option plugins.honest.lr"),
        (("honest",), ("--variants", "honset"), "unknown-plugin 'honest'"),
        (("honest",), ("--variants", "honest;nosuch"), "unknown-plugin --variants: 'nosuch'"),
        (("honest",), ("--variants", "nosuch.py:Early"), "file-missing --variants: nosuch.py"),
        (("honest",), ("--with", "nosuch", "--variants", "honest"), "unknown-plugin --with: 'nosuch'"),
        (("honest",), ("--without", "nosuch", "--variants", "honest"), "unknown-plugin --without: 'nosuch'"),
        (("honest", "early"), ("--variants", "honest;early;honest"), "listed-twice --variants honest"),
        (("honest",), ("data.module=nowhere.py:data",), "file-missing nowhere.py"),
        (("honest",), ("output=elsewhere",), "no-effect output=elsewhere --output elsewhere"),
    ],
    ids=[
        "no plugin",
        "twice",
        "requires",
        "option",
        "ablation",
        "variant not installed",
        "variant without a file",
        "plugin not installed",
        "left out, not installed",
        "variant twice",
        "data",
        "output",
    ],
)
def test_bench_rejects_invalid_recipe_before_measuring(recipe, bench, plugins, arguments, expected):
    code, out, record = bench(recipe(*plugins), *SHORT, *arguments)
    assert code == 2
    assert_problem(out, expected)
    assert record == {}
    assert not Path("ablation").exists()


def test_sets_that_add_the_same_plugin_to_different_sets_have_their_own_titles(recipe):
    sets = [["early"], ["honest"], ["honest", "early"]]
    plan = make_ablation(load_recipe(recipe("honest", "early")), sets, leave_one_out=False)
    assert [variant.title for variant in plan.variants] == ["baseline", "+ early", "honest", "honest, early"]


def test_bench_stops_if_baseline_fails(recipe, bench):
    code, out, _ = bench(recipe("honest"), "data.module=net.py:nothing", *SHORT)
    assert code == 2
    assert_problem(out, "unknown-name data.module net.py 'nothing'")


# -- time and its limit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "processes"), [((), 6), (("--no-numerics",), 4)])
def test_bench_says_before_the_start_how_many_processes_it_needs(recipe, bench, options, processes):
    _, out, record = bench(recipe("honest"), *SHORT, *options)
    started = out.index("repeat 1/2")
    assert f"{processes} processes, at least {8 * processes} s" in " ".join(out[:started].split())
    assert sum(len(row["measurements"]) for row in record["variants"]) + 2 * len(record["numerics"]) == processes


def test_the_page_has_the_command_with_its_options(recipe, bench):
    words = [recipe("honest"), "train.lr=0.02", *SHORT, "--no-leave-one-out", "--no-numerics", "--budget", "1h"]
    code, out, record = bench(*words, "--timeout", "300")
    assert code == 0, out
    written = shlex.split(record["command"])
    assert written[:4] == ["fastloop", "bench", *words[:2]]
    options = [*words[2:], "--timeout", "300.0", "--output", "ablation"]
    options[options.index("--seconds") + 1] = "0.0"
    assert sorted(written[4:]) == sorted(options)
    assert f"`{record['command']}`" in Path("ablation/bench.md").read_text()


@pytest.mark.parametrize(
    ("budget", "seconds_a_step", "proposed"),
    [
        # 10 processes of 95 s start in 35 s: 25 s are left for 30 steps of 2 s
        (600, 2.0, "--budget 16m or --steps 12"),
        # 5 s are left, and each process measures at least 10 s
        (400, 2.0, "--budget 16m or --steps 2 --seconds 5"),
        # 30 steps take 3 s, and start and end 85 s: 5 s are left of 10 s
        (900, 0.1, "--budget 16m or --seconds 5"),
        (360, 2.0, "--budget 16m"),
    ],
)
def test_a_budget_that_is_too_small_names_the_options_that_shorten_a_process(recipe, budget, seconds_a_step, proposed):
    settings = ablation.AblationSettings(repeats=5, numerics=False, steps=30, seconds=10.0, budget=budget)
    plan = make_ablation(load_recipe(recipe("honest")), [], leave_one_out=False)
    measured = ablation.Bench(plan, settings, None, {}, print, lambda record: None)
    with expect_problem(f"budget-too-small Give {proposed}.", UsageError):
        measured.check_budget({"process_seconds": 95.0, "seconds_a_step": seconds_a_step})


@pytest.mark.parametrize(("budget", "proposed"), [(60, "--budget 5m"), (150, "--budget 5m, or measure fewer plugins")])
def test_a_budget_for_one_plugin_proposes_to_measure_fewer(recipe, budget, proposed):
    settings = ablation.AblationSettings(repeats=5, numerics=False, budget=budget)
    plan = make_ablation(load_recipe(recipe("honest", "early")), [], leave_one_out=False)
    measured = ablation.Bench(plan, settings, None, {}, print, lambda record: None)
    assert measured.processes() == 15
    with expect_problem("budget-too-small", UsageError) as refused:
        measured.check_budget({"process_seconds": 18.0, "seconds_a_step": 1.8})
    assert f" Give {proposed}" in str(refused.value)
    assert ("fewer plugins" in str(refused.value)) == ("fewer plugins" in proposed)


def test_an_ablation_that_exceeds_its_budget_ends_after_the_first_measurement(recipe, bench, monkeypatch):
    monkeypatch.setattr(ablation.Bench, "processes", lambda self: 10**9)
    recipe_file = recipe("honest")
    code, out, record = bench(recipe_file, *SHORT, "--budget", "1h")
    assert code == 2
    assert_problem(out, "budget-too-small --budget: 1000000000")
    assert [len(row["measurements"]) for row in record["variants"]] == [1, 0]


def test_the_time_is_told_again_by_what_the_first_measurements_took(recipe, bench):
    """Steps may take longer than `--seconds`, and variants other times than the baseline."""
    _, out, record = bench(recipe("honest"), *SHORT, "--no-numerics")
    took = [row["measurements"][0]["process_seconds"] for row in record["variants"]]
    words = " ".join(out.split())
    repeats = record["settings"]["repeats"]
    all_as_baseline = len(took) * repeats * took[0]
    first = words.index("repeat 1/2 baseline")
    second = words.index("repeat 2/2")
    assert f"{ablation.show_time(all_as_baseline)} in all if" in words[first:second]
    assert (
        f"{ablation.show_time(sum(took) * repeats)} in all" in words[first:second].rpartition("a measurement takes")[2]
    )


@pytest.mark.parametrize(("budget", "is_over"), [(1.0, True), (10**9, False), (None, False)])
def test_after_the_first_repeat_a_budget_that_is_too_small_is_named(recipe, budget, is_over):
    lines: list[str] = []
    settings = ablation.AblationSettings(repeats=5, numerics=False, budget=budget)
    plan = make_ablation(load_recipe(recipe("honest")), [], leave_one_out=False)
    measured = ablation.Bench(plan, settings, None, {}, lines.append, lambda record: None)
    for seconds, variant in zip((30.0, 90.0), plan.measured(), strict=True):
        measured.measured[variant.plugins] = [{"process_seconds": seconds}]
    measured.tell_time()
    assert "30 to 90 s" in lines[0]
    assert "10 minutes in all" in lines[0], "five times 30 and 90 seconds"
    assert ("--budget" in lines[0]) == is_over


@pytest.mark.parametrize(
    ("budget", "options", "proposed"),
    [
        # a start takes 8 s: 6 processes fit with 600 / 6 - 8 s each, and 4 with 600 / 4 - 8 s
        ("10m", (), "--budget 101m or --seconds 92"),
        ("10m", ("--no-numerics", "--no-leave-one-out"), "--budget 68m or --seconds 142"),
        # 4 processes of 1008 s take 4032 s
        ("4040s", (), "--budget 101m or --no-numerics or --seconds 665"),
        ("40s", (), "--budget 101m or --no-numerics --seconds 2"),
        ("9s", (), "--budget 101m"),
    ],
)
def test_an_ablation_that_no_start_fits_into_its_budget_measures_nothing(recipe, bench, budget, options, proposed):
    arguments = (*SHORT, "--seconds", "1000", "--budget", budget, *options)
    code, out, record = bench(recipe("honest"), *arguments)
    assert code == 2
    assert f"Give {proposed}." in " ".join(out.split())
    assert "variants" not in record, "nothing is measured"


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--select", "fast.yaml")], ids=["ablation", "selection"])
def test_ctrl_c_ends_a_bench_that_a_shell_started_in_the_background(recipe, options):
    command = shlex.join([sys.executable, "-m", "fastloop", "bench", recipe("hangs"), "--variants", "hangs"])
    if options:
        command = shlex.join([sys.executable, "-m", "fastloop", "bench", recipe("hangs"), *options])
    # a shell without job control lets its jobs in the background ignore SIGINT
    shell = subprocess.Popen(
        ["sh", "-c", f"{command} & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert shell.stdout is not None
    job = int(shell.stdout.readline())
    children: list[psutil.Process] = []
    while not children:  # the first measurement has started
        time.sleep(0.1)
        children = psutil.Process(job).children(recursive=True)
    os.killpg(shell.pid, signal.SIGINT)
    _, alive = psutil.wait_procs([psutil.Process(job), *children], timeout=30)
    assert alive == []
    shell.communicate(timeout=30)


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_exits_nonzero_for_plugin_with_wrong_numerics_class(recipe, bench):
    code, out, record = bench(recipe("honest", "lies"), *SHORT, "--no-leave-one-out")
    assert code == 1
    honest, lies = record["numerics"]
    assert (honest["verdict"], lies["verdict"]) == ("holds", "broken")
    assert lies["losses"][0] == lies["control_losses"][0]  # before the first update there is no difference
    assert lies["difference"] > 1e-3
    assert "BROKEN" in out
    assert "BROKEN" in Path("ablation/bench.md").read_text()


def test_numerics_bounds_of_each_class(recipe):
    loaded = load_recipe(recipe("lies"))
    found = make_ablation(loaded, (), leave_one_out=False)
    losses = {(): [1.0, 0.5], ("lies",): [1.0, 0.5 * (1 + 2e-6)]}

    for promise, kept in (("bitwise", "broken"), ("reassociated", "holds"), ("changes-training", "not compared")):
        found.plugins["lies"].numerics = promise
        (row,) = check_numerics(found, lambda names: {"losses": losses[names]})
        assert row["verdict"] == kept, promise


@pytest.mark.parametrize(("difference", "trainings"), [(0.0, 2), (1e-3, 3)])
def test_a_control_is_trained_again_only_if_the_losses_differ(recipe, difference, trainings):
    found = make_ablation(load_recipe(recipe("honest")), (), leave_one_out=False)
    trained = []

    def train(names):
        trained.append(names)
        return {"losses": [1.0 + difference * len(names)]}

    (row,) = check_numerics(found, train)
    assert row["verdict"] == ("broken" if difference else "holds")
    assert len(trained) == trainings


def test_dropout_is_off_in_modules_and_in_attributes():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.1
            self.config = type("Config", (), {})()
            self.config.attn_pdrop = 0.1
            self.config.hidden_size = 4.0
            self.part = nn.Linear(4, 4)
            self.part.config = type("PartConfig", (), {})()
            self.part.config.dropout_rate = 0.2
            self.inner = nn.Sequential(nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.3))

    model = Attention()
    rates = ["Attention.attention_dropout", "Config.attn_pdrop", "Dropout.p", "MultiheadAttention.dropout"]
    rates.append("PartConfig.dropout_rate")
    switched = switch_dropout_off(model)
    assert sorted(switched.names) == rates
    assert switch_dropout_off(model).names == []
    assert model.attention_dropout == model.config.attn_pdrop == model.inner[0].p == model.inner[1].dropout == 0.0
    assert model.config.hidden_size == 4.0
    assert model.part.config.dropout_rate == 0.0
    sample = torch.ones(3, 4)
    assert model.inner[0](sample).equal(sample)
    switched.restore_configurations()
    assert (model.config.attn_pdrop, model.part.config.dropout_rate) == (0.1, 0.2)
    assert model.attention_dropout == model.inner[0].p == 0.0


# -- quality -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_quality_compares_first_and_last_variant_over_three_seeds(recipe, bench):
    code, out, record = bench(recipe("lies"), *SHORT, "--no-numerics", "--quality-steps", "4")
    assert code == 0, out
    metrics = record["quality"]["metrics"]
    assert [len(metrics[arm]["validation loss"]) for arm in ("baseline", "full")] == [3, 3]
    assert metrics["baseline"] != metrics["full"]
    assert "seeds' spread" in out


def test_a_training_that_diverges_or_fails_is_named_and_not_left_out_of_a_mean(recipe, bench):
    code, out, record = bench(recipe("diverges"), *SHORT, "--repeats", "1", "--no-numerics", "--quality-steps", "4")
    assert code == 1, "a training has failed"
    losses = record["quality"]["metrics"]["full"]["validation loss"]
    assert [loss is None for loss in losses] == [False, True, True]
    diverged, failed = record["quality"]["errors"]
    assert diverged == "full, seed 2: validation loss is nan"
    assert failed.startswith("full, seed 3: ")
    for shown in (out, Path("ablation/bench.md").read_text()):
        assert "full set: no finite value in 2 of 3 trainings (seeds 2, 3)" in shown
        assert "seeds' spread" not in shown


# -- statistics --------------------------------------------------------------------------------------------------------


def measured(*speeds: float, startup: float = 1.0, first: float = 0.0) -> list[dict[str, Any]]:
    """Measurements of 100 steps of one sample, at these speeds."""
    return [
        {
            "samples": 100,
            "tokens": 0,
            "padded_tokens": 0,
            "seconds": 100 / speed,
            "seconds_a_step": 1 / speed,
            "peak_memory_bytes": 1,
            "startup_seconds": startup,
            "warmup_extra_seconds": first,
            "total_steps": 1000,
            "warnings": [],
        }
        for speed in speeds
    ]


def rows(*measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [
        {"title": str(number), "kind": "step" if number else "baseline", "before": None, "measurements": list(item)}
        for number, item in enumerate(measurements)
    ]
    return variant_results(found)


def test_verdict_faster_if_all_pairs_agree_despite_drift():
    drift = [10.0, 12.0, 8.0, 15.0, 11.0]
    _, row = rows(measured(*drift), measured(*(1.1 * speed for speed in drift)))
    over = row["results"]["over_before"]
    assert over["verdict"] == "faster"
    assert over["median"] == pytest.approx(1.1)
    assert over["low"] > 1


def test_verdict_of_noise_and_of_slowdown():
    _, same, slow = rows(measured(*[10.0] * 5), measured(10.5, 9.6, 10.2, 9.9, 10.1), measured(*[8.0] * 5))
    assert same["results"]["over_before"]["verdict"] == "no difference beyond noise"
    assert slow["results"]["over_before"]["verdict"] == "slower"
    assert slow["results"]["over_baseline"]["median"] == pytest.approx(0.8)


def test_verdict_undecided_with_four_pairs():
    assert verdict([2.0] * 4) == "too few repeats to tell"
    assert verdict([2.0] * 5) == "faster"


def test_an_interval_holds_the_median_and_is_the_same_each_time():
    values = [1.0, 1.2, 0.9, 1.1, 1.3, 1.0, 1.05]
    low, high = interval(values)
    assert min(values) <= low <= 1.05 <= high <= max(values)
    assert interval(values) == (low, high)


def test_break_even_steps_include_compilation():
    _, row = rows(measured(*[10.0] * 5), measured(*[20.0] * 5, startup=1.5, first=9.5))
    assert row["results"]["pays_after_steps"] == 200  # 10 s more, and 0.05 s a step saved
    _, free = rows(measured(*[10.0] * 5), measured(*[20.0] * 5, startup=0.5))
    assert free["results"]["pays_after_steps"] == 0
    assert break_even(10.0, 0.0) is None


def test_loss_difference_is_relative_and_infinite_for_nan():
    assert largest_difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert largest_difference([2.002, 1.0], [2.0, 1.0]) == pytest.approx(1e-3)
    assert math.isinf(largest_difference([math.nan], [1.0]))
    assert largest_difference([math.nan], [math.nan]) == 0

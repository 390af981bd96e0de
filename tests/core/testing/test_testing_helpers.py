"""The test helpers for plugin authors: fixtures, processes, and a suite that finds errors in plugins.

Modules:
    core/fastloop/testing/first_uses.py
    core/fastloop/testing/runs.py
    core/fastloop/testing/settings.py
    core/fastloop/testing/starting.py
    core/fastloop/testing/tasks.py
    core/fastloop/testing/tiny.py
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn

from fastloop import UsageError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.testing import (
    IMAGES,
    LANGUAGE,
    TEXTS,
    VECTORS,
    Call,
    Conformance,
    HookCalls,
    expect_problem,
    run_commands,
    start,
    train,
    with_dropout,
    write_texts,
)
from fastloop.testing.starting import failure
from fastloop.testing.studies import strategies

# -- fixtures ----------------------------------------------------------------------------------------------------------


def test_hook_calls_are_listed_in_order_with_their_arguments(tiny_run, hook_calls):
    tiny_run(epochs=1)
    fired = [call.hook for call in hook_calls]
    assert hook_calls[0] == Call("check_recipe", ("recipe", "plugins"))
    assert Call("after_step", ("run", "loss")) in hook_calls
    assert fired.count("after_step") == 9
    assert (
        fired.index("before_fit")
        < fired.index("before_epoch")
        < fired.index("before_step")
        < fired.index("compute_loss")
    )
    assert fired[-1] == "teardown"


def test_recording_changes_nothing(tiny_run, tmp_path):
    plain = tiny_run()
    calls: list[Call] = []
    recorded = tiny_run([HookCalls(calls)])
    assert recorded.losses == plain.losses
    assert all(torch.equal(recorded.weights[name], weight) for name, weight in plain.weights.items())
    assert {"evaluate", "save_state", "write_checkpoint", "export_model"} < {call.hook for call in calls}


def world() -> tuple[str, str, int, str]:
    return os.environ["RANK"], os.environ["WORLD_SIZE"], torch.get_num_threads(), str(Path.cwd())


def group_of_sleepers(seconds: float) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
    Path("pids", str(os.getpid())).touch()
    Path("pids", str(child.pid)).touch()
    time.sleep(seconds)


def fails_on_one() -> str:
    if os.environ["RANK"] == "1":
        print("about to fail")
        raise ValueError("this one fails")
    return "done"


def helper_that_fails() -> None:
    raise ValueError("this helper fails")


def fails_with_helper() -> None:
    helper_that_fails()


def returns_a_generator() -> Any:
    return (number for number in range(3))


def warns() -> None:
    import warnings

    warnings.warn("an old way", DeprecationWarning, stacklevel=1)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    faulthandler._sigsegv()


@pytest.mark.slow
def test_processes_train_a_recipe_together(processes, tmp_path):
    recipe = VECTORS | {"train": {"epochs": 1, "batch_size": 8, "lr": 3e-3, "device": "cpu"}, "output": "run"}
    plain = processes(1, train, recipe, folder=tmp_path)[0].result
    first, second = (
        ended.result
        for ended in processes(2, train, recipe | {"plugins": [*VECTORS["plugins"], "ddp"]}, folder=tmp_path)
    )
    assert len(first.losses) == 5
    assert first.losses == second.losses
    assert first.summary["world_size"] == 2
    assert first.replicas == second.replicas
    assert (bool(first.weights), bool(second.weights)) == (True, False)
    assert plain.summary["world_size"] == 1
    assert [ended.result for ended in processes(2, world, folder=tmp_path)] == [
        (str(rank), "2", 1, str(tmp_path)) for rank in (0, 1)
    ]


def test_collections_of_garbage_leave_out_imported_modules(processes):
    """In the process of the tests, and in started ones."""
    assert gc.get_freeze_count() > 0
    (process,) = processes(1, gc.get_freeze_count)
    assert process.result > 0


def test_failing_process_fails_test_with_its_output(processes):
    with pytest.raises(pytest.fail.Exception) as failed:
        processes(2, fails_on_one)
    assert "process 0 of 2: done" in str(failed.value)
    assert "process 1 of 2: exit code 1\nabout to fail" in str(failed.value)
    assert "ValueError: this one fails" in str(failed.value)


def test_a_command_with_another_exit_code_fails_the_test_with_its_output(tmp_path):
    (output,) = run_commands([(tmp_path, "train", "nowhere.yaml")], code=2)
    assert "nowhere.yaml" in output
    with pytest.raises(pytest.fail.Exception, match=r"fastloop train nowhere.yaml\n.*exit code 2(.|\n)*no such file"):
        run_commands([(tmp_path, "train", "nowhere.yaml")])


def test_error_of_the_authors_function_names_its_line(tmp_path):
    (ended,) = start(1, fails_with_helper, folder=tmp_path)
    line = inspect.getsourcelines(helper_that_fails)[1] + 1
    assert f"fastloop: your code failed at {__file__}:{line} in helper_that_fails" in ended.output


def test_error_of_fastloop_is_not_attributed_to_the_author():
    (ended,) = start(1, train, {"train": {"epochs": "many"}})
    assert "RecipeError" in ended.output
    assert "your code failed" not in ended.output


def test_processes_make_their_folder(processes, tmp_path):
    (ended,) = processes(1, os.getcwd, folder=tmp_path / "a" / "b")
    assert ended.result == str(tmp_path / "a" / "b")


def test_function_or_result_that_cannot_be_pickled_is_an_error_that_names_it(tmp_path):
    with expect_problem("not-picklable", UsageError):
        start(1, lambda: None, folder=tmp_path)
    (ended,) = start(1, returns_a_generator, folder=tmp_path)
    assert all(name in ended.output for name in ("returns_a_generator", "generator", "pickle"))


def dropout_rates(task: Mapping[str, Any]) -> list[float]:
    write_texts(Path.cwd())
    recipe = make_recipe({**task, "output": "run", "train": {"device": "cpu"}})
    model = build(resolve(recipe)).unwrap_model()
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    config = getattr(model, "config", None)
    return sorted(rates | {getattr(config, "attention_dropout", None)} - {None})


@pytest.mark.slow
@pytest.mark.parametrize("task", [VECTORS, IMAGES, TEXTS, LANGUAGE], ids=["vectors", "images", "texts", "language"])
def test_dropout_of_a_task_is_an_argument(task, processes, tmp_path):
    given = [task, with_dropout(task, 0.0), with_dropout(task, 0.5)]
    rates = [processes(1, dropout_rates, task, folder=tmp_path)[0].result for task in given]
    assert rates == [[0.1], [0.0], [0.5]]
    assert task == given[0], "the task is not changed"


@pytest.mark.slow
def test_timeout_ends_all_processes(tmp_path):
    (tmp_path / "pids").mkdir()
    (ended,) = start(1, group_of_sleepers, 60.0, folder=tmp_path, limit=3)
    assert ended.code is None
    assert "group_of_sleepers" in ended.output
    assert "3 seconds were over" in ended.output
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    patience = time.monotonic() + 120
    while alive := [
        pid for pid in pids if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]:
        assert time.monotonic() < patience, alive


def test_warnings_are_errors_where_they_are_in_the_test():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (ended,) = start(1, warns)
    assert ended.code == 1
    assert "DeprecationWarning: an old way" in ended.output


def test_killed_process_has_negative_signal_as_exit_code():
    assert start(1, kills_itself)[0].code == -signal.SIGKILL


def test_a_crash_shows_its_stack_last():
    """Not the names of all loaded extension modules, for which `failure` has no room."""
    (ended,) = start(1, crashes)
    assert ended.code == -signal.SIGSEGV
    assert "in crashes" in failure([ended])


def test_a_slow_check_that_does_not_exist_is_refused():
    with expect_problem("unknown-check Misspelled.slow 'kiled' 'killed'", UsageError):
        type("Misspelled", (Conformance,), {"plugin": "ema", "slow": ["processes[ddp]", "kiled"]})


def test_import_without_pytest_names_extra():
    code = "import sys; sys.modules['pytest'] = None; import fastloop.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: fastloop.testing needs pytest, which is not installed. Install it: pip install "
        "'fastloop-train[testing]'"
    )


# -- conformance -------------------------------------------------------------------------------------------------------

HEAD = '''"""A plugin for a test.

    plugins:
      - {name}
"""

from typing import Any

import torch

from fastloop import Package, Plugin, hookimpl, option

class Made(Plugin):
    """It is made for a test."""

    name = "{name}"
'''
ALONE = 'conflicts = {"slot:strategy": "it is for one process."}\n'
GOOD = """
numerics = "bitwise"

every: int = option("Steps between two looks.", default=1, ge=1)

def __init__(self, **options):
    super().__init__(**options)
    self.seen = 0

@hookimpl
def after_step(self, run):
    self.seen += run.state.step % self.every == 0

@hookimpl
def save_state(self):
    return {"seen": self.seen}

@hookimpl
def load_state(self, state):
    self.seen = state["seen"]
"""
SCALES = """
@hookimpl
def after_backward(self, run):
    for parameter in run.model.parameters():
        parameter.grad.mul_(1.001)
"""
FORGETS = """
numerics = "changes-training"

def __init__(self, **options):
    super().__init__(**options)
    self.steps = 0

@hookimpl
def before_optimizer_step(self, run):
    self.steps += 1
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-2 / self.steps
"""
LEAKS = """
numerics = "reassociated"

@hookimpl
def before_fit(self):
    torch.set_num_threads(3)
"""
RAISES = """
@hookimpl
def after_step(self, run):
    if run.state.step == 5:
        raise RuntimeError("out of luck")
"""
UNDOCUMENTED = """
strength: float = option("", default=1.0)
"""
TAKES_ANYTHING = """
strength: Any = option("How strong.", default=1.0)
"""
BY_RANK = """
numerics = "changes-training"

@hookimpl
def after_fit(self, run):
    with torch.no_grad():
        for parameter in run.unwrap_model().parameters():
            parameter.add_(run.rank)
"""
DIVERGES = """
numerics = "changes-training"

@hookimpl
def after_backward(self, run):
    for parameter in run.model.parameters():
        parameter.grad.mul_(-1.0)
"""
DRAWS = """
@hookimpl
def before_step(self):
    torch.rand(1)
"""
UNSURE = """
numerics = "about right"
"""
BAD = {
    "scales": (
        SCALES,
        "numerics",
        "promises numerics 'bitwise': the losses that there are without it, to the bit. Found: from step",
    ),
    "draws": (
        DRAWS,
        "numerics",
        "promises numerics 'bitwise': the losses that there are without it, to the bit. Found: from step 1 on",
    ),
    "diverges": (DIVERGES, "numerics", "promises a training that learns. Found: the losses"),
    "forgets": (
        FORGETS,
        "saved_and_loaded",
        "promises the same result from a run that was interrupted after step 9 and resumed",
    ),
    "leaks": (
        LEAKS,
        "off",
        "promises to leave nothing behind when it is off. Found: torch.get_num_threads(): 1 before, 3 after",
    ),
    "raises": (
        RAISES,
        "numerics",
        "the training 'ours' failed: PluginCrash: plugin 'raises' (raises 1.0) failed in after_step",
    ),
    "scales-a-little": (
        'numerics = "reassociated"\n' + SCALES,
        "numerics",
        "the first step's gradients as they are without it. Found: a relative difference of 1.00e-03, and 1e-05 "
        "is allowed",
    ),
    "undocumented": (UNDOCUMENTED, "options", "promises to document its option 'strength'. Found: no help"),
    "takes-anything": (
        TAKES_ANYTHING,
        "options",
        "promises to refuse an object() for its option 'strength'. Found: that it is taken",
    ),
    "by-rank": (
        BY_RANK,
        "processes[ddp]",
        "metrics on all processes on two processes with 'ddp'. Found: other weights",
    ),
    "unsure": (
        UNSURE,
        "declared",
        "promises a numerics class. Found: 'about right'. Expected one of: bitwise, reassociated",
    ),
    "unsaid": (GOOD, "documented", "no recipe to copy in the docstring of unsaid"),
}
"""Plugin -> what it does, the check that finds it, and the words of it."""
ONLY = {
    **dict.fromkeys(("undocumented", "takes-anything", "unsure", "unsaid"), ("declared", "options", "documented")),
    "raises": ("numerics",),
    "scales-a-little": ("numerics",),
    "by-rank": ("processes[ddp]",),
}
"""Plugin -> the only checks that run, to save time. All checks run for the others."""
SLOW = {"draws": ("cost", "killed")}
"""Plugin -> its checks with the marker `slow`, which this run leaves out."""
FINE = {"good": GOOD, "alone": GOOD + ALONE, "needy": GOOD + 'requirements = (Package("no-such-thing", ">=2"),)\n'}


def install(site: Path, name: str, body: str) -> None:
    """A plugin package of somebody else's, as pip would leave it in a folder."""
    head = HEAD.format(name=name).replace(
        f"    plugins:\n      - {name}\n", "" if name == "unsaid" else f"    plugins:\n      - {name}\n"
    )
    body += ALONE * (name not in ("by-rank", *FINE))  # the others need no second process to be found out
    module = name.replace("-", "_")
    (site / f"{module}.py").write_text(head + "".join(f"    {line}\n" for line in body.splitlines()))
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fastloop.plugins]\n{name} = {module}:Made\n")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[str, str]]]:
    """Plugin -> check -> outcome and message, of a pytest run of their own tests in a folder of their own."""
    folder = tmp_path_factory.mktemp("authors")
    (folder / "site").mkdir()
    lines, selected = ["from fastloop.testing import Conformance"], []
    for name, body in (FINE | {name: body for name, (body, _, _) in BAD.items()}).items():
        install(folder / "site", name, body)
        cls = f"Test_{name.replace('-', '_')}"
        lines.append(f"class {cls}(Conformance):\n    plugin, slow = {name!r}, {SLOW.get(name, ())}")
        selected += (
            [f"test_authors.py::{cls}::test_{check}" for check in ONLY[name]]
            if name in ONLY
            else [f"test_authors.py::{cls}"]
        )
    (folder / "test_authors.py").write_text("\n\n".join(lines) + "\n")
    (folder / "conftest.py").write_text('pytest_plugins = ["fastloop.testing"]\n')
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = site\nfilterwarnings = error\n")
    done = forked.run(
        *forked.PYTEST,
        "--strict-markers",
        "-m",
        "not slow",
        "--junitxml=report.xml",
        *selected,
        cwd=folder,
        timeout=900,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = case.get("classname", "").rpartition("Test_")[2].replace("_", "-")
        result = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        words = "" if result is None else " ".join(f"{result.get('message')} {result.text}".split())
        found.setdefault(name, {})[case.get("name", "").removeprefix("test_")] = (
            "passed" if result is None else result.tag,
            words,
        )
    return found


def by_outcome(found: dict[str, tuple[str, str]], wanted: str) -> set[str]:
    return {check for check, (outcome, _) in found.items() if outcome == wanted}


@pytest.mark.slow
class TestConformanceItself:
    def test_a_good_plugin_passes_all(self, outcomes):
        assert by_outcome(outcomes["good"], "failure") == by_outcome(outcomes["good"], "error") == set(), outcomes[
            "good"
        ]
        assert {
            "declared",
            "options",
            "documented",
            "numerics",
            "batch_norm",
            "saved_and_loaded",
            "killed",
            "off",
            "cost",
        } < by_outcome(outcomes["good"], "passed")
        for name in strategies():
            outcome, words = outcomes["good"][f"processes[{name}]"]
            if name in ("ddp", "fsdp"):  # they train every model
                assert outcome == "passed", words
            elif outcome != "passed":  # the strategy refuses the model of the check, or is not installed
                assert outcome == "skipped"
                assert repr(name) in words

    @pytest.mark.parametrize("name", BAD)
    def test_a_bad_plugin_fails_with_what_it_promised(self, outcomes, name):
        _, check, words = BAD[name]
        outcome, message = outcomes[name][check]
        assert outcome == "failure", outcomes[name]
        assert words in message
        assert f"plugin {name!r}" in message

    def test_the_traceback_of_a_failed_training_begins_in_the_plugin(self, outcomes):
        _, message = outcomes["raises"]["numerics"]
        assert re.search(
            r'Traceback \(most recent call last\): File "[^"]+raises\.py", line \d+, in after_step', message
        ), message
        assert "RuntimeError: out of luck" in message
        assert "core/fastloop" not in message

    def test_a_killed_run_that_forgets_fails_too(self, outcomes):
        outcome, message = outcomes["forgets"]["killed"]
        assert outcome == "failure"
        assert "promises the same result from a run that was killed in step 14 and resumed" in message

    def test_slow_checks_are_marked_without_a_marker_of_the_authors(self, outcomes):
        assert not {"cost", "killed"} & outcomes["draws"].keys()
        assert "saved_and_loaded" in outcomes["draws"]

    @pytest.mark.parametrize(
        ("name", "failing"),
        [
            ("scales", {"numerics"}),
            ("draws", {"numerics"}),
            ("diverges", {"numerics"}),
            ("forgets", {"saved_and_loaded", "killed"}),
            ("leaks", {"off"}),
            ("undocumented", {"options"}),
            ("takes-anything", {"options"}),
            ("unsaid", {"documented"}),
        ],
    )
    def test_bad_plugin_fails_only_the_broken_checks(self, outcomes, name, failing):
        assert by_outcome(outcomes[name], "failure") == failing, outcomes[name]
        assert not by_outcome(outcomes[name], "error")

    def test_a_declared_conflict_is_skipped_with_its_reason(self, outcomes):
        assert not by_outcome(outcomes["alone"], "failure")
        outcome, message = outcomes["alone"]["processes[ddp]"]
        assert outcome == "skipped"
        assert "plugins 'alone' and 'ddp' exclude each other: it is for one process." in message

    def test_unavailable_requirement_is_skipped_with_reason(self, outcomes):
        assert by_outcome(outcomes["needy"], "passed") == {"options", "documented"}
        assert not by_outcome(outcomes["needy"], "failure")
        message = outcomes["needy"]["numerics"][1]
        assert "'needy'" in message
        assert "pip install 'no-such-thing>=2'" in message

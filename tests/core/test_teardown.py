"""``teardown`` fires once, last and on every process, however a run ends.

Modules:
    core/fastloop/lifecycle.py
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from fastloop import Plugin, PluginCrash, UsageError, hookimpl
from fastloop.distributed.signals import StoppedAtOnce
from fastloop.testing import VECTORS, Call, assert_problem, expect_problem, find_problems, train


class Ends(Plugin):
    """Records its hooks, and runs ``action(run)`` in one of them."""

    name = "ends"

    def __init__(self, hook: str = "", action: Any = None) -> None:
        super().__init__()
        self.hook, self.action = hook, action
        self.fired: list[str] = []

    def act(self, hook: str, run: Any) -> None:
        self.fired.append(hook)
        if hook == self.hook:
            self.action(run)

    @hookimpl
    def before_prepare(self, run: Any) -> None:
        self.act("before_prepare", run)

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.act("after_step", run)

    @hookimpl
    def write_summary(self, run: Any) -> None:
        self.act("write_summary", run)

    @hookimpl
    def teardown(self, run: Any) -> None:
        self.act("teardown", run)


class Other(Ends):
    """A second plugin, later in the order."""

    name = "other"


def raising(error: BaseException) -> Any:
    def action(run: Any) -> None:
        raise error

    return action


def summary(folder: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(Path(folder, "summary.json").read_text())
    return read


def test_it_is_the_last_hook_of_a_run_that_succeeds(tiny_run, hook_calls):
    tiny_run(epochs=1)
    assert [call.hook for call in hook_calls].count("teardown") == 1
    assert hook_calls[-1] == Call("teardown", ("run",))


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("broken"), "failed"), (KeyboardInterrupt(), "stopped"), (StoppedAtOnce(signal.SIGTERM), "stopped")],
)
def test_it_is_the_last_hook_of_a_run_that_fails_or_is_stopped_at_once(tiny_run, error, status):
    ends, other = Ends("after_step", raising(error)), Other()
    with pytest.raises(PluginCrash if isinstance(error, ValueError) else type(error)):
        tiny_run([ends, other], output="out")
    assert ends.fired == ["before_prepare", "after_step", "write_summary", "teardown"]
    assert other.fired == ["before_prepare", "write_summary", "teardown"]
    assert summary("out")["status"] == status


def test_it_is_the_last_hook_of_a_run_that_a_signal_stops_after_saving(tiny_run):
    ends = Ends("after_step", lambda run: run.signals.record("SIGTERM"))
    result = tiny_run([ends])
    assert result.summary["status"] == "stopped"
    assert ends.fired == ["before_prepare", "after_step", "write_summary", "teardown"]


def test_ctrl_c_in_one_teardown_leaves_the_others(tiny_run):
    ends, other = Ends("teardown", lambda run: [signal.raise_signal(signal.SIGINT) for _ in range(2)]), Other()
    with pytest.raises(KeyboardInterrupt):
        tiny_run([ends, other], epochs=1)
    assert other.fired[-1] == "teardown"


def test_it_fires_for_a_run_that_cannot_be_built_with_the_fields_that_exist(tiny_run):
    class Reads(Plugin):
        name = "reads"
        fields: dict[str, Any] = {}

        @hookimpl
        def teardown(self, run: Any) -> None:
            self.fields.update(vars(run))

    ends = Ends("before_prepare", raising(UsageError("no such layer")))
    with expect_problem("invalid-usage", UsageError):
        tiny_run([ends, Reads()], output="out")
    assert ends.fired == ["before_prepare", "teardown"]
    assert {"recipe", "plugins", "hooks", "state", "folder", "processes", "saver", "signals"} <= Reads.fields.keys()
    assert {"accelerator", "device", "clock", "loaders"} <= Reads.fields.keys(), "their build steps were completed"
    assert not {"_built_model", "model", "optimizer"} & Reads.fields.keys()
    assert not Path("out").exists()


def test_its_error_fails_a_run_that_succeeded_after_the_other_plugins_teardown(tiny_run, caplog):
    ends, other = Ends("teardown", raising(OSError("no space"))), Other()
    with expect_problem("plugin-crashed 'ends' test_teardown OSError", PluginCrash) as raised:
        tiny_run([ends, other], output="out")
    assert isinstance(raised.value.__cause__, OSError)
    assert other.fired[-1] == "teardown"
    assert_problem(caplog, "plugin-crashed 'ends' test_teardown OSError")
    assert summary("out")["status"] == "failed"
    assert "no space" in summary("out")["reason"]
    assert "OSError: no space" in Path("out/log.txt").read_text(), "the log file is closed last"


@pytest.mark.slow
def test_its_error_does_not_replace_that_of_the_run(tiny_run, caplog):
    class Fails(Ends):
        name = "fails"

        @hookimpl
        def teardown(self, run: Any) -> None:
            raise OSError("no space")

    fails, other = Fails("after_step", raising(ValueError("broken"))), Other()
    with expect_problem("plugin-crashed after_step ValueError broken", PluginCrash):
        tiny_run([fails, other], output="out")
    assert other.fired[-1] == "teardown"
    assert_problem(caplog, "plugin-crashed 'fails' test_teardown teardown OSError: no space")
    assert "broken" in summary("out")["reason"]


class Leaves(Plugin):
    """Leaves a file for each teardown of a process."""

    name = "leaves"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @hookimpl
    def teardown(self, run: Any) -> None:
        self.count += 1
        Path(f"rank{run.rank}").write_text(str(self.count))


LOSS = {"module": {"loss": "cross_entropy"}}


def trained() -> None:
    train(
        {
            **VECTORS,
            "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
            "plugins": [LOSS, "ddp"],
            "output": "run",
        },
        Leaves(),
    )


@pytest.mark.slow
def test_it_fires_on_every_process(processes, tmp_path):
    processes(2, trained, folder=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.glob("rank*")} == {"rank0": "1", "rank1": "1"}


class Watches(Plugin):
    """A plugin that fails in its first step, and then in the hook ``also``. It can be disabled."""

    name = "watches"
    read_only = True

    def __init__(self, also: str) -> None:
        super().__init__(on_error="disable")
        self.also = also
        self.fired: list[str] = []

    @hookimpl
    def after_step(self, run: Any) -> None:
        self.fired.append("after_step")
        raise ValueError("broken")

    @hookimpl
    def teardown(self, run: Any) -> None:
        self.fired.append("teardown")
        if self.also == "teardown":
            raise OSError("closed twice")


@pytest.mark.parametrize("also", ["", "teardown"], ids=["teardown-succeeds", "teardown-fails"])
def test_a_disabled_plugin_is_torn_down_and_called_for_nothing_else(tiny_run, caplog, also):
    plugin, other = Watches(also), Other()
    result = tiny_run([plugin, other], epochs=1)
    assert plugin.fired == ["after_step", "teardown"]
    assert other.fired[-1] == "teardown"
    assert result.summary["status"] == "completed"
    assert result.summary["disabled"]["watches"].endswith("failed in after_step: ValueError: broken")
    assert bool(find_problems(caplog, "plugin-disabled teardown: OSError: closed twice")) == bool(also)

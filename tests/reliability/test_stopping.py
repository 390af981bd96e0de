"""A run that gets a stop signal saves, logs it and ends in time.

A run that is restarted repeatedly reaches the end, with the numbers of an undisturbed run.

Modules:
    core/fastloop/distributed/signals.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from fault_runs import (
    FASTLOOP,
    Forked,
    record,
    said,
    steps,
    summary,
    times,
    together,
    train,
    until,
    write_recipe,
)
from long_form import LONG, long_form_only

from fastloop.cli import launch
from fastloop.distributed import signals
from fastloop.testing import assert_problem, find_problems

STOPPED, INTERRUPTED = 75, 130


def code(name: str) -> int:
    return INTERRUPTED if name == "SIGINT" else STOPPED


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """A folder with the recipe, and an undisturbed run."""
    folder = tmp_path_factory.mktemp("left-alone")
    with contextlib.chdir(folder):
        write_recipe()
        assert train("output=whole") == 0
        Path("said.txt").unlink()
    return folder


@pytest.fixture
def whole(left_alone):
    """The same, here."""
    shutil.copytree(left_alone, ".", dirs_exist_ok=True)


# -- once --------------------------------------------------------------------------------------------------------------

# what FAULT says, the step at which the run stops, and whether the evaluation of that step is still to come
MOMENTS = {
    "in a step": ("step 14", 14, False),
    "in the step before a save": ("step 16", 16, False),
    "in a step with an evaluation": ("step 15", 15, True),
    "in an evaluation": ("evaluation 40", 15, True),
    "in a save": ("save 2", 4, False),  # a check before training reads the first state dict
    "in the last step": ("step 27", 27, True),
    "in the last evaluation": ("evaluation 90", 27, True),
}


QUICK = [
    *((moment, "SIGTERM") for moment in ("in a step", "in a save", "in the last evaluation")),
    ("in an evaluation", "SIGUSR1"),
    ("in a step", "SIGINT"),
]
SLOW = [
    (moment, "SIGTERM") for moment in ("in the step before a save", "in a step with an evaluation", "in the last step")
]


@pytest.mark.parametrize(("moment", "name"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
@pytest.mark.usefixtures("whole")
def test_a_signal_saves_and_stops(moment, name):
    """a signal in a step, an evaluation or a save: saved, exit code 75 or 130, and resumed to the same numbers"""
    place, step, evaluates = MOMENTS[moment]
    assert train("output=run", environment={"FAULT": f"{place} 0 me('{name}')"}) == code(name), said()
    found = summary()
    assert (found["status"], found["reason"], found["steps"]) == ("stopped", f"interrupted by {name}", step)
    assert step in steps()
    state = json.loads(Path(f"run/checkpoints/step-{step:08d}/state.json").read_text())["state"]
    assert not evaluates or state["evaluated_at"] < step
    assert_problem(said(), f"interrupted {name}:")
    assert re.search(rf" step {step}\b.*: fastloop train recipe\.yaml output=run --resume", said())
    assert not Path("run/model").exists()
    assert train("output=run", "--resume") == 0
    assert record() == record("whole")


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_a_signal_in_the_background_of_a_save():
    """a signal during a background save: the run waits for it and saves again"""
    assert train("output=run", "--with", "async-save", environment={"FAULT": "step 13 0 me('SIGTERM')"}) == STOPPED
    assert steps() == [13]
    assert train("output=run", "--with", "async-save", "--resume") == 0
    assert record()["model"] == record("whole")["model"]


def test_a_signal_before_training():
    """a signal while data is loaded: exit code 75, and nothing is written"""
    write_recipe()
    assert train("output=run", "--resume", environment={"FAULT": "data 1 0 me('SIGTERM')"}) == STOPPED
    assert "stopped by SIGTERM, at once" in said()
    assert not Path("run").exists()
    assert train("output=run", "--resume") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_a_signal_in_compilation():
    """a signal while the model is compiled: saved after that step"""
    compiled = ["--with", "compile", "plugins.compile.backend=aot_eager"]
    assert train("output=run", *compiled, environment={"FAULT": "step 1 0 me('SIGTERM')"}) == STOPPED
    assert summary()["steps"] == 1
    assert train("output=run", *compiled, "--resume") == 0
    assert summary()["status"] == "completed"


@pytest.mark.slow
def test_a_signal_to_a_whole_group_of_processes_spares_data_workers():
    """SIGTERM to the whole process group: data workers survive it, and the run is saved"""
    write_recipe(data={"module": "code.py:rows", "arguments": {"slow": 0.002}})
    options = ["--with", "dataloader-workers", "plugins.dataloader-workers.num_workers=2"]
    assert train("output=whole", *options) == 0
    sent = ((signal.SIGTERM, STOPPED), (signal.SIGINT, INTERRUPTED), *([(signal.SIGUSR1, STOPPED)] * LONG))
    for number, expected in sent:
        shutil.rmtree("run", ignore_errors=True)
        run = Forked("output=run", *options, first=os.setsid)
        until(lambda: steps())
        os.killpg(run.pid, number)
        assert run.wait() == expected, said()
        assert summary()["status"] == "stopped"
        assert train("output=run", *options, "--resume") == 0
        assert record() == record("whole")


@pytest.mark.slow
def test_failed_save_at_stop_is_reported():
    """a signal, and a full disk quota: exit code 75, and the log names the newest checkpoint"""
    write_recipe(model={"module": "code.py:Net", "arguments": {"hidden": 4000}})
    quota = "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)); me('SIGTERM')"
    assert train("output=run", environment={"FAULT": f"step 7 0 {quota}"}) == STOPPED
    assert "Stopped (newest checkpoint: 4) at step 7" in said()
    assert summary()["save_errors"] == 1
    assert train("output=run", "--resume") == 0


# -- twice, and in time ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
@pytest.mark.usefixtures("whole")
def test_second_signal_stops_at_once(name):
    """a step that hangs, and the same signal twice: the run ends at once, and resumes"""
    run = Forked("output=run", environment={"FAULT": f"step 14 0 me('{name}'); time.sleep(600)"})
    until(lambda: bool(find_problems(said(), f"interrupted {name}:")))
    time.sleep(0.5)  # Python misses a signal that comes just before it enters the sleep, until the sleep ends
    run.send(getattr(signal, name))
    assert run.wait() == code(name)
    assert summary()["status"] == "stopped"
    assert steps() == [12]
    assert train("output=run", "--resume") == 0
    assert record() == record("whole")


@pytest.mark.usefixtures("whole")
def test_two_different_signals_are_one_request():
    """SLURM's warning, and then SIGTERM: the run is saved"""
    assert train("output=run", environment={"FAULT": "step 14 0 me('SIGUSR1', 'SIGTERM')"}) == STOPPED
    assert steps() == [14]


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
@pytest.mark.usefixtures("whole")
def test_an_ignored_signal_does_not_stop_a_run(name):
    """Ctrl-C while the run is a script's background job, and a closed terminal after `nohup`: it continues"""
    ignored = {"first": lambda: signal.signal(getattr(signal, name), signal.SIG_IGN)}
    assert train("output=run", environment={"FAULT": f"step 14 0 me('{name}')"}, **ignored) == 0
    assert record() == record("whole")


@pytest.mark.parametrize(("name", "is_handled"), [("SIGINT", True), ("SIGHUP", False)])
def test_a_measurement_ends_by_an_ignored_interrupt_but_not_after_nohup(name, is_handled):
    """signals that a command ignores while it measures: Ctrl-C ends it, the loss of its terminal does not"""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with signals.on_signals(signals.stop_now, also_ignored=True):
            handler = signal.getsignal(number)
    finally:
        signal.signal(number, before)
    assert handler is (signals.stop_now if is_handled else signal.SIG_IGN)


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_a_terminal_that_is_closed():
    """the terminal is closed: saved although nothing can be shown, exit code 75, and resumed to the same numbers"""
    terminal, inner = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, *FASTLOOP, "recipe.yaml", "output=run"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=os.environ | {"FAULT": "step 14 0 print('in step 14', flush=True); time.sleep(1)"},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # this is the terminal of the session
    )
    os.close(inner)
    shown = b""
    while b"in step 14" not in shown:
        shown += os.read(terminal, 2**16)
    os.close(terminal)
    assert run.wait(300) == STOPPED
    assert summary()["reason"] == "interrupted by SIGHUP"
    assert steps() == [14]
    assert train("output=run", "--resume") == 0
    assert record() == record("whole")


@pytest.mark.slow
@pytest.mark.usefixtures("whole")
def test_unresponsive_process_is_killed_after_timeout():
    """a step that hangs, and one signal: the run ends at its time limit, and resumes"""

    def hurry() -> None:
        signals.STOP_TIMEOUT = 1.5

    assert (
        train("output=run", environment={"FAULT": "step 14 0 me('SIGTERM'); time.sleep(600)"}, first=hurry) == STOPPED
    )
    assert "did not stop within 1.5 seconds" in said()
    assert steps() == [12]
    assert train("output=run", "--resume") == 0
    assert record() == record("whole")


# -- several processes -------------------------------------------------------------------------------------------------


def command(*arguments: str, environment: dict[str, str] | None = None) -> forked.Command:
    """A launcher, in a process of its own."""
    return forked.Command(*arguments, output=Path("said.txt"), env=os.environ | (environment or {}))


@pytest.fixture(scope="module")
def pair_left_alone(tmp_path_factory):
    """The same of two processes."""
    folder = tmp_path_factory.mktemp("pair-left-alone")
    with contextlib.chdir(folder):
        write_recipe(train={"eval_batch_size": 1})
        assert [each.wait() for each in together("output=pair", "--with", "ddp")] == [0, 0]
        Path("said.txt").unlink()
    return folder


@pytest.fixture
def pair(pair_left_alone):
    """An undisturbed run of two processes, and the ways to start one."""
    shutil.copytree(pair_left_alone, ".", dirs_exist_ok=True)
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(launch.free_port()),
        "-m",
        "fastloop",
    ]
    return {"ours": FASTLOOP, "torchrun": [*torchrun, "train"]}


RUN = ["recipe.yaml", "output=run", "--with", "ddp"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["step 14", "evaluation 12"])
def test_a_signal_to_one_process_of_two_stops_both(pair, place):
    """SIGTERM on rank 1 alone: both save and stop; resumed, they end with the same numbers"""
    codes = [
        each.wait()
        for each in together("output=run", "--with", "ddp", environment={"FAULT": f"{place} 1 me('SIGTERM')"})
    ]
    assert codes == [STOPPED, STOPPED], said()
    assert summary()["reason"] == "interrupted by SIGTERM"
    assert [each.wait() for each in together("output=run", "--with", "ddp", "--resume")] == [0, 0]
    assert record() == record("pair")


LAUNCHED = [("ours", "rank 1"), ("torchrun", "the launcher"), ("ours", "the launcher"), ("torchrun", "rank 1")]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "whom"), LAUNCHED[: 2 * times(1)])
def test_a_signal_under_a_launcher(pair, launcher, whom):
    """SIGTERM on rank 1 alone, or on the launcher: both processes save, and the run stops"""
    options = ["--nproc", "2"] if launcher == "ours" else []
    fault = {
        "FAULT": "step 14 1 me('SIGTERM')"
        if whom == "rank 1"
        else "step 14 1 os.kill(os.getppid(), signal.SIGTERM); time.sleep(0.5)"
    }
    with command(*pair[launcher], *RUN, *options, environment=fault) as run:
        assert run.wait(300) == (STOPPED if launcher == "ours" else 1), said()  # torchrun's own
    assert (summary()["status"], summary()["reason"]) == ("stopped", "interrupted by SIGTERM")
    assert steps()[-1] >= 14
    assert "did not stop" not in said()
    with command(*pair["ours"], *RUN, "--nproc", "2", "--resume") as run:
        assert run.wait(300) == 0, said()
    assert record() == record("pair")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_process_before_training_stops_both(name):
    """a signal to rank 1 alone while data is loaded: exit code 75 or 130, no traceback, and nothing is written"""
    write_recipe()
    with command(*FASTLOOP, *RUN, "--nproc", "2", environment={"FAULT": f"data 1 1 me('{name}')"}) as run:
        assert run.wait(300) == code(name), said()
    assert "process 0 of 2 lost the connection to another, which ended first" in said()
    assert "Traceback" not in said()
    assert not Path("run").exists()


@pytest.mark.slow
def test_a_process_that_hangs_does_not_keep_the_launcher(whole):
    """rank 1 hangs, and SIGTERM comes twice: all end in time"""
    hang = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); Path('hangs').touch(); time.sleep(600)"
    with command(*FASTLOOP, *RUN, "--nproc", "2", environment={"FAULT": f"step 14 1 {hang}"}) as run:
        until(Path("hangs").exists)
        run.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        run.send_signal(signal.SIGTERM)
        assert run.wait(300) == STOPPED, said()
    assert_problem(said(), "process-not-stopped")
    assert steps() == [12]


# -- again and again ---------------------------------------------------------------------------------------------------


def killed_until_done(folder: str, kills: int, chance: random.Random, count: int, *options: str) -> int:
    """Run ``--resume`` in a loop and kill it at random moments, up to a number of kills; returns the number."""
    done = 0
    while True:
        runs = together(f"output={folder}", *options, "--resume", count=count)
        if done < kills:
            time.sleep(chance.random() * (1.2 if count == 1 else 4))
            for run in chance.sample(runs, len(runs)):
                if not run.over():
                    run.send(signal.SIGKILL)
                    done += run is runs[0]
        codes = [run.wait() for run in runs]
        if codes == [0] * count:
            return done
        assert all(each in (0, 1, -signal.SIGKILL) for each in codes), said()[-3000:]


ASYNC = ["--with", "async-save"]
KILLED = [
    pytest.param([], 1, 3, id="plain-1-3", marks=long_form_only),
    pytest.param([], 2, 1, id="plain-2-1"),
    pytest.param(ASYNC, 1, 3, id="async-1-3"),
    pytest.param(ASYNC, 2, 1, id="async-2-1", marks=long_form_only),
]
"""Options, the number of processes, and that of kills in the short form, which has each option and each number of
processes once."""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "count", "short"), KILLED)
def test_resume_in_a_loop_completes_after_random_kills(options, count, short, record_property):
    """a run is killed at random moments, and resumed: it ends with the bits of an undisturbed run"""
    write_recipe(data={"module": "code.py:rows", "arguments": {"slow": 0.001}}, train={"epochs": 8})
    strategy = [*options, *(["--with", "ddp"] if count > 1 else [])]
    if count > 1 and options:
        strategy = ["--with", "async-save,ddp"]
    assert [each.wait() for each in together("output=whole", *strategy, count=count)] == [0] * count
    wanted, killed, chance, number, same = times(short), 0, random.Random(), 0, 0
    while killed < wanted:
        killed += killed_until_done(f"run-{number}", wanted - killed, chance, count, *strategy)
        assert record(f"run-{number}") == record("whole")
        same, number = same + 1, number + 1
    record_property("faults", killed)


# -- what --resume means where there is nothing ------------------------------------------------------------------------


@pytest.mark.slow
def test_resume_begins_where_the_runs_own_folder_holds_no_checkpoint_yet():
    """--resume without a folder, or before the first save: the run begins, and logs that"""
    write_recipe()
    assert train("output=whole") == 0
    assert train("output=run", "--resume", environment={"FAULT": "step 3 0 me('SIGKILL')"}) == -signal.SIGKILL
    assert_problem(said(), "no-checkpoint run:")
    assert train("output=run", "--resume") == 0
    assert record() == record("whole")
    assert Path("run.1/recipe.yaml").is_file(), "what was there is not lost"


def test_resume_refuses_another_folder_without_a_checkpoint():
    """--resume PATH where PATH holds no checkpoint: a slip, exit code 2"""
    write_recipe()
    assert train("output=run", "--resume", "elsewhere") == 2
    assert_problem(said(), "no-checkpoint elsewhere:")
    assert not Path("run").exists()


def test_resume_of_complete_run_trains_nothing():
    """--resume on a complete run without a checkpoint: exit code 2"""
    write_recipe(train={"save_every": None})
    assert train("output=run") == 0
    before: dict[str, Any] = record()
    assert train("output=run", "--resume") == 2
    assert_problem(said(), "run-complete run:")
    assert record() == before


def test_resume_keeps_unrelated_files():
    """--resume on a folder with files of others: exit code 2, and they stay"""
    write_recipe()
    Path("run").mkdir()
    Path("run/thesis.tex").write_text("years of work")
    assert train("output=run", "--resume") == 2
    assert Path("run/thesis.tex").read_text() == "years of work"

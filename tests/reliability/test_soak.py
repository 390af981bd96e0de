"""Many small steps: memory, open files and threads do not grow, and disk usage does not depend on the run's length."""

from __future__ import annotations

from statistics import linear_regression, median
from typing import Any

import psutil
import pytest
from fault_runs import times

from fastloop import Plugin, hookimpl

pytestmark = pytest.mark.slow

STEPS = times(12_500)
LOOKS = 40


class Watch(Plugin):
    """Looks at the process ``LOOKS`` times."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.process = psutil.Process()
        self.memory: list[int] = []
        self.files: list[int] = []
        self.threads: list[int] = []
        self.folders: list[int] = []

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step % (STEPS // LOOKS) == 0:
            self.memory.append(self.process.memory_info().rss)
            self.files.append(self.process.num_fds())
            self.threads.append(self.process.num_threads())
            self.folders.append(len(list((run.folder / "checkpoints").glob("*"))))
            recorder: Any = next(plugin for plugin in run.plugins if plugin.name == "recorder")
            recorder.losses.clear()  # the test keeps them, not the run
            recorder.lrs.clear()


def test_memory_files_and_folders_stay_flat_over_many_steps(tiny_run, tmp_path, record_property):
    """a run of very many steps: memory, open files, threads, checkpoints and log do not grow"""
    watch = Watch()
    result = tiny_run(
        [watch, "checkpoint-best", {"progress": False}],
        max_steps=STEPS,
        epochs=STEPS,
        evaluate_every=STEPS // 10,
        save_every=STEPS // 20,
        keep_checkpoints=2,
        output=tmp_path / "soak",
    )
    assert result.summary["steps"] == STEPS
    half = LOOKS // 2
    growth = median(watch.memory[half + half // 2 :]) - median(watch.memory[half // 2 : half])
    assert growth < 4 * 2**20, watch.memory
    # one may be open at a look: a checkpoint's; the collector may close some that an earlier run left
    assert max(watch.files[half:]) <= max(watch.files[2:half]) + 1, watch.files
    assert max(watch.threads[2:]) <= min(watch.threads[2:]) + 1, watch.threads
    assert max(watch.folders) <= 2 + 1 + 1, watch.folders  # two to resume from, the best, and one under way
    names = sorted(path.name for path in (tmp_path / "soak" / "checkpoints").iterdir())
    assert len([name for name in names if name.startswith("step-")]) == 2
    assert len([name for name in names if name.startswith("best-")]) == 1
    assert len(names) == 3, names
    lines = (tmp_path / "soak" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == STEPS // 10 + 10
    assert max(map(len, lines)) < 400
    assert len((tmp_path / "soak" / "log.txt").read_text().splitlines()) < 50
    slope = linear_regression(
        [look * STEPS // LOOKS for look in range(half, len(watch.memory))], watch.memory[half:]
    ).slope
    memory = (
        f"{watch.memory[half] / 2**20:.0f} MiB resident after half, {slope * 1000 / 1024:+.1f} KiB each 1,000 "
        "steps from there"
    )
    record_property("figures", f"{STEPS:,} steps: {memory}, {watch.files[-1]} open files, {watch.threads[-1]} threads")


def test_runs_one_after_another_leave_nothing_open(tiny_run):
    """many runs in one process: each closes its files, workers and handlers"""
    import logging

    tiny_run([], max_steps=2)
    process = psutil.Process()
    children = set(process.children())  # those of other tests of this process
    files, threads, handlers = process.num_fds(), process.num_threads(), len(logging.getLogger("fastloop").handlers)
    for _ in range(5):
        tiny_run(["checkpoint-best"], max_steps=2, evaluate_every=1)
    assert process.num_fds() <= files
    assert process.num_threads() <= threads
    assert len(logging.getLogger("fastloop").handlers) == handlers
    assert not [child for child in set(process.children()) - children if child.status() != psutil.STATUS_ZOMBIE]

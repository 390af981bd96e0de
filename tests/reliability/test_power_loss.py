"""Power is lost during a save: every possible state of the disk has the newest reported checkpoint, or a newer one.

``file_trace`` records the writes, renames and fsyncs of real saves, and ``crash_states`` makes the folders that a loss
of power may leave.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import file_trace
import pytest
from crash_states import History
from fault_runs import FASTLOOP, RECIPE, ranks, record, said, times, train, write_recipe
from long_form import LONG

from fastloop.checkpoint import read, resume, step_of

LIMIT = times(24)
"""States for each position of a trace, if there are more."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_trace.build(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traced folders must not have links in their path."""
    return tmp_path_factory.mktemp("traced").resolve()


def replay(history: History, check: Callable[[Path, tuple[str, ...]], Any], limit: int = LIMIT, every: int = 1) -> int:
    """Check the states of a history, and return their number.

    Raises:
        AssertionError: A state fails; it is left in the folder ``state``.
    """
    count = 0
    for crash in history.crashes(limit, seed=count, every=every):
        shutil.rmtree("state", ignore_errors=True)
        Path("state").mkdir()
        crash.write(Path("state"))
        check(Path("state"), crash.marks)
        count += 1
    return count


def newest(marks: tuple[str, ...], what: str = "saved") -> int:
    """The newest number that was reported; 0 if none was."""
    return max((int(mark.split()[1]) for mark in marks if mark.startswith(what)), default=0)


# -- the replay itself -------------------------------------------------------------------------------------------------

WRITER = """
import ctypes, os, sys
mark = ctypes.CDLL(None).file_trace_mark

def put(name, text):
    with open(name, "w") as file:
        file.write(text)

def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)

os.chdir("traced")
put("now", "old")
sync("now")
sync(".")
mark(b"saved 1")
{}
mark(b"saved 2")
"""
RIGHT = 'put("new", "new"); sync("new"); os.rename("new", "now"); sync(".")'
WRITERS = {
    "right": (RIGHT, {"old", "new"}, {"new"}),
    "no fsync of the file": (
        RIGHT.replace('sync("new"); ', ""),
        {"old", "new", "", "\0\0\0", "ne", "\0\0w"},
        {"new", "", "\0\0\0"},
    ),
    "no fsync of the folder": (RIGHT.replace('; sync(".")', ""), {"old", "new"}, {"old", "new"}),
    "fsync of the folder before the rename": (
        'put("new", "new"); sync("new"); sync("."); os.rename("new", "now")',
        {"old", "new"},
        {"old", "new"},
    ),
    "written in place": ('put("now", "new"); sync("now")', {"old", "new", "", "\0\0\0"}, {"new"}),
    "old one removed first": (
        'os.remove("now"); put("new", "new"); sync("new"); os.rename("new", "now"); sync(".")',
        {None, "new"},
        {"new"},
    ),
}
"""Name -> the code of a writer; contents of which some crash leaves each; contents of which some crash leaves each
after the report."""


@pytest.mark.parametrize("name", WRITERS)
def test_replay_finds_the_errors_of_wrong_writers(name, library, tmp_path):
    """control: the replay finds each state that a wrong writer may leave, and none for a right one"""
    code, during, after = WRITERS[name]
    root = tmp_path.resolve() / "traced"
    root.mkdir()
    Path("writer.py").write_text(WRITER.format(code))
    history = History(file_trace.record(library, root, [[sys.executable, "writer.py"]]), root)
    found: dict[int, set[str | None]] = {1: set(), 2: set()}
    for seed in range(20):
        for crash in history.crashes(2000, seed):
            content = crash.files.get("now")
            if reported := newest(crash.marks):
                found[reported].add(None if content is None else content.decode())
    assert during <= found[1] | found[2]
    assert after <= found[2]
    if name == "right":
        assert (found[1], found[2]) == ({"old", "new"}, {"new"})


def test_replay_lists_every_state_of_a_small_trace(library, tmp_path):
    """control: for a file and a folder that are not synced, the states are exactly those that the model permits"""
    root = tmp_path.resolve() / "traced"
    root.mkdir()
    Path("writer.py").write_text("import os\nos.mkdir('traced/a')\nopen('traced/a/b', 'w').write('x')\n")
    history = History(file_trace.record(library, root, [[sys.executable, "writer.py"]]), root)
    states = {tuple(sorted(crash.files.items())) for seed in range(20) for crash in history.crashes(2000, seed)}
    assert states == {(), (("a", None),), *((("a", None), ("a/b", content)) for content in (b"", b"x", b"\0"))}


MAKERS = """
import os, sys
for number in range(300):
    os.makedirs(f"traced/{number}", exist_ok=True)
    open(f"traced/{number}/{sys.argv[1]}", "w").close()
    while not os.path.exists(f"traced/{number}/{1 - int(sys.argv[1])}"):
        pass
"""


@pytest.mark.slow
def test_trace_of_two_processes_has_folders_before_their_files(library, tmp_path):
    """control: a process uses a folder that another has just made; the record of the folder is written first"""
    root = tmp_path.resolve() / "traced"
    root.mkdir()
    Path("makers.py").write_text(MAKERS)
    records = file_trace.record(
        library, root, [[sys.executable, "makers.py", str(rank)] for rank in range(2)], [{}, {}]
    )
    history = History(records, root)
    assert len(history.last()) == 900


def test_trace_that_misses_a_change_is_refused(library, tmp_path):
    """control: a trace that does not lead to the files on disk, or has writes that cannot be traced, is refused"""
    root = tmp_path.resolve() / "traced"
    root.mkdir()
    Path("writer.py").write_text("open('traced/a', 'w').write('x')\n")
    records = file_trace.record(library, root, [[sys.executable, "writer.py"]])
    with pytest.raises(AssertionError, match="does not lead to the files"):
        History(records[:-1], root)
    (root / "a").unlink()
    mapped = "import mmap\nfile = open('traced/m', 'w+b')\nfile.truncate(4)\nmmap.mmap(file.fileno(), 4)[0] = 1\n"
    Path("writer.py").write_text(mapped)
    with pytest.raises(AssertionError, match="a shared mapping was written"):
        History(file_trace.record(library, root, [[sys.executable, "writer.py"]]), root)


# -- saves -------------------------------------------------------------------------------------------------------------

SAVES = """
import ctypes, os, sys
from pathlib import Path
import torch
from fastloop.checkpoint import rotate, write
from fastloop.runtime import files
from fastloop_tools.export.folder import written

mark = ctypes.CDLL(None).file_trace_mark
torch.set_num_threads(1)


def save(number, step, keep=1):
    value = torch.full((50,), float(number))
    write(run / "checkpoints" / f"step-{step:08d}", {"weight": value}, {"number": number, "moment": value})
    rotate(run, keep, step)
    mark(f"saved {number}".encode())


def rotation():
    for step in (1, 2, 3):
        save(step, step)


def several():
    for step in (1, 2, 3, 4):
        save(step, step, keep=2)


def again():
    for number, step in enumerate((1, 2, 2, 3, 3), 1):
        save(number, step)


def branch():
    for number, step in enumerate((1, 2, 3, 2, 3), 1):  # resumes from step 1 after step 3
        save(number, step, keep=3)


def text():
    for number in (1, 2):
        files.write(run / "summary.json", f'{{"number": {number}}}')
        mark(f"saved {number}".encode())


def export():
    for number in (1, 2):
        with written(run / "model") as folder:
            for name in ("a", "b"):
                (folder / name).write_text(str(number))
        mark(f"saved {number}".encode())


for name in sys.argv[2:]:
    root = Path(sys.argv[1], name)
    root.mkdir()
    os.environ |= {"FILE_TRACE": f"{root}.trace", "FILE_TRACE_ROOT": str(root)}
    run = root / "runs" / "run"
    files.make_folder(run)
    globals()[name]()
"""
SCENARIOS = ("rotation", "several", "again", "branch")


@pytest.fixture(scope="module")
def saves(library: Path, folder: Path) -> Path:
    """A folder with a traced folder for each function of SAVES."""
    (folder / "saves.py").write_text(SAVES)
    empty = folder / "empty"
    empty.mkdir()
    file_trace.record(library, empty, [[sys.executable, folder / "saves.py", folder, *SCENARIOS, "text", "export"]])
    return folder


def load(name: str, traced: Path) -> History:
    return History(list(file_trace.read(traced / f"{name}.trace")), traced / name)


def find_number(state: Path, marks: tuple[str, ...]) -> None:
    """The newest reported save is found, or a later one, and all of its numbers are those of one save."""
    run, reported = state / "runs" / "run", newest(marks)
    found = resume.find_resume_point(run, run) if run.exists() else None
    if found is None:
        assert not reported, f"save {reported} is lost"
        return
    model, saved = read(found[0])
    assert saved["number"] >= reported, f"found save {saved['number']}, but {reported} was reported"
    assert model["weight"].eq(saved["number"]).all()
    assert saved["moment"].eq(saved["number"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_power_loss_during_a_save(name, saves, record_property):
    """power is lost at any moment of saves and rotations: the newest reported checkpoint, or the one being written,
    is found"""
    record_property("faults", replay(load(name, saves), find_number))


@pytest.mark.slow
def test_power_loss_during_a_summary(saves, record_property):
    """power is lost while summary.json is written: it is complete"""

    def check(state: Path, marks: tuple[str, ...]) -> None:
        path = state / "runs" / "run" / "summary.json"
        number = json.loads(path.read_text())["number"] if path.exists() else 0
        assert number >= newest(marks)

    record_property("faults", replay(load("text", saves), check))


@pytest.mark.slow
def test_power_loss_during_an_export(saves, record_property):
    """power is lost while fastloop export replaces a folder: the old or the new files are complete"""

    def check(state: Path, marks: tuple[str, ...]) -> None:
        folder, old = (state / "runs" / "run" / name for name in ("model", ".model.old.partial"))
        numbers = [
            (path / name).read_text()
            for path in [folder if folder.exists() else old]
            if path.exists()
            for name in ("a", "b")
        ]
        assert len(set(numbers)) <= 1
        assert int(numbers[0] if numbers else 0) >= newest(marks)

    record_property("faults", replay(load("export", saves), check))


SHARDS = """
import ctypes, os, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from fastloop.checkpoint import rotate, write
from fastloop.runtime import files

mark = ctypes.CDLL(None).file_trace_mark
run, rank = Path(sys.argv[1]) / "runs" / "run", int(os.environ["RANK"])
if rank == 0:
    files.make_folder(run)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for number, step in enumerate((1, 2, 2), 1):
    value = distribute_tensor(torch.full((50,), float(number)), mesh, [Shard(0)], src_data_rank=None)
    write(run / "checkpoints" / f"step-{step:08d}", {"weight": value}, {"number": number, "moment": value}, rank == 0)
    if rank == 0:
        rotate(run, 1, step)
        mark(f"saved {number}".encode())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_power_loss_during_a_save_of_two_processes(library, folder, record_property):
    """power is lost while two processes save shards: the newest reported checkpoint, or the one being written, is
    found"""
    root = folder / "shards"
    root.mkdir()
    (folder / "shards.py").write_text(SHARDS)
    command = [sys.executable, folder / "shards.py", root]
    history = History(file_trace.record(library, root, [command] * 2, ranks(2)), root)
    assert any("/sharded/" in name for name in history.last())
    record_property("faults", replay(history, find_number, limit=max(1, LIMIT // 2)))


# -- whole runs --------------------------------------------------------------------------------------------------------

MARKS = '''
import ctypes
from fastloop import Plugin, hookimpl


class Marks(Plugin):
    """Marks each checkpoint that the run reports, and the end of the run, in the trace."""

    name = "marks"
    step = None

    def look(self, run):
        if run.is_main and run.saver.last_saved_step != self.step:
            self.step = run.saver.last_saved_step
            ctypes.CDLL(None).file_trace_mark(f"saved {self.step}".encode())

    @hookimpl
    def before_step(self, run):
        self.look(run)

    @hookimpl
    def after_step(self, run):
        self.look(run)

    @hookimpl
    def after_fit(self, run):
        self.look(run)

    @hookimpl
    def teardown(self, run):
        if run.is_main:
            ctypes.CDLL(None).file_trace_mark(b"completed 1")
'''
RUNS = {"plain": ([], 1), "async": (["--with", "async-save"], 1), "fsdp": (["--with", "fsdp"], 2)}
"""Name -> arguments of `fastloop train`, and number of processes."""


def write_run() -> None:
    """The recipe and the code of a run."""
    Path("marks.py").write_text(MARKS)
    write_recipe(
        train={"epochs": 2, "save_every": 6, "keep_checkpoints": 2, "log_every": 2},
        plugins=[*RECIPE["plugins"], "marks.py"],
    )


@pytest.fixture(scope="module", params=RUNS if LONG else ["plain", "async"])
def run(request: pytest.FixtureRequest, library: Path, folder: Path) -> History:
    """A traced run of `fastloop train`, complete and undisturbed."""
    arguments, count = RUNS[request.param]
    root = folder / request.param / "traced"
    root.mkdir(parents=True)
    with contextlib.chdir(root.parent):
        write_run()
        command = [sys.executable, *FASTLOOP, "recipe.yaml", f"output={root / 'run'}", *arguments]
        return History(file_trace.record(library, root, [command] * count, ranks(count)), root)


def below(files: dict[str, bytes | None], folder: str) -> dict[str, bytes | None]:
    return {name.removeprefix(folder): content for name, content in files.items() if name.startswith(folder)}


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.slow
def test_power_loss_during_a_run(run, record_property, request):
    """power is lost at any moment of a run: checkpoint, log, summary.json and exported model are complete as
    reported"""
    saved: dict[int, list[dict[str, bytes | None]]] = {}  # a step may be saved twice
    for change in run.changes:
        for _, name, node in change.sets:
            if node is not None and name.startswith("step-"):
                files = below(run.at(change.position + 1), f"run/checkpoints/{name}/")
                saved.setdefault(step_of(Path(name)) or 0, []).append(files)
    last = run.last()
    assert sorted(saved) == [6, 12, 18]

    def check(state: Path, marks: tuple[str, ...]) -> None:
        folder = state / "run"
        found = resume.find_resume_point(folder, folder) if folder.exists() else None
        reported = newest(marks)
        if found is None:
            assert not reported, f"the checkpoint of step {reported} is lost"
        else:
            step = step_of(found[0])
            assert step is not None
            assert step >= reported
            assert content(found[0]) in saved[step]
            offset = json.loads((found[0] / "state.json").read_text())["plugins"]["log"]["offset"]
            assert (folder / "metrics.jsonl").read_bytes()[:offset] == last["run/metrics.jsonl"][:offset]
            assert (folder / "recipe.yaml").read_bytes() == last["run/recipe.yaml"]
        summary = json.loads((folder / "summary.json").read_text()) if (folder / "summary.json").exists() else {}
        assert summary or not newest(marks, "completed")
        if summary.get("status") == "completed":
            assert below(last, "run/model/") == content(folder / "model")
            assert (folder / "metrics.jsonl").read_bytes() == last["run/metrics.jsonl"]

    record_property("faults", replay(run, check, limit=max(10, LIMIT // 4), every=1 if LONG else 2))


@pytest.mark.slow
@pytest.mark.parametrize("run", ["plain", "async"], indirect=True)
def test_run_resumes_after_a_power_loss(run, record_property):
    """power is lost at a random moment of a run: with --resume it ends as if undisturbed"""
    write_run()
    chance, count = random.Random(times(1)), times(3)
    crashes = list(run.crashes(2, seed=times(1)))
    for crash in chance.sample(crashes, min(count, len(crashes))):
        shutil.rmtree("state", ignore_errors=True)
        Path("state").mkdir()
        crash.write(Path("state"))
        assert train("output=state/run", "--resume", "--without", "marks") == 0, said()
        assert record("state/run") == record(str(run.root / "run"))
    record_property("faults", min(count, len(crashes)))

"""Options that name a file to write: devices, pipes, sockets and folders are refused in one line before the command.

Modules:
    core/fastloop/cli/arguments.py
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from fastloop import RecipeError
from fastloop.runtime import files
from fastloop.testing import expect_problem

# every option of a command that names a file to write, without work that would come before the check
OPTIONS = {
    "evaluate": ("evaluate", "run", "--json"),
    "plan": ("plan", "quickstart", "--json"),
    "predict": ("predict", "run", "a text", "--out"),
    "report": ("report", "run", "--output"),
    "schema": ("schema", "--output"),
    "bench": ("bench", "quickstart", "--select"),
}


@pytest.fixture
def places(tmp_path):
    """Places that are no file: what each one is -> its path."""
    os.mkfifo("pipe.csv")
    Path("folder.csv").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.csv")
    Path("linked.csv").symlink_to("/dev/null")
    found = {"folder.csv": "a folder", "linked.csv": "a device", "pipe.csv": "a device", "socket.csv": "a device"}
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.mknod("device.csv", 0o666 | stat.S_IFCHR, os.makedev(1, 7))  # /dev/full
        found["device.csv"] = "a device"
    return found


def kinds() -> dict[str, int]:
    return {path.name: stat.S_IFMT(path.lstat().st_mode) for path in Path().iterdir()}


@pytest.mark.parametrize("command", OPTIONS.values(), ids=OPTIONS.keys())
def test_devices_pipes_sockets_and_folders_are_refused(command, places, cli):
    """a device, pipe, socket or folder as the file of an option: refused before the command begins"""
    before = kinds()
    outside = {
        "/dev/stdout": "a device",
        "/dev/full": "a device",
        "/dev/fd/1": "a device",
        "/proc/self/comm": "a device",
    }
    for place, what in (places | outside).items():
        code, out, err = cli(*command, place)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {command[-1]} {place}: ")
        assert what in err
        assert err.count("\n") == 1
    assert kinds() == before
    assert Path("/dev/full").is_char_device()
    assert Path("/dev/stdout").is_symlink()


@pytest.mark.parametrize("command", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere/x.csv", "[folder-missing]"),
        ("x" * 300, "File name too long"),
        ("x/" * 2500 + "x", "File name too long"),
        ("/proc/x.csv", ""),
    ],
    ids=["no folder", "long name", "long path", "cannot be created"],
)
def test_files_that_cannot_be_written_are_refused(command, place, said, cli):
    """a file of an option that cannot be written: refused at once"""
    code, out, err = cli(*command, place)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {command[-1]} {place[:100]}")
    assert said in err
    assert err.count("\n") == 1
    assert len(err) < 300


def test_a_file_is_written_and_replaced(cli):
    """control: a new file, an existing one, a name of 255 bytes, and stdout"""
    for name in ("new.json", "new.json", "n" * 255):
        code, out, err = cli("schema", "--output", name)
        assert code == 0, out + err
        assert Path(name).read_text().startswith("{")
    code, out, _ = cli("schema")
    assert code == 0
    assert out == Path("new.json").read_text()
    assert len(list(Path().iterdir())) == 2


@pytest.mark.parametrize("place", ["pipe.csv", "linked.csv", "device.csv", "folder.csv", "socket.csv"])
def test_a_write_replaces_no_device(place, places):
    """a device or pipe at the name of a written file: an error"""
    if place not in places:
        pytest.skip("only root makes devices")
    before = kinds()
    with pytest.raises(OSError, match="device or pipe"):
        files.write(Path(place), "text")
    assert kinds() == before


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 2500], ids=["name", "path"])
@pytest.mark.parametrize("command", ["evaluate", "export", "predict", "report", "resume", "train"])
def test_paths_that_are_too_long_are_refused(command, name, cli):
    """a path that no file can have: one line of error"""
    commands = {"resume": ("train", "quickstart", "--resume", name), "predict": ("predict", name, "a text")}
    code, _, err = cli(*commands.get(command, (command, name)))
    assert code in (1, 2)
    assert "File name too long" in err
    assert err.count("\n") == 1
    assert not list(Path().iterdir())


def test_an_output_folder_with_a_name_of_255_bytes(tiny_run):
    """control: it is written and resumed; only moving it aside needs a longer name"""
    folder = Path("x" * 255)
    tiny_run(["log"], epochs=1, output=folder)
    assert tiny_run(["log"], epochs=2, output=folder, resume=True).summary["epochs"] == 2
    with expect_problem("folder-not-writable File name too long", RecipeError):
        tiny_run(["log"], epochs=1, output=folder)

"""Strangers' packages beside fastloop, and hostile environments: closed streams, small disks, stopped processes.

Modules:
    core/fastloop/cli/streams.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from fault_runs import write_recipe

from fastloop.plugins.packages import PLUGINS
from fastloop.testing import assert_problem
from fastloop_plugins._own_plugins import own_plugins

pytest_plugins = ["installing"]

WAIT = 300.0
"""Seconds until a command counts as hanging."""


def fastloop(*arguments: str, path: Path | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, whose start and streams matter here."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {}) | options.pop("env", {})
    command = [sys.executable, "-P", "-m", "fastloop", *arguments]
    return subprocess.run(
        command, env=environment, text=True, timeout=WAIT, check=False, **({"capture_output": True} | options)
    )


# -- packages that are installed beside fastloop -----------------------------------------------------------------------

# The plugins whose names another package claims.
CLAIMS: dict[str, list[str]] = {
    "a plugin that auto selects": ["fused-optimizer"],
    "all that speed up a step": ["fused-optimizer", "compile", "fast-dropout", "attention"],
    "auto's other defaults": ["dataloader-workers", "channels-last"],
}


@pytest.mark.parametrize("names", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_package_that_claims_our_names_does_not_weaken_auto_silently(names, install, cli):
    """a package installs plugins with names of ours: a warning names the package and the plugin"""
    ours = set(own_plugins())
    install("evil-pack", "raise SystemExit('imported')", **dict.fromkeys(names, "evil_pack:It"))
    code, out, err = cli("plan", "quickstart", "--with", "auto")
    assert code == 0, err
    for name in names:
        (line,) = [
            line
            for line in out.splitlines()
            if line.startswith(f"warning: plugin '{name}': evil-pack 1.2 installs a plugin of this name")
        ]
        assert_problem(line, "name-taken")
        package = PLUGINS[name].distribution if name in PLUGINS else "fastloop-train"
        assert f"list '{package}:{name}' in the recipe" in line
    assert ours - set(own_plugins()) == set(names)


def test_a_claimed_plugin_is_used_when_the_recipe_names_the_package(install, cli):
    """control: a package with names of its own is no reason for a warning, and ours can be listed with their package"""
    install("good-pack", "", warmth="good_pack:Warmth")
    code, out, _ = cli("plan", "quickstart", "--with", "auto")
    assert (code, "warning" in out) == (0, False)
    install("evil-pack", "raise SystemExit('imported')", fused_optimizer="evil_pack:It")
    code, out, err = cli("plan", "quickstart", "--with", "fastloop-train:fused-optimizer")
    assert (code, "fused-optimizer" in out) == (0, True), err


BACKEND = """
from pathlib import Path
def load():
    Path("ran").touch()
"""
# The commands that only show what is there.
INSPECTIONS: dict[str, list[str]] = {
    "doctor": ["doctor"],
    "plugins": ["plugins"],
    "one of our plugins, which imports torch": ["plugins", "compile"],
    "schema": ["schema"],
    "recipes": ["recipes"],
    "help": ["--help"],
}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", INSPECTIONS.values(), ids=INSPECTIONS.keys())
def test_a_command_that_inspects_runs_no_device_backend(arguments, install):
    """a package declares a torch.backends entry point: commands that only inspect do not run it"""
    install("evil-backend", BACKEND, group="torch.backends", evil="evil_backend:load")
    done = fastloop(*arguments, path=Path("site").absolute())
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert not Path("ran").exists()
    if arguments == ["doctor"]:
        assert "evil of evil-backend 1.2: TORCH_DEVICE_BACKEND_AUTOLOAD=1 fastloop doctor runs its code" in done.stdout


@pytest.mark.slow
def test_a_device_backend_runs_where_it_is_wanted(install):
    """control: plan knows the device of such a package, and doctor with TORCH_DEVICE_BACKEND_AUTOLOAD=1 does"""
    install("good-backend", BACKEND, group="torch.backends", good="good_backend:load")
    for arguments, variables in ((["doctor"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}), (["plan", "quickstart"], {})):
        done = fastloop(*arguments, path=Path("site").absolute(), env=variables)
        assert done.returncode == 0, done.stderr
        assert "not loaded" not in done.stdout
        assert Path("ran").exists()
        Path("ran").unlink()


# Name -> the file of the metadata that Python cannot read, its bytes, and whether a command that does not show the
# package fails, too.
MALFORMED: dict[str, tuple[str, bytes, bool]] = {
    "a line of entry_points.txt without a value": ("entry_points.txt", b"[fastloop.plugins]\nno value\n", True),
    "entry_points.txt is not UTF-8": ("entry_points.txt", b"[fastloop.plugins]\nx = \xe9:Y\n", True),
    "METADATA is not UTF-8": ("METADATA", b"Metadata-Version: 2.1\nName: p\xe9ck\nVersion: 1.2\n", False),
}


@pytest.mark.parametrize(("file", "content", "always"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_metadata_of_a_package_is_no_traceback(file, content, always, install, cli):
    """malformed metadata of an installed package: one line names its folder"""
    install("pack", "", warmth="pack:Warmth")
    (folder,) = Path("site").glob("*.dist-info")
    (folder / file).write_bytes(content)
    for command, fails in ((["plugins"], True), (["plan", "quickstart"], always)):
        code, _, err = cli(*command)
        assert code == (2 if fails else 0), err
        if fails:
            assert_problem(err, f"broken-package {folder.name}:")
            assert len(err.splitlines()) == 1


# -- standard streams --------------------------------------------------------------------------------------------------

# Name -> a shell's redirection.
STREAMS: dict[str, str] = {
    "a closed standard output": ">&-",
    "a closed standard error": "2>&-",
    "all three closed": "<&- >&- 2>&-",
    "a reader that leaves": "| head -1",
    "readers of both that leave": "2>&1 | head -1",
    "a full disk": "> /dev/full",
}
ONE_STEP = "train recipe.yaml train.max_steps=1 output=run"
"""Trains a module with the default plugins: a recipe of texts imports more, which takes longer than its training."""


def shell(arguments: str, redirection: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell does. The exit code is that of fastloop."""
    line = f"{sys.executable} -P -m fastloop {arguments} {redirection}"
    environment = os.environ | variables
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, env=environment, text=True, timeout=WAIT, check=False, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", STREAMS.values(), ids=STREAMS.keys())
def test_a_run_outlives_its_standard_streams(redirection):
    """the standard output or error of a training is closed, full or without a reader: the run completes"""
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}])
    done = shell(ONE_STEP, redirection)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"
    assert "step 1, test" in Path("run/log.txt").read_text()


@pytest.mark.slow
def test_two_processes_outlive_their_standard_streams():
    """the reader of two processes leaves: both complete the run"""
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}])
    done = shell(f"{ONE_STEP} --nproc 2 --with ddp", "2>&1 | head -1")
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"


@pytest.mark.slow
def test_a_listing_ends_well_when_its_reader_leaves():
    """the reader of a listing leaves (`fastloop plugins | head -1`): it ends without an error"""
    done = shell("plugins", "| head -1")
    assert (done.returncode, len(done.stdout.splitlines()), done.stderr) == (0, 1, "")
    done = shell("plugins", ">&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["plugins", "--help", pytest.param("plan quickstart", marks=pytest.mark.slow)])
def test_a_listing_that_cannot_be_written_is_an_error(command):
    """the standard output of a listing is a full disk: one line of error"""
    done = shell(command, "> /dev/full")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert_problem(done.stderr, "disk-full standard output")


def test_a_current_folder_that_was_removed_is_named():
    """the current folder was removed before the command: one line of error"""
    Path("gone").mkdir()
    line = f"cd gone && rmdir ../gone && {sys.executable} -P -m fastloop plan quickstart"
    done = subprocess.run(["bash", "-c", line], text=True, timeout=WAIT, check=False, capture_output=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert_problem(done.stderr, "no-current-folder current folder")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_an_option_of_fastloop_needs_no_current_folder(option):
    """the current folder was removed before the command: what reads no file works"""
    Path("gone").mkdir()
    line = f"cd gone && rmdir ../gone && {sys.executable} -P -m fastloop {option}"
    done = subprocess.run(["bash", "-c", line], text=True, timeout=WAIT, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fastloop" in done.stdout


def test_python_without_docstrings_is_refused():
    """`python -OO`: one line of error, and not one of transformers"""
    done = fastloop("recipes", env={"PYTHONOPTIMIZE": "2"})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert_problem(done.stderr, "no-docstrings -OO PYTHONOPTIMIZE=2")


FEW_FILES = """
import os, resource, sys
opened = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 24, opened + 24))
sys.argv[0] = "fastloop"
from fastloop.cli import main
main()
"""


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_named():
    """ulimit -n 40 with eight workers: one line of error"""
    Path("few.py").write_text(FEW_FILES)
    write_recipe(plugins={"dataloader-workers": {"num_workers": 8}})
    done = forked.run("few.py", "train", "recipe.yaml", timeout=WAIT)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert_problem(done.stderr, "too-many-files ulimit")


@pytest.mark.parametrize("columns", ["0", "-5", "80"])
def test_a_terminal_without_columns_shows_tables(columns):
    """COLUMNS=0, as a terminal without a size sets it: tables are as wide as in a pipe"""
    done = fastloop("plugins", env={"COLUMNS": columns})
    assert (done.returncode, done.stderr) == (0, "")
    assert "early-stopping" in done.stdout


@pytest.mark.parametrize(
    "variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_output_in_an_encoding_that_lacks_characters(variables):
    """the terminal's encoding lacks characters of a message: they are escaped"""
    Path("caf\u00e9.yaml").write_text("task: text-classification\n", encoding="utf-8")
    done = shell("train caf*.yaml", **variables)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: caf\\"), done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param("train quickstart output=caf\u00e9", "invalid-yaml", marks=pytest.mark.slow),
        pytest.param("train caf\u00e9.yaml", "file-missing", marks=pytest.mark.slow),
        ("train recipe.yaml", "file-missing"),
        pytest.param("evaluate caf\u00e9", "not-a-run", marks=pytest.mark.slow),
    ],
)
def test_a_path_that_the_encoding_of_file_names_lacks(command, expected):
    """a locale in which Python reads file names as ASCII: the error of a path proposes UTF-8"""
    data = 'data: {files: {train: "caf\\u00e9.csv"}, text: text, label: label}'  # escapes of YAML
    Path("recipe.yaml").write_text(f"model: {{name: model}}\n{data}\noutput: run\n")
    assert_problem(shell(command, **ASCII).stderr, f"{expected} PYTHONUTF8=1")


def test_a_missing_file_with_an_ascii_name_needs_no_other_encoding():
    """the same locale, and a path that it has: the error does not propose UTF-8"""
    done = shell("train new.yaml", **ASCII)
    assert_problem(done.stderr, "file-missing new.yaml")
    assert "PYTHONUTF8" not in done.stderr

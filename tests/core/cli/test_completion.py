"""``fastloop --install-completion``: the scripts complete in real shells, and start no Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BASH = "source {file}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _fastloop; echo ${{COMPREPLY[@]}}"
ZSH = (
    "compadd() {{ print -- ${{@:2}} }}; _files() {{ print FILES }}; f() {{ source {file} }}; words=({words}); "
    "CURRENT=$#words; f"
)
FISH = "source {file}; complete -C '{line}'"
FILES = {
    "bash": ".local/share/bash-completion/completions/fastloop",
    "zsh": ".zfunc/_fastloop",
    "fish": ".config/fish/completions/fastloop.fish",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("shell", "code"), [("bash", BASH), ("zsh", ZSH), ("fish", FISH)], ids=FILES)
def test_the_script_completes_commands_options_recipes_and_plugins(shell, code, cli, home, monkeypatch):
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    exit_code, out, _ = cli("--install-completion")
    file = home / FILES[shell]
    assert exit_code == 0
    assert out.startswith(f"wrote {file}\n")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for line, expected in (("tr", "train"), ("train qui", "quickstart"), ("train --re", "--resume"), ("new jo", "job")):
        assert expected in completed(shell, code, file, f"fastloop {line}")
    plugins = completed(shell, code, file, "fastloop train quickstart --with em")
    assert "ema" in plugins
    assert "--resume" not in plugins
    assert "python" not in file.read_text()


def completed(shell: str, code: str, file: Path, line: str) -> list[str]:
    """The words that a shell offers. ``PATH`` has only the programs of the shell itself, and no Python."""
    command = [shutil.which(shell), "-c", code.format(file=file, words=line, line=line)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"HOME": str(file.parent)}
    )
    assert not done.stderr
    return done.stdout.split()


def test_another_shell_is_refused_with_the_shells_that_work(cli, home, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    exit_code, _, err = cli("--install-completion")
    assert exit_code == 2
    assert "SHELL='/bin/tcsh'. Expected bash, zsh or fish" in err

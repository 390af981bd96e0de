"""`sweep --trials` with a database and a sweep.json that others changed: refused in one line, or without effect."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from search_runs import CODE, RECIPE

from fastloop.testing import assert_problem

COMMAND = ("sweep", "recipe.yaml", "train.lr=1e-4..1e-1", "--trials", "1", "--without", "progress")
Attack = Callable[[Path], Any]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and a search of one trial."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "code.py").write_text(CODE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"train": RECIPE["train"] | {"max_steps": 2}}))
    done = forked.run("-m", "fastloop", *COMMAND, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def sql(*statements: str) -> Attack:
    def change(run: Path) -> None:
        with sqlite3.connect(run / "study.db") as database:
            for statement in statements:
                database.execute(statement)

    return change


def runs(**values: Any) -> Attack:
    """Change the trial's record of its run."""

    def change(run: Path) -> None:
        record = {
            "name": "trial-0000",
            "values": {"train.lr": "0.1"},
            "seed": None,
            "status": "finished",
            "metrics": {"accuracy": 0.5},
        }
        with sqlite3.connect(run / "study.db") as database:
            text = json.dumps([record | {"reason": None, "fold": None} | values])
            database.execute("update trial_user_attributes set value_json=? where key='fastloop:runs'", [text])

    return change


def attribute(text: str) -> Attack:
    return sql(f"update trial_user_attributes set value_json='{text}' where key='fastloop:runs'")


def replaced(name: str, content: bytes | None) -> Attack:
    """Replace a file by another one, or by a folder."""

    def change(run: Path) -> None:
        (run / name).unlink()
        if content is None:
            (run / name).mkdir()
        else:
            (run / name).write_bytes(content)

    return change


OPEN, FAILED, MALFORMED, OTHER, UNREADABLE = (
    "unreachable-url",
    "storage-failed",
    "wrong-study",
    "wrong-study recipe.model.module:",
    "file-unreadable",
)
# attack -> (the change, what the error says)
ATTACKS: dict[str, tuple[Attack, str]] = {
    "no database": (replaced("study.db", b"garbage" * 1000), OPEN),
    "a damaged header": (replaced("study.db", b"SQLite format 3\0" + b"\xff" * 5000), OPEN),
    "a part of a database": (lambda run: (run / "study.db").write_bytes((run / "study.db").read_bytes()[:9000]), OPEN),
    "a folder": (replaced("study.db", None), OPEN),
    "another version": (sql("update alembic_version set version_num='v9'"), OPEN),
    "another schema": (sql("drop table trials", "create table trials (a int)"), FAILED),
    "no studies": (sql("drop table studies"), MALFORMED),
    "a state": (sql("update trials set state='EVIL'"), MALFORMED),
    "a direction": (sql("update study_directions set direction='EVIL'"), MALFORMED),
    "the other direction, which would make the worst trial the best": (
        sql("update study_directions set direction='MINIMIZE'"),
        MALFORMED,
    ),
    "a number": (sql("update trials set number=null"), MALFORMED),
    "a date": (sql("update trials set datetime_start='x'"), MALFORMED),
    "no value": (sql("delete from trial_values"), MALFORMED),
    "a text as a value": (sql("update trial_values set value='x'"), MALFORMED),
    "an infinite value": (sql("update trial_values set value_type='INF_POS', value=null"), MALFORMED),
    "a parameter outside its range": (sql("update trial_params set param_value=1e9"), MALFORMED),
    "a text as a parameter": (sql("update trial_params set param_value='x'"), MALFORMED),
    "a distribution": (
        sql('update trial_params set distribution_json=\'{"name": "Evil", "attributes": {}}\''),
        MALFORMED,
    ),
    "settings that are no JSON": (sql("update study_user_attributes set value_json='{'"), MALFORMED),
    "deep settings": (sql(f"update study_user_attributes set value_json='{'[' * 9000}{']' * 9000}'"), MALFORMED),
    "other settings": (sql("update study_user_attributes set value_json='[1]'"), OTHER),
    "runs that are no JSON": (attribute("{"), MALFORMED),
    "no runs": (attribute("null"), MALFORMED),
    "a number of runs": (attribute("5"), MALFORMED),
    "runs without values": (attribute('[{"name": "x"}]'), MALFORMED),
    "an unknown key of a run": (runs(evil=1), MALFORMED),
    "a run elsewhere": (runs(name="../../victim"), MALFORMED),
    "another key of the recipe": (runs(values={"plugins.x": "./evil.py"}), MALFORMED),
    "a value that moves the cursor": (runs(values={"train.lr": "\x1b[2J"}), MALFORMED),
    "a list of values": (runs(values=[1]), MALFORMED),
    "a text as a metric": (runs(metrics={"accuracy": "x"}), MALFORMED),
    "a huge metric": (runs(metrics={"accuracy": 10**400}), MALFORMED),
    "a seed": (runs(seed={"a": 1}), MALFORMED),
    "a status": (runs(status={"a": 1}), MALFORMED),
    "an error": (sql("insert into trial_user_attributes values (77, 1, 'fastloop:error', '[1]')"), MALFORMED),
    "a deep sweep.json": (replaced("sweep.json", b"[" * 200_000), UNREADABLE),
    "a sweep.json of bytes": (replaced("sweep.json", b"\xff\xfe\0"), UNREADABLE),
    "a folder sweep.json": (replaced("sweep.json", None), UNREADABLE),
}


@pytest.mark.parametrize(("change", "expected"), ATTACKS.values(), ids=ATTACKS.keys())
def test_a_tampered_study_is_refused(change, expected, searched, tmp_path, cli):
    """a database of Optuna that others changed: refused with the study"""
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    change(tmp_path / "run")
    before = {path.name for path in tmp_path.rglob("*")}
    code, out, err = cli(*COMMAND)
    assert code in (1, 2), out + err
    assert (out, err.count("\n")) == ("", 1)
    assert_problem(err, expected)
    assert {path.name for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("content", [None, b'{"study": 1, "runs": [{"name": "../x"}], "points": 3}'])
def test_a_search_replaces_sweep_json_by_its_own(content, searched, tmp_path, cli):
    """control: a search that is complete shows its trial again, whatever sweep.json says"""
    shutil.copytree(searched, tmp_path, dirs_exist_ok=True)
    if content is not None:
        replaced("sweep.json", content)(tmp_path / "run")
    code, out, err = cli(*COMMAND)
    assert code == 0, out + err
    assert "best: fastloop train" in out
    assert json.loads(Path("run/sweep.json").read_text()) == json.loads((searched / "run/sweep.json").read_text())
    assert not list(Path("run").glob(".*"))

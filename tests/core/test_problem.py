"""The fields of errors and warnings, and the text that is made of them.

Modules:
    core/fastloop/errors.py
    core/fastloop/problem.py
"""

from __future__ import annotations

import json
import pickle
import subprocess

import pytest

from fastloop import Plugin, Problem, RecipeError, option
from fastloop.errors import DataError, FastloopError, MetricError, UsageError
from fastloop.plugins.plugin import listed_at
from fastloop.problem import agree, counted, counted_of, shell_word
from fastloop_plugins.guards._numbers import NotFinite, StepStart


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("is missing."), "is missing."),
        (Problem("is missing.", place="a.csv"), "a.csv: is missing."),
        (Problem(place="r: k", found="1", expected="2 or 3"), "r: k: found 1, expected 2 or 3."),
        (Problem(place="r: k", expected="2 or 3"), "r: k: expected 2 or 3."),
        (Problem("The file is cut.", found="1", remedy="Copy it."), "The file is cut. Found 1. Copy it."),
        (Problem("no such key.", remedy=" Did you mean 'lr'?"), "no such key. Did you mean 'lr'?"),
        (Problem(remedy="Give data.label_type=class."), "Give data.label_type=class."),
        (
            Problem(remedy="Drop: data.drop=[{column: A, empty: true}]."),
            "Drop: 'data.drop=[{column: A, empty: true}]'.",
        ),
        (Problem(remedy="Map: `data.label_map={'a b': c}`."), "Map: `\"data.label_map={'a b': c}\"`."),
        (Problem("Quoted: 'data.label=[A, B]'."), "Quoted: 'data.label=[A, B]'."),
        (Problem(remedy="Run `fastloop plan r.yaml 'a=[b, c]'`."), "Run `fastloop plan r.yaml 'a=[b, c]'`."),
    ],
)
def test_one_text_is_made_of_the_fields(problem: Problem, text: str):
    assert str(problem) == text


@pytest.mark.parametrize("is_plain", [True, False])
def test_bash_reads_an_override_of_a_message_as_one_word(is_plain: bool):
    plain = ["train.lr=1e-3", "plugins.ema={}", "data.label=größe", "train.eval_batch_size=1{remedy}", "output=a,b"]
    changed = [
        "data.label=[A,B]",
        "data.drop=[{column: A, empty: true}]",
        "model.x={a,b}",
        "data.label_map={'a b': c}",
        "data.read.delimiter=';'",
        "data.label_map={'\"$x`!': it's}",
        "data.label=a&b",
        "data.label=~",
        "output=a*",
    ]
    overrides = plain if is_plain else changed
    words = [shell_word(override) for override in overrides]
    assert [word == override for word, override in zip(words, overrides, strict=True)] == [is_plain] * len(words)
    command = ["bash", "-c", f"printf '%s\\n' {' '.join(words)}"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines() == overrides
    )


@pytest.mark.parametrize(
    ("place", "file", "key", "line"),
    [
        ("recipe.yaml: train.lr", "recipe.yaml", "train.lr", None),
        ("recipe: plugins.ema", "recipe", "plugins.ema", None),
        ("a/train.csv, line 3", "a/train.csv", None, 3),
        ("train.jsonl, row 1,234", "train.jsonl", None, 1234),
        ("--resume runs/a", None, None, None),
        ("", None, None, None),
    ],
)
def test_json_has_the_parts_of_the_place(place: str, file: str | None, key: str | None, line: int | None):
    fields = Problem("x", place=place).to_json()
    assert (fields["place"], fields["file"], fields["key"], fields["line"]) == (place, file, key, line)


def test_proposals_are_the_quoted_parts_of_the_remedy():
    problem = Problem(
        "`not.this=1`", remedy="For classes, give `data.label_type=class`. Or run `fastloop plan r.yaml`."
    )
    assert problem.proposals == ["data.label_type=class", "fastloop plan r.yaml"]


@pytest.mark.parametrize(
    ("remedy", "proposals"),
    [
        ("For classes, give data.label_type=class.", ["data.label_type=class"]),
        ("Give data.read.delimiter=';', or train.lr=1e-5,3e-5.", ["data.read.delimiter=';'", "train.lr=1e-5,3e-5"]),
        ("Set train.max_steps.", []),
        ("Give `data.label_map={a: b, c: d}`.", ["data.label_map={a: b, c: d}"]),
    ],
)
def test_an_override_without_spaces_needs_no_quotes(remedy: str, proposals: list[str]):
    assert Problem(remedy=remedy).proposals == proposals


def test_an_error_has_the_code_of_its_class_unless_it_has_one():
    assert RecipeError("x").problem.code == "invalid-recipe"
    assert RecipeError("x", code="unknown-option").problem.code == "unknown-option"
    subclasses = [FastloopError]
    for kind in subclasses:
        subclasses += kind.__subclasses__()
    codes = [vars(kind)["code"] for kind in subclasses if kind.__module__ == "fastloop.errors"]
    assert len(codes) == len(set(codes)) > 10


@pytest.mark.parametrize(
    "error",
    [
        UsageError("x", code="odd", place="p", remedy="Give `a=1`."),
        DataError("x"),
        MetricError("is a list.", None, {"top": 1}, place="r: metrics"),
        NotFinite("x", StepStart(3, 0, 16, 8)),
    ],
)
def test_an_error_of_another_process_keeps_its_fields(error: FastloopError):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_an_error_with_other_attributes_has_fields():
    error = MetricError("is a list.", None, {"top": 1}, place="r: metrics")
    assert (str(error), error.values) == ("r: metrics: is a list.", {"top": 1})


class Warmth(Plugin):
    """Warms."""

    name = "warmth"
    degrees: float = option("How warm.", default=20.0)


def test_a_plugin_fills_in_the_place(caplog: pytest.LogCaptureFixture):
    with listed_at("r.yaml: plugins.warmth"):
        plugin = Warmth()
    problem = plugin.error("degrees", "is too warm.", code="out-of-range").problem
    assert problem == Problem("is too warm.", code="out-of-range", place="r.yaml: plugins.warmth.degrees")
    assert plugin.error("", "is alone.").problem.place == "r.yaml: plugins.warmth"
    plugin.log.warning(Problem("is idle.", code="no-effect", place="r.yaml"))
    (record,) = caplog.records
    assert record.msg == Problem("is idle.", code="no-effect", place="warmth: r.yaml")


def test_a_command_reports_its_error_as_json(cli):
    code, _, err = cli("--json", "plan", "quickstart", "train.lr=fast")
    fields = json.loads(err)
    assert code == 2
    assert fields["level"] == "error"
    assert (fields["code"], fields["key"]) == ("invalid-value", "train.lr")
    assert "'fast'" in fields["message"]


def test_an_option_of_plugins_is_the_same(cli):
    code, _, err = cli("plugins", "emaa", "--json")
    assert (code, json.loads(err)["level"]) == (2, "error")


def test_a_command_shows_the_code(cli):
    _, _, err = cli("plan", "quickstart", "train.lr=fast")
    assert err.startswith("error: ")
    assert err.endswith("]\n")


def test_a_number_with_its_noun():
    assert [counted(number, "step") for number in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]
    assert [counted(number, "process") for number in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(number, "retry", "retries") for number in (1, 2)] == ["1 retry", "2 retries"]
    assert [counted_of(1, total, "rows") for total in (1, 2, 1200)] == ["1 of 1 row", "1 of 2 rows", "1 of 1200 rows"]
    assert [agree(number, "is", "are") for number in (0, 1, 2)] == ["are", "is", "are"]

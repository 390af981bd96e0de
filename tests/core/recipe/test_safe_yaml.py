"""YAML as recipes read it: a key or number that is read in another way than it is spelled is refused.

Modules:
    core/fastloop/recipe/safe_yaml.py
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from fastloop import Problem, RecipeError
from fastloop.recipe import load_recipe, make_recipe, safe_yaml
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.shared.recipe_text import inline

ROOT = Path(__file__).parents[3]
BOOLEANS = ("no", "No", "NO", "off", "Off", "on", "ON", "yes", "Yes", "true", "True", "false", "FALSE")
NULLS = ("null", "Null", "~")
NUMBERS = {
    "octal digits": "007",
    "octal digits of another number": "010",
    "a negative number with a leading zero": "-012",
    "a float with a leading zero": "01.10",
    "a leading zero and an exponent": "00e5",
    "a time": "12:30",
    "a time with seconds": "12:30:45",
    "a time with a fraction": "1:30.5",
    "an IP-like number": "190:20:30",
    "a version with an underscore": "1_2",
    "a date with underscores": "2024_01_15",
    "a fraction with an underscore": "0.1_5",
    "a commit that overflows": "12e4567",
}
PLACES = {
    "a key": "data:\n  a:\n    {}: x\n",
    "a key in a flow": "data:\n  a: {{b: 1,\n    {}: x}}\n",
    "a key in a list": "data:\n  a:\n  - {}: x\n",
    "a key of an anchor that is merged": "data:\n  b: 1\n  a: &a {{{}: x}}\n  c: {{<<: *a}}\n",
}
VALUES = {
    "a value": "data:\n  b: 1\n  a: {}\n",
    "an item": "data:\n  a: [x,\n    {}]\n",
    "a value of an anchor": "data:\n  b: 1\n  a: &a {}\n  c: [*a]\n",
}


def refusal(text: str) -> Problem:
    with pytest.raises(RecipeError) as refused:
        safe_yaml.load(text, "r.yaml")
    return refused.value.problem


def scalars(tree: Any) -> list[Any]:
    """All keys and values of nested mappings and lists."""
    if isinstance(tree, dict):
        return [each for pair in tree.items() for part in pair for each in scalars(part)]
    return [each for item in tree for each in scalars(item)] if isinstance(tree, list) else [tree]


@pytest.mark.parametrize("word", [*BOOLEANS, *NULLS, *NUMBERS.values()])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_key_that_is_not_read_as_spelled_is_refused_with_its_quoted_form(place, word):
    problem = refusal(place.format(word))
    assert problem.place == "r.yaml, line 3"
    assert_problem(problem, f"ambiguous-yaml '{word}'")
    assert word in scalars(safe_yaml.load(place.format(f"'{word}'"), "r.yaml")), "the proposed form is that text"


@pytest.mark.parametrize("word", NUMBERS.values(), ids=NUMBERS.keys())
@pytest.mark.parametrize("place", VALUES.values(), ids=VALUES.keys())
def test_number_that_is_not_read_as_spelled_is_refused_with_its_quoted_form(place, word):
    problem = refusal(place.format(word))
    assert problem.place == "r.yaml, line 3"
    assert_problem(problem, f"ambiguous-yaml '{word}'")
    assert word in scalars(safe_yaml.load(place.format(f"'{word}'"), "r.yaml"))


def test_every_short_word_is_text_as_spelled_or_the_number_that_python_reads():
    words = map(
        "".join, itertools.chain.from_iterable(itertools.product("0178:._e-+x", repeat=n) for n in (1, 2, 3, 4))
    )
    counts = {"text": 0, "number": 0, "refused": 0}
    for word in words:
        if (word[0] in "-:" and len(word) == 1) or word.endswith(":"):
            continue  # a part of YAML's own syntax
        try:
            value = safe_yaml.load(f"[{word}]", "w")[0]
        except RecipeError:
            counts["refused"] += 1
            continue
        if isinstance(value, str):
            counts["text"] += 1
            assert value == word
        elif isinstance(value, int | float):
            counts["number"] += 1
            assert value == (int(word, 0) if "x" in word else float(word)), word
    assert min(counts.values()) > 100, counts


ALIKE = {
    "1": ("1", "1.0", "0x1", "0b1", "1e0", "+1", "'1'", '"1"'),
    "16": ("16", "0x10", "16.0", "1.6e1", "'16'"),
    "1000": ("1000", "1_000", "1e3"),
    "nan": (".nan", ".NaN"),
    "-inf": ("-.inf", "-.Inf"),
    "a": ("a", "'a'", '"a"', '"\\x61"', "!!str a"),
}
PAIRS = [(read, *pair) for read, spellings in ALIKE.items() for pair in itertools.permutations(spellings, 2)]


@pytest.mark.parametrize(("read", "first", "second"), PAIRS)
def test_keys_that_are_read_alike_are_refused_with_both_lines(read, first, second):
    problem = refusal(f"data:\n  {first}: x\n  b: 1\n  {second}: y\n")
    assert problem.place == "r.yaml, line 4"
    assert "line 2" in str(problem)
    for spelling in (first, second):
        assert spelling.removeprefix("!!str ").strip("'\"").replace("\\x61", "a") in str(problem)


def test_words_that_are_read_as_spelled_stay():
    text = (
        "a: &a {0: x, 1: y, -1: z, 08: eight, y: 1, n: 2, 2024-01-01: date, 1.5: float}\n"
        "b: [0, 0.5, -0.1, 1e-3, .5, -.5, 10, 10_000, 1_000_000.5, 0x1F, 0b101, .inf, -.inf]\n"
        "c: [2024-01-01, 2001-12-14t21:59:43.10-05:00, 12:60, 1:2:99, 08, 0o17, y, n, =, 1.2.3, 10:ab]\n"
        "d: {<<: *a, 0: other}\n"
        "e: [no, off, yes, true, null]\n"
    )
    tree = safe_yaml.load(text, "r.yaml")
    assert tree["a"] == {0: "x", 1: "y", -1: "z", "08": "eight", "y": 1, "n": 2, "2024-01-01": "date", 1.5: "float"}
    inf = float("inf")
    assert tree["b"] == [0, 0.5, -0.1, 1e-3, 0.5, -0.5, 10, 10_000, 1_000_000.5, 31, 5, inf, -inf]
    assert tree["c"] == re.findall(r"[^][, ]+", text.splitlines()[2])[1:]
    assert tree["d"] == tree["a"] | {0: "other"}
    assert tree["e"] == [False, False, True, True, None]


# -- each way into a recipe --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["007", "12:30", "1_2"])
def test_override_with_such_a_number_is_refused_and_its_quoted_form_is_text(word):
    Path("r.yaml").write_text("data: {a: x}\n")
    for override in (f"data.a={word}", f"data.a=[{word}]", f"data.a={{{word}: x}}", f"data.b.c={word}"):
        with expect_problem(f"ambiguous-yaml {word}", RecipeError) as refused:
            load_recipe("r.yaml", [override])
        assert refused.value.problem.place == override
        recipe = load_recipe("r.yaml", [override.replace(word, f"'{word}'")])
        assert word in scalars(recipe.data)


@pytest.mark.parametrize("key", BOOLEANS)
def test_override_with_a_boolean_key_is_refused(key):
    Path("r.yaml").write_text("data: {a: x}\n")
    with expect_problem("ambiguous-yaml boolean", RecipeError):
        load_recipe("r.yaml", [f"data.a={{{key}: 1}}"])
    assert load_recipe("r.yaml", [f"data.a.{key}=1"]).data["a"] == {key: 1}, "a key of a path is text"


def test_key_of_an_override_may_have_an_escaped_equals_sign():
    Path("r.yaml").write_text("data: {a: {b: 1}}\n")
    assert load_recipe("r.yaml", [r"data.a.x\=y=1=2"]).data["a"] == {"b": 1, "x=y": "1=2"}


def test_extended_recipe_is_read_in_the_same_way():
    Path("base.yaml").write_text("data: {a: {no: 0, off: 1}}\n")
    Path("r.yaml").write_text("extends: base.yaml\n")
    with expect_problem("ambiguous-yaml base.yaml 1 YAML", RecipeError):
        load_recipe("r.yaml")


@pytest.mark.parametrize(
    "keys",
    [{True: 1}, {None: 1}, {1: "a", "1": "b"}, {1: "a", "1.0": "b", 1.5: "c", "1.5": "d"}, {(1, 2): 1}, {b"a": 1}],
    ids=str,
)
def test_recipe_of_python_has_the_same_keys(keys):
    for tree in ({"data": {"map": keys}}, {"plugins": [{"ema": {"list": [keys]}}]}, {"model": keys}, {"train": keys}):
        with pytest.raises(RecipeError, match="key"):
            make_recipe(tree)


TEXTS = [
    "1e-3",
    "-.5",
    ".5",
    "1.",
    "007",
    "08",
    "12:30",
    "no",
    "y",
    "null",
    "~",
    "",
    "2024-01-01",
    "1_000",
    "0x1F",
    "=",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_a_written_recipe_is_read_back(text):
    for value in (text, [text], {text: text}):
        assert safe_yaml.load(f"a: {inline(value)}", "r.yaml") == {"a": value}


def test_no_other_module_reads_yaml():
    reader = re.compile(r"\b(yaml\.(\w*load\w*|compose\w*)|OmegaConf\.(load|from_dotlist|from_cli))\(")
    modules = [path for folder in ("core", "plugins", "packages") for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 300
    assert [path for path in modules if reader.search(path.read_text()) and "tests" not in path.parts] == []

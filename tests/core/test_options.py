"""Options: invalid values, and their error messages.

Modules:
    core/fastloop/cli/option_table.py
    core/fastloop/options.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from fastloop import RecipeError, option
from fastloop.cli.option_table import describe
from fastloop.options import adapter, parse
from fastloop.testing import expect_problem


@dataclass(kw_only=True)
class Heater:
    size: int = option("How large.", ge=1, le=9)
    rate: float = option("How fast.", default=0.5, gt=0)
    workers: int | Literal["auto"] = option("How many.", default="auto", ge=0)
    dtype: Literal["bf16", "fp16"] = "bf16"
    limit: int | None = option("At most.", default=None, ge=1)
    quiet: bool = False
    names: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quiet and self.limit:
            raise ValueError("quiet and limit exclude each other.")


def test_good_values_become_the_dataclass_with_its_defaults():
    heater = parse(Heater, {"size": 3, "rate": 1, "workers": 2, "shares": {"a": 1.0}}, "x")
    assert heater == Heater(size=3, rate=1.0, workers=2, shares={"a": 1.0})
    assert isinstance(heater.rate, float)
    assert parse(Heater, {"size": 3}, "x").names is not parse(Heater, {"size": 3}, "x").names


WRONG: dict[str, tuple[Any, list[str]]] = {
    "unknown key": ({"size": 1, "rat": 2.0}, ["heater.rat 'rate'"]),
    "unknown key far from all": (
        {"size": 1, "zzz": 1},
        ["heater.zzz dtype limit names"],
    ),
    "a key that is not text": ({"size": 1, 7: 1}, ["heater.7"]),
    "missing": ({}, ["heater.size int"]),
    "text for a number": ({"size": "3"}, ["heater.size '3' str int"]),
    "a float for an int": ({"size": 3.0}, ["heater.size 3.0 float int"]),
    "a truth value for an int": ({"size": True}, ["heater.size True bool int"]),
    "a number for a truth value": ({"size": 1, "quiet": 1}, ["heater.quiet 1 int bool"]),
    "too small": ({"size": 0}, ["heater.size 0 int 1 int"]),
    "too large": ({"size": 10}, ["heater.size 10 int 9"]),
    "on the open bound": (
        {"size": 1, "rate": 0.0},
        ["heater.rate 0.0 float 0 float"],
    ),
    "infinite": ({"size": 1, "rate": float("inf")}, ["heater.rate inf float"]),
    "in no member of a union": (
        {"size": 1, "workers": "aut"},
        ["heater.workers 'aut' str int auto"],
    ),
    "out of range in a union": (
        {"size": 1, "workers": -1},
        ["heater.workers -1 int 0"],
    ),
    "another choice": ({"size": 1, "dtype": "fp15"}, ["heater.dtype 'fp15' str bf16 fp16"]),
    "null where a value is needed": ({"size": None}, ["heater.size None NoneType int"]),
    "one wrong item": ({"size": 1, "names": ["a", 2]}, ["heater.names 2 int list[str]"]),
    "one wrong value": (
        {"size": 1, "shares": {"a": "b"}},
        ["heater.shares 'b' str dict[str float]"],
    ),
    "several": (
        {"sise": 1, "rate": "x"},
        ["heater.sise 'size'", "heater.rate 'x'", "heater.size"],
    ),
    "each right, together wrong": (
        {"size": 1, "quiet": True, "limit": 2},
        ["heater quiet limit"],
    ),
    "no mapping": ([1], ["heater [1] list"]),
}


@pytest.mark.parametrize(("values", "facts"), WRONG.values(), ids=WRONG.keys())
def test_option_error_has_key_value_and_expectation(values, facts):
    with pytest.raises(RecipeError) as refused:
        parse(Heater, values, "r.yaml: heater")
    for text in facts:
        assert all(word in str(refused.value) for word in text.split()), text
    assert all(line.startswith("r.yaml: heater") for line in str(refused.value).splitlines())
    assert "pydantic" not in str(refused.value)


def test_union_error_is_reported_once():
    with pytest.raises(RecipeError) as refused:
        parse(Heater, {"size": 1, "workers": 1.5}, "x")
    assert str(refused.value).count("workers") == 1


def test_optional_options_accept_null():
    assert parse(Heater, {"size": 1, "limit": None}, "x").limit is None

    @dataclass(kw_only=True)
    class Nothing:
        pass

    assert parse(Nothing, None, "x") == Nothing()


def test_option_may_be_named_like_a_validator_method():
    @dataclass(kw_only=True)
    class Config:
        schema: str = "a"
        copy: int = 1
        model_fields: bool = False

    assert parse(Config, {"schema": "b", "copy": 2, "model_fields": True}, "x") == Config(
        schema="b", copy=2, model_fields=True
    )
    with expect_problem("invalid-value x.copy 'c'", RecipeError):
        parse(Config, {"copy": "c"}, "x")


@pytest.mark.parametrize(("value", "word"), [(["ham", False], "'no'"), ([True], "'yes'")])
def test_a_boolean_for_a_text_proposes_quotes(value, word):
    with expect_problem(f"invalid-value x.names YAML quotes {word}", RecipeError):
        parse(Heater, {"size": 1, "names": value}, "x")
    with pytest.raises(RecipeError) as refused:
        parse(Heater, {"size": True}, "x")
    assert "YAML" not in str(refused.value), "no text can be meant"


def test_options_describe_themselves():
    rows = {row.name: (row.type, row.default, row.help) for row in describe(Heater)}
    assert rows == {
        "size": ("int", "(required)", "How large."),
        "rate": ("float", "0.5", "How fast."),
        "workers": ("int | auto", "auto", "How many."),
        "dtype": ("bf16 | fp16", "bf16", ""),
        "limit": ("int | null", "null", "At most."),
        "quiet": ("bool", "False", ""),
        "names": ("list[str]", "[]", ""),
        "shares": ("dict[str, float]", "{}", ""),
    }
    assert list(rows) == ["size", "rate", "workers", "dtype", "limit", "quiet", "names", "shares"]


def test_bound_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match=r"'min'"):
        option("How many.", default=1, min=0)


def test_metadata_of_annotated_is_refused():
    """Pydantic would ignore its bounds and its help."""

    @dataclass(kw_only=True)
    class Old:
        size: Annotated[int, option("How large.", ge=1)] = 1

    with pytest.raises(TypeError, match=r"declare 'size' as `size: TYPE = option\(\.\.\.\)`"):
        adapter(Old)

"""Options: ``option`` declares one, pydantic validates them, and errors name the option and the expected value.

    @dataclass(kw_only=True)
    class Data:
        max_length: int | None = option("Longest text in tokens; null: no limit.", default=None, ge=1)

The sections of a recipe are such dataclasses. A plugin declares its options in the same way on its class, and
``plugins.declared_options`` makes a dataclass of them. Recipes, Python arguments, `fastloop plugins NAME`, `fastloop
schema` and the docs use the same dataclass.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, overload

from fastloop.errors import RecipeError, did_you_mean
from fastloop.problem import Problem

if TYPE_CHECKING:  # pydantic is imported where it is used: `fastloop --help` needs none of it
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
BOUND_ERRORS = ("greater_than", "less_than", "finite_number")
"""How pydantic's types of errors begin whose message states a bound, such as ``greater_than_equal``."""

YAML_WORDS = {False: ("no", "off", "false"), True: ("yes", "on", "true")}
"""Boolean -> the words that YAML reads as it if they are not quoted, in lower case."""


class Bounds(TypedDict, total=False):
    """Limits of an option's values, by pydantic's names. Use them for options of one type or null. In a union, use a
    bounded type: ``PositiveInt | Literal["auto"]``."""

    ge: float
    gt: float
    le: float
    lt: float
    min_length: int
    max_length: int


@overload
def option(help: str, *, key: str = "", **bounds: Unpack[Bounds]) -> Any: ...


@overload
def option(help: str, *, default: T, key: str = "", **bounds: Unpack[Bounds]) -> T: ...


@overload
def option(help: str, *, default_factory: Callable[[], T], key: str = "", **bounds: Unpack[Bounds]) -> T: ...


def option(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    key: str = "",
    **bounds: Unpack[Bounds],
) -> Any:
    """Declare an option of a plugin, or of a dataclass of options: ``degrees: float = option("How warm.", default=20.0,
    ge=0)``. Without a default it is required.

    Args:
        help: Its description, for users.
        default: Its value if a recipe does not set it.
        default_factory: Makes the default, if that is a list or dict.
        key: Its key in recipes, if the attribute of the plugin must have another name.
        bounds: ``ge``, ``gt``, ``le``, ``lt``, ``min_length``, ``max_length``.

    Raises:
        TypeError: ``bounds`` has another name.
    """
    unknown = bounds.keys() - Bounds.__annotations__.keys()
    if unknown:
        raise TypeError(f"option() has no argument {min(unknown)!r}. Bounds are {', '.join(Bounds.__annotations__)}.")
    metadata = {"description": help, "key": key, **bounds}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """pydantic's adapter of a dataclass of options. Without its configuration, pydantic converts types and ignores
    unknown keys."""
    from pydantic import ConfigDict, TypeAdapter

    hints = typing.get_type_hints(cls, include_extras=True)  # raises NameError, which pydantic would postpone
    for name, hint in hints.items():
        if any(isinstance(mark, dataclasses.Field) for mark in getattr(hint, "__metadata__", ())):
            raise TypeError(f"declare {name!r} as `{name}: TYPE = option(...)`, without Annotated")
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return TypeAdapter(cls)


def parse(cls: type[T], values: Mapping[str, Any] | None, where: str) -> T:
    """Validate ``values`` and return an instance of the dataclass ``cls``.

    Args:
        where: Start of error messages, such as ``recipes/x.yaml: train``.

    Raises:
        RecipeError: A key is unknown (suggests the nearest one, or what ``cls.other_names`` has for it), has the wrong
            type, or is out of range.
    """
    from pydantic import ValidationError
    from pydantic_core import ArgsKwargs

    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise RecipeError(code="wrong-type", place=where, found=_format(values), expected="a mapping of options")
    validator = adapter(cls).validator  # type: ignore[arg-type]
    arguments = ArgsKwargs((), {str(key): value for key, value in values.items()})
    try:  # in strict mode, pydantic makes a dataclass from arguments only, as dataclasses of its own do
        valid: T = validator.validate_python(arguments, self_instance=cls.__new__(cls))
    except ValidationError as error:
        problems = list(_explain(cls, error, where))
        first = problems[0]
        if len(problems) > 1:
            raise RecipeError("\n".join(map(str, problems)), code=first.code) from None
        raise RecipeError(
            first.text, code=first.code, place=first.place, expected=first.expected, remedy=first.remedy
        ) from None
    return valid


def _explain(cls: type, error: ValidationError, where: str) -> Iterator[Problem]:
    """The problems of options: those that are unknown or missing first."""
    invalid = dict[str, list[Any]]()
    for item in error.errors():
        if not item["loc"]:  # __post_init__ refused a combination of options
            yield Problem(str(item["ctx"]["error"]), code="invalid-value", place=where)
            continue
        name = str(item["loc"][0])  # the option; the rest is a place in its value
        if item["type"] == "unexpected_keyword_argument":
            other_names: Mapping[str, str] = getattr(cls, "other_names", {})
            options = [field.name for field in dataclasses.fields(cls)]
            suggestion = other_names.get(name) or did_you_mean(name, options)
            yield Problem("no such option.", code="unknown-option", place=f"{where}.{name}", remedy=suggestion)
        elif item["type"] == "missing":
            expected = _expected(cls, name)
            yield Problem("missing.", code="missing-value", place=f"{where}.{name}", expected=expected)
        else:
            invalid.setdefault(name, []).append(item)
    for name, items in invalid.items():
        yield _explain_value(cls, name, items, where)


def _explain_value(cls: type, name: str, items: list[Any], where: str) -> Problem:
    """The problem of an option's value. pydantic gives an item for each member of a union."""
    text = f"found {_format(items[-1]['input'])}"
    bounds = [item["msg"] for item in items if item["type"].startswith(BOUND_ERRORS)]
    if bounds:
        text += f" ({bounds[0].removeprefix('Input ')})"
    remedy = ""
    for item in items:
        if isinstance(item["input"], bool) and item["type"] == "string_type":
            remedy = f" {quote_boolean(item['input'])}"
            break
    return Problem(
        f"{text}.", code="invalid-value", place=f"{where}.{name}", expected=_expected(cls, name), remedy=remedy
    )


def quote_boolean(value: bool) -> str:
    """The remedy for a boolean of YAML that was probably meant as text."""
    words = YAML_WORDS[value]
    return f"YAML reads {', '.join(words)} as {words[-1]}. For the text, write it in quotes, such as '{words[0]}'."


def _expected(cls: type, name: str) -> str:
    kind = type_name(typing.get_type_hints(cls, include_extras=True)[name])
    (help,) = [help_text(field) for field in dataclasses.fields(cls) if field.name == name]
    return f"{kind}: {help.removesuffix('.')}" if help else kind


def _format(value: Any) -> str:
    return f"{value!r:.300} ({type(value).__name__})"


def help_text(field: dataclasses.Field[Any]) -> str:
    """The description of an option, for users; empty for a field that ``option`` did not make."""
    description: str = field.metadata.get("description", "")
    return description


def type_name(hint: Any) -> str:
    """The type of an option as users read it, such as ``int | null``."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(str(value) for value in args)
    if hint is type(None):
        return "null"
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(type_name(arg) for arg in args)}]"
    return " | ".join(map(type_name, args)) if args else getattr(hint, "__name__", str(hint))

"""Options: a dataclass describes them, pydantic validates them, and errors name the option and the expected value.

    @dataclass(kw_only=True)
    class Config:
        num_workers: Annotated[int | Literal["auto"], option("Worker processes.", ge=0)] = "auto"

Recipes, Python arguments, `fastloop plugins NAME`, `fastloop schema` and the docs use the same dataclass.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from fastloop.errors import PluginError, RecipeError, UsageError, did_you_mean

if TYPE_CHECKING:  # pydantic is imported where it is used: `fastloop --help` needs none of it
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

T = TypeVar("T")


def option(help: str, **bounds: Any) -> FieldInfo:
    """Metadata for an annotated option: a help text, and pydantic's bounds (``ge``, ``gt``, ``le``, ...).

    Use bounds for options of one type or null. In a union, use a bounded type: ``PositiveInt | Literal["auto"]``.
    """
    from pydantic import Field

    info: FieldInfo = Field(description=help, **bounds)
    return info


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One row of an option table."""

    name: str
    type: str
    default: str
    help: str


@cache
def pydantic_model(cls: Any) -> type[BaseModel]:
    """The pydantic model of the mappings for a dataclass. Its fields have the prefix ``option_``, and the dataclass's
    names as aliases."""
    from pydantic import ConfigDict, Field, create_model

    hints = typing.get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default: Any = Field(field.default, alias=field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = Field(default_factory=field.default_factory, alias=field.name)
        else:
            default = Field(alias=field.name)
        fields[f"option_{field.name}"] = (hints[field.name], default)  # avoid clashes with methods of BaseModel
    return create_model(cls.__name__, __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False), **fields)


def check_options(cls: Any, label: str) -> None:
    """Check that a class can describe options.

    Raises:
        PluginError: It is not a dataclass, or pydantic does not support one of its types.
    """
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise PluginError(f"{label} is {cls!r}, expected a dataclass: @dataclass(kw_only=True).")
    try:
        pydantic_model(cls)
    except Exception as error:
        raise PluginError(f"{label} cannot be checked: {type(error).__name__}: {str(error).splitlines()[0]}") from error


def parse(cls: type[T], values: Mapping[str, Any] | None, where: str) -> T:
    """Validate ``values`` and return an instance of the dataclass ``cls``.

    Args:
        where: Start of error messages, such as ``recipes/x.yaml: train``.

    Raises:
        RecipeError: A key is unknown (suggests the nearest one), has the wrong type, or is out of range.
    """
    from pydantic import ValidationError

    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where}: found {_format(values)}, expected a mapping of options.")
    model = pydantic_model(cls)  # type: ignore[arg-type]
    try:
        valid = model.model_validate({str(key): value for key, value in values.items()})
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(cls, error, where))) from None
    try:
        return cls(**{field.alias or name: getattr(valid, name) for name, field in model.model_fields.items()})
    except ValueError as error:  # from __post_init__, which validates combinations of options
        raise RecipeError(f"{where}: {error}") from None


def _explain(cls: type, error: ValidationError, where: str) -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(cls)]
    invalid: dict[str, list[Any]] = {}
    for item in error.errors():
        if item["type"] == "extra_forbidden":
            name = str(item["loc"][0])
            yield f"{where}.{name}: no such option.{did_you_mean(name, names)}"
        elif item["type"] == "missing":
            yield f"{where}.{item['loc'][0]}: missing. {_expected(cls, str(item['loc'][0]))}"
        else:
            invalid.setdefault(str(item["loc"][0]), []).append(item)
    for name, items in invalid.items():  # pydantic reports each member of a union; report the option once
        bounds = [item["msg"] for item in items if "than" in item["msg"] or "finite" in item["msg"]]
        detail = f" ({bounds[0].removeprefix('Input ')})" if bounds else ""
        yield f"{where}.{name}: found {_format(items[-1]['input'])}{detail}. {_expected(cls, name)}"


def _expected(cls: type, name: str) -> str:
    info = next(info for info in describe(cls) if info.name == name)
    return f"Expected {info.type}: {info.help}" if info.help else f"Expected {info.type}."


def _format(value: Any) -> str:
    return f"{value!r:.300} ({type(value).__name__})"


def describe(cls: type) -> list[OptionInfo]:
    """The options of a dataclass, in order, for the tables of `fastloop plugins NAME` and the docs."""
    from pydantic.fields import FieldInfo

    hints = typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        hint, help = hints[field.name], ""
        if typing.get_origin(hint) is typing.Annotated:
            infos = [meta for meta in typing.get_args(hint)[1:] if isinstance(meta, FieldInfo)]
            help = next((info.description or "" for info in infos), "")
            hint = typing.get_args(hint)[0]
        if field.default is not dataclasses.MISSING:
            default = "null" if field.default is None else str(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = str(field.default_factory())
        else:
            default = "(required)"
        rows.append(OptionInfo(field.name, _type_name(hint), default, help))
    return rows


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type_name(args[0])
    if origin is typing.Literal:
        return " | ".join(str(value) for value in args)
    if hint is type(None):
        return "null"
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(_type_name(arg) for arg in args)}]"
    return " | ".join(map(_type_name, args)) if args else getattr(hint, "__name__", str(hint))


def parse_time(text: str, option: str) -> float:
    """``90s``, ``10m`` or ``1h`` in seconds; a number without a unit counts seconds.

    Args:
        option: The option that takes it, for the message.

    Raises:
        UsageError: It is none of them, or 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"{option} {text}: expected a time such as 90s, 10m or 1h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]

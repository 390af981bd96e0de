"""The options of a dataclass as rows of a table, for `fastloop plugins NAME` and the docs."""

from __future__ import annotations

import dataclasses
import typing

from fastloop.options import help_text, type_name


@dataclasses.dataclass(frozen=True)
class OptionInfo:
    """One row of an option table."""

    name: str
    type: str
    default: str
    help: str


def describe(cls: type) -> list[OptionInfo]:
    """The options of a dataclass, in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = "null" if field.default is None else str(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = str(field.default_factory())
        else:
            default = "(required)"
        rows.append(OptionInfo(field.name, type_name(hints[field.name]), default, help_text(field)))
    return rows

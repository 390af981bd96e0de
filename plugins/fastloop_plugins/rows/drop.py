"""``data.drop``: rows that are left out by a condition on one of their columns, in memory and in streams."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastloop import RecipeError, option
from fastloop.options import YAML_WORDS, quote_boolean
from fastloop_plugins.rows.file import BLOCK, BadRow, Block, ColumnName, File
from fastloop_plugins.rows.message_roles import first_roles
from fastloop_plugins.rows.table import Bad, RowError, is_missing, show

Scalar = str | int | float | bool


@dataclass(kw_only=True)
class Condition:
    """An entry of ``data.drop``: a column, and one condition."""

    column: str = option("The column to look at. It need not be one that the task reads.")
    equals: Scalar | list[Scalar] | None = option("Drop rows with this value, or one of these.", default=None)
    shorter_than: int | None = option(
        "Drop rows with fewer characters, spaces included, or items of a list; a missing value has 0.",
        default=None,
        ge=1,
    )
    longer_than: int | None = option("Drop rows with more characters, or items of a list.", default=None, ge=0)
    empty: bool = option(
        "Drop rows without a value: null, NaN, an empty text, a text of spaces and line breaks only, or a list without "
        "items.",
        default=False,
    )
    first_role: str | list[str] | None = option(
        "Drop conversations whose first message has this role, or one of these.", default=None
    )

    def __post_init__(self) -> None:
        keys = ("equals", "shorter_than", "longer_than", "empty", "first_role")
        conditions = [key for key in keys if getattr(self, key) is not None]
        if not self.empty:
            conditions.remove("empty")
        if len(conditions) != 1:
            raise ValueError(
                f"found {' and '.join(conditions) or 'no condition'} for column {self.column!r}, expected one of: "
                f"{', '.join(keys)}. Give each condition an entry of its own."
            )
        self.key = conditions[0]
        value = getattr(self, self.key)
        values = value if isinstance(value, list) else [value]
        self.wanted = set(map(_plain, values)) if self.key in ("equals", "first_role") else set()
        self.booleans = []
        if self.key == "equals":
            self.booleans = [value for value in values if isinstance(value, bool)]

    def __str__(self) -> str:
        if self.empty:
            return f"{self.column} empty"
        return f"{self.column} {self.key.replace('_', ' ')} {getattr(self, self.key)}"

    def holds(self, value: Any) -> bool:
        """Whether a value of the column meets the condition.

        Raises:
            TypeError: The value has no length, or is no list of messages.
            RecipeError: The condition has a boolean, and the value is a text that YAML reads as this boolean.
        """
        if self.key == "equals":
            if self.booleans and isinstance(value, str):
                self._check_word(value)
            return value is not None and _plain(value) in self.wanted
        if self.key == "empty":
            return is_missing(value)
        if self.key == "first_role":
            return not self.wanted.isdisjoint(first_roles(value))
        length = 0 if value is None else len(value)
        if self.shorter_than is not None:
            return length < self.shorter_than
        return self.longer_than is not None and length > self.longer_than

    def _check_word(self, text: str) -> None:
        """Raise an error for a value such as ``no``, if ``equals: no`` is what the recipe says: YAML reads it as
        false."""
        for boolean in self.booleans:
            word = str(boolean).lower()
            if text.lower() in YAML_WORDS[boolean] and _plain(text) not in self.wanted:
                raise RecipeError(
                    f"found {word}, and column {self.column!r} holds the text {text!r}.",
                    code="ambiguous-yaml",
                    place="data.drop: equals",
                    remedy=f"{quote_boolean(boolean)} For {word}, write '{word}'.",
                )


@dataclass(frozen=True)
class Drop:
    """The conditions of ``data.drop``. A row is left out by the first of them that it meets."""

    conditions: Sequence[Condition] = ()

    def columns(self) -> dict[str, str]:
        """Column -> the option that names it."""
        options: dict[str, str] = {}
        for number, condition in enumerate(self.conditions):
            options.setdefault(condition.column, f"drop[{number}].column")  # the first entry names a column
        return options

    def renamed(self, names: Mapping[str, ColumnName]) -> Drop:
        """The same conditions, for a file in which these columns have other names."""
        conditions = list[Condition]()
        for condition in self.conditions:
            if condition.column in names:
                condition = replace(condition, column=names[condition.column].in_file)
            conditions.append(condition)
        return Drop(conditions)

    def sort_out(
        self, where: str, columns: Mapping[str, Iterable[Any]], counts: list[int], bad: Bad | None = None
    ) -> Iterator[int]:
        """Yield the numbers of the rows to keep, from 0.

        Args:
            where: The source, for messages.
            counts: Receives the number of rows that each condition leaves out.
            bad: Receives a row whose value has no length, or is no list of messages. The row is not kept.

        Raises:
            RecipeError: There is such a row, and no ``bad``.
        """
        tested = [columns[condition.column] for condition in self.conditions]
        for row, values in enumerate(zip(*tested, strict=True)):
            try:
                met = self._first_met(values)
            except RowError as error:
                if bad is None:
                    raise RecipeError(str(error), code="wrong-type", place=where) from None
                bad(row, str(error))
                continue
            if met is None:
                yield row
            else:
                counts[met] += 1

    def _first_met(self, values: Sequence[Any]) -> int | None:
        """The number of the first condition that a row meets; None: it meets none.

        Args:
            values: The value that each condition tests.

        Raises:
            RowError: A value has no length, or is no list of messages.
        """
        for number, (condition, value) in enumerate(zip(self.conditions, values, strict=True)):
            try:
                if condition.holds(value):
                    return number
            except TypeError:
                needed = "a list of messages" if condition.key == "first_role" else "text or a list"
                raise RowError(
                    f"column {condition.column!r} holds {show(value)}, and data.drop[{number}].{condition.key} needs "
                    f"{needed}."
                ) from None
        return None

    def blocks(
        self, file: File, names: Sequence[str], start: int, size: int, skip: int = 0, counts: list[int] | None = None
    ) -> Iterator[Block]:
        """``File.blocks`` without the rows to leave out. ``skip`` and ``BadRow.before`` count those that are kept."""
        if not self.conditions:
            yield from file.blocks(names, start, size, skip)
            return
        wanted = list(dict.fromkeys([*names, *self.columns()]))
        if counts is None:
            counts = [0] * len(self.conditions)
        before = 0  # kept rows of the blocks before
        try:
            for block in file.blocks(wanted, start, size or BLOCK):
                columns = block.lists(wanted)
                kept = list(self.sort_out(file.path, columns, counts))
                # with skip=5, 3 rows kept before and [0 2 3 7] kept of this block, the first two are left out: [3 7]
                used = kept[max(skip - before, 0) :]
                before += len(kept)
                values = {name: [columns[name][row] for row in used] for name in names if name in block.columns}
                lines = None
                if block.lines is not None:
                    lines = [block.lines[row] for row in used]
                yield Block(block.start, len(used), values, lines)
        except BadRow as error:
            error.before = before
            raise


def drop_line(column: str, condition: str) -> str:
    """The sentence that proposes a condition of ``data.drop`` in an error about some rows.

    Args:
        condition: Such as ``empty: true``.
    """
    name = column if re.fullmatch(r"[A-Za-z_][\w-]*", column) else repr(column)
    return f"To leave out such rows: data.drop=[{{column: {name}, {condition}}}]."


def with_drop_line(bad: Bad, column: str, values: Sequence[Any]) -> Bad:
    """``bad``, whose problem also proposes the condition for rows without a value in a column."""

    def explain(index: int, problem: str) -> None:
        bad(index, f"{problem} {drop_line(column, 'empty: true')}" if is_missing(values[index]) else problem)

    return explain


def _plain(value: Any) -> str:
    """A value as in a file of text: 1 and 1.0 are 1, and true is true."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)

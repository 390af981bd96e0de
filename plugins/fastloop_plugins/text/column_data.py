"""The ``data`` section of a ``TextTask``: columns of texts, conversations and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.rows.formats import FileLayout
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.rows.table import Bad, RowError, Table, show, text_column
from fastloop_plugins.text.chat.left_out_contents import GIVE_TEMPLATE, ContentsOfRows
from fastloop_plugins.text.chat.rows import TOOLS, UNREAD, unread_columns, with_tools
from fastloop_plugins.text.columns import column_names
from fastloop_plugins.text.data import TextData
from fastloop_plugins.text.streaming.rows import StreamedRows

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.rows.split_rows import Rows
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.task import TextTask


class ColumnData(TextData):
    """The ``data`` section of a ``TextTask``: texts in one column, or in several that are tokenized by themselves.

    Args:
        task: Its ``columns``, ``labels`` and ``sections`` define what is read.
    """

    places: dict[str, str]  # column -> the option that names it

    def __init__(self, recipe: Recipe, task: TextTask) -> None:
        self.section = task.sections["data"]  # type: ignore[misc]
        self.task = task
        self.subject = f"the task {task.name!r}"
        labelled = task.labels == "required"
        if task.labels == "optional":
            labelled = recipe.data.get("label") is not None
        super().__init__(recipe, labelled=labelled)
        self.columns = [name for name, key in self.places.items() if key in task.prediction_columns()]
        for path in self.every_file():
            if format_of(path)[0] == ".txt" and len(self.places) > 1:
                raise RecipeError(
                    f"a .txt file has one column, and {self.subject} reads {', '.join(self.places)}.",
                    code="unknown-format",
                    place=str(path),
                    remedy="Use another format.",
                )

    def find_columns(self) -> list[str]:
        places = dict[str, str]()
        self.places = places
        for key in self.task.columns:
            where = f"{self.where}.{key}"
            for name in self._named(key, where):
                if name in places:
                    raise RecipeError(
                        f"found {name!r}, the column of data.{places[name]} too.",
                        code="repeated-column",
                        place=where,
                        remedy="Name another column.",
                    )
                places[name] = key
        return super().find_columns()

    def _named(self, key: str, where: str) -> list[str]:
        """The columns that an option names: one of texts, or any number of values."""
        value = getattr(self.options, key)
        if key in self.task.values:
            return [] if value is None else column_names(value, where)
        if value is None:
            raise RecipeError(
                "missing.",
                code="missing-value",
                place=where,
                remedy=f"Name a column of texts, such as data.{key}=COLUMN.",
            )
        if not isinstance(value, str):
            raise RecipeError(
                code="wrong-type", place=where, found=repr(value), expected=f"a column: {self.subject} reads one here"
            )
        return [value]

    def text_columns(self) -> dict[str, str]:
        return dict(self.places)

    def read_column(self, values: Iterable[Any], name: str, bad: Bad) -> list[str]:
        key = self.places[name]
        if key in self.task.conversations:
            read = self.task.read_conversation
        elif key in self.task.values:
            read = read_value
        else:
            return text_column(values, name, key, bad)
        contents = list[str]()
        for index, value in enumerate(values):
            try:
                contents.append(read(value, name, key))
            except RowError as error:
                bad(index, str(error))
                contents.append("")
        return contents

    def layout(self, predicts: bool = False) -> FileLayout:
        layout = super().layout(predicts)
        if not self.task.conversations or predicts:
            return layout
        unread = [name for name in UNREAD if name not in layout.columns]
        return replace(layout, optional=[*layout.optional, *unread])  # for a warning about those with a value

    def _rows(self, role: str, parts: list[Table]) -> Rows:
        rows = super()._rows(role, parts)
        if self.task.conversations and self.reports(role):
            read = {*self.places, *self.labels, *self.drop.columns()}
            unread = unread_columns(parts, read, vars(self.options).keys())
            if unread is not None:
                self.messages.append(unread)
            left_out = ContentsOfRows(self.task, self.task.encoding_arguments())
            texts = iter(rows.texts)
            for part in parts:
                for number in range(1, len(part) + 1):
                    left_out.add_row(next(texts), part.row(number))
            problem = left_out.problem(self.name_part(role), GIVE_TEMPLATE if self.inference is None else "")
            if problem is not None:
                self.messages.append(problem)
        return rows

    def optional_text_columns(self) -> list[str]:
        is_text = TOOLS in self.places and self.places[TOOLS] not in self.task.values
        return [TOOLS] if self.task.conversations and not is_text else []

    def add_optional_texts(
        self, texts: Mapping[str, list[str]], optional: Mapping[str, Sequence[Any]], bad: Bad
    ) -> None:
        """Add the tools of each row to its conversations."""
        conversations = [column for name, column in texts.items() if self.places[name] in self.task.conversations]
        for index, value in enumerate(optional.get(TOOLS, ())):
            if value is None:
                continue
            try:
                for column in conversations:
                    column[index] = with_tools(column[index], value)
            except RowError as error:
                bad(index, str(error))

    def streamed(self, run: Run, datasets: Mapping[str, Any], model: TextModel) -> Mapping[str, Any]:
        if self.stream is None:
            return datasets
        labels = self.stream.label_table(datasets) if self.labels else {}
        task = self.task
        arguments = self.task.encoding_arguments()
        encode = StreamedRows(self, model.tokenizer, task.encode, task.build_dataset, arguments, labels)
        return self.stream.datasets(run, datasets, encode)


def read_value(value: Any, name: str, key: str) -> str:
    """The JSON of a value of the column ``name``, which ``data.<key>`` names.

    Raises:
        RowError: JSON has no such value.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise RowError(f"column {name!r} (data.{key}) holds {show(value)}, expected a value of JSON.") from None

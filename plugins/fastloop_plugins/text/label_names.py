"""Names of classes: those that stand for a missing value, that no file can hold, and how a recipe writes them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from fastloop.errors import RecipeError
from fastloop_plugins.rows.table import problem_of_text

Label = int | str
MISSING = {
    *("", "-", "?", ".", "na", "n/a", "<na>", "nan", "-nan", "nat", "none", "null", "nil", "\\n", "missing"),
    *("#n/a", "#n/a n/a", "#na", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!", "1.#ind", "1.#qnan"),
}
"""Missing values as other tools write them, in lower case: pandas, Excel, SQL, Weka and SAS."""


def refuse_broken_names(names: Iterable[str], where: str) -> None:
    """Raise an error for a name of a class or tag that is no text: the files of an exported model could not hold it."""
    for name in names:
        problem = problem_of_text(name)
        if problem is not None:
            raise RecipeError(f"the name {name!r} {problem}", code="wrong-label", place=where)


def written_label(label: Label) -> str:
    """A label as YAML, for a proposed ``data.label_map``: with escapes for characters that cannot be seen, or that
    look like others."""
    if isinstance(label, int):
        return str(label)
    is_plain = unicodedata.is_normalized("NFC", label)
    if is_plain and "\\" not in repr(label):
        return repr(label)
    escaped = ""
    for character in label:
        is_shown = character.isprintable() and (is_plain or character.isascii())
        if character in '"\\':
            escaped += f"\\{character}"
        elif is_shown:
            escaped += character
        else:
            escaped += f"\\U{ord(character):08x}" if ord(character) > 0xFFFF else f"\\u{ord(character):04x}"
    return f'"{escaped}"'

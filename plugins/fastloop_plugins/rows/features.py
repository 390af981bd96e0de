"""The names of classes: the features of ``datasets`` define them for the numbers in a column (``ClassLabel``).

``datasets`` writes the features of its Parquet and Arrow files to the metadata of their schema, as JSON::

    {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop_plugins._names import list_names

if TYPE_CHECKING:
    import pyarrow

NAMES = 8
"""Names of classes that a message lists."""
METADATA = b"huggingface"
"""The key of the features in the metadata of a schema."""


class StreamedNames:
    """The names of the classes in the columns of streamed files. A stream has numbers, so files must agree on them.

    Attributes:
        of_column: Column -> the names of its numbers.
    """

    def __init__(self) -> None:
        self.of_column = dict[str, list[str]]()
        self.first_path = dict[str, str]()  # column -> the file that names its numbers first

    def add(self, path: str, names: Mapping[str, list[str]]) -> None:
        """Add those of a file.

        Raises:
            RecipeError: Another file names the numbers of a column in another way.
        """
        for column, of_column in names.items():
            expected = self.of_column.setdefault(column, of_column)
            first = self.first_path.setdefault(column, path)
            if of_column != expected:
                raise RecipeError(
                    f"names the classes of column {column!r} {list_names(of_column, NAMES)}, and {first} names them "
                    f"{list_names(expected, NAMES)}. Streamed files must name them in one order.",
                    code="mixed-labels",
                    place=str(path),
                    remedy="Remove data.streaming, or write the files with the same features.",
                )


def class_names_of(features: Mapping[str, Any], columns: Iterable[str]) -> dict[str, list[str]]:
    """Column -> the names of its numbers, for each column that holds classes or lists of classes.

    Args:
        features: As ``datasets.Features.to_dict`` returns them.

    Raises:
        ValueError: The names of a column are malformed.
    """
    names = dict[str, list[str]]()
    for column in columns:
        feature = _element(features.get(column))
        if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel":
            names[column] = _check_names(column, feature.get("names"))
    return names


def class_names_of_schema(schema: pyarrow.Schema, columns: Iterable[str]) -> dict[str, list[str]]:
    """``class_names_of`` a file. A column that no longer holds whole numbers has no names.

    Raises:
        ValueError: The metadata of the schema is malformed.
    """
    metadata = (schema.metadata or {}).get(METADATA)
    if metadata is None:
        return {}
    try:
        content = json.loads(metadata)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the metadata {METADATA.decode()!r} of its schema is no JSON: {error}") from None
    info = content.get("info") if isinstance(content, dict) else None
    features = info.get("features") if isinstance(info, dict) else None
    if not isinstance(features, dict):
        return {}
    numbered = [column for column in columns if column in schema.names and _holds_numbers(schema.field(column).type)]
    return class_names_of(features, numbered)


def stated_features(builder: Any) -> Mapping[str, Any]:
    """The features that a builder of ``datasets`` states for all files, as for ``class_names_of``; empty if it states
    none. The names of classes in the schema of a file go before them: the builder may have read them from the first
    file."""
    features = builder.info.features
    stated: Mapping[str, Any] = {} if features is None else features.to_dict()
    return stated


def _element(feature: Any) -> Any:
    """The feature of the elements of a list; other features as they are. Older files have ``[feature]`` for a list."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0]
    if isinstance(feature, Mapping) and isinstance(feature.get("feature"), Mapping):
        return feature["feature"]
    return feature


def _check_names(column: str, names: Any) -> list[str]:
    """The names of the classes of a column, in the order of their numbers."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the names of the classes in column {column!r} are {names!r:.60}, expected a list of texts")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"the names of the classes in column {column!r} have {name!r} twice")
        seen.add(name)
    return names


def _holds_numbers(kind: pyarrow.DataType) -> bool:
    """Whether a column holds whole numbers, or lists of them."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind))

"""Reads the parts of the source that a ``data`` section names: a table for each file, or for each split of a dataset.

``source_files`` has found the files. A part is a table of its own, so that an error can name its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.models.hub import explain, offline, quiet
from fastloop_plugins.rows.features import class_names_of, stated_features
from fastloop_plugins.rows.source import call_source
from fastloop_plugins.rows.table import Table, table_of
from fastloop_plugins.text.class_numbers import merge_names, name_classes, number_as_train
from fastloop_plugins.text.source_files import is_saved

if TYPE_CHECKING:
    from fastloop_plugins.rows.formats import FileLayout
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.streaming.shards import Shards


def read_parts(data: TextData) -> dict[str, list[Table]]:
    """Split -> its parts, from the source that the options name. All splits number their classes as train does. Those
    of other data than that of a trained model have names: its options have numbers of its own training split.

    Raises:
        RecipeError: The source cannot be read.
    """
    parts = _read_source(data)
    if data.inference is not None and not data.inference.is_own_data:
        return name_classes(parts, data)
    tables = parts.get(data.splits.train, [])
    if tables:
        return number_as_train(parts, merge_names(table.class_names for table in tables), data)
    names = _names_in_unread_train(parts, data)
    return name_classes(parts, data) if names is None else number_as_train(parts, names, data)


def _names_in_unread_train(parts: Mapping[str, list[Table]], data: TextData) -> dict[str, list[str]] | None:
    """``merge_names`` of the training split, of which `fastloop evaluate` reads no rows. None: its files are not there,
    or cannot be read."""
    if not any(table.class_names for tables in parts.values() for table in tables):
        return {}
    try:
        train = _find_training_files(data)
        if train is None:
            return None
        names_of_files = []
        for names in train.layout.class_names_of_files(train.paths):
            names_of_files.append(names)
            if names and data.options.streaming:  # the others have the same names
                break
    except RecipeError:
        return None
    return merge_names([*names_of_files, class_names_of(train.features, train.layout.columns)])


@dataclass
class _TrainingFiles:
    """The files of a training split whose rows are not read.

    Attributes:
        features: See ``Shards``.
    """

    paths: Sequence[str]
    layout: FileLayout
    features: Mapping[str, Any] = field(default_factory=dict)


def _find_training_files(data: TextData) -> _TrainingFiles | None:
    """The files of the training split; None: the source has none.

    Raises:
        RecipeError: A file is not there.
    """
    from fastloop_plugins.rows.index import find_shards

    train = data.splits.train
    layout = data.layout()
    if data.shards is not None:
        if train not in data.shards.splits:
            return None
        return _TrainingFiles(data.shards.splits[train], layout, data.shards.features)
    paths: list[str] = []
    if data.sources:
        names = []
        for source in data.sources:
            of_source = source.find_shards(data)
            paths += of_source
            names += [source.names(data)] * len(of_source)
        return _TrainingFiles(paths, replace(layout, names=names))
    entries = (data.options.files or {}).get(train)
    if entries is None:
        return None
    for of_entry in find_shards(data.recipe, entries, f"{data.where}.files.{train}", data.formats):
        paths += of_entry
    return _TrainingFiles(paths, layout)


def _read_source(data: TextData) -> dict[str, list[Table]]:
    """Split -> its parts, as the source has them."""
    if data.options.module is not None:
        return _call_function(data)
    if data.shards is not None:
        return _read_shards(data, data.shards)
    if data.options.name is not None:
        return _read_dataset(data, data.options.name)
    return _read_files(data)


def _read_files(data: TextData) -> dict[str, list[Table]]:
    """The parts of ``data.files`` and ``data.sources``. A stream gives only its first rows."""
    wanted = vars(data.splits).values()
    parts: dict[str, list[Table]] = {}
    for split, paths in data.files.items():
        is_mixed = split == "train" and bool(data.sources)
        parts[split] = []
        if split in wanted and not is_mixed:
            parts[split] = data.read_files(paths)
    if data.stream is not None:
        parts["train"] = [data.stream.read_head()]
    elif data.sources:
        parts["train"] = []
        for number, source in enumerate(data.sources):
            parts["train"] += source.read(number, data)
    return parts


def _read_shards(data: TextData, shards: Shards) -> dict[str, list[Table]]:
    """The parts of ``data.name``, whose files are listed. A stream gives only its first rows.

    Splits that the run does not need have no parts.
    """
    needed = data.needed_splits(shards.splits).values()
    parts: dict[str, list[Table]] = {}
    for split, paths in shards.splits.items():
        if data.stream is not None and split == data.splits.train:
            parts[split] = [data.stream.read_head()]
        elif split in needed:
            parts[split] = data.read_files(paths)
        else:
            parts[split] = []
    for tables in parts.values():
        _add_features(tables, shards.features)
    return parts


def _add_features(tables: Sequence[Table], features: Mapping[str, Any]) -> None:
    """Add the names of classes that the features of a dataset define to those of its files."""
    for table in tables:
        table.class_names = {**class_names_of(features, table.columns), **table.class_names}


def _call_function(data: TextData) -> dict[str, list[Table]]:
    """The parts that the function ``data.module`` returns: one for each split.

    Raises:
        RecipeError: It returns something else, or fails.
    """
    reference = data.options.module
    splits = call_source(data.options, data.recipe)
    if not isinstance(splits, Mapping):
        raise RecipeError(
            f"{reference} returned {type(splits).__name__}, expected {{split: rows}}.",
            code="wrong-result",
            place=f"{data.where}.module",
        )
    parts = {}
    for split, rows in splits.items():
        parts[str(split)] = [_table_of(data, f"{reference}, split {split}", rows)]
    return parts


def _read_dataset(data: TextData, name: str) -> dict[str, list[Table]]:
    """The parts of the dataset ``data.name``, from a folder or the hub.

    Raises:
        RecipeError: ``datasets`` cannot load it.
    """
    import datasets

    folder = data.recipe.find(name)
    try:
        with quiet():
            files = _folder_files(data, folder)
            if files is not None:
                parts = {split: data.read_files(paths) for split, paths in files.splits.items()}
                for tables in parts.values():
                    _add_features(tables, files.features)
                return parts
            splits = _load_dataset(data, name, folder)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise RecipeError(
            explain(f"{data.where}.name", name, folder, error, "data.files.train=FILE or data.name=FOLDER"),
            code="file-unreadable",
        ) from None
    parts = {}
    for split, rows in splits.items():
        parts[split] = [_table_of(data, f"dataset {name}, split {split}", rows)]
    return parts


def _folder_files(data: TextData, folder: Path) -> Shards | None:
    """The CSV or Parquet files of a folder; None: it has others, or is no folder.

    ``datasets`` would read CSV files with guessed types and missing values, and Parquet files with the names of classes
    of the first one.
    """
    import datasets

    from fastloop_plugins.text.streaming.shards import Shards

    if is_saved(folder) or not folder.is_dir():
        return None
    builder = datasets.load_dataset_builder(str(folder.resolve()), data.options.subset)
    splits = {str(split): paths for split, paths in builder.config.data_files.items()}
    if builder.name == "csv":
        return Shards(splits)
    if builder.name == "parquet":
        return Shards(splits, stated_features(builder))
    return None


def _load_dataset(data: TextData, name: str, folder: Path) -> Mapping[str, Any]:
    """Split -> its rows, as ``datasets`` loads them."""
    import datasets

    options = data.options
    if (folder / "dataset_dict.json").is_file():
        saved: Mapping[str, Any] = datasets.load_from_disk(str(folder))
        return saved
    if (folder / "state.json").is_file():  # `save_to_disk` of a single dataset, which has no split
        return {data.splits.train: datasets.load_from_disk(str(folder))}
    if folder.is_dir():
        loaded: Mapping[str, Any] = datasets.load_dataset(str(folder.resolve()), options.subset)
        return loaded
    offline()
    downloaded: Mapping[str, Any] = datasets.load_dataset(name, options.subset, revision=options.revision)
    return downloaded


def _table_of(data: TextData, where: str, rows: Any) -> Table:
    """The table of a split of a dataset, with the columns that the section reads.

    Args:
        where: Its name in messages.
    """
    layout = data.layout()
    columns = dict.fromkeys(layout.optional, data.text_key)
    columns |= layout.columns
    return table_of(where, rows, columns)

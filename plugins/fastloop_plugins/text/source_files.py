"""Checks which source the ``data`` section names (files, a dataset or a function), and finds its files.

Reads no rows: ``parts`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop.options import parse
from fastloop_plugins.models.hub import check_hub_name
from fastloop_plugins.rows.paths import find_files, refuse_options_without_files, refuse_repeated, refuse_url
from fastloop_plugins.rows.source import check_source
from fastloop_plugins.rows.suffixes import format_of
from fastloop_plugins.text.options import Files
from fastloop_plugins.text.sources import find_sources
from fastloop_plugins.text.streaming.opening import open_shards, open_stream

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData

logger = logging.getLogger("fastloop")

SOURCES = {"name": "name (a dataset)", "files": "files", "module": "module (a function)"}
"""Option of ``data`` that names the source of the rows -> the option in messages."""


def find_source(data: TextData) -> None:
    """Check the source of the rows, and find its files. Sets ``files`` and ``sources`` of the section, and opens its
    stream.

    Raises:
        RecipeError: The options name no source or several, or a file does not exist.
    """
    options = data.options
    if options.sources is not None:
        _replace_train_files(data)
    if options.name is not None and options.files is not None:  # as when a user adds files to a shipped recipe
        logger.info("data: files are given, so data.name (%s) is not used", options.name)
        options.name = None
    check_source(options, SOURCES, data.recipe)
    if options.files is not None:
        _find_files(data, options.files)
    _refuse_text_files(data)
    if options.name is not None:
        _check_name(data, options.name)
        if options.streaming:
            open_shards(data)
    if options.read is not None:
        _check_read_options(data)


def _replace_train_files(data: TextData) -> None:
    """Let ``data.sources`` stand for ``data.files.train``.

    Raises:
        RecipeError: The recipe has both.
    """
    files = data.options.files or {}
    if files.get("train") is not None:
        raise RecipeError(
            code="exclusive-options", place=data.where, found="files.train and sources", expected="one of them"
        )
    data.options.files = {**files, "train": []}


def _find_files(data: TextData, files: Mapping[str, Any]) -> None:
    """Find the files of ``data.files`` and ``data.sources`` that the run reads into memory, and open the stream.

    Args:
        files: Split -> its paths and patterns, as in the recipe.

    Raises:
        RecipeError: A file does not exist, is listed twice, or there is none to train on.
    """
    entries = {}  # split -> its paths and patterns
    for split, paths in vars(parse(Files, files, f"{data.where}.files")).items():
        if paths is not None:
            entries[split] = paths
    needed = set(entries)
    if data.inference is not None:
        needed = set(data.needed_splits(entries).values())
    if data.options.sources is not None:
        data.sources = find_sources(data, needed)
    in_memory = open_stream(data, entries, needed)
    paths_of: dict[str, list[Path]] = {}
    for split, paths in entries.items():
        is_mixed = split == "train" and bool(data.sources)
        paths_of[split] = []
        if split in in_memory and not is_mixed:
            paths_of[split] = find_files(data.recipe, paths, split, f"{data.where}.files.{split}", data.formats)
    for split, paths in paths_of.items():
        refuse_repeated(paths, f"{data.where}.files.{split}")
    if data.sources:
        paths_of["train"] = []
        for source in data.sources:
            paths_of["train"] += source.paths
    data.files = paths_of
    if "train" not in paths_of and data.inference is None:
        raise RecipeError(
            "missing.", code="missing-value", place=f"{data.where}.files.train", expected="a file to train on"
        )


def _refuse_text_files(data: TextData) -> None:
    """Raise a ``RecipeError`` for a .txt file, which has one column, if ``data.text`` names several."""
    if len(data.columns) < 2:
        return
    for paths in data.files.values():
        for path in paths:
            if format_of(path)[0] == ".txt":
                raise RecipeError(
                    f"found {data.columns}, and {path} has one column.",
                    code="unknown-format",
                    place=f"{data.where}.text",
                    remedy="Use another format.",
                )


def _check_name(data: TextData, name: str) -> None:
    """Check that ``data.name`` can be the name of a dataset on the hub, or of a folder.

    Raises:
        RecipeError: It is a URL or a file.
    """
    refuse_url(name, f"{data.where}.name", "its files")
    path = data.recipe.find(name)
    if path.is_file():
        raise RecipeError(
            f"{name} is a file.",
            code="not-a-name",
            place=f"{data.where}.name",
            remedy=f"Give it as data.files.train={name}.",
        )
    check_hub_name(name, path, f"{data.where}.name: {name}")
    if data.inference is not None:
        return  # the model was trained with these options
    if path.is_dir() and data.options.revision is not None:
        raise _unused_option(data, "revision", f"it is for a dataset of the hub, and {name} is a folder.")
    if is_saved(path) and data.options.subset is not None:
        raise _unused_option(data, "subset", f"{name} has no subsets: `save_to_disk` of `datasets` wrote it.")


def _unused_option(data: TextData, key: str, problem: str) -> RecipeError:
    """The error for an option that would have no effect."""
    return RecipeError(problem, code="unknown-option", place=f"{data.where}.{key}", remedy="Remove it.")


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` wrote a folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _check_read_options(data: TextData) -> None:
    """Check the options of ``data.read``.

    Raises:
        RecipeError: There are no files, an option fits none of them, or ``columns`` lacks one that is read.
    """
    if data.options.files is None:
        raise RecipeError(
            "it is for data.files, which is not there.",
            code="unknown-option",
            place=f"{data.where}.read",
            remedy="Remove it, or give the files there.",
        )
    refuse_options_without_files(data.how, data.every_file(), f"{data.where}.read", data.formats)
    if data.sources or data.how.columns is None:
        return
    wanted = [("text", name) for name in data.columns]
    wanted += [("label", name) for name in data.labels]
    wanted += [(key, name) for name, key in data.drop.columns().items()]
    for key, name in wanted:
        if name not in data.how.columns:
            raise RecipeError(
                code="unknown-column",
                place=f"{data.where}.read.columns",
                found=str(data.how.columns),
                expected=f"{name!r} (data.{key}) among them",
            )

"""The files of ``data.name`` that a stream reads: those of a dataset of the hub at one commit, or of a local folder."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import RecipeError
from fastloop.problem import typed_clause
from fastloop_plugins.models.hub import explain, offline, quiet
from fastloop_plugins.rows.features import stated_features
from fastloop_plugins.rows.index import unstreamed

if TYPE_CHECKING:
    from fastloop_plugins.text.data import TextData

logger = logging.getLogger("fastloop")

EXPORT = "refs/convert/parquet"
"""The branch in which the hub keeps a Parquet copy of a dataset: ``SUBSET/SPLIT/0000.parquet``."""
COMMIT = re.compile(r"hf://datasets/[^@]+@([^/]+)/")


@dataclass
class Shards:
    """The files of a dataset.

    Attributes:
        splits: Split -> paths, or URLs of fsspec that name a commit.
        features: The features that the dataset states for all files. The names of classes in a file go before them.
    """

    splits: dict[str, list[str]]
    features: Mapping[str, Any] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """The files of all splits."""
        return list(chain.from_iterable(self.splits.values()))


def list_shards(data: TextData) -> Shards:
    """List the files of ``data.name``: a folder of ``save_to_disk``, another folder of files, or a name of the hub.

    The hub's Parquet copy takes the place of files that are not streamed.

    Raises:
        RecipeError: The files cannot be listed, or there are none in a format that is streamed.
    """
    name = data.options.name or ""
    where = f"{data.where}.name"
    folder = data.recipe.find(name)
    if (folder / "dataset_dict.json").is_file():
        return _saved(folder, where)
    is_local = folder.is_dir()
    if not is_local and offline():
        from huggingface_hub import constants

        raise RecipeError(
            f"{name!r} is not a local folder, and the hub ({constants.ENDPOINT}), which data.streaming reads, cannot "
            "be reached from here, or HF_HUB_OFFLINE is set. A stream does not use the hub's local cache.",
            code="unreachable-url",
            place=where,
            remedy="Use a local copy: data.name=FOLDER or data.files.train=FILE.",
        )
    listed = _list_files(data, name, folder)
    if isinstance(listed, str):
        if is_local:
            raise RecipeError(listed, code="unreachable-url")
        return _parquet_copy(data, name, listed)
    commit = commit_of(listed)
    if commit:
        data.recipe.data["revision"] = commit  # checkpoints have it: a resume reads the same files
        logger.info("data: %s at commit %s", name, commit)
    return listed


def _list_files(data: TextData, name: str, folder: Path) -> Shards | str:
    """The files of a dataset; a problem if they cannot be listed or are not streamed.

    Raises:
        RecipeError: The hub has no such dataset.
    """
    import datasets

    where = f"{data.where}.name"
    path = str(folder.resolve()) if folder.is_dir() else name
    try:
        with quiet():
            shards = _listed(
                datasets.load_dataset_builder(path, name=data.options.subset, revision=data.options.revision)
            )
        problem = unstreamed(shards.paths(), data.formats)
    except datasets.exceptions.DatasetNotFoundError as error:
        remedy = " If it is private or gated, accept its terms on its page, and log in: hf auth login, or set HF_TOKEN."
        raise RecipeError(explain(where, name, folder, error, "") + remedy, code="file-unreadable") from None
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        return explain(where, name, folder, error, "data.files.train=FILE or data.name=FOLDER")
    return f"{where}: {name}: {problem}" if problem else shards


def _parquet_copy(data: TextData, name: str, problem: str) -> Shards:
    """The files of the hub's Parquet copy of a dataset.

    Args:
        problem: Why the dataset's own files are not read.

    Raises:
        RecipeError: There is no copy, or it has only a part of the rows.
    """
    import datasets

    try:
        with quiet():
            shards = _listed(
                datasets.load_dataset_builder(name, data_dir=data.options.subset or "default", revision=EXPORT)
            )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError):
        raise RecipeError(f"{problem} And the hub has no Parquet copy of it ({EXPORT}).", code="no-streaming") from None
    for path in shards.paths():
        if "/partial-" in path:
            raise RecipeError(
                f"its files are not streamed, and the hub's Parquet copy has only a part of its rows ({path}).",
                code="no-streaming",
                place=f"{data.where}.name: {name}",
                remedy="Download the dataset, and convert it to Parquet.",
            )
    logger.info("data: %s, the hub's Parquet copy at commit %s", name, commit_of(shards))
    return shards


def commit_of(shards: Shards) -> str | None:
    """The commit of files of the hub; None: they are local."""
    match = COMMIT.match(shards.paths()[0])
    return None if match is None else match[1]


def _listed(builder: Any) -> Shards:
    """The files that a builder of ``datasets`` would read."""
    files = builder.config.data_files
    if not files:
        raise ValueError("it has no list of files")
    splits = {str(split): [str(path) for path in paths] for split, paths in files.items()}
    return Shards(splits, stated_features(builder))


def _saved(folder: Path, where: str) -> Shards:
    """The Arrow files of a folder of ``save_to_disk``."""
    splits = {}
    try:
        for split in json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]:
            state = json.loads((folder / split / "state.json").read_text(encoding="utf-8"))
            splits[split] = [str(folder / split / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            f"{folder} cannot be loaded: {typed_clause(error)}.", code="file-unreadable", place=where
        ) from None
    return Shards(splits)

"""Finds the files that ``data.files`` names: by path, list of paths or pattern."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastloop.errors import RecipeError
from fastloop.recipe.paths import PATTERN, nothing_at
from fastloop_plugins.rows.options import Read
from fastloop_plugins.rows.suffixes import ARCHIVES, COLUMN_FORMATS, COMPRESSIONS, FORMATS, format_of

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
DATASET_PAGE = re.compile(r"https?://[^/]+/datasets/([\w.-]+/[\w.-]+|[\w.-]+)")


def find_files(
    recipe: Recipe, entries: str | list[str], split: str, where: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Find the files of one split.

    Args:
        entries: A path or pattern, or a list of them.
        formats: The suffixes that the task reads.

    Raises:
        RecipeError: A file does not exist, or has a type that cannot be read.
    """
    if isinstance(entries, str):
        entries = [entries]
    paths: list[Path] = []
    for item in entries:
        refuse_url(item, where, "the file", can_stream=split == "train")
        path = recipe.find(item)
        if PATTERN.search(item) and not path.exists():
            matches = find_matches(recipe, item)
            if not matches:
                raise RecipeError(f"no file matches {item}.", code="file-missing", place=where)
            paths += matches
        elif path.is_dir():
            advice = _patterns(path, item, split, formats) if split != "predict" else ""
            if (path / "dataset_dict.json").is_file():
                advice = f" `datasets` has saved its splits: give data.name={item} instead of data.files."
            raise RecipeError(f"a folder, expected a file.{advice}", code="not-a-file", place=f"{where}: {path}")
        else:
            paths.append(path)
    if not paths:
        raise RecipeError(code="missing-value", place=where, found="an empty list", expected="files")
    for path in paths:
        if not path.is_file():
            raise RecipeError(
                f"{'a folder, expected a file' if path.is_dir() else nothing_at(path)}.",
                code="file-missing",
                place=f"{where}: {path}",
            )
        suffix, codec = format_of(path)
        if suffix not in formats or (codec is not None and suffix in COLUMN_FORMATS):
            raise RecipeError(
                f"cannot read files of type {path.suffix!r}. Expected one of: {', '.join(formats)}, all but "
                f"{', '.join(COLUMN_FORMATS)} also with {', '.join(COMPRESSIONS)} behind it.{ARCHIVES.get(suffix, '')}",
                code="unknown-format",
                place=f"{where}: {path}",
            )
    return paths


def find_matches(recipe: Recipe, pattern: str) -> list[Path]:
    """The files that match a pattern: in the current folder, or else beside the recipe."""
    expanded = Path(pattern).expanduser()
    if expanded.is_absolute():
        return sorted(Path("/").glob(str(expanded.relative_to("/"))))
    matches = sorted(Path().glob(pattern))
    if not matches and recipe.source is not None:
        matches = sorted(recipe.source.parent.glob(pattern))
    return matches


def refuse_repeated(paths: Sequence[Path], where: str) -> None:
    """Raise an error for a file that is listed twice, by its path or by patterns: its rows would count twice."""
    for path, count in Counter(paths).items():
        if count > 1:
            raise RecipeError(
                f"{path} is listed twice, and its rows would come twice an epoch.",
                code="listed-twice",
                place=where,
                remedy="Name it once. For other shares of files: data.sources, each with a weight.",
            )


def refuse_url(item: str, where: str, what: str, can_stream: bool = False) -> None:
    """Raise an error for a URL that is given as a path.

    Args:
        what: The files at the URL, for the message.
        can_stream: Whether data.streaming reads such URLs.
    """
    if not URL.match(item):
        return
    if item.startswith("file://"):
        raise RecipeError(f"{item} is a URL.", code="wrong-url", place=where, remedy="Give the path without file://.")
    page = DATASET_PAGE.match(item)
    remedy = " For a dataset of the hub: data.name=OWNER/NAME."
    if page:
        remedy = f" For this dataset of the hub: data.name={page[1]}."
    if can_stream:
        remedy += " Or set data.streaming, to read it while training."
    raise RecipeError(
        f"{item} is a URL, and fastloop downloads no files.",
        code="wrong-url",
        place=where,
        remedy=f"Download {what} first, and give its path.{remedy}",
    )


def refuse_options_without_files(how: Read, files: list[Path], where: str, known: Sequence[str] = FORMATS) -> None:
    """Raise an error for options of ``data.read`` that apply to none of the files, and for ``blank_lines`` if it does
    not apply to all."""
    formats = {format_of(path)[0] for path in files}
    listed = ", ".join(sorted(formats)) or "none"
    for names, kinds in (
        (("delimiter", "columns", "quoting"), {".csv", ".tsv"}),
        (("encoding", "compression"), {*known} - {*COLUMN_FORMATS}),
    ):
        for name in names:
            if getattr(how, name) is not None and not formats & kinds:
                raise RecipeError(
                    f"it is for files of type {', '.join(sorted(kinds))}; data.files has {listed}.",
                    code="unknown-option",
                    place=f"{where}.{name}",
                    remedy="Remove it.",
                )
    if how.blank_lines and formats != {".txt"}:
        raise RecipeError(
            f"it is for files of type .txt; data.files has {listed}.",
            code="unknown-option",
            place=f"{where}.blank_lines",
            remedy="Remove it, or give only those.",
        )


def _patterns(folder: Path, item: str, split: str, formats: Sequence[str]) -> str:
    """Suggest a pattern that matches the files of this split in a folder, or all files."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and format_of(path)[0] in formats]
    named = [path for path in files if path.name.startswith(split)] or files
    if not named:
        return ""
    suffix = named[0].suffix
    if format_of(named[0])[1] is not None:  # .jsonl.gz
        suffix = "".join(named[0].suffixes[-2:])
    named = [path for path in named if path.name.endswith(suffix)]
    start = split if named[0].name.startswith(split) else ""
    if start and all(path.name.startswith(f"{split}-") for path in named):
        start = f"{split}-"
    pattern = named[0].name if len(named) == 1 else f"{start}*{suffix}"
    files_of = "files of this split" if start else "files"
    return f" For its {len(named)} {suffix} {files_of}: data.files.{split}={Path(item) / pattern}."

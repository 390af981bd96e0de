"""Find recipes, and the files that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastloop.errors import RecipeError, did_you_mean
from fastloop.problem import clause

PATTERN = re.compile(r"[*?\[]")
"""A character that makes a path a pattern."""


def check_path(text: str, source: Path | None) -> Path:
    """A path in a recipe, with ``~`` expanded. The file may not exist.

    Args:
        source: The recipe's file, for the message; None: the recipe was made in Python.

    Raises:
        RecipeError: No file can have this path: it holds a null byte, is too long, or names a user who does not exist.
    """
    try:
        if "\0" in text:
            raise ValueError("it holds a null byte")
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or clause(error)
        raise RecipeError(
            f"{text[:100]!r} cannot be a path: {why}.", code="wrong-path", place=str(source or "recipe")
        ) from None
    return path


def find_path(path: str, source: Path | None) -> Path:
    """A path relative to the folder of the recipe ``source``, if it exists only there; else the path as given.

    Raises:
        RecipeError: See ``check_path``.
    """
    given = check_path(path, source)
    if not given.exists() and source is not None:
        beside = source.parent / given
        if beside.exists() or (beside.is_symlink() and not given.is_symlink()):  # a broken link is the user's file, too
            return beside
    return given


def nothing_at(path: Path, kind: str = "file") -> str:
    """Why there is no file or folder at a path, as the beginning of a sentence: "no such file", or that a symbolic link
    is there, and where it points.

    Args:
        kind: ``file``, ``folder`` or both, for the sentence.
    """
    broken = broken_link(path)
    return f"no such {kind}" if broken is None else f"no such {kind}: {broken}"


def broken_link(path: Path) -> str | None:
    """The symbolic link in a path that leads nowhere, and where it points, as a clause; None: there is none."""
    for place in (path, *path.parents):
        try:
            is_link = place.is_symlink()
        except OSError:  # this user may not look into its folder, or the name is too long
            continue
        if not is_link:
            continue
        try:
            place.resolve(strict=True)
        except PermissionError:  # it leads to the folder of another user
            continue
        except FileNotFoundError:
            return f"the symbolic link {place} points to {place.readlink()}, which does not exist"
        except (OSError, RuntimeError):
            return f"the symbolic link {place} points to {place.readlink()}, which leads back to it"
    return None


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of every shipped recipe: in recipes/ of the checkout, or in the wheel's copy."""
    package = Path(__file__).resolve().parents[1]
    folders = (package.parent.parent / "recipes", package / "recipes")
    folder = next((folder for folder in folders if folder.is_dir()), package)
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe, from its path or from the name of a shipped one.

    Raises:
        RecipeError: There is no such file and no such shipped recipe.
    """
    path = check_path(name, None)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    stem = path.stem if path.suffix in (".yaml", ".yml") and path.parent.name in ("", "recipes") else name
    if stem in shipped and (path.parent == Path() or path.parent.name == "recipes"):
        return shipped[stem]
    kind = "a folder" if path.is_dir() else nothing_at(path)
    raise RecipeError(
        f"{kind}, and no shipped recipe has this name.",
        code="file-missing",
        place=name,
        remedy=did_you_mean(stem, shipped),
    )


def anchored(value: Any, home: Path) -> Any:
    """The same value for a recipe in another folder: paths and patterns that find a file only relative to ``home``
    become absolute."""
    if isinstance(value, Mapping):
        items = {}
        for key, item in value.items():
            is_reference = ".py:" in str(key)  # a plugin of a file, with its class
            items[anchored(key, home) if is_reference else key] = anchored(item, home)
        return items
    if isinstance(value, list):
        return [anchored(item, home) for item in value]
    if not isinstance(value, str):
        return value
    path = value
    name = ""
    if ".py:" in value:  # file.py:name
        path, _, name = value.rpartition(":")
        name = f":{name}"
    if not path or Path(path).is_absolute() or _finds_file(Path(), path) or not _finds_file(home, path):
        return value
    return f"{home.resolve() / path}{name}"


def _finds_file(home: Path, path: str) -> bool:
    """Whether a relative path, or a pattern such as ``part-*.csv``, finds a file or folder from ``home``."""
    try:
        return (home / path).exists() or (PATTERN.search(path) is not None and any(home.glob(path)))
    except (OSError, ValueError, NotImplementedError):  # a text that cannot be a path or a pattern
        return False

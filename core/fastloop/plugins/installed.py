"""Installed plugins and packages: find them in the metadata of packages, and import a plugin.

Until a recipe names a plugin of another package, its code is not imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import no_code
from fastloop.errors import PluginError, UsageError
from fastloop.plugins.packages import DISTRIBUTION, OWN_DISTRIBUTIONS, suggest_plugin

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin

GROUP = "fastloop.plugins"
"""Entry-point group of plugins."""


def installed(group: str = GROUP, taken: Iterable[str] = ()) -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of every installed plugin, from package metadata; imports nothing.

    The key is ``distribution:name`` if several distributions use a name, or if it is in ``taken``.
    """
    by_name: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in entry_points(group):
        by_name.setdefault(point.name, []).append(point)
    keyed: dict[str, importlib.metadata.EntryPoint] = {}
    for name, points in sorted(by_name.items()):
        is_unique = len(points) == 1 and name not in taken
        for point in points:
            key = name if is_unique else f"{distribution_name(point)}:{name}"
            keyed[key] = point
    return keyed


def distribution_name(point: importlib.metadata.EntryPoint) -> str:
    """The name of the distribution that declares an entry point."""
    return name_and_version(point.dist)[0] if point.dist else "?"


def load(reference: str, where: str = "plugins") -> type[Plugin]:
    """Import the class of an installed plugin.

    Args:
        reference: ``name`` or ``package:name``.

    Raises:
        PluginError: The plugin is not installed (suggests the nearest name), needs another fastloop, cannot be
            imported, or is no plugin.
    """
    point = find_entry_point(reference, where)
    source = f"{point.value} of {' '.join(name_and_version(point.dist)) if point.dist else '?'}"
    label = f"{where}: plugin {reference!r} ({source})"
    problem = unsupported(point)
    if problem:
        raise PluginError(f"{label} {problem}", code="unsupported-version")
    if point.dist is not None and not is_own(point):
        no_code.announce(reference, " ".join(name_and_version(point.dist)))
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{label} cannot be imported: {type(error).__name__}: {error}", code="import-failed"
        ) from error
    cls = check_class(loaded, label)
    if cls.name != point.name:
        raise PluginError(
            f"{label} calls itself {cls.name!r}. Its `name` and its entry point must be the same.", code="name-differs"
        )
    return cls


def find_entry_point(reference: str, where: str) -> importlib.metadata.EntryPoint:
    """The entry point of an installed plugin; imports nothing.

    Raises:
        PluginError: No plugin, or more than one, has this name.
    """
    package, _, name = reference.rpartition(":")
    points = [point for point in entry_points(GROUP) if point.name == name]
    if package:
        from packaging.utils import canonicalize_name

        points = [
            point for point in points if canonicalize_name(distribution_name(point)) == canonicalize_name(package)
        ]
    if len(points) == 1:
        return points[0]
    if points:
        raise PluginError(
            f"{name!r} is the name of plugins in several packages.",
            code="ambiguous-name",
            place=where,
            remedy=f"Say which: {' or '.join(sorted(f'{distribution_name(point)}:{name}' for point in points))}.",
        )
    raise PluginError(
        f"no plugin {reference!r} is installed.",
        code="unknown-plugin",
        place=where,
        remedy=f"{suggest_plugin(name, installed())} `fastloop plugins` lists them.",
    )


def unsupported(point: importlib.metadata.EntryPoint) -> str:
    """Why an installed package does not support this fastloop, by its Requires-Dist; empty if it does."""
    if point.dist is None or distribution_name(point) == DISTRIBUTION:
        return ""
    return _unsupported(point.dist)


@lru_cache(maxsize=4096)
def _unsupported(distribution: importlib.metadata.Distribution) -> str:
    """``unsupported`` for another distribution. `auto` asks for each plugin a hundred times, and parsing the metadata
    takes a millisecond."""
    # These take long to import, and most runs do not need them.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in distribution.requires or ():
        if "fastloop" not in text.lower():  # parsing takes long
            continue
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        if name not in (DISTRIBUTION, "fastloop") or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        if name != DISTRIBUTION:
            return (
                f"requires the distribution {text!r}, which is another project. Let its pyproject.toml require "
                f"{DISTRIBUTION!r} instead."
            )
        ours = importlib.metadata.version(DISTRIBUTION)
        if not requirement.specifier.contains(ours, prereleases=True):
            package = name_and_version(distribution)[0]
            both = f"pip install -U {package} '{DISTRIBUTION}{requirement.specifier}'"
            return (
                f"is made for fastloop {requirement.specifier}, and this is {ours}. Install versions that fit: "
                f"`{both}`."
            )
    return ""


def check_class(cls: Any, label: str) -> type[Plugin]:
    """Check that a loaded object is a plugin whose options can be checked.

    Args:
        label: Its place, for messages.

    Raises:
        PluginError: It is not.
    """
    # only here: the list of commands reads entry points alone
    from fastloop.plugins.declared_options import check_declared
    from fastloop.plugins.plugin import Plugin

    if not (isinstance(cls, type) and issubclass(cls, Plugin)):
        raise PluginError(f"{label} is not a subclass of fastloop.Plugin.", code="not-a-plugin")
    check_declared(cls, label)
    return cls


def defaults() -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of the plugins that are enabled by default if their ``auto_enable`` returns a reason.

    They are fastloop's own: an installed plugin is not active until a recipe names it.
    """
    from fastloop_plugins.default_plugins import DEFAULT_PLUGINS  # the list of the plugins' own package

    # the metadata of other packages is not read: it may be malformed
    named = [point for point in entry_points(GROUP) if point.name in DEFAULT_PLUGINS]
    own = {point.name: point for point in named if distribution_name(point) == DISTRIBUTION}
    return {name: own[name] for name in DEFAULT_PLUGINS}


def is_own(point: importlib.metadata.EntryPoint) -> bool:
    """Whether a distribution of the fastloop project declares an entry point: the main one, or a package that is
    released beside it. The name of the distribution decides."""
    return distribution_name(point) in OWN_DISTRIBUTIONS


@lru_cache(maxsize=4096)
def name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Name and version of an installed package. Reads these two fields only: importlib.metadata parses the whole text
    for each of them."""
    head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
    fields = dict(re.findall(r"(?m)^(Name|Version):[ \t]*(.*?)[ \t]*$", head))
    return fields.get("Name", "?"), fields.get("Version", "?")


def installed_version(distribution: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """The entry points of a group. Raises ``UsageError`` if the other project's distribution ``fastloop`` is installed,
    too."""
    return _entry_points(_metadata_folders()).get(group, importlib.metadata.EntryPoints())


@contextmanager
def unchanged_packages() -> Iterator[None]:
    """Look once for changed metadata of packages, however often the block asks: it installs none. ``auto`` asks
    hundreds of times."""
    if _known_folders.get() is not None:
        yield
        return
    token = _known_folders.set({})
    try:
        yield
    finally:
        _known_folders.reset(token)


Folders = tuple[tuple[str, int], ...]
"""Folders with metadata of packages, and the time of change of each."""
_known_folders: ContextVar[dict[tuple[str, ...], Folders] | None] = ContextVar("known_folders", default=None)
"""In a block of ``unchanged_packages``: import path -> its folders."""


def _metadata_folders() -> Folders:
    """The folders of ``sys.path`` that have metadata of packages, with their times of change. Reading all metadata
    takes up to a second, so the results are kept until one of them changes. A run writes into the current folder, which
    usually has none."""
    known = _known_folders.get()
    path = tuple(sys.path)
    if known is not None and path in known:
        return known[path]
    folders = []
    for entry in path:
        with suppress(OSError):
            folder = _absolute(entry) or str(Path(entry).absolute())
            changed = os.stat(folder).st_mtime_ns  # noqa: PTH116  # a Path takes most of the time
            if _has_metadata(folder, changed):
                folders.append((folder, changed))
    if known is not None:
        known[path] = tuple(folders)
    return tuple(folders)


@lru_cache(maxsize=256)
def _absolute(path: str) -> str:
    """The path, normalized, if it does not depend on the current folder; otherwise empty."""
    return str(Path(path)) if Path(path).is_absolute() else ""


@lru_cache(maxsize=64)
def _has_metadata(folder: str, changed: int) -> bool:
    return Path(folder).is_file() or any(path.name.lower().endswith("-info") for path in Path(folder).iterdir())


@lru_cache(maxsize=2)
def _entry_points(folders: Folders) -> dict[str, importlib.metadata.EntryPoints]:
    for other in importlib.metadata.distributions(name="fastloop"):
        raise UsageError(
            "two distributions with the import name fastloop are installed, and their files overwrite each other: "
            f"{DISTRIBUTION}, and fastloop {other.version}, which is another project.",
            code="broken-installation",
            remedy="Remove both, then install this one:",
            command=f"pip uninstall --yes fastloop {DISTRIBUTION} && pip install {DISTRIBUTION}",
        )
    points = importlib.metadata.entry_points()
    return {
        group: points.select(group=group)
        for group in points.groups
        if group.startswith(("fastloop.", "torch.backends"))
    }

"""Results that depend on files, in the cache of ``token-cache``: they are found again until a file changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from fastloop import __version__
from fastloop_plugins import _cache
from fastloop_plugins.rows.content_hashes import state_of
from fastloop_plugins.rows.paths import URL
from fastloop_plugins.rows.remote import remote_state


def kept_entry(about: Sequence[str], paths: Sequence[str]) -> Path | None:
    """The folder in the cache of ``token-cache`` for a result that depends on files; None: the result cannot be
    kept."""
    folder = _cache.use_token_folder()
    states = [_state_of(path) for path in paths] if folder is not None else []
    if folder is None or not all(states):
        return None
    return folder / _cache.digest(["stream", __version__, *about, *map(str, states)])


def _state_of(path: str) -> str | None:
    """A string that changes when a file is written; None: the file's store has none, or the file has just been
    written."""
    if URL.match(path):
        return remote_state(path)
    state = state_of(Path(path))
    if not state.is_settled():
        return None
    return f"{Path(path).resolve()} {astuple(state)}"

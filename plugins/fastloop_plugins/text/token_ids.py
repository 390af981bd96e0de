"""Token ids that ``token-cache`` keeps on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fastloop_plugins import _cache

if TYPE_CHECKING:
    from fastloop_plugins._cache import Flat


def cache_token_ids(about: Iterable[str | bytes], rows: Iterable[Sequence[int]]) -> Flat:
    """The ids of all rows end to end, int32, and the length of each row, int64.

    Call it in ``build_datasets``, and declare the trait ``cached-token-ids``. In a run with `token-cache`, the ids are
    mapped from disk, and ``rows`` is read only if they are not there yet. Without the plugin, they are in memory.

    Args:
        about: Everything that determines the ids: the texts, the tokenizer, its options, a version of the code.
        rows: Ids of each text. An iterator, so that nothing is tokenized if the ids are cached.
    """
    folder = _cache.use_token_folder()
    return _cache.flat(rows) if folder is None else _cache.kept(folder, _cache.digest(["rows", *about]), rows)

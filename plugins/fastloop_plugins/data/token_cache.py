"""Caches token ids on disk.

    plugins:
      - token-cache: {folder: auto}

Later runs with the same texts, tokenizer files and options, and other processes of the same run, map them into memory.
``auto`` is the folder ``fastloop/tokens`` in the user's cache, which you can delete at any time. If others may write to
the folder, each user has a part of it, ``user-ID``.

Token ids are written in units of 16 MiB. They take 2 bytes each if all of a split fit. If a run is killed while it
tokenizes, the next one continues after the last unit. Data files are known by the hash of their content, which
``files.json`` in the folder keeps: a file with the same size, times and inode is not read again, and one that was only
touched is not tokenized again. Rows that are in other splits of the folder, such as those of another ``data.limit``,
are copied from there.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, Recommendation, hookimpl, option
from fastloop.recipe.paths import broken_link
from fastloop.runtime.files import refuse_full_disk
from fastloop_plugins._task_traits import recipe_traits

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine


class TokenCache(Plugin):
    """Caches token ids on disk."""

    name = "token-cache"
    numerics = "bitwise"
    for_inference = True

    folder: str = option("Folder of token ids; auto: in the user's cache.", default="auto")

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For training beside a device that computes faster than texts are tokenized."""
        if machine.device == "cpu" or recipe.inference is not None or "cached-token-ids" not in recipe_traits(recipe):
            return None
        return Recommendation(why="texts are tokenized once")

    @hookimpl(wrapper=True)
    def build_datasets(self, run: Run) -> Generator[None, Any, Any]:
        from fastloop_plugins._cache import tokens_kept_in

        folder = open_token_folder(self.folder, run.recipe.where)
        with tokens_kept_in(folder) as tokens:
            datasets = yield
        if not tokens.is_used:
            self.log.warning(
                Problem(
                    f"the task {run.plugins.in_slot('task')!r} tokenizes nothing that can be cached: the "
                    "plugin does nothing. It caches the token ids of tasks that declare 'token-cache', "
                    "without model.trust_remote_code.",
                    code="no-effect",
                )
            )
        return datasets


def open_token_folder(option: str, where: str) -> Path:
    """Create the folder of token ids.

    Args:
        option: The option ``folder``.
        where: The recipe, for messages.

    Raises:
        PluginError: It cannot be used.
    """
    from fastloop_plugins._cache import own_part, user_cache

    try:
        folder = user_cache("tokens") if option == "auto" else Path(option).expanduser()
        return own_part(folder)
    except (OSError, RuntimeError) as error:  # a RuntimeError: ~ of a user who has no home folder
        refuse_full_disk(error, Path(option))
        name = getattr(error, "filename", None) or option
        reason = broken_link(Path(name)) or getattr(error, "strerror", None) or error
        raise PluginError(
            f"{reason}.",
            code="folder-not-writable",
            place=f"{where}: plugins.token-cache.folder: {name}",
            remedy="Give another folder.",
        ) from None

"""Access to the model hub for the text tasks: check once whether it can be reached, and silence its libraries."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


def is_hub_name(name: str) -> bool:
    """Whether a name could exist on the hub: ``name`` or ``owner/name``."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not name.startswith(".")


@cache
def offline() -> bool:
    """Whether the hub cannot be reached, or HF_HUB_OFFLINE is set. The hub's libraries then use only their local cache.

    Otherwise they would retry each file, for most of a minute.
    """
    import datasets.config
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
            return False
        except Exception:  # any error means that no answer came
            constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return True


def explain(where: str, name: str, folder: Path, error: BaseException, instead: str) -> str:
    """The error message for something that could not be loaded from a folder or from the hub."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    if folder.is_dir():
        return f"{where}: {folder} cannot be loaded: {reason}."
    if not offline():
        return f"{where}: {name!r} is not a local folder, and cannot be loaded from the hub: {reason}."
    from huggingface_hub import constants

    return (
        f"{where}: {name!r} is not a local folder, and is not in the hub's local cache; the hub ({constants.ENDPOINT}) "
        f"cannot be reached from here, or HF_HUB_OFFLINE is set. Use a local copy: {instead}. Or set HF_HOME to a "
        "cache that has it, or HF_ENDPOINT to a mirror that can be reached."
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and datasets inside this context, except for errors. Progress bars of the hub's downloads
    stay."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    datasets = sys.modules.get("datasets")  # if it is not imported, it logs nothing; importing it takes a second
    level = transformers_logging.get_verbosity()
    drawn = transformers_logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if drawn:
        enable_progress_bars()  # transformers disables these together with its own
    if datasets is not None:
        datasets_level, datasets_drawn = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
        datasets.logging.set_verbosity_error()
        datasets.disable_progress_bars()
    logging.disable(logging.WARNING)  # saving imports deepspeed if installed, which logs warnings
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers_logging.set_verbosity(level)
        if drawn:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if datasets is not None:
            datasets.logging.set_verbosity(datasets_level)
            if datasets_drawn:
                datasets.enable_progress_bars()

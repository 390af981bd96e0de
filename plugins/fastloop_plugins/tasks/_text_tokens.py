"""The splits of a text task as token ids: tokenised, or as the cache has them.

The cache (``_cache``) has two kinds of entries. Token ids lie under a hash of their texts. What a ``data`` section gave lies under a hash
of its files and options and says which token ids those are: with it there, a start reads no text, and its time and memory do not grow
with the data. Only sections that name files and have a pretrained tokenizer have such an entry: what a function gives is not known before.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop_plugins import _cache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fastloop_plugins.tasks._text_data import TextData
    from fastloop_plugins.tasks._text_model import TextModel

logger = logging.getLogger("fastloop")


CHARACTERS = 50
"""Of a text that is truncated, this many for each token to be kept are read first: a minute's work for one huge text otherwise."""


@dataclass
class Split:
    """One split: ids of all texts end to end, how many each text has, and the labels where the task has labels."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None


def read(data: TextData, model: TextModel, documents: bool = False, **arguments: Any) -> dict[str, Split]:
    """The splits; afterwards ``model`` has its tokenizer and ``data`` its classes.

    Args:
        documents: Leave out empty texts, and end each text with the token that says so.
        arguments: Of the tokenizer.

    Raises:
        RecipeError: The model, its tokenizer or the data are not as they must be.
    """
    import numpy as np

    model.load_tokenizer(data.options.max_length)
    folder = None if model.options.trust_remote_code else _cache.TOKENS.get()  # that code is not among the tokenizer's files
    source, how = None, json.dumps([documents, arguments], sort_keys=True)
    if folder is not None and model.trained is None and data.files:
        source = folder / _cache.digest(["data", version("fastloop"), model.fingerprint(), how, data.identity()])
        if (found := _remembered(source, data)) is not None:
            return found
    splits = data.load()
    model.finish_tokenizer(splits["train"].texts, data.options.max_length)
    tokenizer, found, keys = model.tokenizer, {}, {}
    known = "" if folder is None else model.fingerprint()
    end = [tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id] if documents else []
    for name, rows in splits.items():
        texts = [text for text in rows.texts if text.strip()] if documents else rows.texts
        encoded = encode(tokenizer, texts, end, arguments)
        if folder is None:
            flat = _cache.flat(encoded)
        else:
            keys[name] = _cache.digest([known, how, *texts])
            flat = _cache.kept(folder, keys[name], encoded)
        found[name] = Split(*flat, None if rows.labels is None else np.array(rows.labels, dtype=np.int64))
    if source is not None:
        _remember(source, data, found, keys)
    return found


def encode(tokenizer: Any, texts: list[str], end: list[int], arguments: dict[str, Any]) -> Iterator[list[int]]:
    """The ids of each text, with ``end`` behind them. Of a huge text that is truncated, only as much is read as can be kept."""
    most: int = arguments["max_length"] if arguments.get("truncation") else 0
    for start in range(0, len(texts), 1000):
        whole = texts[start : start + 1000]
        read = [beginning(text, CHARACTERS * most) for text in whole] if most else whole
        for text, part, ids in zip(whole, read, tokenizer(read, return_attention_mask=False, **arguments)["input_ids"], strict=True):
            if len(part) < len(text) and len(ids) < most:  # it was not enough
                ids = tokenizer(text, return_attention_mask=False, **arguments)["input_ids"]
            yield ids + end


def beginning(text: str, size: int) -> str:
    """The first words of a text that is longer than ``size`` characters; all of it, where it has no words."""
    end = max(text.rfind(space, 0, size) for space in " \n") if len(text) > size else -1
    return text[:end] if end > 0 else text


def _remember(entry: Path, data: TextData, splits: dict[str, Split], keys: dict[str, str]) -> None:
    import numpy as np

    with _cache.written(entry) as made:
        for name, split in splits.items():
            if split.labels is not None:
                np.save(made / f"{name}.npy", split.labels, allow_pickle=False)
        facts = {"splits": keys, "classes": data.classes, "said": data.said, "unreadable": data.unreadable}
        (made / "data.json").write_text(json.dumps(facts), encoding="utf-8")


def _remembered(entry: Path, data: TextData) -> dict[str, Split] | None:
    """What an entry says, if it is there with all that it names."""
    import numpy as np

    if not entry.is_dir():
        return None
    found: dict[str, Split] = {}
    try:
        saved = json.loads((entry / "data.json").read_text(encoding="utf-8"))
        for name, key in saved["splits"].items():
            flat = _cache.read(entry.parent / key)
            if flat is None:
                return None
            labels = np.load(entry / f"{name}.npy", allow_pickle=False) if data.options.label is not None else None
            if labels is not None and len(labels) != len(flat[1]):
                raise ValueError(f"{name}: {len(labels)} labels of {len(flat[1])} texts")
            found[name] = Split(*flat, labels)
        data.classes, data.said, data.unreadable = saved["classes"], saved["said"], saved["unreadable"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        logger.warning("data: %s is damaged (%s): the data is read again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    data.say()
    logger.info("tokens: all from %s", entry.parent)
    return found

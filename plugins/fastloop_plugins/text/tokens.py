"""Token ids of the splits of a text task: tokenized, or read from the cache.

The cache (``_cache``) has two kinds of entries. Token ids are stored under a hash of their texts. An entry for a
``data`` section is stored under a hash of its files and options, and lists the entries of token ids that belong to it.
With such an entry, a run starts without reading text, so its start-up time and memory do not grow with the data. Only
sections with files and a pretrained tokenizer have one: the result of a function is not known in advance.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fastloop import RecipeError, __version__
from fastloop_plugins import _cache
from fastloop_plugins._mapped import convert, flat, flatnonzero, spans, zeros
from fastloop_plugins.rows.column import Rest
from fastloop_plugins.text.batches import describe_cut
from fastloop_plugins.text.columns import (
    Text,
    each_text,
    encode_pairs,
    join_columns,
    return_token_types,
    token_types,
)  # fmt: skip
from fastloop_plugins.text.encoding_processes import count_processes, encode_in_processes
from fastloop_plugins.text.known_tokens import find_known, merge, write_hashes
from fastloop_plugins.text.special_tokens import special_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fastloop_plugins.rows.split_rows import Rows
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel

logger = logging.getLogger("fastloop")
T = TypeVar("T", bound=Text)
R = TypeVar("R")
Encoder = Callable[[Any, Any, dict[str, Any]], Iterator[list[int]]]
"""Yields the ids of each row, given the tokenizer, the rows and the arguments."""


CHARACTERS = 50
"""Characters to read for each token that truncation keeps. Without this limit, tokenizing one huge text takes a
minute."""
AT_ONCE, CHARACTERS_AT_ONCE = 1000, 2**22
"""Rows, and their characters, that the tokenizer gets at once."""


PROGRESS = 30.0
"""Seconds between two lines of the log about rows that are tokenized."""
ENCODING = 5
"""Increase it when the same texts and arguments give other rows or facts, so that cached ones are not used."""


@dataclass
class Split:
    """One split: ids of all texts end to end, the number of ids in each text, and labels if the task has labels.

    With ``typed``, each text has its ids and then the type of each token, and the number counts both. ``characters`` is
    the number of characters of all texts; blank ones have none. ``texts`` is empty unless ``read`` was called with
    ``first``.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    labels: NDArray[Any] | None = None
    typed: bool = False
    characters: int = 0
    texts: Sequence[Any] = ()


def read(
    data: TextData,
    model: TextModel,
    documents: bool = False,
    encoder: Encoder | None = None,
    first: int | None = None,
    sees_all: bool = False,
    **arguments: Any,
) -> dict[str, Split]:
    """Read and tokenize the splits. Sets the tokenizer of ``model`` and the classes of ``data``.

    Args:
        documents: Skip empty texts, and give each text its special tokens; see ``text.special_tokens``.
        encoder: Replaces ``encode``. Its result must depend only on its arguments.
        first: Tokenize only this many rows of ``train``, for `fastloop plan --samples`, and keep their texts. A
            tokenizer is trained on all.
        sees_all: Whether ``encoder`` gets all rows at once. Else several processes share them.
        arguments: Arguments of the tokenizer.

    Raises:
        RecipeError: The model, its tokenizer or the data are invalid.
    """
    if first and data.stream is not None:
        raise RecipeError(
            "--samples reads rows in memory.",
            code="no-streaming",
            place=f"{data.where}.streaming",
            remedy="Give data.streaming=false, and fewer files if they are large.",
        )
    model.load_tokenizer(data.options.max_length)
    if data.inference is not None and data.options.label is not None:
        data.classes = model.class_names()
    types = token_types(data.columns, model)
    arguments |= types
    if types and model.tokenizer is not None:
        return_token_types(model.tokenizer)
    folder = (
        None if model.options.trust_remote_code or first else _cache.use_token_folder()
    )  # the hash does not cover such code
    source, how = None, json.dumps([documents, arguments], sort_keys=True)
    if folder is not None and model.trained is None and data.files and data.stream is None:
        source = folder / _cache.digest(
            ["data", str(ENCODING), __version__, model.fingerprint(), how, data.identity(folder)]
        )
        if (found := _read_entry(source, data, bool(types))) is not None:
            return found
    splits = data.load()
    if model.trained is not None:
        texts = splits["train"].texts
        model.finish_tokenizer(each_text(texts) if encoder is None else texts, bool(types))
    if first:
        splits = {"train": splits["train"]}
    tokenizer, found, keys = model.tokenizer, {}, {}
    known = "" if folder is None else model.fingerprint()
    for name, rows in splits.items():
        if documents:
            rows = rows.keep(flatnonzero(rows.characters > 0))
        if first:
            rows = rows.keep(np.arange(min(first, len(rows))))
        texts_of = partial(_text_rows, model, encoder)
        encode_rows = partial(_encode_rows, tokenizer, encoder, documents, arguments)
        split = SplitEncoder(name, rows, texts_of, encode_rows, sees_all)
        if folder is None:
            ids, lengths = flat(split.encode_from(0))
        else:
            split.family, split.folder = f"{_cache.digest([str(ENCODING), known, how])[:20]}-", folder
            keys[name] = split.family + _cache.digest(rows.hashes[span].tobytes() for span in spans(len(rows)))
            ids, lengths = _cache.kept(folder, keys[name], split.encode_from, split.facts, split.write_hashes)
        cut = split.facts.get("cut")
        if cut:
            of = data.name_part(name)
            data.messages.append((logging.WARNING, describe_cut(of, cut, len(rows), "texts", data.options.max_length)))
            logger.warning("%s", data.messages[-1][1])
        if model.trained is not None and model.trained.kind == "char" and encoder is None and not types:
            _warn_about_unknown(name, ids, tokenizer.unk_token_id, data)
        kind = np.int64 if data.label_type == "class" else np.float32
        labels = None if rows.labels is None else convert(rows.labels, kind)
        shown = texts_of(rows) if first else ()
        found[name] = Split(ids, lengths, labels, bool(types), split.characters(), shown)
    if source is not None:
        _write_entry(source, data, found, keys)
    return found


def _encode_rows(
    tokenizer: Any, encoder: Encoder | None, documents: bool, arguments: dict[str, Any], rows: Sequence[Any]
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of some rows, and whether truncation shortened each. See ``read``."""
    if encoder is not None:
        for ids in encoder(tokenizer, rows, arguments):
            yield ids, False
        return
    special = special_tokens(tokenizer) if documents else None
    for ids, is_cut in encode_marked(tokenizer, rows, arguments):
        yield ids if special is None else special.complete(ids), is_cut


def _text_rows(model: TextModel, encoder: Encoder | None, rows: Rows) -> Sequence[Any]:
    """The rows of a split as ``_encode_rows`` gets them."""
    return join_columns(rows.texts, model) if encoder is None else rows.texts


class SplitEncoder:
    """Encodes the rows of a split.

    Args:
        texts: Returns rows as ``encode`` gets them.
        encode: Yields the ids of some rows, and whether truncation shortened each.
        sees_all: See ``read``.

    Attributes:
        facts: ``cut`` is the number of texts that truncation has shortened so far.
        folder: The folder of the cache; None: there is none.
        family: The beginning of the names of entries whose ids were made in the same way.
    """

    def __init__(
        self,
        name: str,
        rows: Rows,
        texts: Callable[[Rows], Sequence[Any]],
        encode: Callable[[Any], Iterator[tuple[list[int], bool]]],
        sees_all: bool,
    ) -> None:
        self.name, self.rows, self.texts, self.encode, self.sees_all = name, rows, texts, encode, sees_all
        self.facts: dict[str, int] = {}
        self.folder: Path | None = None
        self.family = ""
        self._is_cut = zeros(len(rows), np.bool_)

    def encode_from(self, start: int) -> Iterator[Sequence[int]]:
        """Yield the ids of the rows from a number on. ``facts`` counts a row before it is yielded."""
        total = len(self.rows)
        self.facts.setdefault("cut", 0)
        encoded = with_progress(self._encode_from(start), f"tokens: {self.name}", start, total)
        for row, (ids, is_cut) in enumerate(encoded, start):
            if is_cut:
                self.facts["cut"] += 1
                self._is_cut[row] = True
            yield ids

    def _encode_from(self, start: int) -> Iterator[tuple[Sequence[int], bool]]:
        found = None
        if self.folder is not None and not self.sees_all:
            found = find_known(self.family, self.folder, self.rows.hashes)
        if found is None:
            texts = self.texts(self.rows)
            return self._encode(Rest(texts, start) if start else texts, len(self.rows))
        known, places = found
        new = start + flatnonzero(places[start:] < 0)
        logger.info(
            "tokens: %s: %d of %d rows are tokenized, and the others copied from other splits in %s",
            self.name, len(new), len(self.rows) - start, self.folder,
        )  # fmt: skip
        encoded: Iterator[tuple[Sequence[int], bool]] = iter(())
        if len(new):
            encoded = self._encode(self.texts(self.rows.keep(new)), len(new))
        return merge(encoded, known, places[start:])

    def _encode(self, texts: Sequence[Any], count: int) -> Iterator[tuple[Sequence[int], bool]]:
        processes = 1 if self.sees_all else count_processes(count, self.characters())
        if processes > 1:
            return encode_in_processes(self.encode, portions(texts), processes)
        return self.encode(texts)

    def characters(self) -> int:
        """The characters of all rows."""
        return int(self.rows.characters.sum(dtype=np.int64))

    def write_hashes(self, entry: Path) -> None:
        """Write the files by which other splits find these rows."""
        write_hashes(entry, self.rows.hashes, flatnonzero(self._is_cut))


def with_progress(rows: Iterable[R], what: str, start: int, total: int) -> Iterator[R]:
    """Yield rows. Logs how many there are, their speed and the time left, each ``PROGRESS`` seconds.

    Args:
        start: Rows before the first one.
        total: Rows at the end.
    """
    begin = time.monotonic()
    next_line = begin + PROGRESS
    for number, row in enumerate(rows, 1):
        yield row
        now = time.monotonic()
        if now < next_line:
            continue
        next_line = now + PROGRESS
        speed = number / (now - begin)
        left = (total - start - number) / speed
        minutes, seconds = divmod(round(left), 60)
        logger.info(
            "%s: %d of %d rows, %.0f rows/s, %d:%02d min left", what, start + number, total, speed, minutes, seconds
        )


def _warn_about_unknown(split: str, ids: NDArray[np.int32], unknown: int, data: TextData) -> None:
    count = sum(int((ids[span] == unknown).sum()) for span in spans(len(ids)))
    if count:
        line = f"data: {split}: {count} characters are not in the training texts, and become the unknown token"
        data.messages.append((logging.WARNING, line))
        logger.warning("%s", line)


def encode(
    tokenizer: Any,
    texts: Sequence[Text],
    arguments: dict[str, Any],
    facts: dict[str, int] | None = None,
) -> Iterator[list[int]]:
    """Yield the ids of each text. Reads only the part of a huge text that truncation can keep.

    Args:
        texts: Texts, or pairs: see ``text.columns.encode_pairs``.
        facts: The number of texts that truncation shortens is added to ``cut``, before each is yielded.
    """
    counts = {} if facts is None else facts
    counts.setdefault("cut", 0)
    for ids, cut in encode_marked(tokenizer, texts, arguments):
        counts["cut"] += cut
        yield ids


def encode_marked(tokenizer: Any, texts: Sequence[Text], arguments: dict[str, Any]) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each text, and whether truncation shortened it. See ``encode``."""
    most: int = arguments["max_length"] if arguments.get("truncation") else 0
    rows: Any = texts
    if texts and isinstance(texts[0], tuple):
        yield from encode_pairs(tokenizer, rows, most, CHARACTERS * most, arguments)
        return
    for full in portions(rows):
        read = [beginning(text, CHARACTERS * most) for text in full] if most else full
        found = encode_batch(tokenizer, read, arguments)
        cuts = shortened(tokenizer, [read], *found, most, arguments)
        for text, part, ids, cut in zip(full, read, found[0], cuts, strict=True):
            if len(part) == len(text):
                yield ids, cut
            elif len(ids) < most:  # the part was too short
                again = encode_batch(tokenizer, [text], arguments)
                yield again[0][0], shortened(tokenizer, [[text]], *again, most, arguments)[0]
            else:
                yield ids, True


def encode_batch(tokenizer: Any, texts: list[str], arguments: dict[str, Any]) -> tuple[list[list[int]], Any]:
    """The ids of texts, and their encodings in the tokenizer's backend; None: it has none.

    A call makes a dictionary for each text in one thread, which takes longer than the backend takes in all threads. So
    only the first text is given to the tokenizer, which sets its backend up, unless its class encodes in its own way.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    own, known = type(tokenizer), arguments.keys() <= {"truncation", "max_length", "add_special_tokens", "verbose"}
    is_plain = own.__call__ is PreTrainedTokenizerBase.__call__ and known
    if is_plain and own._encode_plus is PreTrainedTokenizerFast._encode_plus:
        tokenizer(texts[:1], return_attention_mask=False, **arguments)
        special = arguments.get("add_special_tokens", True)
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings], encodings
    found = tokenizer(texts, return_attention_mask=False, **arguments)
    return found["input_ids"], found.encodings


def portions(rows: Iterable[T]) -> Iterator[list[T]]:
    """Divide rows into lists to tokenize at once: a tokenizer takes hundreds of bytes for each character."""
    portion, size = list[T](), 0
    for row in rows:
        length = len(row) if isinstance(row, str) else sum(map(len, row))
        if portion and (len(portion) == AT_ONCE or size + length > CHARACTERS_AT_ONCE):
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += length
    if portion:
        yield portion


def shortened(
    tokenizer: Any,
    columns: list[list[str]],
    ids: list[list[int]],
    encodings: Any,
    most: int,
    arguments: dict[str, Any],
) -> list[bool]:
    """Whether truncation shortened each row.

    Args:
        columns: The texts of the rows: one list, or two for pairs.
        ids: Their ids.
        encodings: See ``encode_batch``.
        most: Tokens that truncation keeps; 0: all.
    """
    full = [row for row in range(len(ids)) if len(ids[row]) == most]
    if encodings is not None:
        cut = {row for row in full if encodings[row].overflowing}
    elif full:  # a tokenizer in Python does not report it: read these rows again, with room for one more token
        texts = [[column[row] for row in full] for column in columns]
        longer = tokenizer(*texts, return_attention_mask=False, **{**arguments, "max_length": most + 1})["input_ids"]
        cut = {row for row, tokens in zip(full, longer, strict=True) if len(tokens) > most}
    else:
        cut = set()
    return [row in cut for row in range(len(ids))]


def beginning(text: str, size: int) -> str:
    """The first words of a text, up to ``size`` characters; all of it if it is shorter or has no spaces."""
    end = max(text.rfind(space, 0, size) for space in " \n") if len(text) > size else -1
    return text[:end] if end > 0 else text


def _write_entry(entry: Path, data: TextData, splits: dict[str, Split], keys: dict[str, str]) -> None:
    with _cache.written(entry) as made:
        for name, split in splits.items():
            if split.labels is not None:
                np.save(made / f"{name}.npy", split.labels, allow_pickle=False)
        facts = {
            "splits": {name: [key, splits[name].characters] for name, key in keys.items()},
            "classes": data.classes,
            "messages": data.messages,
            "unreadable": data.unreadable,
        }
        (made / "data.json").write_text(json.dumps(facts), encoding="utf-8")


def _read_entry(entry: Path, data: TextData, typed: bool) -> dict[str, Split] | None:
    """The splits of an entry; None if the entry, or token ids that it names, are missing."""
    if not entry.is_dir():
        return None
    found: dict[str, Split] = {}
    try:
        saved = json.loads((entry / "data.json").read_text(encoding="utf-8"))
        for name, (key, characters) in saved["splits"].items():
            ids_and_lengths = _cache.read(entry.parent / key)
            if ids_and_lengths is None:
                return None
            ids, lengths = ids_and_lengths
            labels = None
            if data.options.label is not None:
                labels = np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            if labels is not None and len(labels) != len(lengths):
                raise ValueError(f"{name}: {len(labels)} labels of {len(lengths)} texts")
            found[name] = Split(ids, lengths, labels, typed, int(characters))
        data.classes, data.messages, data.unreadable = saved["classes"], saved["messages"], saved["unreadable"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        logger.warning("data: %s is damaged (%s): the data is read again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None
    data.log_messages()
    logger.info("tokens: all from %s", entry.parent)
    return found

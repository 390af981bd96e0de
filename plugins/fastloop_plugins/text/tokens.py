"""Token ids of the splits of a text task: tokenized, or read from the cache.

The cache (``_cache``) has two kinds of entries. Token ids are stored under a hash of their texts. An entry for a
``data`` section is stored under a hash of its files and options, and lists the entries of token ids that belong to it.
With such an entry, a run starts without reading text, so its start-up time and memory do not grow with the data. Only
sections with files and a pretrained tokenizer have one: the result of a function is not known in advance.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastloop import Problem, RecipeError, __version__
from fastloop.problem import counted
from fastloop_plugins import _cache
from fastloop_plugins._mapped import convert, flatnonzero, spans
from fastloop_plugins.text.columns import each_text, join_columns, return_token_types, token_types
from fastloop_plugins.text.encoding import encode_marked
from fastloop_plugins.text.needed_rows import NeededRows, propose_limit
from fastloop_plugins.text.sequences import describe_cut
from fastloop_plugins.text.special_tokens import special_tokens
from fastloop_plugins.text.split_encoder import SplitEncoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from fastloop_plugins._cache import Flat
    from fastloop_plugins.rows.split_rows import Rows
    from fastloop_plugins.text.data import TextData
    from fastloop_plugins.text.model import TextModel
    from fastloop_plugins.text.needed_rows import FirstRows, Needs

logger = logging.getLogger("fastloop")
Encoder = Callable[[Any, Any, dict[str, Any]], Iterator[list[int]]]
"""Yields the ids of each row, given the tokenizer, the rows and the arguments."""
ENCODING = 8
"""Increase it when the same texts and arguments give other rows or facts, so that cached ones are not used."""


@dataclass
class Split:
    """One split: ids of all texts end to end, the number of ids in each text, and labels if the task has labels.

    With ``typed``, each text has its ids and then the type of each token, and the number counts both. ``characters`` is
    the number of characters of all texts; blank ones have none. ``texts`` is empty unless ``read`` was called with
    ``first``. ``content`` is a hash of the rows and of the tokenizer's arguments. With ``needed``, the ids and lengths
    are those of these rows, and the labels those of all.
    """

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]
    labels: NDArray[Any] | None = None
    typed: bool = False
    characters: int = 0
    texts: Sequence[Any] = ()
    content: str = ""
    needed: NeededRows | None = None

    def with_ids(self, flat: Flat, labels: NDArray[Any] | None) -> Split:
        """A split of other rows, which are tokenized in the same way."""
        ids, lengths = flat
        return replace(self, ids=ids, lengths=lengths, labels=labels, needed=None)


@dataclass(frozen=True)
class Encoding:
    """How rows become token ids.

    Attributes:
        arguments: Those of the tokenizer or of ``encoder``, JSON values. They are part of the name of cached ids.
        documents: Skip empty texts, and give each text its special tokens; see ``text.special_tokens``.
        encoder: Replaces ``encode``. Its result must depend only on its arguments.
        sees_all: Whether ``encoder`` gets all rows at once. Else several processes share them.
        is_narrow: Whether ids in the cache may take 2 bytes. They are read as int32; see ``NarrowIds``.
    """

    arguments: dict[str, Any]
    documents: bool = False
    encoder: Encoder | None = None
    sees_all: bool = False
    is_narrow: bool = True


@dataclass(frozen=True)
class Selection:
    """The rows that a run tokenizes; by default, all.

    Attributes:
        first: Only this many rows of ``train``, with their texts, for `fastloop plan --samples`. A tokenizer is
            trained on all.
        needs: Some rows of large splits. These then have ``Split.needed``.
        first_rows: The first rows of large splits.
        samples: Samples of ``train`` that the run reads; None: every one, or only the needed rows are tokenized.
    """

    first: int | None = None
    needs: Needs | None = None
    first_rows: FirstRows | None = None
    samples: int | None = None


def read(data: TextData, model: TextModel, encoding: Encoding, selection: Selection | None = None) -> dict[str, Split]:
    """Read and tokenize the splits. Sets the tokenizer of ``model`` and the classes of ``data``.

    Args:
        selection: The rows to tokenize; None: all.

    Raises:
        RecipeError: The model, its tokenizer or the data are invalid.
    """
    selection = selection or Selection()
    if selection.first and data.stream is not None:
        raise RecipeError(
            "--samples reads rows in memory.",
            code="no-streaming",
            place=f"{data.where}.streaming",
            remedy="Give data.streaming=false, and fewer files if they are large.",
        )
    model.load_tokenizer(data.options.max_length)
    if data.inference is not None and data.options.label is not None:
        data.classes = model.class_names()
    return SplitReader(data, model, encoding, selection).read()


class SplitReader:
    """Reads the splits of a ``data`` section. The text is read only if the cache has no entry for the section.

    Args:
        model: With its tokenizer loaded, or to be trained.
        encoding: See ``read``.
        selection: See ``read``.
    """

    def __init__(self, data: TextData, model: TextModel, encoding: Encoding, selection: Selection) -> None:
        self.data = data
        self.model = model
        self.selection = selection
        types = token_types(data.columns, model)
        if types and model.tokenizer is not None:
            return_token_types(model.tokenizer)
        self.has_types = bool(types)
        arguments = encoding.arguments | types
        self.encoding = replace(encoding, arguments=arguments)
        self.how = json.dumps([encoding.documents, arguments], sort_keys=True)
        # the hash does not cover such code
        is_cached = not model.options.trust_remote_code and not selection.first
        self.folder = _cache.use_token_folder() if is_cached else None
        self.tokenizer_hash = ""
        if self.folder is not None and model.trained is None:
            self.tokenizer_hash = model.fingerprint()

    def read(self) -> dict[str, Split]:
        """All splits, from entries of the cache or from the data."""
        entries = self._entries()
        for entry in entries:
            saved = None if entry is None else _read_entry(entry, self.data, self.has_types, lambda: self.encoders)
            if saved is not None:
                return saved
        splits: dict[str, Split] = {}
        keys: dict[str, str] = {}
        has_all = True
        for name, encoder in self.encoders.items():
            total = len(encoder.rows)
            encoder = self._begin(encoder)
            has_all = has_all and len(encoder.rows) == total
            splits[name], keys[name] = self._encode(encoder)
        whole, part = entries
        entry = part if any(split.needed is not None for split in splits.values()) else whole
        # the entry is that of the files as they were hashed: one may have been replaced before it was read
        if entry is not None and has_all and self._entries() == entries:
            _write_entry(entry, self.data, splits, keys)
        return splits

    def _entries(self) -> tuple[Path | None, Path | None]:
        """The entries of the section in the cache: with all rows, and with those of ``Selection.needs``. None: a
        source of rows other than files, or a tokenizer to be trained, is not known before it is read."""
        data = self.data
        needs = self.selection.needs
        if self.folder is None or self.model.trained is not None or not data.files or data.stream is not None:
            return None, None
        facts = ["data", str(ENCODING), __version__, self.tokenizer_hash, self.how, data.identity(self.folder)]
        part = None if needs is None else self.folder / _cache.digest([*facts, needs.about])
        return self.folder / _cache.digest(facts), part

    @cached_property
    def encoders(self) -> dict[str, SplitEncoder]:
        """The encoder of each split. Reads the data, and trains a tokenizer that is to be trained."""
        encoding = self.encoding
        model = self.model
        first = self.selection.first
        splits = self.data.load()
        if model.trained is not None:
            texts = splits["train"].texts
            model.finish_tokenizer(each_text(texts) if encoding.encoder is None else texts, self.has_types)
            self.tokenizer_hash = "" if self.folder is None else model.fingerprint()
        family = f"{_cache.digest([str(ENCODING), self.tokenizer_hash, self.how])[:20]}-"
        texts_of = partial(_text_rows, model, encoding.encoder)
        encode_rows = partial(_encode_rows, model.tokenizer, encoding)
        encoders = {}
        for name, rows in splits.items():
            if first and name != "train":
                continue
            if encoding.documents:
                rows = rows.keep(flatnonzero(rows.characters > 0))
            if first:
                rows = rows.keep(np.arange(min(first, len(rows))))
            encoders[name] = SplitEncoder(
                name, rows, texts_of, encode_rows, encoding.sees_all, family, self.folder, encoding.is_narrow
            )
        return encoders

    def _begin(self, encoder: SplitEncoder) -> SplitEncoder:
        """The first rows of a split, for a check of the recipe; else all of them."""
        first_rows = self.selection.first_rows
        if first_rows is None or self.data.stream is not None:
            return encoder
        return encoder.begin(first_rows)

    def _encode(self, encoder: SplitEncoder) -> tuple[Split, str]:
        """A split, and the name of the cache entry with its token ids."""
        data = self.data
        needs = self.selection.needs
        name = encoder.name
        rows = encoder.rows
        ids = None if needs is None or data.stream is not None else needs.find(name, len(rows))
        needed = None
        if ids is None:
            if name == "train" and self.selection.samples is not None:
                propose_limit(len(rows), self.selection.samples)
            token_ids, lengths = encoder.encode()
            key = encoder.key()
        else:
            (token_ids, lengths), needed = encoder.encode_needed(ids)
            needed.announce(name)
            key = encoder.key_of(needed.ids)
        self._report(encoder, token_ids, len(lengths))
        kind = np.int64 if data.label_type == "class" else np.float32
        split = Split(
            token_ids,
            lengths,
            labels=None if rows.labels is None else convert(rows.labels, kind),
            typed=self.has_types,
            characters=encoder.characters(),
            texts=encoder.texts(rows) if self.selection.first else (),
            content=_cache.digest([self.how, encoder.content()]),
            needed=needed,
        )
        return split, key

    def _report(self, encoder: SplitEncoder, ids: NDArray[np.int32], rows: int) -> None:
        """Warn about texts that are cut, and about characters that a trained tokenizer does not know.

        Args:
            ids: The token ids of the rows.
            rows: Rows that are tokenized.
        """
        data = self.data
        trained = self.model.trained
        cut = encoder.facts.get("cut")
        if cut:
            part = data.name_part(encoder.name)
            problem = describe_cut(part, cut, rows, "texts", data.options.max_length)
            data.messages.append(problem)
            logger.warning(problem)
        has_characters = trained is not None and trained.kind == "char"
        if has_characters and self.encoding.encoder is None and not self.has_types:
            _warn_about_unknown(encoder.name, ids, self.model.tokenizer.unk_token_id, data)


def _encode_rows(
    tokenizer: PreTrainedTokenizerBase, encoding: Encoding, rows: Sequence[Any]
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of some rows, and whether truncation shortened each."""
    if encoding.encoder is not None:
        for ids in encoding.encoder(tokenizer, rows, encoding.arguments):
            yield ids, False
        return
    special = special_tokens(tokenizer) if encoding.documents else None
    for ids, is_cut in encode_marked(tokenizer, rows, encoding.arguments):
        yield ids if special is None else special.complete(ids), is_cut


def _text_rows(model: TextModel, encoder: Encoder | None, rows: Rows) -> Sequence[Any]:
    """The rows of a split as ``_encode_rows`` gets them."""
    return join_columns(rows.texts, model) if encoder is None else rows.texts


def _warn_about_unknown(split: str, ids: NDArray[np.int32], unknown: int, data: TextData) -> None:
    count = sum(int((ids[span] == unknown).sum()) for span in spans(len(ids)))
    if count:
        text = f"The unknown token stands for {counted(count, 'character')} that the training texts lack."
        problem = Problem(text, code="unknown-characters", place=f"data: {split}")
        data.messages.append(problem)
        logger.warning(problem)


def _write_entry(entry: Path, data: TextData, splits: dict[str, Split], keys: dict[str, str]) -> None:
    """Write the entry of a ``data`` section. ``keys``: split -> the name of the entry with its token ids."""
    with _cache.written(entry) as made:
        described = {}
        for name, split in splits.items():
            total = len(split.lengths)
            if split.labels is not None:
                np.save(made / f"{name}.npy", split.labels, allow_pickle=False)
            if split.needed is not None:
                total = split.needed.total
                np.save(made / f"{name}-rows.npy", split.needed.ids, allow_pickle=False)
            facts = {"ids": keys[name], "characters": split.characters, "content": split.content, "rows": total}
            described[name] = facts
        content = {
            "splits": described,
            "classes": data.classes,
            "messages": [
                message if isinstance(message, str) else dataclasses.asdict(message) for message in data.messages
            ],
            "unreadable": data.unreadable,
        }
        (made / "data.json").write_text(json.dumps(content), encoding="utf-8")


def _read_entry(
    entry: Path, data: TextData, typed: bool, encoders: Callable[[], dict[str, SplitEncoder]]
) -> dict[str, Split] | None:
    """The splits of an entry; None if the entry, or token ids that it names, are missing.

    Args:
        encoders: Returns the encoder of each split, for rows that the entry does not have.
    """
    if not entry.is_dir():
        return None
    splits: dict[str, Split] = {}
    try:
        saved = json.loads((entry / "data.json").read_text(encoding="utf-8"))
        for name, described in saved["splits"].items():
            total = int(described["rows"])
            ids_and_lengths = _cache.read(entry.parent / described["ids"])
            if ids_and_lengths is None:
                return None
            ids, lengths = ids_and_lengths
            needed = None
            if total != len(lengths):
                rows = np.load(entry / f"{name}-rows.npy", allow_pickle=False)
                needed = NeededRows(rows, total, partial(_encoder_of, encoders, data, name))
                if len(rows) != len(lengths):
                    raise ValueError(f"{name}: {len(rows)} rows of {len(lengths)} texts")
            labels = None
            if data.options.label is not None:
                labels = np.asarray(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False))
            if labels is not None and len(labels) != total:
                raise ValueError(f"{name}: {len(labels)} labels of {total} texts")
            characters = int(described["characters"])
            content = str(described["content"])
            splits[name] = Split(ids, lengths, labels, typed, characters, content=content, needed=needed)
        data.classes = saved["classes"]
        data.unreadable = saved["unreadable"]
        data.messages = [message if isinstance(message, str) else Problem(**message) for message in saved["messages"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        _cache.remove_damaged(entry, error, "the data is read again", "data")
        return None
    data.log_messages()
    logger.info("tokens: all from %s", entry.parent)
    for name, split in splits.items():
        if split.needed is not None:
            split.needed.announce(name)
    return splits


def _encoder_of(encoders: Callable[[], dict[str, SplitEncoder]], data: TextData, name: str) -> SplitEncoder:
    """The encoder of a split. The first call reads the data again; the entry has its classes and messages already."""
    classes = data.classes
    messages = data.messages
    unreadable = data.unreadable
    encoder = encoders()[name]
    data.classes = classes
    data.messages = messages
    data.unreadable = unreadable
    return encoder

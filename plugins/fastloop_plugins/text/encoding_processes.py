"""Encodes the rows of a split in several processes, in order.

A tokenizer's own threads share the work of one call. The rest of the work is in Python, in one thread: reading the ids
of a call, templates of conversations, the tags of words. So large splits are encoded by forked processes, each of which
gets a portion of rows at a time. They get no signal of the terminal, and are killed with this process.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from fastloop.problem import Problem
from fastloop.runtime.forks import without_stdin
from fastloop.runtime.platform_support import cores, signal_at_end_of_parent

logger = logging.getLogger("fastloop")

T = TypeVar("T", bound="str | tuple[str, ...]")
Portion = list[Any]
"""Rows to encode at once."""
Encode = Callable[[Portion], Iterable[tuple[Sequence[int], bool]]]
"""Yields the ids of each row, and whether truncation shortened it."""

AT_ONCE = 1000
"""Rows that the tokenizer gets at once."""
CHARACTERS_AT_ONCE = 2**19
"""Characters of these rows."""
PARTS = 4
"""Parts of a portion that a forked process encodes one after another. It has one thread, which gains nothing from a
large part, and the tokenizer takes about 200 bytes for each character of one."""
FORKED_ROWS = 16_384
"""Rows from which on processes are started: that takes some tens of milliseconds."""
FORKED_CHARACTERS = 2**25
"""Characters of fewer rows from which on processes are started."""
PATIENCE = 30.0
"""Seconds without any CPU time after which an encoding process counts as hanging. Encoding waits for nothing: a process
without CPU time waits for a lock that another thread held when the process was forked."""


@dataclass
class EncodedPortion:
    """Rows that a process has encoded.

    Attributes:
        ids: Token ids of all rows, end to end.
        lengths: Token ids of each row.
        cuts: Whether truncation shortened each row.
    """

    ids: array[int]
    lengths: array[int]
    cuts: bytearray

    def rows(self) -> Iterator[tuple[array[int], bool]]:
        """Yield the ids of each row, and whether it was shortened."""
        start = 0
        for length, is_cut in zip(self.lengths, self.cuts, strict=True):
            yield self.ids[start : start + length], bool(is_cut)
            start += length


def portions(rows: Iterable[T], parts: int = 1) -> Iterator[list[T]]:
    """Divide rows into lists to tokenize at once: a tokenizer takes hundreds of bytes for each character.

    Args:
        parts: Divide each of these lists into about as many parts.
    """
    most_rows = max(AT_ONCE // parts, 1)
    most_characters = CHARACTERS_AT_ONCE // parts
    portion = list[T]()
    size = 0
    for row in rows:
        length = len(row) if isinstance(row, str) else sum(map(len, row))
        if portion and (len(portion) == most_rows or size + length > most_characters):
            yield portion
            portion = []
            size = 0
        portion.append(row)
        size += length
    if portion:
        yield portion


def encode_parts(encode: Encode, portion: Portion) -> Iterator[tuple[Sequence[int], bool]]:
    """Encode the rows of a portion in parts: the memory that this takes grows with the characters of a part."""
    for part in portions(portion, PARTS):
        yield from encode(part)


def count_processes(rows: int, characters: int) -> int:
    """The number of processes that encode rows; 1: this process does it.

    Args:
        rows: Number of rows.
        characters: Those of all rows.
    """
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return 1  # libraries of other systems do not work in forked processes, and a daemon may start none
    if rows < FORKED_ROWS and characters < FORKED_CHARACTERS:
        return 1
    return max(cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def encode_in_processes(
    encode: Encode, portions: Iterable[Portion], processes: int
) -> Iterator[tuple[Sequence[int], bool]]:
    """Yield the ids of each row of all portions, in order, and whether truncation shortened it.

    If a process cannot encode a portion, ends or hangs, this process encodes the portion. So errors are raised here,
    after the rows before.

    Args:
        encode: Encodes a portion. The result must not depend on other portions.
    """
    workers = deque[EncodingProcess]()
    try:
        unsent = iter(portions)
        for _ in range(processes):
            portion = next(unsent, None)
            if portion is not None:
                workers.append(EncodingProcess(encode, portion))
        while workers:
            worker = workers.popleft()  # the one whose portion is next
            portion = worker.portion
            encoded = worker.receive()
            following = next(unsent, None)
            if following is None:
                worker.end()
            else:  # before the rows are used, so that the process does not wait for that
                worker.send(following)
                workers.append(worker)
            yield from encode(portion) if encoded is None else encoded.rows()
    finally:
        for worker in workers:
            worker.end()


class EncodingProcess:
    """A process that encodes one portion after another.

    Args:
        portion: Its first portion. It is forked with it: to send it to a process that hangs would take for ever.

    Attributes:
        portion: The portion that it encodes.
    """

    def __init__(self, encode: Encode, portion: Portion) -> None:
        self.portion = portion
        self._connection, child_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(child_end, encode, portion, os.getpid()), daemon=True)
        with warnings.catch_warnings(), without_stdin():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: none of them is needed
            self._process.start()
        child_end.close()

    def send(self, portion: Portion) -> None:
        """Begin with a portion. The result of the one before must have been received."""
        self.portion = portion
        with suppress(OSError):  # the process has ended, which ``receive`` reports
            self._connection.send(portion)

    def receive(self) -> EncodedPortion | None:
        """The encoded portion; None: it could not be encoded, or the process has ended. End a process that hangs."""
        try:
            used = -1.0
            while not self._connection.poll(PATIENCE):
                before = used
                used = self._cpu_seconds()
                if used == before:
                    self._end_hanging()
                    return None
            encoded: EncodedPortion | None = self._connection.recv()
        except (EOFError, OSError, psutil.NoSuchProcess):
            return None
        return encoded

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def _end_hanging(self) -> None:
        logger.warning(
            Problem(
                f"a process that encodes rows used no CPU time for {PATIENCE:g} seconds, and was ended. This process "
                "encodes its rows: the ids are the same.",
                code="encoding-process-hangs",
                place="data",
            )
        )
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.join()
        self._process.close()


def _serve(connection: Connection, encode: Encode, portion: Portion, parent: int) -> None:
    """Encode a portion, and then those from a connection, until this process is killed."""
    signal_at_end_of_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads do not exist in a forked process
    gc.freeze()  # a collection would copy the pages of the parent's objects
    logging.disable(logging.CRITICAL)  # a portion that fails is encoded again by the parent, which logs
    while os.getppid() == parent:
        try:
            encoded = _encode(encode, portion)
        except Exception:
            encoded = None
        connection.send(encoded)
        portion = connection.recv()


def _encode(encode: Encode, portion: Portion) -> EncodedPortion:
    encoded = EncodedPortion(array("i"), array("i"), bytearray())
    for ids, is_cut in encode(portion):
        encoded.ids.extend(ids)
        encoded.lengths.append(len(ids))
        encoded.cuts.append(is_cut)
    return encoded

"""Records every change that a command makes under a folder: writes, names and fsyncs, in order.

``crash_states`` replays them."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).with_suffix(".c")
HEADER = struct.Struct("=4IQq")


class Record(NamedTuple):
    """One call of a traced process.

    Attributes:
        position: Where the record begins in the trace, in bytes.
        kind: ``O`` open with O_CREAT or O_TRUNC, ``W`` write, ``T`` truncate, ``S`` fsync or fdatasync, ``R`` rename,
            ``L`` link, ``U`` unlink or rmdir, ``M`` mkdir, ``K`` mark, ``P`` shared writable mapping.
        inode: The inode of the file or folder, for O, W, T, S and M.
        value: The offset of a write, the size of a truncate, O_TRUNC if an open has it, or the trace's length when an
            fsync began.
        first: The path at that time, or the text of a mark.
        second: The new path of a rename or link.
        data: The bytes that were written.
    """

    position: int
    kind: str
    inode: int
    value: int
    first: str
    second: str
    data: bytes


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Compile a library for LD_PRELOAD. Skips the test without a C compiler, or where the compiled library cannot be
    loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc or gcc)")
    library = folder / f"{source.stem}.so"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        pytest.skip(f"{source.name} does not compile here: {done.stderr.strip().splitlines()[-1]}")
    return library


def record(
    library: Path,
    root: Path,
    commands: Sequence[Sequence[str | Path]],
    environments: Sequence[Mapping[str, str]] = ({},),
) -> list[Record]:
    """Run commands at the same time, and return the changes that they made under the empty folder ``root``, in order.

    Args:
        environments: Variables to add, one dict for each command.

    Raises:
        AssertionError: A command fails.
    """
    trace = root.with_name(f"{root.name}.trace")
    trace.touch()
    added = {"LD_PRELOAD": str(library), "FILE_TRACE": str(trace), "FILE_TRACE_ROOT": str(root)}
    running = [
        subprocess.Popen(
            command, env={**os.environ, **added, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, more in zip(commands, environments, strict=True)
    ]
    for process in running:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    return list(read(trace))


def read(trace: Path) -> Iterator[Record]:
    """The records of a trace."""
    data = trace.read_bytes()
    position = 0
    while position < len(data):
        kind, first, second, size, inode, value = HEADER.unpack_from(data, position)
        ends = [position + HEADER.size]
        for length in (first, second, size):
            ends.append(ends[-1] + length)
        texts = [data[begin:end] for begin, end in itertools.pairwise(ends)]
        yield Record(position, chr(kind), inode, value, texts[0].decode(), texts[1].decode(), texts[2])
        position = ends[-1]

"""Folders as a loss of power may leave them, made from a trace of ``file_trace``.

The model is that of ALICE (Pillai et al., OSDI 2014) and CrashMonkey (Mohan et al., OSDI 2018), with the weakest
promises of POSIX:

* After ``fsync`` of a file, its data is durable. Until then, each change may be missing. The file may have its new
  length with zeros in place of the data, a first part of the data, or a last part of it.
* After ``fsync`` of a folder, the names in it are durable. Until then, any of their changes may be missing, in any
  order, except that changes of one name stay in order. A rename is atomic. ``fsync`` of a file does not make its name
  durable.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from file_trace import Record

VARIANTS = ("none", "all", "zeros", "first", "last")
"""Which of a file's changes that are not durable a crash has left."""


class Node:
    """A file or a folder. ``names`` holds the entries of a folder as the traced processes see them."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.names: dict[str, Node] = {}
        # (position, offset, data), or (position, size, None) of a truncate
        self.changes: list[tuple[int, int, bytes | None]] = []
        self.contents: dict[tuple[int, int, str, int], bytes] = {}

    def before(self, position: int) -> int:
        """Number of changes before a position."""
        return sum(1 for change in self.changes if change[0] < position)

    def content(self, durable: int, known: int, variant: str, cut: int) -> bytes:
        """The data after a crash, if the first ``durable`` of the first ``known`` changes are durable.

        Args:
            cut: For the variants "first" and "last", how many bytes of the other changes there are.
        """
        key = (durable, known, variant, cut)
        if key not in self.contents:
            before = _apply(self.changes[:durable])
            after = _apply(self.changes[:known])
            if variant == "none":
                after = before
            elif variant == "first":
                after = _apply(_cut(self.changes[:known], durable, cut))
            elif variant in ("zeros", "last"):
                left = min([len(before), *(size for _, size, data in self.changes[durable:known] if data is None)])
                first = len(after) if variant == "zeros" else min(cut, len(after))
                after = before[: min(left, first)].ljust(first, b"\0") + after[first:]
            self.contents[key] = after
        return self.contents[key]


class NameChange(NamedTuple):
    """An atomic change of names: (folder, name, the new node or None)."""

    position: int
    sets: tuple[tuple[Node, str, Node | None], ...]


class Crash(NamedTuple):
    """A state that a loss of power may leave.

    Attributes:
        files: Path below the root -> content; None: a folder.
        marks: The texts that were reported before.
    """

    files: dict[str, bytes | None]
    marks: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Create the files in an empty folder."""
        for name, content in sorted(self.files.items()):
            path = folder / name
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)


@dataclass
class History:
    """All changes of a trace.

    Args:
        root: The folder that was traced, as the commands left it.

    Raises:
        AssertionError: The trace does not lead to the files in ``root``: it misses a kind of change.
    """

    records: Sequence[Record]
    root: Path
    tree: Node = field(default_factory=lambda: Node(is_folder=True))
    changes: list[NameChange] = field(default_factory=list)
    syncs: list[tuple[int, int, Node]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes = {self.root.stat().st_ino: self.tree}
        self.places: dict[int, tuple[Node, str]] = {}
        for record in self.records:
            self._add(record)
        self.end = self.records[-1].position + 1
        for path in self.root.rglob("*"):  # files that a system call renamed, and that were not touched afterwards
            self._moved(self.end, path.stat().st_ino, str(path))
        left = {
            str(path.relative_to(self.root)): None if path.is_dir() else path.read_bytes()
            for path in self.root.rglob("*")
        }
        assert self.last() == left, "the trace does not lead to the files that are there"

    def positions(self) -> list[int]:
        """The positions at which crashes differ: after each record."""
        return [*(record.position + 1 for record in self.records), self.end + 1]

    def last(self) -> dict[str, bytes | None]:
        """The files at the end, if nothing is lost."""
        return self.at(self.end + 1)

    def at(self, position: int) -> dict[str, bytes | None]:
        """The files at a position, as the traced processes see them."""
        return self._files([change for change in self.changes if change.position < position], position, {})

    def crashes(self, limit: int, seed: int, every: int = 1) -> Iterator[Crash]:
        """The states after a crash at each position; a state that is the same with the same marks comes once.

        Args:
            limit: The most states for a position. If there are more, the most regular ones, and a random choice of the
                others.
            every: Take every n-th position only, from the last one back.
        """
        chance = random.Random(seed)
        seen: set[tuple[int, tuple[str, ...]]] = set()
        for position in self.positions()[::-every]:
            marks = tuple(text for at, text in self.marks if at < position)
            for names, contents in self._choices(position, limit, chance):
                files = self._files(names, position, contents)
                key = (hash(frozenset(files.items())), marks)
                if key not in seen:
                    seen.add(key)
                    yield Crash(files, marks)

    # -- reading a trace -----------------------------------------------------------------------------------------------

    def _add(self, record: Record) -> None:
        at = record.position
        node = self.nodes.get(record.inode)
        if record.kind == "K":
            self.marks.append((at, record.first))
        elif record.kind in "OM":
            folder, name = self._split(record.first)
            found = folder.names.get(name)
            if found is None or found is not node:
                self.nodes[record.inode] = found = Node(is_folder=record.kind == "M")
                self._set(at, (folder, name, found))
            if record.value:
                found.changes.append((at, 0, None))
        elif record.kind in "RL":
            (folder, name), (target, new) = self._split(record.first), self._split(record.second)
            moved = folder.names[name]
            self._set(at, *([(folder, name, None)] if record.kind == "R" else []), (target, new, moved))
        elif record.kind == "U":
            folder, name = self._split(record.first)
            self._set(at, (folder, name, None))
        elif record.kind == "P":
            raise AssertionError(f"{record.first}: a shared mapping was written: such writes cannot be traced")
        elif node is not None:  # else a temporary file without a name
            self._moved(at, record.inode, record.first)
            if record.kind == "W":
                node.changes.append((at, record.value, record.data))
            elif record.kind == "T":
                node.changes.append((at, record.value, None))
            elif record.kind == "S":
                self.syncs.append((at, record.value, node))

    def _moved(self, at: int, inode: int, path: str) -> None:
        """Add the rename of a file that is elsewhere than the trace has it."""
        node = self.nodes.get(inode)
        if node in (None, self.tree) or path.endswith(" (deleted)"):
            return
        folder, name = self._split(path)
        if folder.names.get(name) is not node:
            self._set(at, (*self.places[id(node)], None), (folder, name, node))

    def _split(self, path: str) -> tuple[Node, str]:
        """The folder of a path, and its name there."""
        *folders, name = Path(path).relative_to(self.root).parts
        folder = self.tree
        for part in folders:
            folder = folder.names[part]
        return folder, name

    def _set(self, at: int, *sets: tuple[Node, str, Node | None]) -> None:
        for folder, name, node in sets:
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node
                self.places[id(node)] = folder, name
        self.changes.append(NameChange(at, sets))

    # -- states after a crash ------------------------------------------------------------------------------------------

    def _choices(
        self, position: int, limit: int, chance: random.Random
    ) -> Iterator[tuple[list[NameChange], dict[Node, bytes]]]:
        """The state that the changes before a position leave: the names, and the possible contents of each file."""
        synced: dict[Node, int] = {}
        for at, begun, node in self.syncs:
            if at < position:
                synced[node] = max(begun, synced.get(node, 0))
        known = [change for change in self.changes if change.position < position]
        durable = {
            change for change in known if any(change.position < synced.get(folder, 0) for folder, _, _ in change.sets)
        }
        open_names = [change for change in known if change not in durable]
        open_files = []
        for node in dict.fromkeys(node for change in known for _, _, node in change.sets if node is not None):
            first = node.before(synced.get(node, 0))
            end = node.before(position)
            if first < end:
                open_files.append((node, first, end, sum(len(data or b"") for _, _, data in node.changes[first:end])))

        def choice(chosen: set[NameChange], variants: Sequence[str]) -> tuple[list[NameChange], dict[Node, bytes]]:
            contents = {
                node: node.content(
                    first, end, variant, chance.randrange(size + 1) if variant in ("first", "last") else 0
                )
                for (node, first, end, size), variant in zip(open_files, variants, strict=True)
            }
            return _closed(known, durable, chosen), contents

        if 2 ** len(open_names) * len(VARIANTS) ** len(open_files) <= limit:
            for kept in itertools.product((False, True), repeat=len(open_names)):
                for variants in itertools.product(VARIANTS, repeat=len(open_files)):
                    yield choice(set(itertools.compress(open_names, kept)), variants)
            return
        everything = set(open_names)
        regular = [set(), everything, *(everything - {one} for one in open_names), *({one} for one in open_names)]
        regular += [set(open_names[:end]) for end in range(1, len(open_names))]
        pairs = list(itertools.product(regular, VARIANTS if open_files else VARIANTS[:1]))
        for names, variant in pairs[:limit]:
            yield choice(names, [variant] * len(open_files))
        for _ in range(limit - len(pairs)):
            odds = chance.random()
            yield choice(
                {change for change in open_names if chance.random() < odds},
                [chance.choice(VARIANTS) for _ in open_files],
            )

    def _files(
        self, names: Sequence[NameChange], position: int, contents: dict[Node, bytes]
    ) -> dict[str, bytes | None]:
        """Path -> content. A file that is not in ``contents`` has all of its changes before the position."""
        entries: dict[Node, dict[str, Node]] = {}
        for change in names:
            for folder, name, node in change.sets:
                if node is None:
                    entries.get(folder, {}).pop(name, None)
                else:
                    entries.setdefault(folder, {})[name] = node
        files: dict[str, bytes | None] = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in entries.get(folder, {}).items():
                if node.is_folder:
                    files[path + name] = None
                    walk(node, f"{path}{name}/")
                else:
                    end = node.before(position)
                    files[path + name] = contents[node] if node in contents else node.content(end, end, "all", 0)

        walk(self.tree, "")
        return files


def _closed(known: Sequence[NameChange], durable: set[NameChange], chosen: set[NameChange]) -> list[NameChange]:
    """The durable and chosen changes, without those that follow a missing change of the same name."""
    missing: set[tuple[Node, str]] = set()
    left = []
    for change in known:
        keys = {(folder, name) for folder, name, _ in change.sets}
        if change in durable or (change in chosen and not keys & missing):
            left.append(change)
        else:
            missing |= keys
    return left


def _apply(changes: Sequence[tuple[int, int, bytes | None]]) -> bytes:
    content = bytearray()
    for _, offset, data in changes:
        if data is None:
            content[:] = content[:offset].ljust(offset, b"\0")
        else:
            content[:] = content.ljust(offset, b"\0") if len(content) < offset else content
            content[offset : offset + len(data)] = data
    return bytes(content)


def _cut(
    changes: Sequence[tuple[int, int, bytes | None]], durable: int, cut: int
) -> list[tuple[int, int, bytes | None]]:
    """The durable changes, and the first ``cut`` bytes that the others write."""
    left = list(changes[:durable])
    for at, offset, data in changes[durable:]:
        if data is not None:
            data, cut = data[:cut], cut - len(data)
        left.append((at, offset, data))
        if cut < 0:
            break
    return left

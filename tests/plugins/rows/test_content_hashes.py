"""Hashes of data files: read once, and again when a file was written, replaced or touched.

Modules:
    plugins/fastloop_plugins/rows/content_hashes.py
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from fastloop_plugins.rows import content_hashes
from fastloop_plugins.rows.content_hashes import SIDE_FILE, ContentHashes


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are hashed. Files of a test are new, and count as settled."""
    monkeypatch.setattr(content_hashes, "SETTLED", -1.0)
    hashed, digest = list[str](), hashlib.file_digest

    def record(file: object, name: str) -> object:
        hashed.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", record)
    return hashed


def hashes(*names: str) -> list[str]:
    """The hashes of files in the current folder, by a new process."""
    return ContentHashes(Path()).of(Path(name) for name in names)


def test_an_unchanged_file_is_read_once(reads):
    Path("a").write_text("one")
    Path("b").write_text("two")
    first = hashes("a", "b")
    assert first == [hashlib.blake2b(text).hexdigest() for text in (b"one", b"two")]
    assert hashes("b", "a") == first[::-1]
    assert reads == ["a", "b"]


@pytest.mark.parametrize("change", ["written", "replaced", "touched", "same size and time"])
def test_a_file_that_may_have_changed_is_read_again(change, reads):
    path = Path("a")
    path.write_text("one")
    (before,) = hashes("a")
    state = path.stat()
    if change == "touched":
        os.utime(path, ns=(0, 0))
    elif change == "replaced":
        Path("b").write_text("two")
        os.utime("b", ns=(state.st_atime_ns, state.st_mtime_ns))
        Path("b").rename("a")
    else:
        path.write_text("two")
        if change == "same size and time":
            os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    (after,) = hashes("a")
    assert (after == before) == (change == "touched")
    assert reads == ["a", "a"]


def test_a_file_that_was_just_written_is_not_noted(monkeypatch, reads):
    monkeypatch.setattr(content_hashes, "SETTLED", 60.0)
    Path("a").write_text("one")
    assert hashes("a") == hashes("a")
    assert reads == ["a", "a"]
    assert not Path(SIDE_FILE).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": [[1, 2], "b"]}'])
def test_a_damaged_side_file_is_written_again(content, reads):
    Path("a").write_text("one")
    Path(SIDE_FILE).write_text(content)
    assert hashes("a") == hashes("a") == [hashlib.blake2b(b"one").hexdigest()]
    assert reads == ["a"]


def test_without_a_folder_every_file_is_read(reads):
    Path("a").write_text("one")
    for _ in range(2):
        ContentHashes(None).of([Path("a")])
    assert reads == ["a", "a"]


def test_a_folder_that_a_user_removes_meanwhile_is_made_again():
    Path("a").write_text("one")
    folder = Path("cache")
    folder.mkdir()
    known = ContentHashes(folder)
    folder.rmdir()
    known.of([Path("a")])
    assert (folder / SIDE_FILE).is_file()

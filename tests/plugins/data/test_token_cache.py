"""token-cache: token ids come from a cache on disk.

Modules:
    plugins/fastloop_plugins/_cache.py
    plugins/fastloop_plugins/_partial_entry.py
    plugins/fastloop_plugins/data/token_cache.py
    plugins/fastloop_plugins/text/tokens.py
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from log_lines import find_lines
from text_helpers import TINY, TINY_GPT, make_run

from fastloop import PluginError
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins import _partial_entry
from fastloop_plugins._cache import digest, read, read_or_write
from fastloop_plugins._mapped import mapping_of
from fastloop_plugins.data.token_cache import TokenCache
from fastloop_plugins.text import split_encoder
from fastloop_plugins.text import tokens as _text_tokens
from fastloop_plugins.text.data import TextData

TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text-classification": ({"config": TINY, "tokenizer": {"kind": "word"}}, {"label": "label", "max_length": 16}),
    "causal-lm": ({"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}, {"max_length": 16}),
}


def run(task: str, cache: str | None = "cache", text: str = "fine", **data: Any) -> Any:
    """A run of a task on a file of 40 texts."""
    model, options = TASKS[task]
    rows = "".join(f"{text} film number {index} {'indeed ' * (index % 7)},{index % 2}\n" for index in range(40))
    Path("a.csv").write_text("text,label\n" + rows)
    return make_run(
        task,
        model,
        {"files": {"train": "a.csv"}, **options, **data},
        objects=[TokenCache(folder=cache)] if cache else [],
    )


def count_entries() -> int:
    """The entries of the cache: one of token ids for each split, and one for the ``data`` section."""
    return len([path for path in Path("cache").iterdir() if path.is_dir()])


def samples(run: Any) -> dict[str, list[list[int]]]:
    return {
        split: [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
        for split, dataset in run.datasets.items()
    }


@pytest.mark.parametrize("task", TASKS)
def test_a_second_run_maps_the_same_token_ids_from_disk_and_tokenises_nothing(task, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "fastloop")
    plain = samples(run(task, cache=None))
    assert samples(run(task)) == plain
    assert count_entries() == 2, "train and evaluate"
    assert " from cache/" not in caplog.text
    monkeypatch.setattr(_text_tokens, "encode_marked", lambda *_: Unread())
    second = run(task)
    assert samples(second) == plain
    assert caplog.text.count(" from cache/") == 2
    assert mapping_of(second.datasets["train"].ids) is not None


class Unread:
    """A dataset that must not be iterated."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise AssertionError("tokenised again")


def test_other_texts_lengths_or_tokenizers_have_entries_of_their_own():
    run("text-classification")
    assert count_entries() == 2
    longer = samples(run("text-classification", max_length=5))
    assert count_entries() == 4
    assert max(map(len, longer["train"])) == 5
    run("text-classification", text="dull")
    assert count_entries() == 6
    run("causal-lm")
    assert count_entries() == 8


def pretrained(task: str, folder: str = "model", **data: Any) -> Any:
    """A run with a model and a tokenizer of a folder, which is made if it is not there, on the file that is there."""
    if not Path(folder).exists():
        first = run(task, cache=None)
        first.unwrap_model().save_pretrained(folder)
        first.plugins.plugins[0].text_model.tokenizer.save_pretrained(folder)
    options = {"files": {"train": "a.csv"}, **TASKS[task][1], **data}
    return make_run(task, {"name": folder}, options, objects=[TokenCache(folder="cache")])


def test_a_pretrained_tokenizer_is_known_by_its_files_wherever_they_lie():
    pretrained("text-classification", "one")
    shutil.copytree("one", "two")
    for name in ("two", str(Path("two").resolve())):
        pretrained("text-classification", name)
    assert count_entries() == 3, "train, evaluate, and which those are"


@pytest.mark.parametrize("task", TASKS)
def test_a_second_run_on_the_same_files_reads_no_text(task, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "fastloop")
    first = pretrained(task)
    said = [line for line in caplog.messages if line.startswith("data: ")]
    shutil.move("a.csv", "b.csv")  # the bytes count, not the name
    with monkeypatch.context() as patch:
        patch.setattr(TextData, "load", lambda *_: pytest.fail("read again"))
        second = pretrained(task, files={"train": "b.csv"})
    assert samples(second) == samples(first)
    assert mapping_of(second.datasets["train"].ids) is not None
    if task == "text-classification":
        assert second.datasets["train"].labels.tolist() == first.datasets["train"].labels.tolist()
        assert second.unwrap_model().config.id2label == first.unwrap_model().config.id2label
    assert [line for line in caplog.messages if line.startswith("data: ")][-1:] == said[-1:]
    assert find_lines(caplog, "tokens: cache")


def test_a_file_that_is_replaced_before_it_is_read_has_no_entry(monkeypatch):
    """Else its rows would be those of the file that was hashed."""
    load = TextData.load
    pretrained("text-classification")  # writes the model
    shutil.rmtree("cache")
    before = Path("a.csv").read_text()

    def load_replaced(data: TextData) -> Any:
        Path("a.csv").write_text(before.replace("film", "book"))
        return load(data)

    with monkeypatch.context() as patch:
        patch.setattr(TextData, "load", load_replaced)
        replaced = samples(pretrained("text-classification"))
    Path("a.csv").write_text(before)
    cached = samples(pretrained("text-classification"))
    shutil.rmtree("cache")
    assert cached == samples(pretrained("text-classification"))
    assert cached != replaced


@pytest.mark.slow
def test_other_bytes_or_options_are_read_again():
    first = pretrained("text-classification")
    seen = count_entries()
    for options in ({"limit": {"train": 7}}, {"validation_fraction": 0.5}, {"max_length": 5}):
        pretrained("text-classification", **options)
        assert count_entries() > seen, options
        seen = count_entries()
    Path("a.csv").write_text(Path("a.csv").read_text().replace("number 3 ", "NUMBER three "))
    assert samples(pretrained("text-classification"))["train"] != samples(first)["train"]
    assert count_entries() > seen


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["ids gone", "labels cut", "no JSON", "other labels", "facts without names"])
def test_data_whose_entry_is_not_whole_is_read_again(harm, caplog):
    expected = pretrained("text-classification")
    (entry,) = [path.parent for path in Path("cache").glob("*/data.json")]
    labels = entry / "train.npy"
    if harm == "ids gone":
        for path in Path("cache").glob("*/ids.bin"):
            shutil.rmtree(path.parent)
    elif harm == "no JSON":
        (entry / "data.json").write_text("{")
    elif harm == "facts without names":
        saved = json.loads((entry / "data.json").read_text())
        saved["splits"] = {name: list(facts.values()) for name, facts in saved["splits"].items()}
        (entry / "data.json").write_text(json.dumps(saved))
    elif harm == "labels cut":
        labels.write_bytes(labels.read_bytes()[:-4])
    else:
        np.save(labels, np.zeros(3, dtype=np.int64))
    for _ in range(2):
        found = pretrained("text-classification")
        assert samples(found) == samples(expected)
        assert found.datasets["train"].labels.tolist() == expected.datasets["train"].labels.tolist()
    assert caplog.text.count("is damaged") == (harm != "ids gone")


def test_a_damaged_entry_is_made_again(caplog):
    expected = samples(run("text-classification"))
    for number, entry in enumerate(sorted(Path("cache").iterdir())):
        file = entry / ("ids.bin", "lengths.npy")[number]
        file.write_bytes(file.read_bytes()[:-4])
    assert samples(run("text-classification")) == expected
    assert caplog.text.count("is damaged") == 2
    caplog.clear()
    assert samples(run("text-classification")) == expected
    assert "damaged" not in caplog.text


def test_nothing_is_left_of_an_entry_that_fails_and_other_users_cannot_read_one():
    def rows(start: int) -> Iterator[list[int]]:
        yield [1, 2]
        raise ValueError("a row that cannot be encoded")

    with pytest.raises(ValueError, match="cannot be encoded"):
        read_or_write(Path("cache"), "a", rows)
    assert list(Path("cache").iterdir()) == []
    ids, lengths = read_or_write(Path("cache"), "a", lambda start: [[1, 2], [], [3]][start:])
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3], [2, 0, 1])
    assert stat.S_IMODE(Path("cache/a").stat().st_mode) == 0o700
    assert sorted(path.name for path in Path("cache/a").iterdir()) == ["facts.json", "ids.bin", "lengths.npy"]
    assert read_or_write(Path("cache"), "empty", lambda _: [[]])[0].tolist() == []
    assert read_or_write(Path("cache"), "nothing", lambda _: [])[1].tolist() == []


def test_two_that_write_the_same_at_once_both_have_it():
    def rows(start: int) -> Iterator[list[int]]:
        yield [1, 2]
        read_or_write(Path("cache"), "a", lambda start: [[1, 2], [3]][start:])  # another process is quicker
        yield [3]

    assert read_or_write(Path("cache"), "a", rows)[0].tolist() == [1, 2, 3]
    assert [path.name for path in Path("cache").iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("largest", "smallest", "size"), [(2**16 - 1, 0, 2), (2**16, 0, 4), (2**15 - 1, -(2**15), 2), (2**15, -1, 4)]
)
def test_ids_take_two_bytes_if_all_of_them_fit_and_are_read_as_int32(largest, smallest, size):
    rows = [[1, largest, 0], [], [smallest, 7]]
    ids, lengths = read_or_write(Path("cache"), "a", lambda start: rows[start:], is_narrow=True)
    assert Path("cache/a/ids.bin").stat().st_size == 5 * size
    assert lengths.tolist() == [3, 0, 2]
    again = read(Path("cache/a"))
    assert again is not None
    for found in (ids, again[0]):
        assert found.tolist() == [1, largest, 0, smallest, 7]
        assert len(found) == 5
        for part in (found[1:4], np.asarray(found)[1:4], found[np.array([1, 2, 3])]):
            assert part.dtype == np.int32
            assert part.tolist() == [largest, 0, smallest]


@pytest.mark.parametrize("name", ['"int8"', "{", "7"])
def test_ids_of_an_unknown_type_are_written_again(name, caplog):
    read_or_write(Path("cache"), "a", lambda start: [[1, 2]][start:], is_narrow=True)
    Path("cache/a/type.json").write_text(name)
    assert read(Path("cache/a")) is None
    assert_problem(caplog, "damaged-cache tokens: cache/a")
    assert read_or_write(Path("cache"), "a", lambda start: [[1, 2]][start:], is_narrow=True)[0].tolist() == [1, 2]


def test_a_process_that_is_interrupted_while_ids_become_narrow_loses_none(monkeypatch):
    def interrupt(path: Path) -> None:
        if path.name == "ids.narrow":
            raise KeyboardInterrupt
        sync(path)

    sync = _partial_entry.sync
    monkeypatch.setattr(_partial_entry, "sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_or_write(Path("cache"), "a", lambda start: [[1, 2], [3]][start:], is_narrow=True)
    monkeypatch.setattr(_partial_entry, "sync", sync)
    assert read_or_write(Path("cache"), "a", lambda start: [[1, 2], [3]][start:], is_narrow=True)[0].tolist() == [
        1,
        2,
        3,
    ]
    assert [path.name for path in Path("cache").iterdir()] == ["a"]


# -- processes that are ended while they write -------------------------------------------------------------------------

NUMBERS = [list(range(number % 7)) for number in range(1000)]
"""Rows of token ids."""


def write_slowly(facts: dict[str, int]) -> None:
    """Write the rows, a part of a millisecond for each."""

    def rows(start: int) -> Iterator[list[int]]:
        for row in NUMBERS[start:]:
            facts["cut"] = facts.get("cut", 0) + (len(row) == 6)
            time.sleep(0.0005)
            yield row

    read_or_write(Path("cache"), "a", rows, facts)


@pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.3])
def test_after_sigkill_the_next_process_writes_only_the_rest_and_the_entry_is_the_same(seconds, monkeypatch, caplog):
    monkeypatch.setattr(_partial_entry, "ROWS", 50)
    caplog.set_level(logging.INFO, "fastloop")
    asked = list[int]()

    def rest(start: int) -> list[list[int]]:
        asked.append(start)
        facts["cut"] = facts.get("cut", 0) + sum(len(row) == 6 for row in NUMBERS[start:])
        return NUMBERS[start:]

    writer = multiprocessing.get_context("fork").Process(target=write_slowly, args=({},))
    writer.start()
    time.sleep(seconds)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    state = Path("cache/.a.partial/state.json")
    done = json.loads(state.read_text())["rows"] if state.exists() else 0
    facts: dict[str, int] = {}
    ids, lengths = read_or_write(Path("cache"), "a", rest, facts)
    assert asked == [done]
    assert done % 50 == 0
    assert lengths.tolist() == [len(row) for row in NUMBERS]
    assert ids.tolist() == [number for row in NUMBERS for number in row]
    assert facts == {"cut": sum(len(row) == 6 for row in NUMBERS)}
    assert [path.name for path in Path("cache").iterdir()] == ["a"]


@pytest.mark.parametrize("harm", ["ids cut", "no JSON", "more ids"])
def test_rows_of_an_ended_process_that_are_not_whole_are_written_again(harm, monkeypatch):
    monkeypatch.setattr(_partial_entry, "ROWS", 2)

    def interrupted(start: int) -> Iterator[list[int]]:
        yield from [[1, 2], [3], [4]]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_or_write(Path("cache"), "a", interrupted)
    folder = Path("cache/.a.partial")
    ids = (folder / "ids.bin").read_bytes()
    if harm == "ids cut":
        (folder / "ids.bin").write_bytes(ids[:-1])
    elif harm == "no JSON":
        (folder / "state.json").write_text("{")
    else:  # written, but not noted, when the process was ended
        (folder / "ids.bin").write_bytes(ids + b"rest")
    starts = list[int]()

    def rows(start: int) -> list[list[int]]:
        starts.append(start)
        return [[1, 2], [3], [4], [5, 6]][start:]

    found, lengths = read_or_write(Path("cache"), "a", rows)
    assert (found.tolist(), lengths.tolist()) == ([1, 2, 3, 4, 5, 6], [2, 1, 1, 2])
    assert starts == [2 if harm == "more ids" else 0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of files")
def test_a_second_process_does_not_go_on_with_the_rows_of_one_that_writes(monkeypatch):
    monkeypatch.setattr(_partial_entry, "ROWS", 1)
    starts = list[int]()

    def other(start: int) -> list[list[int]]:
        starts.append(start)
        return [[1, 2], [3]]

    def rows(start: int) -> Iterator[list[int]]:
        yield [1, 2]
        read_or_write(Path("cache"), "a", other)
        yield [3]

    assert read_or_write(Path("cache"), "a", rows)[0].tolist() == [1, 2, 3]
    assert starts == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="needs locks of files")
def test_rows_are_locked_until_they_are_an_entry(monkeypatch):
    rename = Path.rename
    locks = []

    def lock_and_rename(path: Path, target: Path) -> Path:
        locks.append(_partial_entry._lock(path))  # as another process does
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", lock_and_rename)
    read_or_write(Path("cache"), "a", lambda start: [[1, 2], [3]])
    assert locks == [None]
    assert sorted(path.name for path in Path("cache/a").iterdir()) == ["facts.json", "ids.bin", "lengths.npy"]


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupted_run_tokenises_only_the_rest(task, monkeypatch):
    plain = samples(run(task, cache=None))
    monkeypatch.setattr(_partial_entry, "ROWS", 8)
    encode, counts = _text_tokens.encode_marked, list[int]()

    def first_rows(*arguments: Any, **options: Any) -> Iterator[tuple[list[int], bool]]:
        for number, row in enumerate(encode(*arguments, **options)):
            if number == 20:
                raise KeyboardInterrupt
            yield row

    def counted(tokenizer: Any, texts: Any, arguments: Any, **options: Any) -> Iterator[tuple[list[int], bool]]:
        counts.append(len(texts))
        return encode(tokenizer, texts, arguments, **options)

    monkeypatch.setattr(_text_tokens, "encode_marked", first_rows)
    with pytest.raises(KeyboardInterrupt):
        run(task)
    monkeypatch.setattr(_text_tokens, "encode_marked", counted)
    assert samples(run(task)) == plain
    assert counts == [36 - 16, 4]


def test_the_log_has_the_speed_and_the_time_left(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "fastloop")
    monkeypatch.setattr(split_encoder, "PROGRESS", 0.0)
    rows = list(split_encoder.with_progress(iter("abc"), "tokens: train", 5, 10))
    assert rows == ["a", "b", "c"]
    shown = [
        re.fullmatch(r"tokens: train: (\d+) of 10 rows, \d+ rows/s, 0:00 min left", line) for line in caplog.messages
    ]
    assert [match and match[1] for match in shown] == ["6", "7", "8"]


def test_hash_depends_on_text_boundaries():
    assert len({digest(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["c", "ab"])}) == 5
    assert digest(["lone \ud800"]) != digest(["lone ?"])


def test_invalid_cache_folder_is_rejected():
    Path("file").write_text("")
    with expect_problem("folder-not-writable plugins.token-cache.folder file/cache", PluginError):
        run("text-classification", cache="file/cache")
    Path("link").symlink_to("gone")
    with expect_problem("folder-not-writable plugins.token-cache.folder the symbolic link link points to", PluginError):
        run("text-classification", cache="link/cache")


def test_the_users_cache_is_the_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    run("text-classification", cache="auto")
    assert len(list((tmp_path / "elsewhere" / "fastloop" / "tokens").iterdir())) == 2


posix = pytest.mark.skipif(os.name != "posix", reason="permission bits of POSIX")


@posix
def test_where_others_may_write_each_user_has_an_own_part():
    Path("shared").mkdir()
    Path("shared").chmod(0o777)
    first = samples(run("text-classification", cache="shared"))
    (part,) = Path("shared").iterdir()
    assert part.name == f"user-{os.getuid()}"
    assert stat.S_IMODE(part.stat().st_mode) == 0o700
    assert len(list(part.iterdir())) == 2
    assert samples(run("text-classification", cache="shared")) == first
    assert list(Path("shared").iterdir()) == [part]


@posix
@pytest.mark.parametrize("kind", ["a link", "a link to nothing", "open to others", "a file"])
def test_an_own_part_that_another_user_has_put_there_is_refused(kind):
    part, victim = Path(f"shared/user-{os.getuid()}"), Path("victim")
    Path("shared").mkdir()
    Path("shared").chmod(0o777)
    victim.mkdir(mode=0o700)
    if kind == "open to others":
        part.mkdir()
        part.chmod(0o777)
    elif kind == "a file":
        part.write_text("")
    else:
        part.symlink_to("../victim" if kind == "a link" else "../nothing")
    with expect_problem("folder-not-writable plugins.token-cache.folder", PluginError):
        run("text-classification", cache="shared")
    assert list(victim.iterdir()) == []
    assert not Path("nothing").exists()


@posix
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_the_users_cache_is_private_whatever_the_umask(mask, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    before = os.umask(mask)
    try:
        run("text-classification", cache="auto")
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path("cache/fastloop/tokens").stat().st_mode) == 0o700
    assert not list(Path("cache").rglob("user-*"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder where even root cannot write")
@pytest.mark.parametrize("home", ["file", "/proc/nonexistent"])
def test_a_home_that_cannot_be_used_is_named(home, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with expect_problem(f"folder-not-writable plugins.token-cache.folder {home}", PluginError):
        run("text-classification", cache="auto")
    assert sorted(path.name for path in Path().iterdir()) == ["a.csv", "file"]


def test_a_run_without_texts_is_warned_and_one_with_cached_texts_is_not(tiny_run, caplog):
    with caplog.at_level(logging.WARNING, "fastloop"):
        run("text-classification")
        run("text-classification")
        assert "token-cache" not in caplog.text
        tiny_run([TokenCache(folder="cache")])
    assert_problem(caplog, "no-effect token-cache:")

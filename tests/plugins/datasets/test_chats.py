"""The generated conversations: they alternate, differ, and repeat with their seed.

Modules:
    plugins/fastloop_plugins/datasets/chats.py
"""

from __future__ import annotations

import pytest

from fastloop_plugins.datasets.chats import ANIMALS, BRIEF, chats


def test_all_conversations_differ_and_alternate():
    splits = chats()
    rows = [str(row["messages"]) for split in splits.values() for row in split]
    assert len(set(rows)) == len(rows) == 1200
    for row in splits["test"]:
        roles = [message["role"] for message in row["messages"] if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        brief = row["messages"][0]["content"] == BRIEF
        answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert all((len(answer.split()) == 1) == brief for answer in answers)
        assert sum(animal in row["messages"][brief]["content"].split("?")[0].split() for animal in ANIMALS) == 1


def test_the_test_split_depends_on_the_seed_alone():
    assert chats(train=10, validation=150)["test"] == chats()["test"] != chats(seed=1)["test"]
    with pytest.raises(ValueError, match="there are 1200 conversations, and the splits need 1201"):
        chats(train=901)

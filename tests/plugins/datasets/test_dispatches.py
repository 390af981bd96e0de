"""The generated news lines: tags fit their words, names are ambiguous, and splits repeat with their seed.

Modules:
    plugins/fastloop_plugins/datasets/dispatches.py
"""

from __future__ import annotations

from fastloop_plugins.datasets.dispatches import SURNAMES, UNSEEN, dispatches


def test_tags_fit_and_names_have_every_type():
    splits, kinds = dispatches(), dict[str, set[str]]()
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1500, "validation": 200, "test": 300}
    for split, rows in splits.items():
        for row in rows:
            assert len(row["words"]) == len(row["tags"])
            for word, tag, before in zip(row["words"], row["tags"], ["O", *row["tags"]], strict=False):
                assert not tag.startswith("I-") or before[2:] == tag[2:]
                if word in SURNAMES:
                    kinds.setdefault(word, set()).add(tag[2:])
                    assert split == "test" or word not in UNSEEN
    assert len(SURNAMES) == len(set(SURNAMES))
    assert len(kinds.keys() & set(UNSEEN)) > 0.9 * len(UNSEEN), "the test split has names that training lacks"
    assert sum(len(found) == 3 for found in kinds.values()) > 0.7 * len(kinds)


def test_the_test_split_depends_on_the_seed_alone():
    assert dispatches(train=3, validation=2)["test"] == dispatches()["test"] != dispatches(seed=1)["test"]

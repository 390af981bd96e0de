"""The synthetic reviews: same seed same rows, disjoint balanced splits, true labels, out of reach for word counts.

Modules:
    plugins/fastloop_plugins/datasets/reviews.py
"""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import fastloop_plugins.datasets.reviews as module
from fastloop_plugins.datasets.reviews import KINDS, LABELS, LEXICON, PLURAL, SINGULAR, reviews


@pytest.fixture(scope="module")
def splits():
    return reviews()


@pytest.fixture(scope="module")
def many():
    return reviews(train=20000)["train"]


def words(text):
    return re.findall(r"\w+", text.lower())


# --- determinism -----------------------------------------------------------------------------------------------


def test_two_calls_give_identical_rows(splits):
    assert reviews() == splits


def test_another_seed_gives_other_rows(splits):
    assert reviews(seed=1) != splits


def test_rows_do_not_depend_on_the_process_or_its_hash_seed(splits):
    script = (
        "import hashlib; from fastloop_plugins.datasets.reviews import reviews; "
        "print(hashlib.sha256(repr(reviews()).encode()).hexdigest())"
    )
    expected = hashlib.sha256(repr(splits).encode()).hexdigest()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", script]
        folder = Path(module.__file__).parents[1]
        run = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=True, timeout=600
        )
        assert run.stdout.strip() == expected


def test_test_split_does_not_change_with_the_other_sizes(splits):
    assert reviews(train=10, validation=4)["test"] == splits["test"]


# --- shape -----------------------------------------------------------------------------------------------------


def test_sizes_and_columns(splits):
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 6000, "validation": 500, "test": 1000}
    for row in (row for rows in splits.values() for row in rows):
        assert list(row) == ["text", "label", "kind"]
        assert row["label"] in LABELS
        assert row["kind"] in KINDS


def test_no_text_occurs_twice_within_or_across_splits(splits):
    texts = [" ".join(words(row["text"])) for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts)


def test_labels_are_balanced_in_every_kind_and_kinds_are_even(splits):
    for rows in splits.values():
        count = Counter((row["kind"], row["label"]) for row in rows)
        assert all(count[kind, "positive"] == count[kind, "negative"] for kind in KINDS)
        assert max(count.values()) - min(count.values()) <= 1


def test_empty_splits_are_allowed_and_odd_sizes_are_not():
    assert reviews(train=2, validation=0, test=0)["test"] == []
    with pytest.raises(ValueError, match="validation split needs an even size"):
        reviews(validation=3)


# --- labels ----------------------------------------------------------------------------------------------------


def test_lexicon_does_not_contradict_itself():
    positive, negative = ({word for group in LEXICON[label] for word in group} for label in LABELS)
    assert not positive & negative
    assert all(len(set(group)) == len(group) for lexicon in LEXICON.values() for group in lexicon)


def opinion_words():
    polarity = {}
    for label, lexicon in LEXICON.items():
        polarity |= dict.fromkeys(lexicon.gradable + lexicon.extreme + lexicon.nouns, label)
        for verb in lexicon.verbs:
            head = verb.split()[0]
            polarity |= dict.fromkeys((head, head + "s", head + "es"), label)
    return polarity


POLARITY = opinion_words()
NEGATED = re.compile(
    r"\b(?:not|never|hardly|far from|anything but"
    r"|(?:nobody could call|wrong to call) the (?:" + "|".join(SINGULAR + PLURAL) + r"))(?: a)?$"
)


def opinions(text):
    """(label after negation, text before the word) for each opinion word; an independent parser of the grammar."""
    found = []
    for match in re.finditer(r"\w+", text.lower()):
        label = POLARITY.get(match.group())
        if label:
            before = text[: match.start()].lower().rstrip()
            if NEGATED.search(before):
                label = LABELS[label == "negative"]
            found.append((label, before))
    return found


def verdict(text, kind):
    found = opinions(text)
    if kind in ("plain", "negation"):  # all opinions agree once negation is read
        (label,) = {label for label, _ in found}
        return label
    (first, before_first), (second, before_second) = found
    assert first != second
    if kind == "intensifier":
        strong = [before.endswith(module.STRONG) for _, before in found]
        mild = [before.endswith(module.MILD) for _, before in found]
        assert sorted(strong) == sorted(mild) == [False, True]
        assert strong != mild
        return first if strong[0] else second
    between = before_second[len(before_first) :]
    conceded_second = re.search(r", (although|even if)\b", between)
    return first if conceded_second else second


def test_every_label_agrees_with_a_second_reading_of_the_text(splits):
    wrong = [row for rows in splits.values() for row in rows if verdict(row["text"], row["kind"]) != row["label"]]
    assert wrong == []


@pytest.mark.parametrize(
    ("pattern", "kind", "label"),
    [
        (r"It is hardly a bore, I would call it a \w+\.", "negation", "positive"),
        (r"It is hardly a gem, I would call it a \w+\.", "negation", "negative"),
        (r"and the [\w ]+ never drags?\.", "negation", "positive"),
        (
            r"Although the [\w ]+ shines?, the [\w ]+ (is|are) (dull|lazy|messy|bland|clumsy|tedious)\.",
            "contrast",
            "negative",
        ),
        (
            r"Although the [\w ]+ drags?, the [\w ]+ (is|are) (clever|moving|witty|lovely|fresh|vivid)\.",
            "contrast",
            "positive",
        ),
        (r"I expected a mess, but it is a \w+\.", "contrast", "positive"),
        (r"slightly dull but \w+ \w+\.", "intensifier", "positive"),
        (r"(truly|deeply) \w+ but \w+ dull\.", "intensifier", "positive"),
        (r"What a triumph!", "plain", "positive"),
        (r"It is a chore and", "plain", "negative"),
    ],
)
def test_labels_of_telling_phrases(many, pattern, kind, label):
    rows = [row for row in many if re.search(pattern, row["text"])]
    assert rows
    assert {(row["kind"], row["label"]) for row in rows} == {(kind, label)}


# --- out of reach for a bag of words ---------------------------------------------------------------------------


def test_each_hard_review_has_a_twin_of_the_same_words_and_the_other_label(splits):
    for rows in splits.values():
        bags = defaultdict(Counter)
        for row in rows:
            if row["kind"] != "plain":
                bags[tuple(sorted(words(row["text"])))][row["label"]] += 1
        assert all(count["positive"] == count["negative"] for count in bags.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_bag_of_words_reads_plain_reviews_and_guesses_at_the_rest(seed):
    text_features = pytest.importorskip("sklearn.feature_extraction.text")
    linear = pytest.importorskip("sklearn.linear_model")
    splits = reviews(seed=seed)
    vectorizer = text_features.CountVectorizer()
    features = vectorizer.fit_transform(row["text"] for row in splits["train"])
    model = linear.LogisticRegression(max_iter=1000).fit(features, [row["label"] for row in splits["train"]])
    predictions = model.predict(vectorizer.transform(row["text"] for row in splits["test"]))
    hits = defaultdict(list)
    for row, prediction in zip(splits["test"], predictions, strict=True):
        hits[row["kind"]].append(prediction == row["label"])
    accuracy = {kind: sum(hit) / len(hit) for kind, hit in hits.items()}
    assert accuracy["plain"] > 0.98
    for kind in ("negation", "contrast", "intensifier"):
        assert accuracy[kind] == pytest.approx(0.5, abs=0.02)
    assert sum(map(sum, hits.values())) / 1000 == pytest.approx(0.625, abs=0.02)

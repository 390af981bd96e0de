"""Metrics of entities, for tags in any order, for any division into updates, and over processes.

Modules:
    plugins/fastloop_plugins/tasks/tags/metrics.py
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import entity_reference
import forked
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tag_helpers import make, trained, write_jsonl, write_splits

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.tasks.tags.batches import word_logits_and_tags
from fastloop_plugins.tasks.tags.metrics import PREFIXES, SCORES, EntityScores, find_entities, tag_metrics

SCHEMES = [None, "IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]
STATES = ("hits", "predicted", "actual")
COUNTS = {
    None: {"LOC": (672, 804, 805), "PER": (651, 795, 794)},
    "IOB1": {"LOC": (294, 402, 419), "PER": (310, 442, 421)},
    "IOB2": {"LOC": (297, 384, 377), "PER": (295, 394, 387)},
    "IOE1": {"LOC": (225, 307, 324), "PER": (214, 315, 308)},
    "IOE2": {"LOC": (295, 384, 377), "PER": (292, 394, 387)},
    "IOBES": {"LOC": (182, 233, 226), "PER": (208, 251, 252)},
    "BILOU": {"LOC": (177, 231, 222), "PER": (196, 239, 237)},
}
"""Scheme -> type -> entities of random tags that are right, predicted and actual, as counted by seqeval 1.2.2."""


def names_of(scheme: str | None) -> list[str]:
    return ["O", *(f"{letter}-{kind}" for letter in PREFIXES[scheme] for kind in ("PER", "LOC", "A-B")), "I", "B"][
        : None if scheme is None else -2
    ]


def outputs(predicted: list[list[int]], actual: list[list[int]], tags: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of the task for sentences: a row for each word, and one after each sentence."""
    ids = [tag for sentence in predicted for tag in [*sentence, 0]]
    targets = [tag for sentence in actual for tag in [*sentence, IGNORED]]
    return torch.nn.functional.one_hot(torch.tensor(ids), tags).float(), torch.tensor(targets)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_scores_equal_those_of_the_reference(scheme, data):
    names = names_of(scheme)
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    tag = st.integers(0, len(names) - 1)
    predicted, actual = ([data.draw(st.lists(tag, min_size=size, max_size=size)) for size in sizes] for _ in range(2))
    actual = [
        [tag if data.draw(st.integers(0, 2)) else other for tag, other in zip(*pair, strict=True)]
        for pair in zip(predicted, actual, strict=True)
    ]
    cut = data.draw(st.integers(0, len(sizes)))
    metrics = tag_metrics(names, scheme, {}, {}, "here")
    for part in (slice(0, cut), slice(cut, None)):
        if predicted[part]:
            metrics.update(*outputs(predicted[part], actual[part], len(names)))
    found = metrics.compute()
    words = [[[names[tag] for tag in sentence] for sentence in sentences] for sentences in (actual, predicted)]
    for sentences in words:
        assert find_entities(sentences, scheme) == [entity_reference.spans(tags, scheme) for tags in sentences]
    counts = entity_reference.count(*words, scheme)
    for name, value in entity_reference.total(counts).items():
        # the reference returns 0 where there is nothing to find
        expected = value if any(find_entities(words[0], scheme)) else math.nan
        assert found[name].item() == pytest.approx(expected, nan_ok=True)
    assert found["accuracy"].item() == pytest.approx(entity_reference.accuracy(*words))
    rows = {row.pop("name"): row for row in metrics["f1"].classes}
    assert counts.keys() <= rows.keys()
    for kind, row in rows.items():
        right, guesses, wanted = counts.get(kind, (0, 0, 0))
        assert row == pytest.approx(entity_reference.scores(right, guesses, wanted) | {"samples": wanted})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counts_equal_those_of_seqeval(scheme):
    generator = random.Random(35)
    names = ["O", *(f"{letter}-{kind}" for letter in PREFIXES[scheme] for kind in ("PER", "LOC"))]

    def draw() -> int:
        return int(len(names) * generator.random())

    actual = [[draw() for _ in range(8)] for _ in range(500)][:250]
    predicted = [[tag if generator.random() < 0.8 else draw() for tag in tags] for tags in actual]
    scores = EntityScores("f1", names, scheme)
    scores.update(*outputs(predicted, actual, len(names)))
    found = zip(scores.types, zip(*(getattr(scores, state).tolist() for state in STATES), strict=True), strict=True)
    assert dict(found) == COUNTS[scheme]


def test_the_scores_update_once_for_all():
    metrics = tag_metrics(["O", "B-PER", "B-LOC"], None, {}, {}, "here")
    metrics.update(*outputs([[0, 1, 2]], [[0, 1, 1]], 3))
    metrics.update(*outputs([[0, 1, 2]], [[0, 1, 1]], 3))
    assert sorted(map(sorted, metrics.compute_groups.values())) == [["accuracy"], sorted(SCORES)]


def test_processes_add_their_counts():
    """As torchmetrics reduces states: their sum over processes."""
    parts = [([[1, 0, 1]], [[1, 0, 1]]), ([[0, 1], [1]], [[1, 1], [0]])]
    scores = [EntityScores("f1", ["O", "B-PER"], None) for _ in parts]
    for score, part in zip(scores, parts, strict=True):
        score.update(*outputs(*part, 2))
    whole = EntityScores("f1", ["O", "B-PER"], None)
    whole.update(*outputs(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], 2))
    for state, reduction in whole._reductions.items():
        total = reduction(torch.stack([getattr(score, state) for score in scores]))
        assert torch.equal(total, getattr(whole, state))


def test_words_of_a_batch_by_hand():
    """Two rows of the first sentence, one of the second without words, one of the third."""
    logits = torch.arange(24.0).reshape(4, 3, 2)
    sentences = torch.tensor([[0, -1, 0], [0, -1, -1], [-1, -1, -1], [-1, 2, -1]])
    labels = torch.tensor([[1, IGNORED, 0], [1, IGNORED, IGNORED], [IGNORED] * 3, [IGNORED, 0, IGNORED]])
    scores, targets = word_logits_and_tags(logits, {"sentences": sentences, "labels": labels, "rows": torch.arange(3)})
    assert targets.tolist() == [1, 0, 1, IGNORED, IGNORED, 0, IGNORED]
    assert scores.tolist() == [[0, 1], [4, 5], [6, 7], [0, 0], [0, 0], [20, 21], [0, 0]]


def test_a_scheme_must_fit_the_tags():
    with expect_problem("unknown-label 'B-LOC' IOE1", RecipeError):
        make(write_splits(), task={"scheme": "IOE1"})


IOB1 = [{"words": ["EU", "rejects", "German", "Dutch"], "tags": ["I-ORG", "O", "I-MISC", "B-MISC"]}] * 4
IOB2 = [{"words": ["EU", "rejects", "German", "Dutch"], "tags": ["B-ORG", "O", "B-MISC", "I-MISC"]}] * 4


@pytest.mark.parametrize(("rows", "scheme", "other"), [(IOB1, "IOB2", "IOB1"), (IOB2, "IOB1", "IOB2")])
def test_tags_that_do_not_follow_the_scheme_are_counted_and_the_scheme_they_follow_is_named(
    rows, scheme, other, caplog
):
    data = {"files": {"train": write_jsonl("t.jsonl", rows)}, "max_length": 16, "validation_fraction": 0}
    make(data, task={"scheme": scheme})
    (problem,) = find_problems(caplog, "wrong-scheme")
    assert_problem(problem, f"wrong-scheme train: 8 12 {scheme} {rows[0]['tags'][0]!r}")
    assert problem.proposals == [f"plugins.token-classification.scheme={other}"]
    caplog.clear()
    for fits in (other, None):
        make(data, task={"scheme": fits})
    assert find_problems(caplog, "wrong-scheme") == []


def test_parts_of_speech_have_accuracy_alone(caplog, cli):
    write_jsonl("pos.jsonl", [{"words": ["dogs", "bark"], "tags": ["NOUN", "VERB"]}] * 8)
    run = trained(
        {"files": {"train": "pos.jsonl", "validation": "pos.jsonl"}, "max_length": 16},
        task={"metrics": {"macro": {"type": "MulticlassF1Score"}}},
    )
    assert sorted(run.metrics) == ["accuracy", "macro"]
    assert_problem(caplog, "no-entities 'NOUN' scheme")
    code, out, _ = cli("predict", "run", "dogs bark")
    assert (code, list(json.loads(out))) == (0, ["words", "tags", "probabilities"])


def test_bilou_needs_its_scheme(caplog):
    metrics = tag_metrics(["O", "U-PER"], None, {}, {}, "here")
    assert sorted(metrics) == ["accuracy"]
    assert sorted(tag_metrics(["O", "U-PER"], "BILOU", {}, {}, "here")) == ["accuracy", *sorted(SCORES)]


@pytest.mark.slow
def test_two_processes_have_the_metrics_of_one(cli):
    """Training on two processes, and its evaluation, equal those of one process."""
    settings = {"optimizer": "AdamW", "epochs": 8}
    one = trained(write_splits(), **settings)
    assert cli("evaluate", "run", "--json", "one.json")[0] == 0
    make(write_splits(), plugins=["ddp"], output="two", **settings)
    for command in (["train", "recipe.yaml"], ["evaluate", "two", "--json", "two.json"]):
        done = forked.run("-m", "fastloop", *command, "--nproc", "2")
        assert done.returncode == 0, done.stdout + done.stderr
    found, expected = (json.loads(Path(f"{name}.json").read_text()) for name in ("two", "one"))
    assert found["world_size"] == 2
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    assert expected["metrics"] == pytest.approx(one.state.metrics["test"], rel=1e-6)  # `auto` packs
    assert found["entities"] == expected["entities"]
    assert 0 < found["metrics"]["f1"] < 1

"""The classes of a classifier's checkpoint: the run keeps their order, or logs a warning and initializes a new head.

Modules:
    plugins/fastloop_plugins/models/label_order.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import BERT, DISTILBERT, WORDS, save_checkpoint, text_run, write_rows
from log_lines import find_lines
from training_runs import execute
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from fastloop.run import Run
from fastloop.testing import assert_problem, find_problems

TASK = "text-classification"
LABELLED = {"label": "label"}


def teach(names: list[str], folder: str = "checkpoint", config: dict[str, Any] = DISTILBERT) -> Any:
    """A checkpoint that has learned the file's texts, with ``names`` for its ids, as another program would publish
    it."""
    save_checkpoint(AutoModelForSequenceClassification, config, folder, id2label=dict(enumerate(names)))
    model, words = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in Path("rows.jsonl").read_text().splitlines()]
    kinds = [next(kind for kind in WORDS if any(word in text for word in WORDS[kind])) for text in texts]
    targets = torch.tensor(
        [names.index(kind) if kind in names else list(WORDS).index(kind) % len(names) for kind in kinds]
    )
    batch, optimizer = words(texts, padding=True, return_tensors="pt"), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        torch.nn.functional.cross_entropy(model(**batch).logits, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(**batch).logits.argmax(1) == targets).all()
    model.save_pretrained(folder)
    return model


def head(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if not name.startswith(model.base_model_prefix)
    }


def body(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if name.startswith(model.base_model_prefix)
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def executed(run: Run) -> dict[str, Any]:
    return execute(run)["validation"]


@pytest.mark.slow
def test_text_labels_take_the_ids_of_a_checkpoint_with_the_same_names():
    write_rows(["A", "B"])
    teach(["B", "A"])
    run = text_run(TASK, "checkpoint", LABELLED, lr=1e-8, max_steps=1)
    assert executed(run)["accuracy"] == 1.0
    assert run.model.config.id2label == {0: "B", 1: "A"}


@pytest.mark.slow
def test_an_exported_model_gives_the_labels_of_the_data_through_a_pipeline():
    write_rows(["A", "B"])
    teach(["B", "A"])
    assert executed(text_run(TASK, "checkpoint", LABELLED, epochs=2))["accuracy"] == 1.0
    classify = pipeline("text-classification", model="run/model")
    assert [found["label"] for found in classify(["a fine film", "a dull film"])] == ["A", "B"]
    assert classify.model.config.label2id == {"B": 0, "A": 1}


def test_class_names_match_despite_case_and_spaces_with_a_message(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    write_rows(["positive", "Negative "])
    teach(["NEGATIVE", "POSITIVE"])  # learned in the order of the file: A, B
    model = AutoModelForSequenceClassification.from_pretrained("checkpoint")
    run = text_run(TASK, "checkpoint", LABELLED)
    assert same(head(run.model), head(model))
    assert run.model.config.id2label == {0: "Negative ", 1: "positive"}
    assert find_lines(caplog, "model.name=checkpoint 0 = Negative , 1 = positive")


def test_class_names_that_differ_only_in_case_stay_distinct(caplog):
    write_rows(["a", "A"])
    teach(["A", "B"])
    text_run(TASK, "checkpoint", LABELLED)
    assert_problem(caplog, "head-reinitialized")


@pytest.mark.parametrize(
    ("theirs", "ours", "model"),
    [
        (["A", "B"], ["x", "y"], DISTILBERT),
        pytest.param(["A", "B", "C"], ["A", "B"], DISTILBERT, marks=pytest.mark.slow),
        (["A", "B"], ["A", "B", "C"], DISTILBERT),
        (["LABEL_0", "LABEL_1"], ["A", "B"], BERT),
        pytest.param(["A", "B", "C"], [0, 1], BERT, marks=pytest.mark.slow),
    ],
    ids=["other names", "fewer", "more", "no names", "fewer numbers"],
)
def test_other_classes_start_the_head_fresh_from_the_seed_and_keep_the_body(theirs, ours, model, caplog):
    write_rows(ours)
    published = teach(theirs, config=model)
    runs = [text_run(TASK, "checkpoint", LABELLED, seed=seed).model for seed in (1, 1, 2)]
    names = ", ".join(f"{index} = {name}" for index, name in enumerate(theirs))
    problem, *_ = find_problems(caplog, "head-reinitialized classifier.bias")
    assert problem.place == "recipe.yaml: model.name"
    assert names in problem.text
    assert f"0 = {ours[0]}" in problem.text
    assert same(head(runs[0]), head(runs[1]))
    assert not same(head(runs[0]), head(runs[2]))
    assert all(same(body(found), body(published)) for found in runs)
    for name, tensor in head(runs[0]).items():
        learned = head(published)[name]
        assert tensor.shape != learned.shape or not torch.equal(tensor, learned), name
        if name.endswith("bias"):
            assert not tensor.any(), name
    assert runs[0].config.id2label == {index: str(name) for index, name in enumerate(ours)}


def test_numbers_are_the_ids_of_a_checkpoint_without_names():
    write_rows([0, 1])
    teach(["LABEL_0", "LABEL_1"])
    run = text_run(TASK, "checkpoint", LABELLED, lr=1e-8, max_steps=1)
    assert executed(run)["accuracy"] == 1.0
    assert run.model.config.id2label == {0: "LABEL_0", 1: "LABEL_1"}


def test_numeric_labels_are_ids_of_named_classes_with_a_message(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    write_rows([1, 0])
    teach(["B", "A"])
    run = text_run(TASK, "checkpoint", LABELLED, lr=1e-8, max_steps=1)
    assert executed(run)["accuracy"] == 1.0
    assert run.model.config.id2label == {0: "B", 1: "A"}
    assert "model.name=checkpoint: 0 = B, 1 = A" in caplog.text


def test_the_head_of_another_task_is_not_a_head_for_texts(caplog):
    write_rows(["A", "B"])
    tagger = save_checkpoint(AutoModelForTokenClassification, BERT, id2label={0: "A", 1: "B"})
    run = text_run(TASK, "checkpoint", LABELLED)
    assert_problem(caplog, "head-reinitialized (classifier.bias, classifier.weight)")
    assert not torch.equal(run.model.classifier.weight, tagger.classifier.weight)


def test_an_encoder_without_a_head_gives_no_warning(caplog):
    from transformers import AutoModel

    write_rows(["A", "B"])
    save_checkpoint(AutoModel, BERT)
    run = text_run(TASK, "checkpoint", LABELLED)
    assert not find_problems(caplog, "head-reinitialized")
    assert run.model.config.id2label == {0: "A", 1: "B"}


@pytest.mark.slow
def test_cached_tokens_get_the_order_of_the_checkpoint_in_use():
    """Two checkpoints with one tokenizer share a cache entry, and number the classes differently."""
    write_rows(["A", "B"])
    teach(["A", "B"], "one")
    teach(["B", "A"], "other")
    cache = {"token-cache": {"folder": "tokens"}}
    found = []
    entries = []
    for folder in ("one", "other"):
        run = text_run(TASK, folder, LABELLED, plugins=[cache], lr=1e-8, max_steps=1)
        found.append(executed(run)["accuracy"])
        entries.append({path.name for path in Path("tokens").iterdir() if path.is_dir()})
    assert found == [1.0, 1.0]
    assert entries[0]
    assert entries[0] == entries[1]


def test_a_head_for_several_labels_a_text_is_exported_as_one_for_one_label():
    write_rows(["A", "B"])
    save_checkpoint(
        AutoModelForSequenceClassification, BERT, id2label={0: "A", 1: "B"}, problem_type="multi_label_classification"
    )
    execute(text_run(TASK, "checkpoint", LABELLED))
    scores = pipeline("text-classification", model="run/model", top_k=None)(["a fine film"])
    assert sum(found["score"] for found in scores[0]) == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_f1_is_that_of_scikit_learn(classes):
    from sklearn.metrics import f1_score

    names = ["A", "B", "C"][:classes]
    lines = Path(write_rows(names)).read_text().splitlines()
    teach(names)
    # some are wrong
    rows = [json.loads(line) | ({"label": "A"} if index % 5 == 0 else {}) for index, line in enumerate(lines)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = text_run(TASK, "checkpoint", LABELLED, lr=1e-8, max_steps=1)
    f1 = executed(run)["f1"]
    targets, predictions = [], []
    with torch.no_grad():
        for batch in run.eval_loaders["validation"].batches():
            output = run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs)
            targets += output.targets.tolist()
            predictions += output.predictions.argmax(1).tolist()
    assert set(predictions) == set(targets) == set(range(classes))
    expected, other = (
        f1_score(targets, predictions, average=kind)
        for kind in (("binary", "macro") if classes == 2 else ("macro", "micro"))
    )
    assert f1 == pytest.approx(expected)
    assert expected != pytest.approx(other)

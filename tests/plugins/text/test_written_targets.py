"""Metrics of generated texts compare them with the texts of the data, for any tokenizer.

Modules:
    plugins/fastloop_plugins/text/written_targets.py
"""

from __future__ import annotations

import csv
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_helpers import make_run
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from training_runs import execute
from transformers import PreTrainedTokenizerFast

from fastloop.testing import find_problems
from fastloop_plugins._mapped import flat
from fastloop_plugins.tasks._seq2seq_parts import PairSequences, encode_rows, reference_texts
from fastloop_plugins.text.batches import padded
from fastloop_plugins.text.written_targets import TextDifference, pack_text, unpack_text

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "one", "two", "three", "four"]
SPECIAL = ["<pad>", "</s>", "<unk>"]
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def unigram(normalizer: Any = None) -> PreTrainedTokenizerFast:
    """As T5's, with the words, letters and signs of WORDS only."""
    pieces = [*SPECIAL, *(f"▁{word}" for word in WORDS)]
    letters = ["▁", *sorted({*"".join(WORDS), *",:."})]
    scores = [(piece, -1.0) for piece in pieces] + [(letter, -9.0) for letter in letters]
    backend = Tokenizer(models.Unigram(scores, unk_id=SPECIAL.index("<unk>")))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if normalizer is not None:
        backend.normalizer = normalizer
    return finished(backend)


def word_pieces() -> PreTrainedTokenizerFast:
    """As that of an uncased BERT."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS) + " , : ."] * 20, trainer)
    return finished(backend)


def byte_pairs() -> PreTrainedTokenizerFast:
    """As GPT-2's, whose end token is the unknown token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(WORDS * 20, trainer)
    return finished(backend, unknown="</s>")


def finished(backend: Tokenizer, unknown: str = "<unk>") -> PreTrainedTokenizerFast:
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token=unknown, model_max_length=64
    )


TOKENIZERS = {
    "unigram": unigram,
    "lower case": lambda: unigram(normalizers.Lowercase()),
    "one space": lambda: unigram(normalizers.Replace("  ", " ")),
    "word pieces": word_pieces,
    "byte pairs": byte_pairs,
}
TEXTS = [
    "red", "red cat", "{red: one}", "Red Cat", "red  cat", " red", "red ", "red , cat", "a\nb", "", "</s> red", "é",
    "漢字 red",
    "red cat dog bird one two three four red cat dog bird",
]  # fmt: skip


def references(tokenizer: Any, texts: list[str], most: int = 12) -> tuple[PairSequences, list[str]]:
    """The rows of these targets, and the texts that metrics compare with."""
    rows = encode_rows(tokenizer, [("red", text) for text in texts], {"max_length": 12, "max_target_length": most})
    dataset = PairSequences(*flat(rows))
    samples = [dataset[index] for index in range(len(dataset))]
    labels = [sample["labels"] for sample in samples]
    packed = [sample["reference"] for sample in samples]
    batch = {
        "labels": padded(labels, max(map(len, labels)), -100),
        "references": padded(packed, max(1, *map(len, packed)), 0),
    }
    return dataset, reference_texts(batch, tokenizer)


@pytest.mark.parametrize("most", [3, 12])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_references_are_the_texts_of_the_data(name, most):
    tokenizer = TOKENIZERS[name]()
    dataset, found = references(tokenizer, TEXTS, most)
    assert found == TEXTS
    written = [tokenizer.decode(dataset[index]["labels"], skip_special_tokens=True) for index in range(len(TEXTS))]
    changed = [text != other for text, other in zip(TEXTS, written, strict=True)]
    assert [len(dataset[index]["reference"]) > 0 for index in range(len(TEXTS))] == changed
    assert sum(finding.count for finding in dataset.find_unwritten(tokenizer)) == sum(changed)
    assert dataset.lengths.tolist() == [
        len(dataset[index]["input_ids"]) + len(dataset[index]["labels"]) for index in range(len(TEXTS))
    ]


@pytest.mark.parametrize(
    ("name", "text", "difference"),
    [
        ("unigram", "red cat", None),
        ("unigram", "{red: one}", TextDifference.UNKNOWN),
        ("unigram", "red cat dog bird one two three four red cat dog bird", TextDifference.CUT),
        ("unigram", " red", TextDifference.CHANGED),
        ("lower case", "Red", TextDifference.NORMALIZED),
        ("lower case", "Red!", TextDifference.UNKNOWN),
        ("one space", "red  cat", TextDifference.NORMALIZED),
        ("word pieces", "RED", TextDifference.NORMALIZED),
        ("word pieces", "red , cat", TextDifference.CHANGED),
        ("byte pairs", "{漢字}", None),
        ("byte pairs", "red </s> cat", TextDifference.CHANGED),
    ],
)
def test_the_reason_why_a_target_is_not_written(name, text, difference):
    tokenizer = TOKENIZERS[name]()
    dataset, _ = references(tokenizer, [text])
    expected = [] if difference is None else [(difference, 1, text)]
    found = dataset.find_unwritten(tokenizer)
    assert [(finding.difference, finding.count, finding.text) for finding in found] == expected


@pytest.mark.parametrize("text", ["", "a", "abc", "abcd", "漢字", "\ud800", "x" * 70_000])
def test_a_packed_text_is_the_same_text(text):
    packed = np.array(pack_text(text, TextDifference.CUT), np.int32)
    padding = np.zeros(3, np.int32)
    assert unpack_text(np.concatenate([packed, padding]).astype(np.int64)) == text
    assert unpack_text(padding) is unpack_text(padding[:0]) is None


def write_rows(path: str, pattern: str) -> None:
    rows = [
        {"text": f"{first} {second}", "target": pattern.format(first, second)} for first in WORDS for second in WORDS
    ]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def unwritten(caplog: Any) -> list[str]:
    """The warnings that name targets which the tokenizer does not write."""
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in lines if "targets" in line and "exact_match" in line]


@pytest.mark.parametrize("streaming", [False, True])
def test_one_warning_counts_the_targets_of_all_splits_before_training(streaming, caplog):
    unigram().save_pretrained("tokenizer")
    write_rows("train.jsonl", "{{{}: {}}}")
    write_rows("validation.jsonl", "{0} {1} {0} {1}")
    data = {"files": {"train": "train.jsonl", "validation": "validation.jsonl"}, "target": "target"}
    data |= {"max_length": 16, "max_target_length": 4}
    if streaming:
        data |= {"streaming": True, "shuffle_buffer": 0, "lanes": 1}
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = make_run("seq2seq", {"config": T5, "tokenizer": "tokenizer"}, data)
    (line,) = unwritten(caplog)
    for split, dataset in run.datasets.items():
        samples = [*dataset] if split == "train" and streaming else [dataset[index] for index in range(len(dataset))]
        count = sum(len(sample["reference"]) > 0 for sample in samples)
        found = re.findall(rf"{split}(?:, first rows)?: (\d+) of 100 targets", line)
        assert sum(map(int, found)) == count > 0
    assert run.state.step == 0


@pytest.fixture
def trained_on_braces() -> Any:
    unigram().save_pretrained("tokenizer")
    write_rows("rows.jsonl", "{{{}: {}}}")
    data = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "target": "target"}
    data |= {"max_length": 16, "max_target_length": 24}
    options = {"epochs": 15, "batch_size": 10, "eval_batch_size": 50, "lr": 1e-2, "evaluate_every": None}
    run = make_run({"seq2seq": {"generate": True}}, {"config": T5, "tokenizer": "tokenizer"}, data, **options)
    return run, execute(run)["validation"]


def test_exact_match_is_the_share_of_predictions_that_equal_their_targets(trained_on_braces, cli):
    from torchmetrics.text import BLEUScore, CHRFScore

    run, metrics = trained_on_braces
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    tokenizer = next(plugin for plugin in run.plugins if plugin.name == "seq2seq").text_model.tokenizer
    assert cli("predict", "run", "rows.jsonl", "--out", "out.csv")[0] == 0
    with Path("out.csv").open(newline="") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    decoded = [tokenizer.decode(tokenizer(row["target"])["input_ids"], skip_special_tokens=True) for row in rows]
    assert any(text == other for text, other in zip(texts, decoded, strict=True))  # as if they were right
    assert metrics["exact_match"] == 0 == sum(text == row["target"] for text, row in zip(texts, rows, strict=True))
    targets = [[row["target"]] for row in rows]
    assert metrics["bleu"] == pytest.approx(BLEUScore()(texts, targets).item())
    assert metrics["chrf"] == pytest.approx(CHRFScore(n_word_order=0)(texts, targets).item())


def test_references_reach_no_model():
    """A batch of a task that generates has them beside the inputs of the model."""
    unigram().save_pretrained("tokenizer")
    write_rows("rows.jsonl", "{{{}: {}}}")
    data = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "target": "target", "max_length": 16}
    model = {"config": T5, "tokenizer": "tokenizer"}
    runs = [make_run({"seq2seq": {"generate": generate}}, model, data) for generate in (True, False)]
    batches = [run.loaders.collators["train"]([run.datasets["train"][index] for index in range(3)]) for run in runs]
    assert set(batches[0].inputs) - set(batches[1].inputs) == {"references"}
    losses = [
        run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs).loss
        for run, batch in zip(runs, batches, strict=True)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("streaming", [False, True])
def test_answers_with_unknown_tokens_are_counted(streaming, caplog):
    unigram().save_pretrained("tokenizer")
    rows = [
        {"prompt": "red {", "completion": f"{word} {'}' * (index % 4 == 0)}"} for index, word in enumerate(WORDS * 3)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 16}
    data |= {"prompt": "prompt", "completion": "completion"}
    if streaming:
        data |= {"streaming": True, "shuffle_buffer": 0, "lanes": 1}
    model = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 16}
    with caplog.at_level(logging.WARNING, "fastloop"):
        make_run("causal-lm", {"config": model, "tokenizer": "tokenizer"}, data)
    count = sum("}" in row["completion"] for row in rows)
    (problem,) = find_problems(caplog, "unknown-tokens")
    assert re.findall(r"(\d+) of 30 ", str(problem)) == [str(count)] * 2

"""Causal language models: the loss is a mean over target tokens, however the batch is split or padded.

Modules:
    plugins/fastloop_plugins/datasets/stdlib_source.py
    plugins/fastloop_plugins/tasks/causal_lm.py
    plugins/fastloop_plugins/text/tokenizers.py
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from log_lines import find_lines
from text_helpers import TINY, TINY_GPT, make_run
from training_runs import execute

from fastloop import Plugin, hookimpl
from fastloop.errors import RecipeError
from fastloop.metric_modes import metric_modes
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins._cache import tokens_kept_in
from fastloop_plugins.checkpoints.checkpoint_best import CheckpointBest
from fastloop_plugins.datasets.stdlib_source import stdlib_source
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.text.chat.tokens import block_sequences

MODEL = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
DATA = {"files": {"train": "train.txt", "validation": "train.txt"}, "max_length": 16}
SHORT = {"max_length": 16}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True)
def _files():
    Path("train.txt").write_text("\n\n".join(f"one two three four five {i}" for i in range(40)))


def test_it_learns_and_the_exported_folder_predicts_the_same():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = make_run("causal-lm", MODEL, DATA, epochs=8)
    summary = execute(run)
    assert summary["validation"]["loss"] < 2.5 < math.log(300)
    assert summary["validation"]["perplexity"] == pytest.approx(math.exp(summary["validation"]["loss"]))
    model, tokenizer = AutoModelForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    ids = tokenizer("one two three", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == "one two three"
    with torch.no_grad():
        assert torch.equal(run.model.eval()(ids).logits, model(ids).logits)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_texts_are_joined_by_the_end_token_and_cut_into_blocks_without_loss():
    run = make_run("causal-lm", MODEL, DATA)
    tokenizer, dataset = run.plugins.plugins[0].text_model.tokenizer, run.datasets["train"]
    blocks = [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]
    assert {len(block) for block in blocks[:-1]} == {16}
    texts = tokenizer.decode([token for block in blocks for token in block]).split("<|endoftext|>")
    whole = Path("train.txt").read_text().split("\n\n")
    assert texts == [*whole, ""]


def test_weights_are_target_tokens_and_padding_has_no_part_in_the_loss():
    run = make_run("causal-lm", MODEL, DATA)
    collate, dataset = run.loaders.collators["train"], run.datasets["train"]
    long, short = dataset[0], {"input_ids": dataset[1]["input_ids"][:5]}
    batch = collate([long, short])
    assert (batch.tokens, batch.loss_weight) == (16 + 5, 15 + 4)
    assert batch.loss_weight == (batch.inputs["targets"] != -100).sum()

    def loss(batch):
        with torch.no_grad():
            return run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs).loss.item()

    apart = [collate([sample]) for sample in (long, short)]
    assert loss(batch) == pytest.approx(sum(loss(one) * one.loss_weight for one in apart) / batch.loss_weight, rel=1e-5)


def test_the_loss_is_that_of_transformers():
    run = make_run("causal-lm", MODEL, DATA)
    batch = run.loaders.collators["train"]([run.datasets["train"][0], run.datasets["train"][1]])
    model = run.model.eval()
    with torch.no_grad():
        ours = run.hooks.compute_loss(run=run, model=model, batch=batch.inputs).loss
        theirs = model(input_ids=batch.inputs["input_ids"], labels=batch.inputs["input_ids"]).loss
    torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_compile_includes_the_loss_in_its_graph():
    from torch._dynamo import register_backend
    from torch.nn.functional import cross_entropy

    called: list[set[object]] = []

    @register_backend(name="records_calls")
    def record(graph, inputs):
        called.append({node.target for node in graph.graph.nodes})
        return graph.forward

    execute(make_run("causal-lm", MODEL, DATA, [Compile(backend="records_calls", fullgraph=True)], max_steps=1))
    assert called
    assert all(cross_entropy in calls for calls in called)


def test_accumulated_micro_batches_of_unequal_length_give_the_loss_of_the_whole():
    def run(**train):
        made = make_run(
            "causal-lm",
            {"config": TINY_GPT | NO_DROPOUT, "tokenizer": MODEL["tokenizer"]},
            DATA,
            optimizer="SGD",
            lr=0.1,
            **train,
        )
        dataset = made.datasets["train"]
        dataset.lengths[:-1:2] -= 9  # each sample keeps its end: every second one is shorter
        execute(made)
        return made

    whole, split = run(), run(micro_batch_size=1)
    assert whole.state.step == split.state.step > 1
    assert whole.state.metrics["validation"]["loss"] == pytest.approx(
        split.state.metrics["validation"]["loss"], rel=1e-6
    )
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_padding_to_max_length_pads_the_short_last_block():
    run = make_run("causal-lm", MODEL, DATA | {"padding": "max_length"})
    last = {"input_ids": run.datasets["train"][0]["input_ids"][:3]}
    assert run.loaders.collators["train"]([last]).inputs["input_ids"].shape == (1, 16)


def test_a_split_of_less_than_two_tokens_has_nothing_to_learn():
    run = make_run("causal-lm", MODEL, DATA)
    with expect_problem("invalid-split recipe.yaml", RecipeError):
        run.plugins.plugins[0].check_dataset("test", block_sequences(np.zeros(1, np.int32), 8))


def test_an_encoder_is_refused_as_a_language_model():
    with expect_problem("invalid-value model.config 'distilbert'", RecipeError):
        make_run("causal-lm", {"config": {"model_type": "distilbert"}}, DATA)


@pytest.mark.slow
def test_the_standard_library_is_split_by_file_and_always_the_same():
    splits = stdlib_source(largest=20_000)
    paths = {split: [row["path"] for row in rows] for split, rows in splits.items()}
    assert not set(paths["train"]) & set(paths["validation"])
    assert "bisect.py" in paths["train"] + paths["validation"]
    assert not any("site-packages" in path or path.startswith("test/") for path in paths["train"])
    assert 0.05 < len(paths["validation"]) / (len(paths["train"]) + len(paths["validation"])) < 0.2
    assert all(0 < len(row["text"]) <= 20_000 for row in splits["train"])
    assert stdlib_source(largest=20_000) == splits


PLAY = "FIRST:\nSpeak, speak.\n\nALL:\n  Résolu.\r\n\n\n" * 30
"""A text with blank lines, spaces at the start of lines, and line ends of two kinds."""


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_characters_and_bytes_are_tokens_and_the_saved_tokenizer_is_the_same(kind):
    from transformers import AutoTokenizer

    Path("train.txt").write_bytes(PLAY.encode())
    data = {"files": {"train": "train.txt", "validation": "train.txt"}, "read": {"blank_lines": True}, "max_length": 16}
    run = make_run("causal-lm", {"config": TINY_GPT, "tokenizer": {"kind": kind}}, data)
    summary = execute(run)
    ids = run.datasets["train"].ids
    assert len(ids) == len(PLAY if kind == "char" else PLAY.encode()) + 1, "and the end token"
    saved = AutoTokenizer.from_pretrained("run/model")
    assert saved(PLAY, add_special_tokens=False)["input_ids"] == ids[:-1].tolist()
    assert saved.decode(ids[:-1]) == PLAY
    assert len(saved) == (len(set(PLAY)) if kind == "char" else 256) + 2
    assert summary["plugins"]


@pytest.mark.parametrize("task", ["text-classification", "seq2seq", "token-classification"])
@pytest.mark.parametrize("kind", ["char", "byte"])
def test_other_tasks_train_on_characters_and_bytes(task, kind):
    lines = [
        {"text": f"ab cd {i}", "label": i % 2, "target": f"cd {i}", "words": ["ab", "cd"], "tags": ["B-X", "O"]}
        for i in range(8)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    given = {
        "text-classification": (TINY, {"label": "label"}),
        "seq2seq": (
            {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            {"target": "target"},
        ),
        "token-classification": (TINY, {"words": "words", "tags": "tags"}),
    }
    config, columns = given[task]
    files = {"train": "rows.jsonl", "validation": "rows.jsonl"}
    run = make_run(task, {"config": config, "tokenizer": {"kind": kind}}, {"files": files, "max_length": 16, **columns})
    assert execute(run)["status"] == "completed"
    tokenizer = run.plugins.plugins[0].text_model.tokenizer
    units = tokenizer.convert_ids_to_tokens(tokenizer("cd", add_special_tokens=False)["input_ids"])
    assert units[-2:] == ["c", "d"]


@pytest.mark.parametrize(
    ("tokenizer", "data", "expected"),
    [
        ({"kind": "char", "vocab_size": 100}, {}, "unknown-option vocab_size"),
        ({"kind": "byte", "vocab_size": 300}, {}, "unknown-option vocab_size 256"),
        ({"kind": "char"}, {"streaming": True}, "unsupported-tokenizer"),
        ({"kind": "char"}, {"messages": "m"}, "unsupported-tokenizer"),
    ],
)
def test_options_that_characters_and_bytes_cannot_have_are_refused(tokenizer, data, expected):
    Path("rows.jsonl").write_text(json.dumps({"text": "ab", "m": [{"role": "user", "content": "ab"}]}))
    files = {"train": "rows.jsonl", "validation": "rows.jsonl"}
    with expect_problem(expected, RecipeError):
        make_run("causal-lm", {"config": TINY_GPT, "tokenizer": tokenizer}, {"files": files, "max_length": 16, **data})


def test_a_byte_tokenizer_streams_and_a_char_tokenizer_of_another_run_too():
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": f"one two {i}"}) for i in range(40)))
    files = {"train": "rows.jsonl", "validation": "rows.jsonl"}
    whole = make_run("causal-lm", {"config": TINY_GPT, "tokenizer": {"kind": "char"}}, {"files": files, **SHORT})
    execute(whole)
    Path("run/model").rename("saved")
    shutil.rmtree("run")
    stream = {"files": files, **SHORT, "streaming": True, "blocks": True}
    for tokenizer in ({"kind": "byte"}, "saved"):
        run = make_run("causal-lm", {"config": TINY_GPT, "tokenizer": tokenizer}, stream, max_steps=2)
        found = [sample["input_ids"].tolist() for sample in run.datasets["train"]]
        expected = run.plugins.plugins[0].text_model.tokenizer("one two 1", add_special_tokens=False)["input_ids"]
        assert len(expected) == len("one two 1")
        assert sum(map(len, found)) == sum(len(f"one two {i}") + 1 for i in range(40))
        assert execute(run)["validation"]["bits_per_character"] > 0
        shutil.rmtree("run")


def test_a_character_that_training_lacks_is_unknown_and_a_warning_counts_it(caplog):
    Path("other.txt").write_text("one zwei")
    data = {"files": {"train": "train.txt", "validation": "other.txt"}, **SHORT}
    make_run("causal-lm", {"config": TINY_GPT, "tokenizer": {"kind": "char"}}, data)
    assert_problem(caplog, "unknown-characters validation 1")


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_bits_per_character_are_the_bits_of_all_tokens_by_the_characters(kind, tmp_path):
    options = {"kind": kind} | ({"vocab_size": 300} if kind == "bpe" else {})
    texts = Path("train.txt").read_text().split("\n\n")
    found = []
    for _ in range(2):  # the second run reads the token ids from the cache
        with tokens_kept_in(tmp_path / "cache"):
            run = make_run("causal-lm", {"config": TINY_GPT, "tokenizer": options}, DATA)
        found.append(execute(run)["validation"])
    tokens = len(run.datasets["validation"].ids)
    expected = found[0]["loss"] / math.log(2) * tokens / sum(map(len, texts))
    assert [metrics["bits_per_character"] for metrics in found] == [pytest.approx(expected, rel=1e-12)] * 2
    assert list(metric_modes(run)) == ["loss", "perplexity", "bits_per_character"]


def test_evaluate_reports_the_bits_per_character_of_training(cli, tmp_path):
    recipe = {
        "model": MODEL,
        "data": DATA,
        "train": {"max_steps": 2, "batch_size": 4, "device": "cpu"},
        "output": "run",
    }
    Path("recipe.json").write_text(json.dumps(recipe))
    assert cli("train", "recipe.json")[0] == 0
    code, out, _ = cli("evaluate", "run", "--split", "validation", "--json", "-")
    assert code == 0
    trained = json.loads(Path("run/summary.json").read_text())["validation"]["bits_per_character"]
    assert json.loads(out)["metrics"]["bits_per_character"] == pytest.approx(trained, rel=1e-6)


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_a_resumed_run_has_the_same_tokenizer_and_the_same_loss(cli, kind):
    Path("train.txt").write_bytes(PLAY.encode())
    recipe = {
        "model": {"config": TINY_GPT | NO_DROPOUT, "tokenizer": {"kind": kind}},
        "data": {"files": {"train": "train.txt"}, "read": {"blank_lines": True}, "max_length": 16},
        "train": {"max_steps": 4, "save_every": 2, "batch_size": 4, "device": "cpu"},
    }
    Path("recipe.json").write_text(json.dumps(recipe))
    assert cli("train", "recipe.json", "output=whole")[0] == 0
    assert cli("train", "recipe.json", "output=parts", "train.max_steps=2")[0] == 0
    code, out, err = cli("train", "recipe.json", "output=parts", "--resume")
    assert code == 0, out + err
    whole, parts = (json.loads(Path(f"{name}/summary.json").read_text()) for name in ("whole", "parts"))
    assert parts["steps"] == 4
    assert parts["validation"] == whole["validation"]
    assert Path("whole/model/tokenizer.json").read_bytes() == Path("parts/model/tokenizer.json").read_bytes()


def test_a_file_with_blank_lines_is_one_text_and_its_end_is_held_out(caplog):
    Path("train.txt").write_bytes(PLAY.encode())
    model = {"config": TINY_GPT, "tokenizer": {"kind": "char"}}
    data = {"files": {"train": "train.txt"}, "read": {"blank_lines": True}, "max_length": 16}
    with caplog.at_level("INFO"):
        run = make_run("causal-lm", model, data)
    assert find_lines(caplog, "data: 10%")
    tokenizer = run.plugins.plugins[0].text_model.tokenizer
    train, held = (tokenizer.decode(run.datasets[split].ids[:-1]) for split in ("train", "validation"))
    assert train + held == PLAY
    assert len(held) == round(len(PLAY) / 10)


def test_blank_lines_are_for_txt_files_only():
    Path("rows.jsonl").write_text(json.dumps({"text": "ab"}))
    files = {"train": ["train.txt", "rows.jsonl"]}
    with expect_problem("unknown-option read.blank_lines data.files", RecipeError):
        make_run("causal-lm", MODEL, {"files": files, "read": {"blank_lines": True}, "max_length": 16})


def test_predict_continues_a_whole_file_with_blank_lines(cli):
    Path("train.txt").write_bytes(PLAY.encode())
    recipe = {
        "model": {"config": TINY_GPT | {"n_positions": 64}, "tokenizer": {"kind": "char"}},
        "data": {"files": {"train": "train.txt"}, "read": {"blank_lines": True}, "max_length": 16},
        "train": {"max_steps": 2, "batch_size": 4, "device": "cpu"},
        "output": "run",
    }
    Path("recipe.json").write_text(json.dumps(recipe))
    assert cli("train", "recipe.json")[0] == 0
    Path("prompt.txt").write_text("FIRST:\n\nSpeak")
    code, out, _ = cli("predict", "run", "prompt.txt", "plugins.causal-lm.max_new_tokens=5")
    assert code == 0
    (line,) = out.splitlines()
    assert len(json.loads(line)["text"]) == 5


@pytest.mark.parametrize("positions", [8, 12, 16])
def test_a_model_of_few_positions_predicts_several_prompts(cli, positions):
    """The check that padding changes no prediction generates no more tokens than the model has positions for."""
    Path("train.txt").write_text("\n".join(f"owl {index} sings" for index in range(20)))
    recipe = {
        "model": {"config": TINY_GPT | {"n_positions": positions}, "tokenizer": {"kind": "char"}},
        "data": {"files": {"train": "train.txt"}, "max_length": 8},
        "train": {"max_steps": 1, "batch_size": 4, "device": "cpu"},
        "output": "run",
    }
    Path("recipe.json").write_text(json.dumps(recipe))
    assert cli("train", "recipe.json")[0] == 0
    Path("prompts.txt").write_text("owl\nan owl sings\n")
    code, out, err = cli("predict", "run", "prompts.txt", "plugins.causal-lm.max_new_tokens=3")
    assert code == 0, err
    assert [len(json.loads(line)["text"]) for line in out.splitlines()] == [3, 3]


class Watch(Plugin):
    """Keeps the metrics of each evaluation."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    @hookimpl
    def after_evaluate(self, metrics):
        self.found.append(metrics["bits_per_character"])


def test_the_checkpoint_with_the_fewest_bits_per_character_is_the_best():
    model = {"config": TINY_GPT, "tokenizer": {"kind": "char"}}
    data = {"files": {"train": "train.txt", "validation": "train.txt"}, **SHORT}
    objects = [CheckpointBest(monitor="bits_per_character"), watch := Watch()]
    summary = execute(make_run("causal-lm", model, data, objects, epochs=3))
    assert summary["best"]["value"] == min(watch.found) < max(watch.found)

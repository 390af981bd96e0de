"""Encoder-decoders: the loss is a mean over target tokens, and predictions are those of transformers' ``generate``.

Modules:
    plugins/fastloop_plugins/tasks/_seq2seq_parts.py
    plugins/fastloop_plugins/tasks/seq2seq.py
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from log_lines import find_lines
from strategy_helpers import same
from strategy_runs import all_of
from text_helpers import TINY_GPT, make_run
from text_loops import BATCH, EPOCHS, LR, SEED, pretrained, trained
from training_runs import execute
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MBart50Tokenizer, NllbTokenizer

from fastloop.errors import FastloopError, PluginError, RecipeError
from fastloop.lifecycle import build
from fastloop.metric_modes import metric_modes
from fastloop.plugins.resolve import resolve
from fastloop.problem import Problem
from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem, expect_problem, find_problems

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
BART = {
    "model_type": "bart",
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
MIXTURES = {"model_type": "switch_transformers", "num_experts": 2}
MIXTURES |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
ENCODER_DECODERS = {
    "t5": T5,
    "switch_transformers": T5 | MIXTURES,
    "bart": BART,
    "mbart": BART | {"model_type": "mbart"},
    "plbart": BART | {"model_type": "plbart"},
}
TOKENIZER = {"kind": "bpe", "vocab_size": 300}
MODEL = {"config": T5, "tokenizer": TOKENIZER}
DATA = {
    "files": {"train": "rows.jsonl", "validation": "rows.jsonl"},
    "target": "short",
    "max_length": 32,
    "max_target_length": 12,
}
ROOT = Path(__file__).parents[3]
ROWS = [{"text": f"write number {i}" + " please" * (i * 7 % 4), "short": f"{i}" + " now" * (i % 3)} for i in range(20)]


@pytest.fixture(autouse=True)
def _files():
    write(ROWS)


def write(rows: list[dict[str, Any]], path: str = "rows.jsonl") -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def task_of(run: Any) -> Any:
    return next(plugin for plugin in run.plugins if plugin.name == "seq2seq")


def generated(folder: str, texts: list[str], **options: Any) -> list[str]:
    """The text for each input by transformers alone, one at a time."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=32, return_tensors="pt", return_token_type_ids=False)
        ids = model.generate(**inputs, max_new_tokens=12, **options)
        found.append(tokenizer.decode(ids[0], skip_special_tokens=True))
    return found


def plain_loop(folder: str) -> tuple[dict[str, torch.Tensor], float]:
    """Train with SGD on the batches that fastloop documents, with transformers' loss. Returns the weights, and their
    loss on all rows."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.0)

    def loss(rows: list[dict[str, str]]) -> torch.Tensor:
        inputs = tokenizer(
            [row["text"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False
        )
        labels = tokenizer(
            text_target=[row["short"] for row in rows], padding=True, return_tensors="pt", return_token_type_ids=False
        )
        targets = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
        found: torch.Tensor = model(**inputs, labels=targets).loss
        return found

    model.train()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(SEED + epoch))
        for ids in order.split(BATCH):
            loss([ROWS[index] for index in ids.tolist()]).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return model.state_dict(), loss(ROWS).item()


@pytest.mark.slow
@pytest.mark.parametrize("config", [T5, BART], ids=["t5", "bart"])
def test_training_and_its_loss_are_those_of_a_plain_loop_of_transformers(config):
    folder = pretrained("seq2seq", config, DATA)
    run = trained({"name": folder}, DATA, ["seq2seq"])
    weights, loss = plain_loop(folder)
    assert run.state.metrics["validation"]["loss"] == pytest.approx(loss, rel=1e-6)
    assert run.state.metrics["validation"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    for name, value in run.unwrap_model().state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], ["length-bucketing"]], ids=["", "length-bucketing"])
def test_accumulated_micro_batches_give_the_step_of_the_whole_batch(plugins):
    def run(**train: Any) -> Any:
        made = make_run("seq2seq", MODEL, DATA, optimizer="SGD", lr=0.1, batch_size=20, epochs=2, **train)
        execute(made)
        return made

    whole, split = run(), run(micro_batch_size=2)
    assert whole.state.step == split.state.step == 2
    assert whole.state.metrics["validation"]["loss"] == pytest.approx(
        split.state.metrics["validation"]["loss"], rel=1e-6
    )
    for one, other in zip(whole.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of T5's position biases, which nothing changes in place
def test_two_processes_give_the_numbers_of_one(tmp_path, processes):
    write(ROWS[:19], str(tmp_path / "rows.jsonl"))
    data = DATA | {"max_target_length": 3}  # cuts some targets: metrics compare with their whole texts
    base = {"recipe": {"model": MODEL, "data": data}, "train": {"epochs": 2, "micro_batch_size": 2}}
    task = {"seq2seq": {"generate": True}}
    one = processes(1, all_of, [base | {"name": "one", "plugins": [task]}], folder=tmp_path)[0].result["one"]
    runs = [base | {"name": name, "plugins": [task, name]} for name in ("ddp", "fsdp")]
    results = processes(2, all_of, runs, folder=tmp_path)[0].result
    metrics = one["summary"]["validation"]
    for name in ("ddp", "fsdp"):
        same(results[name], one, 1e-5)
        assert results[name]["summary"]["validation"] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
def test_it_learns_and_predictions_equal_generate_on_the_exported_model(cli):
    run = make_run({"seq2seq": {"generate": True}}, MODEL, DATA | {"prefix": "do: "}, epochs=25, lr=3e-2)
    metrics = execute(run)["validation"]
    assert metrics["loss"] < 1.5
    assert metrics["token_accuracy"] > 0.5
    inputs, targets = [f"do: {row['text']}" for row in ROWS], [row["short"] for row in ROWS]
    expected = generated("run/model", inputs)
    assert len(set(expected)) > 1
    assert metrics["exact_match"] == sum(one == other for one, other in zip(expected, targets, strict=True)) / len(ROWS)
    from torchmetrics.text import BLEUScore, CHRFScore

    references = [[target] for target in targets]
    assert metrics["bleu"] == pytest.approx(BLEUScore()(expected, references).item())
    assert metrics["chrf"] == pytest.approx(CHRFScore(n_word_order=0)(expected, references).item())
    assert set(metrics) == set(metric_modes(run))

    with Path("texts.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows({"text": row["text"]} for row in ROWS)
    assert cli("predict", "run", "texts.csv", "--chunk", "7", "--out", "out.jsonl")[0] == 0
    assert [json.loads(line)["text"] for line in Path("out.jsonl").read_text().splitlines()] == expected
    code, out, _ = cli("predict", "run", "--split", "validation", "--chunk", "9")
    assert (code, [json.loads(line)["text"] for line in out.splitlines()]) == (0, expected)
    code, out, _ = cli("predict", "run", ROWS[3]["text"], "plugins.seq2seq.num_beams=3")
    assert (code, json.loads(out)["text"]) == (0, generated("run/model", inputs[3:4], num_beams=3)[0])
    assert cli("evaluate", "run", "--split", "validation", "--json", "found.json")[0] == 0
    assert json.loads(Path("found.json").read_text())["metrics"] == metrics


@pytest.mark.slow
def test_drawn_texts_depend_on_the_seed(cli):
    execute(make_run("seq2seq", MODEL, DATA))

    def predict(*overrides: str) -> list[str]:
        code, out, _ = cli("predict", "run", "rows.jsonl", "plugins.seq2seq.temperature=1.5", *overrides)
        assert code == 0
        return [json.loads(line)["text"] for line in out.splitlines()]

    assert predict() == predict() != predict("train.seed=5")
    assert predict("plugins.seq2seq.top_k=1") == generated("run/model", [row["text"] for row in ROWS])


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".json"])
def test_every_format_gives_the_same_samples(suffix):
    path = f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif suffix == ".json":
        Path(path).write_text(json.dumps(ROWS))
    else:
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["short", "text"], delimiter="," if suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(ROWS)
    datasets = [
        make_run("seq2seq", MODEL, DATA | {"files": {"train": name}}).datasets["train"] for name in ("rows.jsonl", path)
    ]
    assert datasets[0].fingerprint() == datasets[1].fingerprint()


def test_a_sample_has_the_prefixed_input_and_the_target_with_their_end_tokens():
    run = make_run("seq2seq", MODEL, DATA | {"prefix": "write: "})
    tokenizer, sample = task_of(run).text_model.tokenizer, run.datasets["train"][5]
    assert tokenizer.decode(sample["input_ids"]) == "write: write number 5 please please please<|endoftext|>"
    assert tokenizer.decode(sample["labels"]) == "5 now now<|endoftext|>"
    assert run.datasets["train"].lengths[5] == len(sample["input_ids"]) + len(sample["labels"])
    config = run.unwrap_model().config
    assert config.decoder_start_token_id == config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("config", ENCODER_DECODERS.values(), ids=ENCODER_DECODERS)
def test_generated_texts_start_with_the_token_before_targets_in_training(config):
    run = make_run("seq2seq", {"config": config, "tokenizer": padding_tokenizer()}, DATA)
    model = run.unwrap_model()
    starts = set[int]()

    def record(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        starts.update(named["input_ids"][:, 0].tolist())

    model.get_decoder().register_forward_pre_hook(record, with_kwargs=True)
    batch = run.loaders.collators["train"]([run.datasets["train"][index] for index in range(4)])
    run.hooks.compute_loss(run=run, model=model, batch=batch.inputs)
    assert starts == {model.generation_config.decoder_start_token_id} == {model.config.decoder_start_token_id}


def padding_tokenizer() -> str:
    """Save a tokenizer whose padding token is not its end token."""
    tokenizer = task_of(make_run("seq2seq", MODEL, DATA)).text_model.tokenizer
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained("padding")
    return "padding"


def test_a_start_that_differs_from_that_of_training_is_refused_or_named(caplog):
    mbart = ENCODER_DECODERS["mbart"]
    with pytest.raises(RecipeError) as caught:
        make_run("seq2seq", MODEL | {"config": mbart}, DATA)
    assert_problem(caught.value.problem, "invalid-value model mbart padding bart")
    caplog.clear()
    model = {"config": mbart | {"decoder_start_token_id": 3}, "tokenizer": padding_tokenizer()}
    make_run("seq2seq", model, DATA)
    assert_problem(caplog, "other-start-token decoder_start_token_id mbart '<|endoftext|>'")


LANGUAGES = {"mbart50": ("en_XX", "ro_RO"), "nllb": ("eng_Latn", "ron_Latn")}


def save_tokenizer_of_languages(kind: str, **languages: str) -> dict[str, Any]:
    """Save a tokenizer of several languages. Returns the section ``model`` of a recipe that reads it."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"0123456789abcdefghijklmnopqrstuvwxyz"]
    if kind == "mbart50":
        tokenizer: Any = MBart50Tokenizer(vocab=[(piece, -1.0) for piece in pieces], **languages)
    else:
        tokenizer = NllbTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], **languages)
    tokenizer.save_pretrained("languages")
    path = Path("languages/tokenizer_config.json")
    saved = json.loads(path.read_text())
    if "src_lang" not in languages:  # save_pretrained writes its default, and files of the hub do not have it
        saved["src_lang"] = None
    path.write_text(json.dumps(saved))
    return {"config": ENCODER_DECODERS["mbart"], "tokenizer": "languages"}


def language_tokens(run: Any) -> tuple[str, str]:
    """The first tokens of an input and of a target: those of their languages."""
    tokenizer = task_of(run).text_model.tokenizer
    sample = run.datasets["train"][0]
    ids = [int(sample["input_ids"][0]), int(sample["labels"][0])]
    return tuple(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_languages_of_a_tokenizer_are_settings(kind, caplog):
    source, target = LANGUAGES[kind]
    model = save_tokenizer_of_languages(kind)
    data = DATA | {"max_target_length": 20}
    languages = {"source_language": target, "target_language": source}
    run = make_run("seq2seq", model, data | languages)
    assert language_tokens(run) == (target, source)
    assert not find_problems(caplog, "no-language")
    task_of(run).text_model.tokenizer.save_pretrained("exported")
    again = make_run("seq2seq", model | {"tokenizer": "exported"}, data)
    assert language_tokens(again) == (target, source)
    assert not find_problems(caplog, "no-language")
    for language in ({"source_language": "xx_XX"}, {"target_language": "xx_XX"}):
        with expect_problem("unknown-language data.target_language xx_XX", RecipeError):
            make_run("seq2seq", model, data | language)


@pytest.mark.parametrize("tokenizer", [{"kind": "byte"}, "padding"])
def test_languages_of_a_tokenizer_without_them_are_refused(tokenizer):
    padding_tokenizer()
    with expect_problem("unknown-language data.target_language", RecipeError):
        make_run("seq2seq", MODEL | {"tokenizer": tokenizer}, DATA | {"target_language": "ron_Latn"})


@pytest.mark.parametrize("kind", LANGUAGES)
def test_a_language_that_the_tokenizer_does_not_name_is_named(kind, caplog):
    source, target = LANGUAGES[kind]
    data = DATA | {"max_target_length": 20}
    for languages, unnamed in (
        ({"src_lang": source, "tgt_lang": target}, None),
        ({"src_lang": target}, f"targets '{target}'"),
        ({"tgt_lang": target}, f"inputs '{source}'"),
    ):
        caplog.clear()
        run = make_run("seq2seq", save_tokenizer_of_languages(kind, **languages), data)
        inputs = languages.get("src_lang", source)
        assert language_tokens(run) == (inputs, languages.get("tgt_lang", inputs))
        if unnamed is None:
            assert not find_problems(caplog, "no-language")
        else:
            assert_problem(caplog, f"no-language data: {unnamed} data.source_language data.target_language")


def test_weights_are_target_tokens_and_each_side_is_padded_to_its_longest():
    run = make_run("seq2seq", MODEL, DATA)
    collate, dataset = run.loaders.collators["train"], run.datasets["train"]
    long, short = dataset[3], dataset[0]
    batch = collate([long, short])
    sizes = [(len(sample["input_ids"]), len(sample["labels"])) for sample in (long, short)]
    assert batch.inputs["input_ids"].shape == (2, max(size for size, _ in sizes))
    assert batch.inputs["labels"].shape == (2, max(size for _, size in sizes))
    assert batch.inputs["attention_mask"].sum(1).tolist() == [size for size, _ in sizes]
    assert batch.loss_weight == (batch.inputs["labels"] != -100).sum() == sum(size for _, size in sizes)
    assert batch.tokens == batch.inputs["attention_mask"].sum()
    assert "attention_mask" not in collate([long]).inputs
    empty = collate([{"input_ids": short["input_ids"][:0], "labels": short["labels"]}])
    assert empty.inputs["input_ids"].tolist() == [[0]]

    padded = (
        make_run("seq2seq", MODEL, DATA | {"padding": "max_length"}).loaders.collators["train"]([long, short]).inputs
    )
    assert (padded["input_ids"].shape, padded["labels"].shape) == ((2, 32), (2, 12))
    with torch.no_grad():
        losses = [
            run.hooks.compute_loss(run=run, model=run.model.eval(), batch=inputs).loss
            for inputs in (batch.inputs, padded)
        ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_long_targets_are_cut_before_their_end_token_and_counted(caplog):
    write([*ROWS, {"text": "a", "short": "x y z " * 9}, {"text": "b", "short": "x y z " * 8}])
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = make_run("seq2seq", MODEL, DATA | {"files": {"train": "rows.jsonl"}, "validation_fraction": 0})
    assert len(find_problems(caplog, "unwritable-targets data: train: 2 22 12 data.max_target_length")) == 1
    assert not find_problems(caplog, "texts-cut data.max_length")
    tokenizer, dataset = task_of(run).text_model.tokenizer, run.datasets["train"]
    whole = tokenizer("x y z " * 9)["input_ids"]
    assert dataset[20]["labels"].tolist() == whole[:11] + whole[-1:]
    assert dataset[19]["labels"].tolist() == tokenizer(ROWS[19]["short"])["input_ids"]


def test_inputs_that_are_cut_are_counted(caplog):
    write([{"text": "w " * count, "short": "x y"} for count in (3, 9, 4, 40)])
    data = DATA | {"files": {"train": "rows.jsonl"}, "validation_fraction": 0, "max_length": 8}
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = make_run("seq2seq", MODEL, data)
    long = sum(len(task_of(run).text_model.tokenizer("w " * count)["input_ids"]) > 8 for count in (3, 9, 4, 40))
    assert_problem(caplog, f"texts-cut train: {long} 4 8 data.max_length {long / 4:.1%}")
    assert 0 < long < 4


@pytest.mark.slow
def test_the_token_cache_gives_the_same_samples(caplog):
    write([*ROWS, {"text": "a", "short": "x y z " * 9}])
    folder = pretrained("seq2seq", T5, DATA)
    runs = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "fastloop"):
            tree = {"model": {"name": folder}, "data": DATA, "train": {"device": "cpu"}, "output": "run"}
            recipe = make_recipe(tree | {"plugins": [{"token-cache": {"folder": "tokens"}}]}, Path("recipe.yaml"))
            runs.append(build(resolve(recipe)))
        assert_problem(caplog, "unwritable-targets 1 21 data.max_target_length")
    assert find_lines(caplog, "tokens: tokens")
    assert runs[0].datasets["train"].fingerprint() == runs[1].datasets["train"].fingerprint()


def test_a_tokenizer_that_adds_no_end_token_gets_one_for_targets():
    folder = pretrained(
        "causal-lm", TINY_GPT | {"n_positions": 64}, {"files": {"train": "rows.jsonl"}, "max_length": 32}
    )
    run = make_run("seq2seq", {"config": T5, "tokenizer": folder}, DATA | {"max_target_length": 4})
    tokenizer, dataset = task_of(run).text_model.tokenizer, run.datasets["train"]
    assert tokenizer("a")["input_ids"][-1] != tokenizer.eos_token_id
    assert all(dataset[index]["labels"][-1] == tokenizer.eos_token_id for index in range(20))
    assert max(len(dataset[index]["labels"]) for index in range(20)) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "plugin", ["activation-checkpointing", {"amp": {"dtype": "bf16"}}, {"length-bucketing": {"window": 2}}]
)
def test_plugins_train_it(plugin):
    name = plugin if isinstance(plugin, str) else next(iter(plugin))
    plain, run = (trained(MODEL, DATA, ["seq2seq", *more], output=str(len(more))) for more in ([], [plugin]))
    ours, expected = (made.state.metrics["validation"]["loss"] for made in (run, plain))
    if name == "activation-checkpointing":
        assert ours == expected
    else:
        assert ours != expected
        assert ours == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
def test_lora_trains_adapters_and_exports_the_merged_model(cli):
    pytest.importorskip("peft")
    run = trained(MODEL, DATA, [{"seq2seq": {"generate": True}}, {"lora": {"r": 4}}], epochs=4, lr=0.5)
    expected = generated("run/model", [row["text"] for row in ROWS])
    matches = sum(text == row["short"] for text, row in zip(expected, ROWS, strict=True)) / len(ROWS)
    assert run.state.metrics["validation"]["exact_match"] == matches
    assert cli("predict", "run", "rows.jsonl", "--out", "out.jsonl")[0] == 0
    assert [json.loads(line)["text"] for line in Path("out.jsonl").read_text().splitlines()] == expected


def refused(
    error: type[FastloopError] = RecipeError, model: Any = MODEL, plugins: Any = ("seq2seq",), **data: Any
) -> Problem:
    """The problem with which a run is refused."""
    tree = {"model": model, "data": DATA | data, "train": {"device": "cpu"}, "plugins": list(plugins), "output": "run"}
    recipe = make_recipe(tree, Path("recipe.yaml"))
    with pytest.raises(error) as caught:
        build(resolve(recipe))
    return caught.value.problem


def test_the_target_column_selects_the_task():
    tree = {"model": MODEL, "data": DATA, "output": "run"}
    names = resolve(make_recipe(tree, Path("recipe.yaml"))).plugins.names()
    assert "seq2seq" in names
    assert not {"causal-lm", "text-classification", "module"} & set(names)


def test_wrong_recipes_are_refused():
    assert_problem(refused(target=None), "missing-value recipe.yaml data.target data.target=COLUMN")
    assert_problem(refused(target="text"), "repeated-column data.target 'text' data.text")
    assert "data.label: the task 'seq2seq'" in str(refused(label="short"))
    problem = refused(model={"config": TINY_GPT, "tokenizer": TOKENIZER})
    assert_problem(problem, "unsupported-model model.config 'gpt2'")
    problem = refused(model={"config": BART, "tokenizer": TOKENIZER}, max_target_length=65)
    assert_problem(problem, "out-of-range recipe.yaml data.max_target_length 65 64")
    problem = refused(model={"config": BART, "tokenizer": TOKENIZER}, plugins=[{"seq2seq": {"max_new_tokens": 65}}])
    assert_problem(problem, "out-of-range recipe.yaml plugins.seq2seq.max_new_tokens 65 64")
    assert_problem(refused(PluginError, plugins=["seq2seq", "packing"]), "excluded-plugin 'seq2seq' 'packing'")


def test_a_model_with_another_loss_is_refused_before_training():
    """ProphetNet's loss includes tokens further ahead."""
    sizes = {"hidden_size": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
    heads = dict.fromkeys(
        ("num_encoder_layers", "num_decoder_layers", "num_encoder_attention_heads", "num_decoder_attention_heads"), 1
    )
    problem = refused(model={"config": {"model_type": "prophetnet"} | sizes | heads, "tokenizer": TOKENIZER})
    pattern = r"recipe.yaml: model: ProphetNetForConditionalGeneration .* [\d.]+, .* [\d.]+, "
    assert re.match(pattern, str(problem)), problem


def test_wrong_rows_are_refused_by_their_column():
    assert_problem(refused(target="brief"), "unknown-column rows.jsonl 'brief' data.target")
    Path("rows.csv").write_text("text,short\na,b\n")
    problem = refused(files={"train": "rows.csv"}, target="brief")
    assert_problem(problem, "unknown-column rows.csv 'brief' data.target")
    write([{"text": "a", "short": 3}])
    assert_problem(refused(files={"train": "rows.jsonl"}), "invalid-row rows.jsonl, line 1: 'short' data.target 3")
    Path("rows.txt").write_text("a\nb\n")
    assert_problem(refused(files={"train": "rows.txt"}), "unknown-format rows.txt 'seq2seq'")


def test_unreadable_targets_are_skipped_when_asked_for(caplog):
    write([*ROWS, {"text": "a", "short": 3}])
    tree = {
        "model": MODEL,
        "data": DATA,
        "train": {"device": "cpu"},
        "plugins": ["seq2seq", "skip-unreadable"],
        "output": "run",
    }
    recipe = make_recipe(tree, Path("recipe.yaml"))
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = build(resolve(recipe))
    assert_problem(caplog, "rows-unreadable 1")
    assert len(run.datasets["train"]) == len(ROWS)


@pytest.mark.slow
def test_the_page_leads_from_a_file_to_predictions(cli):
    """The recipe and the commands of docs/tasks/seq2seq.md, with a tiny model and few rows."""
    page = (ROOT / "docs/tasks/seq2seq.md").read_text(encoding="utf-8")
    example = re.search(r"(?ms)^```csv\n(.*?)^```", page)
    recipe = re.search(r'(?ms)^```yaml title="news.yaml"\n(.*?)^```', page)
    assert example
    assert recipe
    folder = pretrained("seq2seq", T5, DATA | {"max_length": 512})
    header, line = example[1].splitlines()
    Path("news.csv").write_text("\n".join([header, *[line] * 20]) + "\n")
    Path("new.csv").write_text("\n".join([header, *[line] * 3]) + "\n")
    Path("news.yaml").write_text(recipe[1])
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```", page)
    commands = [
        shlex.split(command)[1:] for block in blocks for command in block.splitlines() if "seq2seq_dates" not in command
    ]
    assert len(commands) == 8
    for command in commands:
        more = [f"model.name={folder}", "train.device=cpu"] if command[0] in ("plan", "train") else []
        code, out, err = cli(*command, *more)
        assert code == 0, (command, err)
        if command[0] == "evaluate":
            assert {"loss", "perplexity", "token_accuracy", "exact_match", "bleu", "chrf"} <= set((out + err).split())
    with Path("summaries.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 3

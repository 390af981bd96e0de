"""Settings of ``generate``: prediction, metrics and exports use the same ones, of the model and of the recipe.

Modules:
    plugins/fastloop_plugins/text/generation.py
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from text_helpers import TINY_GPT, make_run
from training_runs import execute
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from fastloop import RecipeError
from fastloop.testing import find_problems
from fastloop_plugins.models.hub import MessagesOnce
from fastloop_plugins.text.generation import Generator, RowNoise, saves_void_settings

ROWS = [{"text": f"write number {i}", "short": f"{i}" + " now" * (i % 3)} for i in range(20)]
FILES = {"files": {"train": "rows.jsonl", "validation": "rows.jsonl"}, "max_length": 32}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64,
    "dropout": 0.0, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}  # fmt: skip
TOKENIZER = {"kind": "bpe", "vocab_size": 300}
KINDS = {
    "seq2seq": (BART, FILES | {"target": "short", "max_target_length": 12}),
    "causal-lm": (TINY_GPT | {"n_positions": 64}, FILES | {"prompt": "text", "completion": "short"}),
}
GENERATION: list[dict[str, Any]] = [
    {},
    {"min_length": 10},
    {"num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 7, "min_p": 0.01},
    {"temperature": 3.0, "no_repeat_ngram_size": 1},
    {"max_length": 3},
    {"max_new_tokens": 2, "forced_eos_token_id": 7},
    {"return_dict_in_generate": True, "output_scores": True},
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each task, which was trained for some steps."""
    folder = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_rows()
        for task, (config, data) in KINDS.items():
            execute(make_run(task, {"config": config, "tokenizer": TOKENIZER}, data, epochs=3, lr=3e-2))
            shutil.move("run/model", task)
    return {task: folder / task for task in KINDS}


def write_rows(rows: Any = ROWS) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_base(folder: Path, settings: dict[str, Any]) -> str:
    """A copy of a base with these settings in its ``generation_config.json``."""
    shutil.copytree(folder, "base")
    file = Path("base/generation_config.json")
    kept = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
    own = {name: value for name, value in json.loads(file.read_text()).items() if name in kept}
    file.write_text(json.dumps(own | settings))
    return "base"


def run_of(task: str, base: str, **options: Any) -> Any:
    write_rows()
    return make_run({task: options}, {"name": base}, KINDS[task][1], max_steps=1, evaluate_every=None)


def task_of(run: Any, name: str) -> Any:
    return next(plugin for plugin in run.plugins if plugin.name == name)


QUICK = ((2, False), (3, True))
"""Index of the checkpoint's settings, and whether the recipe has options: a pair of each runs in the quick tests."""


# -- the same settings everywhere --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param(settings, options, marks=[pytest.mark.slow] if (index, bool(options)) not in QUICK else [])
        for index, settings in enumerate(GENERATION)
        for options in ({}, {"num_beams": 2, "generation": {"min_length": 6, "length_penalty": 0.5}})
    ],
    ids=str,
)
def test_an_exported_encoder_decoder_generates_as_metrics_and_predictions_do(bases, settings, options, cli):
    run = run_of("seq2seq", make_base(bases["seq2seq"], settings), generate=True, **options)
    metrics = execute(run)["validation"]
    tokenizer, model = AutoTokenizer.from_pretrained("run/model"), AutoModelForSeq2SeqLM.from_pretrained("run/model")
    expected = []
    for row in ROWS:
        inputs = tokenizer(row["text"], return_tensors="pt", return_token_type_ids=False)
        expected.append(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
    pairs = zip(expected, [row["short"] for row in ROWS], strict=True)
    assert metrics["exact_match"] == sum(text == target for text, target in pairs) / len(ROWS)
    code, out, err = cli("predict", "run", "--split", "validation")
    assert code == 0, err
    assert [json.loads(line)["text"] for line in out.splitlines()] == expected
    config = GenerationConfig.from_pretrained("run/model")
    config.validate(strict=True)
    assert config.max_length == 13
    if options:
        assert (config.num_beams, config.min_length, config.length_penalty) == (2, 6, 0.5)
    else:
        assert config.min_length == settings.get("min_length")


@pytest.mark.parametrize("settings", [GENERATION[index] for index in (2, 3, 4, 7)], ids=str)
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_language_model_with_any_settings_is_exported(bases, settings, is_changed):
    """Transformers refuses to save a changed config with settings that have no effect."""
    end = {"eos_token_id": 5} if is_changed else {}
    execute(run_of("causal-lm", make_base(bases["causal-lm"], settings | end)))
    found = json.loads(Path("run/model/generation_config.json").read_text())
    for name in ("max_length", "min_length", "no_repeat_ngram_size", "num_beams", "do_sample"):
        assert found.get(name) == settings.get(name)
    if settings.get("do_sample") or (not is_changed and saves_void_settings()):
        assert found.get("temperature") == settings.get("temperature")


def test_settings_of_a_language_model_hold_in_predictions_and_exports(bases, cli):
    base = make_base(bases["causal-lm"], {"no_repeat_ngram_size": 1})
    execute(run_of("causal-lm", base, max_new_tokens=8, generation={"no_repeat_ngram_size": None, "min_new_tokens": 8}))
    tokenizer, model = AutoTokenizer.from_pretrained("run/model"), AutoModelForCausalLM.from_pretrained("run/model")
    assert model.generation_config.min_new_tokens == 8
    assert model.generation_config.no_repeat_ngram_size is None
    inputs = tokenizer("write number 3", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    assert len(ids) == 8
    code, out, err = cli("predict", "run", "write number 3")
    assert code == 0, err
    assert json.loads(out)["text"] == tokenizer.decode(ids, skip_special_tokens=True)


# -- errors and warnings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"min_lenght": 3}, "min_length"),
        ({"max_length": 3}, "max_new_tokens"),
        ({"do_sample": True}, "temperature"),
        ({"temperature": 0.3}, "temperature"),
        ({"min_length": "3"}, "min_length"),
        ({"min_length": -1}, "min_length"),
        ({"early_stopping": True}, "num_beams"),
        ({"length_penalty": 2.0}, "num_beams"),
        ({"forced_bos_token_id": 300}, "forced_bos_token_id"),
        ({"suppress_tokens": [3, 300]}, "suppress_tokens"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused(task, settings, named):
    write_rows()
    config, data = KINDS[task]
    with pytest.raises(RecipeError) as caught:
        make_run({task: {"generation": settings}}, {"config": config, "tokenizer": TOKENIZER}, data)
    assert f"plugins.{task}.generation.{next(iter(settings))}: " in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize(
    ("settings", "is_forbidden"),
    [
        ({"min_length": 30}, [True] * 20),
        ({"min_new_tokens": 5}, None),
        ({"no_repeat_ngram_size": 1}, None),
        ({"suppress_tokens": [0]}, [True] * 20),
        ({"no_repeat_ngram_size": 0, "min_length": 0}, [False] * 20),
    ],
    ids=str,
)
def test_a_warning_names_the_setting_the_share_and_the_option(bases, task, settings, is_forbidden, caplog):
    base = make_base(bases[task], settings)
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = run_of(task, base)
    name = next(iter(settings))
    option = f"plugins.{task}.generation.{name}"
    lines = [record.getMessage() for record in caplog.records if option in record.getMessage()]
    if is_forbidden is not None:
        assert len(lines) == any(is_forbidden)
    if lines:
        assert f"{name}={settings[name]}" in lines[0]
        for split in ("train", "validation"):
            assert re.search(rf" 20 [\w ]*{split}", lines[0])
        if is_forbidden is not None:
            share = re.escape(f"({sum(is_forbidden) / 20:.1%})")
            assert re.search(rf"\b{sum(is_forbidden)} [\w ]*20 [\w ]*train {share}", lines[0])
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fastloop"):
        run = run_of(task, base, generation=dict.fromkeys(settings))
    assert option not in caplog.text
    assert getattr(run.model.generation_config, name) is None


def test_the_first_token_of_mbart_and_too_few_new_tokens_are_named(bases, caplog):
    base = make_base(bases["seq2seq"], {"forced_bos_token_id": 9})
    with caplog.at_level(logging.WARNING, "fastloop"):
        run_of("seq2seq", base, max_new_tokens=2)
    lines = [str(problem) for problem in find_problems(caplog, "forbidden-targets")]
    options = ("plugins.seq2seq.generation.forced_bos_token_id", "plugins.seq2seq.max_new_tokens")
    for option in options:
        assert sum(option in line for line in lines) == 1


# -- messages of transformers ------------------------------------------------------------------------------------------


class Messages(logging.Handler):
    """Collects the log records of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def messages() -> Any:
    handler, library = Messages(), logging.getLogger("transformers")
    library.addHandler(handler)
    yield handler.texts
    library.removeHandler(handler)


def test_messages_of_each_batch_come_once(bases, messages):
    model = AutoModelForCausalLM.from_pretrained(bases["causal-lm"])
    config = GenerationConfig(min_length=40, max_length=8, max_new_tokens=4, eos_token_id=0, pad_token_id=0)
    right = {"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}

    def write(once: MessagesOnce) -> list[str]:
        messages.clear()
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            for _ in range(3):
                Generator(model, once).generate(config, right)
        return [*messages, *(str(warning.message) for warning in recorded)]

    once = MessagesOnce()
    found = write(once)
    assert len(found) == len(set(found)) >= 3
    assert write(once) == []
    assert write(MessagesOnce()) == found
    assert model.generation_config != config


@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("settings", [{"max_length": 3}, {"early_stopping": True, "temperature": 3.0}], ids=str)
def test_predictions_of_several_batches_have_no_message(bases, task, settings, messages):
    run = run_of(task, make_base(bases[task], settings), max_new_tokens=4)
    batch = {"input_ids": torch.tensor([[5, 6], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
    messages.clear()
    for _ in range(3):
        assert len(task_of(run, task).predict(run=run, batch=batch)["text"]) == 2
    assert messages == []


def test_seeds_of_rows_draw_tokens_from_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 4000
    noise = RowNoise(range(count), 0.7, torch.device("cpu"))
    drawn = noise(torch.zeros(count, 1), logits.expand(count, -1)).argmax(1)
    shares = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(shares, (logits / 0.7).softmax(0), atol=0.025, rtol=0)

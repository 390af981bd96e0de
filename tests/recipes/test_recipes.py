"""The shipped recipes run: unchanged if that takes seconds, shortened if it takes longer."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from long_form import long_form_only
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe, shipped_recipes
from fastloop.runtime.hardware import Machine

SHIPPED = {
    "quickstart",
    "distilbert_imdb",
    "distilbert_imdb_baseline",
    "distilbert_imdb_cpu",
    "distilbert_imdb_gpu",
    "gpt_stdlib",
    "char_lm",
    "chat_animals",
    "seq2seq_dates",
    "tokens_names",
    "digits_module",
    "digits_images",
}


def train(name: str, *overrides: str, without: tuple[str, ...] = ()) -> dict:
    recipe = load_recipe(name, [*overrides, "train.device=cpu", "output=run"], without_plugins=without)
    return execute(build(resolve(recipe)))


@pytest.fixture(scope="module")
def tiny_distilbert(tmp_path_factory) -> Path:
    """A DistilBERT of two narrow layers with a tokenizer, as ``from_pretrained`` reads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("distilbert")
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words.train_from_iterator(
        ["a fine and moving film", "a dull and long film"], trainers.WordLevelTrainer(special_tokens=special)
    )
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=512, **names).save_pretrained(folder)
    torch.manual_seed(0)
    DistilBertModel(
        DistilBertConfig(vocab_size=len(words.get_vocab()), dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def imdb_like() -> list[str]:
    """Overrides that give the IMDB recipes local files of 60 short reviews."""
    lines = [
        json.dumps({"text": f"a {word} film " * (1 + index % 5), "label": label})
        for index in range(30)
        for word, label in (("fine", 1), ("dull", 0))
    ]
    Path("reviews.jsonl").write_text("\n".join(lines) + "\n")
    return [f"data.files.{split}=reviews.jsonl" for split in ("train", "validation", "test")]


@pytest.fixture
def plan(monkeypatch, capsys) -> Callable[[str], str]:
    """Run ``fastloop plan NAME -v`` in this process and return its output."""
    from fastloop.cli import main

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fastloop", "plan", name, "--verbose"])
        with pytest.raises(SystemExit) as exited:
            main()
        assert not exited.value.code
        return capsys.readouterr().out

    return run


def test_shipped_recipes_have_descriptions():
    shipped = shipped_recipes()
    assert set(shipped) == SHIPPED
    for path in shipped.values():
        assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_plan_explains_it_without_data_or_weights(plan, name):
    Path("input.txt").write_text("The file that the recipe char_lm names.")
    shown = plan(name)
    assert "slot task" in shown
    assert "batch " in shown


def test_distilbert_imdb_gpu_is_planned_on_a_gpu(plan, monkeypatch):
    """``fastloop plan`` as it answers on a machine with an H100."""
    h100 = Machine("cuda", "NVIDIA H100 80GB HBM3", ("fp32", "bf16", "fp16", "fp8"))
    monkeypatch.setattr("fastloop.runtime.hardware.this_machine", lambda device="auto": h100)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = plan("distilbert_imdb_gpu")
    names = [line.split()[1] for line in out.splitlines() if line[:3].strip().rstrip(".").isdecimal()]
    assert {"amp", "packing", "cls-last-layer", "fused-optimizer", "device-prefetch", "compile"} < set(names)
    assert "dataloader-workers" not in names
    assert {"checkpoint-best", "text-classification"} < set(names)
    assert names.index("cls-last-layer") < names.index("compile")
    for said in ("mode=reduce-overhead", "NVIDIA H100", "mixed_precision=bf16"):
        assert said in out


@pytest.mark.slow
def test_distilbert_imdb_gpu_trains_without_its_gpu(tiny_distilbert, imdb_like):
    given = [f"model.name={tiny_distilbert}", *imdb_like, "train.epochs=2", "train.lr=0.01"]
    summary = train("distilbert_imdb_gpu", *given, without=("compile",))  # which has tests of its own
    assert {"amp", "packing", "cls-last-layer", "fused-optimizer", "device-prefetch"} < set(summary["plugins"])
    assert summary["test"]["accuracy"] > 0.9


@pytest.mark.slow
@long_form_only
def test_quickstart_reaches_the_numbers_of_the_start_page():
    """With one thread: sums of another order of the same numbers may end 0.01 apart. The next test shows a change of
    these numbers after a twentieth of the steps."""
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
    promised = {
        split: float(value) for split, value in re.findall(r"(?m)^(validation|test) .*accuracy ([0-9.]+)", page)
    }
    assert promised.keys() == {"validation", "test"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        summary = train("quickstart")
    finally:
        torch.set_num_threads(threads)
    for split, value in promised.items():
        assert summary[split]["accuracy"] == pytest.approx(value, abs=0.01)


@pytest.mark.slow
def test_quickstart_begins_with_the_losses_of_the_start_page():
    """The first losses of the run whose last numbers the start page shows. If they change, run the test above in the
    long form: the page may be wrong, too. Another order of sums changes these losses by less than 1e-6."""
    train("quickstart", "train.max_steps=60", "train.log_every=20")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "split" not in line]
    assert losses == pytest.approx([0.69501, 0.69000, 0.70437], abs=1e-4)


def test_quickstart_shortened():
    summary = train("quickstart", "data.arguments={train: 800, validation: 200, test: 200}", "train.epochs=2")
    assert summary["status"] == "completed"
    assert summary["steps"] == 50
    assert 0.4 < summary["test"]["accuracy"] < 0.9
    assert summary["tokens_per_second"] > 0


@pytest.mark.slow
def test_chat_animals_shortened():
    summary = train("chat_animals", "data.arguments={train: 200, validation: 50, test: 50}", "train.epochs=2")
    assert summary["status"] == "completed"
    assert summary["test"]["perplexity"] < 30  # of 500 tokens


@pytest.mark.slow
def test_tokens_names_finds_names_that_training_lacks():
    summary = train("tokens_names")
    assert summary["status"] == "completed"
    assert summary["test"]["f1"] > 0.8


@pytest.mark.slow
def test_distilbert_imdb_with_a_tiny_model_and_local_files(tiny_distilbert, imdb_like):
    given = [f"model.name={tiny_distilbert}", *imdb_like, "train.epochs=2", "train.lr=0.01"]
    summary = train("distilbert_imdb", *given, without=("allocator",))  # which needs a process of its own
    assert {"cls-last-layer", "fast-dropout", "fused-optimizer", "packing", "checkpoint-best"} < set(summary["plugins"])
    written = load_recipe("run/recipe.yaml")
    assert {"cls-last-layer", "packing"} < set(written.plugins), "the run's recipe lists what auto selected"
    assert "auto" not in written.plugins
    assert summary["test"]["accuracy"] > 0.9
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained("run/model").num_labels == 2


@pytest.mark.slow
def test_distilbert_imdb_baseline_pads_all_to_512_and_has_no_speedup(tiny_distilbert, imdb_like):
    recipe = load_recipe(
        "distilbert_imdb_baseline",
        [f"model.name={tiny_distilbert}", *imdb_like, "train.max_steps=2", "train.device=cpu", "output=run"],
    )
    run = build(resolve(recipe))
    widths = {batch.inputs["input_ids"].shape[1] for batch in run.train_loader.batches()}
    assert widths == {512}
    assert execute(run)["plugins"] == [
        "log",
        "metric-check",
        "optimizer-check",
        "progress",
        "speed-check",
        "text-classification",
    ]


@pytest.mark.slow
def test_distilbert_imdb_cpu_has_every_line_at_work(tiny_distilbert, imdb_like, caplog):
    given = [
        f"model.name={tiny_distilbert}",
        *imdb_like,
        "train.epochs=2",
        "train.lr=0.01",
        "train.device=cpu",
        "output=run",
    ]
    recipe = load_recipe("distilbert_imdb_cpu", given, (), ("allocator",))  # which needs a process of its own
    summary = execute(build(resolve(recipe)))
    assert {"amp", "packing", "fast-dropout", "cls-last-layer", "fused-optimizer"} < set(summary["plugins"])
    assert "compile" not in summary["plugins"]
    assert summary["test"]["accuracy"] > 0.9
    assert "nothing to" not in caplog.text


@pytest.mark.slow
def test_gpt_stdlib_shortened():
    summary = train(
        "gpt_stdlib",
        "data.arguments={largest: 3000}",
        "data.limit={train: 150, validation: 10}",
        "train.epochs=1",
        "train.max_steps=15",
    )
    assert summary["status"] == "completed"
    assert summary["validation"]["perplexity"] < 4000, "below that of guessing"


@pytest.mark.slow
def test_char_lm_shortened():
    text = "".join(f"First:\n  Speak {number}, speak.\n\n" for number in range(200))
    Path("mine.txt").write_text(text)
    summary = train("char_lm", "data.files.train=mine.txt", "train.max_steps=30")
    assert summary["status"] == "completed"
    metrics = summary["validation"]
    # each character is a token, and the end token is one more
    held = round(len(text) / 10)
    assert metrics["bits_per_character"] == pytest.approx(metrics["loss"] / math.log(2) * (held + 1) / held)
    assert metrics["loss"] < math.log(len(set(text))), "below that of guessing"


@pytest.mark.slow
def test_digits_module_as_it_is():
    pytest.importorskip("sklearn")
    summary = train("digits_module")
    assert summary["test"]["accuracy"] > 0.96


@pytest.mark.slow
@long_form_only
def test_seq2seq_dates_as_it_is(cli):
    # generating texts for each epoch takes a quarter of the time
    summary = train("seq2seq_dates", "train.evaluate_every=null")
    assert summary["test"]["exact_match"] > 0.8
    written = {
        "the 5th of March, 2024": "2024-03-05",
        "Saturday, July 14th 1990": "1990-07-14",
        "3.12.2001": "2001-12-03",
    }
    for text, iso in written.items():
        code, out, _ = cli("predict", "run", text)
        assert code == 0
        assert json.loads(out.splitlines()[-1]) == {"text": iso}


@pytest.mark.slow
def test_seq2seq_dates_shortened():
    summary = train(
        "seq2seq_dates",
        "data.arguments={train: 1600, validation: 40, test: 100}",
        "train.epochs=1",
        "train.evaluate_every=null",
    )
    assert summary["status"] == "completed"
    assert "exact_match" in summary["test"]
    assert summary["test"]["loss"] < math.log(300) / 2, "half of that of guessing one of 300 tokens"


@pytest.mark.slow
def test_digits_images_as_it_is(monkeypatch, tmp_path):
    pytest.importorskip("sklearn")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    summary = train("digits_images")
    assert summary["test"]["accuracy"] > 0.9
    assert summary["test"]["top5_accuracy"] > 0.99

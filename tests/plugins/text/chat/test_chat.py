"""Chat data: the tokens that have a loss, rows that are cut or dropped, and the loss of a batch by every path.

Modules:
    plugins/fastloop_plugins/rows/unreadable.py
    plugins/fastloop_plugins/text/chat/template.py
    plugins/fastloop_plugins/text/chat/tokens.py
"""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_helpers import GPT, TRL, UNMARKED, byte_tokenizer
from strategy_helpers import same
from strategy_runs import all_of
from text_helpers import make_run
from torch.nn.functional import cross_entropy
from training_runs import execute

from fastloop.errors import RecipeError
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat import tokens as _tokens
from fastloop_plugins.text.chat.rows import Chat, read_chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer, answer_end
from fastloop_plugins.text.chat.tokens import SequencesWithTargets, encode_rows

MODEL = {"config": GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
DATA = {"files": {"train": "chats.jsonl", "validation": "chats.jsonl"}, "messages": "messages", "max_length": 64}
CHATS = DATA | {"chat_template": "chatml"}
FORMS = [["messages"], ["conversations"], ["instruction", "input", "output"]]


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def write(*chats: Any) -> None:
    Path("chats.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in chats), encoding="utf-8"
    )


@pytest.fixture(autouse=True)
def _files():
    write(*[chat(f"{i} + {i}", f"{2 * i}", *(("and then?", "ok" * (i % 4 + 1)) if i % 3 else ())) for i in range(16)])


def chat_ids(tokenizer: Any, messages: list[dict[str, Any]], train_on: str) -> tuple[list[int], list[int]]:
    return ChatRenderer(tokenizer, train_on).encode(Chat(messages))


@pytest.mark.parametrize("name", TRL)
def test_the_mask_is_that_of_trl(name):
    case = TRL[name]
    tokenizer = byte_tokenizer(case["template"] or CHATML, case["marks"])
    for row in case["rows"]:
        given = row.get("row", row)
        columns = next((names for names in FORMS if names[0] in given), [])
        text = read_chat(given, columns).dumps() if columns else (row["prompt"], row["completion"])
        form = "messages" if columns else "prompt"
        (signed,) = encode_rows(tokenizer, [text], {"form": form, "train_on": "assistant"})
        assert [max(token, ~token) for token in signed] == row["ids"]
        assert "".join(str(int(token >= 0)) for token in signed) == row["mask"]


def test_prefixes_give_the_mask_of_the_markers():
    marked, unmarked = (byte_tokenizer(template, ["<|im_start|>", "<|im_end|>"]) for template in (CHATML, UNMARKED))
    for row in TRL["chatml"]["rows"]:
        assert chat_ids(unmarked, row["messages"], "assistant") == chat_ids(marked, row["messages"], "assistant")
        assert set(chat_ids(unmarked, row["messages"], "all")[1]) == {1}


def test_a_template_that_rewrites_earlier_answers_needs_markers():
    first = (
        "{% for m in messages %}{{ m.role + ': ' + (m.content if loop.last else '(' + m.content + ')') }}{% endfor %}"
    )
    with pytest.raises(RowError, match=r"message 2 .*{% generation %}"):
        chat_ids(byte_tokenizer(first, []), chat("a", "b", "c", "d"), "assistant")
    with pytest.raises(RowError, match=r"first.* assistant"):
        chat_ids(byte_tokenizer(UNMARKED, []), chat("a", "b")[1:], "assistant")
    with pytest.raises(RowError, match=": no system"):
        chat_ids(byte_tokenizer("{{ raise_exception('no system') }}", []), chat("a", "b"), "assistant")


def test_rows_are_cut_after_their_last_token_with_a_loss():
    rows = [[~1, ~2, 3, 4, ~5], [~1, ~2, ~3, ~4, 5], [6, ~7], [], [~1, 2]]
    found = SequencesWithTargets(
        np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows]), max_length=3
    )
    assert [found[index]["input_ids"].tolist() for index in range(len(found))] == [[1, 2, 3], [1, 2]]
    assert [found[index]["targets"].tolist() for index in range(len(found))] == [[-100, 3, -100], [2, -100]]
    assert (found.cut, found.dropped, found.lengths.tolist()) == (2, 3, [3, 2])


@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("max_length", [2, 3, 50])
@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_the_last_token_with_a_loss_is_the_same_for_any_number_of_ids_at_once(at_once, max_length, drop, monkeypatch):
    monkeypatch.setattr(_tokens, "AT_ONCE", at_once)
    draw = np.random.default_rng(0)
    rows = [draw.integers(-5, 5, draw.integers(0, 9)).astype(np.int32) for _ in range(200)]
    found = SequencesWithTargets(np.concatenate(rows), np.array([len(row) for row in rows]), max_length, drop)
    expected = []
    for row in rows:
        kept = row[:max_length]
        with_loss = np.flatnonzero(kept[1:] >= 0) + 1
        if len(with_loss):
            expected.append(kept[: with_loss[-1] + 1])
        elif not drop:
            expected.append(kept[:0])
    assert [found[index]["input_ids"].tolist() for index in range(len(found))] == [
        np.where(row < 0, ~row, row).tolist() for row in expected
    ]
    with_three = [index for index, row in enumerate(expected) if 3 in row[1:]]
    assert found.rows_with(3).tolist() == with_three


def test_the_memory_of_masks_does_not_grow_with_the_ids():
    rows, length = 40_000, 200
    ids = np.ones(rows * length, np.int32)
    lengths = np.full(rows, length)
    tracemalloc.start()
    found = SequencesWithTargets(ids, lengths, max_length=100)
    found.rows_with(5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < ids.nbytes  # the places of all tokens with a loss take twice as much


def test_long_rows_are_counted_and_rows_without_an_answer_are_dropped(caplog):
    write(chat("a", "b"), chat("long " * 60, "b"), chat("only a question"), chat("a", "long " * 60))
    with caplog.at_level(logging.INFO, "fastloop"):
        run = make_run("causal-lm", MODEL, CHATS)
    assert_problem(caplog, "texts-cut train 2 4 64 data.max_length")
    assert_problem(caplog, "rows-left-out train 2 4")
    assert len(run.datasets["train"]) == 2
    write(chat("only a question"))
    with expect_problem("invalid-split 64", RecipeError):
        make_run("causal-lm", MODEL, CHATS)


def test_a_row_is_one_conversation_and_its_targets_are_the_answers():
    run = make_run("causal-lm", MODEL, CHATS)
    tokenizer, sample = run.plugins.plugins[0].text_model.tokenizer, run.datasets["train"][1]
    assert tokenizer.decode(sample["input_ids"]) == (
        "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\nokok<|im_end|>\n"
    )
    assert tokenizer.decode([token for token in sample["targets"] if token != -100]) == "2<|im_end|>\nokok<|im_end|>\n"
    everything = make_run("causal-lm", MODEL, CHATS | {"train_on": "all"}).datasets["train"][1]
    assert everything["targets"][:-1].tolist() == sample["input_ids"][1:].tolist()


def test_one_step_is_that_of_torch_on_the_whole_batch_however_it_is_split():
    def trained(**train: Any) -> Any:
        run = make_run("causal-lm", MODEL, CHATS, optimizer="SGD", lr=0.1, batch_size=16, **train)
        before = {name: value.clone() for name, value in run.model.state_dict().items()}
        execute(run)
        return run, before

    whole, before = trained()
    model, dataset = whole.model, whole.datasets["train"]
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for index in range(len(dataset)):  # by torch alone, one row at a time without padding
        ids, targets = (
            torch.from_numpy(np.asarray(dataset[index][key], dtype=np.int64)) for key in ("input_ids", "targets")
        )
        total = total + cross_entropy(model(ids[None]).logits[0], targets, ignore_index=-100, reduction="sum")
        count += int((targets >= 0).sum())
    (total / count).backward()
    batch = whole.loaders.collators["train"]([dataset[index] for index in range(len(dataset))])
    assert (batch.loss_weight, batch.tokens) == (count, sum(map(int, dataset.lengths)))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(after[name], before[name] - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6)
    split, _ = trained(micro_batch_size=1)
    assert whole.state.step == split.state.step == 1
    for name, value in split.model.state_dict().items():
        torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-6)
    assert split.state.metrics["validation"]["loss"] == pytest.approx(
        whole.state.metrics["validation"]["loss"], rel=1e-6
    )


def test_packed_rows_are_the_same_training_and_conversations_do_not_see_each_other():
    plain, packed = make_run("causal-lm", MODEL, CHATS), make_run("causal-lm", MODEL, CHATS, [Packing()])
    samples = [plain.datasets["train"][index] for index in range(4)]

    def loss(run: Any, samples: list[Any], index: int | None = None) -> float:
        batch = run.loaders.collators["train"](samples)
        if index is not None:  # a loss of this sample only
            start = sum(len(sample["input_ids"]) for sample in samples[:index])
            keep = torch.zeros_like(batch.inputs["targets"], dtype=torch.bool)
            keep[0, start : start + len(samples[index]["input_ids"])] = True
            batch.inputs["targets"][~keep] = -100
        with torch.no_grad():
            return run.hooks.compute_loss(run=run, model=run.model.eval(), batch=batch.inputs).loss.item()

    assert loss(packed, samples) == pytest.approx(loss(plain, samples), rel=1e-5)
    for index in range(4):
        assert loss(packed, samples, index) == pytest.approx(loss(plain, [samples[index]]), rel=1e-5)
    assert execute(packed)["validation"]["loss"] == pytest.approx(execute(plain)["validation"]["loss"], rel=1e-4)


def test_it_learns_the_answers_and_exports_the_template():
    from transformers import AutoTokenizer

    write(*[chat(f"colour {i}", ("red", "green", "blue")[i % 3]) for i in range(24)])
    untrained = make_run("causal-lm", MODEL, CHATS, epochs=1, lr=1e-9)
    before = execute(untrained)["validation"]
    after = execute(make_run("causal-lm", MODEL, CHATS, epochs=12))["validation"]
    assert after["loss"] < 0.5 * before["loss"]
    assert after["perplexity"] == pytest.approx(np.exp(after["loss"]))
    tokenizer = AutoTokenizer.from_pretrained("run/model")
    assert tokenizer.chat_template == CHATML
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]


def test_prompts_have_no_loss_and_completions_end():
    Path("pairs.jsonl").write_text("".join(json.dumps({"q": f"{i} + 1 = ", "a": f"{i + 1}"}) + "\n" for i in range(12)))
    data = {"files": {"train": "pairs.jsonl"}, "prompt": "q", "completion": "a", "max_length": 32}
    run = make_run("causal-lm", MODEL, data)
    tokenizer, sample = run.plugins.plugins[0].text_model.tokenizer, run.datasets["train"][0]
    assert tokenizer.decode(sample["input_ids"]) == "0 + 1 = 1<|endoftext|>"
    assert tokenizer.decode([token for token in sample["targets"] if token != -100]) == "1<|endoftext|>"
    assert execute(run)["validation"]["perplexity"] > 1


def test_empty_completions_are_counted(caplog):
    pairs = [{"q": f"{i} + 1 = ", "a": "" if i % 3 == 1 else f"{i + 1}"} for i in range(12)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"files": {"train": "pairs.jsonl"}, "prompt": "q", "completion": "a", "validation_fraction": 0}
    make_run("causal-lm", MODEL, data | {"max_length": 32})
    assert_problem(caplog, "empty-texts pairs.jsonl, line 2 4 of 12 'a' data.completion")


def test_conversations_come_from_parquet_and_from_a_function():
    import pyarrow
    from pyarrow import parquet

    chats = [chat("a", "b", system="s"), chat("c", "d")]
    parquet.write_table(pyarrow.table({"messages": chats}), "chats.parquet")
    Path("chats.py").write_text(
        f"def chats():\n    return {{'train': [{{'messages': messages}} for messages in {chats!r}]}}\n"
    )
    rest = {"messages": "messages", "chat_template": "chatml", "validation_fraction": 0, "max_length": 64}
    expected = make_run("causal-lm", MODEL, rest | {"module": "chats.py:chats"}).datasets["train"]
    found = make_run("causal-lm", MODEL, rest | {"files": {"train": "chats.parquet"}}).datasets["train"]
    assert found.fingerprint() == expected.fingerprint()
    assert len(found) == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            "hello",
            "invalid-row chats.jsonl 2 'messages' data.messages 'hello'",
        ),
        ([], "invalid-row 2"),
        ([{"name": "human", "value": "a"}], "invalid-row 2 1"),
        ([{"role": "user", "content": 3}], "invalid-row 2 1 3"),
        ([{"role": "user", "content": "\ud800"}], "invalid-row 2 UTF-16"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(row, problem):
    write(chat("a", "b"), row)
    with expect_problem(problem, RecipeError):
        make_run("causal-lm", MODEL, CHATS)


def test_an_error_names_every_kind_of_row_that_cannot_be_read():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    bot = [turns[0], {"from": "bot", "value": "b"}]
    spaced = [{"from": "User ", "value": "a"}, turns[1]]
    null = [{"from": "human", "value": None}, turns[1]]
    write(turns, bot, bot, spaced, null, [])
    found = "invalid-row chats.jsonl 2 'bot' 5 6 4 'User ' 5 6"
    with expect_problem(f"{found} {{bot: assistant}} {{'User ': user}} skip-unreadable", RecipeError):
        make_run("causal-lm", MODEL, CHATS)
    data = CHATS | {"roles": {"bot": "assistant", "User ": "user"}}
    with expect_problem("invalid-row chats.jsonl 5 2 6", RecipeError):
        make_run("causal-lm", MODEL, data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            DATA,
            "no-chat-template data.messages data.chat_template=FILE.jinja",
        ),
        (
            DATA | {"chat_template": "chatlm"},
            "file-missing data.chat_template",
        ),
        (CHATS | {"messages": "chats"}, "unknown-column 'chats' data.messages"),
        (CHATS | {"text": "text"}, "exclusive-options"),
        (CHATS | {"prompt": "a"}, "exclusive-options"),
        (DATA | {"messages": None, "completion": "a"}, "missing-value data.prompt"),
        (
            DATA | {"messages": None, "text": "messages", "train_on": "all"},
            "unknown-option data.train_on data.messages",
        ),
        (CHATS | {"files": {"train": "a.csv"}}, "unknown-format a.csv data.messages"),
    ],
)
def test_options_that_are_wrong(data, problem):
    Path("a.csv").write_text("messages\nhello\n")
    with expect_problem(problem, RecipeError):
        make_run("causal-lm", MODEL, data)


def test_a_template_of_a_file_and_a_cache_of_tokens_give_the_same_samples(tmp_path, caplog):
    from fastloop_plugins._cache import tokens_kept_in

    byte_tokenizer(None, ["<|im_start|>", "<|im_end|>"]).save_pretrained("tokenizer")
    Path("own.jinja").write_text(UNMARKED)
    model, data = (
        {"config": GPT | {"n_positions": 128}, "tokenizer": "tokenizer"},
        DATA | {"chat_template": "own.jinja", "max_length": 128},
    )
    plain = make_run("causal-lm", model, data).datasets["train"].fingerprint()
    with tokens_kept_in(tmp_path / "cache"), caplog.at_level(logging.INFO, "fastloop"):
        assert [make_run("causal-lm", model, data).datasets["train"].fingerprint() for _ in range(2)] == [plain, plain]
        assert "tokens: all from" in caplog.text
        other = make_run("causal-lm", model, data | {"train_on": "all"}).datasets["train"].fingerprint()
    assert other != plain


def test_the_answer_of_a_template_ends_with_its_special_token():
    from fastloop_plugins.text.special_tokens import end_tokens

    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer(CHATML, marks)
    assert end_tokens(tokenizer) == sorted([tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")])
    assert end_tokens(byte_tokenizer(CHATML, [])) == [tokenizer.eos_token_id]


ENDS = {
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>",
    "smolvlm": "<end_of_utterance>",  # it reads contents as lists of parts only
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_an_answer_is_found_in_templates_of_models(name):
    tokenizer = byte_tokenizer(TRL[name]["template"], TRL[name]["marks"])
    end = answer_end(tokenizer)
    assert (tokenizer.convert_ids_to_tokens(end.tokens), end.next_turn) == ([ENDS[name]], [])


@pytest.mark.slow
def test_predictions_are_the_next_answers(cli):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chats = [chat(f"colour {i}", ("red", "green", "blue")[i % 3]) for i in range(24)]
    write(*chats)
    execute(make_run("causal-lm", MODEL, CHATS, epochs=20))
    asked = [*(messages[:1] for messages in chats[:6]), chats[6], chat("colour 1", "green", "colour 2")]
    Path("new.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in asked))
    code, out, err = cli("predict", "run", "new.jsonl", "plugins.causal-lm.max_new_tokens=12", "--chunk", "3")
    assert code == 0, err
    found = [json.loads(line)["text"] for line in out.splitlines()]
    assert {"red", "green", "blue"} >= set(found[:7]), "each is one answer, without the tokens after it"
    model, tokenizer = AutoModelForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    asked[6] = asked[6][:1]  # the answer at its end is left out
    for messages, text in zip(asked, found, strict=True):
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")]
        ids = model.generate(
            **prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        )
        assert text == tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    code, out, err = cli("predict", "run", "colour 1", "plugins.causal-lm.max_new_tokens=12")
    assert (code, [json.loads(line)["text"] for line in out.splitlines()]) == (0, [found[1]]), err
    Path("bad.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    Path("other.jsonl").write_text('{"chat": []}\n')
    for file, problem in (
        ("bad.jsonl", "bad.jsonl, line 1: every message is from the assistant"),
        ("other.jsonl", "there is no column 'messages', which data.messages names"),
    ):
        code, _, err = cli("predict", "run", file, "plugins.causal-lm.max_new_tokens=12")
        assert code == 2
        assert problem in err
    code, out, err = cli("evaluate", "run", "--file", "chats.jsonl")
    assert code == 0, err
    assert "perplexity" in out + err


@pytest.mark.slow
def test_two_processes_with_accumulation_are_one_run(processes, tmp_path):
    write(*[chat(f"{i} + {i}", "ok" * (i * i % 7 + 1), *(("and then?", f"{i}") if i % 3 else ())) for i in range(37)])
    Path("chats.jsonl").rename(tmp_path / "chats.jsonl")
    base = {"recipe": {"model": MODEL, "data": CHATS}, "train": {"batch_size": 8, "epochs": 2}}
    one = processes(1, all_of, [base | {"name": "one", "plugins": ["causal-lm"]}], folder=tmp_path)[0].result["one"]
    split = base["train"] | {"micro_batch_size": 2}
    runs = [
        base | {"name": name, "plugins": ["causal-lm", "ddp", *more], "train": split}
        for name, more in (("two", []), ("pack", ["packing"]))
    ]
    results = processes(2, all_of, runs, folder=tmp_path)[0].result
    for name, tolerance in (("two", 2e-5), ("pack", 1e-4)):
        same(results[name], one, tolerance)
        assert results[name]["summary"]["validation"] == pytest.approx(one["summary"]["validation"], rel=tolerance)

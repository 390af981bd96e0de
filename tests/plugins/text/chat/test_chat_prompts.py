"""Prompts of `fastloop predict`: those that are cut keep the system message, and cut and empty ones are counted.

Modules:
    plugins/fastloop_plugins/text/chat/prompts.py
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_helpers import IM, answer, byte_tokenizer, chat_run, text_of, user
from text_helpers import TINY, make_run, rows
from tokenizers.processors import TemplateProcessing

from fastloop.testing import assert_problem
from fastloop_plugins.text.chat.prompts import CutPrompts, PromptCollator, chat_chunks, counted_prompts, cut_tokens
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer
from fastloop_plugins.text.chunks import text_chunks, token_chunks
from fastloop_plugins.text.special_tokens import special_tokens

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("first"), answer("one"), user("second"), answer("two"), user("third")]


def shortened(room: int | None, *messages: dict[str, Any], template: str = CHATML) -> tuple[str, CutPrompts]:
    tokenizer = byte_tokenizer(template, IM)
    cut = CutPrompts(room)
    return str(tokenizer.decode(cut.shorten(Chat(list(messages)), ChatRenderer(tokenizer)))), cut


def rendered(*messages: dict[str, Any]) -> str:
    return shortened(None, *messages)[0]


def size(text: str) -> int:
    return len(byte_tokenizer(CHATML, IM)(text)["input_ids"])


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_the_oldest_turns_of_a_long_prompt_go_first(before):
    whole = rendered(*before, *TURNS)
    for kept in (TURNS, TURNS[2:], TURNS[4:]):
        wanted = rendered(*before, *kept)
        found, cut = shortened(size(wanted), *before, *TURNS)
        assert (found, cut.cut) == (wanted, int(wanted != whole))
        found, _ = shortened(size(wanted) + 1, *before, *TURNS)
        assert found == wanted


def test_a_long_last_turn_is_cut_after_the_system_message():
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    found, _ = shortened(size(system) + 40, SYSTEM, *TURNS, answer("three"), user("x" * 99 + " and why?"))
    assert found.startswith(system + "<|im_start|>user\nx")
    assert found.endswith("and why?<|im_end|>\n<|im_start|>assistant\n")
    assert size(found) == size(system) + 40
    found, _ = shortened(20, SYSTEM, user("why?"))
    assert (found.endswith("<|im_start|>assistant\n"), size(found)) == (True, 20), "no room for the system message"
    refuses = "{{ raise_exception('no') if not messages[0].content }}" + CHATML
    found, _ = shortened(30, user("x" * 99), template=refuses)
    assert (size(found), found.startswith("x")) == (30, True)
    implicit = "<|im_start|>system\nYou help.<|im_end|>\n" + CHATML  # as many templates have one
    found, _ = shortened(70, user("x" * 99), template=implicit)
    assert (size(found), found.startswith("<|im_start|>system\nYou help.")) == (70, True)


def test_tokens_after_the_first_ones_are_cut():
    assert cut_tokens([1, 2, 3, 4, 5, 6], 2, 4) == [1, 2, 5, 6]
    assert cut_tokens([1, 2, 3, 4, 5, 6], 3, 4) == [3, 4, 5, 6]


def test_cut_and_empty_prompts_are_counted(caplog):
    run = chat_run({"messages": [user("Hi"), answer("Hello")]})
    task = run.plugins.plugins[0]
    asked: list[Any] = [[SYSTEM, *TURNS], "Hi", " ", [SYSTEM, user("")]]
    chunks = list(chat_chunks(task.data, task.text_model.tokenizer, asked, 0, 2, room=50))
    prompts = [text_of(run, chunk[index]["input_ids"]) for chunk in chunks for index in range(len(chunk))]
    assert (len(prompts), "Be brief." in prompts[0], "first" in prompts[0]) == (4, True, False)
    assert_problem(caplog, "texts-cut data: predict: 1 4 50")
    assert_problem(caplog, "empty-texts data predict 2 4")
    caplog.clear()
    list(chat_chunks(task.data, task.text_model.tokenizer, ["Hi"], 0, 2, room=50))
    assert "data: predict" not in caplog.text


def test_texts_to_continue_and_to_classify_are_counted(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    Path("a.txt").write_text("one two three four\n" * 9)
    gpt = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
    run = make_run(
        "causal-lm", {"config": gpt, "tokenizer": {"kind": "byte"}}, {"files": {"train": "a.txt"}, "max_length": 8}
    )
    task = run.plugins.plugins[0]
    chunks = token_chunks(
        task.data, task.text_model, ["one", "", "x" * 21, "y" * 20], 0, 3, {"add_special_tokens": False}
    )
    assert sum(map(len, counted_prompts(chunks, 20))) == 4
    assert_problem(caplog, "texts-cut data: predict: 1 4 20")
    assert_problem(caplog, "empty-texts data predict 1 4")
    caplog.clear()
    Path("b.csv").write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows()))
    section = {"files": {"train": "b.csv"}, "label": "label", "max_length": 16}
    task = make_run("text-classification", {"config": TINY, "tokenizer": {"kind": "word"}}, section).plugins.plugins[0]
    assert sum(len(texts) for texts, _ in text_chunks(task.data, ["a film", " ", ""], 0, 2)) == 3
    assert_problem(caplog, "empty-texts data predict 2 3")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_long_text_keeps_the_token_that_begins_it(adds_bos):
    tokenizer = byte_tokenizer(CHATML, IM)
    bos = tokenizer.convert_tokens_to_ids(IM[0])
    tokenizer.bos_token = IM[0]
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{IM[0]} $A", special_tokens=[(IM[0], bos)]
        )
    ids = special_tokens(tokenizer).begin(list(range(10, 20)))
    batch = PromptCollator(tokenizer, room=4)([{"input_ids": np.array(ids)}])
    expected = [bos, 17, 18, 19] if adds_bos else [16, 17, 18, 19]
    assert batch.inputs["input_ids"].tolist() == [expected]

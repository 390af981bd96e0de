"""Shared by the tests of chat data: messages, rows, templates, and runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streaming_helpers import write_lines
from text_helpers import TINY_GPT, make_run

from fastloop_plugins.text.chat.rows import read_chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer

GPT = TINY_GPT | {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODEL = {"config": GPT | {"n_positions": 1024}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
CHATS = {"chat_template": "chatml", "max_length": 1024, "validation_fraction": 0, "files": {"train": "rows.jsonl"}}
MASKS = Path(__file__).parent.parent / "plugins" / "text" / "chat" / "trl_masks.json"
TRL = json.loads(MASKS.read_text(encoding="utf-8"))["cases"]
QWEN = TRL["qwen2_5"]["template"]
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
IM = ["<|im_start|>", "<|im_end|>"]
SHAREGPT = ["conversations"]
ALPACA = ["instruction", "input", "output"]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


def tool_row(city: str = "Rome", said: str = "dry") -> dict[str, Any]:
    messages = [
        user(f"Rain in {city}?"),
        answer(None, tool_calls=call({"city": city})),
        {"role": "tool", "content": said},
        answer("No."),
    ]
    return {"messages": messages, "tools": [WEATHER]}


def text_of(run: Any, ids: Any) -> str:
    text: str = run.plugins.plugins[0].text_model.tokenizer.decode(ids)
    return text


def trained_text(run: Any, index: int = 0) -> str:
    """The text of the tokens that have a loss in a row of the run."""
    targets = run.datasets["train"][index]["targets"]
    return text_of(run, [token for token in targets if token >= 0])


def chat_run(*rows: Any, **data: Any) -> Any:
    """A run that reads rows in memory."""
    write_lines("rows.jsonl", rows)
    return make_run("causal-lm", MODEL, CHATS | data)


def text_with_loss(template: str, *messages: dict[str, Any], tools: Any = None, train_on: str = "assistant") -> str:
    """The text of the tokens that have a loss in a conversation, by a template."""
    tokenizer = byte_tokenizer(template, IM)
    chat = read_chat({"messages": list(messages), "tools": tools}, ["messages"])
    ids, mask = ChatRenderer(tokenizer, train_on).encode(chat)
    return str(tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own]))


ONLY_CALLS = CHATML.replace(
    "{{ message['content'] or '' }}", "{{ '' if message['tool_calls'] else message['content'] or '' }}"
)
"""A template that leaves out the content beside a call, as those of Llama 3 and Mistral."""
SPOKEN = user("Rain?"), answer("Let me look.", tool_calls=call({"city": "Rome"})), {"role": "tool", "content": "dry"}
SPOKEN_ROW = {"messages": [*SPOKEN, answer("No.")]}


def byte_tokenizer(template: str | None, marks: list[str]) -> Any:
    """A tokenizer of single bytes, as that of the fixture."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.BPE({letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *marks])
    end = "<|endoftext|>"
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, bos_token=end)
    made.chat_template = template
    return made

"""Rows, a tokenizer, recipes and commands for the tests."""

import json
import os
import random
import subprocess
import sys
from functools import cache

WORDS = "red blue green old new big small fast slow dog cat bird fish house tree river".split()


def rows(count):
    """Rows of a word with its capitals, which are right, and other letters."""
    draw, found = random.Random(0), []
    for index in range(count):
        words = " ".join(draw.sample(WORDS, 1 + index % 2))
        wrong = "".join(draw.sample(words, len(words))) + "?" * (index % 4)
        found.append({"prompt": f"{words}=", "chosen": words.upper(), "rejected": wrong})
    return found


def pairs(count=40):
    """Splits of pairs."""
    found = rows(count)
    return {"train": found, "validation": found[: count // 4], "test": found[count // 4 : count // 2]}


def labelled(count=20):
    """The same as completions that are good or not."""
    return {
        split: [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in found
            for name in ("chosen", "rejected")
        ]
        for split, found in pairs(count).items()
    }


def message(role, content):
    return {"role": role, "content": content}


PAIRS = rows(5) + [
    {"prompt": "a long prompt with a long answer:", "chosen": "dropped", "rejected": "no"},
    {"prompt": "an answer:", "chosen": "that is cut at thirty tokens", "rejected": "short"},
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row in PAIRS
    for name in ("chosen", "rejected")
]
UNPROMPTED = [{name: f"say {row['prompt']} {row[name]}" for name in ("chosen", "rejected")} for row in rows(4)]
CHATS = [
    {
        "prompt": [message("system", "Be."), message("user", row["prompt"])][index % 2 :],
        **{name: [message("assistant", row[name])] for name in ("chosen", "rejected")},
    }
    for index, row in enumerate(rows(5))
]


@cache
def tokenizer():
    """Bytes, with an end token, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    units = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={unit: place for place, unit in enumerate(units)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(units[:2])
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    found.chat_template = (
        "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return found

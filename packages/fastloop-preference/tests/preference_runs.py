"""Rows, a tokenizer, recipes and commands for the tests."""

import json
import random
from functools import cache

from fastloop.testing import train

WORDS = "red blue green old new big small fast slow dog cat bird fish house tree river".split()


def rows(count):
    """Rows of a word with its capitals, which are right, and other letters."""
    draw = random.Random(0)
    found = []
    for index in range(count):
        words = " ".join(draw.sample(WORDS, 1 + index % 2))
        wrong = "".join(draw.sample(words, len(words))) + "?" * (index % 4)
        found.append({"prompt": f"{words}=", "chosen": words.upper(), "rejected": wrong})
    return found


def pairs(count=37):
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


MODEL = {
    "config": {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
    },
    "tokenizer": {"kind": "byte"},
}
TRAIN = {"epochs": 2, "batch_size": 6, "lr": 3e-3, "device": "cpu", "log_every": 1, "eval_batch_size": 4}
ROWS = __file__
MODULES = {"dpo": "pairs", "kto": "labelled", "reward-model": "pairs"}
"""Task -> the function of its rows."""


def recipe(folder, task, options=(), data=(), plugins=(), model=MODEL, **train):
    """A recipe whose run is in a folder."""
    rows = {"module": f"{__file__}:{MODULES[task]}", "max_length": 32}
    found = {"model": model, "data": rows | dict(data), "train": TRAIN | train, "output": str(folder / "run")}
    return found | {"plugins": [{task: dict(options)}, *plugins]}


def write_recipe(folder, *arguments, **keys):
    """Write ``recipe.yaml`` in a new folder, and return the folder."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(recipe(folder, *arguments, **keys)))  # JSON is YAML
    return folder


def train_all(recipes):
    """Train recipes, and return the names of the plugins of each."""
    return [[*train(each).summary["plugins"]] for each in recipes]


def points(folder, split=None):
    """The values of ``metrics.jsonl``, of a split or of the training."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    return [{key: line[key] for key in names if key in line} for line in lines if line.get("split") == split]

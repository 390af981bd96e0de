"""Prompts, reward functions and recipes of models from scratch, which generate."""

from pathlib import Path

from fastloop.testing import train
from grpo_cases import SIZES, recipe

ROWS = __file__
MODEL = {"config": SIZES | {"hidden_size": 16, "intermediate_size": 24}, "tokenizer": {"kind": "char"}}
DATA = {"module": f"{ROWS}:prompts", "columns": ["answer"], "max_length": 8}
OPTIONS = {"rewards": [f"{ROWS}:repeats"], "num_generations": 4, "max_new_tokens": 5}


def prompts(count=40):
    """Prompts of a number, whose answer is its first digit."""
    rows = [{"prompt": f"{number}=", "answer": str(number)[0]} for number in range(10, 10 + count)]
    return {"train": rows, "validation": rows[:6]}


def repeats(completions, answer):
    """The share of characters that are the answer."""
    shares = []
    for text, digit in zip(completions, answer, strict=True):
        shares.append(text.count(digit) / max(len(text), 1))
    return shares


def sampled(folder, options=(), plugins=(), model=MODEL, data=(), **train):
    """A recipe whose model generates; its run is in ``folder/run``."""
    made = recipe(Path(folder), "", plugins=plugins)
    made["model"] = model
    made["data"] = DATA | dict(data)
    made["plugins"][0] = {"grpo": OPTIONS | dict(options)}
    made["train"] |= {"optimizer": "torch.optim:AdamW", "lr": 3e-3, "batch_size": 8, "max_steps": 4} | train
    return made


def train_all(recipes):
    """Train recipes, and return the results of each."""
    return [train(each) for each in recipes]

"""A tiny model, prompts with fixed completions, and recipes of them."""

import json
import random
from functools import cache
from pathlib import Path

import torch
from fastloop import Plugin, hookimpl
from fastloop_plugins.text import Completion

COUNT = 4
"""Completions of a prompt."""
LONGEST = 9
"""Tokens of a completion at most."""
END = 1
"""The end token."""
ROWS = [{"prompt": "abcdefgh"[:size] + "=", "answer": size} for size in (1, 4, 2, 8, 5)]
SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


@cache
def tokenizer():
    """Bytes, with an end token, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    units = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {unit: place for place, unit in enumerate(units)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(units[:2])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    wrapped.chat_template = (
        "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return wrapped


def write_model(folder, **options):
    """A Llama of two layers, whose weights do not depend on a generator of random numbers."""
    import transformers

    sizes = {name: value for name, value in SIZES.items() if name != "model_type"}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer()), pad_token_id=0, eos_token_id=END, bos_token_id=None, **sizes, **options
    )
    model = transformers.LlamaForCausalLM(config)
    start = 0
    with torch.no_grad():
        for weight in model.parameters():
            places = torch.arange(start, start + weight.numel(), dtype=torch.float64)
            weight.copy_((places * 1.7).sin().view_as(weight))
            weight.mul_(0.4 if weight.dim() > 1 else 1.0)
            start += weight.numel()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def fixed_completions(prompt_ids):
    """The ids of the completions of a prompt. The third one is truncated; the others end with the end token."""
    draw = random.Random(len(prompt_ids))
    completions = []
    for place in range(COUNT):
        size = LONGEST if place == 2 else draw.randrange(1, LONGEST)
        ids = [draw.randrange(60, 100) for _ in range(size)]
        if size < LONGEST:
            ids[-1] = END
        completions.append(ids)
    return completions


def by_first_token(completion_ids, answer, **kwargs):
    """A number for each completion; None for those of three tokens."""
    rewards = []
    for ids, value in zip(completion_ids, answer, strict=True):
        rewards.append(None if len(ids) == 3 else (ids[0] * 7 % 10) / 5 + value / 8)
    return rewards


def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]


class FixedEngine(Plugin):
    """An engine that returns the fixed completions."""

    name = "fixed-engine"
    numerics = "changes-training"

    @hookimpl
    def generate_completions(self, prompts, count):
        assert count == COUNT
        completions = []
        for prompt in prompts:
            for ids in fixed_completions(prompt):
                completions.append(Completion(ids, ended=ids[-1] == END))
        return completions


def splits():
    return {"train": ROWS}


def recipe(folder, model, options=(), plugins=("fixed-engine",), data=(), **train):
    """A recipe of one step with SGD on the fixed completions, whose run is in ``folder/run``."""
    listed = [f"{__file__}:FixedEngine" if plugin == "fixed-engine" else plugin for plugin in plugins]
    rewards = {"rewards": [f"{__file__}:by_first_token", f"{__file__}:by_length"], "reward_weights": [1.0, 0.1]}
    sizes = {"num_generations": COUNT, "max_new_tokens": LONGEST, "log_completions": 100}
    prompts = {"module": f"{__file__}:splits", "columns": ["answer"], "max_length": 16, "validation_fraction": 0}
    training = {"epochs": 1, "batch_size": len(ROWS), "lr": 0.02, "weight_decay": 0.0, "device": "cpu", "log_every": 1}
    return {
        "model": {"name": str(model)},
        "data": prompts | dict(data),
        "train": training | {"optimizer": "torch.optim:SGD", "save_every": None} | train,
        "plugins": [{"grpo": rewards | sizes | dict(options)}, *listed],
        "output": str(folder / "run"),
    }


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]

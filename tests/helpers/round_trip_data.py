"""Rows, images and pretrained checkpoints of the round-trip test. transformers alone makes the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from image_helpers import write_images
from safetensors.torch import save_file

CLASSES = ("bad", "fine", "good")
OTHER_CLASSES = ("cold", "mild", "warm")
"""As many classes as ``CLASSES``, by other names: a head for them has the right shape, and is of no use."""
TOPICS = ("actors", "music", "plot")
TAGS = ("B-FOOD", "B-PET", "O")
OTHER_TAGS = ("B-CAR", "B-TOWN", "O")
IMAGE_CLASSES = ("blue", "green", "red")
MEALS = {
    "owl": "mice", "hen": "grain", "cow": "grass", "cat": "fish", "fox": "eggs", "bee": "nectar", "bat": "moths",
    "elk": "moss",
}  # fmt: skip
ADJECTIVES = {"bad": "dull dreadful boring", "fine": "plain decent usual", "good": "lovely superb great"}
MAX_LENGTH = 32
"""``data.max_length``."""
LONGEST = 64
"""``model_max_length`` of a checkpoint's tokenizer, and the positions of the models."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a base model that is a chat model already."""

CODE = '''
import torch
from torch import nn


def rows():
    """Samples of 6 x 6 values, and their class."""
    made = [(torch.full((1, 6, 6), float(i % 3)) + torch.arange(6) / 10 + i / 100, i % 3) for i in range(24)]
    return {"train": made, "validation": made[:8], "test": made[8:20]}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
                         nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 3))
'''
"""The module of the task ``module``."""


MODULE_WEIGHTS = {"5.weight": (16, 144), "5.bias": (16,)}
"""Weights of ``Net`` that ``warm.safetensors`` has."""


def rows(count: int) -> list[dict[str, Any]]:
    """Rows with the columns of every text task. They are all different, except for prompts and their answers."""
    made = []
    animals = list(MEALS)
    for index in range(count):
        label = CLASSES[index % 3]
        adjectives = ADJECTIVES[label].split()
        animal = animals[index % len(animals)]
        question = f"what does the {animal} eat"
        answer = f"the {animal} eats {MEALS[animal]}"
        made.append(
            {
                "text": f"a {adjectives[index % 2]} film with number{index % 11}" + " indeed" * (index * 5 % 4),
                "other": f"the number{index % 7} was {adjectives[(index + 1) % 3]}",
                "label": label,
                "topics": [topic for place, topic in enumerate(TOPICS) if (index >> place) & 1],
                "score": (index % 3) - 1 + index / 50,
                "words": f"the {animal} likes {MEALS[animal]} indeed".split(),
                "tags": ["O", "B-PET", "O", "B-FOOD", "O"],
                "document": f"{answer} . {question} . {answer} .",
                "prompt": question,
                "completion": answer,
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            }
        )
    return made


def write_data(folder: Path) -> None:
    """Write ``train.jsonl``, ``validation.jsonl``, ``test.jsonl``, the folder ``images`` and ``code.py``."""
    for split, count in (("train", 24), ("validation", 8), ("test", 10)):
        lines = [json.dumps(row) for row in rows(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        weights = {name: torch.randn(size) / 3 for name, size in MODULE_WEIGHTS.items()}
    save_file(weights, folder / "warm.safetensors")
    write_images(folder / "images", {"train": 6, "validation": 2, "test": 3}, IMAGE_CLASSES)
    (folder / "code.py").write_text(CODE, encoding="utf-8")


# -- pretrained checkpoints --------------------------------------------------------------------------------------------

LARGE = {"initializer_range": 0.3}
"""Large initial weights, so that each weight has an effect on the outputs of a model that trains for some steps."""
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, **LARGE}
ROOM = {"max_position_embeddings": LONGEST}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", **SMALL, **ROOM},
    "distilbert": {
        "model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, **LARGE, **ROOM,
    },
    "electra": {"model_type": "electra", "embedding_size": 16, **SMALL, **ROOM},
    "deberta": {"model_type": "deberta-v2", **SMALL, **ROOM},
    "modernbert": {"model_type": "modernbert", "reference_compile": False, **SMALL, **ROOM},
    "xlnet": {"model_type": "xlnet", "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32, **LARGE},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": LONGEST, **LARGE},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **SMALL, **ROOM, "hidden_size": 32},
    "tied-llama": {"model_type": "llama", "tie_word_embeddings": True, **SMALL, **ROOM, "hidden_size": 32},
    "t5": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
    "t5-v1_1": {
        "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
        "tie_word_embeddings": False,
    },
    "bart": {
        "model_type": "bart", "init_std": 0.3, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        **ROOM,
    },
    "vit": {"model_type": "vit", **SMALL, "image_size": 16, "patch_size": 8},
    "resnet": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}  # fmt: skip
"""Name -> ``model.config`` of a tiny model."""
SEQ2SEQ = ("t5", "t5-v1_1", "bart")
DECODERS = ("gpt2", "llama", "tied-llama")


@dataclass(frozen=True)
class Base:
    """A pretrained checkpoint.

    Attributes:
        architecture: A key of ``ARCHITECTURES``.
        head: How the name of the class of transformers ends, such as ``ForCausalLM``; empty: a model without a head.
        classes: The classes of its head, in its order.
        changes: Further options of its configuration, as JSON.
        generation: Options of its ``generation_config.json``, as JSON.
        chat: Whether its tokenizer has a chat template, with tokens of its own.
        bos: Whether its tokenizer puts a token before each text.
        dtype: The type of the saved weights.
        processor: Its ``preprocessor_config.json``; empty: it has none.
    """

    architecture: str
    head: str = ""
    classes: tuple[str, ...] = ()
    changes: str = "{}"
    generation: str = "{}"
    chat: bool = False
    bos: bool = False
    dtype: str = "float32"
    processor: str = ""


@dataclass
class Bases:
    """The checkpoints of a folder, each made once.

    Attributes:
        folder: Holds the checkpoints.
    """

    folder: Path
    made: dict[Base, Path] = field(default_factory=dict)

    def find(self, base: Base) -> Path:
        """The folder of a checkpoint."""
        if base not in self.made:
            path = self.folder / f"base-{len(self.made)}-{base.architecture}"
            write_base(base, path)
            self.made[base] = path
        return self.made[base]


def write_base(base: Base, folder: Path) -> None:
    """Write a checkpoint with random weights, and its tokenizer unless it reads images."""
    import transformers

    options = {**ARCHITECTURES[base.architecture], **json.loads(base.changes)}
    if base.classes:
        options["id2label"] = dict(enumerate(base.classes))
        options["label2id"] = {name: index for index, name in enumerate(base.classes)}
    if base.architecture not in ("vit", "resnet"):
        tokenizer = make_tokenizer(base)
        tokenizer.save_pretrained(folder)
        special = {"pad_token_id": tokenizer.pad_token_id}
        if base.architecture in (*SEQ2SEQ, *DECODERS):
            special |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        if base.architecture in SEQ2SEQ:
            special |= {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": None}
        options = {"vocab_size": len(tokenizer), **special, **options}
    config = transformers.AutoConfig.for_model(**options)
    auto: Any = getattr(transformers, f"AutoModel{base.head}")
    with torch.random.fork_rng():
        torch.manual_seed(len(base.architecture))
        model = auto.from_config(config).to(getattr(torch, base.dtype))
    generation = json.loads(base.generation)
    if generation:
        model.generation_config.update(**generation)
    model.save_pretrained(folder)
    if base.processor:
        (folder / "preprocessor_config.json").write_text(base.processor, encoding="utf-8")


@cache
def words() -> tuple[str, ...]:
    """All words of the rows, and the names of the roles of a conversation."""
    used = {"user", "assistant", "system", "."}
    for row in rows(24):
        for key in ("text", "other", "prompt", "completion", "document"):
            used.update(row[key].split())
    return tuple(sorted(used))


def make_tokenizer(base: Base) -> Any:
    """A tokenizer of whole words, with the special tokens of the architecture's family."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    encoder = base.architecture not in (*SEQ2SEQ, *DECODERS)
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if encoder:
        names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<cls>", "sep_token": "<sep>"}
    special = [*names.values(), *(("<|im_start|>", "<|im_end|>") if base.chat else ())]
    vocabulary = {word: index for index, word in enumerate([*special, *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    template = ""
    if encoder:
        template = "<cls> $A <sep>"
    elif base.architecture in SEQ2SEQ:
        template = "$A </s>"
    elif base.bos:
        template = "<s> $A"
    if template:
        pair = "<cls> $A <sep> $B:1 <sep>:1" if encoder else template.replace("$A", "$A $B")
        used = [(token, vocabulary[token]) for token in names.values()]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=used)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **names)
    if base.chat:
        made.chat_template = CHATML
    return made


def read_rows(folder: Path, split: str) -> Sequence[Mapping[str, Any]]:
    """The rows of a split."""
    return list(_lines(folder / f"{split}.jsonl"))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)

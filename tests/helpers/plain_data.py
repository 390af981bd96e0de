"""Rows, images, tokens and untrained models for the cases of ``plain_torch.py``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from text_helpers import TINY_GPT
from text_loops import BERT, DISTILBERT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

IGNORED = -100
ROWS = 17
"""Two steps of six samples, and one of five."""
WORDS = ["fine", "dull", "lovely", "film", "plot", "cast", "score", "joy", "waste", "idea"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>")
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *WORDS, *(f"##{letter}" for letter in "abc")))}
SIZE = len(VOCABULARY)
PAD = VOCABULARY["[PAD]"]
END = VOCABULARY["</s>"]
CLASSES = ("bad", "fair", "good")
TAGS = ("B-X", "I-X", "O")
SIDE = 16
"""Height and width of an image."""


@cache
def rows() -> list[dict[str, Any]]:
    """Rows with the columns of all tasks. Texts have 1 to 9 words of 1 to 3 tokens."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) + draw.choice(("", "", "a", "bc")) for _ in range(draw.randint(1, 9)))

    content = []
    for index in range(ROWS):
        words = text().split()
        row = {
            "text": " ".join(words),
            "class": CLASSES[(0, 0, 1, 0, 2)[index % 5]],
            "number": round(draw.gauss(0, 2), 2),
            "names": sorted(draw.sample(CLASSES, draw.randint(0, 3))),
            "words": words,
            "tags": [draw.choice(("O", "O", "B-X")) for _ in words],
            "prompt": text(),
            "answer": " " + text(),
            "target": text(),
        }
        content.append(row)
    content[4]["tags"] = ["I-X" for _ in content[4]["words"]]
    return content


def tokens() -> Tokenizer:
    """A tokenizer without a template: a word is a token, and so is each letter after it."""
    tokenizer = Tokenizer(models.WordPiece(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def ids_of(text: str, begin: str = "", end: str = "") -> list[int]:
    """The ids of a text between two special tokens, or none."""
    ids: list[int] = tokens().encode(text).ids
    if begin:
        ids = [VOCABULARY[begin], *ids]
    if end:
        ids = [*ids, VOCABULARY[end]]
    return ids


def targets_of_row(index: int) -> list[int]:
    """The targets of a masked language model: every third token of a text, from another place in each row, or none."""
    ids = ids_of(rows()[index]["text"], "[CLS]", "[SEP]")
    targets = [IGNORED] * len(ids)
    for place in range(1 + index % 4, len(ids) - 1, 3):
        targets[place] = ids[place]
    return targets


LENGTH = 32
"""Tokens of a text at most, with special tokens."""


def padded(ids: Sequence[int], fill: int) -> Tensor:
    return torch.tensor([*ids, *[fill] * (LENGTH - len(ids))])


def masked_samples() -> dict[str, Any]:
    """Rows for a masked language model."""
    samples = []
    for index, row in enumerate(rows()):
        ids = ids_of(row["text"], "[CLS]", "[SEP]")
        samples.append(
            {
                "input_ids": padded(ids, PAD),
                "attention_mask": padded([1] * len(ids), 0),
                "labels": padded(targets_of_row(index), IGNORED),
            }
        )
    return {"train": samples, "validation": samples}


def pair_samples() -> dict[str, Any]:
    """Rows for an encoder-decoder."""
    samples = []
    for row in rows():
        ids = ids_of(row["text"], end="</s>")
        samples.append(
            {
                "input_ids": padded(ids, PAD),
                "attention_mask": padded([1] * len(ids), 0),
                "labels": padded(ids_of(row["target"], end="</s>"), IGNORED),
            }
        )
    return {"train": samples, "validation": samples}


def text_samples() -> dict[str, Any]:
    """Rows for a causal language model, whose labels are not shifted."""
    samples = []
    for row in rows():
        ids = ids_of(row["text"], end="</s>")
        samples.append({"input_ids": padded(ids, PAD), "labels": padded(ids, IGNORED)})
    return {"train": samples, "validation": samples}


def write(folder: Path) -> None:
    """Write the rows, the images and the models."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    for index, pixels in enumerate(images()):
        for split in ("train", "validation"):
            path = folder / "images" / split / CLASSES[class_of_image(index)] / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    for name in MODELS:
        write_model(folder / name)


def class_of_image(index: int) -> int:
    """Images are sorted by class: eight of the first, six of the second and three of the third."""
    return int(index >= 8) + int(index >= 14)


@cache
def images() -> list[Any]:
    """Images of random pixels, (SIDE, SIDE, 3) uint8."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(ROWS)]


# -- models ------------------------------------------------------------------------------------------------------------

T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
BART = {
    "model_type": "bart", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
    "dropout": 0.0, "init_std": 0.2,
}  # fmt: skip
MBART = BART | {"model_type": "mbart"}
GPT = TINY_GPT | {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
VIT = {
    "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "image_size": SIDE, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}  # fmt: skip
ENDS = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": VOCABULARY["<s>"], "vocab_size": SIZE}
WIDE = BERT | {"initializer_range": 0.2, "vocab_size": SIZE, "pad_token_id": PAD}


def names_of(classes: Sequence[str]) -> dict[str, Any]:
    """The classes as a configuration has them."""
    return {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}


ONE_NUMBER = {"num_labels": 1, "problem_type": "regression"}
MODELS: Mapping[str, tuple[str, Mapping[str, Any], tuple[str, str]]] = {
    "classifier": ("SequenceClassification", WIDE | names_of(CLASSES), ("[CLS]", "[SEP]")),
    "regressor": ("SequenceClassification", WIDE | ONE_NUMBER, ("[CLS]", "[SEP]")),
    "tagger": (
        "TokenClassification",
        DISTILBERT | {"initializer_range": 0.2, "vocab_size": SIZE, "pad_token_id": PAD} | names_of(TAGS),
        ("[CLS]", "[SEP]"),
    ),
    "masked": ("MaskedLM", WIDE, ("[CLS]", "[SEP]")),
    "gpt": ("CausalLM", GPT | ENDS, ("", "")),
    "t5": ("Seq2SeqLM", T5 | ENDS | {"decoder_start_token_id": PAD}, ("", "</s>")),
    "bart": (
        "Seq2SeqLM",
        BART | ENDS | {"decoder_start_token_id": END, "forced_bos_token_id": VOCABULARY["<s>"]},
        ("<s>", "</s>"),
    ),
    "mbart": (
        "Seq2SeqLM",
        MBART | ENDS | {"decoder_start_token_id": VOCABULARY["<s>"], "forced_bos_token_id": VOCABULARY["<s>"]},
        ("", "</s>"),
    ),
    "vit": ("ImageClassification", VIT | names_of(CLASSES), ("", "")),
}
"""Folder -> class of transformers, configuration, and the tokens at both ends of a text."""


def write_model(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer or image processor."""
    import transformers

    kind, config, (begin, end) = MODELS[folder.name]
    settings = dict(config)
    torch.manual_seed(0)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    auto.from_config(transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)).save_pretrained(folder)
    if kind == "ImageClassification":
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.2, 0.3, 0.4],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return
    tokenizer = tokens()
    if begin or end:
        template = " ".join(part for part in (begin, "$A", end) if part)
        ends = [(token, VOCABULARY[token]) for token in (begin, end) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ends)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", bos_token="<s>", eos_token="</s>", model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip


def load_model(name: str) -> Any:
    """The model of a folder in training mode. Models have no dropout."""
    import transformers

    auto = getattr(transformers, f"AutoModelFor{MODELS[name][0]}")
    return auto.from_pretrained(name).train()


def make_masked() -> Any:
    return load_model("masked")


def make_pair_model() -> Any:
    return load_model("t5")


def make_gpt() -> Any:
    return load_model("gpt")

"""The README of an ONNX export: its inputs and outputs, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.export.card import (
    ModelCard,
    add_checksum,
    code_option,
    find_auto_class,
    has_chat_template,
    own_classes,
)
from fastloop.runtime.files import read_json_object

if TYPE_CHECKING:
    from fastloop_tools.export.onnx_model import OnnxExport

TOKENIZER_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
"""Inputs that a tokenizer makes from texts."""
TEXT_INPUTS = {"input_ids", "attention_mask"}
"""Inputs of a language model."""
LONGEST = 100
"""Tokens that the code of a card generates at most, unless the configuration has a limit."""

LABELS = "labels = AutoConfig.from_pretrained(folder{code}).id2label"
PRINT_CLASSES = """for logits in outputs[0]:
    print([label for index, label in labels.items() if logits[index] > 0])  # a probability above 0.5"""
PRINT_CLASS = """for logits in outputs[0]:
    print(labels[int(logits.argmax())])"""
PRINT_NUMBERS = "print(outputs[0].squeeze(1).tolist())"
PRINT_TAGS = """words = ["the", "first", "text"]
inputs = tokenizer([words], is_split_into_words=True, truncation=True, return_tensors="np")
outputs = session.run(None, {name: inputs[name] for name in NAMES})
tokens = inputs.word_ids()  # the number of the word that each token is of
for number, word in enumerate(words):
    print(word, labels[int(outputs[0][0, tokens.index(number)].argmax())])"""
TEXT = 'ids = tokenizer("the first text", return_tensors="np")["input_ids"]'
CHAT = """messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="np")
ids = inputs["input_ids"]"""
CONTINUE = """prompt_length = ids.shape[1]
for _ in range(LIMIT):  # takes the likeliest token, until one that ends a text
    values = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    logits = session.run(["logits"], {name: values[name] for name in NAMES})[0]
    token = int(logits[0, -1].argmax())
    if token in ENDS:
        break
    ids = np.append(ids, [[token]], axis=1)
print(tokenizer.decode(ids[0, prompt_length:], skip_special_tokens=True))"""
WRITE = """for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"]):
    written = np.array([BEGIN], dtype="int64")
    for _ in range(LIMIT):  # takes the likeliest token, until one that ends a text
        values = {"input_ids": ids[None], "attention_mask": mask[None], "decoder_input_ids": written}
        logits = session.run(["logits"], {name: values[name] for name in NAMES})[0]
        token = int(logits[0, -1].argmax())
        if token in ENDS:
            break
        written = np.append(written, [[token]], axis=1)
    print(tokenizer.decode(written[0], skip_special_tokens=True))"""


def onnx_card(card: ModelCard, exported: OnnxExport, folder: Path) -> str:
    """A page of Markdown.

    Args:
        card: The names in the page.
        exported: The signature of the model.
        folder: The folder of the export. Without ``config.json`` in it, this is no model of transformers.
    """
    lines = card.head("onnx", f"ONNX with opset {exported.opset}")
    lines += ["| | name | dtype | shape |", "|---|---|---|---|"]
    for kind, rows in (("input", exported.inputs), ("output", exported.outputs)):
        lines += [f"| {kind} | `{key}` | {dtype} | `{shape}` |" for key, dtype, shape in rows]
    lines += ["", f"Sizes with a name may change. {exported}.", ""]
    code = _code(card, exported, folder)
    lines += ["```python", *code, "```", ""]
    lines += card.lines_below_code(card.texts.tokenizer_call("np") in code)
    return add_checksum("\n".join(lines))


def _code(card: ModelCard, exported: OnnxExport, folder: Path) -> list[str]:
    """The lines that load the model and run it: on texts, if it reads tokens, else on arrays of zeros."""
    config = read_json_object(folder / "config.json")
    inputs = [key for key, _, _ in exported.inputs]
    names = json.dumps(inputs)
    lines = [
        f"folder = {json.dumps(card.name)}",
        'session = onnxruntime.InferenceSession(f"{folder}/model.onnx")',
    ]
    auto = ""
    if config.get("model_type") and card.texts.columns:
        architecture = next(iter(config.get("architectures") or [""]))
        auto = find_auto_class(architecture, own_classes(config))
    used = {"AutoTokenizer"}
    needs_numpy = False
    option = code_option(config)
    load_labels = LABELS.replace("{code}", option)
    load_tokenizer = f"tokenizer = AutoTokenizer.from_pretrained(folder{option})"
    call = [
        load_tokenizer,
        card.texts.tokenizer_call("np"),
        f"outputs = session.run(None, {{name: inputs[name] for name in {names}}})",
    ]
    if auto == "AutoModelForCausalLM" and TEXT_INPUTS.issuperset(inputs):
        prompt = CHAT if has_chat_template(folder) else TEXT
        needs_numpy = True
        lines += [load_tokenizer, "", *prompt.splitlines(), *_fill(CONTINUE, names, config, folder)]
    elif auto == "AutoModelForSeq2SeqLM" and {*TEXT_INPUTS, "decoder_input_ids"}.issuperset(inputs):
        needs_numpy = True
        lines += [load_tokenizer, card.texts.tokenizer_call("np"), *_fill(WRITE, names, config, folder)]
    elif not card.texts.columns or not TOKENIZER_INPUTS.issuperset(inputs):
        used = set()
        needs_numpy = True
        arrays = [f'"{key}": np.zeros({_sizes(shape)}, "{dtype}")' for key, dtype, shape in exported.inputs]
        lines += [f"inputs = {{{', '.join(arrays)}}}  # in place of your data", "outputs = session.run(None, inputs)"]
    elif auto == "AutoModelForTokenClassification":
        used.add("AutoConfig")
        lines += [load_tokenizer, load_labels, "", *PRINT_TAGS.replace("NAMES", names).splitlines()]
    elif auto == "AutoModelForSequenceClassification" and len(card.labels) == 1:
        lines += [*call, PRINT_NUMBERS]
    elif auto == "AutoModelForSequenceClassification" and card.labels:
        used.add("AutoConfig")
        has_several = config.get("problem_type") == "multi_label_classification"
        template = PRINT_CLASSES if has_several else PRINT_CLASS
        lines += [*call, load_labels, *template.splitlines()]
    else:
        lines += call
    imports = ["import onnxruntime"]
    if needs_numpy:
        imports.insert(0, "import numpy as np")
    if used:
        imports.append(f"from transformers import {', '.join(sorted(used))}")
    return [*imports, "", *lines]


def _fill(template: str, names: str, config: Mapping[str, Any], folder: Path) -> list[str]:
    """The lines of a template that generates texts: with the first tokens, the end tokens and the limit of the
    configuration."""
    settings = {**config, **read_json_object(folder / "generation_config.json")}
    ends = settings.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    begin = [settings.get("decoder_start_token_id")]
    if settings.get("forced_bos_token_id") is not None:
        begin.append(settings["forced_bos_token_id"])
    limit = LONGEST
    if template == WRITE and isinstance(settings.get("max_length"), int):
        limit = settings["max_length"] - len(begin)
    values = {"NAMES": names, "ENDS": json.dumps(ends), "BEGIN": json.dumps(begin), "LIMIT": str(limit)}
    for word, value in values.items():
        template = template.replace(word, value)
    return template.splitlines()


def _sizes(shape: str) -> str:
    """The code for a shape, with 2 for each size that may change: ``(2, 3)`` for ``[batch, 3]``."""
    sizes = []
    for size in shape.strip("[]").split(", "):
        if size:
            sizes.append(size if size.isdigit() else "2")
    return f"({', '.join(sizes)},)" if len(sizes) == 1 else f"({', '.join(sizes)})"

"""The README of an ONNX export: its inputs and outputs, and how to load it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop.export.card import ModelCard, add_checksum, code_option

if TYPE_CHECKING:
    from fastloop_tools.export.onnx_model import OnnxExport

TOKENIZER_INPUTS = {"input_ids", "attention_mask", "token_type_ids"}
"""Inputs that a tokenizer makes from texts."""


PRINT_CLASSES = """labels = AutoConfig.from_pretrained(folder{code}).id2label
for logits in outputs[0]:
    print([label for index, label in labels.items() if logits[index] > 0])  # a probability above 0.5"""
PRINT_CLASS = """labels = AutoConfig.from_pretrained(folder{code}).id2label
for logits in outputs[0]:
    print(labels[int(logits.argmax())])"""


def onnx_card(card: ModelCard, exported: OnnxExport, config: Mapping[str, Any]) -> str:
    """A page of Markdown.

    Args:
        card: The names in the page.
        exported: The signature of the model.
        config: The configuration beside the model; empty: it is no model of transformers.
    """
    labels = card.labels
    lines = card.head("onnx", f"ONNX with opset {exported.opset}")
    lines += ["| | name | dtype | shape |", "|---|---|---|---|"]
    for kind, rows in (("input", exported.inputs), ("output", exported.outputs)):
        lines += [f"| {kind} | `{key}` | {dtype} | `{shape}` |" for key, dtype, shape in rows]
    lines += ["", f"Sizes with a name may change. {exported}.", ""]
    printed: list[str] = []
    # A classifier of texts has the output logits of the shape [batch, 5], one of tokens [batch, sequence, 5].
    classifies = [(key, shape) for key, _, shape in exported.outputs] == [("logits", f"[batch, {len(labels)}]")]
    if classifies and len(labels) > 1:
        several_labels = config.get("problem_type") == "multi_label_classification"
        template = PRINT_CLASSES if several_labels else PRINT_CLASS
        printed = template.replace("{code}", code_option(config)).splitlines()
    inputs = [key for key, _, _ in exported.inputs]
    code = _code(card, inputs, printed, code_option(config))
    lines += ["```python", *code, "```", ""]
    lines += card.lines_below_code(bool(printed) and card.texts.tokenizer_call("np") in code)
    return add_checksum("\n".join(lines))


def _code(card: ModelCard, inputs: list[str], printed: Sequence[str], option: str) -> list[str]:
    """The lines that load the model and run it: on texts, if the tokenizer makes all of its inputs.

    Args:
        printed: Lines that print the classes of texts, with ``AutoConfig``; empty: the model does not classify texts.
        option: A result of ``code_option``.
    """
    place = f"folder = {json.dumps(card.name)}"
    session = 'session = onnxruntime.InferenceSession(f"{folder}/model.onnx")'
    if not card.texts.columns or not TOKENIZER_INPUTS.issuperset(inputs):
        arrays = ", ".join(f'"{key}": {key}' for key in inputs)
        return ["import onnxruntime", "", place, session, f"outputs = session.run(None, {{{arrays}}})  # numpy arrays"]
    return [
        "import onnxruntime",
        f"from transformers import {'AutoConfig, ' if printed else ''}AutoTokenizer",
        "",
        place,
        session,
        f"tokenizer = AutoTokenizer.from_pretrained(folder{option})",
        card.texts.tokenizer_call("np"),
        f"outputs = session.run(None, {{name: inputs[name] for name in {json.dumps(inputs)}}})",
        *printed,
    ]

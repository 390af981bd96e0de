"""The README of an ONNX export: its inputs and outputs, and how to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import __version__
from fastloop.export.card import MARK

if TYPE_CHECKING:
    from fastloop_tools.export.onnx_model import Exported


def onnx_card(name: str, source: str, labels: dict[int, str], exported: Exported) -> str:
    """A page of Markdown.

    Args:
        name: The folder's name.
        source: The name of the run or model that it was made from.
        labels: Class id -> name; empty: the model does not classify.
        exported: The signature of the model.
    """
    lines = ["---", "library_name: onnx", MARK, "---", f"# {source}", ""]
    lines += [f"Exported by fastloop {__version__} as ONNX with opset {exported.opset}.", ""]
    lines += ["| | name | dtype | shape |", "|---|---|---|---|"]
    for kind, rows in (("input", exported.inputs), ("output", exported.outputs)):
        lines += [f"| {kind} | `{key}` | {dtype} | `{shape}` |" for key, dtype, shape in rows]
    lines += ["", f"Sizes with a name may change. {exported}.", ""]
    inputs = ", ".join(f'"{key}": {key}' for key, _, _ in exported.inputs)
    load = f'onnxruntime.InferenceSession("{name}/model.onnx").run(None, {{{inputs}}})   # numpy arrays'
    lines += ["```python", load, "```", ""]
    if labels:
        lines += ["| id | label |", "|---:|---|", *(f"| {index} | {label} |" for index, label in labels.items()), ""]
    return "\n".join(lines)

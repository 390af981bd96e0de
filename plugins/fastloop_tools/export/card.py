"""The README of an export: its content, and how to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastloop import __version__

if TYPE_CHECKING:
    from fastloop_tools.export.onnx_model import Exported

LOAD = {
    "safetensors": 'AutoModel.from_pretrained("{name}")                  # transformers; or the Auto class of the task',
    "adapter": 'peft.PeftModel.from_pretrained(model, "{name}")   # model: the base model',
    "onnx": 'onnxruntime.InferenceSession("{name}/model.onnx").run(None, {{{inputs}}})   # numpy arrays',
}
"""Format -> how to load it, in Python."""


def card(to: str, name: str, source: str, labels: dict[int, str], exported: Exported | None, loads: bool) -> str:
    """A page of Markdown.

    Args:
        to: The format.
        name: The folder's name.
        source: The name of the run or model that it was made from.
        labels: Class id -> name; empty: the model does not classify.
        exported: The signature of an ONNX model.
        loads: Whether transformers can load the safetensors file.
    """
    library = {"onnx": "onnx", "adapter": "peft"}.get(to, "transformers" if loads else "pytorch")
    lines = ["---", f"library_name: {library}", "tags: [fastloop]", "---", f"# {source}", ""]
    form = f"ONNX with opset {exported.opset}" if exported else to
    lines += [f"Exported by fastloop {__version__} as {form}.", ""]
    if exported is not None:
        inputs = ", ".join(f'"{key}": {key}' for key, _, _ in exported.inputs)
        load = LOAD[to].format(name=name, inputs=inputs)
        lines += ["| | name | dtype | shape |", "|---|---|---|---|"]
        for kind, rows in (("input", exported.inputs), ("output", exported.outputs)):
            lines += [f"| {kind} | `{key}` | {dtype} | `{shape}` |" for key, dtype, shape in rows]
        lines += ["", f"Sizes with a name may change. {exported}.", ""]
    elif to == "safetensors" and not loads:
        load = f'model.load_state_dict(safetensors.torch.load_file("{name}/model.safetensors"))'
    else:
        load = LOAD[to].format(name=name)
    lines += ["```python", load, "```", ""]
    if labels:
        lines += ["| id | label |", "|---:|---|", *(f"| {index} | {label} |" for index, label in labels.items()), ""]
    return "\n".join(lines)

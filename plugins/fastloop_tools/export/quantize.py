"""Weights in int8: of an ONNX file by onnxruntime, or of a folder of transformers by torchao; the loss of quality."""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.errors import UsageError
from fastloop.export.card import EQUAL
from fastloop.problem import clause

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe

SPLIT = "validation"
"""The split whose metrics are compared."""
HEAD = ("", "float32", "int8", "difference")
"""The head of the table."""


def check(to: str, quantize: str | None) -> None:
    """Check that the form can be quantized.

    Raises:
        UsageError: It cannot, or torchao is not installed.
    """
    if quantize is None or to == "onnx":
        return
    if to == "adapter":
        raise UsageError("--quantize int8: found --to adapter, expected safetensors or onnx.", code="exclusive-options")
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(
            "--quantize int8: torchao>=0.18 is not installed.",
            code="not-installed",
            remedy="Install it:",
            command="pip install 'fastloop-train[int8]'",
        )


def quantize_onnx(file: Path) -> None:
    """Replace an ONNX file by one whose matrices are in int8, with onnxruntime's dynamic quantization.

    The matrices are int8, and onnxruntime also rounds the inputs of their products to 8 bits, with a scale for each
    tensor.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from fastloop_tools.export.onnx_model import LARGEST_FILE

    model = onnx.load(file)
    size = size_of(file.parent)
    del model.graph.value_info[:]  # shapes of the exporter that contradict those of the quantizer
    for path in file.parent.glob("model.onnx*"):
        path.unlink()
    quantize_dynamic(model, file, weight_type=QuantType.QInt8, use_external_data_format=size > 4 * LARGEST_FILE)


def quantize_folder(model: nn.Module, source: Path, made: Path) -> None:
    """Write a model of transformers with the matrices of its linear layers in int8, one scale for each row.

    Args:
        model: The model of ``source``, whose weights are replaced by those written.

    Raises:
        UsageError: It is not a model of transformers.
    """
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import PreTrainedModel, TorchAoConfig

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"--quantize int8: {type(model).__name__} is not a model of transformers.",
            code="unsupported-model",
            remedy="Use --to onnx.",
        )
    quantized = type(model).from_pretrained(source, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    for path in made.glob("*.safetensors*"):
        path.unlink()
    quantized.save_pretrained(made)
    model.load_state_dict(type(model).from_pretrained(made).state_dict(), assign=True)


def use_onnx(model: nn.Module, file: Path) -> None:
    """Let onnxruntime compute the forward pass of a model, on the CPU."""
    import onnxruntime
    import torch

    from fastloop_plugins._targets import IGNORED

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    signature = inspect.signature(model.forward)
    taken = [value.name for value in session.get_inputs()]
    names = [value.name for value in session.get_outputs()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        outputs = session.run(None, {name: bound[name].numpy() for name in taken})
        tensors = dict(zip(names, map(torch.from_numpy, outputs), strict=True))
        if names == ["output"]:
            return tensors["output"]
        targets = bound.get("targets")
        if targets is not None:  # of `causal-lm`
            logits = tensors["logits"].flatten(0, 1)
            tensors["loss"] = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
        return types.SimpleNamespace(**tensors)

    model.forward = forward


def measure(recipe: Recipe, model: Path, change: Callable[[nn.Module], None]) -> list[tuple[str, float, float]]:
    """``(metric, value before, value after)`` on the validation split, in float32 on the CPU; empty: it cannot be read.

    Args:
        model: The folder of the exported model.
        change: Quantizes the model that it gets.

    Raises:
        UsageError: The task's loss needs more than the outputs of the ONNX file.
    """
    from fastloop import loop
    from fastloop.recipe import Inference
    from fastloop_tools.export import calls

    recipe.inference = Inference(model, SPLIT)
    with calls.open_exported(recipe, [SPLIT]) as (run, has_data):
        if has_data:
            loop.evaluate(run, SPLIT)
            before = dict(run.state.metrics[SPLIT])
        change(run.unwrap_model())
        if not has_data:
            return []
        try:
            loop.evaluate(run, SPLIT)
        except (AttributeError, KeyError, UsageError) as error:
            raise UsageError(
                f"--quantize int8: the metrics cannot be computed from the outputs of the ONNX file: {clause(error)}.",
                code="metric-failed",
                remedy="Leave out --quantize to export the model in float32, or remove the metrics that need other "
                "outputs from the recipe.",
            ) from None
        return [(name, value, run.state.metrics[SPLIT][name]) for name, value in before.items()]


def size_of(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    files = [*folder.glob("*.safetensors"), *folder.glob("model.onnx*")]
    return sum(path.stat().st_size for path in files)


def describe_rounding(page: str, comparison: str) -> str:
    """The README of an export, to which a table of the metrics before and after rounding is added.

    Args:
        page: The README of the weights in float32.
        comparison: Its comparison of an ONNX model with the torch model, in float32, too; empty for another model.
    """
    page = page.replace(f" {EQUAL}", "")
    if comparison:
        page = page.replace(comparison, f"Before the weights were rounded, {comparison}")
    lines = [page, "The weights are then rounded to int8, so the outputs differ from those of `fastloop predict`.", ""]
    return "\n".join(lines)


def describe(rows: Iterable[tuple[str, float, float]], before: int, after: int) -> list[list[str]]:
    """The rows of a table of the metrics and the size, before and after."""
    cells = [[f"{SPLIT} {name}", f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}"] for name, old, new in rows]
    cells = cells or [[f"{SPLIT} metrics", "unknown", "unknown", "no data"]]
    sizes = [f"{size / 2**20:.2f}" for size in (before, after)]
    return [*cells, ["MiB", *sizes, f"{after / before - 1:+.0%}"]]

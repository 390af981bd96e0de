"""Export to ONNX with torch's exporter, and compare the result with the model in onnxruntime."""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastloop.errors import FastloopError, UsageError, first_cause
from fastloop.problem import typed_clause
from fastloop.runtime.files import refuse_full_disk
from fastloop_plugins.tasks.shared.forward import name_elements
from fastloop_tools.export.calls import Calls

OPSET = 20
"""Version of the ONNX operators: torch's default. onnxruntime reads it since 1.17."""
TOLERANCE = 1e-4
"""Largest accepted difference of an output, as a share of the largest output if that is above 1. Both compute in
float32, in another order."""
LARGEST_FILE = 2**30
"""Bytes of weights up to which they are in the file model.onnx. Protobuf limits a file to 2 GiB; more weights are in
model.onnx.data."""


@dataclass
class OnnxExport:
    """The signature of a model that is exported to ONNX, and its comparison with the model of torch.

    Attributes:
        inputs: ``(name, dtype, shape)`` of each input. A shape has numbers, and names of sizes that may change.
        outputs: The same of each output.
        difference: The largest absolute difference between onnxruntime and torch.
        tolerance: The largest accepted difference.
        shapes: The shape of the first input in each comparison.
        synthetic: Whether the compared batches are of random tokens.
        opset: Version of the ONNX operators, as the file has it.
    """

    inputs: list[tuple[str, str, str]]
    outputs: list[tuple[str, str, str]]
    difference: float
    tolerance: float
    shapes: list[str]
    synthetic: bool
    opset: int

    def __str__(self) -> str:
        data = "synthetic batches" if self.synthetic else "batches of the recipe's data"
        return (
            f"onnxruntime {version('onnxruntime')} equals torch {version('torch')}: largest difference "
            f"{self.difference:.1e} of {self.tolerance:.1e} accepted, on {data} of the shapes {', '.join(self.shapes)}"
        )


class Positional(nn.Module):
    """A model that takes its tensors by position, and returns a tuple of tensors.

    Args:
        names: The names of the tensors.
        constants: Further arguments.
    """

    def __init__(self, model: nn.Module, names: list[str], constants: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.constants = dict(constants)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of ``outputs_of``."""
        return tuple(outputs_of(self.model(**dict(zip(self.names, tensors, strict=True)), **self.constants)).values())


def outputs_of(result: Any) -> dict[str, Tensor]:
    """Name -> tensor of a model's result: its ``logits`` alone, a tensor as ``output``, or all tensors of a mapping or
    a sequence without the loss.

    Raises:
        UsageError: There is no tensor in it.
    """
    logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
    named: dict[str, Any] = {}
    if isinstance(logits, Tensor):
        named = {"logits": logits}
    elif isinstance(result, Tensor):
        named = {"output": result}
    elif isinstance(result, Mapping):
        named = dict(result)
    elif isinstance(result, tuple | list):
        named = name_elements(result)
    tensors = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and name != "loss":
            tensors[str(name)] = value
    if not tensors:
        raise UsageError(
            f"the model returns a {type(result).__name__} without tensors, which ONNX cannot express.",
            code="unsupported-model",
            remedy="Let its forward return a tensor, or a mapping or sequence of tensors.",
        )
    return tensors


def export_onnx(model: nn.Module, calls: Calls, folder: Path, where: str) -> OnnxExport:
    """Write ``model.onnx``, and compare it with the model.

    Args:
        model: In eval mode, on the CPU.
        where: The model's name in messages.

    Raises:
        UsageError: The exporter or onnxruntime cannot handle the model.
        FastloopError: The outputs differ by more than the tolerance.
    """
    names = list(calls.axes)
    file = folder / "model.onnx"
    wrapped = Positional(model, names, calls.constants).eval()
    example = max(calls.tensors, key=lambda call: math.prod(call[names[0]].shape))
    tensors = tuple(_double_single_axes(example[name], calls.axes[name]) for name in names)
    label = f"{where}: {type(model).__name__} cannot be exported to ONNX"
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    try:
        with torch.no_grad(), _quiet():
            outputs = outputs_of(model(**dict(zip(names, tensors, strict=True)), **calls.constants))
            program: Any = torch.onnx.export(
                wrapped,
                tensors,
                dynamo=True,
                opset_version=OPSET,
                input_names=names,
                output_names=list(outputs),
                dynamic_shapes=(tuple(calls.axes[name] for name in names),),
                verbose=False,
            )
            program.save(file, external_data=size > LARGEST_FILE)
    except Exception as error:
        refuse_full_disk(error, file)
        raise UsageError(f"{label}. The exporter reports: {_reason(error)}.", code="export-failed") from None
    try:
        difference, largest, shapes = compare(wrapped, calls, file)
    except Exception as error:
        raise UsageError(f"{label}. onnxruntime reports: {_reason(error)}.", code="export-failed") from None
    tolerance = TOLERANCE * max(1.0, largest)
    if not difference <= tolerance:
        raise FastloopError(
            f"the exported model differs from {type(model).__name__}: largest difference {difference:.3g}, expected "
            f"at most {tolerance:.3g}, on batches of the shapes {', '.join(shapes)}. Nothing was written.",
            code="export-differs",
            place=where,
            remedy="Look for random numbers and for branches on values of tensors in its forward: the file repeats "
            "those of one pass. `--to safetensors` exports the model without such a pass.",
        )
    inputs = [(name, _dtype(tensor), _shape(tensor, calls.axes[name])) for name, tensor in example.items()]
    sizes = {value.name: str(value.shape).replace(",", ", ") for value in program.model.graph.outputs}
    described = [(name, _dtype(tensor), sizes[name]) for name, tensor in outputs.items()]
    return OnnxExport(
        inputs, described, difference, tolerance, shapes, calls.synthetic, program.model.opset_imports[""]
    )


@torch.no_grad()
def compare(model: nn.Module, calls: Calls, file: Path) -> tuple[float, float, list[str]]:
    """The largest absolute difference of an output in onnxruntime, the largest absolute output in torch, and the shapes
    compared."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    taken = {value.name for value in session.get_inputs()}
    difference = 0.0
    largest = 0.0
    shapes = []
    for tensors in calls.variants():
        expected = model(*(tensors[name] for name in calls.axes))
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in tensors.items() if name in taken})
        for of_torch, of_onnx in zip(expected, outputs, strict=True):
            error = (of_torch.double() - torch.from_numpy(of_onnx).double()).abs().max().item()
            difference = error if math.isnan(error) else max(difference, error)
            largest = max(largest, of_torch.double().abs().max().item())
        shapes.append("x".join(map(str, next(iter(tensors.values())).shape)))
    return difference, largest, shapes


def _double_single_axes(tensor: Tensor, axes: Mapping[int, str]) -> Tensor:
    """A tensor with at least two values on each axis that may change: the exporter takes a size of 1 for a constant."""
    for axis in axes:
        if tensor.shape[axis] == 1:
            tensor = torch.cat([tensor, tensor], axis)
    return tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor, axes: Mapping[int, str]) -> str:
    return f"[{', '.join(axes.get(axis, str(size)) for axis, size in enumerate(tensor.shape))}]"


def _reason(error: BaseException) -> str:
    """The first line of the innermost error that the exporter wraps, and the line of the model's code that its message
    names."""
    innermost = first_cause(error)
    places = re.findall(r'File "(.+)", line (\d+), in \w+', str(innermost))
    line = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
    return typed_clause(innermost) + line


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the exporter's messages about its own work, and the graph that it prints when it fails."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.filterwarnings("ignore", message="# The axis name")  # the inputs share an axis
            # torch copies its own deprecated class
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            yield
    finally:
        logging.disable(disabled)

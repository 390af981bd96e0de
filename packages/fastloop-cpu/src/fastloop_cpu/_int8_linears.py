"""Linear layers in 8 bits, by the kernel in ``int8_linears.c``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastloop_cpu._cpu_layers import is_plain
from fastloop_cpu._native import INSTRUCTIONS, load, operation, unavailable_kernels

SOURCE = Path(__file__).with_name("int8_linears.c")
NEEDED = INSTRUCTIONS | {"avx512_vnni"}
"""Instruction sets that the kernel uses."""
LANES = 16
"""Numbers of a row that the kernel packs at once: the number of inputs is a multiple of it."""
MOST_INPUTS = 2**16
"""A sum of 32 bits holds as many products of 8 bits."""
PANEL = 64
"""Columns that the kernel computes at once: the number of outputs is a multiple of it."""
BLOCK = 48
"""Rows that a thread packs at once."""
LARGEST = 127
"""The largest whole number of a weight."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of inputs and outputs."""


class Arguments(ctypes.Structure):
    """Arguments of the kernel: ``struct linear`` in the C file."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "inner", "columns")),
        *((name, ctypes.c_void_p) for name in ("input", "weight", "scales", "sums", "bias", "output", "packed")),
        *((name, ctypes.c_int32) for name in ("wide_input", "wide_output", "threads")),
    )


@dataclass(frozen=True)
class Int8Weight:
    """The weight of a linear layer in 8 bits: ``scales[c] * whole[c][k]`` is near to ``weight[c][k]``.

    Attributes:
        packed: int8 (outputs / 64, inputs / 4, 64, 4): the whole numbers, in the order in which the kernel reads them.
        scales: float32 (outputs,).
        sums: int32 (outputs,): the sum of the whole numbers of each output.
    """

    packed: Tensor
    scales: Tensor
    sums: Tensor


@dataclass
class Switch:
    """Whether the linear layers of a model compute in 8 bits now.

    Attributes:
        is_on: False: they compute as they did before.
        calls: Number of products that were computed in 8 bits.
    """

    is_on: bool = True
    calls: int = 0


def unavailable() -> str | None:
    """Why the kernel cannot run on this machine; None: it can, and is compiled."""
    return unavailable_kernels(SOURCE, NEEDED)


def has_kernel(inputs: int, outputs: int) -> bool:
    """Whether the kernel computes a layer of this size."""
    return inputs % LANES == 0 and inputs <= MOST_INPUTS and outputs % PANEL == 0


def quantize(weight: Tensor) -> Int8Weight:
    """Round a weight to 8 bits, with one scale for each output.

    Args:
        weight: float32 (outputs, inputs), of a size that ``has_kernel`` accepts.
    """
    outputs, inputs = weight.shape
    scales = weight.abs().amax(dim=1) / LARGEST
    divisors = torch.where(scales > 0, scales, 1)
    whole = (weight / divisors[:, None]).round().to(torch.int8)
    # output 70, input 9 is packed[1][2][6][1]: panel 1, group 2 of four inputs, output 6 of its panel, input 1 of its
    # group
    packed = whole.view(outputs // PANEL, PANEL, inputs // 4, 4).transpose(1, 2).contiguous()
    return Int8Weight(packed, scales, whole.sum(dim=1, dtype=torch.int32))


def multiply(input: Tensor, weight: Int8Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``input * weight^T + bias``. Each row of the input is rounded to 8 bits, with its own scale and zero point.

    Args:
        input: (..., inputs), float32 or bf16, on the CPU.
        bias: float32 (outputs,), contiguous, or None.
        dtype: The dtype of the result: float32 or bf16.

    Returns:
        (..., outputs). Rows with a number that is not finite are NaN.

    Raises:
        ValueError: A tensor has another dtype, device or shape: the kernel would read or write outside of it.
    """
    outputs = len(weight.scales)
    inputs = weight.packed.numel() // outputs
    fits = input.dtype in DTYPES and input.device.type == "cpu" and input.shape[-1] == inputs
    if not fits or dtype not in DTYPES:
        raise ValueError(
            f"int8-linears: found an input of {tuple(input.shape)} in {input.dtype} on {input.device.type}, for an "
            f"output in {dtype}, expected (..., {inputs}) on cpu, both in {DTYPES[0]} or {DTYPES[1]}."
        )
    if bias is not None and (bias.dtype, bias.shape, bias.is_contiguous()) != (torch.float32, (outputs,), True):
        raise ValueError(
            f"int8-linears: found a bias of {tuple(bias.shape)} in {bias.dtype}, expected ({outputs},) in {DTYPES[0]}."
        )
    input = input.contiguous()
    output = torch.empty((*input.shape[:-1], outputs), dtype=dtype)
    threads = torch.get_num_threads()
    packed = torch.empty(threads * BLOCK * inputs, dtype=torch.uint8)
    arguments = Arguments(
        rows=input.numel() // inputs,
        inner=inputs,
        columns=outputs,
        input=input.data_ptr(),
        weight=weight.packed.data_ptr(),
        scales=weight.scales.data_ptr(),
        sums=weight.sums.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        output=output.data_ptr(),
        packed=packed.data_ptr(),
        wide_input=input.dtype == torch.float32,
        wide_output=dtype == torch.float32,
        threads=threads,
    )
    with operation("int8_linear"):
        load(SOURCE).linear_forward(ctypes.byref(arguments))
    return output


def compute(linear: nn.Linear, forward: Any, weight: Int8Weight, switch: Switch, input: Tensor) -> Tensor:
    """The forward of an ``nn.Linear``. It computes as before where gradients may be needed."""
    is_autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if is_autocast else input.dtype
    fits = type(input) is Tensor and input.dtype in DTYPES and dtype in DTYPES
    if not fits or not switch.is_on or torch.is_grad_enabled():
        exact: Tensor = forward(input)
        return exact
    switch.calls += 1
    return multiply(input, weight, linear.bias, dtype)


def use(model: nn.Module) -> Switch | None:
    """Compute the linear layers of a model in 8 bits. Their weights stay as they are. None: it has no such layer."""
    switch = Switch()
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and can_quantize(module):
            weight = quantize(module.weight.detach())
            module.forward = partial(compute, module, module.forward, weight, switch)  # type: ignore[method-assign]
            count += 1
    return switch if count else None


def can_quantize(linear: nn.Linear) -> bool:
    """Whether the kernel computes this layer: no hook or strategy needs its own forward."""
    if not is_plain(linear) or not has_kernel(linear.in_features, linear.out_features):
        return False
    return linear.bias is None or linear.bias.dtype == torch.float32

"""Norm with residual, gated activation and rotary embedding of decoders, by the kernels in ``cpu_decoder.c``."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastloop_cpu._cpu_layers import LANES, WIDEST, fits, has_hooks, has_kernel, has_plain_weight
from fastloop_cpu._native import load, operation

SOURCE = Path(__file__).with_name("cpu_decoder.c")
ROTARY = "apply_rotary_pos_emb"
"""The function of transformers that rotates queries and keys."""
CHILDREN_OF_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
CHILDREN_OF_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
CHILDREN_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
NORMS_OF_HEADS = ("q_norm", "k_norm")
"""Children of an attention module that normalize queries and keys before they are rotated."""


class NormArguments(ctypes.Structure):
    """Arguments of the norm: ``struct norm`` in the C file."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("branch", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("normal", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("output_grad", ctypes.c_void_p),
        ("sum_grad", ctypes.c_void_p),
        ("input_grad", ctypes.c_void_p),
        ("branch_grad", ctypes.c_void_p),
        ("weight_grads", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("narrow_input", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class GateArguments(ctypes.Structure):
    """Arguments of the gated activation: ``struct gate`` in the C file."""

    _fields_ = (
        ("numbers", ctypes.c_int64),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("output_grad", ctypes.c_void_p),
        ("gate_grad", ctypes.c_void_p),
        ("up_grad", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    )


class RotationArguments(ctypes.Structure):
    """Arguments of the rotary embedding: ``struct rotate`` in the C file."""

    _fields_ = (
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("angles", ctypes.c_int64),
        ("input", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("backward", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def address(name: str, tensor: Tensor, dtype: torch.dtype, numbers: int) -> int:
    """The address of a tensor for a kernel. The caller keeps the tensor until the kernel has returned.

    Raises:
        ValueError: The tensor has another dtype or size, is not contiguous or not on the CPU: the kernel would read or
            write outside of it.
    """
    expected = (dtype, "cpu", numbers, True)
    layout = (tensor.dtype, tensor.device.type, tensor.numel(), tensor.is_contiguous())
    if layout != expected:
        raise ValueError(
            f"cpu-layers: {name}: found {layout}, expected {expected} (dtype, device, numbers, contiguous)."
        )
    return tensor.data_ptr()


def check_columns(name: str, columns: int) -> None:
    """Raise a ``ValueError`` for rows that the kernels do not compute."""
    if not has_kernel(columns):
        raise ValueError(f"cpu-layers: {name}: found {columns} columns, expected a multiple of {LANES} up to {WIDEST}.")


def call(name: str, arguments: ctypes.Structure) -> None:
    """Call a kernel of the C file on torch's threads."""
    arguments.threads = torch.get_num_threads()
    with operation(name):
        getattr(load(SOURCE), name)(ctypes.byref(arguments))


class RMSNorm(torch.autograd.Function):
    """The sum of a residual and a branch, and its norm: sum / sqrt(mean(sum^2) + eps) * weight.

    Shapes: residual (..., columns) in float32, or in bf16 if there is no branch; branch (or None) of this shape in
    bf16; weight (columns,) in float32. Returns the sum in the dtype of residual, and the norm in bf16. Without a
    branch, the sum is residual: a layer that uses both outputs has the sum of their gradients from the kernel.
    Backward keeps the normalized rows in bf16, and one float32 for each row.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the sum and its norm."""
        columns = residual.shape[-1]
        check_columns("rms_norm_forward", columns)
        rows = residual.contiguous()
        output = torch.empty(rows.shape, dtype=torch.bfloat16)
        factors = torch.empty(rows.shape[:-1], dtype=torch.float32)
        arguments = NormArguments(
            rows=factors.numel(),
            columns=columns,
            input=address("residual", rows, rows.dtype if branch is None else torch.float32, rows.numel()),
            weight=address("weight", weight, torch.float32, columns),
            output=output.data_ptr(),
            factors=factors.data_ptr(),
            epsilon=eps,
            narrow_input=is_narrow(rows),
        )
        total = residual
        if branch is not None:
            total = torch.empty_like(rows)
            branch = branch.contiguous()
            arguments.branch = address("branch", branch, torch.bfloat16, rows.numel())
            arguments.sum = total.data_ptr()
        normal = None
        if any(ctx.needs_input_grad):
            normal = torch.empty_like(output)
            arguments.normal = normal.data_ptr()
        call("rms_norm_forward", arguments)
        ctx.save_for_backward(weight, normal, factors)
        ctx.dtype = rows.dtype
        ctx.set_materialize_grads(False)
        return total, output

    @staticmethod
    @once_differentiable  # autograd does not see the kernel: a second derivative would lack terms
    def backward(ctx: Any, sum_grad: Tensor | None, output_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of residual, branch and weight."""
        weight, normal, factors = ctx.saved_tensors
        numbers = normal.numel()
        output_grad = torch.zeros_like(normal) if output_grad is None else output_grad.contiguous()
        of_residual = torch.empty(normal.shape, dtype=ctx.dtype)
        arguments = NormArguments(
            rows=factors.numel(),
            columns=len(weight),
            weight=weight.data_ptr(),
            normal=normal.data_ptr(),
            factors=factors.data_ptr(),
            output_grad=address("output_grad", output_grad, torch.bfloat16, numbers),
            input_grad=of_residual.data_ptr(),
            narrow_input=is_narrow(of_residual),
        )
        if sum_grad is not None:
            sum_grad = sum_grad.contiguous()
            arguments.sum_grad = address("sum_grad", sum_grad, ctx.dtype, numbers)
        of_branch = None
        if ctx.needs_input_grad[1]:
            of_branch = torch.empty_like(normal)
            arguments.branch_grad = of_branch.data_ptr()
        sums = None
        if ctx.needs_input_grad[2]:
            sums = torch.zeros(torch.get_num_threads(), len(weight), dtype=torch.float32)
            arguments.weight_grads = sums.data_ptr()
        call("rms_norm_backward", arguments)
        of_weight = None if sums is None else sums.sum(0)
        return of_residual, of_branch, of_weight, None


def is_narrow(rows: Tensor) -> bool:
    """Whether rows are in bf16 instead of float32."""
    if rows.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"cpu-layers: residual: found {rows.dtype}, expected float32 or bfloat16.")
    return rows.dtype == torch.bfloat16


class Gate(torch.autograd.Function):
    """silu(gate) * up, for two tensors of one shape in bf16, whose number of elements is a multiple of ``LANES``.
    Returns bf16. Backward keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the product."""
        check_columns("gate_forward", gate.shape[-1])
        gate = gate.contiguous()
        up = up.contiguous()
        output = torch.empty_like(gate)
        arguments = GateArguments(
            numbers=gate.numel(),
            gate=address("gate", gate, torch.bfloat16, gate.numel()),
            up=address("up", up, torch.bfloat16, gate.numel()),
            output=output.data_ptr(),
        )
        call("gate_forward", arguments)
        ctx.save_for_backward(gate, up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        gate, up = ctx.saved_tensors
        output_grad = output_grad.contiguous()
        of_gate = torch.empty_like(gate)
        of_up = torch.empty_like(up)
        arguments = GateArguments(
            numbers=gate.numel(),
            gate=gate.data_ptr(),
            up=up.data_ptr(),
            output_grad=address("output_grad", output_grad, torch.bfloat16, gate.numel()),
            gate_grad=of_gate.data_ptr(),
            up_grad=of_up.data_ptr(),
        )
        call("gate_backward", arguments)
        return of_gate, of_up


class Rotation(torch.autograd.Function):
    """Rotary position embedding: heads * cos + rotate_half(heads) * sin.

    Shapes: heads (B, H, T, features) in bf16; cos and sin (B or 1, T, features) in float32. Returns bf16 of the shape
    of heads, in the memory layout (B, T, H, features). cos and sin have no gradient. Backward keeps them alone.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the heads."""
        ctx.save_for_backward(cos, sin)
        return rotate_rows(heads, cos, sin, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of heads: the opposite rotation."""
        cos, sin = ctx.saved_tensors
        return rotate_rows(output_grad, cos, sin, backward=True), None, None


def rotate_rows(heads: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """The kernel of ``Rotation`` and of its gradient."""
    rows = heads.transpose(1, 2).contiguous()
    batch, tokens, count, size = rows.shape
    check_columns("rotate", size)
    angles = tokens if len(cos) == 1 else batch * tokens  # example: 2 texts of 3 tokens have 3 or 6 rows of cos
    cos = cos.contiguous()
    sin = sin.contiguous()
    output = torch.empty_like(rows)
    arguments = RotationArguments(
        tokens=batch * tokens,
        heads=count,
        size=size,
        angles=angles,
        input=address("heads", rows, torch.bfloat16, rows.numel()),
        cos=address("cos", cos, torch.float32, angles * size),
        sin=address("sin", sin, torch.float32, angles * size),
        output=output.data_ptr(),
        backward=backward,
    )
    call("rotate", arguments)
    return output.transpose(1, 2)


def compute_layer(module: Any, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of a decoder layer. The residual stream stays in float32; the input of products is bf16."""
    first = module.input_layernorm
    second = module.post_attention_layernorm
    if args or not fits(hidden_states, first, second) or hidden_states.dtype != torch.float32:
        plain: Tensor = forward(hidden_states, *args, **kwargs)
        return plain
    residual, normal = RMSNorm.apply(hidden_states, None, first.weight, first.variance_epsilon)  # type: ignore[no-untyped-call]
    attended = module.self_attn(hidden_states=normal, **kwargs)[0].to(torch.bfloat16)
    residual, normal = RMSNorm.apply(residual, attended, second.weight, second.variance_epsilon)  # type: ignore[no-untyped-call]
    output: Tensor = residual + module.mlp(normal)
    return output


def compute_mlp(module: Any, forward: Any, hidden_states: Tensor) -> Tensor:
    """The forward of a gated MLP. Its linear layers may have adapters."""
    if not fits(hidden_states):
        plain: Tensor = forward(hidden_states)
        return plain
    gate = module.gate_proj(hidden_states).to(torch.bfloat16)
    up = module.up_proj(hidden_states).to(torch.bfloat16)
    if has_kernel(gate.shape[-1]) and not has_hooks(module.act_fn):
        product = Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    else:  # such as columns that a strategy has divided
        product = module.act_fn(gate) * up
    output: Tensor = module.down_proj(product)
    return output


def normalize_heads(module: Any, forward: Any, heads: Tensor) -> Tensor:
    """The forward of a norm of queries or keys, before they are rotated."""
    if heads.dtype != torch.bfloat16 or not fits(heads) or not has_plain_weight(module):
        plain: Tensor = forward(heads)
        return plain
    output: Tensor = RMSNorm.apply(heads, None, module.weight, module.variance_epsilon)[1]  # type: ignore[no-untyped-call]
    return output


def rotate(
    plain: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """transformers' ``apply_rotary_pos_emb``, which is ``plain``."""
    size = query.shape[-1]
    narrow = query.dtype == key.dtype == torch.bfloat16
    whole = cos.shape[-1] == size and has_kernel(size) and unsqueeze_dim == 1 and query.dim() == 4
    if not (narrow and whole and fits(query)):
        rotated: tuple[Tensor, Tensor] = plain(query, key, cos, sin, unsqueeze_dim)
        return rotated
    cos = cos.float()
    sin = sin.float()
    return Rotation.apply(query, cos, sin), Rotation.apply(key, cos, sin)  # type: ignore[no-untyped-call]


def with_kernel_of_rotary(module: nn.Module) -> Any:
    """The forward of an attention module, in which transformers' function ``ROTARY`` is the kernel; None: the forward
    has no such function.

    transformers has no setting for the function. The forward is a copy with names of its own, so that other models of
    the process keep theirs.
    """
    method: Any = type(module).forward
    names = method.__globals__
    if ROTARY not in method.__code__.co_names or ROTARY not in names:
        return None
    names = names | {ROTARY: partial(rotate, names[ROTARY])}
    copy = FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    return MethodType(copy, module)


def is_rms_norm(module: Any) -> bool:
    """Whether a module is an RMS norm whose width has a kernel."""
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    return has_kernel(len(module.weight))


def replacement(module: nn.Module) -> Any:
    """The method that computes this module's forward with the kernels; None: there is none."""
    from transformers.activations import SiLUActivation

    if not type(module).__module__.startswith("transformers.") or "forward" in vars(module):
        return None
    children: dict[str, Any] = dict(module.named_children())
    if children.keys() == CHILDREN_OF_LAYER:
        computes = is_rms_norm(children["input_layernorm"]) and is_rms_norm(children["post_attention_layernorm"])
        return partial(compute_layer, module, module.forward) if computes else None
    if children.keys() == CHILDREN_OF_MLP:
        is_silu = isinstance(children["act_fn"], (nn.SiLU, SiLUActivation))
        computes = is_silu and has_kernel(children["gate_proj"].out_features)
        return partial(compute_mlp, module, module.forward) if computes else None
    if CHILDREN_OF_ATTENTION <= children.keys():
        return with_kernel_of_rotary(module)
    return None


def use(model: nn.Module) -> int:
    """Replace the forward of each module that the kernels compute; returns how many there are. Only for a model whose
    type is in ``cpu_layers.DECODERS``: other types have modules of the same names with other formulas."""
    replaced: dict[nn.Module, Any] = {}
    for module in model.modules():
        method = replacement(module)
        if method is None:
            continue
        replaced[module] = method
        for name in NORMS_OF_HEADS:
            norm: Any = getattr(module, name, None)
            if is_rms_norm(norm):
                replaced[norm] = partial(normalize_heads, norm, norm.forward)
    for module, method in replaced.items():
        module.forward = method
    return len(replaced)

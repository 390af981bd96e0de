"""Bias, dropout, residual and layer norm, and bias and GELU, by the kernels in ``cpu_layers.c``."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fastloop_cpu._native import draw_dropout, load, operation

SOURCE = Path(__file__).with_name("cpu_layers.c")
LANES = 32
"""Columns that the kernels compute at once: the number of columns is a multiple of it."""
WIDEST = 2**14
"""Most columns: the kernel of the norm keeps a row in the stack of a thread, 4 bytes for each column."""


class Layer(ctypes.Structure):
    """Arguments of the kernels: ``struct layer`` in the C file."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("input", "bias", "output", "output_grad", "input_grad", "sums")
            + ("residual", "weight", "shift", "normal", "factors", "residual_grad")
        ),
        ("epsilon", ctypes.c_float),
        ("drop", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
    )


def has_kernel(columns: int) -> bool:
    """Whether the kernels compute rows of this many columns."""
    return columns % LANES == 0 and columns <= WIDEST


def call(name: str, columns: int, options: dict[str, Any], **tensors: Tensor | None) -> None:
    """Call a kernel.

    Args:
        name: Its name in the C file.
        columns: Numbers in a row, a multiple of ``LANES``.
        options: Numbers of ``struct layer``.
        tensors: bf16 of one shape (..., columns), or float32, contiguous, on the CPU; see ``struct layer``.

    Raises:
        ValueError: A tensor has another dtype, device or shape: the kernel would read or write outside of it.
    """
    present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    rows = present["input" if "input" in present else "normal"].numel() // columns
    sizes = {"sums": torch.get_num_threads() * 3 * columns, "factors": rows}
    sizes |= dict.fromkeys(("bias", "weight", "shift"), columns)
    for key, tensor in present.items():
        expected = (torch.float32 if key in sizes else torch.bfloat16, "cpu", sizes.get(key, rows * columns), True)
        layout = (tensor.dtype, tensor.device.type, tensor.numel(), tensor.is_contiguous())
        if layout != expected or not has_kernel(columns):
            raise ValueError(
                f"cpu-layers: {name}: {key}: found {layout}, expected {expected} (dtype, device, numbers, contiguous), "
                f"and a multiple of {LANES} columns up to {WIDEST}, not {columns}."
            )
    addresses = {key: tensor.data_ptr() for key, tensor in present.items()}
    layer = Layer(rows=rows, columns=columns, threads=torch.get_num_threads(), **addresses, **options)
    with operation(name):
        getattr(load(SOURCE), name)(ctypes.byref(layer))


class Norm(torch.autograd.Function):
    """layer_norm(dropout(input + bias) + residual).

    Shapes: input and residual (..., columns), bf16; bias (or None), weight and shift (columns,), float32. Returns bf16
    of the shape of input. Backward keeps the normalized rows, and one float32 for each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        shift: Tensor,
        eps: float,
        p: float,
    ) -> Tensor:
        """Draw a seed for the dropout mask from torch's default generator, and compute."""
        input = input.contiguous()
        residual = residual.contiguous()
        ctx.options = draw_dropout(p)
        output = torch.empty_like(input)
        factors = torch.empty(input.shape[:-1], dtype=torch.float32)
        normal = torch.empty_like(input) if any(ctx.needs_input_grad) else None
        call(
            "norm_forward",
            input.shape[-1],
            {"epsilon": eps, **ctx.options},
            input=input,
            bias=bias,
            residual=residual,
            weight=weight,
            shift=shift,
            output=output,
            normal=normal,
            factors=factors,
        )
        ctx.save_for_backward(weight, normal, factors)
        ctx.biased = bias is not None
        return output

    @staticmethod
    @once_differentiable  # autograd does not see the kernel: a second derivative would lack terms
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input, bias, residual, weight and shift, with the same mask."""
        weight, normal, factors = ctx.saved_tensors
        of_input = torch.empty_like(normal)
        of_residual = torch.empty_like(normal)
        sums = torch.zeros(torch.get_num_threads(), 3, len(weight), dtype=torch.float32)
        call(
            "norm_backward",
            len(weight),
            ctx.options,
            output_grad=output_grad.contiguous(),
            input_grad=of_input,
            residual_grad=of_residual,
            weight=weight,
            normal=normal,
            factors=factors,
            sums=sums,
        )
        of_bias, of_weight, of_shift = sums.sum(0)
        return of_input, of_bias if ctx.biased else None, of_residual, of_weight, of_shift, None, None


class Gelu(torch.autograd.Function):
    """GELU(input + bias), for input of shape (..., columns) in bf16 and bias of shape (columns,) in float32, or None.
    Returns bf16. Backward keeps input and bias."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the exact GELU, with the error function."""
        input = input.contiguous()
        output = torch.empty_like(input)
        call("gelu_forward", input.shape[-1], {}, input=input, bias=bias, output=output)
        ctx.save_for_backward(input, bias)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of input and bias."""
        input, bias = ctx.saved_tensors
        columns = input.shape[-1]
        of_input = torch.empty_like(input)
        sums = torch.zeros(torch.get_num_threads(), 3, columns, dtype=torch.float32)
        grad = output_grad.contiguous()
        call("gelu_backward", columns, {}, input=input, bias=bias, output_grad=grad, input_grad=of_input, sums=sums)
        return of_input, None if bias is None else sums[:, 0].sum(0)


def is_plain(module: nn.Module) -> bool:
    """Whether the module is no more than its float32 weights: no hook is called around its forward, such as one that
    gathers weights, and no strategy divides them."""
    return not has_hooks(module) and has_plain_weight(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook is called around the module's forward, or its forward is replaced."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def has_plain_weight(module: nn.Module) -> bool:
    """Whether the module's weight is float32, and no strategy divides it."""
    weight: Any = module.weight
    return type(weight.data) is Tensor and weight.dtype == torch.float32


def fits(hidden: Tensor, *norms: nn.LayerNorm) -> bool:
    """Whether the kernels can compute this call: on the CPU, with bf16 by autocast."""
    if type(hidden) is not Tensor or hidden.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    return torch.get_autocast_dtype("cpu") == torch.bfloat16 and all(map(is_plain, norms))


def multiply(dense: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """The product of a linear layer in bf16, and the bias to add. There is none to add for an adapted layer (LoRA)."""
    if type(dense) is nn.Linear and is_plain(dense):
        return nn.functional.linear(hidden, dense.weight), dense.bias
    return dense(hidden).to(torch.bfloat16), None


def add_norm(product: Tensor, bias: Tensor | None, residual: Tensor, norm: nn.LayerNorm, p: float) -> Tensor:
    """norm(dropout(product + bias) + residual), in bf16."""
    output: Tensor = Norm.apply(product, bias, residual.to(torch.bfloat16), norm.weight, norm.bias, norm.eps, p)  # type: ignore[no-untyped-call]
    return output


def add_hidden(module: Any, forward: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """The forward of a ``BertSelfOutput`` or ``BertOutput``."""
    norm = module.LayerNorm
    drop = module.dropout
    if not fits(hidden_states, norm):
        plain: Tensor = forward(hidden_states, input_tensor)
        return plain
    return add_norm(*multiply(module.dense, hidden_states), input_tensor, norm, drop.p if drop.training else 0.0)


def activate(module: Any, forward: Any, hidden_states: Tensor) -> Tensor:
    """The forward of a ``BertIntermediate``."""
    output: Tensor = (
        Gelu.apply(*multiply(module.dense, hidden_states))  # type: ignore[no-untyped-call]
        if fits(hidden_states)
        else forward(hidden_states)
    )
    return output


def compute_block(
    module: Any, forward: Any, hidden_states: Tensor, attention_mask: Any = None, **kwargs: Any
) -> Tensor:
    """The forward of a DistilBERT block."""
    first = module.sa_layer_norm
    last = module.output_layer_norm
    ffn = module.ffn
    if not fits(hidden_states, first, last):
        plain: Tensor = forward(hidden_states, attention_mask, **kwargs)
        return plain
    attended = module.attention(hidden_states, attention_mask=attention_mask, **kwargs)[0].to(torch.bfloat16)
    attended = add_norm(attended, None, hidden_states, first, 0.0)
    inner = Gelu.apply(*multiply(ffn.lin1, attended))  # type: ignore[no-untyped-call]
    return add_norm(*multiply(ffn.lin2, inner), attended, last, ffn.dropout.p if ffn.training else 0.0)


def replacement(module: nn.Module) -> Any:
    """The function that computes this module's forward with the kernels; None: there is none."""
    from transformers.activations import GELUActivation

    if not type(module).__module__.startswith("transformers."):
        return None
    children: dict[str, Any] = dict(module.named_children())
    norms = [child for child in children.values() if isinstance(child, nn.LayerNorm)]
    for norm in norms:
        if type(norm) is not nn.LayerNorm or norm.bias is None or not has_kernel(norm.normalized_shape[-1]):
            return None
    if children.keys() == {"dense", "LayerNorm", "dropout"}:
        return add_hidden
    if children.keys() == {"dense", "intermediate_act_fn"}:
        exact = isinstance(children["intermediate_act_fn"], GELUActivation)
        return activate if exact and has_kernel(children["dense"].out_features) else None
    if children.keys() == {"attention", "sa_layer_norm", "ffn", "output_layer_norm"}:
        ffn = children["ffn"]
        exact = isinstance(ffn.activation, GELUActivation) and not ffn.chunk_size_feed_forward
        return compute_block if exact and has_kernel(ffn.lin1.out_features) else None
    return None


def widen(forward: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The output of ``forward`` in float32."""
    output: Tensor = forward(*args, **kwargs)
    return output.float()


def use(model: nn.Module) -> int:
    """Replace the forward of each module that the kernels compute; returns how many there are. Hidden states between
    layers are bf16 then. The last layer's are float32, as the model's were."""
    replaced = {}
    for module in model.modules():
        function = replacement(module)
        if function is not None:
            replaced[module] = function
    for module, function in replaced.items():
        module.forward = partial(function, module, module.forward)
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            last = [module for module in layers[-1:].modules() if replaced.get(module) in (add_hidden, compute_block)]
            if last:
                last[-1].forward = partial(widen, last[-1].forward)
    return len(replaced)

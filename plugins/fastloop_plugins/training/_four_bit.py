"""Linear layers with frozen weights in 4 bits (NF4), computed by bitsandbytes.

Each weight takes 4 bits, and each block of 64 weights has a scale of 8 bits (double quantization). Method: Dettmers et
al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastloop import PluginError
from fastloop_plugins.models.wrapped import transformers_model

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")

BLOCK = 64
"""Weights that share a scale. On a CPU, bitsandbytes 0.50 dequantizes other values if a block spans two rows. A layer
therefore keeps its weights if its number of inputs is not a multiple of the block size."""
COMPUTE = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Accelerate's mixed precision -> the dtype of the dequantized weights in forward and backward."""


class FourBitLinear(Linear4bit):  # type: ignore[misc] # mypy skips bitsandbytes
    """A linear layer whose frozen weights are quantized once, and dequantized in each forward and backward.

    Args:
        layer: The layer to replace. Its bias is kept, frozen.
        dtype: The dtype to compute in.
        device: Where to quantize the weights, and to keep them.
    """

    quant_state: QuantState  # scales of loaded weights

    def __init__(self, layer: nn.Linear | Conv1D, dtype: torch.dtype, device: torch.device) -> None:
        transposed = isinstance(layer, Conv1D)
        weight = (layer.weight.T if transposed else layer.weight).detach()
        super().__init__(
            weight.shape[1], weight.shape[0], layer.bias is not None, dtype, quant_type="nf4", device="meta"
        )
        self.transposed = transposed
        self.weight = Params4bit(weight, requires_grad=False, blocksize=BLOCK, quant_type="nf4", module=self).to(device)
        self.weight.quant_state.dtype = dtype
        self.bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """The output has ``dtype`` under autocast, else that of ``x``. bitsandbytes' own forward would round the bias
        permanently."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        result: Tensor = bitsandbytes.matmul_4bit(
            x.to(self.compute_dtype), self.weight, self.weight.quant_state, bias=bias
        )
        return result if torch.is_autocast_enabled(x.device.type) else result.to(x.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load the packed weights together with their scales, which ``state_dict`` of bitsandbytes has under
        ``weight.``."""
        start = f"{prefix}weight."
        missing_keys = arguments[2]
        scales = {name.removeprefix(start): state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if not scales:
            missing_keys.append(f"{start}absmax")
            return
        self.weight.quant_state = self.quant_state = QuantState.from_dict(scales, self.weight.device)
        self.weight.quant_state.dtype = self.compute_dtype

    def dequantized(self) -> nn.Module:
        """A layer of the replaced class, with the dequantized weights in float32. It shares the bias."""
        self.weight.quant_state.dtype = torch.float32
        weight = dequantize_4bit(self.weight.data, self.weight.quant_state)
        inputs = self.in_features
        outputs = self.out_features
        with torch.device("meta"):
            layer: Any = Conv1D(outputs, inputs) if self.transposed else nn.Linear(inputs, outputs)  # type: ignore[no-untyped-call]
        layer.weight = nn.Parameter(weight.T.contiguous() if self.transposed else weight, requires_grad=False)
        layer.bias = self.bias
        restored: nn.Module = layer.train(self.training)
        return restored


def quantize(run: Run, model: nn.Module, kept: Collection[str]) -> None:
    """Replace the linear layers of a model's body by ``FourBitLinear``, one after another. Heads, embeddings and tied
    weights stay.

    Args:
        kept: Names of layers that stay, too.

    Raises:
        PluginError: No layer can be replaced.
    """
    layers = list(_layers(model, kept))
    dtype = COMPUTE[run.accelerator.mixed_precision]
    suited = [
        name
        for name, layer in layers
        if (layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.in_features) % BLOCK == 0
    ]
    if not suited:
        raise PluginError(
            f"{type(model).__name__} has {len(layers)} linear layers, and none whose number of inputs is a multiple of "
            f"{BLOCK}, which nf4 needs.",
            code="unsupported-model",
            place=f"{run.recipe.where}: plugins.lora.quantize",
            remedy="Leave quantize out.",
        )
    before = after = 0
    layers.clear()  # so that each layer is freed as soon as it is replaced
    for name in suited:
        layer: Any = model.get_submodule(name)
        before += layer.weight.nbytes
        model.set_submodule(name, FourBitLinear(layer, dtype, run.device))
        after += weight_bytes(model.get_submodule(name))
    logger.info("lora: nf4: %d linear layers, %.1f MiB instead of %.1f", len(suited), after / 2**20, before / 2**20)


def weight_bytes(layer: Any) -> int:
    """Bytes of a 4-bit layer's weights and scales."""
    state = layer.weight.quant_state
    return int(layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes)


def _layers(model: nn.Module, kept: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The linear layers of a model's body, by name."""
    known: Any = transformers_model(model)
    body = {id(module) for module in (model if known is None else known.base_model).modules()}
    output = None if known is None else known.get_output_embeddings()
    wide = {
        part
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(known, name, None) or ()
    }
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or id(module) not in body or module is output:
            continue
        if uses[id(module.weight)] == 1 and not any(f".{part}." in f".{name}." for part in (*kept, *wide)):
            yield name, module


def dequantize(model: nn.Module) -> None:
    """Replace the 4-bit layers of a peft model by plain ones, on the CPU, so that adapters are merged into weights in
    float32."""
    model.cpu()
    for name in [name for name, module in model.named_modules() if isinstance(module, FourBitLinear)]:
        layer: Any = model.get_submodule(name)
        model.set_submodule(name, layer.dequantized())
        adapted = model.get_submodule(name.rpartition(".")[0])
        if hasattr(adapted, "fan_in_fan_out"):  # the adapters are of the layer's own orientation from here on
            adapted.fan_in_fan_out = layer.transposed

"""The plan of a transformers model for tensor parallelism, as torch's styles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fastloop import PluginError

HEADS = ("num_attention_heads", "num_key_value_heads")
"""Keys of a model's configuration: each process computes a share of these heads."""
GATHERED = ("colwise_rep", "colwise_gather_output")
"""Styles of a linear layer that is divided by columns, and whose full output each process gets."""

ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Style of a linear layer -> which of its low-rank adapters is divided like it. The other one stays whole."""


class SummedGradients(ParallelStyle):
    """Keeps a module whole. Each process applies it to its share of the heads, so its gradients are summed over the
    processes."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward
        group = device_mesh.get_group()

        def forward_summed(*inputs: Any, **options: Any) -> Any:
            whole = dict(module._parameters)  # those of the moment: fsdp exchanges them
            try:
                for name, weight in whole.items():
                    module._parameters[name] = weight if weight is None else _Sum.apply(weight, group)  # type: ignore[no-untyped-call]
                return forward(*inputs, **options)
            finally:
                module._parameters.update(whole)

        module.forward = forward_summed
        return module


class _Sum(torch.autograd.Function):
    """Returns a tensor unchanged, and sums its gradient over the processes of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def styles(model: Any, rules: Mapping[str, str], processes: int, where: str) -> dict[str, ParallelStyle]:
    """Module name -> torch's style, for the rules that apply to the model.

    Args:
        rules: The model's ``tp_plan``: module name -> style. A ``*`` stands for the index of a layer.

    Raises:
        PluginError: A rule has another style, the processes cannot divide a layer evenly, or no rule applies.
    """
    config = model.config.get_text_config()
    for key in HEADS:
        heads = getattr(config, key, None)
        if heads is not None and heads % processes:
            raise PluginError(
                f"{key} of the model is {heads}, not a multiple of the {processes} processes.",
                code="not-divisible",
                place=where,
                remedy="Use fsdp or ddp.",
            )
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    by_name: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        rule = rule_of(rules, name)
        if rule is None or rule == "replicate" or any(uses[id(weight)] > 1 for weight in module.parameters()):
            continue
        layer = getattr(module, "base_layer", module)  # without adapters
        style, size = _style(rule, layer)
        if style is None or (layer is not module and rule not in ADAPTERS):
            kind = type(layer).__name__
            if layer is not module:
                kind += " with adapters"
            raise PluginError(
                f"the plan of the model has {rule!r} for {name}, a {kind}.",
                code="unsupported-model",
                place=where,
                remedy="Use fsdp or ddp.",
            )
        if size % processes and (rule in GATHERED or isinstance(layer, nn.Embedding)):
            continue  # its inputs and outputs are whole in any case
        if size % processes:
            raise PluginError(
                f"{name} has {size} features, not a multiple of the {processes} processes.",
                code="not-divisible",
                place=where,
                remedy="Use fsdp or ddp.",
            )
        if layer is module:
            by_name[name] = style
            continue
        by_name[f"{name}.base_layer"] = style
        by_name |= {f"{name}.{ADAPTERS[rule]}.{adapter}": style for adapter in getattr(module, ADAPTERS[rule])}
    if not by_name:
        raise PluginError(
            f"the plan of {type(model).__name__} names none of its layers.",
            code="unsupported-model",
            place=where,
            remedy="Use fsdp or ddp.",
        )
    return by_name


def rule_of(rules: Mapping[str, str], name: str) -> str | None:
    """The rule for a module, whose name has the index of its layer."""
    return rules.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))


def _style(rule: str, module: nn.Module) -> tuple[ParallelStyle | None, int]:
    """Torch's style for a rule, or None, and the size of the dimension that it divides; 0: it divides none."""
    if rule == "replicated_with_grad_allreduce":
        return SummedGradients(), 0
    if isinstance(module, nn.Embedding) and rule == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate()), module.num_embeddings
    if not isinstance(module, nn.Linear):
        return None, 0
    if rule == "colwise" or rule in GATHERED:
        return ColwiseParallel(output_layouts=Replicate() if rule in GATHERED else None), module.out_features
    if rule in ("rowwise", "rowwise_split_input"):
        return RowwiseParallel(input_layouts=Replicate() if rule == "rowwise_split_input" else None), module.in_features
    return None, 0

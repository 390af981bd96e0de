"""Files beside an exported adapter, and sharded adapters in full, before ``models.adapters`` merges them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop.export.card import BASE_CONFIG
from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from torch import nn


def task_type(model: nn.Module) -> str | None:
    """The task in ``adapter_config.json``, which peft's Auto classes read; None: peft then writes the model's class."""
    from transformers.models.auto import modeling_auto

    name = type(model).__name__
    mappings: dict[str, Mapping[str, Any]] = {
        "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "FEATURE_EXTRACTION": modeling_auto.MODEL_MAPPING_NAMES,
    }
    for kind, names in mappings.items():
        if name in names.values():
            return kind
    return None


def write_base_config(model: Any, folder: Path) -> None:
    """Write the configuration of the base model with the classes of the task beside the adapter. It is not named
    config.json: transformers would take the folder for a whole model."""
    if not hasattr(getattr(model, "config", None), "to_json_file"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # else the classes would be those of another head
    with quiet():
        config.to_json_file(folder / BASE_CONFIG)


def replicate_adapters(model: nn.Module) -> None:
    """Hold the adapters of each sharded layer in full on every process, so that torch can multiply and add them. Every
    process must call it."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    from fastloop.distributed.tensors import gather_full

    for layer in model.modules():
        base = getattr(getattr(layer, "base_layer", None), "weight", None)
        if not isinstance(base, DTensor):
            continue
        mesh = base.device_mesh
        for adapter in (*layer.lora_A.values(), *layer.lora_B.values()):  # type: ignore[operator]
            full = gather_full(adapter.weight.detach())
            whole = distribute_tensor(full, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
            adapter.weight = nn.Parameter(whole, requires_grad=False)

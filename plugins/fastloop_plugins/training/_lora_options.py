"""The options of the plugin ``lora``."""

from __future__ import annotations

import re
from typing import Literal

from fastloop import Plugin, RecipeError, option

INITIAL = r"gaussian|orthogonal|olora|pissa|pissa_niter_\d+"
"""Names of initial values that peft computes from the weights and random numbers alone, as a regular expression."""
CHANGES_BASE = ("olora", "pissa")
"""Start of the names of those for which peft also changes the frozen weights."""


class LoRAOptions(Plugin):
    """Base class of ``lora``: its options."""

    r: int = option("Rank of the adapters.", default=8, ge=1)
    alpha: float = option("Adapters are scaled by alpha / r.", default=16.0, gt=0)
    dropout: float = option("Dropout before the adapters.", default=0.0, ge=0, lt=1)
    target_modules: list[str] | str | None = option(
        "Names of layers, or all-linear; null: peft's default for the architecture.", default=None
    )
    modules_to_save: list[str] | None = option(
        "Layers trained in full; null: those that the pretrained model lacks, or a classifier's head.", default=None
    )
    use_rslora: bool = option("Scale adapters by alpha / sqrt(r) instead.", default=False)
    use_dora: bool = option("Train the magnitude of the weights, too (DoRA).", default=False)
    layers_to_transform: list[int] | int | None = option(
        "Indices of the layers that get adapters; null: all.", default=None
    )
    init_lora_weights: bool | str = option(
        "Initial values: true, gaussian, orthogonal, olora, pissa or pissa_niter_N; false: no adapter begins as zero.",
        default=True,
    )
    adapter: str | None = option(
        "Folder of an adapter to continue; null: that of model.name, or a new one.", default=None
    )
    merge: bool = option("Export the model with the adapters merged in.", default=True)
    quantize: Literal["nf4"] | None = option(
        "Keep frozen linear layers in 4 bits (QLoRA); null: as they are.", default=None
    )


def check_initial_values(lora: LoRAOptions, where: str) -> None:
    """Raise an error for a value of ``init_lora_weights`` that is unknown, or that the other options exclude."""
    value = lora.init_lora_weights
    if isinstance(value, bool):
        return
    if not re.fullmatch(INITIAL, value):
        raise RecipeError(
            f"found {value!r}, expected true, false, gaussian, orthogonal, olora, pissa or pissa_niter_N. Other "
            "values of peft need data or settings of their own.",
            code="unknown-choice",
            place=f"{where}.init_lora_weights",
        )
    if value == "orthogonal" and lora.r % 2:
        raise RecipeError(
            f"orthogonal needs an even r, found {lora.r}.", code="not-divisible", place=f"{where}.init_lora_weights"
        )
    if value.startswith(CHANGES_BASE) and (lora.quantize or not lora.merge):
        option = "quantize" if lora.quantize else "merge: false"
        raise RecipeError(
            f"{value} changes the frozen weights, too, which {option} does not allow.",
            code="conflicting-values",
            place=f"{where}.init_lora_weights",
            remedy="Leave one of them out.",
        )


def check_chosen_layers(lora: LoRAOptions, where: str) -> None:
    """Raise an error for ``layers_to_transform`` without a list of names: peft needs one to choose layers by index."""
    if lora.layers_to_transform is not None and isinstance(lora.target_modules, str):
        raise RecipeError(
            f"found {lora.layers_to_transform} beside target_modules: {lora.target_modules}, and indices of layers "
            "need a list of names.",
            code="conflicting-values",
            place=f"{where}.layers_to_transform",
            remedy="List the names of the layers, such as target_modules: [q_proj, v_proj].",
        )

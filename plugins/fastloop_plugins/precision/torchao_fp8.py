"""Multiplies the matrices of large linear layers in fp8, in forward and backward, with torchao.

    plugins:
      - amp: {dtype: bf16}
      - torchao-fp8: {recipe: tensorwise}
      - compile

Weights and optimizer stay in fp32. For CUDA devices with fp8 matrix units (H100 and newer). It pays off for layers with
thousands of features, together with ``compile``. ``rowwise`` scales each row separately, which is more accurate and
slower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fastloop import Device, Dtype, Package, Plugin, Problem, hookimpl, option

if TYPE_CHECKING:
    from torch import nn

    from fastloop import Run


class TorchaoFp8(Plugin):
    """Multiplies matrices in fp8, by torchao's ``convert_to_float8_training``."""

    name = "torchao-fp8"
    numerics = "reduced-precision"
    runs_before = ("activation-checkpointing", "compile", "slot:strategy")
    conflicts = {"lora": "adapters are too narrow for fp8, and peft does not merge into layers in fp8."}
    requirements = (Device("cuda"), Dtype("fp8"), Package("torchao", ">=0.10", extra="fp8"))
    for_inference = True

    recipe: Literal["tensorwise", "rowwise"] = option(
        "One scale for each tensor, or for each row.", default="tensorwise"
    )
    min_features: int = option("Layers with fewer inputs or outputs are not converted.", default=1024, ge=16)
    skip: tuple[str, ...] = option(
        "Names of layers that are not converted.",
        default=(
            "lm_head",
            "classifier",
            "score",
            "head",
        ),
    )

    @hookimpl
    def before_prepare(self, run: Run, model: nn.Module) -> None:
        from torch import nn
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        converted = []

        def suits(module: nn.Module, name: str) -> bool:
            """Whether fp8 units support the layer's sizes, and the layer is large enough to outweigh the casts."""
            if not isinstance(module, nn.Linear) or set(self.skip) & set(name.split(".")):
                return False
            fits = all(size % 16 == 0 and size >= self.min_features for size in module.weight.shape)
            if fits:
                converted.append(name)
            return fits

        # for any number of tokens
        padded = replace(Float8LinearConfig.from_recipe_name(self.recipe), pad_inner_dim=True)
        convert_to_float8_training(model, module_filter_fn=suits, config=padded)
        if not converted:
            self.log.warning(
                Problem(
                    f"no linear layer has sizes that are multiples of 16, of {self.min_features} or more: the "
                    "model stays as it is.",
                    code="no-effect",
                )
            )
            return
        self.log.info("%d linear layers, %s", len(converted), self.recipe)
        if "compile" not in run.plugins.names():
            self.log.warning(
                Problem("without the plugin compile, casting to fp8 may take longer than fp8 saves.", code="no-speedup")
            )

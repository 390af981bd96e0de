"""Multiplies fp32 matrices in TensorFloat-32: 10 bits of mantissa instead of 23, with the range of fp32.

    plugins:
      - matmul-precision: {precision: high}

For CUDA devices with TF32 units (compute capability 8.0 and later). With ``amp`` in bf16, little is left to gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fastloop import Device, Plugin, SpeedupEstimate, hookimpl, option

if TYPE_CHECKING:
    from fastloop.estimates import StepProfile
    from fastloop.recipe import Recipe


class MatmulPrecision(Plugin):
    """Calls ``torch.set_float32_matmul_precision`` for the duration of a run."""

    name = "matmul-precision"
    numerics = "reduced-precision"
    requirements = (Device("cuda"),)
    for_inference = True
    description = "multiplies fp32 matrices in TF32"

    @dataclass(kw_only=True)
    class Config:
        """Options."""

        precision: Literal["high", "medium"] = option(
            "high: TF32, or three bf16 products; medium: one bf16 product.", default="high"
        )
        convolutions: bool = option("TF32 in cuDNN's convolutions too.", default=True)

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        if cls.name in recipe.plugins or profile.device != "cuda" or profile.precision != "fp32":
            return None
        seconds = profile.multiplying()
        return SpeedupEstimate(
            seconds=0.6 * seconds,
            why=f"Matrix products in fp32 are {seconds / profile.seconds:.0%} of a step; TF32 is several times "
            "as fast.",
        )

    @hookimpl
    def after_prepare(self) -> None:
        import torch

        self.before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(self.config.precision)
        torch.backends.cudnn.allow_tf32 = self.config.convolutions

    @hookimpl
    def teardown(self) -> None:
        import torch

        if hasattr(self, "before"):
            torch.set_float32_matmul_precision(self.before[0])
            torch.backends.cudnn.allow_tf32 = self.before[1]

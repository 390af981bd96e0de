"""Steps the optimizer in one pass over the weights.

    plugins:
      - fused-optimizer: {implementation: fused}

``fused`` updates weights and moments in one kernel (CUDA, CPU and others). ``foreach`` is for optimizers without a
fused kernel. ``8bit`` keeps the moments of Adam, AdamW and others in 8 bits, with bitsandbytes: a quarter of the
memory, at lower precision. `deepspeed` flattens weights, so other ones share a scale, and numbers differ from those of
one process. Method: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from fastloop import (
    Device,
    Package,
    Plugin,
    PluginError,
    Recommendation,
    SpeedupEstimate,
    When,
    hookimpl,
    option,
)
from fastloop.problem import agree, counted
from fastloop.runtime.hardware import this_machine

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile


def eight_bits(plugin: Any) -> bool:
    """A condition for ``When``: whether the optimizer's moments are kept in 8 bits."""
    return bool(plugin.implementation == "8bit")


EIGHT_BITS = ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad")
"""Torch optimizers with a counterpart in bitsandbytes."""
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Torch optimizers with a fused kernel, by name: `auto` selects plugins before torch is imported."""
FUSED_ON_SHARDS = ("Adam", "AdamW")
"""Torch optimizers whose fused kernel steps the shards of `fsdp`: torch 2.13 has no rule for the others."""


FUSED_ON_CUDA_SINCE = {"Adagrad": "2.13"}
"""Optimizers whose fused kernel older versions of torch have for the CPU only, and the first version with one for CUDA.
Older versions take ``fused=True``, and fail in the first step."""


def has_fused_kernel(recipe: Recipe, device: str) -> bool:
    """Whether the recipe's optimizer takes ``fused`` on a kind of device.

    Imports torch only for an optimizer that is not one of torch.optim.
    """
    name = recipe.train.optimizer_name
    if ":" not in name:
        since = FUSED_ON_CUDA_SINCE.get(name)
        if device == "cuda" and since is not None and Version(version("torch")) < Version(since):
            return False
        return name in FUSED
    from fastloop.optimizers.named import optimizer_function

    return "fused" in inspect.signature(optimizer_function(recipe)).parameters


class FusedOptimizer(Plugin):
    """Steps the optimizer in one pass.

    Sets ``fused=True`` or ``foreach=True`` on the recipe's optimizer, or builds the bitsandbytes optimizer of the same
    name.
    """

    name = "fused-optimizer"
    numerics = "reassociated"
    recordable = True
    requirements = (
        When(eight_bits, Device("cuda", "xpu", "cpu")),
        When(eight_bits, Package("bitsandbytes", ">=0.50", extra="optim8bit")),
    )

    implementation: Literal["fused", "foreach", "8bit"] = option(
        "One fused kernel, one call for each operation, or moments in 8 bits.", default="fused"
    )

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For the optimizers of torch that have a fused kernel, on devices that have it."""
        if machine.device not in ("cpu", "cuda") or not has_fused_kernel(recipe, machine.device):
            return None
        name = recipe.train.optimizer_name
        is_sharded = recipe.has_plugin("fsdp") and machine.processes > 1
        if is_sharded and name in FUSED and name not in FUSED_ON_SHARDS:
            return None
        return Recommendation(why=f"{recipe.train.optimizer_name} steps in one kernel")

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        device = this_machine(recipe.train.device).device
        if cls.name in recipe.plugins or not has_fused_kernel(recipe, device):
            return None
        stepping = profile.region("optimizer")
        return SpeedupEstimate(
            seconds=0.7 * stepping, why=f"The optimizer's step is {stepping / profile.seconds:.0%} of a step."
        )

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if eight_bits(self):
            self.numerics = "reduced-precision"  # type: ignore[assignment, misc] # this option lowers the precision
        else:  # another plugin's optimizer gets `fused` or `foreach` through run.settings.optimizer
            self.fallback_hooks = ("build_optimizer",)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop.optimizers.named import optimizer_function

        wanted = self.implementation
        name = recipe.train.optimizer_name
        cls = optimizer_function(recipe)
        if eight_bits(self):
            if name not in EIGHT_BITS:
                known = ", ".join(EIGHT_BITS)
                raise PluginError(
                    f"{name} has no 8bit implementation.",
                    code="unsupported-optimizer",
                    place=f"{recipe.where}: plugins.fused-optimizer",
                    remedy=f"Set train.optimizer to one of: {known}.",
                )
            return
        if wanted in inspect.signature(cls).parameters:
            device = this_machine(recipe.train.device).device
            if wanted == "fused" and not has_fused_kernel(recipe, device):
                since = FUSED_ON_CUDA_SINCE[name]
                raise PluginError(
                    f"torch has a fused {name} for CUDA since {since}, and {version('torch')} is installed.",
                    code="unsupported-optimizer",
                    place=f"{recipe.where}: plugins.fused-optimizer",
                    remedy="Set plugins.fused-optimizer.implementation: foreach.",
                )
            return
        repair = (
            "Set plugins.fused-optimizer.implementation: foreach."
            if wanted == "fused" and "foreach" in inspect.signature(cls).parameters
            else f"Leave it out: --without {self.name}."
        )
        raise PluginError(
            f"torch's {name} has no {wanted} implementation. {repair}",
            code="unsupported-optimizer",
            place=f"{recipe.where}: plugins.fused-optimizer",
        )

    @hookimpl
    def configure(self) -> dict[str, Any]:
        return {} if eight_bits(self) else {"optimizer": {self.implementation: True}}

    @hookimpl
    def build_optimizer(self, run: Run, model: nn.Module) -> Optimizer | None:
        if not eight_bits(self):
            return None
        import bitsandbytes
        from torch.distributed.tensor import DTensor

        train = run.recipe.train
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            raise PluginError(
                "bitsandbytes cannot step sharded weights.",
                code="unsupported-strategy",
                place=f"{run.recipe.where}: plugins.fused-optimizer",
                remedy="Use ddp or fused.",
            )
        optimizer: Optimizer = getattr(bitsandbytes.optim, f"{train.optimizer_name}8bit")(
            parameters, lr=train.lr, weight_decay=train.weight_decay, **run.settings.optimizer
        )
        return optimizer

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        for group in run.optimizer.param_groups:
            if group.get("fused") and group.get("momentum") and "dampening" in group:  # torch's SGD
                start_momentum(run, group)


def start_momentum(run: Run, group: Mapping[str, Any]) -> None:
    """Give weights that get their first gradient after the first step a momentum of 0. Torch's fused SGD takes it from
    all of them or none.

    Raises:
        PluginError: ``dampening`` is set, with which the first step of a weight differs from one with a momentum of 0.
    """
    from torch import zeros_like

    weights = [weight for weight in group["params"] if weight.grad is not None]
    new = [weight for weight in weights if run.optimizer.state.get(weight, {}).get("momentum_buffer") is None]
    if not 0 < len(new) < len(weights):
        return
    if group["dampening"]:
        raise PluginError(
            f"{counted(len(new), 'weight')} {agree(len(new), 'gets its', 'get their')} first gradient in step "
            f"{run.state.step + 1}, which torch's fused SGD does not support with dampening.",
            code="unsupported-optimizer",
            place=f"{run.recipe.where}: plugins.fused-optimizer",
            remedy="Set plugins.fused-optimizer.implementation: foreach.",
        )
    for weight in new:
        run.optimizer.state[weight]["momentum_buffer"] = zeros_like(weight)

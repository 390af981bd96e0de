"""Logs one line if a plugin that the recipe does not list is estimated to make training 1.3 times as fast.

    plugins:
      - speed-check

It times 20 steps for the plugins' ``estimate_speedup``. Plugins that change which samples a step trains on are left
out, and so are runs that end within a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastloop import Plugin, PluginError, Problem, hookimpl
from fastloop_plugins._foreign_load import ForeignLoad

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Batch, Run
    from fastloop.recipe import Recipe
    from fastloop.speedup_estimates import SpeedupEstimate, StepProfile

logger = logging.getLogger("fastloop")

WARM_UP = 5
"""Steps before the timed window: the first steps allocate memory and compile."""
STEPS = 20
"""Steps of the timed window."""
WORTH = 1.3
"""Speedup from which a plugin is named. Smaller estimates are often wrong by as much."""
LEFT = 60.0
"""Seconds that the remaining steps must take. A shorter run ends before its user could restart it."""
PEAK_SIZE = 1024
"""Rows of the matrices that measure the peak on a CPU: 0.1 s on two cores, within about 10% of the peak of larger
ones."""
SAVING = 10.0
"""Minimum total seconds of saves before their share of the time counts: one slow save shows little."""


class SpeedCheck(Plugin):
    """Names an unlisted plugin that would save time."""

    name = "speed-check"
    read_only = True
    numerics = "bitwise"

    load: ForeignLoad  # since the start of the measured steps

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps = 0
        self.padded = 0
        self.real = 0
        self.rows = 0
        self.longest: list[Any] = []  # tokens if padded to the longest sample; on the device, read after the window
        self.started = 0.0
        self.faults = 0
        self.saving = False

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str:
        return "every run names a plugin that would pay"

    @hookimpl(trylast=True)
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        import torch

        from fastloop.runtime.platform_support import page_faults

        if self.steps == WARM_UP and run.total_steps is not None and run.total_steps - run.state.step <= STEPS:
            run.plugins.unsubscribe(self, "before_step")  # the run ends within the window
            return
        if self.steps in (WARM_UP, WARM_UP + STEPS) and run.device.type == "cuda":
            torch.cuda.synchronize(run.device)  # the host is ahead of the device
        if self.steps == WARM_UP:
            self.started = perf_counter()
            self.faults = page_faults()
            self.load = ForeignLoad()
        if self.steps == WARM_UP + STEPS:
            run.plugins.unsubscribe(self, "before_step")
            seconds = (perf_counter() - self.started) / STEPS
            if run.is_main and is_worth_a_restart(run, seconds):
                self.show(run, self.profile(run, seconds, (page_faults() - self.faults) / STEPS))
            self.longest.clear()
        elif self.steps >= WARM_UP:
            self.count(batches)
        self.steps += 1

    @hookimpl
    def save_state(self, run: Run) -> None:
        """Log once if the saves so far took much of the time, and the run lasts long enough to be restarted."""
        saving = run.clock.seconds["save"]
        training = run.clock.seconds["train"]
        step = run.state.step
        if step and not is_worth_a_restart(run, training / step):
            return
        if run.is_main and not self.saving and saving >= SAVING and saving >= (WORTH - 1) * training:
            self.saving = True
            background = ", write in the background (`--with async-save`)"
            if "async-save" in run.plugins.names() or run.recipe.leaves_out("async-save"):
                background = ""
            share = saving / (saving + training)
            self.log.warning(
                Problem(
                    f"saves took {saving:.0f} of {saving + training:.0f} seconds ({share:.0%}).",
                    code="slow-saves",
                    remedy=f"Save less often (train.save_every){background}, or use a faster disk.",
                )
            )

    def count(self, batches: list[Batch]) -> None:
        """Count the tokens and sequences of a step."""
        for batch in batches:
            inputs = batch.inputs
            if not (isinstance(inputs, Mapping) and "input_ids" in inputs):
                continue
            mask: Any = inputs.get("attention_mask")
            self.padded += inputs["input_ids"].numel()
            self.real += batch.tokens
            self.rows += len(inputs["input_ids"])
            self.longest.append(
                len(mask) * mask.sum(1).max() if getattr(mask, "ndim", 0) == 2 else inputs["input_ids"].numel()
            )

    def profile(self, run: Run, seconds: float, faults: float) -> StepProfile:
        """The figures of a step. All of its time counts as computing, and fp32's matrix products as running at the
        peak."""
        from fastloop.runtime import platform_support
        from fastloop.speedup_estimates import StepProfile
        from fastloop_plugins.observe import _machine_speed

        precision = {"no": "fp32"}.get(run.accelerator.mixed_precision, run.accelerator.mixed_precision)
        peaks = (
            _machine_speed.peaks(run.device, ("fp32", "bf16"), PEAK_SIZE) if precision == "fp32" and self.padded else {}
        )
        flops = multiplications(run.model) * self.padded / STEPS
        return StepProfile(
            device=run.device.type,
            precision=precision,
            cores=platform_support.cores(),
            foreign_cores=self.load.cores(),
            world_size=run.world_size,
            steps=STEPS,
            seconds=seconds,
            padded=self.padded / STEPS,
            longest=sum(map(int, self.longest)) / STEPS,
            real=self.real / STEPS,
            attention_calls=self.rows / STEPS * depth(run.unwrap_model()),
            regions={"loss": seconds},
            operations={"aten::mm": min(flops / peaks["fp32"], seconds)} if "fp32" in peaks else {},
            peaks=peaks,
            page_faults=faults,
            fault_seconds=_machine_speed.fault_seconds(1024) if run.device.type == "cpu" else 0.0,
        )

    def show(self, run: Run, profile: StepProfile) -> None:
        """Log the plugin with the largest estimate, if it is worth a line."""
        name, estimate = max(estimates(profile, run.recipe), key=lambda pair: pair[1].seconds, default=(None, None))
        if estimate is None:
            return
        speedup = profile.seconds / max(profile.seconds - estimate.seconds, 0.1 * profile.seconds)
        if speedup >= WORTH:
            self.log.warning(
                Problem(
                    f"{estimate.why.rstrip('.')}.",
                    code="faster-plugin",
                    remedy=f"`--with {name}`, estimated {speedup:.1f}x. `fastloop profile` shows more.",
                )
            )


def is_worth_a_restart(run: Run, seconds: float) -> bool:
    """Whether the remaining steps take ``LEFT`` seconds at least, or their number is not known.

    Args:
        seconds: The time of a step.
    """
    return run.total_steps is None or (run.total_steps - run.state.step) * seconds >= LEFT


def multiplications(model: nn.Module) -> float:
    """Floating-point operations of a token's matrix products in forward and backward: six a weight of a linear layer,
    four if frozen."""
    from torch import nn

    weights: Iterator[Tensor] = (module.weight for module in model.modules() if isinstance(module, nn.Linear))
    return float(sum(weight.numel() * (6 if weight.requires_grad else 4) for weight in weights))


def depth(model: nn.Module) -> int:
    """Length of the longest list of modules: a transformer's layers."""
    from torch import nn

    return max((len(module) for module in model.modules() if isinstance(module, nn.ModuleList)), default=0)


def estimates(profile: StepProfile, recipe: Recipe) -> Iterator[tuple[str, SpeedupEstimate]]:
    """``(plugin, estimate)`` for fastloop's plugins that could run with this recipe here, and train on the same samples
    a step."""
    import dataclasses

    from fastloop.plugins.installed import load
    from fastloop.plugins.resolve import resolve
    from fastloop.runtime.hardware import this_machine
    from fastloop_plugins._own_plugins import own_plugins

    for name in own_plugins():
        cls = load(name)
        estimate = None if name in recipe.plugins else cls.estimate_speedup(profile, recipe)
        if estimate is None or estimate.overrides or cls.numerics == "changes-training":
            continue
        machine = this_machine(recipe.train.device)
        try:
            if not any(need.missing(cls(**estimate.options), machine) for need in cls.requirements):
                tried = {**recipe.plugins, name: dict(estimate.options)}
                resolve(dataclasses.replace(recipe, plugins=tried, selected={}), any_machine=True)
                yield name, estimate
        except PluginError:
            continue  # it does not combine with the recipe's plugins

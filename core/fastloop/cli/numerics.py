"""Compare the losses of a run with those of a control run, step by step, to verify the numerics class of a plugin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

BOUNDS = {"bitwise": 0.0, "reassociated": 1e-5, "reduced-precision": 0.1}
"""Largest relative difference of a step's loss that a class allows. ``changes-training`` has no bound."""
HOLDS = "holds"
BROKEN = "broken"
FAILED = "failed"
NOT_COMPARED = "not compared"


def compare(promise: str, ours: dict[str, Any], control: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """Compare losses with those of a control run, and with the noise between two control runs.

    Args:
        promise: A numerics class that has a bound.
        ours: Result of the run with the plugin: ``losses``, or ``error``.
        control: Result of the first control run.
        again: Result of the second control run.
    """
    bound = BOUNDS[promise]
    result: dict[str, Any] = {"class": promise, "bound": bound, "difference": None, "why": None}
    errors = [run["error"] for run in (ours, control, again) if "error" in run]
    if errors:
        return result | {"verdict": FAILED, "why": errors[0]}
    noise = largest_difference(again["losses"], control["losses"])
    difference = largest_difference(ours["losses"], control["losses"])
    return result | {
        "verdict": HOLDS if difference <= max(bound, 2 * noise) else BROKEN,
        "difference": difference,
        "noise": noise,
        "losses": ours["losses"],
        "control_losses": control["losses"],
    }


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference between two loss curves; infinite if only one of two values is finite."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        difference = abs(a - b) / max(abs(b), 1e-12)
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


@dataclass(frozen=True)
class ConfiguredRate:
    """A dropout rate above 0 of a configuration of transformers: the configuration, its attribute and the rate."""

    config: Any
    attribute: str
    rate: float


@dataclass
class DropoutRates:
    """The dropout rates above 0 that ``switch_dropout_off`` has set to 0.

    Attributes:
        names: Their attributes, each once, such as ``Dropout.p`` and ``GPT2Config.attn_pdrop``.
        configured: The rates of configurations. A part of a model may have a configuration of its own.
    """

    names: list[str] = field(default_factory=list, init=False)
    configured: list[ConfiguredRate] = field(default_factory=list, init=False)

    def restore_configurations(self) -> None:
        """Set the rates of configurations again, for an export: the modules keep 0."""
        for configured in self.configured:
            setattr(configured.config, configured.attribute, configured.rate)

    def _add(self, name: str) -> None:
        if name not in self.names:
            self.names.append(name)


def switch_dropout_off(model: nn.Module) -> DropoutRates:
    """Set every dropout rate to 0: in torch's modules, and in the configurations and attributes of transformers'
    models.

    Returns:
        The rates that were above 0. Before an export, a task calls their ``restore_configurations``.
    """
    from torch import nn

    rates = DropoutRates()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            if module.p > 0:
                rates._add(f"{type(module).__name__}.p")
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            for attribute, rate in list(getattr(holder, "__dict__", {}).items()):
                if not isinstance(rate, float) or not ("dropout" in attribute or attribute.endswith("pdrop")):
                    continue
                if rate > 0:
                    rates._add(f"{type(holder).__name__}.{attribute}")
                    if holder is not module:
                        rates.configured.append(ConfiguredRate(holder, attribute, rate))
                setattr(holder, attribute, 0.0)
    return rates

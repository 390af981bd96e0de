"""Runs an ablation: each variant in its own process, in alternating order, then checks of numerics and quality."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastloop.cli.numerics import BROKEN, FAILED
from fastloop.errors import FastloopError, UsageError
from fastloop.recipe import secrets
from fastloop_tools.bench.plan import Ablation, Variant, with_only
from fastloop_tools.trials.numerics import check as check_numerics
from fastloop_tools.trials.pairs import TrialRunner
from fastloop_tools.trials.results import speed, variant_results
from fastloop_tools.trials.worker import Spec

QUALITY_SEEDS = 3


@dataclass(kw_only=True)
class Settings:
    """The size of the measurements.

    Attributes:
        steps: Minimum steps of a window.
        seconds: Minimum duration of a window.
        warmup: Steps before the window.
        repeats: Measurements of each variant.
        numerics: Whether to check each plugin's numerics class.
        numerics_steps: Steps of that check.
        quality: Whether to train the first and the last variant to the end and compare their metrics.
        quality_steps: Steps of that training; None: the recipe's own length.
    """

    steps: int = 30
    seconds: float = 10.0
    warmup: int = 5
    repeats: int = 5
    numerics: bool = True
    numerics_steps: int = 8
    quality: bool = False
    quality_steps: int | None = None


class Bench:
    """Measures one ablation and holds its results.

    Args:
        runner: Runs the trainings.
        facts: Further entries of the record: versions, machine, command.
        say: Called with a line of text for each measurement.
        keep: Called with the record whenever it changes.

    Attributes:
        record: The contents of ``bench.json``.
    """

    def __init__(
        self,
        ablation: Ablation,
        settings: Settings,
        runner: TrialRunner,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.ablation, self.settings, self.runner = ablation, settings, runner
        self.say, self.keep = say, keep
        self.measured: dict[Any, list[dict[str, Any] | None]] = {variant.key: [] for variant in ablation.measured()}
        self.errors: dict[Any, str] = {}
        self.record: dict[str, Any] = {
            **facts,
            "settings": asdict(settings),
            "recipe": ablation.recipe.to_dict(),
            "foreign_load": {"before": 0.0, "worst": 0.0},
            "complete": False,
            "variants": [],
            "numerics": [],
            "quality": None,
        }

    def run(self) -> bool:
        """Measure all variants. Returns whether every measurement succeeded and every plugin kept its numerics class.

        Raises:
            FastloopError: The baseline cannot be measured, so there is nothing to compare with.
        """
        self.runner.listen()
        try:
            self._speed()
            if self.settings.numerics:
                for found in check_numerics(self.ablation, self.settings.numerics_steps, self._work):
                    self.record["numerics"].append(found)
                    self.say(f"numerics  {found['plugin']}: {found['verdict']}")
                    self._refresh()
            if self.settings.quality:
                self._quality()
            self.record["complete"] = True
        finally:
            self._refresh()
        quality = self.record["quality"] or {}
        broken = any(found["verdict"] in (BROKEN, FAILED) for found in self.record["numerics"])
        return not (self.errors or broken or quality.get("errors"))

    def _speed(self) -> None:
        variants = self.ablation.measured()
        for repeat in range(self.settings.repeats):
            for variant in variants if repeat % 2 == 0 else reversed(variants):
                if variant.key in self.errors:
                    continue
                found = self._measure(variant, repeat)
                if "error" in found:
                    self.errors[variant.key] = found["error"]
                    self.measured[variant.key].append(None)
                    self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {variant.title}: failed: {found['error']}")
                    if variant is variants[0] and not any(self.measured[variant.key]):
                        kind = UsageError if found["kind"] == "usage" else FastloopError
                        raise kind(f"the baseline cannot be measured: {found['error']}")
                else:
                    self.measured[variant.key].append(found)
                    rate, unit = speed(found)
                    took = f"{rate:,.1f} {unit}/s ({found['process_seconds']:.1f} s)"
                    self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {variant.title}: {took}")
            self._refresh()

    def _measure(self, variant: Variant, repeat: int) -> dict[str, Any]:
        recipe = self.ablation.baseline if variant.at_baseline else self.ablation.recipe
        settings = self.settings
        tree = with_only(
            recipe,
            variant.plugins,
            max_steps=10**9,  # the worker ends the run
            epochs=10**6,
            save_every=None,
            seed=recipe.train.seed + repeat,
        )
        name = str(list(self.measured).index(variant.key))
        spec = Spec(recipe=tree, source=None, warmup=settings.warmup, steps=settings.steps, seconds=settings.seconds)
        return self.runner.undisturbed(self.ablation.recipe, spec, name, fresh=repeat == 0)

    def _work(self, spec: Spec, name: str) -> dict[str, Any]:
        return self.runner.work(self.ablation.recipe, spec, name)

    def _quality(self) -> None:
        """Train the first and the last variant to the end, with several seeds, and record their metrics."""
        ablation, steps = self.ablation, self.settings.quality_steps
        arms = {"baseline": ablation.variants[0], "full": ablation.full()}
        metrics: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
        errors: list[str] = []
        self.record["quality"] = {"seeds": QUALITY_SEEDS, "steps": steps, "metrics": metrics, "errors": errors}
        for number in range(QUALITY_SEEDS):
            for arm, variant in arms.items():
                recipe = ablation.baseline if variant.at_baseline else ablation.recipe
                length = {} if steps is None else {"max_steps": steps, "epochs": 10**6}
                tree = with_only(recipe, variant.plugins, seed=recipe.train.seed + number, save_every=None, **length)
                found = self._work(Spec(recipe=tree, source=None, evaluates=True), "quality")
                if "error" in found:
                    errors.append(f"{arm}, seed {number + 1}: {found['error']}")
                    self.say(f"quality {errors[-1]}")
                    continue
                values = {
                    f"{split} {name}": value
                    for split in ("validation", "test")
                    for name, value in (found["summary"][split] or {}).items()
                }
                for name, value in values.items():
                    metrics[arm].setdefault(name, []).append(value)
                self.say(
                    f"quality {arm}, seed {number + 1}: "
                    + (", ".join(f"{name} {value:.4g}" for name, value in values.items()) or "-")
                )
                self._refresh()

    def _refresh(self) -> None:
        """Update the record, and pass it to ``keep``."""
        rows: list[dict[str, Any]] = []
        first: dict[Any, str] = {}
        for variant in self.ablation.variants:
            row = asdict(variant) | {
                "error": self.errors.get(variant.key) if variant.why_not is None else None,
                "same_as": None,
                "measurements": [],
            }
            if variant.why_not is None:
                row["same_as"] = first.get(variant.key)
                first.setdefault(variant.key, variant.title)
                row["measurements"] = self.measured[variant.key]
            rows.append(row)
        self.record["variants"] = variant_results(rows)
        self.record["foreign_load"] = {"before": self.runner.before, "worst": self.runner.worst}
        self.keep(json_safe(self.record))


def json_safe(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [json_safe(item) for item in value]
    return value


def dump(record: dict[str, Any]) -> str:
    """The record as JSON."""
    return json.dumps(secrets.hidden(record), indent=1, allow_nan=False) + "\n"

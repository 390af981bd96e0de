"""Runs an ablation: each variant in its own process, in alternating order, then checks of numerics and quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fastloop.cli.numerics import BOUNDS, BROKEN, FAILED, NOT_COMPARED, compare
from fastloop.errors import UsageError
from fastloop_tools.bench.plan import Ablation, closure, unresolvable
from fastloop_tools.shared.tables import json_safe
from fastloop_tools.trials.measure import failed_measurement
from fastloop_tools.trials.pairs import Measurement, TrialRunner, faster, speed
from fastloop_tools.trials.statistics import break_even, interval, verdict
from fastloop_tools.trials.worker import Window

QUALITY_SEEDS = 3
START_SECONDS = 8.0
"""Seconds until a process trains its first step, for the estimate before the first measurement: it imports torch, and
loads data and a model."""


@dataclass(kw_only=True)
class AblationSettings(Window):
    """The size of the measurements.

    Attributes:
        quality: Whether to train the first and the last variant, for ``quality_steps`` steps (None: the recipe's
            length), and compare their metrics.
        budget: Seconds that speeds and numerics may take; None: no limit.
    """

    repeats: int = 5
    numerics: bool = True
    numerics_steps: int = 8
    quality: bool = False
    quality_steps: int | None = None
    budget: float | None = None


class Bench:
    """Measures one ablation and holds its results in ``record``, the contents of ``bench.json``.

    Args:
        facts: Further entries of the record: versions, machine, command.
        keep: Called with the record whenever it changes.
    """

    def __init__(
        self,
        ablation: Ablation,
        settings: AblationSettings,
        runner: TrialRunner,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.ablation, self.settings, self.runner = ablation, settings, runner
        self.say, self.keep = say, keep
        self.measured: dict[tuple[str, ...], list[Measurement]] = {}
        self.errors: dict[tuple[str, ...], str] = {}
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
                for found in check_numerics(self.ablation, self._losses):
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

    def processes(self) -> int:
        """How many processes the speeds and the numerics need, if no control of the numerics is noisy."""
        speeds = len(self.ablation.measured()) * self.settings.repeats
        if not self.settings.numerics:
            return speeds
        compared = [name for name, plugin in self.ablation.plugins.items() if plugin.numerics in BOUNDS]
        controls = {closure(self.ablation, name) for name in compared}
        return speeds + len(compared) + len(controls)

    def describe(self) -> str:
        """The measurements and a first estimate of their time, as text."""
        settings = self.settings
        estimate = self.processes() * (START_SECONDS + settings.seconds)
        quality = f", then {2 * QUALITY_SEEDS} whole trainings" if settings.quality else ""
        return (
            f"{len(self.ablation.measured())} variants x {settings.repeats} repeats, {settings.warmup} + at least "
            f"{settings.steps} steps and {settings.seconds:g} s each: {self.processes()} processes, about "
            f"{show_time(estimate)} if each starts in {START_SECONDS:g} s{quality}"
        )

    def check_budget(self, first: Measurement) -> None:
        """Say how long the rest takes, by the first measurement.

        Raises:
            UsageError: It does not fit into the budget.
        """
        seconds, budget = first["process_seconds"], self.settings.budget
        needed = self.processes() * seconds
        self.say(f"a measurement takes {seconds:.0f} s here: {show_time(needed)} in all")
        if budget is not None and needed > budget:
            raise UsageError(
                f"{self.processes()} processes of {seconds:.0f} s do not fit into {show_time(budget)}.",
                code="budget-too-small",
                place="--budget",
                remedy=(
                    f"Give --budget {math.ceil(needed / 60)}m, or measure less: shorter --seconds, --no-leave-one-out, "
                    "--no-numerics, or fewer plugins with --without."
                ),
            )

    def _speed(self) -> None:
        variants = self.ablation.measured()
        for repeat in range(self.settings.repeats):
            for variant in variants if repeat % 2 == 0 else reversed(variants):
                if variant.plugins in self.errors:
                    continue
                cache = str(variants.index(variant))
                found = self.runner.measure(self.ablation.recipe, self.settings, repeat, variant.plugins, cache)
                if "error" in found:
                    if variant is variants[0] and repeat == 0:
                        raise failed_measurement(f"the baseline cannot be measured: {found['error']}", found)
                    self.errors[variant.plugins] = found["error"]
                    result = f"failed: {found['error']}"
                else:
                    self.measured.setdefault(variant.plugins, []).append(found)
                    rate, unit = speed(found)
                    result = f"{rate:,.1f} {unit}/s ({found['process_seconds']:.1f} s)"
                self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {variant.title}: {result}")
                if variant is variants[0] and repeat == 0:
                    self.check_budget(found)
            self._refresh()

    def _losses(self, plugins: tuple[str, ...]) -> Measurement:
        return self.runner.losses(self.ablation.recipe, self.settings.numerics_steps, plugins, "numerics")

    def _quality(self) -> None:
        """Train the first and the last variant to the end, with several seeds, and record their metrics."""
        ablation, steps = self.ablation, self.settings.quality_steps
        arms = {"baseline": ablation.variants[0], "full": ablation.full()}
        metrics: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
        errors: list[str] = []
        self.record["quality"] = {"seeds": QUALITY_SEEDS, "steps": steps, "metrics": metrics, "errors": errors}
        for number in range(QUALITY_SEEDS):
            for arm, variant in arms.items():
                length: dict[str, Any] = {} if steps is None else {"max_steps": steps, "epochs": None}
                length["seed"] = ablation.recipe.train.seed + number
                spec = {"evaluates": True}
                found = self.runner.train(ablation.recipe, variant.plugins, "quality", spec=spec, **length)
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
                shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                self.say(f"quality {arm}, seed {number + 1}: {shown or '-'}")
                self._refresh()

    def _refresh(self) -> None:
        """Update the record, and pass it to ``keep``."""
        rows = []
        for variant in self.ablation.variants:
            possible, which = variant.why_not is None, variant.plugins
            found = {"error": self.errors.get(which), "measurements": self.measured.get(which, [])}
            rows.append(asdict(variant) | (found if possible else {"error": None, "measurements": []}))
        self.record["variants"] = variant_results(rows)
        self.record["foreign_load"] = {"before": self.runner.before, "worst": self.runner.worst}
        self.keep(json_safe(self.record))


def check_numerics(ablation: Ablation, train: Callable[[tuple[str, ...]], Measurement]) -> Iterator[dict[str, Any]]:
    """Yield a finding for each tested plugin: compares losses with and without it. If they differ too much, the control
    is trained a second time: on a device that is not deterministic, the difference of both is the smallest one that can
    be detected.

    Args:
        train: Trains with these plugins briefly and without dropout; see ``TrialRunner.losses``.
    """
    controls: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for name, plugin in ablation.plugins.items():
        found = {"plugin": name, "class": plugin.numerics, "bound": BOUNDS.get(plugin.numerics), "difference": None}
        needed = closure(ablation, name)
        together = tuple(other for other in ablation.plugins if other == name or other in needed)
        why = unresolvable(ablation, together) or unresolvable(ablation, needed)
        if found["bound"] is None:
            why = "its numerics class is changes-training"
        if why:
            yield found | {"verdict": NOT_COMPARED, "why": why}
            continue
        if needed not in controls:
            controls[needed] = [train(needed)]
        trained, control = train(together), controls[needed][0]
        result = compare(plugin.numerics, trained, control, control)
        if result["verdict"] == BROKEN:
            if len(controls[needed]) == 1:
                controls[needed].append(train(needed))
            result = compare(plugin.numerics, trained, control, controls[needed][1])
        yield found | {"control": list(needed)} | result


def show_time(seconds: float) -> str:
    """A duration as text: ``45 s``, ``12 minutes``, ``1.5 hours``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and 95% interval."""
    low, high = interval(values)
    return {"median": median(values), "low": low, "high": high}


def ratio(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> dict[str, Any] | None:
    """The ratio of two variants' speeds, over the repeats that both have. A variant that fails is not repeated."""
    ratios = [faster(*pair) for pair in zip(ours, theirs, strict=False)]
    return {**summary(ratios), "pairs": len(ratios), "ratios": ratios, "verdict": verdict(ratios)} if ratios else None


def variant_results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``results`` to each variant; None if nothing was measured. A step is compared with the nearest measured
    variant before it. The factor of a variant without one plugin is the full set's speed over its own."""
    reached: dict[str, Any] | None = None
    for row in rows:
        done, row["results"] = row["measurements"], None
        if not done:
            continue
        if row["kind"] == "without":
            full = next(other for other in rows if other["title"] == row["before"])
            over = ratio(full["measurements"], row["measurements"])
        else:
            over = ratio(row["measurements"], reached["measurements"]) if reached else None
            row["before"] = reached["title"] if reached else None
        first, warm = done[0], [found["warmup_extra_seconds"] for found in done[1:]]
        tokens = [found["tokens"] / found["seconds"] for found in done]
        padding = [1 - found["tokens"] / found["padded_tokens"] for found in done if found["padded_tokens"]]
        row["results"] = {
            "unit": speed(first)[1],
            "samples_per_second": summary([found["samples"] / found["seconds"] for found in done]),
            "tokens_per_second": summary(tokens) if first["tokens"] else None,
            "padding": median(padding) if padding else None,
            "seconds_a_step": median([found["seconds_a_step"] for found in done]),
            "over_before": over,
            "over_baseline": ratio(row["measurements"], rows[0]["measurements"]) if row is not rows[0] else None,
            **{key: first[key] for key in ("peak_memory_bytes", "startup_seconds", "total_steps")},
            "first_steps_cold_seconds": first["warmup_extra_seconds"],
            "first_steps_warm_seconds": median(warm) if warm else None,
            "pays_after_steps": None,
            "warnings": sorted({line for found in done for line in found["warnings"]}),
        }
        if row["kind"] != "without":
            if reached is not None and over is not None and over["verdict"] == "faster":
                row["results"]["pays_after_steps"] = pays_after(row["results"], reached["results"], over["median"])
            reached = row
    return rows


def pays_after(ours: dict[str, Any], before: dict[str, Any], factor: float) -> int | None:
    """Steps until the time saved exceeds the extra start-up and first steps compared to the variant before, with
    nothing compiled yet."""
    extra = sum(ours[name] - before[name] for name in ("startup_seconds", "first_steps_cold_seconds"))
    return break_even(extra, before["seconds_a_step"] * (1 - 1 / factor))

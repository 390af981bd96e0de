"""Runs an ablation: each variant in its own process, in alternating order, then checks of numerics and quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fastloop.cli.numerics import BOUNDS, BROKEN, FAILED, NOT_COMPARED, compare
from fastloop.errors import UsageError
from fastloop.problem import counted
from fastloop.runtime.json_text import without_nan
from fastloop.splits import EVALUATED
from fastloop_tools.bench.plan import Ablation, closure, unresolvable
from fastloop_tools.trials.measure import failed_measurement
from fastloop_tools.trials.measuring_process import Window
from fastloop_tools.trials.pairs import Measurement, TrialRunner, faster, speed
from fastloop_tools.trials.statistics import break_even, interval, verdict

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
        self.ablation = ablation
        self.settings = settings
        self.runner = runner
        self.say = say
        self.keep = keep
        self.measured: dict[tuple[str, ...], list[Measurement]] = {}  # by the plugins of a variant
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
        self.check_shortest()
        self.runner.listen()
        try:
            self._speed()
            if self.settings.numerics:
                for finding in check_numerics(self.ablation, self._losses):
                    self.record["numerics"].append(finding)
                    self.say(f"numerics  {finding['plugin']}: {finding['verdict']}")
                    self._refresh()
            if self.settings.quality:
                self._quality()
            self.record["complete"] = True
        finally:
            self._refresh()
        return self._has_succeeded()

    def _has_succeeded(self) -> bool:
        if self.errors:
            return False
        if any(finding["verdict"] in (BROKEN, FAILED) for finding in self.record["numerics"]):
            return False
        quality = self.record["quality"]
        return quality is None or not quality["errors"]

    def processes(self) -> int:
        """How many processes the speeds and the numerics need, if no control of the numerics is noisy."""
        speeds = len(self.ablation.measured()) * self.settings.repeats
        if not self.settings.numerics:
            return speeds
        compared = [name for name, plugin in self.ablation.plugins.items() if plugin.numerics in BOUNDS]
        controls = {closure(self.ablation, name) for name in compared}
        return speeds + len(compared) + len(controls)

    def describe(self) -> str:
        """The measurements and the least time that they take, as text. How long a step takes is not known yet: with
        2 s, the 35 steps of a process take 70 s, and not the 10 s that ``--seconds`` asks for."""
        settings = self.settings
        shortest = self.processes() * (START_SECONDS + settings.seconds)
        steps = settings.steps or 1
        enough = settings.seconds / steps
        text = (
            f"{counted(len(self.ablation.measured()), 'variant')} x {counted(settings.repeats, 'repeat')}, "
            f"{settings.warmup} + at least {counted(steps, 'step')} and {settings.seconds:g} s each: "
            f"{counted(self.processes(), 'process')}, at least {show_time(shortest)}, and longer if a step takes over "
            f"{enough:.2g} s; the first measurement tells"
        )
        if settings.quality:
            text += f", then {2 * QUALITY_SEEDS} whole trainings"
        return text

    def check_shortest(self) -> None:
        """Check that the budget holds the measurements alone, without the start of their processes.

        Raises:
            UsageError: It does not.
        """
        if self.settings.budget is not None and self.processes() * self.settings.seconds > self.settings.budget:
            raise self._refuse_budget(self.settings.seconds + START_SECONDS)

    def check_budget(self, first: Measurement) -> None:
        """Say how long all takes, by the first measurement, which is that of the baseline.

        Raises:
            UsageError: It does not fit into the budget.
        """
        seconds = first["process_seconds"]
        needed = self.processes() * seconds
        self.say(
            f"the baseline takes {seconds:.0f} s here, with {first['seconds_a_step']:.2g} s a step: "
            f"{show_time(needed)} in all if the others take as long"
        )
        if self.settings.budget is not None and needed > self.settings.budget:
            raise self._refuse_budget(seconds, first["seconds_a_step"])

    def tell_time(self) -> None:
        """After the first repeat: say how long all takes, by one measurement of each variant. A variant may compile, or
        be several times as fast as the baseline."""
        measured = [measurements[0]["process_seconds"] for measurements in self.measured.values()]
        checks = self.processes() - len(self.ablation.measured()) * self.settings.repeats
        needed = sum(measured) * self.settings.repeats + checks * median(measured)
        over = ""
        if self.settings.budget is not None and needed > self.settings.budget:
            over = f", over the --budget of {show_time(self.settings.budget)}"
        self.say(f"a measurement takes {min(measured):.0f} to {max(measured):.0f} s: {show_time(needed)} in all{over}")

    def _refuse_budget(self, seconds: float, seconds_a_step: float = 0.0) -> UsageError:
        """The error for a budget that is too small. It proposes options with which the measurements fit.

        Args:
            seconds: The time of a process.
            seconds_a_step: The time of a step in it; 0: it is not measured yet.
        """
        assert self.settings.budget is not None
        choices = [f"--budget {math.ceil(self.processes() * seconds / 60)}m"]
        choices += self._fitting_options(seconds, seconds_a_step)
        remedy = f"Give {' or '.join(choices)}."
        plugins = len(self.ablation.plugins)
        one_fits = plugins > 1 and self.processes() / plugins * seconds <= self.settings.budget
        if len(choices) == 1 and one_fits:
            remedy = (
                f"Give {choices[0]}, or measure fewer plugins, such as --without {list(self.ablation.plugins)[-1]}."
            )
        return UsageError(
            f"{self.processes()} processes of {seconds:.0f} s do not fit into {show_time(self.settings.budget)}.",
            code="budget-too-small",
            place="--budget",
            remedy=remedy,
        )

    def _fitting_options(self, seconds: float, seconds_a_step: float) -> list[str]:
        """Options with which the measurements fit into the budget: each alone, or else together.

        Args:
            seconds, seconds_a_step: As for ``_refuse_budget``.
        """
        budget = self.settings.budget or 0.0
        variants = self.ablation.measured()
        speeds = len(variants) * self.settings.repeats
        checks = self.processes() - speeds
        speeds_left = sum(variant.kind != "without" for variant in variants) * self.settings.repeats
        omitted = []  # option, processes with it
        if speeds_left < speeds:
            omitted.append(("--no-leave-one-out", speeds_left + checks))
        if checks:
            omitted.append(("--no-numerics", speeds))
        if len(omitted) == 2:
            omitted.append(("--no-leave-one-out --no-numerics", speeds_left))
        options = [option for option, processes in omitted if processes * seconds <= budget]

        alone = self._shorter_window(self.processes(), seconds, seconds_a_step)
        if alone:
            options.append(alone)
        if options or not omitted:
            return options
        together, processes = omitted[-1]
        window = self._shorter_window(processes, seconds, seconds_a_step)
        return [f"{together} {window}"] if window else []

    def _shorter_window(self, processes: int, seconds: float, seconds_a_step: float) -> str:
        """The values of ``--steps`` and ``--seconds`` with which this many processes fit into the budget. Empty: there
        are none.

        Args:
            seconds, seconds_a_step: As for ``_refuse_budget``.
        """
        step_seconds = (self.settings.steps or 0) * seconds_a_step
        start = seconds - max(self.settings.seconds, step_seconds)
        # 600 s for 10 processes that start in 35 s leave 25 s: of 30 steps of 2 s and 10 s, --steps 12
        fitting = (self.settings.budget or 0.0) / processes - start
        if fitting <= 0:
            return ""
        options = []
        if step_seconds > fitting:
            options.append(("--steps", math.floor(fitting / seconds_a_step)))
        if self.settings.seconds > fitting:
            options.append(("--seconds", math.floor(fitting)))
        if any(value < 1 for _, value in options):
            return ""
        return " ".join(f"{option} {value}" for option, value in options)

    def _speed(self) -> None:
        """Measure each variant once a repeat: in order, then in reverse, so that a machine that becomes slower
        disadvantages none."""
        variants = self.ablation.measured()
        for repeat in range(self.settings.repeats):
            order = variants if repeat % 2 == 0 else variants[::-1]
            for variant in order:
                if variant.plugins in self.errors:
                    continue
                cache = str(variants.index(variant))
                measurement = self.runner.measure(self.ablation.recipe, self.settings, repeat, variant.plugins, cache)
                is_first = variant is variants[0] and repeat == 0
                if "error" in measurement:
                    error = measurement["error"]
                    if is_first:
                        raise failed_measurement(f"the baseline cannot be measured: {error}", measurement)
                    self.errors[variant.plugins] = error
                    result = f"failed: {error}"
                else:
                    self.measured.setdefault(variant.plugins, []).append(measurement)
                    rate, unit = speed(measurement)
                    result = f"{rate:,.1f} {unit}/s ({measurement['process_seconds']:.1f} s)"
                self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {variant.title}: {result}")
                if is_first:
                    self.check_budget(measurement)
            if repeat == 0 and self.settings.repeats > 1:
                self.tell_time()
            self._refresh()

    def _losses(self, plugins: tuple[str, ...]) -> Measurement:
        return self.runner.losses(self.ablation.recipe, self.settings.numerics_steps, plugins, "numerics")

    def _quality(self) -> None:
        """Train the first and the last variant to the end, with several seeds, and record their metrics."""
        ablation = self.ablation
        steps = self.settings.quality_steps
        train: dict[str, Any] = {}
        if steps is not None:
            train = {"max_steps": steps, "epochs": None}
        arms = {"baseline": ablation.variants[0], "full": ablation.full()}
        trained: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}  # the metrics of each seed
        errors: list[str] = []
        self.record["quality"] = {"seeds": QUALITY_SEEDS, "steps": steps, "metrics": {}, "errors": errors}
        for number in range(QUALITY_SEEDS):
            train["seed"] = ablation.recipe.train.seed + number
            for arm, variant in arms.items():
                spec = {"evaluates": True}
                training = self.runner.train(ablation.recipe, variant.plugins, "quality", spec=spec, **train)
                if "error" in training:
                    values = {}
                    errors.append(f"{arm}, seed {number + 1}: {training['error']}")
                    self.say(f"quality {errors[-1]}")
                else:
                    values = final_metrics(training["summary"])
                    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
                    self.say(f"quality {arm}, seed {number + 1}: {shown or '-'}")
                    for name, value in values.items():
                        if not math.isfinite(value):
                            errors.append(f"{arm}, seed {number + 1}: {name} is {value}")
                trained[arm].append(values)
                self.record["quality"]["metrics"] = metrics_of_seeds(trained)
                self._refresh()

    def _refresh(self) -> None:
        """Update the record, and pass it to ``keep``."""
        rows = []
        for variant in self.ablation.variants:
            row = {**asdict(variant), "error": None, "measurements": []}
            if variant.why_not is None:
                row["error"] = self.errors.get(variant.plugins)
                row["measurements"] = self.measured.get(variant.plugins, [])
            rows.append(row)
        self.record["variants"] = variant_results(rows)
        self.record["foreign_load"] = {"before": self.runner.before, "worst": self.runner.worst}
        self.keep(without_nan(self.record))


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in the summary of a run, by split and name: ``{"validation accuracy": 0.9}``."""
    values = {}
    for split in EVALUATED:
        for name, value in (summary[split] or {}).items():
            values[f"{split} {name}"] = value
    return values


def metrics_of_seeds(trained: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """The values of each metric in the order of the seeds, for each arm. NaN stands for a training that failed.

    Args:
        trained: Arm -> the metrics of its trainings; empty ones of a training that failed.
    """
    names: dict[str, None] = {}  # in the order of the first training
    for seeds in trained.values():
        for values in seeds:
            names.update(dict.fromkeys(values))
    metrics: dict[str, dict[str, list[float]]] = {}
    for arm, seeds in trained.items():
        metrics[arm] = {name: [values.get(name, math.nan) for values in seeds] for name in names}
    return metrics


def check_numerics(ablation: Ablation, train: Callable[[tuple[str, ...]], Measurement]) -> Iterator[dict[str, Any]]:
    """Yield a finding for each tested plugin: compares losses with and without it.

    If they differ too much, the control is trained a second time. On a device that is not deterministic, the difference
    of both controls is the smallest one that can be detected.

    Args:
        train: Trains with these plugins briefly and without dropout; see ``TrialRunner.losses``.
    """
    controls: dict[tuple[str, ...], Measurement] = {}  # by their plugins
    second_controls: dict[tuple[str, ...], Measurement] = {}
    for name, plugin in ablation.plugins.items():
        bound = BOUNDS.get(plugin.numerics)
        finding = {"plugin": name, "class": plugin.numerics, "bound": bound, "difference": None}
        needed = closure(ablation, name)
        together = tuple(listed for listed in ablation.plugins if listed == name or listed in needed)
        if bound is None:
            why_not: str | None = "its numerics class is changes-training"
        else:
            why_not = unresolvable(ablation, together) or unresolvable(ablation, needed)
        if why_not is not None:
            yield {**finding, "verdict": NOT_COMPARED, "why": why_not}
            continue
        if needed not in controls:
            controls[needed] = train(needed)
        control = controls[needed]
        measured = train(together)
        comparison = compare(plugin.numerics, measured, control, control)
        if comparison["verdict"] == BROKEN:
            if needed not in second_controls:
                second_controls[needed] = train(needed)
            comparison = compare(plugin.numerics, measured, control, second_controls[needed])
        yield {**finding, "control": list(needed), **comparison}


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


def ratio(measured: Sequence[Measurement], reference: Sequence[Measurement]) -> dict[str, Any] | None:
    """The ratio of a variant's speed to that of another, over the repeats that both have. A variant that fails is not
    repeated."""
    pairs = zip(measured, reference, strict=False)
    ratios = [faster(repeat, reference_repeat) for repeat, reference_repeat in pairs]
    if not ratios:
        return None
    return {**summary(ratios), "pairs": len(ratios), "ratios": ratios, "verdict": verdict(ratios)}


def variant_results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ``results`` to each variant; None if nothing was measured. A step is compared with the nearest measured
    variant before it. The factor of a variant without one plugin is the full set's speed over its own."""
    by_title = {row["title"]: row for row in rows}
    last_step: dict[str, Any] | None = None  # the newest one that was measured
    for row in rows:
        row["results"] = None
        if not row["measurements"]:
            continue
        if row["kind"] == "without":
            full = by_title[row["before"]]
            over_before = ratio(full["measurements"], row["measurements"])
        elif last_step is None:
            over_before = None
            row["before"] = None
        else:
            over_before = ratio(row["measurements"], last_step["measurements"])
            row["before"] = last_step["title"]
        over_baseline = None
        if row is not rows[0]:
            over_baseline = ratio(row["measurements"], rows[0]["measurements"])
        row["results"] = {
            **measured_results(row["measurements"]),
            "over_before": over_before,
            "over_baseline": over_baseline,
            "pays_after_steps": None,
        }
        if row["kind"] == "without":
            continue
        if last_step is not None and over_before is not None and over_before["verdict"] == "faster":
            factor = over_before["median"]
            row["results"]["pays_after_steps"] = pays_after(row["results"], last_step["results"], factor)
        last_step = row
    return rows


def measured_results(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """The speed, memory and one-time costs of a variant. Its first measurement compiles, and later ones do not."""
    first = measurements[0]
    _, unit = speed(first)
    samples = [measurement["samples"] / measurement["seconds"] for measurement in measurements]
    tokens = [measurement["tokens"] / measurement["seconds"] for measurement in measurements]
    warm = [measurement["warmup_extra_seconds"] for measurement in measurements[1:]]
    padding = []
    warnings: set[str] = set()
    for measurement in measurements:
        if measurement["padded_tokens"]:
            padding.append(1 - measurement["tokens"] / measurement["padded_tokens"])
        warnings.update(measurement["warnings"])
    return {
        "unit": unit,
        "samples_per_second": summary(samples),
        "tokens_per_second": summary(tokens) if first["tokens"] else None,
        "padding": median(padding) if padding else None,
        "seconds_a_step": median([measurement["seconds_a_step"] for measurement in measurements]),
        "peak_memory_bytes": first["peak_memory_bytes"],
        "startup_seconds": first["startup_seconds"],
        "total_steps": first["total_steps"],
        "first_steps_cold_seconds": first["warmup_extra_seconds"],
        "first_steps_warm_seconds": median(warm) if warm else None,
        "warnings": sorted(warnings),
    }


def pays_after(results: dict[str, Any], before: dict[str, Any], factor: float) -> int | None:
    """Steps until the time saved exceeds the extra start-up and first steps compared to the variant before, with
    nothing compiled yet."""
    extra = sum(results[name] - before[name] for name in ("startup_seconds", "first_steps_cold_seconds"))
    return break_even(extra, before["seconds_a_step"] * (1 - 1 / factor))

"""Goes through a ladder: every rung in a fresh process, forwards and backwards in turn, then parity, then quality."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fastloop.errors import FastloopError, UsageError
from fastloop.numerics import BROKEN, FAILED
from fastloop.recipe import secrets
from fastloop_tools.bench.plan import Ladder, Rung, with_only
from fastloop_tools.measure.numerics import check as check_numerics
from fastloop_tools.measure.pairs import Workshop
from fastloop_tools.measure.results import rung_results, speed
from fastloop_tools.measure.worker import Spec

QUALITY_SEEDS = 3


@dataclass(kw_only=True)
class Settings:
    """How much is measured.

    Attributes:
        steps: Of a window, at the least.
        seconds: Of a window, at the least.
        warmup: Steps before it.
        repeats: Measurements of a rung.
        parity: Whether plugins are held to their parity class.
        parity_steps: Steps of such a comparison.
        quality: Whether the first and the last rung are trained to the end and compared.
        quality_steps: Steps of that training; None: the recipe's own length.
    """

    steps: int = 30
    seconds: float = 10.0
    warmup: int = 5
    repeats: int = 5
    parity: bool = True
    parity_steps: int = 8
    quality: bool = False
    quality_steps: int | None = None


class Bench:
    """One ladder while it is measured, and all that is known of it.

    Args:
        shop: Where trainings are run.
        facts: Further entries of the record: versions, machine, command.
        say: Gets a line for each measurement.
        keep: Gets the record whenever there is more in it.

    Attributes:
        record: What ``bench.json`` holds.
    """

    def __init__(
        self,
        ladder: Ladder,
        settings: Settings,
        shop: Workshop,
        facts: Mapping[str, Any],
        say: Callable[[str], None],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.ladder, self.settings, self.shop = ladder, settings, shop
        self.say, self.keep = say, keep
        self.measured: dict[Any, list[dict[str, Any] | None]] = {rung.key: [] for rung in ladder.measured()}
        self.errors: dict[Any, str] = {}
        self.record: dict[str, Any] = {
            **facts,
            "settings": asdict(settings),
            "recipe": ladder.recipe.to_dict(),
            "foreign_load": {"before": 0.0, "worst": 0.0},
            "complete": False,
            "rungs": [],
            "parity": [],
            "quality": None,
        }

    def run(self) -> bool:
        """Measure all. Returns whether everything that could be measured was, and every promise held.

        Raises:
            FastloopError: The baseline cannot be measured: there is nothing to compare with.
        """
        self.shop.listen()
        try:
            self._speed()
            if self.settings.parity:
                for found in check_numerics(self.ladder, self.settings.parity_steps, self._work):
                    self.record["parity"].append(found)
                    self.say(f"parity  {found['plugin']}: {found['verdict']}")
                    self._refresh()
            if self.settings.quality:
                self._quality()
            self.record["complete"] = True
        finally:
            self._refresh()
        quality = self.record["quality"] or {}
        broken = any(found["verdict"] in (BROKEN, FAILED) for found in self.record["parity"])
        return not (self.errors or broken or quality.get("errors"))

    def _speed(self) -> None:
        rungs = self.ladder.measured()
        for repeat in range(self.settings.repeats):
            for rung in rungs if repeat % 2 == 0 else reversed(rungs):
                if rung.key in self.errors:
                    continue
                found = self._measure(rung, repeat)
                if "error" in found:
                    self.errors[rung.key] = found["error"]
                    self.measured[rung.key].append(None)
                    self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {rung.title}: failed: {found['error']}")
                    if rung is rungs[0] and not any(self.measured[rung.key]):
                        kind = UsageError if found["kind"] == "usage" else FastloopError
                        raise kind(f"the baseline cannot be measured: {found['error']}")
                else:
                    self.measured[rung.key].append(found)
                    rate, unit = speed(found)
                    took = f"{rate:,.1f} {unit}/s ({found['process_seconds']:.1f} s)"
                    self.say(f"repeat {repeat + 1}/{self.settings.repeats}  {rung.title}: {took}")
            self._refresh()

    def _measure(self, rung: Rung, repeat: int) -> dict[str, Any]:
        recipe = self.ladder.baseline if rung.at_baseline else self.ladder.recipe
        settings = self.settings
        tree = with_only(
            recipe,
            rung.plugins,
            max_steps=10**9,  # the worker ends it
            epochs=10**6,
            save_every=None,
            seed=recipe.train.seed + repeat,
        )
        name = str(list(self.measured).index(rung.key))
        spec = Spec(recipe=tree, source=None, warmup=settings.warmup, steps=settings.steps, seconds=settings.seconds)
        return self.shop.undisturbed(self.ladder.recipe, spec, name)

    def _work(self, spec: Spec, name: str) -> dict[str, Any]:
        return self.shop.work(self.ladder.recipe, spec, name)

    def _quality(self) -> None:
        """The recipe's whole training, first rung against last, for several seeds."""
        ladder, steps = self.ladder, self.settings.quality_steps
        arms = {"baseline": ladder.rungs[0], "full": ladder.full()}
        seen: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
        errors: list[str] = []
        self.record["quality"] = {"seeds": QUALITY_SEEDS, "steps": steps, "metrics": seen, "errors": errors}
        for number in range(QUALITY_SEEDS):
            for arm, rung in arms.items():
                recipe = ladder.baseline if rung.at_baseline else ladder.recipe
                length = {} if steps is None else {"max_steps": steps, "epochs": 10**6}
                tree = with_only(recipe, rung.plugins, seed=recipe.train.seed + number, save_every=None, **length)
                found = self._work(Spec(recipe=tree, source=None, evaluates=True), "quality")
                if "error" in found:
                    errors.append(f"{arm}, seed {number + 1}: {found['error']}")
                    self.say(f"quality {errors[-1]}")
                    continue
                values = {
                    f"{split} {name}": value for split in ("evaluate", "test") for name, value in (found["summary"][split] or {}).items()
                }
                for name, value in values.items():
                    seen[arm].setdefault(name, []).append(value)
                self.say(
                    f"quality {arm}, seed {number + 1}: " + (", ".join(f"{name} {value:.4g}" for name, value in values.items()) or "-")
                )
                self._refresh()

    def _refresh(self) -> None:
        """Bring the record up to date, and have it kept."""
        rows: list[dict[str, Any]] = []
        first: dict[Any, str] = {}
        for rung in self.ladder.rungs:
            row = asdict(rung) | {"error": self.errors.get(rung.key) if rung.why_not is None else None, "same_as": None, "measurements": []}
            if rung.why_not is None:
                row["same_as"] = first.get(rung.key)
                first.setdefault(rung.key, rung.title)
                row["measurements"] = self.measured[rung.key]
            rows.append(row)
        self.record["rungs"] = rung_results(rows)
        self.record["foreign_load"] = {"before": self.shop.before, "worst": self.shop.worst}
        self.keep(finite(self.record))


def finite(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def dump(record: dict[str, Any]) -> str:
    """The record as JSON."""
    return json.dumps(secrets.hidden(record), indent=1, allow_nan=False) + "\n"

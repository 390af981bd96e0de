"""Names and values as a tracker accepts them: others are replaced, and reported once."""

from __future__ import annotations

import hashlib
import logging
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastloop import Problem

logger = logging.getLogger("fastloop")

Value = bool | int | float | str


@dataclass(frozen=True)
class NameRule:
    """The names that a tracker accepts.

    Attributes:
        refused: Pattern of the characters that it refuses; empty: none.
        longest: Maximum number of characters.
        is_path: The tracker uses names as paths of files, so it refuses ``a//b``, ``/a`` and ``../a``.
    """

    refused: str = ""
    longest: int = 250
    is_path: bool = False

    def replace(self, name: str) -> str:
        """The name with ``_`` for refused characters, cut to the maximum. An accepted name is returned as it is."""
        replaced = re.sub(self.refused, "_", name) if self.refused else name
        if self.is_path:
            path = posixpath.normpath(replaced)
            if path != replaced or path == "." or path.startswith(("..", "/")):
                # a//b becomes a__b, /a becomes _a, and ../a becomes _._a
                replaced = re.sub(r"^\.|/", "_", replaced)
        return self._shorten(replaced or "_")

    def replace_apart(self, name: str) -> str:
        """As ``replace``, with a hash of the name at the end: another name has the same replacement."""
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{self.replace(name)[: self.longest - 9]}-{digest}"

    def _shorten(self, name: str) -> str:
        if len(name) <= self.longest:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: self.longest - 9]}-{digest}"


WINDOWS = os.name == "nt"
ANY_NAME = NameRule()
FILE_NAMES = NameRule(longest=200, is_path=True)
MLFLOW_NAMES = NameRule(r"[^/\w.\- ]" if WINDOWS else r"[^/\w.\- :]", is_path=True)
"""MLflow's rule for params and metrics: ``validate_param_and_metric_name`` and ``path_not_unique``."""


@dataclass(frozen=True)
class TrackerRules:
    """The names and values that a tracker accepts.

    Attributes:
        run_argument: The argument of its constructor that names a run; None: it has none.
        values: Names of params and metrics.
        project, run: Names of projects and runs.
        longest_value: Maximum number of characters of a param; None: any.
    """

    run_argument: str | None = None
    values: NameRule = ANY_NAME
    project: NameRule = ANY_NAME
    run: NameRule = ANY_NAME
    longest_value: int | None = None


TRACKERS = {
    "aim": TrackerRules(),
    "clearml": TrackerRules("task_name"),
    "comet_ml": TrackerRules(),
    "dvclive": TrackerRules(values=FILE_NAMES),
    "mlflow": TrackerRules(
        "run_name",
        values=MLFLOW_NAMES,
        project=NameRule("['\"]", longest=500),  # Accelerate puts it into a filter, in quotes
        longest_value=6000,
    ),
    "swanlab": TrackerRules("experiment_name", project=NameRule(r"[^0-9A-Za-z\-_.+]", longest=100)),
    "trackio": TrackerRules("name"),
    "wandb": TrackerRules("name", project=NameRule(r"[/\\#?%:]", longest=128), run=NameRule(longest=128)),
}
"""All trackers. Tracker, which is also the name of its module -> the names and values that it accepts."""


@dataclass
class TrackerNames:
    """Replaces the names and values that a tracker refuses, and reports each replacement once.

    Attributes:
        tracker: The tracker's name.
        rules: The names that it accepts.
    """

    tracker: str
    rules: TrackerRules
    _replacements: dict[str, dict[str, str]] = field(default_factory=dict)
    """Kind (param, metric) -> name -> its replacement."""

    def project(self, name: str) -> str:
        """The name of a project."""
        return self._replace(name, self.rules.project, "project")

    def run(self, name: str) -> str:
        """The name of a run."""
        return self._replace(name, self.rules.run, "run")

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Metrics by accepted names."""
        return {self._replace(name, self.rules.values, "metric"): value for name, value in values.items()}

    def params(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Params by accepted names, with texts cut to the maximum."""
        longest = self.rules.longest_value
        accepted: dict[str, Value] = {}
        for name, value in values.items():
            replaced = self._replace(name, self.rules.values, "param")
            if longest is not None and len(str(value)) > longest:
                logger.warning(
                    Problem(
                        f"{self.tracker} takes at most {longest} characters as a param. {name!r} has "
                        f"{len(str(value))}, and is cut.",
                        code="value-cut",
                        place="plugins.trackers",
                    )
                )
                value = str(value)[:longest]
            accepted[replaced] = value
        return accepted

    def _replace(self, name: str, rule: NameRule, kind: str) -> str:
        known = self._replacements.setdefault(kind, {})
        if name in known:
            return known[name]
        replaced = rule.replace(name)
        if replaced in known.values():
            replaced = rule.replace_apart(name)
        known[name] = replaced
        if replaced != name:
            logger.warning(
                Problem(
                    f"{self.tracker} accepts no {kind} with the name {name!r}. It is logged as {replaced!r}.",
                    code="name-replaced",
                    place="plugins.trackers",
                )
            )
        return replaced

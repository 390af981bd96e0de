"""The settings with which a run was built, which its checkpoints contain, and their comparison at a resume.

A resume loads the states of the optimizer, the scheduler and the loss scaler. Torch keeps settings in these states,
such as the betas of Adam or the step size of a schedule, so a loaded state replaces the settings of the recipe. And the
optimizer's state refers to parameters by their position. Therefore a checkpoint records both by name, as they were
before the first step, and a run that resumes compares its own. ``saving`` has all that a checkpoint contains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fastloop.recipe import secrets

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fastloop.plugins.manager import PluginSet

OPTIMIZER_CODE = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a parameter group that select the code of a step. A resumed run uses its own, not the checkpoint's."""

SCALER_CODE = ("growth_factor", "backoff_factor", "growth_interval")
"""Settings of a loss scaler. A resumed run uses its own; only the scale and the steps since its last change are
loaded."""

LISTED = 3
"""Maximum number of parameters that a message names."""


@dataclass(frozen=True)
class SettingsRecord:
    """The settings of a run as it was built, in JSON values.

    Attributes:
        parameters: ``[name, shape]`` of each parameter that the optimizer steps, in its order.
        groups: The settings of each of the optimizer's parameter groups, such as ``lr`` and ``betas``.
        plugins: Plugin -> its ``numerics`` and its ``options``, defaults included. Secrets are hidden.
        scheduler: The scheduler's class and its state before the first step; None: there is none.
    """

    parameters: list[list[Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    plugins: dict[str, dict[str, Any]] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None

    @classmethod
    def make(cls, model: nn.Module, optimizer: Optimizer, plugins: PluginSet) -> SettingsRecord:
        """Record a run whose optimizer is built, before a scheduler changes the learning rates and a strategy replaces
        parameters."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = []
        groups = []
        for group in optimizer.param_groups:
            groups.append(group_settings(group))
            for parameter in group["params"]:
                parameters.append([names.get(id(parameter), "(not in the model)"), list(parameter.shape)])
        recorded = {}
        for plugin in plugins:
            options = secrets.hidden(plain(plugin.option_values()))
            recorded[plugin.name] = {"numerics": plugin.numerics, "options": options}
        return cls(parameters=parameters, groups=groups, plugins=recorded)

    def with_scheduler(self, scheduler: Any) -> SettingsRecord:
        """The same record with a scheduler that did no step yet, or without one."""
        if scheduler is None:
            return self
        return replace(self, scheduler={"class": type(scheduler).__name__, **plain(scheduler.state_dict())})

    def to_dict(self) -> dict[str, Any]:
        """The fields, for a checkpoint."""
        return asdict(self)


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's parameter group: all of it except ``params``."""
    return {name: value for name, value in group.items() if name != "params"}


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group as JSON values. Its learning rate is that from which a scheduler began."""
    settings = {str(name): plain(value) for name, value in without_parameters(group).items()}
    settings["lr"] = settings.pop("initial_lr", settings.get("lr"))
    return settings


def plain(value: Any) -> Any:
    """A value as JSON returns it. A number in a 0-dim tensor becomes that number, and any other object the name of its
    class, because its text may contain an address."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    return type(value).__name__


@dataclass(frozen=True)
class ChangedSetting:
    """A setting that differs between a checkpoint and the run that resumes from it.

    Attributes:
        key: The place of the setting, such as ``train.lr``.
        before: The checkpoint's value.
        now: The run's value.
    """

    key: str
    before: Any
    now: Any


def differences(before: Any, now: Any, key: str) -> Iterator[ChangedSetting]:
    """The values that differ between two trees of mappings and lists. A key that only one of them has is compared with
    None. Lists of two lengths, such as milestones of a schedule, are compared as one value, unless they hold mappings,
    such as parameter groups.

    Args:
        key: The place of both trees.
    """
    if isinstance(before, list) and isinstance(now, list):
        by_element = len(before) == len(now) or any(isinstance(value, Mapping) for value in before)
        if by_element:
            before = dict(enumerate(before))
            now = dict(enumerate(now))
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        if before != now:
            yield ChangedSetting(key, before, now)
        return
    for name in {**before, **now}:
        yield from differences(before.get(name), now.get(name), f"{key}.{name}")


def changed_settings(built: Any, saved: Any, now: Any, key: str) -> Iterator[ChangedSetting]:
    """The settings that differ between two runs, without the values that the first run changed while it trained, such
    as the number of steps of a scheduler.

    ``last_epoch`` is 0 as built, 40 as saved and 0 now: progress. ``step_size`` is 10 as built, 10 as saved and 5 now:
    changed.

    Args:
        built: The settings of the run that saved the checkpoint, as it was built.
        saved: Its state in the checkpoint.
        now: The settings of the run that resumes. An optimizer and a scheduler that Python keeps have trained, too.
        key: The place of the settings.
    """
    progress = {difference.key for difference in differences(built, saved, key)}
    for difference in differences(built, now, key):
        if difference.key not in progress:
            yield difference


def explain_parameters(before: list[list[Any]], now: list[list[Any]]) -> str | None:
    """How the trained parameters of two runs differ, in a sentence; None: they are equal, in the same order."""
    if before == now:
        return None
    old = dict(before)
    new = dict(now)
    missing = [name for name in old if name not in new]
    added = [name for name in new if name not in old]
    reshaped = [name for name in old if name in new and old[name] != new[name]]
    parts = []
    if missing:
        parts.append(f"this run does not train {_listed(missing)}")
    if added:
        parts.append(f"only this run trains {_listed(added)}")
    if reshaped:
        name = reshaped[0]
        parts.append(f"{name} had the shape {old[name]}, and has {new[name]} now")
    if not parts:
        moved = next(index for index, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
        parts.append(f"the optimizer has {now[moved][0]} in the place of {before[moved][0]}")
    return "; ".join(parts)


def _listed(names: list[str]) -> str:
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return listed


def with_own_code(saved: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer's state with the settings ``OPTIMIZER_CODE`` of the parameter groups of the run that loads it."""
    if len(saved["param_groups"]) != len(groups):
        return saved  # the optimizer refuses it
    changed = []
    for theirs, own in zip(saved["param_groups"], groups, strict=True):
        code = {name: own[name] for name in OPTIMIZER_CODE if name in own and name in theirs}
        changed.append({**theirs, **code})
    return {**saved, "param_groups": changed}


def with_own_growth(saved: dict[str, Any], scaler: Any) -> dict[str, Any]:
    """A loss scaler's state with the settings ``SCALER_CODE`` of the scaler that loads it."""
    own = scaler.state_dict()
    return {**saved, **{name: own[name] for name in SCALER_CODE if name in own}}

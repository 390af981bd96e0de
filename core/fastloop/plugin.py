"""What a plugin is.

    class Warmth(Plugin):
        name = "warmth"
        numerics = "bitwise"

        @dataclass(kw_only=True)
        class Config:
            degrees: Annotated[float, option("How warm.", ge=0)] = 20.0

        @hookimpl
        def before_fit(self, run): ...

Register it with an entry point: ``[project.entry-points."fastloop.plugins"]  warmth = "my_package:Warmth"``, or list its file in a
recipe: ``- ./warmth.py``. The versions of fastloop that a package works with are those of its own dependency on fastloop.
Everything the resolver needs is declared on the class, so a plugin of yours is resolved like one of ours.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import pluggy

from fastloop.errors import RecipeError
from fastloop.options import check_options, option, parse

if TYPE_CHECKING:
    from fastloop.estimates import SpeedupEstimate, StepProfile
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine

GROUP = "fastloop.plugins"
"""The entry points by which plugins are found."""

DEFAULTS = "fastloop.defaults"
"""Plugins that fastloop's own distribution turns on by itself. Other distributions' entries are not read: installed is not active."""

hookimpl = pluggy.HookimplMarker("fastloop")

Numerics = Literal["bitwise", "reassociated", "reduced-precision", "changes-training"]
"""What a plugin does to the numbers: the same bits; the same mathematics in another summation order; fewer bits;
another training. A promise that tests, `bench` and `tune` hold it to."""


class Need(Protocol):
    """A predicate on the machine or on what is installed. Anything with this method is one."""

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        """None when the need is met, else what is missing and what to do, as one or two sentences."""


@dataclass(frozen=True)
class Package:
    """Needs an installed distribution, at a version when given: ``Package("peft", ">=0.10", extra="lora")``.

    ``extra`` is one of the distribution ``of``, which the message tells to install.
    """

    distribution: str
    version: str = ""
    extra: str = ""
    of: str = "fastloop"

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        from packaging.specifiers import SpecifierSet

        wanted = f"{self.distribution}{self.version}"
        install = f"{self.of}[{self.extra}]" if self.extra else wanted
        try:
            found = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"needs {wanted}, which is not installed. Install it: pip install '{install}'"
        if self.version and not SpecifierSet(self.version).contains(found, prereleases=True):
            return f"needs {wanted}, but {found} is installed. Upgrade it: pip install -U '{install}'"
        return None


@dataclass(frozen=True)
class Device:
    """Needs one of these device types: ``Device("cuda", "xpu")``."""

    kinds: tuple[str, ...]

    def __init__(self, *kinds: str) -> None:
        object.__setattr__(self, "kinds", kinds)

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        if machine.device in self.kinds:
            return None
        return f"needs a device of type {' or '.join(self.kinds)}; this run is on {machine.device}."


@dataclass(frozen=True)
class Dtype:
    """Needs a dtype that the device computes in: ``Dtype("bf16")``."""

    name: str

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        if self.name in machine.dtypes:
            return None
        return f"needs {self.name}, which {machine.device} here does not have. It has: {', '.join(machine.dtypes)}."


@dataclass(frozen=True)
class When:
    """A need that holds for some options only: ``When(lambda config: config.dtype == "fp8", Device("cuda"))``."""

    condition: Callable[[Any], bool]
    need: Need

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        return self.need.missing(plugin, machine) if self.condition(plugin.config) else None


@dataclass(kw_only=True)
class Observer:
    """The option that a plugin which only looks on (``read_only``) takes beside its own."""

    on_error: Annotated[
        Literal["raise", "disable"], option("When it fails: the run fails too, or goes on without its hooks and says so in the summary.")
    ] = "raise"


class Plugin:
    """Base of every plugin: declarations on the class, options in ``config``, hooks as ``@hookimpl`` methods.

    Plugins take plain arguments, so that Python users need no recipe: ``Amp(dtype="bf16")``.

    A plugin may have hooks of its own, for other plugins to implement: a class or a module of functions marked with ``fastloop.hookspec``.
    It calls them on the run's plugins, and only runs with it know them::

        class Hooks:
            @hookspec
            def after_warmth(self, run, degrees): "It is warm."

        class Warmth(Plugin):
            hookspecs = Hooks

            @hookimpl
            def after_step(self, run):
                run.hooks.after_warmth(run=run, degrees=20.0)

    A plugin that implements one and can do without its owner marks it ``@hookimpl(optionalhook=True)``; else it ``requires`` the owner.

    Attributes:
        config: The options: an instance of the nested dataclass ``Config``.

    Raises:
        RecipeError: An option is unknown, of the wrong type or out of range.
        PluginError: ``Config`` cannot describe options.
    """

    name: ClassVar[str] = ""
    """What recipes call it. Lower case with hyphens."""
    slot: ClassVar[str | None] = None
    """A role that only one plugin of a run may fill, such as ``task``, ``strategy`` or ``precision``."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) that must be in the same run."""
    conflicts: ClassVar[Mapping[str, str]] = {}
    """Names (or ``slot:NAME``) that must not be in the same run -> why."""
    runs_after: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) whose hooks are called before this plugin's, when they are there."""
    runs_before: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) whose hooks are called after this plugin's, when they are there."""
    requirements: ClassVar[tuple[Need, ...]] = ()
    """Predicates on device, dtypes and installed versions."""
    adds_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that its wrapper of ``evaluate`` adds, beside ``loss`` and what ``build_metrics`` gives."""
    sections: ClassVar[Mapping[str, type]] = {}
    """For a task: ``model`` and ``data`` -> the dataclass of the keys that it takes there. `fastloop schema` and the docs show them."""
    numerics: ClassVar[Numerics] = "bitwise"
    """What it does to the numbers."""
    description: ClassVar[str] = ""
    """What it changes in a run, in a few words, for `fastloop plan`."""
    read_only: ClassVar[bool] = False
    """Whether it only looks on, so that a run without it has the same numbers. It then wraps no hook, implements none that changes or
    decides something, and asks for nothing that processes do together (``run.wait``, ``run.gather``, ``run.weights``): when it fails on
    one process, the others go on. Its users may have it disabled when it fails: ``on_error: disable``."""
    fallback_hooks: tuple[str, ...] = ()
    """*First* hooks that it leaves to another plugin of the run, if one answers them: it is asked after the others. ``__init__`` may set
    it by options."""
    hookspecs: ClassVar[Any] = None
    """A class or module of hooks that it brings along."""

    on_error: Literal["raise", "disable"] = "raise"
    """For a ``read_only`` plugin, what an error in a hook does: fail the run, or disable the plugin."""

    @dataclass(kw_only=True)
    class Config:
        """No options."""

    def __init__(self, *, _where: str = "", **options: Any) -> None:
        where = _where or self.name
        if "on_error" in options and self.read_only:
            self.on_error = parse(Observer, {"on_error": options.pop("on_error")}, where).on_error
        check_options(type(self).Config, f"{where}: its Config")
        if "on_error" in options and "on_error" not in [field.name for field in fields(type(self).Config)]:
            raise RecipeError(
                f"{where}.on_error: for plugins that only look on. A run without {self.name!r} would be another one. Leave it out."
            )
        self.config: Any = parse(type(self).Config, options, where)

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        """For the plugins that fastloop itself turns on by default: why this recipe gets it, or None."""
        return None

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        """For `fastloop profile`: the time of a step that this plugin would save, given a profile of the run; None for no estimate."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"


def defaults() -> dict[str, importlib.metadata.EntryPoint]:
    """Name -> entry point of the plugins that are on by themselves where their ``auto_enable`` says so."""
    points = sorted(entry_points(DEFAULTS), key=lambda point: point.name)
    return {point.name: point for point in points if point.dist is not None and point.dist.name == "fastloop"}


def entry_points(group: str) -> importlib.metadata.EntryPoints:
    """The entry points of a group. The metadata of all packages is read again only after ``sys.path`` or a folder on it has changed."""
    folders = []
    for path in sys.path:
        with suppress(OSError):
            folders.append((str(Path(path).absolute()), Path(path).stat().st_mtime_ns))
    return _entry_points(group, tuple(folders))


@lru_cache(maxsize=8)
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=group)

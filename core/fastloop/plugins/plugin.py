"""The base class of plugins, and the declarations that the resolver reads.

    class Warmth(Plugin):
        name = "warmth"
        numerics = "bitwise"
        degrees: float = option("How warm.", default=20.0, ge=0)

        @hookimpl
        def before_fit(self, run): ...

Register it with an entry point, ``[project.entry-points."fastloop.plugins"]  warmth = "my_package:Warmth"``,
or list its file in a recipe: ``- ./warmth.py``. A package's own dependency on fastloop states which versions of
fastloop it supports.
The resolver reads only declarations on the class, so it treats third-party plugins and bundled ones alike.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import pluggy

from fastloop.errors import PluginError, RecipeError
from fastloop.metric_modes import MetricMode
from fastloop.options import option, parse
from fastloop.plugins.declared_options import check_declared, declare, options_of
from fastloop.plugins.installed import installed_version
from fastloop.plugins.packages import DISTRIBUTION
from fastloop.problem import Problem

if TYPE_CHECKING:
    from torch import nn

    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import Recommendation, SpeedupEstimate, StepProfile

_place: ContextVar[str] = ContextVar("_place", default="")

hookimpl = pluggy.HookimplMarker("fastloop")

Numerics = Literal["bitwise", "reassociated", "reduced-precision", "changes-training"]
"""How a plugin affects the numbers: same bits; same mathematics in another summation order; fewer bits; different
training. Tests and `bench` verify it."""

NOT_DECLARED = "not declared"
"""Shown in the place of a numerics class that a plugin does not declare."""

Trait = Literal[
    "token-ids", "padded", "output-per-text", "fixed-length", "deterministic", "cached-token-ids", "next-token-loss"
]
"""Properties of a task by which plugins act: see ``Plugin.declare_traits``. docs/write-a-plugin.md has the meanings."""


class Need(Protocol):
    """A requirement on the machine or on installed packages: any object with this method."""

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        """None if the requirement is met; otherwise one or two sentences: what is missing, and what to do."""


@dataclass(frozen=True)
class Package:
    """Requires an installed distribution, optionally of some version: ``Package("peft", ">=0.10", extra="lora")``.

    The message suggests to install ``of[extra]``, if ``extra`` is given.
    """

    distribution: str
    version: str = ""
    extra: str = ""
    of: str = DISTRIBUTION

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        from packaging.specifiers import SpecifierSet

        required = f"{self.distribution}{self.version}"
        target = f"{self.of}[{self.extra}]" if self.extra else required
        installed = installed_version(self.distribution)
        if installed is None:
            return f"needs {required}, which is not installed. Install it: `pip install '{target}'`."
        if self.version and not SpecifierSet(self.version).contains(installed, prereleases=True):
            return f"needs {required}, but {installed} is installed. Upgrade it: `pip install -U '{target}'`."
        return None


@dataclass(frozen=True)
class Device:
    """Requires one of these device types: ``Device("cuda", "xpu")``."""

    kinds: tuple[str, ...]

    def __init__(self, *kinds: str) -> None:
        object.__setattr__(self, "kinds", kinds)

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        if machine.device in self.kinds:
            return None
        return f"needs a device of type {' or '.join(self.kinds)}; this run is on {machine.device}."


@dataclass(frozen=True)
class Dtype:
    """Requires a dtype that the device can compute in: ``Dtype("bf16")``."""

    name: str

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        if self.name in machine.dtypes:
            return None
        return f"needs {self.name}, which {machine.device} here does not have. It has: {', '.join(machine.dtypes)}."


@dataclass(frozen=True)
class When:
    """A requirement that depends on options: ``When(lambda plugin: plugin.dtype == "fp8", Device("cuda"))``."""

    condition: Callable[[Any], bool]
    need: Need

    def missing(self, plugin: Plugin, machine: Machine) -> str | None:
        return self.need.missing(plugin, machine) if self.condition(plugin) else None


class PluginLog(logging.LoggerAdapter[logging.Logger]):
    """fastloop's log, in which each line begins with the name of a plugin.

    A line may be a ``fastloop.problem.Problem``, whose place is then below the plugin's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger("fastloop"))
        self.plugin = name

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        if isinstance(msg, Problem):
            place = f"{self.plugin}: {msg.place}" if msg.place else self.plugin
            return dataclasses.replace(msg, place=place), kwargs
        return f"{self.plugin}: {msg}", kwargs


class Plugin:
    """Base of every plugin: declarations and options on the class, hooks as ``@hookimpl`` methods.

    An option is a typed attribute, ``degrees: float = option("How warm.", default=20.0)``, which methods read as
    ``self.degrees``. Subclasses inherit it. It cannot be assigned, and its name must not be that of another attribute
    of this class or of a hook. Options are keyword arguments, so a plugin also works without a recipe:
    ``Amp(dtype="bf16")``.

    The first sentence of the class's docstring describes the plugin in `fastloop plan`.

    A plugin may declare hooks for other plugins to implement, in a class or module of functions marked with
    ``fastloop.hookspec``. These hooks exist only in runs with that plugin, and the plugin itself calls them::

        class Hooks:
            @hookspec
            def after_warmth(self, run, degrees): "It is warm."

        class Warmth(Plugin):
            hookspecs = Hooks

            @hookimpl
            def after_step(self, run):
                run.hooks.after_warmth(run=run, degrees=20.0)

    Mark an implementation ``@hookimpl(optionalhook=True)`` if it also works without the plugin that declares the hook.
    Otherwise, list that plugin in ``requires``.

    Raises:
        RecipeError: An option is unknown, of the wrong type or out of range.
        PluginError: The type of an option cannot be checked.
    """

    name: ClassVar[str] = ""
    """Name in recipes, in lower case with hyphens."""
    slot: ClassVar[str | None] = None
    """A role that only one plugin of a run may fill, such as ``task``, ``strategy`` or ``precision``. The name of a
    default plugin is a role, too: ``slot = "progress"`` replaces that plugin."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) of plugins that must be in the same run."""
    conflicts: Mapping[str, str] = {}
    """Names (or ``slot:NAME``) of plugins that must not be in the same run -> reason. Options may add some: set them in
    ``__init__``."""
    runs_after: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) of plugins whose hooks must be called before this plugin's."""
    runs_before: ClassVar[tuple[str, ...]] = ()
    """Names (or ``slot:NAME``) of plugins whose hooks must be called after this plugin's."""
    requirements: ClassVar[tuple[Need, ...]] = ()
    """Requirements on the device, dtypes and installed versions."""
    adds_metrics: Mapping[str, MetricMode | None] = {}
    """Metrics that its wrapper of ``evaluate`` adds to ``loss`` and those of ``build_metrics`` -> whether a lower value
    is better (``"min"``) or a higher one (``"max"``); None: neither. A task also declares metrics of ``build_metrics``
    here whose classes have no ``higher_is_better``, or return a dict. ``__init__`` may set it from options."""
    for_inference: ClassVar[bool] = False
    """Whether runs that only evaluate or predict have the plugin too. In such a run, the only split replaces ``train``,
    there is no optimizer, and ``check_run`` and ``before_fit`` are not called."""
    sections: ClassVar[Mapping[str, type]] = {}
    """For a task: ``model`` and ``data`` -> the dataclass of their keys. `fastloop schema` and the docs show them."""
    numerics: ClassVar[Numerics] = "bitwise"
    """How the plugin affects the numbers. Commands show a plugin that declares none as `not declared`."""
    on_resume: ClassVar[Mapping[str, Literal["fixed", "free"]]] = {}
    """Option -> whether a run that resumes must have the checkpoint's value (``fixed``), or may have another one
    (``free``), which is logged and must take effect. The options that it leaves out are fixed in a task and
    if ``numerics`` is ``changes-training``, and free otherwise."""
    description: ClassVar[str] = ""
    """The first sentence of the class's docstring."""
    read_only: ClassVar[bool] = False
    """Whether a run without it computes the same numbers. It must not wrap hooks, implement hooks that change a run, or
    call collective operations (``run.processes.barrier``, ``run.full_state_dict``), so that a failure on one process
    does not block the others. Users can set ``on_error: disable`` to disable it when it fails."""
    publishes: ClassVar[bool] = False
    """Whether the plugin sends results to a server or elsewhere. Commands that discard the run folder, such as `bench`
    and `train --fast-dev-run`, leave it out."""
    waits_for_scalars: ClassVar[bool] = False
    """Whether ``log_scalars`` must be called in the step of its log point on an accelerator, too, where the host then
    waits for the device. For a plugin that stops or saves a run by the values."""
    recordable: ClassVar[bool] = False
    """Whether a step with its hooks ``compute_loss``, ``after_backward`` and ``before_optimizer_step`` may be recorded
    and repeated, as `step-graph` does: the device then repeats the operations, and the hooks are not called. They must
    run the same operations in every step, and act on the host only where a step without their call needs nothing of
    it. While ``run.is_recording``, they must read no number from the device. ``compute_loss`` of a task need not
    declare it."""
    switches_optimizer_modes: ClassVar[bool] = False
    """Whether it calls ``train()`` and ``eval()`` of an optimizer that has them, such as one of the package
    `schedulefree`: ``eval()`` before evaluations and exports, and ``train()`` before the next step. Without such a
    plugin, the optimizer is refused."""
    fallback_hooks: tuple[str, ...] = ()
    """*First* hooks that it implements only for runs in which no other plugin does. ``__init__`` may set it from
    options."""
    hookspecs: Any = None  # no ClassVar: mypy does not let a module override one
    """A class or module of hooks that the plugin declares."""

    where: str = ""
    """The recipe's entry, for messages: ``recipes/x.yaml: plugins.warmth``. The name, if Python made the plugin."""

    on_error: Literal["raise", "disable"] = option(
        "If the plugin fails: fail the run, or disable the plugin and record it in the summary.", default="raise"
    )
    """An option of ``read_only`` plugins alone. A disabled plugin's ``teardown`` is still called, so that it can close
    files and end threads; no other hook is."""

    _options_class: ClassVar[type]

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        declare(cls)
        if "description" in vars(cls):
            raise PluginError(
                "the first sentence of the class's docstring describes a plugin.",
                code="invalid-declaration",
                place=f"{cls.__qualname__}.description",
                remedy="Write it there, and remove the attribute.",
            )
        if cls.__doc__:
            cls.description = first_sentence(cls.__doc__)

    def __init__(self, **options: Any) -> None:
        self.where = _place.get() or self.name
        self._undo = ExitStack()
        cls = type(self)
        if "on_error" in options and not self.read_only:
            raise self.error(
                "on_error",
                f"only read-only plugins can be disabled, and {self.name!r} changes the run.",
                code="not-read-only",
                remedy="Remove it.",
            )
        check_declared(cls, self.where)
        self._options: dict[str, Any] = parse(options_of(cls), options, self.where).__dict__
        self._options.setdefault("on_error", "raise")

    @cached_property
    def log(self) -> PluginLog:
        """fastloop's log. Each line begins with the plugin's name."""
        return PluginLog(self.name)

    def error(
        self,
        key: str,
        text: str = "",
        *,
        code: str = "",
        found: str = "",
        expected: str = "",
        remedy: str = "",
        command: str = "",
    ) -> RecipeError:
        """The error for the value of an option: ``raise self.error("match", "matches no parameter. ...")``.

        It names the recipe, the plugin and the option. With ``""`` for ``key``, it is about the plugin as such. The
        other arguments are fields of a ``fastloop.Problem``.
        """
        place = f"{self.where}.{key}" if key else self.where
        return RecipeError(text, code=code, place=place, found=found, expected=expected, remedy=remedy, command=command)

    def on_teardown(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function at the end of the run, also after an error: ``self.on_teardown(torch.set_num_threads, 4)``.

        The run calls it after the hook ``teardown`` of all plugins, and the last registered function first.
        """
        self._undo.callback(function, *arguments)

    def option_values(self) -> dict[str, Any]:
        """Key of an option in recipes -> its value."""
        return {field.name: self._options[field.name] for field in dataclasses.fields(options_of(type(self)))}

    def set_option(self, key: str, value: Any) -> None:
        """Replace the value of an option before the run is built, such as by one that a launcher's configuration asks
        for."""
        self._options[key] = value

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        """For fastloop's default plugins: the reason to enable the plugin for this recipe, or None."""
        return None

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> Collection[Trait]:
        """For a task: the properties of its batches and its model with this recipe.

        They are promises. ``auto`` selects by them, and some plugins require one. It must not load data or import
        torch."""
        return ()

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        """For `fastloop profile`: the time of a step that this plugin would save; None: no estimate."""
        return None

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """For `auto`: why the plugin makes training faster, and its options; None: it may not.

        It decides by rules, from the recipe and the machine. It must not measure anything, read data or use a
        network."""
        return None

    def select_plugins(self, recipe: Recipe, machine: Machine) -> dict[str, Recommendation]:
        """Plugins that replace this one in the recipe: name -> reason and options. Empty: the plugin stays as it is."""
        return {}

    def second_models(self, run: Run) -> Collection[nn.Module]:
        """For `fastloop plan`: the models that the plugin keeps beside the trained one, in whole on each process.

        It is called on torch's meta device after ``before_prepare``. A plugin that loads its model later builds it here
        without values."""
        return ()

    def build_selected(self, resolved: ResolvedRecipe, build: Callable[[Run], Run]) -> Run:
        """Build a run with the selected plugins, or without some of them. Every process calls it.

        ``build`` builds a ``Run(recipe, plugins)``. If that fails, it tears the run down and raises the error of the
        recipe or plugin."""
        from fastloop.run import Run  # imports torch

        return build(Run(resolved.recipe, resolved.plugins))

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.option_values().items())
        return f"{type(self).__name__}({options})"


declare(Plugin)


def shown_numerics(cls: type[Plugin]) -> str:
    """The numerics class of a plugin in tables: ``not declared`` for a class that only has the default, which its
    author did not promise. A read-only plugin promises it, and there is no training without a task to compare with."""
    declaring = [base for base in cls.__mro__ if base is not Plugin and "numerics" in vars(base)]
    if declaring or cls.read_only or cls.slot == "task":
        return cls.numerics
    return NOT_DECLARED


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line, without its full stop and its double backquotes."""
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    sentence, _, _ = f"{paragraph} ".partition(". ")
    return sentence.strip().removesuffix(".").replace("``", "")


@contextmanager
def listed_at(where: str) -> Iterator[None]:
    """Inside, plugins that are created name ``where`` in messages: the recipe's entry. Their constructors need not pass
    it on."""
    token = _place.set(where)
    try:
        yield
    finally:
        _place.reset(token)

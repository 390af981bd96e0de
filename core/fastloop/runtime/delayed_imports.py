"""Libraries that a run's libraries import and few runs use: ``delay_imports`` delays each until something uses it.

A command spends most of its start on imports. torch, transformers and accelerate import more than a run needs:
torch's compiler for an optimizer that nothing compiles, sympy for tensors that no process shards, ``scipy.optimize``
for the losses of object detection, and boto3 for a dialog about SageMaker. They have no switches for this.

Nothing is lost. A delayed name imports its module on the first use, and once the module is imported, the names that
other modules took from it are the real ones. Libraries of other versions import as usual.

Threads may import at the same time, and a process may fork meanwhile. While a module is executed, ``sys.modules`` has
the stand-in of the module that it does without. If another thread imports this one, the stand-in imports the real one.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

COMPILER = "torch._dynamo"


@dataclass(frozen=True)
class DelayedModule:
    """A module that another one imports at its top.

    Attributes:
        name: Its name.
        functions: The names that are taken from it and called later. Other names import the module.
        decorators: The names that register a function and return it, which can be done later.
        exceptions: The exceptions that are taken from it and caught later. Nothing raises them before the import.
    """

    name: str
    functions: tuple[str, ...] = ()
    decorators: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()


_ASSIGNMENT = DelayedModule("scipy.optimize", ("linear_sum_assignment",))
_GUARD = DelayedModule("torch.fx.experimental.symbolic_shapes", ("guard_or_false",))
_MARKS = DelayedModule(COMPILER, decorators=("allow_in_graph", "assume_constant_result"))
DELAYED = {
    "accelerate.commands.config.sagemaker": DelayedModule("boto3"),
    "torch.distributed.tensor._collective_utils": _GUARD,
    "torch.distributed.tensor._decompositions": DelayedModule(_GUARD.name, exceptions=("GuardOnDataDependentSymNode",)),
    "torch.distributed.tensor._ops._matrix_ops": _GUARD,
    "torch.distributed.tensor._ops._tensor_ops": DelayedModule(_GUARD.name, ("statically_known_true",)),
    "torchmetrics": DelayedModule("scipy.signal", ("hamming",)),
    "transformers.integrations.deepgemm": _MARKS,
    "transformers.integrations.finegrained_fp8": _MARKS,
    "transformers.integrations.sonicmoe": _MARKS,
    "transformers.loss.loss_deformable_detr": _ASSIGNMENT,
    "transformers.loss.loss_for_object_detection": _ASSIGNMENT,
    "transformers.loss.loss_grounding_dino": _ASSIGNMENT,
    "transformers.loss.loss_lw_detr": _ASSIGNMENT,
    "transformers.loss.loss_rf_detr": _ASSIGNMENT,
    "transformers.loss.loss_rt_detr": _ASSIGNMENT,
    "transformers.masking_utils": DelayedModule(
        "torch._dynamo._trace_wrapped_higher_order_op", ("TransformGetItemToIndex",)
    ),
}
"""Module -> the module whose import it can do without."""


@dataclass(frozen=True)
class Registration:
    """A function that a decorator of torch's compiler has to register once the compiler is imported."""

    decorator: str
    function: Callable[..., Any]


_registrations: list[Registration] = []


class ImportedLoader(Loader):
    """Gives Python a module that is imported already, instead of executing it once more."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, which Python has replaced by the one of this loader."""
        module.__spec__ = self.spec


class StandIn(ModuleType):
    """Takes the place of a delayed module while another module imports it.

    It has the names of all modules that do without the delayed one: one of them may import the next. Another thread,
    which may import the delayed one meanwhile, takes the names of the real module from it.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.thread = threading.get_ident()
        self.names: dict[str, Any] = {}
        self.__path__: list[str] = []
        for delayed in DELAYED.values():
            if delayed.name == name:
                self._add_names(delayed)

    def _add_names(self, delayed: DelayedModule) -> None:
        for name in delayed.functions:
            self.names[name] = _delayed_function(delayed.name, name)
        for name in delayed.decorators:
            self.names[name] = functools.partial(_register_later, name)
        for name in delayed.exceptions:
            self.names[name] = type(name, (Exception,), {"__module__": delayed.name})

    @property
    def __spec__(self) -> ModuleSpec:
        """Python reads it for each import. Another thread than that of the stand-in needs the real module.

        It may read it while it searches the real module, and then loads by the spec that it got here.
        """
        if threading.get_ident() == self.thread:
            return ModuleSpec(self.__name__, None)
        return ModuleSpec(self.__name__, ImportedLoader(_import(self.__name__)))

    @__spec__.setter
    def __spec__(self, value: ModuleSpec | None) -> None:
        """``ModuleType`` sets it to None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for __file__, for example
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self.names and threading.get_ident() == self.thread:
            return self.names[name]
        return getattr(_import(self.__name__), name)


def _delayed_function(module: str, name: str) -> Callable[..., Any]:
    """A function that calls ``module.name``, and imports the module for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_import(module), name)(*args, **kwargs)

    call.__name__ = name
    return call


def _register_later(decorator: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Take the place of a decorator of torch's compiler, which returns the function itself."""
    _registrations.append(Registration(decorator, function))
    return function


class Places:
    """The places of stand-ins in ``sys.modules``, for threads that import at the same time.

    A stand-in leaves its place before Python puts the real module there, and takes none afterwards. Otherwise one
    thread could remove the module that another one imports.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held for a few lines, and never while a module is imported
        self.begun: set[str] = set()

    def take(self, name: str) -> StandIn | None:
        """Put a stand-in into ``sys.modules``, unless the name has an entry or its import has begun."""
        stand_in = StandIn(name)
        with self.lock:
            if name in self.begun or name in sys.modules:
                return None
            sys.modules[name] = stand_in
        return stand_in

    def leave(self, name: str) -> None:
        """Remove a stand-in from ``sys.modules``, if it has the entry."""
        with self.lock:
            if isinstance(sys.modules.get(name), StandIn):
                del sys.modules[name]

    def begin_import(self, name: str) -> None:
        """Python has found the real module, and is about to put it into ``sys.modules``."""
        with self.lock:
            self.begun.add(name)
        self.leave(name)

    def start_in_child(self) -> None:
        """Free the lock and the places in a forked process: it lacks the threads that may have held them."""
        self.lock = threading.Lock()
        for delayed in DELAYED.values():
            self.leave(delayed.name)


_places = Places()
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=lambda: _places.start_in_child())


@contextmanager
def stand_in_for(name: str) -> Iterator[None]:
    """Let a stand-in have the place of a module inside the block, which imports a module that does without it.

    Processes that delay no imports can use it, too. Does nothing if the module is imported already.

    Args:
        name: A delayed module of ``DELAYED``.
    """
    stand_in = _places.take(name)
    try:
        yield
    finally:
        if stand_in is not None:
            _places.leave(name)


def _import(name: str) -> ModuleType:
    """The real module, also while its stand-in has its place."""
    _places.leave(name)
    return importlib.import_module(name)


class DelayingFinder:
    """Entry of ``sys.meta_path``: finds modules as Python does, and adjusts the few that are listed here.

    Attributes:
        waiting: Delayed module -> modules that hold its delayed names.
        delayed: The delayed modules. Python asks for each of thousands of modules whether it is one.
    """

    def __init__(self) -> None:
        self.delayed = frozenset(delayed.name for delayed in DELAYED.values())
        self.waiting: dict[str, list[ModuleType]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec if it is one to adjust, with a loader that does so."""
        parent = name.rpartition(".")[0]
        parent_is_delayed = isinstance(sys.modules.get(parent), StandIn)
        if parent_is_delayed:
            path = _import(parent).__path__
        execute = self._execution(name)
        if execute is None:
            return PathFinder.find_spec(name, path, target) if parent_is_delayed else None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the loader is as Python made it again
            execute(module, original)

        loader.exec_module = exec_module
        if name in self.delayed:
            self._announce_import(loader)
        return spec

    def _announce_import(self, loader: Any) -> None:
        """Let the loader of a delayed module call ``begin_import`` where Python asks it for a new module."""
        original = loader.create_module

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            del loader.create_module
            _places.begin_import(spec.name)
            created: ModuleType | None = original(spec)
            return created

        loader.create_module = create_module

    def _execution(self, name: str) -> Callable[[ModuleType, Callable[[ModuleType], None]], None] | None:
        """A function that executes the module and adjusts it; None: the module needs no change."""
        if name in DELAYED and not _is_imported(DELAYED[name].name):
            return self._execute_with_stand_in
        if name in ADJUSTMENTS:
            return _execute_and_adjust
        if name in self.delayed:
            return self._execute_and_fill
        return None

    def _execute_with_stand_in(self, module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
        """Execute a module that would import a delayed one."""
        delayed = DELAYED[module.__name__]
        package = delayed.name.partition(".")[0]
        if _is_imported(delayed.name) or PathFinder.find_spec(package) is None:
            execute(module)
            return
        if delayed.functions or delayed.exceptions:
            self.waiting.setdefault(delayed.name, []).append(module)
        with stand_in_for(delayed.name):
            execute(module)
        if _is_imported(delayed.name):  # meanwhile, for a name that is not listed or by another thread
            _fill(module, sys.modules[delayed.name])

    def _execute_and_fill(self, module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
        """Execute a delayed module, and give its names to the modules that wait for them."""
        execute(module)
        for other in self.waiting.pop(module.__name__, ()):
            _fill(other, module)


def _fill(module: ModuleType, real: ModuleType) -> None:
    """Give a module the real names that it took from a stand-in. A module that is still executed may lack some."""
    delayed = DELAYED[module.__name__]
    for name in (*delayed.functions, *delayed.exceptions):
        if hasattr(module, name) and hasattr(real, name):
            setattr(module, name, getattr(real, name))


def _execute_and_adjust(module: ModuleType, execute: Callable[[ModuleType], None]) -> None:
    """Execute a module of ``ADJUSTMENTS``, and adjust it."""
    execute(module)
    ADJUSTMENTS[module.__name__](module)


def _disable_without_compiler(module: ModuleType) -> None:
    """``torch._disable_dynamo`` imports torch's compiler on the first call of a decorated function, such as
    ``Optimizer.zero_grad``. Let it wait until something else has imported the compiler."""
    original: Callable[..., Any] = module.__dict__["_disable_dynamo"]

    @functools.wraps(original)
    def disable(fn: Any = None, recursive: bool = True) -> Any:
        if fn is None:
            return functools.partial(disable, recursive=recursive)
        disabled = original(fn, recursive)
        if isinstance(fn, FunctionType):
            _call_without_compiler(fn, disabled)
        return disabled

    module.__dict__["_disable_dynamo"] = disable


def _call_without_compiler(function: FunctionType, disabled: Callable[..., Any]) -> None:
    """Put a function where ``disabled`` keeps the one that the compiler made of ``function``: it calls ``function`` as
    it is until the compiler is imported, and is then replaced by that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _is_imported(COMPILER):  # nothing is compiled
            return function(*args, **kwargs)
        function.__dict__.pop("__dynamo_disable", None)
        return disabled(*args, **kwargs)

    function.__dict__["__dynamo_disable"] = call


def _is_imported(name: str) -> bool:
    """Whether the module itself is imported, and not just its stand-in."""
    return name in sys.modules and not isinstance(sys.modules[name], StandIn)


def _disable_lazily(module: ModuleType) -> None:
    """``torch.compiler.disable`` imports torch's compiler where it decorates a function. ``torch._disable_dynamo`` does
    the same later."""
    original: Callable[..., Any] = module.__dict__["disable"]

    @functools.wraps(original)
    def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        if _is_imported(COMPILER) or not (fn is None or isinstance(fn, FunctionType)):
            return original(fn, recursive, reason=reason)
        if fn is None:
            return functools.partial(disable, recursive=recursive, reason=reason)
        return sys.modules["torch._compile"].__dict__["_disable_dynamo"](fn, recursive)

    module.__dict__["disable"] = disable
    allow = module.__dict__["allow_in_graph"]

    @functools.wraps(allow)
    def allow_in_graph(fn: Any) -> Any:
        if _is_imported(COMPILER) or not isinstance(fn, FunctionType):
            return allow(fn)
        return _register_later("allow_in_graph", fn)

    module.__dict__["allow_in_graph"] = allow_in_graph


def _step_without_compiler(module: ModuleType) -> None:
    """``_use_grad_for_differentiable`` decorates ``step`` of each optimizer, and imports torch's compiler in its first
    call, to break the graph there. Without the compiler, there is no graph."""
    original: Callable[..., Any] = module.__dict__["_use_grad_for_differentiable"]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        in_graphs = original(function)

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            if _is_imported(COMPILER):
                return in_graphs(*args, **kwargs)
            optimizer = args[0]
            with sys.modules["torch"].set_grad_enabled(optimizer.defaults["differentiable"]):
                return function(*args, **kwargs)

        return step

    module.__dict__["_use_grad_for_differentiable"] = decorate


def _register(module: ModuleType) -> None:
    """Register the functions that were decorated before torch's compiler was imported."""
    while _registrations:
        registration = _registrations.pop()
        getattr(module, registration.decorator)(registration.function)


def _remember_folders(module: ModuleType) -> None:
    """transformers reads its 500 folders of models once for ``transformers`` and once for ``transformers.models``: the
    cache of the function holds 128."""
    function = module.__dict__["create_import_structure_from_path"]
    module.__dict__["create_import_structure_from_path"] = functools.cache(function.__wrapped__)


ADJUSTMENTS: dict[str, Callable[[ModuleType], None]] = {
    COMPILER: _register,
    "torch._compile": _disable_without_compiler,
    "torch.compiler": _disable_lazily,
    "torch.optim.optimizer": _step_without_compiler,
    "transformers.utils.import_utils": _remember_folders,
}
"""Module -> the function that adjusts it after its execution."""


def delay_imports() -> None:
    """Delay the imports above in this process. Modules that are imported already stay as they are."""
    if not any(isinstance(finder, DelayingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DelayingFinder())

"""Import torchmetrics and transformers without libraries that training does not use: scipy and matplotlib take a second of processor time.

Both libraries use them only for object detection, audio and plots. They get stand-ins, which import the real modules when first used.
Other imports get the real modules.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


class StandIn(ModuleType):
    """Stands in for a module until one of its names is used."""

    def __init__(self, name: str, **values: Any) -> None:
        super().__init__(name)
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


class Style(ContextDecorator):
    """``matplotlib.pyplot.style.context``, which is imported when a plot begins."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __enter__(self) -> None:
        from matplotlib import pyplot

        self.context = pyplot.style.context(*self.arguments)
        self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)


def linear_sum_assignment(*arguments: Any, **keywords: Any) -> Any:
    """``scipy.optimize.linear_sum_assignment``, which is imported when it is called."""
    from scipy import optimize  # type: ignore[import-untyped]

    return optimize.linear_sum_assignment(*arguments, **keywords)


@contextmanager
def standing_in(*modules: ModuleType) -> Iterator[None]:
    """Inside the block, imports get these modules, unless the real ones are imported already."""
    absent = {module.__name__: module for module in modules if module.__name__ not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name, module in absent.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_torchmetrics() -> None:
    """Import torchmetrics without ``scipy.signal`` and matplotlib.

    torchmetrics 1.9 imports ``scipy.signal`` only to restore a name that a package of audio metrics uses.
    """
    if {"torchmetrics", "matplotlib"} & sys.modules.keys():
        plots: list[ModuleType] = []
    else:
        axes, pyplot = (
            StandIn("matplotlib.axes", Axes=object),
            StandIn("matplotlib.pyplot", Figure=object, style=SimpleNamespace(context=Style)),
        )
        colors = StandIn("matplotlib.colors", Colormap=object)
        plots = [StandIn("matplotlib", axes=axes, pyplot=pyplot, colors=colors), axes, pyplot]
    with standing_in(StandIn("scipy.signal", hamming=None), *plots):
        import torchmetrics  # noqa: F401


def import_transformers() -> None:
    """Import the models of transformers without ``scipy.optimize``, which its losses of object detection use."""
    with standing_in(StandIn("scipy.optimize", linear_sum_assignment=linear_sum_assignment)):
        import transformers.modeling_utils  # noqa: F401

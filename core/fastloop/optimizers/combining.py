"""Makes one optimizer of the dict that ``build_optimizer`` returns, and one scheduler of a dict of schedulers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop.optimizers.schedulers import Schedulers
from fastloop.optimizers.several import Optimizers
from fastloop.plugins.plugin import hookimpl

if TYPE_CHECKING:
    from fastloop.run import Run


@hookimpl(wrapper=True, tryfirst=True)  # around the wrappers of plugins, which change the members of a dict
def build_optimizer(run: Run) -> Generator[None, Any, Any]:
    """Make one optimizer of a dict.

    Raises:
        PluginError: See ``Optimizers``.
    """
    optimizer = yield
    return Optimizers(optimizer, run.recipe.where) if isinstance(optimizer, Mapping) else optimizer


@hookimpl(wrapper=True, tryfirst=True)
def build_scheduler(run: Run, optimizer: Any) -> Generator[None, Any, Any]:
    """Make one scheduler of a dict.

    Raises:
        PluginError: See ``Schedulers``.
    """
    scheduler = yield
    return Schedulers(optimizer, scheduler, run.recipe.where) if isinstance(scheduler, Mapping) else scheduler

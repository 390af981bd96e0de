"""The schedulers of several optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from fastloop.errors import PluginError, did_you_mean
from fastloop.optimizers.several import Optimizers


class Schedulers:
    """A dict of schedulers, one for an optimizer: ``run.scheduler["generator"]`` is one of them.

    Args:
        optimizers: The run's optimizer before ``prepare``.
        members: Name of an optimizer -> its scheduler. An optimizer without one keeps its learning rate.
        where: The recipe, for messages.

    Raises:
        PluginError: A name is no optimizer's.
    """

    def __init__(self, optimizers: Any, members: Mapping[str, LRScheduler], where: str) -> None:
        names = optimizers.members if isinstance(optimizers, Optimizers) else {}
        for name in members:
            if name not in names:
                has = f"the optimizers {', '.join(names)}" if names else "one optimizer without a name"
                hint = did_you_mean(name, names)
                raise PluginError(
                    f"build_scheduler returned a scheduler for {name!r}.{hint} The run has {has}.",
                    code="unknown-optimizer",
                    place=where,
                )
        self.optimizers = optimizers
        self.members = dict(members)

    def __getitem__(self, name: str) -> LRScheduler:
        """One scheduler."""
        return self.members[name]

    def step(self) -> None:
        """Step the schedulers of the optimizers that stepped since the last call."""
        for name in self.optimizers.stepped & self.members.keys():
            self.members[name].step()
        self.optimizers.stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """The states by name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        for name, member in self.members.items():
            member.load_state_dict(state_dict[name])

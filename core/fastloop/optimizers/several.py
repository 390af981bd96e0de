"""Several optimizers that a run uses as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from fastloop.errors import PluginError, did_you_mean


class Optimizers(Optimizer):
    """A dict of optimizers as one: ``run.optimizer["generator"]`` is one of them.

    Loss scaling sees one optimizer: an overflow in any gradient skips all that step together. One scheduler of this
    optimizer schedules all groups.

    Args:
        members: Name -> optimizer, in the order in which they step. Adds the key ``optimizer``, the name, to their
            groups.
        where: The recipe, for messages.

    Attributes:
        selected: Names of the optimizers that the next ``step`` steps. ``zero_grad`` selects all.
        stepped: Names of the optimizers that stepped since ``Schedulers`` last cleared it.
        is_stepping: Whether ``step`` is running.

    Raises:
        PluginError: The dict is empty, or two optimizers hold the same parameter.
    """

    # torch's would copy groups and state: the members hold both
    def __init__(self, members: Mapping[str, Optimizer], where: str) -> None:
        where = f"{where}: build_optimizer returned"
        owner_of: dict[Any, str] = {}
        if not members:
            raise PluginError(
                f"{where} an empty dict.",
                code="wrong-result",
                remedy="Return an optimizer, or a dict of name -> optimizer.",
            )
        for name, member in members.items():
            for group in member.param_groups:
                group["optimizer"] = name
                for parameter in group["params"]:
                    owner = owner_of.setdefault(parameter, name)
                    if owner != name:
                        shape = tuple(parameter.shape)
                        raise PluginError(
                            f"{where} {owner!r} and {name!r}, which both hold a parameter of shape {shape}.",
                            code="shared-parameter",
                            remedy="Give it to one.",
                        )
        self.members = dict(members)
        self.selected = tuple(members)
        self.stepped: set[str] = set()
        self.is_stepping = False
        self.defaults: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Optimizer:
        """One optimizer.

        Raises:
            PluginError: There is none of this name.
        """
        if name not in self.members:
            hint = did_you_mean(name, self.members)
            raise PluginError(
                f"run.optimizer has no optimizer {name!r}.{hint} build_optimizer returned: {', '.join(self.members)}.",
                code="unknown-optimizer",
            )
        return self.members[name]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups, each with its optimizer's name under ``optimizer``."""
        groups = []
        for member in self.members.values():
            groups += member.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Parameter -> state, of all optimizers."""
        states: dict[Any, Any] = {}
        for member in self.members.values():
            states |= member.state
        return states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse it: only the optimizer that steps a group can hold it."""
        raise PluginError(
            f'Add the group to one of {", ".join(self.members)}: run.optimizer["NAME"].add_param_group(...).',
            code="several-optimizers",
        )

    def select(self, name: str) -> None:
        """Let the next ``step`` step only this optimizer, and clear the gradients of the others.

        Raises:
            PluginError: None of its parameters has a gradient, or there is none of this name.
        """
        has_gradient = False
        for group in self[name].param_groups:
            has_gradient = has_gradient or any(parameter.grad is not None for parameter in group["params"])
        if not has_gradient:
            raise PluginError(
                f"no parameter of the optimizer {name!r} has a gradient.",
                code="no-gradient",
                place="run.apply_gradients",
                remedy="Call run.accumulate_gradients before each run.apply_gradients, which clears all gradients.",
            )
        for other, member in self.members.items():
            if other != name:
                member.zero_grad()
        self.selected = (name,)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the selected optimizers."""
        self.is_stepping = True
        try:
            for name in self.selected:
                self.members[name].step()
                self.stepped.add(name)
        finally:
            self.is_stepping = False

    def scale(self, scaler: Any) -> ScaledOptimizers:
        """These optimizers under loss scaling."""
        return ScaledOptimizers(self, scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and select all optimizers."""
        for member in self.members.values():
            member.zero_grad(set_to_none)
        self.selected = tuple(self.members)

    def state_dict(self) -> dict[str, Any]:
        """In torch's format: the groups of all optimizers, each with its optimizer's name, and one numbering of their
        parameters.

        The generator's parameters 0 and 1 and the discriminator's 0, 1 and 2 become 0 and 1, and 2, 3 and 4.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0  # number of the member's first parameter
        for member in self.members.values():
            own = member.state_dict()
            for index, values in own["state"].items():
                state[first + index] = values
            for group in own["param_groups"]:
                groups.append({**group, "params": [first + index for index in group["params"]]})
            first += count_parameters(own["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``, each optimizer by its name.

        Raises:
            ValueError: It has other optimizers, or another order of them.
        """
        groups = state_dict["param_groups"]
        saved = owners(groups)
        own = owners(self.param_groups)
        if saved != own:
            raise ValueError(
                f"its groups belong to the optimizers {', '.join(saved)}, and this run's to {', '.join(own)}"
            )
        first = 0
        for name, member in self.members.items():
            member_groups = [group for group in groups if group["optimizer"] == name]
            end = first + count_parameters(member_groups)
            states = {}
            for index, values in state_dict["state"].items():
                if first <= index < end:
                    states[index - first] = values
            renumbered = []
            for group in member_groups:
                renumbered.append({**group, "params": [index - first for index in group["params"]]})
            member.load_state_dict({"state": states, "param_groups": renumbered})
            first = end


def owners(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The name of the optimizer of each parameter group."""
    return [str(group.get("optimizer", "without a name")) for group in groups]


def count_parameters(groups: Iterable[Mapping[str, Any]]) -> int:
    """The number of parameters in groups."""
    return sum(len(group["params"]) for group in groups)


class ScaledOptimizers(AcceleratedOptimizer):  # type: ignore[misc] # Accelerate has no types
    """``Optimizers`` under loss scaling: one scaler unscales, checks and skips them together."""

    def __init__(self, optimizers: Optimizers, scaler: Any) -> None:
        super().__init__(optimizers, device_placement=False, scaler=scaler)
        for member in optimizers.members.values():
            member.register_step_pre_hook(self._check_step)

    def __getitem__(self, name: str) -> Optimizer:
        """One optimizer."""
        member: Optimizer = self.optimizer[name]
        return member

    def _check_step(self, member: Optimizer, *_: Any) -> None:
        """Refuse a step that the scaler does not know: it would apply scaled gradients."""
        if not self.optimizer.is_stepping:
            name = member.param_groups[0]["optimizer"]
            raise PluginError(
                f"the optimizer {name!r} was stepped with scaled gradients (fp16).",
                code="scaled-gradients",
                remedy=f"Call run.apply_gradients(loss, {name!r}) instead.",
            )

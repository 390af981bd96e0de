"""The order in which a model calls the modules whose weights all processes gather together.

A call is a number, so that processes can agree on one by an all-reduce: twice the index of the module, and 1 more if
its inputs need no gradient. An order is a list of such numbers. The calls within a module follow its own, and ``end``
closes them:

    modules        0 block, 1 block.attention, 2 head, so that end is 6
    order          [0, 2, 6, 4, 6]
    read as        block (attention) head, and the end of the model
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import PluginError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

MAX_CALLS = 4
"""Forward passes of a batch whose orders are kept apart. Later ones, such as those that generate a text, have the order
of the last."""


@dataclass(frozen=True)
class PassKind:
    """Forward passes of one kind have the same order.

    Attributes:
        records_gradients: Whether torch records operations for a backward pass.
        inputs_need_gradient: Whether the inputs of the model need a gradient.
        is_training: Whether the model is in train mode.
        updates: Updates of the weights that the step has done already.
        number: Forward passes of the batch before this one, ``MAX_CALLS`` at most.
    """

    records_gradients: bool
    inputs_need_gradient: bool
    is_training: bool
    updates: int
    number: int


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module, and the calls within it."""

    number: int
    inner: list[ModuleCall]


def call_number(index: int, needs_gradient: bool) -> int:
    """The number of a call: 6 for module 3 if its inputs need a gradient, and otherwise 7."""
    return 2 * index if needs_gradient else 2 * index + 1


def module_index(call: int) -> int:
    """The index of the module that is called: 3 for the numbers 6 and 7."""
    return call // 2


def needs_gradient(call: int) -> bool:
    """Whether the inputs of a call need a gradient."""
    return call % 2 == 0


class ModuleOrder:
    """Makes all processes call the same modules in the same order, so that they gather the same weights.

    In the first forward pass of each kind, processes agree on each call. From then on, a process that leaves out a
    module calls it with an empty forward, in its place: it takes part in gathering the weights and in reducing their
    gradients, which are zero.

    Args:
        run: The run.
        root: The model.
        modules: Its modules whose weights are gathered, without ``root``.
        remedy: The end of the error message for a process that calls a module where no process did at first.
        strict: Raise that error for a module that a process leaves out, too.
    """

    def __init__(
        self, run: Run, root: nn.Module, modules: Iterable[nn.Module], remedy: str, strict: bool = False
    ) -> None:
        import torch

        # a ModuleList has no forward
        gathered = {module for module in modules if type(module).forward is not torch.nn.Module.forward} - {root}
        self.run = run
        self.remedy = remedy
        self.strict = strict
        self.by_name = {name: module for name, module in root.named_modules() if module in gathered}
        self.modules = list(self.by_name.values())
        self.names: list[str] = list(self.by_name)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.inner = self._find_inner()
        self.end = 2 * len(self.modules)  # the number of no call
        self.orders: dict[PassKind, list[int]] = {}
        self.order: list[int] = []
        self.at: int | None = None  # position in the order; None: outside of the model's forward
        self.empty: set[nn.Module] = set()  # modules that take part, once those within them have
        self.is_paused = False
        self.calls: int  # forward passes of the batch
        self.kind: PassKind  # this and the next attributes: of the forward pass
        self.agreeing: bool  # whether processes agree on each call
        self.taking_part: bool  # whether this process calls a module only because others do
        self.tokens: list[Tensor]  # outputs of such calls, whose backward passes the pass needs
        self.called: set[str]  # modules that any process called in the last pass that agreed
        self.attached: bool  # whether the model's output has the tokens
        self.restart()
        off: Callable[..., Any] = torch.compiler.disable
        for name, module in self.by_name.items():
            module.register_forward_pre_hook(off(partial(self._enter, name)), prepend=True, with_kwargs=True)
            if self.inner[name]:
                module.register_forward_hook(off(self._leave), prepend=True)
        root.register_forward_pre_hook(off(self._begin), prepend=True, with_kwargs=True)
        root.register_forward_hook(off(self._finish), prepend=True)

    def _find_inner(self) -> dict[str, list[str]]:
        """Name -> the gathered modules directly within it; ``""`` is the model. With ``block`` and
        ``block.attention.query`` gathered, the second one is directly within the first."""
        inner: dict[str, list[str]] = {"": []}
        for name in self.names:
            outer = name.rpartition(".")[0]
            while outer and outer not in self.by_name:
                outer = outer.rpartition(".")[0]
            inner.setdefault(name, [])
            inner[outer].append(name)
        return inner

    def restart(self) -> None:
        """Begin a batch: its first forward pass has the order of the first one of other batches."""
        self.calls = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, each process calls any modules, since their weights are gathered already."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def _begin(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        import torch

        if self.is_paused:
            return
        self.kind = PassKind(
            records_gradients=torch.is_grad_enabled(),
            inputs_need_gradient=need_gradient(args, kwargs),
            is_training=root.training,
            updates=self.run.updates,
            number=min(self.calls, MAX_CALLS),
        )
        self.calls += 1
        self.agreeing = self.kind not in self.orders
        self.order = self.orders.get(self.kind, [])
        self.at = 0
        self.taking_part = False
        self.tokens = []

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch.utils._pytree import tree_map

        if self.at is None:  # a checkpointed module is called again in backward
            return None
        if self.taking_part:
            self.taking_part = False
            return None
        index = self.index[name]
        call = call_number(index, need_gradient(args, kwargs))
        agreed = self._next(call, name)
        while module_index(agreed) != index:
            self._take_part(agreed)
            agreed = self._next(call, name)
        if agreed == call:
            return None
        if not needs_gradient(agreed) or not self.tokens:
            raise self._error(
                f"called {name!r} with inputs that need a gradient only sometimes, or only on some processes"
            )
        # the inputs would need one, had this process called the modules before
        return tree_map(self._attach, (args, kwargs))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self.empty:
            return
        while self.at is not None:
            agreed = self._next(self.end)
            if agreed == self.end:
                return
            self._take_part(agreed)

    def _finish(self, root: nn.Module, args: Any, output: Any) -> Any:
        """Before hooks that see the output: their backward passes begin with those of the modules that were left
        out."""
        from torch.utils._pytree import tree_map

        if self.is_paused:
            return output
        self._leave(root)
        if self.agreeing:
            self.called = {self._name(call) for call in self.order if call != self.end}
            self.orders[self.kind] = self._flatten(self._complete("", self._parse(iter(self.order))))
        self.at = None
        if self.tokens:
            self.attached = False
            output = tree_map(self._attach_output, output)
            if not self.attached:
                raise PluginError(
                    f"process {self.run.rank} left out some modules, whose weights all processes gather for backward, "
                    f"too. Found no tensor to attach them to in the {type(output).__name__} that the model returned: "
                    "return a tensor, or a dict or tuple of them.",
                    code="modules-differ",
                    place=self.run.recipe.where,
                )
        self.tokens = []
        return output

    def _next(self, call: int, name: str = "") -> int:
        """The call that all processes make now, where this one would make ``call``."""
        import torch

        assert self.at is not None
        if self.agreeing:
            first = torch.tensor(call)
            torch.distributed.all_reduce(first, torch.distributed.ReduceOp.MIN, group=self.run.processes.host_group)
            self.order.append(int(first))
            return self.order[-1]
        agreed = self.order[self.at]
        if module_index(agreed) != module_index(call) and not self._follows(call):
            raise self._error(f"called {name!r} where no process did in its first forward pass")
        self.at += 1
        return agreed

    def _follows(self, call: int) -> bool:
        """Whether a call comes later within the call that is running.

        With the order ``[0, 2, 6, 4, 6]`` and position 1, within module 0: 2 does, and 4 does not, because the end of
        module 0 comes before it.
        """
        assert self.at is not None
        depth = 0
        for later in self.order[self.at :]:
            if depth == 0 and module_index(later) == module_index(call):
                return True
            if later == self.end:
                depth -= 1
            elif self._has_inner(later):
                depth += 1
            if depth < 0:
                break
        return False

    def _name(self, call: int) -> str:
        return self.names[module_index(call)]

    def _has_inner(self, call: int) -> bool:
        return bool(self.inner[self._name(call)])

    def _error(self, problem: str) -> PluginError:
        return PluginError(
            f"process {self.run.rank} of {self.run.world_size} {problem}. Processes gather the weights of a module "
            "together, so each of them must call it.",
            code="modules-differ",
            place=self.run.recipe.where,
            remedy=self.remedy,
        )

    def _take_part(self, call: int) -> None:
        """Call a module with an empty forward: only its hooks run."""
        import torch

        name = self._name(call)
        if self.strict:
            raise self._error(
                f"left out {name!r} which others called, or which it called in its first forward pass itself"
            )
        module = self.modules[module_index(call)]
        records_gradients = torch.is_grad_enabled()
        weight = torch.zeros((), device=self.run.device, requires_grad=records_gradients and is_trained(module))
        token = torch.zeros((), device=self.run.device, requires_grad=records_gradients and needs_gradient(call))
        own = module.__dict__.get("forward")

        def forward(token: Tensor) -> Tensor:
            if self.inner[name]:
                self._leave(module)
            self.empty.add(module)
            return token + weight  # after the modules within it, so that its backward pass begins before theirs

        module.forward = forward
        self.taking_part = True
        try:
            token = module._call_impl(token)
        finally:
            del module.forward
            self.empty.discard(module)
            if own is not None:
                module.forward = own
        if token.requires_grad:
            self.tokens.append(token)

    def _attach_output(self, output: Any) -> Any:
        return self._attach(output) if getattr(output, "requires_grad", False) else output

    def _attach(self, value: Any) -> Any:
        """Let a tensor depend on the modules that took part: their backward passes run in the order of their forward
        passes."""
        import torch

        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        self.attached = True

        class Attach(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor, *tokens: Tensor) -> Tensor:
                ctx.tokens = len(tokens)
                return value.clone()  # FSDP warns of views

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                return gradient, *[torch.zeros((), device=gradient.device)] * ctx.tokens

        return Attach.apply(value, *self.tokens)  # type: ignore[no-untyped-call]

    def _parse(self, calls: Iterator[int]) -> list[ModuleCall]:
        """The calls of an order up to the end of the running one."""
        parsed = []
        for call in calls:
            if call == self.end:
                break
            inner = self._parse(calls) if self._has_inner(call) else []
            parsed.append(ModuleCall(call, inner))
        return parsed

    def _flatten(self, calls: list[ModuleCall]) -> list[int]:
        """The opposite of ``_parse``."""
        flat = []
        for call in calls:
            flat.append(call.number)
            if self._has_inner(call.number):
                flat += self._flatten(call.inner)
        flat.append(self.end)
        return flat

    def _complete(self, outer: str, calls: list[ModuleCall]) -> list[ModuleCall]:
        """Insert the modules that no process called, such as layers left out at random. Without the order in which the
        model lists its modules, their places are unknown."""
        completed = []
        for call in calls:
            inner = self._complete(self._name(call.number), call.inner)
            completed.append(ModuleCall(call.number, inner))
        indices = [module_index(call.number) for call in completed]
        is_listed_order = indices == sorted(set(indices))
        if self.strict or not is_listed_order:
            return completed
        guesses = [self._guess(name, completed) for name in self._missing(outer)]
        return sorted([*completed, *guesses], key=lambda call: call.number)

    def _missing(self, outer: str) -> Iterator[str]:
        """The modules directly within another one that no process called. A container may be missing, and not its
        modules."""
        for name in self.inner[outer]:
            if name in self.called:
                continue
            if any(other.startswith(f"{name}.") for other in self.called):
                yield from self._missing(name)
            elif any(True for _ in self.by_name[name].parameters()):
                yield name

    def _guess(self, name: str, calls: list[ModuleCall]) -> ModuleCall:
        """The call of a module: that of another one of its class, or of the modules within it as they are listed."""
        module = self.by_name[name]
        for call in reversed(calls):  # the inputs of the first one may need no gradient
            other = self.modules[module_index(call.number)]
            if type(other) is type(module) and _part_names(other) == _part_names(module):
                return self._rename(call, self._name(call.number), name)
        number = call_number(self.index[name], self.kind.records_gradients and is_trained(module))
        return ModuleCall(number, [self._guess(inner, []) for inner in self.inner[name]])

    def _rename(self, call: ModuleCall, old: str, new: str) -> ModuleCall:
        """The same call of another module, whose name begins with ``new`` where it begins with ``old``."""
        index = self.index[new + self._name(call.number).removeprefix(old)]
        inner = [self._rename(each, old, new) for each in call.inner]
        return ModuleCall(call_number(index, needs_gradient(call.number)), inner)


def need_gradient(*inputs: Any) -> bool:
    """Whether a module's inputs need a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_trained(module: nn.Module) -> bool:
    """Whether a parameter of a module needs a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _part_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_modules()]

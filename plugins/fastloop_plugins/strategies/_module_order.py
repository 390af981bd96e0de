"""The order in which a model calls the modules whose weights all processes gather together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastloop import PluginError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run

Call = tuple[int, list[Any]]
"""A module to call, as twice its index, plus 1 if its inputs need no gradient; and the calls within it."""
MAX_CALLS = 4
"""Forward passes of a batch whose orders are kept apart. Later ones, such as those that generate a text, have the order
of the last."""


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

        # a ModuleList has none
        gathered = {module for module in modules if type(module).forward is not torch.nn.Module.forward} - {root}
        self.run = run
        self.remedy = remedy
        self.strict = strict
        self.names = {name: module for name, module in root.named_modules() if module in gathered}
        self.modules, self.name = list(self.names.values()), list(self.names)
        self.inner: dict[str, list[str]] = {"": []}  # name -> the modules directly within it
        for name in self.names:
            outer = name.rpartition(".")[0]
            while outer and outer not in self.names:
                outer = outer.rpartition(".")[0]
            self.inner.setdefault(name, [])
            self.inner[outer].append(name)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.end = 2 * len(self.modules)  # a call returns
        self.orders: dict[Any, list[int]] = {}
        self.order: list[int] = []
        self.at: int | None = None  # position in the order; None: outside of the model's forward
        self.empty: set[nn.Module] = set()  # modules that take part, once those within them have
        self.is_paused = False
        self.restart()
        off: Callable[..., Any] = torch.compiler.disable
        for name, module in self.names.items():
            module.register_forward_pre_hook(off(partial(self._enter, name)), prepend=True, with_kwargs=True)
            if self.inner[name]:
                module.register_forward_hook(off(self._leave), prepend=True)
        root.register_forward_pre_hook(off(self._begin), prepend=True, with_kwargs=True)
        root.register_forward_hook(off(self._finish), prepend=True)

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
        self.key = (
            torch.is_grad_enabled(),
            need_gradient(args, kwargs),
            root.training,
            self.run.updates,
            min(self.calls, MAX_CALLS),
        )
        self.calls += 1
        self.agreeing = self.key not in self.orders
        self.order = self.orders.get(self.key, [])
        self.at = 0
        self.taking_part = False
        self.tokens: list[Tensor] = []

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        from torch.utils._pytree import tree_map

        if self.at is None:  # a checkpointed module is called again in backward
            return None
        if self.taking_part:
            self.taking_part = False
            return None
        call = 2 * self.index[name] + (not need_gradient(args, kwargs))
        while (found := self._next(call, name)) >> 1 != call >> 1:
            self._take_part(found)
        if found == call:
            return None
        if found & 1 or not self.tokens:
            raise self._error(
                name, "called", "with inputs that need a gradient only sometimes, or only on some processes"
            )
        return tree_map(self._attach, (args, kwargs))  # as they would, had this process called the modules before

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module in self.empty:
            return
        while self.at is not None and (found := self._next(self.end)) != self.end:
            self._take_part(found)

    def _finish(self, root: nn.Module, args: Any, output: Any) -> Any:
        """Before hooks that see the output: their backward passes begin with those of the modules that were left
        out."""
        from torch.utils._pytree import tree_map

        if self.is_paused:
            return output
        self._leave(root)
        if self.agreeing:
            self.called = {self.name[call >> 1] for call in self.order if call != self.end}
            self.orders[self.key] = self._flatten(self._complete("", self._parse(iter(self.order))))
        self.at, self.attached = None, not self.tokens
        output = tree_map(self._attach_output, output) if self.tokens else output
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
        found = self.order[self.at]
        if found >> 1 != call >> 1 and not self._follows(call):
            raise self._error(name, "called", "where no process did in its first forward pass")
        self.at += 1
        return found

    def _follows(self, call: int) -> bool:
        """Whether a call comes later within the call that is running."""
        depth = 0
        for found in self.order[self.at :]:
            if depth == 0 and found >> 1 == call >> 1:
                return True
            if found == self.end:
                depth -= 1
            elif self._has_inner(found):
                depth += 1
            if depth < 0:
                break
        return False

    def _has_inner(self, call: int) -> bool:
        return bool(self.inner[self.name[call >> 1]])

    def _error(self, name: str, did: str, problem: str) -> PluginError:
        process = f"process {self.run.rank} of {self.run.world_size}"
        return PluginError(
            f"{process} {did} {name!r} {problem}. Processes gather the weights of a module together, so each of them "
            "must call it.",
            code="modules-differ",
            place=self.run.recipe.where,
            remedy=self.remedy,
        )

    def _take_part(self, call: int) -> None:
        """Call a module with an empty forward: only its hooks run."""
        import torch

        if self.strict:
            raise self._error(
                self.name[call >> 1],
                "left out",
                "which others called, or which it called in its first forward pass itself",
            )
        module = self.modules[call >> 1]
        grad = torch.is_grad_enabled()
        weight = torch.zeros(
            (), device=self.run.device, requires_grad=grad and any(p.requires_grad for p in module.parameters())
        )
        token = torch.zeros((), device=self.run.device, requires_grad=grad and not call & 1)
        own = module.__dict__.get("forward")

        def forward(token: Tensor) -> Tensor:
            if self.inner[self.name[call >> 1]]:
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

    def _parse(self, calls: Iterator[int]) -> list[Call]:
        """The calls of an order up to the end of the running one."""
        found = []
        for call in calls:
            if call == self.end:
                break
            found.append((call, self._parse(calls) if self._has_inner(call) else []))
        return found

    def _flatten(self, calls: list[Call]) -> list[int]:
        """The opposite of ``_parse``."""
        flat = [
            each for call, inner in calls for each in (call, *(self._flatten(inner) if self._has_inner(call) else ()))
        ]
        return [*flat, self.end]

    def _complete(self, outer: str, calls: list[Call]) -> list[Call]:
        """Insert the modules that no process called, such as layers left out at random. Without the order in which the
        model lists its modules, their places are unknown."""
        calls = [(call, self._complete(self.name[call >> 1], inner)) for call, inner in calls]
        places = [call >> 1 for call, _ in calls]
        if places == sorted(set(places)) and not self.strict:
            calls = sorted(
                [*calls, *(self._guess(name, calls) for name in self._missing(outer))], key=lambda call: call[0]
            )
        return calls

    def _missing(self, outer: str) -> Iterator[str]:
        """The modules directly within another one that no process called. A container may be missing, and not its
        modules."""
        for name in self.inner[outer]:
            if name in self.called:
                continue
            if any(other.startswith(f"{name}.") for other in self.called):
                yield from self._missing(name)
            elif any(True for _ in self.names[name].parameters()):
                yield name

    def _guess(self, name: str, calls: list[Call]) -> Call:
        """The call of a module: that of another one of its class, or of the modules within it as they are listed."""
        module = self.names[name]
        grad = self.key[0]
        for call, inner in reversed(calls):  # the inputs of the first one may need no gradient
            other = self.modules[call >> 1]
            if type(other) is type(module) and [each for each, _ in other.named_modules()] == [
                each for each, _ in module.named_modules()
            ]:
                return self._rename(call, inner, self.name[call >> 1], name)
        needs = grad and any(parameter.requires_grad for parameter in module.parameters())
        return 2 * self.index[name] + (not needs), [self._guess(inner, []) for inner in self.inner[name]]

    def _rename(self, call: int, inner: list[Call], old: str, new: str) -> Call:
        index = self.index[new + self.name[call >> 1].removeprefix(old)]
        return 2 * index + (call & 1), [self._rename(*each, old, new) for each in inner]


def need_gradient(*inputs: Any) -> bool:
    """Whether a module's inputs need a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

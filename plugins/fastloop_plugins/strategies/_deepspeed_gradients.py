"""Parameters that some processes leave out of a step: reduces their gradients as zeros, steps none without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastloop import PluginError
from fastloop_plugins.strategies._gradients import Gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop_plugins.strategies._module_order import ModuleOrder


class Reduction:
    """Gives DeepSpeed a gradient of every trained parameter, in the same order on every process.

    DeepSpeed reduces the gradients that a process has, in the order in which backward computes them. Processes that
    used different layers would add gradients of different parameters. Here a gradient waits until those of the
    parameters behind it in the model have arrived, as in torch's DistributedDataParallel. Missing ones follow as zeros
    after the backward pass.

    Attributes:
        gradients: The record of the gradients that backward computed.
    """

    def __init__(self, run: Run, engine: Any, stage: int) -> None:
        self.engine = engine
        self.stage = stage
        self.gradients = Gradients(run, engine.module.parameters())
        self.order: list[tuple[Any, ...]] = []
        self.reduce_all, engine.allreduce_gradients = engine.allreduce_gradients, self.complete
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradients.add)
        if stage:
            zero = engine.optimizer
            groups = zero.fp16_groups if stage == 3 else zero.bit16_groups
            trained = (
                (parameter, index)
                for index, group in enumerate(groups)
                for parameter in group
                if parameter.requires_grad
            )
            self.order = [pair[:1] if stage == 3 else pair for pair in trained][::-1]
            self.reduce_one = zero.reduce_independent_p_g_buckets_and_remove_grads
            zero.reduce_independent_p_g_buckets_and_remove_grads = self.add
        self.place = {id(parameter): index for index, (parameter, *_) in enumerate(self.order)}
        self.begin()

    def begin(self) -> None:
        """Begin a backward pass."""
        self.arrived: set[int] = set()
        self.reduced = 0

    def add(self, parameter: Tensor, *group: int) -> None:
        """A gradient is ready: reduce it, and the ones that waited for it, in order."""
        if self.place[id(parameter)] < self.reduced:  # once more in this pass: DeepSpeed knows whether that is allowed
            self.reduce_one(parameter, *group)
        self.arrived.add(id(parameter))
        while self.reduced < len(self.order) and id(self.order[self.reduced][0]) in self.arrived:
            self.reduce_one(*self.order[self.reduced])
            self.reduced += 1

    def complete(self, *arguments: Any, **options: Any) -> None:
        """The backward pass is done: reduce the missing gradients as zeros, then call DeepSpeed's own."""
        zero = self.engine.optimizer
        last = self.engine.is_gradient_accumulation_boundary()
        if self.stage > 1 or (self.stage == 1 and last):
            for parameter, *group in self.order:
                if id(parameter) not in self.arrived:
                    self._fill(zero, parameter)
                    if self.stage > 1 or zero.overlap_comm:  # else DeepSpeed reduces all of them now
                        self.add(parameter, *group)
        self.reduce_all(*arguments, **options)

    def _fill(self, zero: Any, parameter: Any) -> None:
        """Give a parameter a zero gradient, unless an earlier micro-step computed one."""
        import torch

        if self.stage == 3:
            shard = parameter.data
            parameter.data = torch.zeros(parameter.ds_shape, dtype=parameter.dtype, device=self.engine.device)
            parameter.grad = torch.zeros_like(parameter)  # torch compares its shape with the weight's
            parameter.data = shard
        elif zero.get_gradient_for_reduction(parameter) is None:
            name = "grad_accum" if zero.use_grad_accum_attribute else "grad"
            setattr(
                parameter,
                name,
                torch.zeros_like(parameter, dtype=zero.gradient_accumulation_dtype if name != "grad" else None),
            )


class Slices:
    """Steps the slices of single parameters in ZeRO's flat tensors, where some have no gradient in a step.

    Torch's optimizers leave a parameter without a gradient as it is. ZeRO would move it by momentum and weight decay,
    and count the step.

    Args:
        base: Torch's optimizer, whose parameters are ZeRO's flat tensors.
        zero: DeepSpeed's optimizer.

    Attributes:
        own: The state of each parameter that has missed a step, by ``id``, without its tensors; None: it was never
            stepped. The others share the state of their flat tensor.
        unused: The parameters without a gradient in this step, by ``id``.
    """

    def __init__(self, base: Any, zero: Any, stage: int) -> None:
        self.base = base
        self.zero = zero
        self.stage = stage
        self.own: dict[int, dict[str, Any] | None] = {}
        self.unused: set[int] = set()
        self.cut: list[tuple[dict[str, Any], list[Any], list[tuple[Any, ...]]]] = []
        base.register_step_pre_hook(self.before_step)
        base.register_step_post_hook(self.after_step)

    def layout(self) -> Iterator[tuple[Any, list[tuple[Tensor, int, int]]]]:
        """Each flat tensor of this process, with the parameters in it, their first elements and numbers of elements."""
        if self.stage == 3:
            for flat, group in zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True):
                end = 0
                found = []
                for parameter in group:
                    found.append((parameter, end, parameter.partition_numel()))
                    end += parameter.partition_numel()
                yield flat, found
            return
        for flat, group in zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True):
            places = ((parameter, parameter._hp_mapping) for parameter in group if parameter._hp_mapping is not None)
            found = [
                (parameter, place.hp_fragment_address.start, place.hp_fragment_address.numel)
                for parameter, place in places
            ]
            yield flat, sorted(found, key=lambda item: item[1])

    def leave_out(self, unused: Iterable[Tensor]) -> None:
        """Set the parameters that the next step must not change."""
        self.unused = {id(parameter) for parameter in unused}
        missed = self.unused - self.own.keys()
        self.own |= dict.fromkeys(missed)  # on every process, also without a slice of them
        for flat, found in self.layout() if missed else ():
            state = self.base.state[flat]
            numbers = self._split(state, flat)[1] if state else None
            self.own |= {id(parameter): numbers for parameter, *_ in found if id(parameter) in missed}

    def before_step(self, *_: Any) -> None:
        """Replace the flat tensors in the parameter groups by the pieces to step."""
        layout = {id(flat): found for flat, found in self.layout()} if self.own else {}
        for group in self.base.param_groups if self.own else ():
            pieces = [piece for flat in group["params"] for piece in self._cut(flat, layout[id(flat)])]
            self.cut.append((group, group["params"], pieces))
            group["params"] = [piece for piece, *_ in pieces]

    def after_step(self, *_: Any) -> None:
        """Put the flat tensors back, with the state of their pieces."""
        for group, flats, pieces in self.cut:
            group["params"] = flats
            for piece in pieces:
                self._join(*piece)
        self.cut.clear()

    def _cut(self, flat: Any, found: list[tuple[Tensor, int, int]]) -> list[tuple[Tensor, Any, int, int | None]]:
        """The pieces of a flat tensor to step: (piece, flat tensor, first element, ``id`` of the parameter; None:
        several in one state)."""
        tensors, common = self._split(self.base.state[flat], flat)
        runs: list[tuple[int, int, int | None]] = []
        for parameter, start, size in found:
            if id(parameter) in self.own:
                runs.append((start, start + size * (id(parameter) not in self.unused), id(parameter)))
            elif runs and runs[-1][2] is None:
                runs[-1] = runs[-1][0], start + size, None
            else:
                runs.append((start, start + size, None))
        pieces = []
        for start, end, owner in runs:
            if start < end:
                piece = flat.data[start:end]
                numbers = common if owner is None else self.own[owner]
                piece.grad = flat.grad[start:end]
                if numbers is not None and self.base.state[flat]:
                    copies = {key: value.clone() if is_tensor(value) else value for key, value in numbers.items()}
                    self.base.state[piece] = {key: value[start:end] for key, value in tensors.items()} | copies
                pieces.append((piece, flat, start, owner))
        return pieces

    def _join(self, piece: Tensor, flat: Any, start: int, owner: int | None) -> None:
        """Write the state of a piece back."""
        import torch

        whole = self.base.state[flat]
        tensors, numbers = self._split(self.base.state.pop(piece, {}), piece)
        for key, value in tensors.items():
            target = whole.setdefault(key, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
            target[start : start + piece.numel()].copy_(value)
        if owner is None:
            whole.update(numbers)
        else:
            self.own[owner] = numbers

    def _split(self, state: dict[str, Any], flat: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of an optimizer's state that have an element for each one of a flat tensor, and the numbers, such
        as of steps."""
        tensors = {key: value for key, value in state.items() if is_tensor(value) and value.ndim}
        for key, value in tensors.items():
            if value.shape != flat.shape:
                raise PluginError(
                    f"no process used some of the weights in a step. {type(self.base).__name__} cannot leave them as "
                    f"they are, because its state {key!r} cannot be divided into those of single weights.",
                    code="unused-parameters",
                    place="plugins.deepspeed",
                    remedy="Use ddp or fsdp.",
                )
        return tensors, {key: value for key, value in state.items() if key not in tensors}

    def gather_numbers(self, run: Run, parameters: Iterable[Tensor]) -> dict[int, dict[str, Any] | None]:
        """Index of each parameter -> the numbers in its optimizer state; None: it was never stepped. Every process must
        call it."""
        import torch

        index = {id(parameter): number for number, parameter in enumerate(parameters)}
        layout = list(self.layout())
        keys: set[str] = set()
        mine: dict[int, dict[str, Any] | None] = {}
        for flat, found in layout:
            tensors, common = self._split(self.base.state[flat], flat)
            keys |= tensors.keys()
            mine |= {index[id(parameter)]: self.own.get(id(parameter), common) for parameter, *_ in found}
        gathered = run.processes.all_gather_object((keys, mine))
        # a process that stepped no slice has no tensors yet, and every process exchanges the same ones
        for flat, _ in layout:
            for key in set().union(*(others for others, _ in gathered)):
                self.base.state[flat].setdefault(key, torch.zeros_like(flat, requires_grad=False))
        return {number: value for _, numbers in gathered for number, value in numbers.items()}

    def load_numbers(self, numbers: dict[int, dict[str, Any] | None]) -> dict[str, Any]:
        """Load the numbers of a group's parameters, by ``id``; None: a parameter without state. Returns those of the
        largest step."""
        found = [value for value in numbers.values() if value is not None]
        common: dict[str, Any] = max(found, key=lambda value: float(value.get("step", 0)), default={})
        for owner, value in numbers.items() if found else ():
            self.own.pop(owner, None)
            if value is None or any(value.get(key) != common[key] for key in common):
                self.own[owner] = value
        return common


def is_tensor(value: Any) -> bool:
    """Whether a value of an optimizer's state is a tensor."""
    import torch

    return isinstance(value, torch.Tensor)


def order_modules(run: Run, model: nn.Module) -> ModuleOrder:
    """The order of the modules whose weights stage 3 gathers."""
    from fastloop_plugins.strategies._module_order import ModuleOrder

    gathered = [module for module in model.modules() if "pre_bwd_fn" in vars(module)]  # those with DeepSpeed's hooks
    remedy = "Use ddp with find_unused_parameters, or plugins.deepspeed.stage: 2."
    # it gathers weights once more
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in gathered)
    return ModuleOrder(run, model, gathered, remedy, recomputes or "activation-checkpointing" in run.plugins.names())


def zero_norm(zero: Any, stage: int, device: torch.device) -> Tensor:
    """The norm of all gradients before clipping, 0-dim; infinite after an overflow."""
    import torch

    if stage == 3:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norm = combine_grad_norm_groups(zero._get_norm_groups())
    else:
        norm = zero.scaled_global_norm()
    norm = torch.as_tensor(norm, device=device)
    return torch.where(norm < 0, float("inf"), norm / zero.loss_scale)  # -1 marks an overflow


def exclude_hooks(model: nn.Module) -> None:
    """Keep the compiler from the hooks that DeepSpeed adds to the forward."""
    import torch

    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in list(hooks):
            hooks[key] = torch.compiler.disable(hooks[key])  # type: ignore[no-untyped-call]

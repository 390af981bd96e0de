"""Parameters that some processes leave out of a step: reduces their gradients as zeros, steps none without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import PluginError
from fastloop_plugins.strategies._gradients import Gradients

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop_plugins.strategies._module_order import ModuleOrder


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is trained.

    Attributes:
        group: The index of its group, which DeepSpeed's function takes in stages 1 and 2; empty in stage 3.
    """

    parameter: Tensor
    group: tuple[int, ...]


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
        self.arrived: set[int]  # places of gradients of this pass
        self.reduced: int  # gradients that DeepSpeed has got in this pass
        self.order: list[TrainedParameter] = []  # as backward reaches them
        self.reduce_all = engine.allreduce_gradients
        engine.allreduce_gradients = self.complete
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradients.add_new)
        if stage:
            zero = engine.optimizer
            groups = zero.fp16_groups if stage == 3 else zero.bit16_groups
            for index, group in enumerate(groups):
                for parameter in group:
                    if parameter.requires_grad:
                        self.order.append(TrainedParameter(parameter, () if stage == 3 else (index,)))
            self.order.reverse()
            self.reduce_one = zero.reduce_independent_p_g_buckets_and_remove_grads
            zero.reduce_independent_p_g_buckets_and_remove_grads = self.add
        self.place = {id(trained.parameter): index for index, trained in enumerate(self.order)}
        self.begin()

    def begin(self) -> None:
        """Begin a backward pass."""
        self.arrived = set()
        self.reduced = 0

    def add(self, parameter: Tensor, *group: int) -> None:
        """A gradient is ready: reduce it, and the ones that waited for it, in order."""
        if self.place[id(parameter)] < self.reduced:  # once more in this pass: DeepSpeed knows whether that is allowed
            self.reduce_one(parameter, *group)
        self.arrived.add(id(parameter))
        while self.reduced < len(self.order):
            following = self.order[self.reduced]
            if id(following.parameter) not in self.arrived:
                break
            self.reduce_one(following.parameter, *following.group)
            self.reduced += 1

    def complete(self, *arguments: Any, **options: Any) -> None:
        """The backward pass is done: reduce the missing gradients as zeros, then call DeepSpeed's own."""
        zero = self.engine.optimizer
        last = self.engine.is_gradient_accumulation_boundary()
        if self.stage > 1 or (self.stage == 1 and last):
            for trained in self.order:
                if id(trained.parameter) in self.arrived:
                    continue
                self._fill(zero, trained.parameter)
                if self.stage > 1 or zero.overlap_comm:  # else DeepSpeed reduces all of them now
                    self.add(trained.parameter, *trained.group)
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
            if zero.use_grad_accum_attribute:
                parameter.grad_accum = torch.zeros_like(parameter, dtype=zero.gradient_accumulation_dtype)
            else:
                parameter.grad = torch.zeros_like(parameter)


@dataclass(frozen=True)
class FlatSlice:
    """The elements ``start`` to ``start + size`` of a flat tensor, which are of a parameter."""

    parameter: Tensor
    start: int
    size: int


@dataclass(frozen=True)
class StepRun:
    """Elements of a flat tensor that are stepped with one state.

    Attributes:
        owner: The ``id`` of their parameter; None: several parameters, which share the state of the flat tensor.
    """

    start: int
    end: int
    owner: int | None


@dataclass(frozen=True)
class Piece:
    """The tensor that stands for a run of a flat tensor while the optimizer steps."""

    tensor: Tensor
    flat: Any
    start: int
    owner: int | None


@dataclass(frozen=True)
class CutGroup:
    """A parameter group of the optimizer, its flat tensors, and the pieces in their place."""

    group: dict[str, Any]
    flats: list[Any]
    pieces: list[Piece]


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
        self.cut: list[CutGroup] = []
        base.register_step_pre_hook(self.before_step)
        base.register_step_post_hook(self.after_step)

    def layout(self) -> Iterator[tuple[Any, list[FlatSlice]]]:
        """Each flat tensor of this process, with the parameters in it."""
        if self.stage == 3:
            for flat, group in zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True):
                start = 0
                slices = []
                for parameter in group:
                    size = parameter.partition_numel()
                    slices.append(FlatSlice(parameter, start, size))
                    start += size
                yield flat, slices
            return
        for flat, group in zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True):
            slices = []
            for parameter in group:
                place = parameter._hp_mapping
                if place is not None:
                    address = place.hp_fragment_address
                    slices.append(FlatSlice(parameter, address.start, address.numel))
            slices.sort(key=lambda each: each.start)
            yield flat, slices

    def leave_out(self, unused: Iterable[Tensor]) -> None:
        """Set the parameters that the next step must not change."""
        self.unused = {id(parameter) for parameter in unused}
        missed = self.unused - self.own.keys()
        if not missed:
            return
        self.own |= dict.fromkeys(missed)  # on every process, also without a slice of them
        for flat, slices in self.layout():
            state = self.base.state[flat]
            numbers = self._split(state, flat)[1] if state else None
            for each in slices:
                if id(each.parameter) in missed:
                    self.own[id(each.parameter)] = numbers

    def before_step(self, *_: Any) -> None:
        """Replace the flat tensors in the parameter groups by the pieces to step."""
        if not self.own:
            return
        layout = {id(flat): slices for flat, slices in self.layout()}
        for group in self.base.param_groups:
            pieces: list[Piece] = []
            for flat in group["params"]:
                pieces += self._cut(flat, layout[id(flat)])
            self.cut.append(CutGroup(group, group["params"], pieces))
            group["params"] = [piece.tensor for piece in pieces]

    def after_step(self, *_: Any) -> None:
        """Put the flat tensors back, with the state of their pieces."""
        for cut in self.cut:
            cut.group["params"] = cut.flats
            for piece in cut.pieces:
                self._join(piece)
        self.cut.clear()

    def _runs(self, slices: list[FlatSlice]) -> list[StepRun]:
        """The runs of a flat tensor to step.

        For example, parameters a, b, c and d have 2 elements each. b has missed an earlier step, and c has no gradient
        in this one. Then the runs are [0, 2), [2, 4) with the state of b, and [6, 8).
        """
        runs: list[StepRun] = []
        for each in slices:
            owner = id(each.parameter)
            end = each.start + each.size
            if owner in self.unused:
                runs.append(StepRun(each.start, each.start, owner))  # empty, and it separates its neighbours
            elif owner in self.own:
                runs.append(StepRun(each.start, end, owner))
            elif runs and runs[-1].owner is None:
                runs[-1] = StepRun(runs[-1].start, end, None)
            else:
                runs.append(StepRun(each.start, end, None))
        return [run for run in runs if run.start < run.end]

    def _cut(self, flat: Any, slices: list[FlatSlice]) -> list[Piece]:
        """The pieces of a flat tensor to step, with their gradients and states."""
        tensors, common = self._split(self.base.state[flat], flat)
        pieces = []
        for run in self._runs(slices):
            piece = flat.data[run.start : run.end]
            piece.grad = flat.grad[run.start : run.end]
            numbers = common if run.owner is None else self.own[run.owner]
            if numbers is not None and self.base.state[flat]:
                state = {key: value[run.start : run.end] for key, value in tensors.items()}
                for key, value in numbers.items():
                    state[key] = value.clone() if is_tensor(value) else value
                self.base.state[piece] = state
            pieces.append(Piece(piece, flat, run.start, run.owner))
        return pieces

    def _join(self, piece: Piece) -> None:
        """Write the state of a piece back."""
        import torch

        whole = self.base.state[piece.flat]
        tensors, numbers = self._split(self.base.state.pop(piece.tensor, {}), piece.tensor)
        for key, value in tensors.items():
            target = whole.setdefault(key, torch.zeros_like(piece.flat, dtype=value.dtype, requires_grad=False))
            target[piece.start : piece.start + piece.tensor.numel()].copy_(value)
        if piece.owner is None:
            whole.update(numbers)
        else:
            self.own[piece.owner] = numbers

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
        for flat, slices in layout:
            tensors, common = self._split(self.base.state[flat], flat)
            keys |= tensors.keys()
            for each in slices:
                owner = id(each.parameter)
                mine[index[owner]] = self.own.get(owner, common)
        every_key: set[str] = set()
        every_number: dict[int, dict[str, Any] | None] = {}
        for keys_of_process, numbers_of_process in run.processes.all_gather_object((keys, mine)):
            every_key |= keys_of_process
            every_number |= numbers_of_process
        # a process that stepped no slice has no tensors yet, and every process exchanges the same ones
        for flat, _ in layout:
            for key in every_key:
                self.base.state[flat].setdefault(key, torch.zeros_like(flat, requires_grad=False))
        return every_number

    def load_numbers(self, numbers: dict[int, dict[str, Any] | None]) -> dict[str, Any]:
        """Load the numbers of a group's parameters, by ``id``; None: a parameter without state. Returns those of the
        largest step."""
        stepped = [value for value in numbers.values() if value is not None]
        if not stepped:
            return {}
        common: dict[str, Any] = max(stepped, key=lambda value: float(value.get("step", 0)))
        for owner, value in numbers.items():
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

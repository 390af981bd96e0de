"""DeepSpeed's state: import it, and convert weights and optimizer state to and from the forms of a run without it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from fastloop import PluginError
from fastloop.checkpoint.settings_record import without_parameters
from fastloop_plugins.strategies._deepspeed_gradients import Slices

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from fastloop import Run


class Sharded:
    """A model and an optimizer that DeepSpeed owns.

    Args:
        optimizer: The torch optimizer. DeepSpeed later replaces the parameters in its groups with flat slices; the lr
            and the other options in the groups stay live.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.base = optimizer
        self.groups: list[dict[str, Any]] = list(optimizer.param_groups)
        self.parameters: list[list[Tensor]] = [list(group["params"]) for group in self.groups]
        self.engine: Any  # this and the next attributes: from taken on
        self.stage: int
        self.half: bool
        self.has_gradients: bool  # of all micro-steps, before the optimizer's step
        self.zero: Any  # DeepSpeed's optimizer; None: stage 0
        self.slices: Slices | None
        self.mesh: DeviceMesh | None

    def taken(self, run: Run, engine: Any, stage: int, half: bool) -> None:
        """Record the engine that DeepSpeed returned."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        self.engine = engine
        self.stage = stage
        self.half = half
        self.has_gradients = False  # of all micro-steps, before the optimizer's step
        self.zero = engine.optimizer if stage else None
        self.slices = Slices(self.base, self.zero, stage) if stage else None
        self.mesh = None
        if stage and run.world_size > 1:
            group: Any = run.processes.host_group or torch.distributed.group.WORLD
            self.mesh = DeviceMesh.from_group(group, "cpu")

    def model_state(self, run: Run) -> dict[str, Any]:
        """Name -> this process's shard of a weight; buffers only on the main process. Every process must call it, as
        with the other methods here."""
        from torch.distributed.tensor import DTensor

        parts: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in run.unwrap_model().state_dict(keep_vars=True).items():
            if id(value) not in parts:  # tied weights are gathered once
                parts[id(value)] = self._part(run, value, self._gather(value))
            if run.is_main or isinstance(parts[id(value)], DTensor):
                state[name] = parts[id(value)]
        return state

    def _part(self, run: Run, weight: Any, full: Any) -> Any:
        """For a checkpoint: this process's shard of a full weight or of its optimizer state, on the CPU. Without
        shards: all of it on the main process, None on the others."""
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor

        is_sharded = self.mesh is not None and isinstance(weight, torch.nn.Parameter)
        if self.mesh is None or not is_sharded or not full.is_floating_point() or full.ndim == 0:
            if not run.is_main:
                return None
            return full.cpu() if hasattr(full, "cpu") else full
        # a copy, to free the full tensor
        return distribute_tensor(full.cpu(), self.mesh, [Shard(0)], src_data_rank=None).clone()

    def empty_shard(self, shape: torch.Size) -> Tensor | None:
        """An uninitialized tensor with the sharding of ``_part``, to read a checkpoint into; None: read it in full."""
        import torch
        from torch.distributed.tensor import Shard, empty

        if self.mesh is None or not shape:
            return None
        return empty(shape, dtype=torch.float32, device_mesh=self.mesh, placements=[Shard(0)])

    def _gather(self, weight: Any) -> Any:
        """Gather one weight in fp32."""
        import deepspeed
        import torch
        from deepspeed.utils import safe_get_full_fp32_param

        if not isinstance(weight, torch.nn.Parameter):
            return weight.detach().clone() if isinstance(weight, torch.Tensor) else weight
        if weight.requires_grad and (self.stage == 3 or self.half):
            return safe_get_full_fp32_param(weight)
        with deepspeed.zero.GatheredParameters([weight], enabled=self.stage == 3):
            return weight.detach().float() if self.half else weight.detach().clone()

    def load_model_state(self, run: Run, state: Mapping[str, Tensor]) -> None:
        """Load full or sharded weights into the model, and into its fp32 copies.

        Raises:
            RuntimeError: The weights belong to another model.
        """
        import deepspeed
        import torch
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        from fastloop.distributed.tensors import gather_full

        own = run.unwrap_model().state_dict(keep_vars=True)
        shapes = {name: tuple(getattr(value, "ds_shape", getattr(value, "shape", ()))) for name, value in own.items()}
        wrong = [f"it lacks {name!r}" for name in own if name not in state]
        wrong += [f"{name!r} is not in the model" for name in state if name not in own]
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name in own and tuple(value.shape) != shapes[name]:
                wrong.append(f"{name!r} is of shape {tuple(value.shape)}, and the model's of {shapes[name]}")
        if wrong:
            raise RuntimeError("\n".join(["The weights do not fit.", *wrong]))
        with torch.no_grad():
            for name, weight in own.items():
                value = gather_full(state[name]).to(run.device)
                if self.stage == 3 and isinstance(weight, torch.nn.Parameter):
                    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                        weight.copy_(value)
                    if weight.requires_grad:
                        safe_set_local_fp32_param(weight, self._slice(run, weight, value))
                    continue
                weight.copy_(value)
                if self.stage and isinstance(weight, torch.nn.Parameter) and weight.requires_grad:
                    safe_set_full_fp32_param(weight, value)

    @staticmethod
    def _slice(run: Run, weight: Any, value: Tensor) -> Tensor:
        """This process's slice of a full tensor under stage 3. All slices have the same size; the last one is
        padded."""
        import torch

        size = weight.ds_tensor.numel()
        flat = torch.nn.functional.pad(value.flatten().float(), (0, size * run.world_size - value.numel()))
        return flat[size * run.rank : size * (run.rank + 1)]

    def _flats(self) -> list[list[Tensor]]:
        """Group -> this process's flat slices, which stand for the group's weights in torch's optimizer."""
        if self.stage < 3:
            return [[flat] for flat in self.zero.single_partition_of_fp32_groups]
        flats: list[list[Tensor]] = [[] for _ in range(len(self.base.param_groups))]
        for index, flat in enumerate(self.zero.fp32_partitioned_groups_flat):
            flats[self.zero.sub_group_to_group_id[index]].append(flat)
        return flats

    def stepped(self) -> list[Tensor]:
        """The parameters of the model that DeepSpeed's optimizer updates."""
        if self.zero is None:
            return [parameter for group in self.base.param_groups for parameter in group["params"]]
        groups = self.zero.fp16_groups if self.stage == 3 else self.zero.bit16_groups
        return [parameter for group in groups for parameter in group]

    def _relink(self) -> None:
        """Link each weight to its optimizer state in stages 1 and 2. DeepSpeed links once, when only the first group
        has state."""
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups, in the form of torch's ``state_dict``."""
        number = iter(range(sum(map(len, self.parameters))))
        return [
            without_parameters(group) | {"params": [next(number) for _ in parameters]}
            for group, parameters in zip(self.groups, self.parameters, strict=True)
        ]

    def optimizer_state(self, run: Run) -> dict[str, Any]:
        """The optimizer state in the form of torch's ``state_dict``, in shards."""
        import torch
        from deepspeed.utils import safe_get_full_optimizer_state

        if self.zero is None:
            return self.base.state_dict()
        groups = self._groups()
        state = {}
        assert self.slices is not None
        if self.base.state:
            numbers = self.slices.gather_numbers(run, chain(*self.parameters)) if self.slices.own else None
            self._relink()
            flats = iter(self._flats())
            for group, parameters in zip(groups, self.parameters, strict=True):
                flat = next(flats)[0]
                for number, parameter in zip(group["params"], parameters, strict=True):
                    if not parameter.requires_grad:
                        continue
                    own = {} if numbers is None else numbers.get(number, {})
                    if own is None:
                        continue
                    entry = {}
                    for key, value in (self.base.state[flat] | own).items():
                        if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                            value = self._part(run, parameter, safe_get_full_optimizer_state(parameter, key))
                        entry[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    state[number] = entry
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, run: Run, state: dict[str, Any]) -> None:
        """Load optimizer state in the form of torch's ``state_dict``.

        Raises:
            ValueError: The state belongs to another optimizer.
        """
        import torch
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        from fastloop.distributed.tensors import gather_full

        if self.zero is None:
            self.base.load_state_dict(state)
            self.groups = list(self.base.param_groups)  # torch creates new groups
            return
        saved_sizes = [len(group["params"]) for group in state["param_groups"]]
        if saved_sizes != [len(parameters) for parameters in self.parameters]:
            raise ValueError("its parameter groups have other sizes")
        assert self.slices is not None
        flats = iter(self._flats())
        pieces: list[tuple[Any, dict[str, Tensor]]] = []
        for live, saved, parameters in zip(self.groups, state["param_groups"], self.parameters, strict=True):
            live.update(without_parameters(saved))
            flat_pieces = next(flats)
            numbers: dict[int, dict[str, Any] | None] = {}
            sharded: set[str] = set()
            for number, parameter in zip(saved["params"], parameters, strict=True):
                if not parameter.requires_grad:
                    continue
                entry = state["state"].get(number, {})
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                tensors: dict[str, Tensor] = {}
                for key, value in entry.items():
                    if key != "step" and isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                        tensors[key] = value
                pieces.append((parameter, tensors))
                sharded |= tensors.keys()
                rest = {key: entry[key] for key in entry.keys() - tensors.keys()}
                numbers[id(parameter)] = rest if number in state["state"] else None
            scalars = self.slices.load_numbers(numbers)
            if not scalars and not sharded:
                continue
            on_device = live.get("fused") or live.get("capturable")
            for flat in flat_pieces:
                of_flat: dict[str, Any] = {}
                for key, value in scalars.items():
                    if isinstance(value, torch.Tensor):
                        value = value.to(flat.device if on_device else "cpu", copy=True)
                    of_flat[key] = value
                for key in sharded:
                    of_flat[key] = torch.zeros_like(flat, requires_grad=False)
                self.base.state[flat] = of_flat
        if self.base.state:
            self._relink()
        for parameter, tensors in pieces:
            for key, value in tensors.items():
                value = gather_full(value)
                if self.stage == 3:
                    safe_set_local_optimizer_state(parameter, self._slice(run, parameter, value), key)
                else:
                    safe_set_full_optimizer_state(parameter, value.to(run.device), key)


class Stepper:
    """The optimizer that the loop sees."""

    def __init__(self, sharded: Sharded) -> None:
        self.sharded = sharded
        self.step_was_skipped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Torch's parameter groups, with the live learning rates."""
        return self.sharded.groups

    def model_parameters(self) -> list[Tensor]:
        """The parameters behind the flat slices in ``param_groups``."""
        return self.sharded.stepped()

    def step(self) -> None:
        """Unscale and clip gradients, update and exchange weights, and free the gradients."""
        self.sharded.has_gradients = False
        self.sharded.engine.step()
        self.step_was_skipped = bool(getattr(self.sharded.engine.optimizer, "overflow", False))

    def zero_grad(self) -> None:
        """Drop the gradients of a step that is computed again, or that failed. ``step`` frees them, too."""
        self.sharded.has_gradients = False
        self.sharded.engine.optimizer.zero_grad()
        if self.sharded.stage in (1, 2):
            self.sharded.zero.micro_step_id = -1  # else an offloaded optimizer adds to the dropped gradients

    def empty_shard(self, shape: torch.Size) -> Tensor | None:
        """See ``Sharded.empty_shard``; a run that resumes calls it."""
        return self.sharded.empty_shard(shape)


class LossScale:
    """DeepSpeed's loss scale in place of Accelerate's, so that checkpoints store it in torch's form."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """The state in the form of torch's ``GradScaler``."""
        scaler = self.scaler
        since = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": scaler.scale_window,
            "_growth_tracker": since % scaler.scale_window,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load state in the form of torch's ``GradScaler``."""
        self.scaler.cur_scale = float(state["scale"])
        self.scaler.cur_iter = int(state["_growth_tracker"])
        self.scaler.last_overflow_iter = -1


def imported(device: str) -> Any:
    """Import DeepSpeed for this type of device, without its warnings."""
    previous = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device  # otherwise it guesses, and warns on a CPU
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        imported_for = get_accelerator().device_name()
    finally:
        os.environ.pop("DS_ACCELERATOR")
        if previous is not None:
            os.environ["DS_ACCELERATOR"] = previous
    if imported_for != device:
        raise PluginError(
            f"DeepSpeed was imported for {imported_for}, and this run is on {device}.",
            code="wrong-device",
            place="plugins.deepspeed",
            remedy="Start a new process.",
        )
    if device == "cpu":
        # it would be compiled at its first use; use gloo
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    names = "all_gather_into_tensor|reduce_scatter_tensor"  # deepspeed 0.19 calls what torch 2.13 has deprecated
    warnings.filterwarnings("ignore", rf"`torch\.distributed\.({names})` is deprecated", category=FutureWarning)
    return deepspeed


def cast_inputs(engine: nn.Module) -> None:
    """Cast inputs to the dtype of half-precision weights."""
    import torch
    from accelerate.utils import recursively_apply

    dtype = next(parameter.dtype for parameter in engine.parameters() if parameter.is_floating_point())

    def is_float(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype)

    def cast_all(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return recursively_apply(cast, (args, kwargs), test_type=is_float)

    engine.register_forward_pre_hook(cast_all, with_kwargs=True)


def cast_outputs(engine: nn.Module) -> None:
    """Cast outputs to fp32, which the loss is computed in. DeepSpeed's autocast ends with the forward pass, so a loss
    of outputs in bf16 would be rounded to bf16: 0.9961, 1.0, 1.0078."""
    from accelerate.utils import convert_to_fp32

    def cast(module: nn.Module, args: Any, output: Any) -> Any:
        return convert_to_fp32(output)

    engine.register_forward_hook(cast)

"""``Strategy``: the plugin that makes one model train on several processes. The loop calls its methods as
``run.strategy``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop.errors import PluginError
from fastloop.plugins.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fastloop.memory_estimates import Layout, MemoryEstimate
    from fastloop.run import Run

METHODS = (
    "prepare", "backward", "gradient_norm", "clip_gradients", "unsharded", "model_state", "load_model_state",
    "optimizer_state", "load_optimizer_state",
)  # fmt: skip
"""The methods of a run that a strategy may override: those of a step, an evaluation and a checkpoint."""


class Strategy(Plugin):
    """The base class of plugins in the slot ``strategy``, and the strategy of a run without one: Accelerate's default.
    A subclass overrides the methods that differ, and may implement hooks.

    The core places the model on its device and applies the run's precision to its forward, and then calls ``prepare``.

    Attributes:
        name: A subclass has its own.
        slot: The slot of all strategies.
        sets_precision: Whether ``prepare`` places the model and applies the precision instead of the core, such as
            DeepSpeed's engine. `amp` then checks the first step.
        shares_buffers: Whether the forward of the prepared model first gives every process the buffers of process 0,
            such as that of torch's DistributedDataParallel. Otherwise the core broadcasts those that training changes.
        gathers_weights: Whether each forward pass gathers sharded weights, into memory that differs from step to step.
            `compile` then records no CUDA graphs.
        forwards_together: Whether all processes must call the model's forward equally often, inside ``unsharded``, too.
        keeps_weights_equal: Whether every process has the same weights after each step. The processes then compare them
            after the second step. False: processes divide the weights, or average them every few steps.
    """

    name = "accelerate"
    slot = "strategy"
    sets_precision: ClassVar[bool] = False
    shares_buffers: ClassVar[bool] = False
    gathers_weights: ClassVar[bool] = False
    forwards_together: ClassVar[bool] = False
    keeps_weights_equal: ClassVar[bool] = True

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        """Wrap the model for training. Returns the model and the optimizer that the loop uses.

        The model's forward must keep its arguments. The optimizer needs ``step``, ``zero_grad`` and ``param_groups``,
        and must step every trained parameter. If ``param_groups`` hold other tensors, such as flat shards, the
        optimizer's ``model_parameters()`` must return the parameters that it steps.
        """
        from accelerate.optimizer import AcceleratedOptimizer

        model, prepared = run.accelerator.prepare(model, optimizer)
        if type(prepared) is AcceleratedOptimizer and run.accelerator.scaler is None:
            prepared = prepared.optimizer  # the wrapper only adds loss scaling, and looks up a package in each step
        return model, prepared

    def backward(self, run: Run, loss: Tensor) -> None:
        """Compute the gradients of one micro-batch. ``loss`` is scaled to its share of the step; loss scaling for fp16
        follows here."""
        # Accelerate's own backward would divide the loss again, by its number of micro-batches
        scaler = run.accelerator.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def gradient_norm(self, run: Run) -> Tensor:
        """The total 2-norm of the gradients, 0-dim, without the factor of loss scaling. Gradients keep their bits.

        A class that overrides this method also overrides ``clip_gradients``, and the reverse: the norm that is logged
        must be the norm that is clipped.
        """
        from fastloop.distributed.tensors import total_norm

        norm = total_norm(parameter.grad for parameter in run.model.parameters() if parameter.grad is not None)
        scaler = run.accelerator.scaler
        if scaler is None:
            return norm
        scale: Tensor = scaler.scale(norm.new_ones(()))
        return norm / scale  # the gradients stay scaled: they may be unscaled only once a step

    def clip_gradients(self, run: Run, max_norm: float) -> Tensor:
        """Undo loss scaling of the gradients, and clip their total 2-norm to ``max_norm``. Returns the norm before
        clipping, as ``gradient_norm`` does.

        Args:
            max_norm: ``train.max_grad_norm``, which is finite and positive.
        """
        from fastloop.distributed.tensors import gather_full

        with run._unstepped_parameters.unscaled(run.accelerator.scaler):
            norm = run.accelerator.clip_grad_norm_(run.model.parameters(), max_norm)
        return gather_full(norm)

    def model_state(self, run: Run) -> dict[str, Tensor]:
        """Weights by name: full tensors, ``DTensor`` shards, or on the main process only."""
        return run.unwrap_model().state_dict()

    def load_model_state(self, run: Run, state: Mapping[str, Tensor]) -> None:
        """Load weights. Full tensors are sharded like the model's."""
        from fastloop.distributed.tensors import shard_like

        model = run.unwrap_model()
        own = model.state_dict()
        model.load_state_dict({name: shard_like(tensor, own.get(name)) for name, tensor in state.items()})

    def optimizer_state(self, run: Run) -> dict[str, Any]:
        """The state in the format of torch's ``Optimizer.state_dict()``."""
        state: dict[str, Any] = run.optimizer.state_dict()
        return state

    def load_optimizer_state(self, run: Run, state: dict[str, Any]) -> None:
        """Load the result of ``optimizer_state``, possibly of another strategy. Full tensors are sharded like their
        parameters."""
        from fastloop.distributed.tensors import shard_like

        parameters: list[Tensor] = []
        for group in run.optimizer.param_groups:
            parameters += group["params"]
        sharded = dict(state["state"])
        for index, values in state["state"].items():
            if index < len(parameters):
                sharded[index] = {name: shard_like(value, parameters[index]) for name, value in values.items()}
        run.optimizer.load_state_dict(state | {"state": sharded})

    @contextmanager
    def unsharded(self, run: Run) -> Iterator[None]:
        """Inside the ``with`` block, ``run.unwrap_model()`` computes apart from training steps, such as to generate
        texts: fsdp gathers all weights. Every process must enter it, and may then call the model's forward as often as
        it needs, or not at all, unless ``forwards_together``. ``run.full_state_dict()`` gathers weights to save.

        Raises:
            PluginError: The strategy divides the weights, and cannot gather them.
        """
        from torch.distributed.tensor import DTensor

        if any(isinstance(parameter, DTensor) for parameter in run.unwrap_model().parameters()):
            raise PluginError(
                f"plugin {self.name!r} divides the weights over processes, and a part of the run needs them whole, "
                "such as to generate texts.",
                code="weights-divided",
                place=run.recipe.where,
                remedy="Use ddp or fsdp.",
            )
        yield

    @classmethod
    def estimate_memory(cls, layout: Layout) -> Iterator[MemoryEstimate]:
        """For `fastloop plan --device-memory`: the bytes that a process holds and sends, for each variant of the
        strategy. By default there is no estimate.

        A strategy that divides layers over processes that train on the same samples also declares two class methods.
        ``divisions(processes, per_node)`` returns the numbers of processes that it can divide a layer over; 1: none.
        ``divide_model(model, processes, precision, where)`` makes a model of fake tensors the share of a process, and
        returns an object whose attribute ``sent`` counts the bytes that forward and backward send. ``layout`` then
        describes the share. A plugin that divides the tokens of sequences declares ``divide_sequences(model, size)``,
        which does the same for ``size`` processes of its option ``size``.
        """
        return iter(())


def method_that_raised(strategy: Strategy, error: BaseException) -> str | None:
    """The method of a subclass that raised ``error``, itself or in what it called. None: the core raised it, such as in
    ``super()``."""
    core = {_code(getattr(Strategy, name)) for name in METHODS}
    own = {_code(getattr(type(strategy), name)): name for name in METHODS}
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in own or frame.f_code in core:
            innermost = frame.f_code
    if innermost is None or innermost in core:
        return None
    return own[innermost]


def _code(method: Any) -> Any:
    return getattr(inspect.unwrap(method), "__code__", None)

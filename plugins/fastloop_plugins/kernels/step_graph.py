"""Records a whole training step as one CUDA graph for each shape of its batch, and replays it.

    plugins:
      - fused-optimizer
      - step-graph

A small model computes a step faster than Python starts its kernels. A replay starts all of them at once: forward,
backward, clipping and the optimizer. ``compile`` still fuses kernels, with ``mode: default``.

The first steps of each shape are computed without a graph, since libraries allocate memory and compilers compile in
them. Then the step is recorded. Batches of more shapes than ``shapes`` are computed without a graph. A graph that no
longer fits, such as after a rollback, is recorded anew. ``step_graph`` in summary.json counts the steps of each kind.

A replay draws new random numbers for dropout: those that the step would draw without a graph. A run that resumes
computes the same numbers, although it records its graphs anew. The learning rate is a float32 number on the device, so
weights differ from those of a run without this plugin in their last bits.

It needs one process, `fused-optimizer` with Adam or AdamW, and no loss scaling. A plugin that acts on the host within a
step, such as `nan-guard`, is refused by name, as are trained parameters that the optimizer of the run does not hold.
Python code of a model or a loss runs only while a step is recorded: it must not depend on anything but the batch's
shapes. A step of several micro-batches is recorded for each combination of their shares of the loss, which are equal if
they have as many samples or target tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import Batch, Device, Plugin, PluginError, Problem, hookimpl, option
from fastloop_plugins.data._padding_multiples import SHAPES

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fastloop import Run
    from fastloop.plugins.manager import PluginSet
    from fastloop.recipe import Recipe
    from fastloop_plugins.kernels._recorded_step import BatchKind, LearningRates, RecordedStep

WARM_UP = 3
"""Steps of a shape without a graph, before it is recorded: torch's compiler may compile in the second one, too."""
WITHIN_STEP = ("compute_loss", "after_backward", "before_optimizer_step")
"""Hooks that are called within ``train_step``, and not when a recorded step is replayed."""
MANY_STEPS = 50
"""Steps after which a run without a recorded one is reported."""
RECORDS = ("reduce-overhead", "max-autotune")
"""Modes of ``compile`` that record CUDA graphs."""


class StepGraph(Plugin):
    """Records a whole training step as one CUDA graph for each shape, and replays it."""

    name = "step-graph"
    numerics = "reassociated"
    conflicts = {
        "activation-checkpointing": "it reads the state of the random numbers on the host in each step.",
        "deepspeed": "it gathers weights anew in each step, and a graph needs them in one place.",
        "fsdp": "it gathers weights anew in each step, and a graph needs them in one place.",
    }
    requirements = (Device("cuda"),)
    recordable = True

    shapes: int = option("Shapes of batches to record at most.", default=2 * SHAPES, ge=1)

    recorder_class: ClassVar[type | None] = None
    """Another class with the methods of ``CudaRecorder``, for tests on a CPU."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recorder: Any = None
        self.rates: LearningRates
        self.modules: list[nn.Module] = []
        self.steps: dict[Hashable, RecordedStep] = {}
        self.computed: Counter[Hashable] = Counter()  # steps of each kind without a graph
        self.constants: tuple[Hashable, ...] = ()
        self.grad_norm: Tensor | None = None
        self.has_warned = False
        self.counts = {"recorded": 0, "replayed_steps": 0, "other_steps": 0}

    @hookimpl
    def check_recipe(self, recipe: Recipe, plugins: PluginSet) -> None:
        from fastloop.distributed.ranks import world_size

        if recipe.train.optimizer_name not in ("Adam", "AdamW"):
            raise PluginError(
                code="unsupported-optimizer",
                place=f"{recipe.where}: plugins.{self.name}",
                found=f"train.optimizer {recipe.train.optimizer_name}",
                expected="Adam or AdamW, whose fused kernel reads the learning rate on the device",
            )
        if "fused-optimizer" not in plugins.names() and not recipe.train.optimizer_arguments.get("fused"):
            raise PluginError(
                "the optimizer is not fused, and only a fused one reads the learning rate on the device.",
                code="unsupported-optimizer",
                place=f"{recipe.where}: plugins.{self.name}",
                remedy="List fused-optimizer, too.",
            )
        compiling = recipe.plugins.get("compile")
        if isinstance(compiling, dict) and compiling.get("mode") in RECORDS:
            raise PluginError(
                f"compile.mode {compiling['mode']} records CUDA graphs of its own, and a graph cannot be part of "
                "another one.",
                code="conflicting-values",
                place=f"{recipe.where}: plugins.{self.name}",
                remedy="Set plugins.compile.mode: default, or leave step-graph out.",
            )
        if world_size() > 1:
            raise PluginError(
                f"found {world_size()} processes, and only the step of one process can be recorded.",
                code="several-processes",
                place=f"{recipe.where}: plugins.{self.name}",
                remedy="Leave it out: --without step-graph.",
            )

    @hookimpl(trylast=True)
    def check_run(self, run: Run) -> None:
        from torch.optim import Adam, AdamW

        from fastloop.unstepped import by_module, find_unstepped
        from fastloop_plugins.kernels._recorded_step import CudaRecorder, LearningRates

        place = f"{run.recipe.where}: plugins.{self.name}"
        for hook in WITHIN_STEP:
            for plugin, _ in run.plugins.each(hook):
                computes_loss = hook == "compute_loss" and plugin.slot == "task"
                if not plugin.recordable and not computes_loss:
                    raise PluginError(
                        f"plugin {plugin.name!r} acts within each step ({hook}), and a recorded step calls no hook.",
                        code="excluded-plugin",
                        place=place,
                        remedy=f"Leave one of them out: --without {plugin.name} or --without {self.name}.",
                    )
        optimizer: Any = run.optimizer
        is_fused = type(optimizer) in (Adam, AdamW) and all(group["fused"] for group in optimizer.param_groups)
        if run.accelerator.scaler is not None or not is_fused:
            raise PluginError(
                code="unsupported-optimizer",
                place=place,
                found=type(optimizer).__name__ + ("" if run.accelerator.scaler is None else " with loss scaling"),
                expected="torch's Adam or AdamW with fused=True, without the loss scaling of fp16",
                remedy="Set plugins.fused-optimizer.implementation: fused and plugins.amp.dtype: bf16.",
            )
        unstepped = find_unstepped(run.model.named_parameters(), optimizer)
        others = [name for name, parameter in unstepped if parameter.requires_grad]
        if others:
            raise PluginError(
                f"the optimizer of the run does not hold {by_module(others)}, which require gradients. A recorded step "
                "leaves them no gradients that a plugin could apply.",
                code="unsupported-optimizer",
                place=place,
                remedy=f"Freeze them, or if a plugin trains them, leave {self.name} out: --without {self.name}.",
            )
        self.recorder = (self.recorder_class or CudaRecorder)(run.device)
        self.rates = LearningRates(optimizer, run.device)
        self.modules = list(run.unwrap_model().modules())
        self.constants = ()  # of an earlier run

    @hookimpl
    def train_step(self, run: Run, batches: list[Batch]) -> Tensor:
        from fastloop_plugins.kernels._recorded_step import BatchKind, read_constants

        with self.rates.on_device():
            kind = BatchKind.of([batch.inputs for batch in batches])
            key = (kind.key, loss_shares(batches))
            constants = read_constants(self.modules, run.optimizer)
            if constants != self.constants:
                self.steps.clear()
                self.computed.clear()
                self.constants = constants
            recorded = self.steps.get(key)
            if recorded is None and not self.may_record(key, kind):
                self.computed[key] += 1
                return self.compute(run, batches, kind)
            if recorded is None:
                recorded = self.steps[key] = self.record(run, batches, kind)
            recorded.load(kind.tensors)
            recorded.replay()
            self.counts["replayed_steps"] += 1
            run.count_update(recorded.grad_norm)
            return recorded.loss.clone()  # the next replay overwrites it

    def compute(self, run: Run, batches: list[Batch], kind: BatchKind) -> Tensor:
        """Compute a step without a graph.

        It reads copies of the batch, as a recorded step does. Compiled code depends on whether a tensor begins at the
        start of its memory, and must not be compiled anew while a step is recorded.
        """
        losses: list[Tensor] = []
        with reading(batches, kind, [tensor.clone() for tensor in kind.tensors]):
            self.recorder.compute(partial(update, run, batches, losses))
        self.counts["other_steps"] += 1
        return losses[0]

    def may_record(self, key: Hashable, kind: BatchKind) -> bool:
        """Whether to record a step of this kind now. Warns once if steps of this kind are never recorded."""
        problem = ""
        if kind.other_type:
            problem = f"a batch holds a {kind.other_type}, whose value a graph cannot compare"
        elif len(self.steps) >= self.shapes:
            problem = f"there are batches of more than {self.shapes} shapes: pad their lengths, or raise shapes"
        if problem and not self.has_warned:
            self.has_warned = True
            self.log.warning(Problem(f"{problem}. Their steps are computed without a graph.", code="no-graph"))
        return not problem and self.computed[key] >= WARM_UP

    def record(self, run: Run, batches: list[Batch], kind: BatchKind) -> RecordedStep:
        """Record a step of this kind. It computes nothing.

        Raises:
            PluginError: A graph cannot hold the step.
        """
        from fastloop_plugins.kernels._recorded_step import RecordedStep, gradient_hook, host_random_states

        hooked = gradient_hook(run.model)
        if hooked is not None:
            raise self.refusal(run, f"a hook of Python receives the gradient of {hooked!r}")
        inputs = [tensor.clone() for tensor in kind.tensors]
        losses: list[Tensor] = []
        states = host_random_states()
        self.rates.allow_recording()
        self.grad_norm = None
        run.is_recording = True
        try:
            with reading(batches, kind, inputs):
                replay = self.recorder.record(partial(update, run, batches, losses))
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:  # that of the end of the recording hides the reason
                first = first.__context__
            raise self.refusal(run, f"{type(first).__name__}: {first}") from error
        finally:
            run.is_recording = False
        if host_random_states() != states:
            raise self.refusal(run, "it draws random numbers on the host, which would be the same in each replay")
        run.updates = 0  # the replay is counted
        self.counts["recorded"] += 1
        return RecordedStep(inputs, replay, losses[0], self.grad_norm)

    def refusal(self, run: Run, reason: str) -> PluginError:
        """The error for a step that a graph cannot hold."""
        return PluginError(
            f"the step cannot be recorded: {reason}.",
            code="step-not-recordable",
            place=f"{run.recipe.where}: plugins.{self.name}",
            remedy=f"Leave it out: --without {self.name}.",
        )

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        if run.is_recording and run.scalars.enabled:
            self.grad_norm = run.gradient_norm()

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        summary["step_graph"] = dict(self.counts)
        steps = self.counts["other_steps"]
        if steps >= MANY_STEPS and not self.counts["recorded"]:
            self.log.warning(
                Problem(
                    f"none of {steps} steps was recorded: their batches have many shapes, or micro-batches of "
                    "many weights.",
                    code="no-graph",
                )
            )

    @hookimpl
    def teardown(self) -> None:
        self.steps.clear()


def update(run: Run, batches: list[Batch], losses: list[Tensor]) -> None:
    """Compute the gradients of a step and apply them. Adds the step's loss to ``losses``."""
    loss = run.accumulate_gradients(batches)
    run.apply_gradients(loss)
    losses.append(loss)


@contextmanager
def reading(batches: list[Batch], kind: BatchKind, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, batches have other tensors than those of ``kind``, unless these are not all of theirs."""
    from fastloop_plugins.kernels._recorded_step import with_tensors

    given = [batch.inputs for batch in batches]
    if not kind.other_type:
        for batch, inputs in zip(batches, with_tensors(given, tensors), strict=True):
            batch.inputs = inputs
    try:
        yield
    finally:
        for batch, inputs in zip(batches, given, strict=True):
            batch.inputs = inputs


def loss_shares(batches: list[Batch]) -> Hashable:
    """The share of each micro-batch in the loss of its step, which a graph contains as a number."""
    total = sum(batch.loss_weight for batch in batches)
    return tuple(batch.loss_weight / (total or 1) for batch in batches)

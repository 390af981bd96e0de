"""Mixed precision: runs the forward pass in bf16 or fp16, and keeps weights and optimizer state in fp32.

    plugins:
      - amp: {dtype: auto}

``auto`` uses bf16 if the device supports it, else fp16. fp16 scales the loss and skips optimizer steps whose gradients
overflow. A skipped step counts, but does not advance the learning rate schedule. Tasks on texts and images compute
their loss in fp32: they cast the logits, in ``SingleLabel.output`` of ``tasks/shared/problems.py`` and in
``text/next_token_loss.py``. For fp8, list ``torchao-fp8`` in addition to ``amp: {dtype: bf16}``.

``amp: {dtype: fp32, fp32_matmul: high}`` stays in fp32, and multiplies matrices in TensorFloat-32: 10 bits of mantissa
instead of 23, with the range of fp32. It needs a CUDA device with TF32 units (compute capability 8.0 and later). In
bf16, little is left to gain from it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

from fastloop import (
    Device,
    Dtype,
    Plugin,
    PluginError,
    RecipeError,
    Recommendation,
    SpeedupEstimate,
    When,
    hookimpl,
    option,
)
from fastloop.problem import typed_clause

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from fastloop import Output, Run
    from fastloop.recipe import Recipe
    from fastloop.runtime.hardware import Machine
    from fastloop.speedup_estimates import StepProfile


CPU_CALL_SECONDS = 3e-4
"""For estimates: seconds that a matrix product on a CPU takes longer in bf16, apart from its arithmetic. It casts its
operands, and oneDNN prepares a kernel for each new shape. Measured in ``benchmarks/planted.py`` with AMX: 0.29 and 0.33
ms a call."""


def wants(dtype: str) -> Any:
    """A condition for ``When``: whether the option dtype is ``dtype``."""
    return lambda plugin: plugin.dtype == dtype


class Amp(Plugin):
    """Computes the forward pass in bf16 or fp16, with fp32 master weights."""

    name = "amp"
    slot = "precision"
    numerics = "reduced-precision"
    recordable = True
    on_resume = {"init_scale": "fixed"}  # a resumed run continues with the checkpoint's factor
    requirements = (
        When(wants("bf16"), Dtype("bf16")),
        When(wants("fp16"), Dtype("fp16")),
        When(lambda plugin: plugin.fp32_matmul is not None, Device("cuda")),
    )
    for_inference = True

    dtype: Literal["auto", "bf16", "fp16", "fp32"] = option("Dtype of the forward pass.", default="auto")
    init_scale: float = option("fp16: the first factor that the loss is scaled with.", default=65536.0, gt=0)
    growth_interval: int = option("fp16: steps without overflow before the factor doubles.", default=2000, ge=1)
    fp32_matmul: Literal["high", "medium"] | None = option(
        "Products of fp32 matrices, as in torch.set_float32_matmul_precision. high: TF32, or three bf16 products; "
        "medium: one bf16 product.",
        default=None,
    )
    tf32_convolutions: bool = option("With fp32_matmul: TF32 in cuDNN's convolutions, too.", default=True)

    @classmethod
    def recommend(cls, recipe: Recipe, machine: Machine) -> Recommendation | None:
        """Where matrix units multiply a smaller dtype: bf16, else fp16."""
        dtype = next((dtype for dtype in ("bf16", "fp16") if dtype in machine.fast_dtypes), None)
        if dtype is None:
            return None
        return Recommendation(why=f"this {machine.device} multiplies {dtype} in hardware", options={"dtype": dtype})

    @classmethod
    def estimate_speedup(cls, profile: StepProfile, recipe: Recipe) -> SpeedupEstimate | None:
        from fastloop.speedup_estimates import MULTIPLYING

        small = max(
            (dtype for dtype in ("bf16", "fp16") if dtype in profile.peaks), key=profile.peaks.__getitem__, default=None
        )
        if profile.precision != "fp32" or cls.name in recipe.plugins or small is None:
            return None
        factor = profile.peaks[small] / profile.peaks["fp32"]
        products = profile.multiplying()
        arithmetic = min(products, profile.flops / profile.peaks["fp32"]) if profile.flops else products
        calls = sum(profile.counts.get(name, 0.0) for name in MULTIPLYING) if profile.device == "cpu" else 0.0
        why = (
            f"Matrix products in fp32 are {products / profile.seconds:.0%} of a step; {small} is {factor:.1f} times as "
            "fast here."
        )
        if profile.device == "cuda":
            why += " TF32 (dtype: fp32, fp32_matmul: high) is closer to fp32."
        return SpeedupEstimate(seconds=arithmetic * (1 - 1 / factor) - calls * CPU_CALL_SECONDS, why=why)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except RecipeError:
            if options.get("dtype") != "fp8":
                raise
            message = f"{self.where}.dtype: fp8 is a plugin of its own. List 'torchao-fp8', and set dtype: bf16 here."
            raise RecipeError(message, code="unsupported-precision") from None
        self.precision: str = "no" if self.dtype == "fp32" else self.dtype  # as in Accelerate
        self.is_applied: bool | None = None
        self.recorders: list[RemovableHandle] = []
        self.fp32_settings: tuple[str, bool] | None = None
        """torch's precision of fp32 products and cuDNN's flag of TF32 before the run."""

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        if self.dtype != "auto":
            return
        from fastloop.runtime.hardware import this_machine

        machine = this_machine(recipe.train.device)
        self.precision = next((dtype for dtype in ("bf16", "fp16") if dtype in machine.dtypes), "no")
        self.log.info("dtype auto is %s on %s (%s)", self.precision, machine.device, machine.name)

    @hookimpl
    def configure(self) -> dict[str, Any]:
        if self.precision != "fp16":
            return {"mixed_precision": self.precision}
        from accelerate.utils import GradScalerKwargs

        scaler = GradScalerKwargs(init_scale=self.init_scale, growth_interval=self.growth_interval)
        return {"mixed_precision": self.precision, "scaler_handler": scaler}

    @hookimpl(trylast=True)
    def after_prepare(self, run: Run) -> None:
        """If the strategy applies the precision itself, record in the first step whether layers compute in the smaller
        dtype."""
        self.set_fp32_matmul()
        if self.precision == "no" or not run.strategy.sets_precision:
            run.plugins.unsubscribe(self, "before_optimizer_step")
            return
        for layer in run.unwrap_model().modules():
            if any(parameter.is_floating_point() for parameter in layer.parameters(recurse=False)):
                self.recorders.append(layer.register_forward_pre_hook(self.record))

    def set_fp32_matmul(self) -> None:
        """Change the precision of torch's fp32 products until ``teardown``, if the recipe asks for it."""
        if self.fp32_matmul is None:
            return
        import torch

        self.fp32_settings = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        torch.set_float32_matmul_precision(self.fp32_matmul)
        torch.backends.cudnn.allow_tf32 = self.tf32_convolutions

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run, model: nn.Module, batch: Any) -> Generator[None, Output, Output]:
        """Explain an error of the run's first batch, if the model computes that batch without autocast. Later batches
        need no copy, so the wrapper then unsubscribes. It ignores trials of other plugins, which report their errors.
        """
        is_trial = "model" not in vars(run)  # before the run has prepared its model
        unchanged = copied(batch)  # a model may change its inputs before it fails
        try:
            output = yield
        except Exception as error:
            if is_trial:
                raise
            run.plugins.unsubscribe(self, "compute_loss")
            problem = self.explain(run, unchanged, error)
            if problem is None:
                raise
            raise PluginError(problem, code="unsupported-precision") from error
        if not is_trial:
            run.plugins.unsubscribe(self, "compute_loss")
        return output

    @hookimpl(wrapper=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        """Explain an error of the model in eval mode, in which it may compute otherwise than in training."""
        from fastloop.probing import probing

        try:
            return (yield)
        except Exception:
            batch = next(iter(run.to_device([batch] for batch in run.eval_loaders[split].batches())))[0].inputs
            with probing(run.unwrap_model()):
                try:
                    run.hooks.compute_loss(run=run, model=run.unwrap_model(), batch=copied(batch))
                except Exception as error:
                    problem = self.explain(run, batch, error)
                    if problem:
                        raise PluginError(problem, code="unsupported-precision") from error
            raise

    def explain(self, run: Run, batch: Any, error: Exception) -> str | None:
        """The message for a model that computes the loss of a batch without the autocast that Accelerate added to its
        forward, or None. The model and the random states stay as they are."""
        from fastloop.probing import restoring
        from fastloop_plugins.memory._out_of_memory import is_out_of_memory

        if is_out_of_memory(error):  # fp32 takes more, and a plugin may repeat the step with smaller batches
            return None
        model: Any = run.unwrap_model()
        # a plugin that selected this one leaves it out
        if self.name in run.recipe.selected or "_original_forward" not in vars(model):
            return None
        with restoring(model):
            model.forward = model._original_forward
            try:
                run.hooks.compute_loss(run=run, model=model, batch=batch)
            except Exception:  # the caller raises the first error
                return None
        cause = typed_clause(error)
        fails = f"{type(model).__name__} computes in fp32 and fails in {self.precision}: {cause}"
        return f"{run.recipe.where}: plugins.{self.name}: {fails}. Remove {self.name}."

    def record(self, layer: nn.Module, inputs: Any) -> None:
        """Record whether a layer computes under autocast, or has weights in the smaller dtype."""
        import torch

        weight = next(layer.parameters(recurse=False))
        self.is_applied = torch.is_autocast_enabled(weight.device.type) or weight.dtype in (
            torch.bfloat16,
            torch.float16,
        )

    @hookimpl
    def before_optimizer_step(self, run: Run) -> None:
        if self.is_applied is None:
            return  # no layer was called yet
        for recorder in self.recorders:
            recorder.remove()
        run.plugins.unsubscribe(self, "before_optimizer_step")
        if not self.is_applied:
            raise PluginError(
                f"the first step computed in fp32, because prepare of the strategy {run.strategy.name!r} applied no "
                "autocast.",
                code="no-autocast",
                place=f"{run.recipe.where}: plugins.{self.name}",
                remedy=f"Remove its sets_precision, so that fastloop applies it. Or remove {self.name}.",
            )

    @hookimpl
    def teardown(self) -> None:
        if self.fp32_settings is None:
            return
        import torch

        matmul, convolutions = self.fp32_settings
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions


def copied(batch: Any) -> Any:
    """A batch with copies of its containers and tensors."""
    from torch import Tensor
    from torch.utils._pytree import tree_map

    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, batch)

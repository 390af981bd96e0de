"""Trains a small model, the student, from the outputs of a trained one, the teacher, beside the task of the recipe.

model: {name: runs/large/model}
data: {files: {train: reviews.csv}, text: text, label: label, max_length: 256}
plugins:
  - text-classification
  - distill: {teacher: runs/large, layers: [1, 3, 5]}
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Output, Plugin, RecipeError, UsageError, hookimpl, option

if TYPE_CHECKING:
    from fastloop import Batch, Run
    from torch import Tensor, nn

    from fastloop_distill.cache import Cache
    from fastloop_distill.teacher import Teacher

CLASSIFIERS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")


class Distill(Plugin):
    """Learns the outputs of a teacher, too, beside the loss of the task."""

    name = "distill"
    numerics = "changes-training"
    requires = ("slot:task",)
    conflicts = {
        "fused-loss": "it computes no logits, and the soft loss compares them.",
        "target-logits": "it computes few logits, and the soft loss compares all.",
        "deepspeed": "distill is not tested with its engine.",
        "tensor-parallel": "it divides the logits over the processes.",
        "context-parallel": "it divides the tokens over the processes.",
    }
    runs_after = ("lora", "freeze")  # which would freeze the projections
    student: Any = None
    weights: Mapping[int, float] = {}  # id of the inputs of each batch of the step -> its loss_weight

    teacher: str = option("The teacher: a run, the folder of a model, or a name on the hub.")
    temperature: float = option("Divides the logits of both before their softmax.", default=2.0, gt=0)
    weight: float = option("Share of the soft loss; the task's loss has the rest.", default=0.5, ge=0, le=1)
    states: Literal["none", "mse", "cosine"] = option(
        "The loss between hidden states of student and teacher.", default="none"
    )
    states_weight: float = option("Factor of the loss between hidden states.", default=1.0, gt=0)
    teacher_layers: list[int] = option(
        "The teacher's layer for each one of the student, from 0; empty: spread evenly.", default_factory=list
    )
    layers: list[int] = option("Train only these layers of model.name, from 0; empty: all.", default_factory=list)
    cache_mb: int = option("Memory of a process for logits of texts, in MiB; 0: no cache.", default=64, ge=0)

    task: Any  # this and the next attributes: from check_recipe on
    auto: str  # the Auto class of both models
    teacher_model: Teacher
    cache: Cache  # of the teacher's logits
    pairs: list[int]  # the teacher's layer for each one of the student; from build_model on
    sums: dict[str, Tensor]  # the parts of the loss, over the step

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.states != "none":
            reason = "for texts, it leaves out hidden states of the last layer, and distill.states compares all."
            self.conflicts = self.conflicts | dict.fromkeys(("packing", "cls-last-layer"), reason)
            self.conflicts |= {"fsdp": "its hooks do not act on hidden states, which distill.states reads."}

    @hookimpl
    def check_recipe(self, recipe: Any, plugins: Any) -> None:
        from fastloop_distill.cache import Cache
        from fastloop_distill.teacher import Teacher

        layers = self.layers
        self.task = plugins.task
        self.auto = getattr(self.task, "auto_class", "")
        if "next-token-loss" in self.task.declare_traits(recipe):
            self.auto = "AutoModelForCausalLM"
        elif self.auto not in CLASSIFIERS or self.task.labels == "none":
            raise RecipeError(
                f"the task is {self.task.name}, expected causal-lm or text-classification.",
                code="unsupported-task",
                place=self.where,
            )
        loss = (recipe.plugins.get(self.task.name) or {}).get("loss")
        if isinstance(loss, Mapping) and loss.get("class_weights") is not None:
            where = f"{recipe.where}: plugins.{self.task.name}.loss"
            raise RecipeError(
                "the soft loss counts all samples alike.",
                code="conflicting-values",
                place=f"{where}.class_weights",
                remedy="Remove one of both.",
            )
        if layers and (recipe.model.get("name") is None or layers != sorted({*layers}) or layers[0] < 0):
            raise RecipeError(
                code="out-of-range",
                place=f"{self.where}.layers",
                found=str(layers),
                expected="layers of model.name in their order",
            )
        self.teacher_model = Teacher(recipe, self.teacher, self.auto)
        self.cache = Cache(self.cache_mb * 2**20)

    @hookimpl(wrapper=True)
    def build_datasets(self, run: Run) -> Generator[None, Any, Any]:
        kind = getattr(self.task.data, "label_type", "class")
        if kind != "class":
            raise RecipeError(
                f"found {kind}, and distill needs class.",
                code="wrong-label",
                place=f"{run.recipe.where}: data.label_type",
            )
        self.teacher_model.check_inputs(self.task.text_model, self.task.data.options.max_length)
        datasets = yield
        if self.auto in CLASSIFIERS:
            self.teacher_model.check_labels(self.task.order.names)
        return datasets

    @hookimpl(wrapper=True)
    def build_model(self) -> Generator[None, Any, Any]:
        from fastloop_distill.student import keep_layers, pair_layers

        model = yield
        if self.layers:
            keep_layers(model, self.layers, f"{self.where}.layers")
        self.pairs = pair_layers(model, self.teacher_model.config, self.teacher_layers, self.where)
        return model

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        from fastloop_distill.student import add_projections

        if self.states != "none":
            add_projections(model, self.teacher_model.config)

    @hookimpl
    def after_prepare(self, run: Run) -> None:
        from fastloop_distill.student import Student, dtype_of

        self.teacher_model.load(run.device, dtype_of(run.unwrap_model()))
        self.student = Student(run.unwrap_model(), self.states != "none")

    def second_models(self, run: Run) -> list[nn.Module]:
        from fastloop_distill.student import dtype_of

        model, _ = self.teacher_model.saved.build()
        return [model.to(dtype_of(run.unwrap_model()))]

    @hookimpl
    def before_step(self, batches: list[Batch]) -> None:
        self.cache.active = True
        self.weights = {id(batch.inputs): batch.loss_weight for batch in batches}
        self.sums: dict[str, Tensor] = {}

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run, model: nn.Module, batch: Mapping[str, Any]) -> Generator[None, Output, Output]:
        from fastloop_distill.losses import compare
        from fastloop_distill.student import is_training

        output = yield
        if self.student is None or not is_training(model):
            return output
        student_output = self.student.output
        self.student.output = None
        with run.accelerator.autocast():
            soft, states = compare(student_output, batch, self.teacher_model, self.cache, self, self.pairs)
        self.add("distill/soft_loss", soft, batch)
        output.loss = (1 - self.weight) * output.loss + self.weight * soft
        if states is not None:
            self.add("distill/states_loss", states, batch)
            output.loss = output.loss + self.states_weight * states
        return output

    def add(self, name: str, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """Add a loss of a micro-batch to the mean of its step, which counts targets like the loss itself."""
        weight = self.weights.get(id(batch), 0.0)
        if weight:
            self.sums[name] = self.sums.get(name, 0.0) + weight * loss.detach()

    @hookimpl
    def after_step(self, run: Run) -> None:
        import torch

        processes = run.loaders.processes
        total = torch.tensor(sum(self.weights.values()), dtype=torch.float64)
        if processes.world_size > 1:
            total = processes.all_reduce_sum(total)
        names = ["distill/soft_loss", *(["distill/states_loss"] if self.states != "none" else [])]
        for name in names:  # also on a process whose batches only repeat rows
            run.log(name, self.sums.get(name, 0.0) * processes.world_size / max(total.item(), 1))

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        return {"teacher": self.teacher_model.digest} | self.cache.save(run)

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        if state["teacher"] != self.teacher_model.digest:
            raise UsageError(
                f"{self.teacher_model.name} has other weights than before the break.",
                code="weights-differ",
                place=f"{self.where}.teacher",
            )
        self.cache.load(state, run)

    @hookimpl(wrapper=True)
    def export_model(self, run: Run) -> Generator[None, Any, Any]:
        from fastloop_distill.student import without_projections

        with without_projections(run.unwrap_model()):
            return (yield)

    @hookimpl
    def teardown(self) -> None:
        if self.student is not None:
            self.student.close()

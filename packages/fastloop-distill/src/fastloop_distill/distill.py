"""Trains a small model, the student, from the outputs of a trained one, the teacher, beside the task of the recipe.

model: {name: runs/large/model}
data: {files: {train: reviews.csv}, text: text, label: label, max_length: 256}
plugins:
  - text-classification
  - distill: {teacher: runs/large, layers: [1, 3, 5]}
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, Plugin, RecipeError, UsageError, hookimpl

from fastloop_distill.options import DistillOptions

if TYPE_CHECKING:
    from fastloop import Run
    from torch import nn

CLASSIFIERS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification")


class Distill(Plugin):
    """Adds losses between the outputs of student and teacher to the loss of the task."""

    name = "distill"
    numerics = "changes-training"
    requires = ("slot:task",)
    conflicts = {
        "fused-loss": "it computes no logits, and the soft loss compares them.",
        "deepspeed": "distill is not tested with its engine.",
        "tensor-parallel": "it divides the logits over the processes.",
        "context-parallel": "it divides the tokens over the processes.",
    }
    runs_after = ("lora", "freeze")  # which would freeze the projections
    description = "learns the outputs of a teacher, too"
    student: Any = None
    Config = DistillOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.config.states != "none":
            reason = "for texts, it leaves out hidden states of the last layer, and distill.states compares all."
            self.conflicts = self.conflicts | dict.fromkeys(("packing", "cls-last-layer"), reason)
            self.conflicts |= {"fsdp": "its hooks do not act on hidden states, which distill.states reads."}

    @hookimpl
    def check_recipe(self, recipe: Any, plugins: Any) -> None:
        from fastloop_distill.cache import Cache
        from fastloop_distill.teacher import Teacher

        self.where, layers = f"{recipe.where}: plugins.distill", self.config.layers
        self.task = next(plugin for plugin in plugins if plugin.slot == "task")
        self.auto = getattr(self.task, "auto_class", "")
        if "next-token-loss" in self.task.declare_traits(recipe):
            self.auto = "AutoModelForCausalLM"
        elif self.auto not in CLASSIFIERS or self.task.labels == "none":
            raise RecipeError(f"{self.where}: the task is {self.task.name}, expected causal-lm or text-classification.")
        loss = (recipe.plugins.get(self.task.name) or {}).get("loss")
        if isinstance(loss, Mapping) and loss.get("class_weights") is not None:
            where = f"{recipe.where}: plugins.{self.task.name}.loss"
            raise RecipeError(f"{where}.class_weights: the soft loss counts all samples alike. Remove one of both.")
        if layers and (recipe.model.get("name") is None or layers != sorted({*layers}) or layers[0] < 0):
            raise RecipeError(f"{self.where}.layers: found {layers}, expected layers of model.name in their order.")
        self.teacher = Teacher(recipe, self.config.teacher, self.auto)
        self.cache = Cache(self.config.cache_mb * 2**20)

    @hookimpl(wrapper=True)
    def build_datasets(self, run: Run) -> Generator[None, Any, Any]:
        if (kind := getattr(self.task.data, "label_type", "class")) != "class":
            raise RecipeError(f"{run.recipe.where}: data.label_type: found {kind}, and distill needs class.")
        self.teacher.check_inputs(self.task.text_model, self.task.data.options.max_length)
        datasets = yield
        if self.auto in CLASSIFIERS:
            self.teacher.check_labels(self.task.order.names)
        return datasets

    @hookimpl(wrapper=True)
    def build_model(self) -> Generator[None, Any, Any]:
        from fastloop_distill.student import keep_layers, pair_layers

        model = yield
        if self.config.layers:
            keep_layers(model, self.config.layers, f"{self.where}.layers")
        self.pairs = pair_layers(model, self.teacher.config, self.config.teacher_layers, self.where)
        return model

    @hookimpl
    def before_prepare(self, model: Any) -> None:
        from fastloop_distill.student import add_projections

        if self.config.states != "none":
            add_projections(model, self.teacher.config)

    @hookimpl
    def after_prepare(self, run: Run) -> None:
        from fastloop_distill.student import Student

        dtypes = (weight.dtype for weight in run.unwrap_model().parameters() if weight.is_floating_point())
        self.teacher.load(run.device, next(dtypes))
        self.student = Student(run.unwrap_model(), self.config.states != "none")

    @hookimpl
    def before_step(self) -> None:
        self.cache.active = True

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Run, model: nn.Module, batch: Mapping[str, Any]) -> Generator[None, Output, Output]:
        from fastloop_distill.losses import compare
        from fastloop_distill.student import is_training

        output = yield
        if self.student is None or not is_training(model):
            return output
        found, self.student.output = self.student.output, None
        with run.accelerator.autocast():
            soft, states = compare(found, batch, self.teacher, self.cache, self.config, self.pairs)
        run.log("distill/soft_loss", soft)
        output.loss = (1 - self.config.weight) * output.loss + self.config.weight * soft
        if states is not None:
            run.log("distill/states_loss", states)
            output.loss = output.loss + self.config.states_weight * states
        return output

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        return {"teacher": self.teacher.digest} | self.cache.save(run.processes)

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        if state["teacher"] != self.teacher.digest:
            raise UsageError(f"{self.where}.teacher: {self.teacher.name} has other weights than before the break.")
        self.cache.load(state, run.processes)

    @hookimpl(wrapper=True)
    def export_model(self, run: Run) -> Generator[None, Any, Any]:
        from fastloop_distill.student import without_projections

        with without_projections(run.unwrap_model()):
            return (yield)

    @hookimpl
    def teardown(self) -> None:
        if self.student is not None:
            self.student.close()

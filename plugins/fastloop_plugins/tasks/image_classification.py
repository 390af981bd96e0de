"""Trains an image classifier of transformers, torchvision or timm on a folder of images.

On by default if ``data.images`` is set. `docs/tasks/image-classification.md` has an example.

    model: {name: microsoft/resnet-18}
    data:  {images: photos, image_size: 224}
    plugins:
      - image-classification
      - dataloader-workers        # decode and augment images in worker processes

The folder has ``train``, ``validation`` and ``test``, each with a folder of images for each class, or only folders of
classes. If a checkpoint has classes with the same names, the run keeps its ids and its head. Training images are
cropped and flipped at random, by ``train.seed``, the epoch and the image only; ``data.augment: {crop: false, flip: 0}``
turns it off.

    plugins:
      - image-classification:
          loss: {name: cross_entropy, class_weights: balanced, label_smoothing: 0.1}     # or {name: focal, gamma: 2}
          metrics: {recall: {type: MulticlassRecall}}   # beside accuracy, f1, and top5_accuracy if over 5 classes

An unreadable image ends the run with an error that names the file, or ``skip-unreadable`` leaves it out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastloop import Output, Package, RecipeError, hookimpl
from fastloop_plugins.tasks.image.data import ImageData, ImageDataOptions
from fastloop_plugins.tasks.image.model import ImageModel, ImageModelOptions
from fastloop_plugins.tasks.shared.losses import ClassLoss
from fastloop_plugins.tasks.shared.metrics import classifier_metrics, find_metrics, names_of_scored_metrics
from fastloop_plugins.tasks.shared.two_classes import TwoClassOptions

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from torchmetrics import Metric, MetricCollection

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.models.label_order import LabelOrder
    from fastloop_plugins.tasks.image.batches import Collator, ImageDataset

logger = logging.getLogger("fastloop")

TOP = 5
"""Number of classes among which ``top5_accuracy`` looks for the label."""


class ImageClassification(TwoClassOptions):
    """Trains a classifier of images: one class for each."""

    name = "image-classification"
    on_resume = {"metrics": "free", "threshold": "free", "positive": "free"}
    slot = "task"
    fallback_hooks = ("compute_loss",)
    requirements = (Package("pillow", ">=11", extra="vision"),)
    sections = {"model": ImageModelOptions, "data": ImageDataOptions}

    data: ImageData  # this and the next attributes: from check_recipe on
    model: ImageModel
    criterion: ClassLoss
    metric_classes: dict[str, type[Metric]]
    labels: LabelOrder  # from the load of the configuration on
    epoch: Tensor  # the number of the epoch, which data workers share; from build_datasets on

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        return "data.images is set" if "images" in recipe.data and not recipe.model.get("module") else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = ImageData(recipe)
        self.model = ImageModel(recipe)
        self.criterion = ClassLoss(self.loss, f"{recipe.where}: plugins.{self.name}.loss")
        self.metric_classes = find_metrics(self.metrics, recipe, f"plugins.{self.name}.metrics")

    def _load_config(self, recipe: Recipe) -> None:
        """Set the image processor, and in inference the classes, from the pretrained or exported model."""
        self.model.load_config()
        if recipe.inference is not None:
            self.data.classes = self.model.exported_classes()
            self.labels = self.model.order(self.data.classes)
        self.model.load_processor(self.data.input_changes())

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, ImageDataset]:
        from fastloop_plugins.tasks.image.batches import ImageDataset, Transform, new_epoch
        from fastloop_plugins.tasks.image.reading import check_images
        from fastloop_plugins.tasks.image.repeats import find_repeated_images

        recipe = run.recipe
        self._load_config(recipe)
        splits = self.data.load()
        if recipe.inference is None:
            self.labels = self.model.order(self.data.classes)
            if run.is_main:
                for problem in find_repeated_images(splits, self.data.classes):
                    logger.warning(problem)
                check_images(splits.values(), self.model.processor.shorter_side, run.settings.skip_unreadable)
        named = recipe.inference is not None and recipe.inference.chunk > 0
        plain = Transform(self.model.processor)
        training = Transform(self.model.processor, self.data.augment)
        self.epoch = new_epoch()
        datasets = {}
        for split, files in splits.items():
            files.labels = [self.labels.ids[label] for label in files.labels]
            dataset = ImageDataset(files, plain, training, recipe.train.seed, self.epoch, named)
            datasets[split] = dataset if recipe.inference is not None else dataset.as_split(split)
        self.criterion.set_weights(
            (lambda: datasets["train"].labels) if "train" in datasets else None,
            self.labels.names,
            datasets.get("train"),
        )
        self.decision(self.labels.names)  # refuses an unknown class before the model is built
        return datasets

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[list[tuple[str, str]]]:
        from fastloop_plugins.tasks.image.reading import read_image

        files = self.build_datasets(run)["train"].files
        step = max(len(files.names) // count, 1)  # files are sorted by class, so these are of several classes
        for index in range(0, len(files.names), step)[:count]:
            path = files.root / files.names[index]
            label = files.labels[index]
            width, height = read_image(path, files.max_pixels).size
            yield [("image", str(path)), ("class", self.labels.names[label]), ("size", f"{width} x {height} pixels")]

    @hookimpl
    def build_prediction_data(self, run: Run, source: Any, start: int, size: int) -> Iterator[ImageDataset] | None:
        if source is None:  # a split
            return None
        from fastloop_plugins.tasks.image.batches import ImageDataset, Transform

        self._load_config(run.recipe)
        transform = Transform(self.model.processor)
        return (ImageDataset(files, transform, named=True) for files in self.data.to_predict(source, start, size))

    @hookimpl
    def build_collator(self) -> Collator:
        from fastloop_plugins.tasks.image.batches import Collator

        return Collator(self.criterion)

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        import torch

        from fastloop_plugins.models.checks import check_alone, check_classifies_images

        model = self.model.build(self.labels)
        run.new_weights = frozenset(self.model.new)
        size = (self.model.processor.height, self.model.processor.width)
        check_classifies_images(run, model, size, len(self.labels.names), self.model.where)
        check_alone(run, model, lambda: model(torch.zeros(1, 3, *size)))
        return model

    @hookimpl
    def build_metrics(self, run: Run) -> MetricCollection:
        from torchmetrics.classification import MulticlassAccuracy

        where = f"{run.recipe.where}: plugins.{self.name}.metrics"
        names = self.labels.names
        count = len(names)
        decision = self.decision(names)
        metrics = classifier_metrics(self.metric_classes, self.metrics, where, count, decision)
        scored = names_of_scored_metrics(self.metric_classes, self.metrics, count)
        self.scored_classes = dict.fromkeys(scored, names[decision.positive])
        if count > TOP:
            if "top5_accuracy" in self.metrics:
                raise RecipeError(
                    "the task has a metric 'top5_accuracy'.",
                    code="name-taken",
                    place=f"{where}.top5_accuracy",
                    remedy="Call this one something else.",
                )
            metrics.add_metrics({"top5_accuracy": MulticlassAccuracy(count, top_k=TOP, average="micro")})
        return metrics

    @hookimpl
    def before_epoch(self, run: Run) -> None:
        self.epoch.fill_(run.state.epoch)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: Any) -> Output:
        images, classes, *_ = batch
        output = model(images)
        logits = getattr(output, "logits", output)
        return Output(self.criterion(logits.float(), classes), logits, classes)

    @hookimpl
    def predict(self, run: Run, batch: Any) -> Mapping[str, list[Any]]:
        from fastloop_plugins.tasks.shared.predicted_columns import predicted_columns

        output = run.hooks.compute_loss(run=run, model=run.model, batch=batch)
        names = self.labels.names
        return {"file": list(batch[2]), **predicted_columns(output, names, self.decision(names))}

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        return self.model.export(run, folder)

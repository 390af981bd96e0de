"""Trains a token classifier: a tag for each word, as in named entity recognition.

On by default if ``data`` names ``tags`` or CoNLL files. `docs/tasks/token-classification.md` explains the formats.

    model: {name: distilbert-base-cased}
    data:  {files: {train: train.conll, validation: validation.conll, test: test.conll}, max_length: 256}
    plugins:
      - token-classification

The training split defines the tags, in sorted order, unless ``data.tag_names`` lists them. If a checkpoint has the same
tags, the run keeps its ids and its head.

    plugins:
      - token-classification:
          scheme: IOB2                                    # count only entities that follow it
          label_tokens: all                               # each token of a word is a target; default: the first
          loss: {name: cross_entropy, class_weights: balanced, label_smoothing: 0.1}  # or {name: focal, gamma: 2}
          metrics: {f1_tags: {type: MulticlassF1Score}}   # beside accuracy, precision, recall and f1

``precision``, ``recall`` and ``f1`` count entities as seqeval does; ``accuracy`` is over words. A sentence that does
not fit into ``max_length`` is divided between words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastloop import Output, RecipeError, hookimpl, option
from fastloop_plugins.models.checks import check_alone, check_classifies, shortest
from fastloop_plugins.tasks.shared.losses import ClassifierOptions, ClassLoss
from fastloop_plugins.tasks.shared.metrics import find_metrics
from fastloop_plugins.tasks.tags.batches import (
    TaggedSentences,
    TagModel,
    batch_sentences,
    copy_logits,
    encode_sentences,
    renumber_tags,
    sentence_chunks,
    tagged_samples,
    word_logits_and_tags,
)
from fastloop_plugins.tasks.tags.data import TagData, TagTextData, has_tags
from fastloop_plugins.tasks.tags.words import encode_rows
from fastloop_plugins.text.model_options import ModelOptions
from fastloop_plugins.text.padding_check import ALIKE, PROBE
from fastloop_plugins.text.task import TextTask

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric, MetricCollection
    from transformers import PreTrainedTokenizerBase

    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins._cache import Flat
    from fastloop_plugins.models.label_order import LabelOrder
    from fastloop_plugins.text.batches import Ragged
    from fastloop_plugins.text.needed_rows import FirstRows
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.tokens import Split


class TokenClassification(ClassifierOptions, TextTask):
    """Trains a classifier of words: one tag for each word of a sentence."""

    name = "token-classification"
    on_resume = {"metrics": "free", "scheme": "free"}
    columns = ("words",)
    labels = "required"
    sections = {"model": ModelOptions, "data": TagData}
    auto_class = "AutoModelForTokenClassification"
    unused_modules = ()
    reads_all = False
    encoding_version = 2
    _is_checked_on_first_rows = True
    _has_narrow_ids = False  # ids and targets take turns, and are read as columns
    data: TagTextData
    text_model: TagModel
    order: LabelOrder

    scheme: Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"] | None = option(
        "How tags describe entities, as in seqeval's strict mode; IOB2 is also called BIO, IOBES BIOES. null: "
        "as in its default mode and in CoNLL's evaluation script.",
        default=None,
    )
    label_tokens: Literal["first", "all"] = option(
        "The tokens of a word that have its tag as their target.", default="first"
    )

    place: str  # of the task in the recipe
    criterion: ClassLoss  # this and the next attribute: from check_recipe on
    metric_classes: dict[str, type[Metric]]

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        return "data has tags of words" if has_tags(recipe) else None

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = TagTextData(recipe)
        self.text_model = TagModel(recipe, self.data)
        self.place = f"{recipe.where}: plugins.{self.name}"
        self.criterion = ClassLoss(self.loss, f"{self.place}.loss")
        self.metric_classes = find_metrics(self.metrics, recipe, f"plugins.{self.name}.metrics")

    # -- sentences -----------------------------------------------------------------------------------------------------

    def encoding_arguments(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def encode(
        tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Iterator[list[int]]:
        return encode_rows(tokenizer, rows)

    def _order_classes(self, splits: Mapping[str, Split] | None = None) -> None:
        super()._order_classes(splits)
        for split in (splits or {}).values():
            split.ids = renumber_tags(split.ids, self.order.ids)

    def _first_rows(self, run: Run) -> FirstRows | None:
        if self.criterion.options.class_weights == "balanced":  # which counts the tags of all rows
            return None
        return super()._first_rows(run)

    def _count_samples(self, flat: Flat) -> int:
        return len(flat[1])  # a sentence is one sample or more

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        from fastloop_plugins.tasks.tags.metrics import check_scheme

        datasets = dict[str, TaggedSentences]()
        size = self.data.options.max_length
        for name, split in self.read_splits(run).items():
            check_scheme(self.data.classes, name, split, self.scheme, f"plugins.{self.name}.scheme")
            datasets[name] = TaggedSentences(
                split.ids, split.lengths, *self.text_model.room(size), divides_long=name == "train"
            )
            datasets[name].warn(name, len(split.lengths))
        run.state.unreadable += self.data.unreadable
        train = datasets.get("train")
        built = self.data.streamed(run, datasets, self.text_model)
        self.criterion.set_weights(None if train is None else train.tags, self.order.names, built.get("train"))
        return built

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        split = self.read_splits(run, count)["train"]
        return tagged_samples(self.data, self.text_model, split, self.label_tokens == "all")

    @hookimpl
    def build_prediction_data(self, source: Any, start: int, size: int) -> Iterator[TaggedSentences]:
        self.text_model.load_tokenizer(self.data.options.max_length)
        self._order_classes()
        sentences = self.data.sentences(source, start, size)
        return sentence_chunks(sentences, self.text_model, self.data.options.max_length)

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        every = self.label_tokens == "all"
        return batch_sentences(samples, self.text_model, self.data.options.max_length, self.criterion, every)

    # -- model, loss and metrics ---------------------------------------------------------------------------------------

    def _probe_samples(self, run: Run) -> list[dict[str, Any]]:
        def bad(index: int, problem: str) -> None:
            raise RecipeError(problem, code="unsupported-tokenizer", place=f"{self.text_model.where}.tokenizer")

        sentences = [text.split() for text in PROBE]
        samples = encode_sentences(sentences, self.text_model, self.data.options.max_length, bad)
        return [samples[0], samples[1]]

    def check_model(self, run: Run, model: nn.Module, make: Callable[..., dict[str, Tensor]]) -> None:
        check_classifies(run, model, make(), len(self.order.names), self.text_model.where, tokens=True)
        if run.recipe.inference is not None:
            return
        sample = shortest(run.datasets["train"])
        if sample is not None:
            check_alone(run, model, lambda: model(**make(sample)), f"Or {ALIKE}.")

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        model = super().build_model(run=run)
        if run.plugins.in_slot("strategy") == "fsdp":
            model.register_forward_hook(copy_logits)
        return model

    @hookimpl
    def build_metrics(self) -> MetricCollection:
        from fastloop_plugins.tasks.tags.metrics import tag_metrics

        return tag_metrics(self.order.names, self.scheme, self.metric_classes, self.metrics, self.place)

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        import torch

        from fastloop_plugins.text.forward_passes import compute

        inputs = {name: value for name, value in batch.items() if name not in ("sentences", "rows")}
        logits = compute(model, inputs).logits
        loss = self.criterion(logits.flatten(0, 1).float(), batch["labels"].flatten())
        # selecting the words waits for the device, and only metrics and predictions need them
        if torch.is_grad_enabled():
            return Output(loss)
        return Output(loss, *word_logits_and_tags(logits, batch))

    def output_columns(self) -> Sequence[str]:
        return ("words", "tags", "probabilities", "entities")

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[Any]]:
        from fastloop_plugins.tasks.tags.metrics import tag_columns

        output = run.hooks.compute_loss(run=run, model=run.model, batch=batch)
        sentences: Any = run.datasets[run.loaders.first_split].words
        words = [sentences[row] for row in batch["rows"].tolist()]
        return tag_columns(output, words, self.order.names, self.scheme)

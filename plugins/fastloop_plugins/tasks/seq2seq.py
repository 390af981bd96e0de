"""Trains an encoder-decoder, such as T5 or BART, pretrained or from scratch.

On by default if ``data`` names a ``target`` column. `docs/tasks/seq2seq.md` has an example.

    model: {name: google-t5/t5-small}
    data:  {files: {train: news.csv}, text: article, target: summary, prefix: "summarize: ",
            max_length: 512, max_target_length: 64}
    plugins:
      - seq2seq

The loss is the mean cross entropy of the target tokens. Evaluation also reports ``perplexity`` and ``token_accuracy``,
both with the target's earlier tokens as the decoder's input. ``generate: true`` also generates texts, for
``exact_match``, ``bleu`` and ``chrf``. `fastloop predict` generates texts, by default greedily:

    fastloop predict runs/news articles.csv plugins.seq2seq.num_beams=4 plugins.seq2seq.max_new_tokens=100
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastloop import Output, hookimpl, option
from fastloop_plugins._targets import IGNORED
from fastloop_plugins.models.checks import check_target_loss
from fastloop_plugins.tasks._seq2seq_parts import (
    GENERATED,
    PairSequences,
    Seq2SeqData,
    Seq2SeqModel,
    Seq2SeqTextData,
    encode_rows,
    generated_metrics,
    pair_samples,
    warn_about_languages,
    warn_about_targets,
)
from fastloop_plugins.text.forbidden_targets import CHECKED, Target, warn_about_forbidden
from fastloop_plugins.text.generated_samples import GeneratedSample, check_samples, log_samples, spread
from fastloop_plugins.text.generation import (
    SHARED_SETTINGS,
    GenerationOptions,
    check_generation,
    check_token_ids,
    cut_at_end,
    generating,
    generation_config,
)
from fastloop_plugins.text.model_options import ModelOptions
from fastloop_plugins.text.options import SamplingOptions, text_traits
from fastloop_plugins.text.padding_check import PROBE
from fastloop_plugins.text.sequences import describe_cut
from fastloop_plugins.text.task import TextTask

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import MetricCollection
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from fastloop import Batch, MetricMode, Run, Trait
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.batches import Ragged, Width
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.sequences import Sequences
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

OWN_SETTINGS = SHARED_SETTINGS | {"num_beams": "num_beams"}
"""Setting of ``generate`` -> the option of the task that sets it."""


class Seq2Seq(SamplingOptions, GenerationOptions, TextTask):
    """Trains an encoder-decoder on a target text for each input text."""

    name = "seq2seq"
    on_resume = {
        "temperature": "free",
        "top_k": "free",
        "top_p": "free",
        "generate": "free",
        "max_new_tokens": "free",
        "num_beams": "free",
        "generation": "free",
        "samples": "free",
    }
    columns = ("text", "target")
    conflicts = {
        "packing": "an encoder-decoder has two rows of different length for each sample, and packing makes one."
    }
    sections = {"model": ModelOptions, "data": Seq2SeqData}
    auto_class = "AutoModelForSeq2SeqLM"
    unused_modules = ()
    encoding_version = 2
    samples_are_rows = True
    _probe_inputs = ("input_ids", "attention_mask", "labels")
    adds_metrics: Mapping[str, MetricMode | None] = {"perplexity": "min"}
    data: Seq2SeqTextData
    text_model: Seq2SeqModel

    generate: bool = option("In evaluation, also generate the texts, for exact_match, bleu and chrf.", default=False)
    max_new_tokens: int | None = option(
        "Tokens to generate for each text at most; null: data.max_target_length.", default=None, ge=1
    )
    num_beams: int = option("Candidates that beam search keeps; 1: no beam search.", default=1, ge=1)

    new_tokens: int  # of a generated text at most
    settings: dict[str, Any]  # of ``generation``, checked
    _checked: dict[str, PairSequences]  # part of the data -> its rows, until their targets are checked
    target_width: Width  # of batches
    _for_metrics: GenerationConfig  # from build_model on
    _for_predictions: GenerationConfig

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        has_target = recipe.data.get("target") is not None and not recipe.model.get("module")
        return "data names a target column" if has_target else None

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return text_traits(recipe)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.generate:
            self.adds_metrics = {**self.adds_metrics, **dict.fromkeys(GENERATED, "max")}

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = Seq2SeqTextData(recipe, self)
        self.new_tokens = self.max_new_tokens or self.data.options.max_target_length
        beams = self.num_beams
        key = f"plugins.{self.name}"
        self.settings = check_generation(self.generation, OWN_SETTINGS, beams, recipe.where, key)
        # with the start token; unlike max_new_tokens, arguments of `generate` replace max_length
        length = {"max_length": self.new_tokens + 1, "max_new_tokens": None}
        exported = self._settings(self.sampling()) | length
        options = self.data.options
        self.text_model = Seq2SeqModel(recipe, options.max_target_length, options.languages(), exported)
        self._checked: dict[str, PairSequences] = {}

    def encoding_arguments(self) -> dict[str, Any]:
        return {key: getattr(self.data.options, key) for key in ("max_length", "max_target_length")}

    @staticmethod
    def encode(
        tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Iterator[list[int]]:
        return encode_rows(tokenizer, rows, arguments)

    @staticmethod
    def build_dataset(split: Split, arguments: Mapping[str, Any]) -> PairSequences:
        return PairSequences(split.ids, split.lengths)

    def check_dataset(self, split: str, dataset: PairSequences) -> None:
        """Log how many inputs are cut, and keep the targets for the checks that follow."""
        name = self.data.name_part(split)
        self._checked[name] = dataset
        cut = dataset.cut[0]
        if cut:
            logger.warning(describe_cut(name, cut, len(dataset), "inputs", self.data.options.max_length))

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        self._checked.clear()
        datasets = super().build_datasets(run=run)
        if run.recipe.inference is None:
            warn_about_languages(self.text_model.tokenizer, self.data.where)
        warn_about_targets(self._checked, self.text_model.tokenizer, self.data.options.max_target_length)
        return datasets

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        split = self.read_splits(run, count)["train"]
        return pair_samples(self.text_model, split, self.build_dataset(split, {}))

    def _encode_chunks(self, source: Any, start: int, size: int) -> Iterator[Sequences]:
        from fastloop_plugins._mapped import flat
        from fastloop_plugins.text.chunks import text_chunks
        from fastloop_plugins.text.encoding import encode
        from fastloop_plugins.text.sequences import Sequences

        arguments = {"truncation": True, "max_length": self.data.options.max_length}
        chunks = (self.data.add_prefix(texts) for texts, _ in text_chunks(self.data, source, start, size))
        return (Sequences(*flat(encode(self.text_model.tokenizer, texts, arguments))) for texts in chunks)

    @hookimpl
    def build_collator(self, run: Run) -> Callable[[list[Any]], Batch]:
        from fastloop_plugins.text.batches import Width

        size = self.data.options.max_target_length
        always = self.data.options.padding == "max_length"
        self.target_width = Width(size, run.settings.pad_to_multiple_of, always)
        return super().build_collator(run=run)

    def build_batch(self, samples: list[dict[str, Any]]) -> Ragged:
        """A batch of inputs and targets. ``tokens`` counts those of inputs, as the padding of ``input_ids`` is
        measured. With ``generate``, ``references`` are texts of targets, see ``reference_texts``."""
        import numpy as np

        from fastloop_plugins.text.batches import Ragged, padded

        rows = [sample["input_ids"] for sample in samples]
        rows = [row if len(row) else np.array([self.text_model.end()]) for row in rows]  # attention needs a token
        targets = [sample["labels"] for sample in samples if "labels" in sample]  # texts to predict have none
        fixed = {}
        if targets:
            fixed["labels"] = padded(targets, self.target_width(targets), IGNORED)
        references = [sample["reference"] for sample in samples if "reference" in sample]
        if references and self.generate:
            fixed["references"] = padded(references, max(1, *map(len, references)), 0)
        return Ragged(
            columns={"input_ids": (rows, self.text_model.tokenizer.pad_token_id)},
            fixed=fixed,
            loss_weight=sum(map(len, targets)),
            tokens=sum(map(len, rows)),
        )

    def _probe_samples(self, run: Run) -> list[dict[str, Any]]:
        import numpy as np

        size = min(self.data.options.max_length, self.data.options.max_target_length)
        texts = self.text_model.tokenizer(list(PROBE), truncation=True, max_length=size)["input_ids"]
        # of two lengths
        return [{"input_ids": np.array(ids), "labels": np.array(ids[: (len(ids) + 1) // 2])} for ids in texts]

    def check_model(self, run: Run, model: nn.Module, make: Callable[..., dict[str, Tensor]]) -> None:
        if run.recipe.inference is None:
            check_target_loss(run, model, make(), self.text_model.where)

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        key = f"plugins.{self.name}"
        if self.samples and run.recipe.inference is None:
            check_samples(run, self.name)
        self.text_model.check_room(f"{key}.max_new_tokens", self.new_tokens)
        check_token_ids(self.settings, len(self.text_model.tokenizer), f"{run.recipe.where}: {key}.generation")
        model: nn.Module = super().build_model(run=run)
        self._for_metrics = generation_config(model, self._settings({}))
        self._for_predictions = generation_config(model, self._settings(self.sampling()))
        if run.recipe.inference is None or self.generate:
            targets = {name: self._targets(dataset) for name, dataset in self._checked.items()}
            warn_about_forbidden(self._for_metrics, targets, self.text_model.tokenizer, key, OWN_SETTINGS)
        self._checked.clear()
        return model

    def _settings(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of ``generate``: greedy or by beam search, unless ``sampling`` draws tokens."""
        own = {"do_sample": False, "num_beams": self.num_beams, "max_new_tokens": self.new_tokens}
        return {**own, **sampling, **self.settings}

    def _targets(self, dataset: PairSequences) -> list[Target]:
        """Targets of a split, evenly spaced."""
        start = [self.text_model.config.decoder_start_token_id]
        targets = []
        for index in range(0, len(dataset), -(-len(dataset) // CHECKED) or 1):
            sample = dataset[index]
            targets.append(Target(prompt=start, tokens=sample["labels"].tolist(), source=sample["input_ids"].tolist()))
        return targets

    @hookimpl
    def build_metrics(self, run: Run) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy

        count = len(self.text_model.tokenizer)
        return MetricCollection(
            {"token_accuracy": MulticlassAccuracy(count, average="micro", ignore_index=IGNORED, validate_args=False)}
        )

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.generate or self.samples:
            with generating(run):  # an error of the strategy comes before training
                pass

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        import torch

        from fastloop_plugins.text.forward_passes import call_with_mask

        inputs = {name: value for name, value in batch.items() if name != "references"}
        # the model shifts the labels and computes their mean cross entropy
        output = call_with_mask(model, inputs | {"use_cache": False})
        if torch.is_grad_enabled():
            return Output(output.loss)
        return Output(output.loss, output.logits.argmax(-1).flatten(), batch["labels"].flatten())

    def output_columns(self) -> Sequence[str]:
        return ("text",)

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[str]]:
        return {"text": self._generate(run, batch, self._for_predictions, together=False)}

    def _generate(self, run: Run, batch: Mapping[str, Tensor], config: GenerationConfig, together: bool) -> list[str]:
        """A text for each sample of a batch, see ``_draw``."""
        ids = self._draw(run, batch, config, together)
        return list(self.text_model.tokenizer.batch_decode(ids, skip_special_tokens=True))

    def _draw(self, run: Run, batch: Mapping[str, Tensor], config: GenerationConfig, together: bool) -> Tensor:
        """The token ids of a text for each sample of a batch, after the start token: (samples, tokens) int64.

        Args:
            together: All processes generate batches at the same time.
        """
        import torch

        ids = batch["input_ids"]
        mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": mask}
        with generating(run) as generator:
            drawn = generator.generate(config, inputs, synced_gpus=together and run.world_size > 1)
        return drawn[:, 1:]

    def _log_samples(self, run: Run) -> None:
        """Write the targets of some inputs of the validation split with the weights as they are. Every process writes
        the same ones, since strategies that gather weights need all."""
        import torch

        from fastloop.runtime.random_states import preserve_random_states

        tokenizer = self.text_model.tokenizer
        dataset = run.datasets["validation"]
        config = self._for_predictions
        chosen = [dataset[index] for index in spread(len(dataset), self.samples)]
        inputs = {name: value.to(run.device) for name, value in self.build_collator(run)(chosen).inputs.items()}
        started = perf_counter()
        with preserve_random_states():
            torch.manual_seed(run.recipe.train.seed)
            drawn = self._draw(run, inputs, config, run.strategy.forwards_together)
        ids_of_samples = drawn.tolist()
        seconds = perf_counter() - started
        samples = []
        for sample, ids in zip(chosen, ids_of_samples, strict=True):
            completion = cut_at_end(ids, config.eos_token_id)
            asked = tokenizer.decode(sample["input_ids"])
            texts = [completion.ids, sample["labels"]]
            answer, expected = tokenizer.batch_decode(texts, skip_special_tokens=True)
            samples.append(GeneratedSample(asked, answer, expected, completion.ended))
        log_samples(run, samples, seconds)

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        metrics |= {"perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}
        if self.samples and split == "validation" and run.recipe.inference is None:
            self._log_samples(run)
        if self.generate:
            together = run.strategy.forwards_together
            write = partial(self._generate, run, config=self._for_metrics, together=together)
            metrics |= generated_metrics(run, split, self.text_model.tokenizer, write)
        return metrics

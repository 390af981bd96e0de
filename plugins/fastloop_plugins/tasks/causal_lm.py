"""Trains a causal language model, pretrained or from scratch.

On by default if ``data`` names no ``label``, ``target`` or ``tags``.

    model: {config: {model_type: gpt2, n_layer: 4, n_head: 4, n_embd: 256}, tokenizer: {kind: bpe, vocab_size: 4000}}
    data:  {files: {train: "texts/*.txt"}, max_length: 256}
    plugins:
      - causal-lm

Texts are concatenated and cut into blocks of ``max_length`` tokens. A token attends to all tokens before it in its
block, those of other texts included. Each text ends with the end token. If the tokenizer puts a token before a text, as
those of Llama and Gemma do, texts and prompts begin with it, in training, evaluation and prediction. The log names both
tokens. `docs/tasks/chat.md` explains conversations and completions.

With ``output_router_logits: true`` (mixtures of experts), training adds the auxiliary loss of the router.
``model.pad_vocab_to: 64`` pads the vocabulary while training, for faster matrix products: losses change by rounding
only.

For texts, evaluation reports ``bits_per_character``: the mean loss of a token in bits, times the tokens of the split,
divided by its characters. It compares models with different tokenizers. ``samples: 4`` logs the model's answers to four
validation prompts at each evaluation. `fastloop predict` continues texts, greedily or
with a ``temperature``:

    fastloop predict runs/gpt prompts.txt plugins.causal-lm.temperature=0.8 plugins.causal-lm.top_p=0.95
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastloop import Output, RecipeError, hookimpl, option
from fastloop.splits import PREDICT
from fastloop_plugins.models.checks import check_causal
from fastloop_plugins.tasks.tags.data import has_tags
from fastloop_plugins.text.chat.data import LanguageData, LanguageTextData
from fastloop_plugins.text.chat.model import ChatModel, CompletionModel, DecoderModel, DecoderOptions
from fastloop_plugins.text.forbidden_targets import CHECKED, warn_about_forbidden
from fastloop_plugins.text.generated_samples import GeneratedSample, check_samples, log_samples, spread
from fastloop_plugins.text.generation import (
    SHARED_SETTINGS,
    GenerationOptions,
    base_model,
    check_generation,
    check_token_ids,
    cut_at_end,
    generate,
    generating,
    generation_config,
)
from fastloop_plugins.text.options import SamplingOptions, language_traits
from fastloop_plugins.text.padding_check import PROBE, ROUNDING, check_prompts, report_padding
from fastloop_plugins.text.special_tokens import special_tokens
from fastloop_plugins.text.task import TextTask

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from fastloop import MetricMode, Run, Trait
    from fastloop.recipe import Recipe
    from fastloop_plugins.text.batches import PaddedCollator
    from fastloop_plugins.text.chat.prompts import PromptCollator
    from fastloop_plugins.text.chat.tokens import SequencesWithTargets
    from fastloop_plugins.text.samples import Sample
    from fastloop_plugins.text.sequences import Sequences
    from fastloop_plugins.text.tokens import Split

logger = logging.getLogger("fastloop")

LARGEST_LOSS = 700
"""The loss above which the perplexity is infinite: ``math.exp`` overflows above 709."""


class CausalLM(SamplingOptions, GenerationOptions, TextTask):
    """Trains a causal language model.

    Blocks of ``data.max_length`` tokens have the cross entropy of the next token. Reports ``perplexity``, and
    ``bits_per_character`` of texts.
    """

    name = "causal-lm"
    on_resume = {
        "temperature": "free",
        "top_k": "free",
        "top_p": "free",
        "max_new_tokens": "free",
        "generation": "free",
        "samples": "free",
    }
    sections = {"model": DecoderOptions, "data": LanguageData}
    adds_metrics: Mapping[str, MetricMode | None] = {"perplexity": "min"}
    encoding_version = 3
    _is_checked_on_first_rows = True
    router_weight = 0.0
    data: LanguageTextData
    text_model: DecoderModel

    max_new_tokens: int = option("Tokens to generate for each text at most.", default=64, ge=1)

    settings: dict[str, Any]  # of ``generation``, checked
    _checked: dict[str, SequencesWithTargets]  # part of the data -> its rows, until their answers are checked
    tokens_per_character: dict[str, float]  # split of texts -> their ratio
    room: int | None  # tokens of a prompt at most

    @classmethod
    def auto_enable(cls, recipe: Recipe) -> str | None:
        data = recipe.data
        is_labelled = data.get("label") is not None or data.get("target") is not None
        if not data or is_labelled or "images" in data or recipe.model.get("module") or has_tags(recipe):
            return None
        return "data names no label or target column"

    @classmethod
    def declare_traits(cls, recipe: Recipe) -> set[Trait]:
        return language_traits(recipe)

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        self.data = LanguageTextData(recipe)
        if self.data.options.messages:
            chat_model = ChatModel(recipe, self.data.options.chat_template)
            self.text_model = chat_model
            self.data.templates = chat_model.templates
            self.data.renderer = chat_model.renderer
        elif self.data.masked:
            self.text_model = CompletionModel(recipe)
        else:
            self.text_model = DecoderModel(recipe)
        self.settings = check_generation(self.generation, SHARED_SETTINGS, 1, recipe.where, f"plugins.{self.name}")
        self._checked: dict[str, SequencesWithTargets] = {}
        self.adds_metrics = type(self).adds_metrics
        self.sees_all_rows = self.data.text_key == "prompt"  # a warning counts prompts that are tokenized apart
        # Bits per character need the tokens and the characters of a whole split. Conversations and answers have a loss
        # for a part of their tokens alone, and a fold has some blocks of tokens, whose characters are not counted.
        has_folds = recipe.has_plugin("folds")
        evaluates_whole_texts = not self.data.masked and not has_folds
        if evaluates_whole_texts:
            self.adds_metrics = {**self.adds_metrics, "bits_per_character": "min"}

    def encoding_arguments(self) -> dict[str, Any]:
        return self.data.encoding_arguments()

    @staticmethod
    def encode(
        tokenizer: PreTrainedTokenizerBase, rows: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Iterator[list[int]]:
        from fastloop_plugins.text.chat.tokens import encode_rows

        return encode_rows(tokenizer, rows, arguments)

    def read_splits(self, run: Run, first: int | None = None) -> dict[str, Split]:
        from fastloop_plugins.text.chat.tokens import PLAIN, describe_special_tokens
        from fastloop_plugins.text.tokens import Encoding, read

        if self.data.masked:
            splits = super().read_splits(run, first)
        else:
            self.data.skip_unreadable = run.settings.skip_unreadable
            encoding = Encoding(dict(PLAIN), documents=True)
            splits = read(self.data, self.text_model, encoding, self._selection(run, first))
            self.tokens_per_character = {name: len(split.ids) / split.characters for name, split in splits.items()}
        logger.info("data: %s", describe_special_tokens(self.text_model.tokenizer, self.data.text_key))
        return splits

    def build_dataset(  # type: ignore[override]  # not static: token ids do not depend on ``data.max_length``
        self, split: Split, arguments: Mapping[str, Any]
    ) -> Sequences:
        from fastloop_plugins.text.chat.tokens import SequencesWithTargets, block_sequences

        size = self.data.options.max_length
        if self.data.masked:
            return SequencesWithTargets(split.ids, split.lengths, size)
        return block_sequences(split.ids, size)

    def check_dataset(self, split: str, dataset: Any) -> None:
        size = self.data.options.max_length
        if not len(dataset):
            problem = f"the {split} split has no two tokens: there is no next token to learn"
            if self.data.masked:
                problem = (
                    f"no row of the {split} split has a token with a loss among its first {size} tokens "
                    "(data.max_length)"
                )
            raise RecipeError(f"{problem}.", code="invalid-split", place=self.data.where)
        if self.data.masked:
            name = self.data.name_part(split)
            self._checked[name] = dataset
            dataset.warn(name, size)

    @hookimpl(optionalhook=True)
    def show_samples(self, run: Run, count: int) -> Iterator[Sample]:
        from fastloop_plugins.text.chat.tokens import language_samples

        split = self.read_splits(run, count)["train"]
        return language_samples(self.data, self.text_model.tokenizer, split)

    @hookimpl
    def build_prediction_data(self, source: Any, start: int, size: int) -> Iterator[Sequences]:
        from fastloop_plugins.text.chat.prompts import chat_chunks, counted_prompts
        from fastloop_plugins.text.chat.tokens import PLAIN
        from fastloop_plugins.text.chunks import token_chunks

        if source is None:
            raise RecipeError(
                "continues texts, and a split has blocks of tokens.",
                code="nothing-to-predict",
                place=f"{self.data.recipe.where}: plugins.causal-lm",
                remedy="Give a file or a text to predict.",
            )
        self.text_model.load_tokenizer(self.data.options.max_length)
        self.room = self._prompt_room()
        if self.data.options.messages:
            return chat_chunks(self.data, self.text_model.tokenizer, source, start, size, self.room)
        begin = special_tokens(self.text_model.tokenizer).begin
        return counted_prompts(token_chunks(self.data, self.text_model, source, start, size, PLAIN, begin), self.room)

    def _prompt_room(self) -> int | None:
        """Tokens of a prompt at most, so that the new tokens fit behind it; None: no limit.

        Raises:
            RecipeError: There is no room for a prompt.
        """
        positions: int | None = getattr(self.text_model.config, "max_position_embeddings", None)
        if positions is None:
            return None
        if positions <= self.max_new_tokens:
            raise RecipeError(
                code="out-of-range",
                place=f"{self.data.recipe.where}: plugins.causal-lm.max_new_tokens",
                found=str(self.max_new_tokens),
                expected=f"fewer than the model's {positions} positions",
            )
        return positions - self.max_new_tokens

    @hookimpl
    def build_collator(  # type: ignore[override]  # a hook may name more arguments
        self, run: Run, split: str
    ) -> PaddedCollator | PromptCollator:
        from fastloop_plugins.text.batches import PaddedCollator
        from fastloop_plugins.text.chat.prompts import PromptCollator
        from fastloop_plugins.text.chat.tokens import next_token_batch

        tokenizer = self.text_model.tokenizer
        width = self.text_model.width(run, self.data.options)
        if split == PREDICT:
            return PromptCollator(tokenizer, self.room)
        routed = bool(getattr(self.text_model.config.get_text_config(), "output_router_logits", False))
        batch = partial(next_token_batch, pad_token_id=tokenizer.pad_token_id, mask=routed)
        return PaddedCollator(batch, width, masked=False)

    @hookimpl
    def build_model(self, run: Run) -> nn.Module:
        import numpy as np
        from transformers import AutoModelForCausalLM

        where = f"{run.recipe.where}: plugins.{self.name}.generation"
        check_token_ids(self.settings, len(self.text_model.tokenizer), where)
        if self.samples and run.recipe.inference is None:
            check_samples(run, self.name)
            self.room = self._prompt_room()
        model: nn.Module = self.text_model.build(AutoModelForCausalLM)
        run.new_weights = frozenset(self.text_model.new)
        if self.settings:
            model.generation_config = generation_config(model, self.settings)  # type: ignore[assignment]
        if run.recipe.inference is None:
            self._check_answers(model)
            sample = run.datasets["train"][0]
            block = {
                name: value
                for name, value in self.build_collator(run, "train")([sample]).inputs.items()
                if name != "targets"
            }
            ids = sample["input_ids"][:8].tolist()
            self.router_weight, change = check_causal(run, model, ids, block, self.text_model.where)
            if change > ROUNDING and not self.text_model.width(run, self.data.options).always:
                report_padding(run, model, change)
        elif run.recipe.inference.chunk:
            prompts = self.text_model.tokenizer(list(PROBE), add_special_tokens=False)["input_ids"]
            batch = self.build_collator(run, PREDICT)([{"input_ids": np.array(ids)} for ids in prompts])
            check_prompts(run, model, batch.inputs, self.text_model.where, self.max_new_tokens)
        return model

    def _check_answers(self, model: Any) -> None:
        """Log which answers and completions the model cannot generate."""
        from fastloop_plugins.text.chat.tokens import find_answers, warn_about_unknown_tokens

        tokenizer = self.text_model.tokenizer
        warn_about_unknown_tokens(self._checked, tokenizer)
        if not self._checked or getattr(model, "generation_config", None) is None:  # texts have no answers
            return
        config = generation_config(model, self.settings)
        config.max_length = None  # `predict` has its own
        config.max_new_tokens = None
        answers = {name: find_answers(dataset, CHECKED) for name, dataset in self._checked.items()}
        warn_about_forbidden(config, answers, tokenizer, f"plugins.{self.name}", SHARED_SETTINGS)
        self._checked.clear()

    @hookimpl
    def check_run(self, run: Run) -> None:
        if self.samples:
            with generating(run):  # an error of the strategy comes before training
                pass

    @hookimpl
    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> Output:
        import torch

        from fastloop_plugins.text.forward_passes import call_with_mask

        # No mask for attention: padding is on the right, so no real token attends to it, and attention uses its causal
        # fast path.
        output = call_with_mask(model, batch | {"use_cache": False}, never=True)
        if self.router_weight and torch.is_grad_enabled():  # perplexity is of cross entropy alone
            return Output(output.loss + self.router_weight * output.aux_loss)
        return Output(output.loss)

    def output_columns(self) -> Sequence[str]:
        return ("text",)

    @hookimpl
    def predict(self, run: Run, batch: dict[str, Any]) -> Mapping[str, list[str]]:
        tokenizer = self.text_model.tokenizer
        with generating(run) as generator:
            ids = generator.generate(self._settings(generator.model), batch)
        return {"text": tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)}

    def _settings(self, model: Any) -> GenerationConfig:
        """The settings of ``generate`` for predictions and samples: greedy, unless ``temperature`` draws tokens. A text
        stops at the end tokens of ``generation_config``, as it does for users of an exported model."""
        settings = {"do_sample": False, "max_new_tokens": self.max_new_tokens, **self.sampling()}
        settings |= self.settings
        settings["pad_token_id"] = self.text_model.tokenizer.pad_token_id
        return generation_config(model, settings)

    def _log_samples(self, run: Run) -> None:
        """Answer some prompts of the validation split with the weights as they are."""
        from fastloop_plugins.text.chat.prompts import cut_tokens
        from fastloop_plugins.text.chat.tokens import first_half, last_answer

        tokenizer = self.text_model.tokenizer
        dataset = run.datasets["validation"]
        read = last_answer if self.data.masked else first_half
        targets = [read(dataset[index]) for index in spread(len(dataset), self.samples)]
        prompts = [list(target.prompt) for target in targets]
        if self.room is not None:
            beginning = len(special_tokens(tokenizer).beginning)
            for index, prompt in enumerate(prompts):
                if len(prompt) > self.room:
                    prompts[index] = cut_tokens(prompt, beginning, self.room)
        options = self._settings(base_model(run))
        seed = run.recipe.train.seed
        size = run.recipe.train.eval_batch_size or run.recipe.train.batch_size
        started = perf_counter()
        completions = generate(run, prompts if run.is_main else [], 1, options, seed, size)
        seconds = perf_counter() - started
        samples = []
        for target, prompt, completion in zip(targets, prompts, completions, strict=False):  # none on other processes
            asked = tokenizer.decode(prompt)
            target_ids = list(target.tokens)
            if self.data.masked:  # ChatML writes a line break after the end token, and it has a loss, too
                target_ids = cut_at_end(target_ids, options.eos_token_id).ids
            answer, expected = tokenizer.batch_decode([completion.ids, target_ids], skip_special_tokens=True)
            samples.append(GeneratedSample(asked, answer, expected, completion.ended))
        log_samples(run, samples, seconds)

    @hookimpl(wrapper=True, trylast=True)
    def evaluate(self, run: Run, split: str) -> Generator[None, dict[str, float], dict[str, float]]:
        metrics = yield
        if self.samples and split == "validation" and run.recipe.inference is None:
            self._log_samples(run)
        loss = metrics["loss"]
        metrics["perplexity"] = math.exp(loss) if loss < LARGEST_LOSS else math.inf
        if "bits_per_character" in self.adds_metrics:
            metrics["bits_per_character"] = loss / math.log(2) * self.tokens_per_character[split]
        return metrics

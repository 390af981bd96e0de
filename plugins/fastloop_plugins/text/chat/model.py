"""The ``model`` section of ``causal-lm``: a vocabulary that may be padded, and the tokenizer of a chat model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError, option
from fastloop_plugins.models.vocabulary import embeddings, resize_embeddings
from fastloop_plugins.rows.table import RowError
from fastloop_plugins.text.chat.endings import ANSWER, QUESTION, with_end
from fastloop_plugins.text.chat.left_out_contents import counting_renderer
from fastloop_plugins.text.chat.rows import Chat, text_of
from fastloop_plugins.text.chat.template import BUILT_IN, ChatRenderer, answer_end, template_text
from fastloop_plugins.text.model import TextModel
from fastloop_plugins.text.model_options import ModelOptions
from fastloop_plugins.text.next_token_loss import add_loss
from fastloop_plugins.text.special_tokens import end_of, name_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop_plugins.models.label_order import LabelOrder

logger = logging.getLogger("fastloop")

SPECIAL = re.compile(r"<\|[^|<>\s]+\|>")
"""Special tokens in a chat template."""


@dataclass(kw_only=True)
class DecoderOptions(ModelOptions):
    """The ``model`` section of ``causal-lm``."""

    pad_vocab_to: int | None = option(
        "Pad the vocabulary to a multiple of this while training, such as 64; null: do not.", default=None, ge=1
    )


class DecoderModel(TextModel):
    """The ``model`` section of a causal language model.

    Attributes:
        vocabulary: Tokens of the vocabulary, if embedding and head have more rows, or None. Set by ``build``.
    """

    section = DecoderOptions
    options: DecoderOptions
    vocabulary: int | None = None

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, classify=False)

    def build(self, auto: Any, labels: LabelOrder | None = None) -> Any:
        """``TextModel.build``, pad the vocabulary in training, and add the loss to the forward.

        Raises:
            RecipeError: The model cannot be built, or its embedding and head cannot be resized.
        """
        model = super().build(auto, labels)
        if self.options.pad_vocab_to is not None and self.recipe.inference is None:
            self._pad(model, self.options.pad_vocab_to)
        add_loss(model, self.vocabulary)
        return model

    def _pad(self, model: Any, multiple: int) -> None:
        """Add rows of zeros to embedding and head. Their logits are cut off, so they have no gradient and stay
        zeros."""
        import torch

        config = model.config.get_text_config()
        tokens: int = config.vocab_size
        rows = -(-tokens // multiple) * multiple
        if rows == tokens:
            return
        resize_embeddings(model, rows, 0, f"{self.where}.pad_vocab_to", "Leave pad_vocab_to out.", like_old=False)
        with torch.no_grad():
            for module in embeddings(model):
                for parameter in module.parameters():  # a tied one comes twice
                    parameter[tokens:] = 0
        self.vocabulary = tokens
        config.vocab_size = tokens
        logger.info("model.pad_vocab_to: %d tokens, and %d rows of embedding and head while training", tokens, rows)

    def weights(self, run: Run) -> dict[str, Tensor]:
        """The full weights, with a row for each token of the vocabulary."""
        weights = super().weights(run)
        if self.vocabulary is None:
            return weights
        model = run.unwrap_model()
        resized = embeddings(model)
        for prefix, module in model.named_modules():
            if module not in resized:
                continue
            for name, _ in module.named_parameters(prefix):
                if name in weights:
                    weights[name] = weights[name][: self.vocabulary]
        return weights


class ChatModel(DecoderModel):
    """The ``model`` section, with a tokenizer that has a chat template."""

    def __init__(self, recipe: Recipe, template: str | None) -> None:
        super().__init__(recipe)
        self.template = template_text(recipe, template) if template is not None and recipe.inference is None else None
        if self.trained is not None and self.trained.kind == "char":
            raise RecipeError(
                "char has the characters of the messages, and a chat template adds others.",
                code="unsupported-tokenizer",
                place=f"{self.where}.tokenizer.kind",
                remedy="Use kind: byte or bpe.",
            )
        self.marks = sorted(set(SPECIAL.findall(self.template or "")))
        if self.trained is not None and self.trained.vocab_size - len(self.marks) > 8:
            self.trained.vocab_size -= len(self.marks)  # which are added after training

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        if self.tokenizer is None:
            return
        vocabulary = self.tokenizer.get_vocab()
        unknown = [mark for mark in self.marks if mark not in vocabulary]
        if unknown:
            logger.warning(
                Problem(
                    f"the tokenizer has no token {', '.join(unknown)}, so each is split into several.",
                    code="missing-token",
                    place="data.chat_template",
                )
            )

    def finish_tokenizer(self, texts: Iterable[Any], types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer(text for row in texts for text in _texts(Chat.loads(row)))
            self.tokenizer.add_tokens(self.marks, special_tokens=True)
            self._set_template()

    def _ensure_pad_token(self) -> None:
        if self.trained is None:  # else the tokens of the template are added later
            self._set_template()
        super()._ensure_pad_token()

    def templates(self) -> list[str]:
        """The chat template, or all templates of the tokenizer. Call it after ``load_tokenizer``."""
        return ChatRenderer(self.tokenizer).templates() if self.tokenizer is not None else [self.template or ""]

    def renderer(self) -> ChatRenderer | None:
        """A renderer of the data, also before the tokenizer is trained. None: there is no chat template, which is
        refused later. Call it after ``load_tokenizer``."""
        train_on = self.recipe.data.get("train_on") or "assistant"
        return counting_renderer(self.tokenizer, self.template, train_on)

    def _set_template(self) -> None:
        """Give the tokenizer the chat template of the recipe, and check how it ends an answer.

        Raises:
            RecipeError: The recipe gives none, and the tokenizer has none.
        """
        if self.template is not None:
            self.tokenizer.chat_template = self.template
        if not self.tokenizer.chat_template:
            raise RecipeError(
                "the tokenizer has no chat template.",
                code="no-chat-template",
                place=f"{self.recipe.where}: data.messages",
                remedy=f"Give one: data.chat_template=FILE.jinja, or a built-in name ({', '.join(BUILT_IN)}).",
            )
        if self.recipe.inference is None:
            self._end_answers()

    def _end_answers(self) -> None:
        """Let each answer end with a token that stops generation.

        A template that writes ``<|im_end|>`` after an answer stays as it is. One that writes nothing, such as Alpaca's,
        gets the end token of the tokenizer after each answer. The export has that template.
        """
        end = answer_end(self.tokenizer)
        if not end.is_known:
            return
        if end.tokens:
            if self.tokenizer.eos_token is None:
                self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(end.tokens[0])
            self._warn_about_untrained_end(end.tokens)
            return
        if end_of(self.tokenizer):  # without an end token, the tokenizer is refused later
            self._add_end_token()

    def _add_end_token(self) -> None:
        """Let the template write the end token of the tokenizer after each answer, and warn. If the template leaves
        that token out, it stays as it was."""
        variable = "sep_token" if self.tokenizer.eos_token is None else "eos_token"
        original = self.tokenizer.chat_template
        self.tokenizer.chat_template = with_end(original, variable)
        if answer_end(self.tokenizer).tokens:
            logger.warning(
                Problem(
                    "the template writes no special token after an answer, so generation would not stop. "
                    f"Each answer now ends with {getattr(self.tokenizer, variable)!r}, in training and in the "
                    "template that is exported.",
                    code="no-end-token",
                    place="data.chat_template",
                )
            )
            return
        self.tokenizer.chat_template = original
        logger.warning(
            Problem(
                "the template writes no special token after an answer, so generation does not stop.",
                code="no-end-token",
                place="data.chat_template",
                remedy=f"Write one there, such as {{{{ {variable} }}}}.",
            )
        )

    def _warn_about_untrained_end(self, ends: list[int]) -> None:
        """Warn that the end of an answer has no loss, because it is after ``{% endgeneration %}``.

        Args:
            ends: The ids of the tokens, any of which ends an answer.
        """
        if self.recipe.data.get("train_on") == "all":
            return
        try:
            ids, has_loss = ChatRenderer(self.tokenizer).encode(Chat([QUESTION, ANSWER]))
        except RowError:  # of a template that rejects some conversations
            return
        trained_ids = set()
        for token, token_has_loss in zip(ids, has_loss, strict=True):
            if token_has_loss:
                trained_ids.add(token)
        if trained_ids and trained_ids.isdisjoint(ends):
            logger.warning(
                Problem(
                    f"the end of an answer, {name_tokens(self.tokenizer, ends)}, is outside of {{% generation %}}: "
                    "it has no loss, so the model does not learn to stop.",
                    code="end-without-loss",
                    place="data.chat_template",
                    remedy="Write it before {% endgeneration %}.",
                )
            )


class CompletionModel(DecoderModel):
    """The ``model`` section, for prompts with completions."""

    def finish_tokenizer(self, texts: Iterable[Any], types: bool = False) -> None:
        if self.trained is not None:
            super().finish_tokenizer("".join(row) for row in texts)


def _texts(chat: Chat) -> Iterator[str]:
    """The texts of a conversation that a tokenizer is trained on."""
    for message in chat.messages:
        yield text_of(message)
        if "tool_calls" in message:
            yield json.dumps(message["tool_calls"], ensure_ascii=False)

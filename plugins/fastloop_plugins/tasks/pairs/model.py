"""The ``model`` section of ``seq2seq``, and the texts that its model generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastloop import RecipeError
from fastloop_plugins.text.model import TextModel
from fastloop_plugins.text.tokenizers import end_of

if TYPE_CHECKING:
    from fastloop.recipe import Recipe

EXAMPLES = "t5, mt5, bart, mbart, pegasus or marian"
"""Architectures for messages."""


class Seq2SeqModel(TextModel):
    """The ``model`` section, for encoder-decoder models.

    A model from scratch starts each target with the padding token, as T5 does, and ends it with the tokenizer's end
    token. A tokenizer that is trained here adds the end token to inputs and targets.

    Args:
        max_target_length: ``data.max_target_length``.
    """

    def __init__(self, recipe: Recipe, max_target_length: int) -> None:
        self.max_target_length = max_target_length
        super().__init__(recipe, classify=False)

    def _check_architecture(self, config: dict[str, Any]) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as known

        key, kind = ("name" if self.options.config is None else "config"), config.get("model_type")
        if kind in CONFIG_MAPPING and kind not in known and not config.get("auto_map"):
            raise RecipeError(
                f"{self.where}.{key}: transformers has no encoder-decoder for {kind!r} (AutoModelForSeq2SeqLM). "
                f"Use one that it has, such as {EXAMPLES}."
            )

    def load_tokenizer(self, max_length: int) -> None:
        super().load_tokenizer(max_length)
        self.check_room("data.max_target_length", self.max_target_length)

    def check_room(self, key: str, length: int) -> None:
        """Raise an error if the decoder cannot take this many tokens. Call it after ``load_tokenizer``."""
        names = ("max_position_embeddings", "max_decoder_position_embeddings")
        room = min(
            (size for size in (getattr(self.config, name, None) for name in names) if isinstance(size, int)),
            default=length,
        )
        if length > room:
            raise RecipeError(f"{self.recipe.where}: {key}: found {length}, and the model takes {room} tokens at most.")

    def finish_tokenizer(self, texts: list[Any], max_length: int, types: bool = False) -> None:
        if self.trained is None:
            return
        from tokenizers.processors import TemplateProcessing

        super().finish_tokenizer([text for row in texts for text in row], max(max_length, self.max_target_length))
        end = self.tokenizer.eos_token
        template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, self.tokenizer.eos_token_id)])
        self.tokenizer.backend_tokenizer.post_processor = template

    def end(self) -> int:
        """The id of the token that ends a text."""
        (found,) = end_of(self.tokenizer)
        return found

    def _build(self, auto: Any, labels: Any) -> Any:
        given, config, pad = self.options.config, self.config, self.tokenizer.pad_token_id
        if given is not None:
            config.pad_token_id = pad
            if "forced_eos_token_id" not in given and hasattr(config, "forced_eos_token_id"):
                config.forced_eos_token_id = self.end()
        if getattr(config, "decoder_start_token_id", None) is None or (
            given is not None and "decoder_start_token_id" not in given
        ):
            config.decoder_start_token_id = pad
        return super()._build(auto, labels)

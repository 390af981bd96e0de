"""Special tokens of a language model's texts: those that begin a text, that end it, and that end generation.

Training, evaluation, prediction and exports ask this module, so that they agree. Chat templates write their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop_plugins.models.hub import quiet

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a text, as `trl` adds them.

    A text that has them already, because its row was rendered by a chat template, does not get them twice.

    Attributes:
        beginning: Ids that the tokenizer itself puts before a text, such as BOS of Llama and Gemma; often empty.
        end: The id of the token that ends a text; empty: the tokenizer has none.
    """

    beginning: list[int]
    end: list[int]

    def begin(self, ids: list[int]) -> list[int]:
        """A text that others follow, such as a prompt."""
        return ids if ids[: len(self.beginning)] == self.beginning else self.beginning + ids

    def finish(self, ids: list[int]) -> list[int]:
        """A text that follows another one, such as a completion."""
        return ids if self.end and ids[-1:] == self.end else ids + self.end

    def complete(self, ids: list[int]) -> list[int]:
        """A whole text."""
        return self.finish(self.begin(ids))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> SpecialTokens:
    """The special tokens of texts."""
    return SpecialTokens(beginning_of(tokenizer), end_of(tokenizer))


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before each text: those of its post-processor or of ``add_bos_token``.

    For ``[1, 306]`` of "a" with special tokens and ``[306]`` without, it is ``[1]``.
    """
    whole: list[int] = tokenizer("a")["input_ids"]
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole)):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def end_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end token of a text: the tokenizer's, or its separator token. Empty if it has neither."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    return [] if end is None else [end]


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids after which generation stops: the end token of a text, and the tokens that end an answer in the chat
    template, if there is one."""
    from fastloop_plugins.text.chat.template import answer_end

    ends = set(end_of(tokenizer))
    if tokenizer.chat_template:
        ends.update(answer_end(tokenizer).tokens)
    return sorted(ends)


def stop_at_end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let ``generate`` stop at ``end_tokens`` by default, here and after an export, which saves
    ``generation_config``.

    The model keeps end tokens of its own that are special tokens of this tokenizer. Others are those of another
    tokenizer, or defaults of the architecture.
    """
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        return
    own = config.eos_token_id
    if own is None:
        own = []
    elif isinstance(own, int):
        own = [own]
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ends = sorted({*end_tokens(tokenizer), *special.intersection(own)})
    if ends:
        config.eos_token_id = ends[0] if len(ends) == 1 else ends


def save_generation_config(model: nn.Module, folder: Path) -> None:
    """Save it where the model's ``save_pretrained`` did not: in the folder of an adapter, peft leaves it out."""
    config: Any = getattr(model, "generation_config", None)
    if config is not None and not (folder / "generation_config.json").exists():
        with quiet():
            config.save_pretrained(folder)


def name_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens for a message: ``'<|user|>' or '<|observation|>'``."""
    return " or ".join(repr(token) for token in tokenizer.convert_ids_to_tokens(list(ids)))

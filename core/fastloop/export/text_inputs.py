"""The texts that an exported model reads: the code that tokenizes them, and the sentences about them in its README."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastloop.runtime.files import read_json_object


@dataclass(frozen=True)
class TextInputs:
    """The texts that an exported model reads.

    Attributes:
        columns: The columns whose texts its tokenizer gets; empty: it has no tokenizer.
        max_length: The tokens that a run reads of a text at most. The exported tokenizer cuts at the limit of the
            model, so that a later run may read longer texts. None: the recipe leaves it out, or there is no tokenizer.
        prefix: The text that the task puts before each text; empty: none.
    """

    columns: Sequence[str] = ("text",)
    max_length: int | None = None
    prefix: str = ""

    @classmethod
    def of_export(cls, data: Mapping[str, Any], folder: Path) -> TextInputs:
        """Those of an exported model.

        Args:
            data: The section ``data`` of its recipe.
            folder: Its folder.
        """
        prefix = str(data.get("prefix") or "")
        if not (folder / "tokenizer_config.json").is_file():
            return cls(columns=(), prefix=prefix)
        max_length = data.get("max_length")
        if not isinstance(max_length, int):
            max_length = None
        return cls(tokenized_columns(data, folder), max_length, prefix)

    def tokenizer_call(self, tensors: str) -> str:
        """The line of code that tokenizes two texts of each column.

        Args:
            tensors: ``return_tensors`` of the tokenizer.
        """
        arguments = []
        for column in self.columns:
            texts = [f"{self.prefix}the first {column}", f"{self.prefix}a second one"]
            arguments.append(json.dumps(texts, ensure_ascii=False))
        limit = ""
        if self.max_length is not None:
            limit = f", max_length={self.max_length}"
        texts_code = ", ".join(arguments)
        return f'inputs = tokenizer({texts_code}, padding=True, truncation=True{limit}, return_tensors="{tensors}")'

    def describe_limit(self) -> str:
        """The length at which texts are cut."""
        return f"Texts are cut at {self.max_length} tokens, as in training (`data.max_length`)."

    def describe_prefix(self) -> str:
        """How the texts of the model begin."""
        prefix = json.dumps(self.prefix, ensure_ascii=False)
        return f"The model was trained on texts that begin with {prefix} (`data.prefix`). It needs it before each text."


def tokenized_columns(data: Mapping[str, Any], folder: Path) -> list[str]:
    """The columns whose texts the tokenizer in a folder gets: a pair that ``data.text`` names, else ``text``.

    A tokenizer without a separator token makes no pair: fastloop joins the columns before.
    """
    columns = data.get("text")
    if not isinstance(columns, list) or len(columns) != 2:
        return ["text"]
    if not read_json_object(folder / "tokenizer_config.json").get("sep_token"):
        return ["text"]
    return [str(column) for column in columns]

"""The teacher: found, compared with the student before weights are loaded, and computed."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from fastloop import RecipeError
from fastloop_plugins.text import SecondModel, compute
from torch import Tensor

PROBE = "The Quick brown fox, naïve; 12,345 Größen!\n"
"""A text that tokenizers with the same tokens but other rules divide differently."""


class Teacher:
    """A frozen model of transformers in eval mode.

    Args:
        name: A run, a folder that ``save_pretrained`` wrote, or a name on the hub. An adapter is merged into its base.
        auto: The Auto class of transformers that builds it.

    Attributes:
        order: The teacher's id of each class of the student; None: there are no classes.
        digest: A hash of the weights.

    Raises:
        RecipeError: The folder holds no model.
    """

    config: Any  # from check_inputs on
    digest: str  # this and the next attribute: from load on
    model: Any

    def __init__(self, recipe: Any, name: str, auto: str) -> None:
        self.where = f"{recipe.where}: plugins.distill.teacher"
        self.name = name
        self.order: list[int] | None = None
        run_model = recipe.find(name) / "model"
        is_run = any((run_model / file).is_file() for file in ("config.json", "adapter_config.json"))
        self.source = str(run_model.resolve()) if is_run else name
        options = {"name": self.source, "trust_remote_code": recipe.model.get("trust_remote_code", False)}
        self.saved = SecondModel(recipe, options, auto, "plugins.distill.teacher: model")

    def check_inputs(self, student: Any, max_length: int) -> None:
        """Load configuration and tokenizer. Raise an error unless the teacher reads the token ids of the student's
        texts.

        Args:
            student: The ``text_model`` of the task.
        """
        self.saved.load_tokenizer(max_length)
        self.config = self.saved.config
        tokenizer = self.saved.tokenizer
        advice = f"Expected the same one. Set model.tokenizer={self.source}."
        if student.trained is not None:
            raise RecipeError(
                f"{self.name} has a tokenizer, and the student's is made from the training texts.",
                code="tokens-differ",
                place=self.where,
                remedy=advice,
            )
        student.load_tokenizer(max_length)
        student_tokenizer = student.tokenizer
        has_other_vocabulary = student_tokenizer.get_vocab() != tokenizer.get_vocab()
        if has_other_vocabulary or student_tokenizer(PROBE)["input_ids"] != tokenizer(PROBE)["input_ids"]:
            raise RecipeError(
                f"the tokenizer of {self.name} has {len(tokenizer)} tokens, and the student's has "
                f"{len(student_tokenizer)}, or other rules.",
                code="tokens-differ",
                place=self.where,
                remedy=advice,
            )

    def check_labels(self, names: list[str]) -> None:
        """Raise an error unless the classes have these names, in any order."""
        teacher_names = [str(name) for _, name in sorted(self.config.id2label.items())]
        wanted = [name.strip().casefold() for name in names]
        known = [name.strip().casefold() for name in teacher_names]
        if sorted(wanted) != sorted(known):
            raise RecipeError(
                f"the classes of {self.name} are {', '.join(teacher_names)}, and those of the data {', '.join(names)}.",
                code="labels-differ",
                place=self.where,
                expected="the same names",
                remedy="Rename those of the data.",
            )
        self.order = [known.index(name) for name in wanted]

    def load(self, device: torch.device, dtype: torch.dtype) -> None:
        """Load the weights."""
        model, missing = self.saved.build()
        if missing:
            raise RecipeError(
                f"{self.name} is not trained for the task: it has no weights {', '.join(sorted(missing))}.",
                code="unsupported-model",
                place=self.where,
            )
        content = hashlib.blake2b()
        for weight in model.state_dict().values():
            content.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy())
        self.digest = content.hexdigest()
        model.config.use_cache = False
        self.model = model.eval().requires_grad_(False).to(device, dtype)

    def __call__(self, inputs: dict[str, Tensor], states: bool = False) -> Any:
        """The output for rows, with the classes in the student's order."""
        with torch.no_grad():
            output = compute(self.model, inputs, output_hidden_states=states)
        if self.order is not None:
            output.logits = output.logits[..., self.order]
        return output

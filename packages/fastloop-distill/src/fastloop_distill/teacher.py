"""The teacher: found, compared with the student before weights are loaded, and computed."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from fastloop import RecipeError
from fastloop_plugins.text import compute
from torch import Tensor

PROBE = "The Quick brown fox, naïve; 12,345 Größen!\n"
"""A text that tokenizers with the same tokens but other rules divide differently."""


class Teacher:
    """A frozen model of transformers in eval mode.

    Args:
        where: The recipe and the plugin's key, for messages.
        name: A run, a folder that ``save_pretrained`` wrote, or a name on the hub.

    Attributes:
        order: The teacher's id of each class of the student; None: there are no classes.
        fingerprint: A hash of the weights.

    Raises:
        RecipeError: The folder holds no model.
    """

    def __init__(self, recipe: Any, where: str, name: str) -> None:
        self.recipe, self.where, self.name, self.order = recipe, where, name, None
        folder = recipe.find(name)
        if (folder / "model" / "config.json").is_file():  # a run
            folder = folder / "model"
        is_hub_name = not folder.exists() and not name.startswith((".", "/")) and name.count("/") < 2
        if not is_hub_name and not (folder / "config.json").is_file():
            raise RecipeError(f"{where}: {folder} holds no config.json. Expected a run, or a folder of a model.")
        self.source = name if is_hub_name else str(folder.resolve())

    def _load(self, auto: str, source: str, **arguments: Any) -> Any:
        import transformers

        bars, drawn = transformers.utils.logging, transformers.utils.logging.is_progress_bar_enabled()
        bars.disable_progress_bar()
        try:
            return getattr(transformers, auto).from_pretrained(
                source, trust_remote_code=self.recipe.model.get("trust_remote_code", False), **arguments
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise RecipeError(f"{self.where}: {source} cannot be loaded by {auto}: {reason}.") from None
        finally:
            if drawn:
                bars.enable_progress_bar()

    def check_inputs(self, max_length: int) -> None:
        """Load the configuration. Raise an error unless the teacher reads the token ids of the student's texts."""
        self.config = self._load("AutoConfig", self.source)
        places = getattr(self.config, "max_position_embeddings", None) or max_length
        if places < max_length:
            found = f"{self.name} reads {places} tokens at most, and data.max_length is {max_length}"
            raise RecipeError(f"{self.where}: {found}. Set data.max_length={places}.")
        given, advice = self.recipe.model.get("tokenizer") or self.recipe.model.get("name"), "Expected the same one."
        advice += f" Set model.tokenizer={self.source}."
        if not isinstance(given, str):
            found = f"{self.name} has a tokenizer, and the student's is made from the training texts"
            raise RecipeError(f"{self.where}: {found}. {advice}")
        folder = self.recipe.find(given)
        sources = (str(folder.resolve()) if folder.is_dir() else given, self.source)
        ours, theirs = (self._load("AutoTokenizer", source) for source in sources)
        if ours.get_vocab() != theirs.get_vocab() or ours(PROBE)["input_ids"] != theirs(PROBE)["input_ids"]:
            found = f"the tokenizer of {self.name} has {len(theirs)} tokens, and that of {given} has {len(ours)}"
            raise RecipeError(f"{self.where}: {found}, or other rules. {advice}")

    def check_labels(self, names: list[str]) -> None:
        """Raise an error unless the classes have these names, in any order."""
        theirs = [str(self.config.id2label[index]) for index in range(len(self.config.id2label))]
        ours, known = ([name.strip().casefold() for name in each] for each in (names, theirs))
        if sorted(ours) != sorted(known):
            found = f"the classes of {self.name} are {', '.join(theirs)}, and those of the data {', '.join(names)}"
            raise RecipeError(f"{self.where}: {found}. Expected the same names. Rename those of the data.")
        self.order = [known.index(name) for name in ours]

    def load(self, auto: str, device: torch.device, dtype: torch.dtype) -> None:
        """Load the weights by an Auto class of transformers."""
        options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        model, notes = self._load(auto, self.source, **options)
        if missing := ", ".join(sorted(notes["missing_keys"])):
            raise RecipeError(f"{self.where}: {self.name} is not trained for the task: it has no weights {missing}.")
        digest = hashlib.blake2b()
        for weight in model.state_dict().values():
            digest.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy())
        self.fingerprint = digest.hexdigest()
        model.config.use_cache = False
        self.model = model.eval().requires_grad_(False).to(device, dtype)

    def __call__(self, inputs: dict[str, Tensor], states: bool = False) -> Any:
        """The output for rows, with the classes in the student's order."""
        with torch.no_grad():
            output = compute(self.model, inputs, output_hidden_states=states)
        if self.order is not None:
            output.logits = output.logits[..., self.order]
        return output

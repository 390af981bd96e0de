"""Model and tokenizer of the text tasks: pretrained with ``model.name``, or from scratch with ``model.config``."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fastloop import RecipeError
from fastloop.options import parse
from fastloop.runtime.files import read_json_object
from fastloop_plugins.models.adapters import Adapter, check_classes, continues, find_adapter, merge_adapter
from fastloop_plugins.models.checks import unsupported
from fastloop_plugins.models.hub import (
    FROM_SCRATCH,
    LAYERS,
    build_from_config,
    check_index,
    check_model_source,
    check_name,
    check_new,
    check_one_export,
    check_revision,
    config_from_scratch,
    explaining,
    new_weights,
    offline,
    quiet,
)
from fastloop_plugins.models.label_order import CLASSIFIER, LabelOrder, label_order, name_classes, start_head_fresh
from fastloop_plugins.models.remote_code import check_code, define_values, marking_undefined
from fastloop_plugins.models.vocabulary import fit_padding, fit_vocabulary, longest_text, set_pad_id
from fastloop_plugins.models.warm_start import load_weights, weight_files
from fastloop_plugins.rows.column import Column
from fastloop_plugins.text.generation import drop_void_settings, saves_void_settings
from fastloop_plugins.text.model_options import ModelOptions
from fastloop_plugins.text.new_tokens import NewTokens
from fastloop_plugins.text.positions import check_known_length, check_length
from fastloop_plugins.text.special_tokens import save_generation_config, stop_at_end_tokens
from fastloop_plugins.text.tokenizers import (
    BackendState,
    TrainedTokenizer,
    check_longest,
    check_saved_tokenizer,
    check_unknown_word,
    refuse_damaged_tokenizer,
    save_sentencepiece,
    train_tokenizer,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop_plugins.text.batches import Width
    from fastloop_plugins.text.options import DataOptions

logger = logging.getLogger("fastloop")


class TextModel:
    """The ``model`` section of a recipe. The constructor checks it.

    Args:
        key: The place of the section in the recipe, for messages.

    Attributes:
        tokenizer: None until ``load_tokenizer`` or ``finish_tokenizer``.
        problem_type: Transformers' name of a classifier's problem; None: the checkpoint's.
        new: Weights of the built model that have random values, because its checkpoint lacks them: a value of
            ``run.new_weights``.
        new_tokens: The tokens that the recipe adds. ``new_tokens.ids`` are those that the checkpoint was not trained
            with.

    Raises:
        RecipeError: An option is invalid.
    """

    head: ClassVar[str] = CLASSIFIER  # how the names of the task's classes in transformers end
    label_key: ClassVar[str] = "data.label"
    section: ClassVar[type[ModelOptions]] = ModelOptions

    checkpoint_pad_id: int | None  # of the configuration before the run changes it; from load_tokenizer on
    backend_state: BackendState  # of the tokenizer before the run uses it

    def __init__(self, recipe: Recipe, classify: bool, key: str = "model") -> None:
        self.recipe = recipe
        self.key = key
        self.where = f"{recipe.where}: {key}"
        self.classify = classify
        self.new: set[str] = set()
        self.options = parse(self.section, recipe.model, self.where)
        if recipe.inference is not None:
            self._use_exported_model(str(recipe.inference.model))
        self.problem_type: str | None = "single_label_classification"
        self.tokenizer: Any = None
        self.config: Any = None
        self._width: Width | None = None
        check_model_source(self.options, self.where, "distilbert")
        check_revision(self.options, recipe, self.where)
        self.adapter = self._use_base_of_adapter()
        self.tokenizer_key = "tokenizer" if isinstance(self.options.tokenizer, str) else "name"
        self.new_tokens = NewTokens(self.options, self.options.name, self.tokenizer_key, key, self.where)
        self.trained = self._read_trained_tokenizer()
        check_code(self.options, self.where)
        for named in ("name", "tokenizer"):
            name = getattr(self.options, named)
            if isinstance(name, str):
                self._check_name(named, name)
        config = self.options.config
        if config is None:
            config = read_json_object(recipe.find(self.options.name or "") / "config.json")
        self._check_architecture(config)
        if key == "model" and recipe.inference is None:
            check_known_length(recipe, self.options.config, self.options.name, self.options.tokenizer, self.where)
        weight_files(recipe)

    def _use_exported_model(self, folder: str) -> None:
        """In inference, use the exported model and its tokenizer, which has the new tokens."""
        options = self.options
        options.name = folder
        options.config = None
        options.tokenizer = None
        options.tokens = None
        options.special_tokens = None
        options.resize_embeddings = False
        options.revision = None

    def _read_trained_tokenizer(self) -> TrainedTokenizer | None:
        """The tokenizer to train on the texts of the run; None: the recipe or its model names one.

        Raises:
            RecipeError: The recipe has options of a tokenizer to train, and they are wrong or do not fit the model.
        """
        tokenizer = self.options.tokenizer
        where = f"{self.where}.tokenizer"
        if self.options.config is None:
            if isinstance(tokenizer, dict):
                raise RecipeError(
                    "a tokenizer is trained only with model.config. A pretrained model has its own.",
                    code="unknown-option",
                    place=where,
                )
            return None
        if isinstance(tokenizer, str):
            return None
        options = tokenizer or {}
        trained = parse(TrainedTokenizer, options, where)
        if trained.kind == "bpe" and trained.vocab_size < 300:
            raise RecipeError(
                code="out-of-range",
                place=f"{where}.vocab_size",
                found=str(trained.vocab_size),
                expected="300 or more for bpe",
            )
        self._check_units(trained.kind, options)
        return trained

    def _use_base_of_adapter(self) -> Adapter | None:
        """If ``model.name`` is the folder of an adapter, replace it by the adapter's base model, and use the tokenizer
        of the folder. Returns the adapter."""
        if self.options.name is None:
            return None
        adapter = find_adapter(self.recipe, self.options.name, f"{self.where}.name")
        if adapter is None:
            return None
        self.options.name = adapter.base
        self.options.revision = adapter.revision
        if self.options.tokenizer is None and (adapter.folder / "tokenizer_config.json").is_file():
            self.options.tokenizer = str(adapter.folder)
        return adapter

    def _check_units(self, kind: str, options: Mapping[str, Any]) -> None:
        """Raise an error for options of the recipe that a tokenizer of characters or bytes cannot have."""
        if kind in ("char", "byte") and "vocab_size" in options:
            has = "256 bytes" if kind == "byte" else "all characters of the training texts"
            raise RecipeError(
                f"a tokenizer of kind {kind} has {has}.",
                code="unknown-option",
                place=f"{self.where}.tokenizer.vocab_size",
                remedy="Remove vocab_size.",
            )
        if kind == "char" and self.recipe.data.get("streaming"):
            raise RecipeError(
                "char needs all characters of the training texts, and data.streaming reads only the first rows before "
                "training.",
                code="unsupported-tokenizer",
                place=f"{self.where}.tokenizer.kind",
                remedy="Use kind: byte, or the tokenizer of another run: model.tokenizer=RUN/model.",
            )

    def _check_architecture(self, config: dict[str, Any]) -> None:
        """Raise an error for an architecture that cannot do the task."""
        key = "name" if self.options.config is None else "config"
        kind = config.get("model_type")
        if not isinstance(kind, str):
            return
        problem = unsupported(kind, config, self.classify, self.trained is not None)
        if problem:
            raise RecipeError(problem, code="invalid-value", place=f"{self.where}.{key}")

    def _check_name(self, key: str, name: str) -> None:
        """Raise an error if ``model.name`` or ``model.tokenizer`` is a folder without the files that it needs.

        Args:
            key: The option, ``name`` or ``tokenizer``.
            name: Its value.
        """
        path = self.recipe.find(name)
        files = ("config.json",) if key == "name" else ("tokenizer.json", "tokenizer_config.json")
        check_name(f"{self.where}.{key}", name, path, files)
        for index in path.glob("*.index.json"):
            check_index(f"{self.where}.{key}", index)
        if key == "name":
            check_one_export(f"{self.where}.{key}", path)

    # -- configuration and tokenizer: before the data, so that a missing model is found early --------------------------

    def load_tokenizer(self, max_length: int) -> None:
        """Load the configuration, and the tokenizer unless it is to be trained.

        Raises:
            RecipeError: One of them is missing or invalid, or the model cannot take ``data.max_length`` tokens.
        """
        # set explicitly, so that forked workers cause no warning
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.config = self._load_configuration()
        if self.trained is None:
            self.tokenizer = self._pretrained_tokenizer()
        self.checkpoint_pad_id = getattr(self.config, "pad_token_id", None)
        taken = getattr(self.tokenizer, "model_max_length", None)
        check_length(self.recipe, max_length, self.config, taken, self.options.name or "the model")
        if self.trained is None:
            self._add_new_tokens()  # first, because a chat template may end its answers with one
            self._ensure_pad_token()

    def _load_configuration(self) -> Any:
        """The configuration that the recipe gives, or that of the pretrained model or of the adapter's base."""
        from transformers import AutoConfig

        if self.options.config is not None:
            return config_from_scratch(self.options.config, f"{self.where}.config")
        if self.adapter is not None and self.adapter.base_config is not None:
            loader: Any = AutoConfig
            if self.options.trust_remote_code:  # the class is in the code that ships with the base model
                loader = type(self._pretrained(AutoConfig, "name"))
            config = loader.from_pretrained(str(self.adapter.base_config))
        else:
            config = self._pretrained(AutoConfig, "name")
        self._check_architecture(config.to_dict())  # for a model of the hub, only known now
        layers = getattr(config, "num_hidden_layers", 0)
        if layers > LAYERS:
            raise RecipeError(
                f"{self.options.name} claims {layers} layers, expected at most {LAYERS}.",
                code="too-large",
                place=f"{self.where}.name",
            )
        return config

    def _pretrained_tokenizer(self, **arguments: Any) -> Any:
        """The tokenizer that the recipe names, or the model's own."""
        from transformers import AutoTokenizer

        source = self.tokenizer_key
        place = f"{self.where}.{source}"
        folder = self.recipe.find(getattr(self.options, source))
        try:
            tokenizer = self._pretrained(AutoTokenizer, source, **arguments)
        except RecipeError as error:
            refuse_damaged_tokenizer(folder, error.__cause__, place)
            raise
        check_longest(tokenizer, folder, place)
        check_unknown_word(tokenizer, folder, place)
        # transformers makes an empty one if there are no files
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise RecipeError(
                f"{getattr(self.options, source)} holds no tokenizer: every word would be unknown.",
                code="no-tokenizer",
                place=place,
                remedy="Put its files there, or name another: model.tokenizer=FOLDER.",
            )
        self.backend_state = BackendState(tokenizer)
        return tokenizer

    def _add_new_tokens(self) -> None:
        """Add the recipe's new tokens to the tokenizer.

        Raises:
            RecipeError: The tokenizer has tokens without a row in the pretrained model, and the recipe adds no rows.
        """
        if self.recipe.inference is None:  # else the exported tokenizer has them, and the exported model their rows
            self.new_tokens.add(self.tokenizer, self.config)

    def _pretrained(self, auto: Any, key: str, **arguments: Any) -> Any:
        """Call ``from_pretrained`` with a folder or a hub name."""
        name = getattr(self.options, key)
        folder = self.recipe.find(name)
        is_local = folder.is_dir()
        has_revision = not is_local and name == (self.options.name or name)  # not a tokenizer of another repository
        instead = FROM_SCRATCH if key == "name" else "model.tokenizer=FOLDER"
        with explaining(f"{self.where}.{key}", name, folder, instead):
            return auto.from_pretrained(
                str(folder.resolve()) if is_local else name,
                revision=self.options.revision if has_revision else None,
                trust_remote_code=self.options.trust_remote_code,
                local_files_only=is_local or offline(),
                **arguments,
            )

    def finish_tokenizer(self, texts: Any, types: bool = False) -> None:
        """Train the tokenizer, if the recipe requests one, and check one that is not the model's own.

        Args:
            texts: An iterable of texts.
            types: Whether a trained one returns token types by default.
        """
        texts = texts if isinstance(texts, Sequence) else Column(texts)
        if self.trained is not None:
            self.tokenizer = train_tokenizer(self.trained, texts, self.classify, types)
            logger.info(
                "tokenizer: %s, %d tokens, made from the training texts", self.trained.kind, len(self.tokenizer)
            )
            self.backend_state = BackendState(self.tokenizer)
            self._ensure_pad_token()
            self._add_new_tokens()
        if self.options.tokenizer is not None or self.trained is not None:
            check_saved_tokenizer(self.tokenizer, self.config, texts, self.where)

    def _ensure_pad_token(self) -> None:
        """Set a pad token if there is none. Raises an error if there is no candidate, or, for a language model, no end
        token."""
        tokenizer = self.tokenizer
        end = tokenizer.eos_token or tokenizer.sep_token
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = end or tokenizer.unk_token or None
        lacks_end = not self.classify and not end
        if tokenizer.pad_token_id is None or lacks_end:
            raise RecipeError(
                f"it has no token that {'pads' if self.classify else 'ends a text'}.",
                code="missing-token",
                place=f"{self.where}.tokenizer",
                remedy="Use another.",
            )

    def fingerprint(self) -> str:
        """A hash of the tokenizer's files and library versions. Call it before the first use, which changes the
        tokenizer's settings."""
        import tokenizers
        import transformers

        from fastloop_plugins._cache import digest

        with tempfile.TemporaryDirectory() as folder, quiet():
            self.tokenizer.save_pretrained(folder)
            parts: list[str | bytes] = [transformers.__version__, tokenizers.__version__]
            for path in sorted(Path(folder).iterdir()):
                if path.is_file():
                    parts += [path.name.encode(), path.read_bytes()]
        return digest(parts)

    def width(self, run: Run, options: DataOptions) -> Width:
        """The width of batches. The collators of all splits share it, because ``check_padding`` changes its side."""
        if self._width is None:
            from fastloop_plugins.text.batches import Width

            self._width = Width(options.max_length, run.settings.pad_to_multiple_of, options.padding == "max_length")
        return self._width

    # -- the model -----------------------------------------------------------------------------------------------------

    def class_names(self) -> list[str]:
        """The classes of a pretrained model in the order of its ids. Call it after ``load_tokenizer``."""
        return [str(self.config.id2label[index]) for index in range(len(self.config.id2label))]

    def order_labels(self, classes: list[str]) -> LabelOrder:
        """The classes, in the checkpoint's order if their names match. Call it after ``load_tokenizer`` and before
        ``build``.

        Args:
            classes: The data's class names, in the order of its ids.
        """
        if self.options.config is not None:
            return LabelOrder(classes, list(range(len(classes))), keeps_head=True)
        return label_order(classes, self.config, f"model.name={self.options.name}", self.head, self.label_key)

    def build(self, auto: Any, labels: LabelOrder | None = None) -> Any:
        """Build the model with initial or pretrained weights, or those of ``model.weights``, in float32.

        ``generate`` of a causal language model stops at the end tokens of texts and answers.

        Args:
            auto: Transformers' Auto class of the task.
            labels: The classes of a classifier. If the checkpoint's head is for other classes, it is reinitialized.

        Raises:
            RecipeError: The architecture cannot do the task, or the configuration or ``model.weights`` is invalid.
        """
        if self.adapter is not None and labels is not None and self.recipe.inference is None:
            check_classes(self.adapter, labels, f"{self.where}.name")
        set_pad_id(self.config, self.tokenizer.pad_token_id)
        model = self._build(auto, labels)
        generation = deepcopy(getattr(model, "generation_config", None))
        fit_padding(model, self.tokenizer, self.checkpoint_pad_id, self.options.name, self.key, self.where)
        self.new_tokens.add_rows(model, self.tokenizer, self.recipe.train.seed)
        size = longest_text(model)
        if size is not None and size < self.tokenizer.model_max_length:  # transformers' own number is huge
            self.tokenizer.model_max_length = size
            self.tokenizer.init_kwargs["model_max_length"] = size
        self.new = load_weights(model, self.recipe, self.new if self.options.config is None else None)
        if self.adapter is not None and self.recipe.inference is None and not continues(self.recipe):
            self.new -= merge_adapter(model, self.adapter.folder, f"{self.where}.name")
        if auto.__name__ == "AutoModelForCausalLM":
            stop_at_end_tokens(model, self.tokenizer)
        if generation is not None:
            is_changed = model.generation_config != generation
            if is_changed or not saves_void_settings():
                drop_void_settings(model.generation_config)
        return model

    def _build(self, auto: Any, labels: LabelOrder | None) -> Any:
        """The model before padding and new tokens are fitted: pretrained, or with initial weights."""
        import torch

        checkpoint_names: dict[int, str] = {}
        if labels is not None:
            checkpoint_names = name_classes(self.config, labels.names)
            self.config.problem_type = self.problem_type  # a checkpoint may have another one, and pipelines read it
        # on meta, the weights come from another process
        if self.options.config is None and torch.get_default_device().type != "meta":
            return self._build_pretrained(auto, labels, checkpoint_names)
        if self.options.config is not None:
            fit_vocabulary(self.config, self.tokenizer, self.options.config, f"{self.where}.config")
        return self._build_from_configuration(auto)

    def _build_pretrained(self, auto: Any, labels: LabelOrder | None, checkpoint_names: Mapping[int, str]) -> Any:
        """The model with the weights of its checkpoint. Sets ``new``.

        Args:
            checkpoint_names: Id -> the name that the checkpoint gives that class.
        """
        import torch

        with marking_undefined() if self.options.trust_remote_code else nullcontext():
            model, notes = self._pretrained(
                auto,
                "name",
                config=self.config,
                use_safetensors=True,  # the alternative is a pickle
                dtype=torch.float32,
                attn_implementation=self.options.attn_implementation,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        missing = set(notes["missing_keys"])
        self.new = new_weights(notes)
        if self.options.trust_remote_code:
            define_values(model, self.new, self.options.name or "")
        if self.adapter is None:  # an adapter has the weights that its base model lacks
            check_new(model, self.options.name or "", notes, f"{self.where}.name")
        if labels is not None and not labels.keeps_head:
            self.new |= start_head_fresh(model, missing, checkpoint_names, labels, f"{self.where}.name", self.head)
        return model

    def _build_from_configuration(self, auto: Any) -> Any:
        """The model with initial weights, or on meta without any."""
        config = self.config
        if self.new_tokens.rows is not None:  # on meta: the weights that come from another process have the new rows
            config = deepcopy(config)
            config.get_text_config().vocab_size = self.new_tokens.rows
        arguments: dict[str, Any] = {}
        if self.options.attn_implementation:
            arguments["attn_implementation"] = self.options.attn_implementation
        return build_from_config(auto, config, f"{self.where}.config", **arguments)

    def weights(self, run: Run) -> dict[str, Tensor]:
        """The weights to export. Every process must call it."""
        return run.full_state_dict()

    def export(self, run: Run, folder: Path) -> Path:
        """Write model and tokenizer in the form that ``from_pretrained`` reads."""
        from fastloop.export.model import save_model

        with quiet():
            save_model(run, folder, self.weights(run))
            if run.is_main:
                self.save_tokenizer(folder)
                save_generation_config(run.unwrap_model(), folder)
        return folder

    def save_tokenizer(self, folder: Path | str) -> None:
        """Write the tokenizer as it was before the run's texts were cut to ``data.max_length``."""
        self.backend_state.restore(self.tokenizer)
        self.tokenizer.save_pretrained(folder)
        save_sentencepiece(self.tokenizer, Path(folder))

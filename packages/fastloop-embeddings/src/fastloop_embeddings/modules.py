"""The modules of a Sentence Transformers folder: they turn the vectors of tokens into the vector of a text.

    modules.json                       the modules in order: Transformer, Pooling, and then any of Dense and Normalize
    1_Pooling/config.json              which tokens count
    2_Dense/config.json                and its weights, model.safetensors
    config_sentence_transformers.json  prompts
    sentence_bert_config.json          options of the Transformer

A model without ``modules.json`` gets its modules from the options of the recipe.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError
from fastloop_plugins.toolkit import clause

if TYPE_CHECKING:
    from fastloop_embeddings.embedding import Embedding

logger = logging.getLogger("fastloop")

SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
"""Modules that training and export keep."""
POOLINGS = {"first": "cls", "mean": "mean", "last": "lasttoken"}
"""Option ``pooling`` -> the pooling mode of Sentence Transformers."""
LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of a pooling's configuration before version 5.5 -> mode, in the order in which several modes are joined."""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of the prompt of documents. The first that a model has is used."""
HARMLESS = ("max_seq_length", "do_lower_case", "unpad_inputs", "backend")
"""Keys of the Transformer's configuration that are kept, or change no vector."""
OF_VECTORS = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "method_output_name": "last_hidden_state",
}
"""Options of a Transformer whose output are the states of tokens."""
OF_SCORES = {
    "transformer_task": "sequence-classification",
    "module_output_name": "scores",
    "method_output_name": "logits",
}
"""Options of a Transformer whose output are the scores of pairs."""
WEIGHTS = "model.safetensors"
CONFIG = "config_sentence_transformers.json"


@dataclass(kw_only=True)
class ModuleEntry:
    """An entry of ``modules.json``.

    Attributes:
        kind: One of ``SUPPORTED``.
        path: Its folder; empty for that of the model.
        type: The class in Sentence Transformers.
        config: Its ``config.json``.
    """

    kind: str
    path: str
    type: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SentenceModules:
    """How Sentence Transformers computes the vector of a text.

    Attributes:
        folder: It has the files; None: the modules come from the options of the recipe.
        modules: In order. The first two are a Transformer and a Pooling.
        prompts: Name -> text before each text.
        default_prompt: The name of the prompt that ``encode`` adds; None: none.
        similarity: The function that ``SentenceTransformer.similarity`` computes; None: its default.
        lowercase: Whether texts are lowercased before they are tokenized.
    """

    folder: Path | None = None
    modules: list[ModuleEntry]
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str | None = "cosine"
    lowercase: bool = False

    @property
    def pooling(self) -> dict[str, Any]:
        """The configuration of the module Pooling."""
        return self.modules[1].config

    @property
    def stages(self) -> list[ModuleEntry]:
        """The modules after the pooling: Dense and Normalize."""
        return self.modules[2:]

    @property
    def normalizes(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.stages) and self.stages[-1].kind == "Normalize"

    def pooling_modes(self) -> tuple[str, ...]:
        """The modes of the pooling. The vectors of several modes are joined."""
        modes = self.pooling.get("pooling_mode")
        if isinstance(modes, str):
            return (modes,)
        if modes is not None:
            return tuple(modes)
        return tuple(mode for key, mode in LEGACY_MODES.items() if self.pooling.get(key)) or ("mean",)

    def find_prompts(self) -> tuple[str, str]:
        """The prompts of queries and of documents. A model that has neither uses its default prompt for both."""
        query = self.prompts.get("query", "")
        document = next((self.prompts[name] for name in DOCUMENT_PROMPTS if self.prompts.get(name)), "")
        if not query and not document and self.default_prompt is not None:
            default = self.prompts.get(self.default_prompt, "")
            return default, default
        return query, document


def find_folder(recipe: Any, model: Any, download: bool) -> Path | None:
    """The folder with the files of ``model.name``; None for a model from scratch, or one that is not there.

    Args:
        model: The options of the section ``model``.
        download: Whether to download the files of a model on the hub.
    """
    if model.name is None:
        return None
    local = recipe.find(model.name)
    if local.is_dir() or not download:
        return local if local.is_dir() else None
    from huggingface_hub import file_exists, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    wanted = ["modules.json", "sentence_*_config.json", CONFIG, "config.json", "*/config.json"]
    options = {"revision": model.revision, "allow_patterns": [*wanted, f"*/{WEIGHTS}"]}
    try:
        folder = Path(snapshot_download(model.name, **options))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError):
        return None  # fastloop reports that the model is missing
    except HfHubHTTPError as error:
        raise RecipeError(
            f"{model.name} cannot be read from the hub: {clause(error)}.",
            code="file-unreadable",
            place=f"{recipe.where}: model.name",
        ) from None
    if not (folder / "modules.json").is_file():
        try:
            file_exists(model.name, "modules.json", revision=model.revision)
        except Exception as error:  # libraries of the hub raise errors of many types without a network
            logger.warning(
                Problem(
                    f"the cache of {model.name} has no modules.json, and the hub cannot be asked for it "
                    f"({type(error).__name__}). If the model is one of Sentence Transformers, its pooling, "
                    "Dense and prompts are not used.",
                    code="hub-offline",
                    place="model.name",
                )
            )
    return folder


def read_json(path: Path, where: str) -> dict[str, Any]:
    """The object in a file; empty if there is no file.

    Raises:
        RecipeError: It holds no object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(
            f"cannot be read: {clause(error)}.", code="file-unreadable", place=f"{where}: {path}"
        ) from None
    if not isinstance(content, dict):
        raise RecipeError(
            code="wrong-type", place=f"{where}: {path}", found=str(type(content).__name__), expected="an object"
        )
    return content


def list_modules(folder: Path, where: str) -> list[ModuleEntry]:
    """The entries of ``modules.json``; empty if there is no such file.

    Raises:
        RecipeError: An entry is none of a module that is supported.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    try:
        entries = [(str(entry["path"]), str(entry["type"])) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(
            code="wrong-type", place=f"{where}: {path}", expected=f"a list of objects with path and type: {error!r}"
        ) from None
    modules = []
    for subfolder, class_name in entries:
        kind = class_name.rpartition(".")[2]
        if not class_name.startswith("sentence_transformers.") or kind not in SUPPORTED:
            raise RecipeError(
                code="unsupported-model",
                place=f"{where}: {path}",
                found=f"the module {class_name}, which cannot be trained here",
                expected=", ".join(SUPPORTED),
                remedy="Use another base, or one without modules.json.",
            )
        if Path(subfolder).name != subfolder:
            raise RecipeError(
                code="wrong-path",
                place=f"{where}: {path}",
                found=f"the path {subfolder!r}",
                expected="a folder beside the file",
            )
        config = {} if kind == "Transformer" else read_json(folder / subfolder / "config.json", where)
        modules.append(ModuleEntry(kind=kind, path=subfolder, type=class_name, config=config))
    return modules


def check_transformer(config: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Raise an error for options of the module Transformer that would give other vectors than a plain model.

    Args:
        config: ``sentence_bert_config.json``.
        expected: ``transformer_task``, ``module_output_name`` and ``method_output_name``.
    """
    required = {"method": "forward", **expected}
    named = {"method": "forward"}
    for name in expected:
        if name in config:
            named[name] = config[name]
    named |= config.get("modality_config", {}).get("text", {})
    for key, value in named.items():
        wanted = required.get(key)
        if value != wanted:
            raise RecipeError(
                code="unsupported-model",
                place=f"{where}: {key}",
                found=repr(value),
                expected=repr(wanted),
                remedy="Use another base.",
            )
    for key, value in config.items():
        ignored = key in (*HARMLESS, *expected, "modality_config") or key.endswith(("_args", "_kwargs"))
        if value and (not ignored or key == "processing_kwargs"):
            raise RecipeError(
                f"found {value!r}, which is not supported here.",
                code="unsupported-model",
                place=f"{where}: {key}",
                remedy="Use another base.",
            )


def read_transformer(folder: Path, expected: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The configuration of the module Transformer, checked like ``check_transformer``."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        config = read_json(path, where)
        check_transformer(config, expected, f"{where}: {path}")
        return config
    return {}


def read_modules(folder: Path, where: str) -> SentenceModules | None:
    """The modules of a Sentence Transformers folder; None if it has no ``modules.json``, or is of a model of another
    kind, such as a cross-encoder.

    Raises:
        RecipeError: A module or an option of one is not supported.
    """
    config = read_json(folder / CONFIG, where)
    if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        return None
    modules = list_modules(folder, where)
    if not modules:
        return None
    kinds = [module.kind for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} & {"Transformer", "Pooling"} or modules[0].path:
        raise RecipeError(
            code="unsupported-model",
            place=f"{where}: {folder / 'modules.json'}",
            found=", ".join(kinds),
            expected="a Transformer in the folder itself, a Pooling, and then any of Dense and Normalize",
        )
    transformer = read_transformer(folder, OF_VECTORS, where)
    modules_of_folder = SentenceModules(
        folder=folder,
        modules=modules,
        prompts={name: text or "" for name, text in config.get("prompts", {}).items()},
        default_prompt=config.get("default_prompt_name"),
        similarity=config.get("similarity_fn_name"),
        lowercase=bool(transformer.get("do_lower_case")),
    )
    for problem in problems(modules_of_folder):
        raise RecipeError(f"{problem}.", code="unsupported-model", place=where, remedy="Use another base.")
    return modules_of_folder


def problems(modules: SentenceModules) -> Iterator[str]:
    """Options of modules that are not supported, and files that are missing."""
    unknown = [mode for mode in modules.pooling_modes() if mode not in LEGACY_MODES.values()]
    if unknown:
        yield (
            f"{modules.folder}/{modules.modules[1].path}/config.json: pooling_mode: found {unknown[0]!r}, expected one "
            f"of {', '.join(LEGACY_MODES.values())}"
        )
    for module in modules.stages:
        place = f"{modules.folder}/{module.path}"
        for key in ("module_input_name", "module_output_name"):
            if module.config.get(key) not in (None, "sentence_embedding"):
                yield f"{place}/config.json: {key}: found {module.config[key]!r}, expected 'sentence_embedding'"
        if module.kind == "Dense":
            if module.config.get("use_residual"):
                yield f"{place}/config.json: use_residual: found True, which is not supported here"
            if not {"in_features", "out_features"} <= {*module.config}:
                yield f"{place}/config.json: in_features or out_features is missing"
            if not Path(place, WEIGHTS).is_file():
                yield (
                    f"{place}/{WEIGHTS}: missing. Sentence Transformers writes it: "
                    "SentenceTransformer(FOLDER).save(OTHER)"
                )


def read_score_activation(folder: Path, where: str) -> str | None:
    """The name of the activation function of a cross-encoder's scores; None: the folder names none, or is of an
    encoder.

    Raises:
        RecipeError: The folder has modules or prompts that are not supported.
    """
    path = folder / CONFIG
    own = read_json(path, where)
    if own.get("model_type") == "CrossEncoder":
        kinds = [module.kind for module in list_modules(folder, where)]
        if kinds != ["Transformer"]:
            raise RecipeError(
                code="unsupported-model",
                place=f"{where}: {folder / 'modules.json'}",
                found=", ".join(kinds),
                expected="a Transformer alone, whose own head gives the scores",
                remedy="Use another base, or one without modules.json.",
            )
        read_transformer(folder, OF_SCORES, where)
        if any(own.get("prompts", {}).values()):
            raise RecipeError(
                "pairs with prompts are not supported here.",
                code="unsupported-model",
                place=f"{where}: {path}: prompts",
                remedy="Use another base.",
            )
        if own.get("activation_fn") is not None:
            return str(own["activation_fn"])
    config = read_json(folder / "config.json", where)
    named = config.get("sentence_transformers") or {}
    name = named.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    return None if name is None else str(name)


def make_modules(options: Embedding) -> SentenceModules:
    """The modules of a model that is not of Sentence Transformers."""
    mode = POOLINGS[options.pooling or "mean"]
    pooling = {key: name == mode for key, name in LEGACY_MODES.items() if name in POOLINGS.values()}
    kinds = ["Transformer", "Pooling"]
    if options.normalize is not False:
        kinds.append("Normalize")
    modules = []
    for index, kind in enumerate(kinds):
        path = f"{index}_{kind}" if index else ""
        modules.append(ModuleEntry(kind=kind, path=path, type=f"sentence_transformers.models.{kind}"))
    modules[1].config = pooling
    return SentenceModules(modules=modules)


def check_options(options: Embedding, base: SentenceModules, where: str) -> None:
    """Raise an error for an option of the recipe that contradicts the modules of the base.

    Args:
        where: The place of the options.
    """
    modes = base.pooling_modes()
    query, document = base.find_prompts()
    contradictions: list[tuple[str, Any, str]] = []  # option, its value, and the opposite in the base
    if options.pooling is not None and (POOLINGS[options.pooling],) != modes:
        contradictions.append(("pooling", options.pooling, f"the pooling {', '.join(modes)}"))
    if options.normalize is not None and options.normalize != base.normalizes:
        has = "a module Normalize" if base.normalizes else "no module Normalize at the end"
        contradictions.append(("normalize", options.normalize, has))
    if query and options.query_prompt not in (None, query):
        contradictions.append(("query_prompt", options.query_prompt, f"the prompt {query!r}"))
    if document and options.document_prompt not in (None, document):
        contradictions.append(("document_prompt", options.document_prompt, f"the prompt {document!r}"))
    for key, value, has in contradictions:
        raise RecipeError(
            f"found {value!r}, and {base.folder} has {has}.",
            code="conflicting-values",
            place=f"{where}.{key}",
            remedy="Remove the option, or use a base without modules.json.",
        )
    prompts = (options.query_prompt or query) + (options.document_prompt or document)
    if prompts and base.pooling.get("include_prompt") is False:
        raise RecipeError(
            f"{base.folder}/{base.modules[1].path}/config.json has include_prompt: false, so vectors leave out the "
            "tokens of prompts. This is not supported here.",
            code="unsupported-model",
            place=where,
            remedy="Use another base.",
        )

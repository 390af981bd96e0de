"""Configurations of transformers, and access to the model hub: whether it can be reached, and its silent libraries."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Problem, RecipeError
from fastloop.errors import did_you_mean
from fastloop.problem import clause, counted, typed_clause
from fastloop.recipe.paths import nothing_at
from fastloop.runtime.files import read_json_object
from fastloop.runtime.platform_support import host_memory
from fastloop_plugins._names import list_names

if TYPE_CHECKING:
    from torch import nn

    from fastloop.recipe import Recipe

logger = logging.getLogger("fastloop")

FROM_SCRATCH = "model.name=FOLDER, or train from scratch with model.config"
"""Advice for a pretrained model that cannot be loaded."""
FAILURES = (
    OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ImportError, RuntimeError, MemoryError,
)  # fmt: skip
"""Errors of the libraries for names, arguments and files that they cannot use."""
IN_A_LAYER = re.compile(r"\.\d+\.")
"""Finds the number of a layer in the name of a weight: ``encoder.layer.0.output.dense.bias``."""
MATRICES = 64
"""Weights of a layer at most, in products of the two largest numbers of a configuration."""
LAYERS = 10_000
"""Layers of a model at most: each takes memory before its weights are read or estimated."""
RENAME = "Name them as save_pretrained of transformers does, or use another model."
"""Advice for weights with other names."""


def is_hub_name(name: str) -> bool:
    """Whether a name could exist on the hub: ``name`` or ``owner/name``."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None and not name.startswith(".")


def check_model_source(options: Any, where: str, example: str) -> None:
    """Raise an error unless the section ``model`` has one of ``name`` and ``config``, and the latter a ``model_type``,
    such as ``example``."""
    if (options.name is None) == (options.config is None):
        given = "neither" if options.name is None else "both"
        raise RecipeError(
            code="exclusive-options",
            place=where,
            found=str(given),
            expected="one of: name (pretrained), config (from scratch)",
        )
    if options.config is not None and not isinstance(options.config.get("model_type"), str):
        raise RecipeError(
            "missing.",
            code="missing-value",
            place=f"{where}.config.model_type",
            expected=f"an architecture's name, such as {example}",
        )


def check_revision(options: Any, recipe: Recipe, where: str) -> None:
    """Raise an error if the section ``model`` has a ``revision``, and what it is of does not come from the hub."""
    if options.revision is None:
        return
    source = options.name or options.tokenizer
    if not isinstance(source, str):
        problem = "it is for a model or a tokenizer of the hub, and the recipe names none."
    elif recipe.find(source).is_dir():
        problem = f"it is for a model or a tokenizer of the hub, and {source} is a folder."
    else:
        return
    raise RecipeError(problem, code="unknown-option", place=f"{where}.revision", remedy="Remove it.")


def check_name(where: str, name: str, path: Path, wanted: Sequence[str] = ("config.json",)) -> None:
    """Raise an error for the name of a pretrained model that is neither a folder with one of the files ``wanted``, nor
    could be on the hub."""
    if path.is_dir():
        if not any((path / file).is_file() for file in wanted):
            raise RecipeError(
                f"{path} holds no {' or '.join(wanted)}.",
                code="file-missing",
                place=where,
                expected="a folder that save_pretrained wrote",
            )
    else:
        check_hub_name(name, path, f"{where}: {name}")


def check_hub_name(name: str, path: Path, place: str) -> None:
    """Raise an error for a name that is no folder at ``path``, and that the hub could not have. A symbolic link that
    points nowhere is an error, too: its name was not meant for the hub."""
    if path.is_dir():
        return
    if path.is_symlink():
        raise RecipeError(f"{nothing_at(path, 'folder')}.", code="file-missing", place=place)
    if path.exists() or not is_hub_name(name):
        problem = nothing_at(path, "folder")
        raise RecipeError(f"{problem}, and not a name that the hub could have.", code="file-missing", place=place)


def check_index(where: str, index: Path) -> None:
    """Raise an error if an index of weights names files outside of its folder."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        outside = [name for name in names if name != Path(name).name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(
            f"not an index of weights: {typed_clause(error)}.", code="wrong-format", place=f"{where}: {index}"
        ) from None
    if outside:
        raise RecipeError(
            f"names {outside[0]!r}, which is not in its folder.", code="unsafe-link", place=f"{where}: {index}"
        )


def check_one_export(where: str, folder: Path) -> None:
    """Raise an error for a folder with the weights of several exports, of which libraries read an older one: a file
    before shards, and an adapter before a whole model."""
    exports = []
    if (folder / "model.safetensors").is_file():
        exports.append("model.safetensors")
    index = folder / "model.safetensors.index.json"
    shards = read_json_object(index).get("weight_map")
    if isinstance(shards, dict) and set(map(str, shards.values())) - {"model.safetensors"}:
        exports.append(index.name)
    if (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        exports.append("adapter_config.json")
    if len(exports) > 1:
        raise RecipeError(
            f"{folder} holds several exports: {' and '.join(exports)}. It is not clear which one is meant.",
            code="several-exports",
            place=where,
            remedy="Remove the files of the others.",
        )


@cache
def offline() -> bool:
    """Whether the hub cannot be reached, or HF_HUB_OFFLINE is set. The hub's libraries then use only their local cache.

    Otherwise they would retry each file, for most of a minute.
    """
    import datasets.config
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=5)
            return False
        except Exception:  # any error means that no answer came
            constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return True


def explain(where: str, name: str, folder: Path, error: BaseException, instead: str) -> str:
    """The error message for something that could not be loaded from a folder or from the hub."""
    reason = clause(error)
    if folder.is_dir():
        return f"{where}: {folder} cannot be loaded: {reason}."
    if not offline():
        return f"{where}: {name!r} is not a local folder, and cannot be loaded from the hub: {reason}."
    from huggingface_hub import constants

    return (
        f"{where}: {name!r} is not a local folder, and is not in the hub's local cache; the hub ({constants.ENDPOINT}) "
        f"cannot be reached from here, or HF_HUB_OFFLINE is set. Use a local copy: {instead}. Or set HF_HOME to a "
        "cache that has it, or HF_ENDPOINT to a mirror that can be reached."
    )


@contextmanager
def explaining(where: str, name: str, folder: Path, instead: str) -> Iterator[None]:
    """Silence the libraries inside this context, and raise their errors with the message of ``explain``."""
    from safetensors import SafetensorError

    try:
        with quiet():
            yield
    except Exception as error:
        of_tokenizers = type(error) is Exception  # the library tokenizers raises no class of its own
        if not of_tokenizers and not isinstance(error, (*FAILURES, SafetensorError)):
            raise
        raise RecipeError(explain(where, name, folder, error, instead), code="file-unreadable") from error


def log_new(model: str, names: Iterable[str]) -> None:
    """Log the names of the weights that a pretrained model does not have."""
    listed = sorted(names)
    if listed:
        logger.info("not in %s, so initialized at random: %s", model, list_names(listed, 4))


def new_weights(notes: Mapping[str, Any]) -> set[str]:
    """The names of the weights that the files of a pretrained model lack, or have in another shape.

    Args:
        notes: ``output_loading_info`` of ``from_pretrained``.
    """
    new = set(notes["missing_keys"])
    for name, *_ in notes["mismatched_keys"]:
        new.add(name)
    return new


def check_new(model: Any, name: str, notes: Mapping[str, Any], place: str) -> None:
    """Log ``new_weights``. A new head or pooler is usual, and new weights of layers are a warning: the files name them
    in another way.

    Args:
        model: As ``from_pretrained`` of transformers returns it.
        name: The pretrained model, for messages.
        notes: As in ``new_weights``.
        place: The recipe and the key, for messages.

    Raises:
        RecipeError: The files have no weight of the base model.
    """
    new = new_weights(notes)
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    of_base = [key for key, _ in model.named_parameters() if key.startswith(prefix)]
    lacking = [key for key in of_base if key in new]
    in_layers = [key for key in lacking if IN_A_LAYER.search(key)]
    unexpected = sorted(notes["unexpected_keys"])
    others = f" The files have others, such as {unexpected[0]}." if unexpected else ""
    if lacking and len(lacking) == len(of_base):
        raise RecipeError(
            f"the files of {name} have no weight of {type(base).__name__}, such as {lacking[0]}.{others}",
            code="weights-missing",
            place=place,
            remedy=RENAME,
        )
    log_new(name, new)
    if in_layers:
        logger.warning(
            Problem(
                f"the files of {name} lack {counted(len(in_layers), 'weight')} of the layers of {type(base).__name__}, "
                f"such as {in_layers[0]}, which are initialized at random.{others}",
                code="weights-missing",
                place=place,
                remedy=RENAME,
            )
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and datasets inside this context, except for errors. Progress bars of the hub's downloads
    stay."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    datasets = sys.modules.get("datasets")  # if it is not imported, it draws nothing; importing it takes a second
    drawn = transformers_logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if drawn:
        enable_progress_bars()  # transformers disables these together with its own
    if datasets is not None:
        datasets_drawn = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
    disabled = logging.root.manager.disable
    if disabled < logging.WARNING:  # else in such a block already; a change clears the caches of all loggers
        logging.disable(logging.WARNING)  # also those of deepspeed, which saving imports if it is installed
    try:
        yield
    finally:
        if disabled < logging.WARNING:
            logging.disable(disabled)
        if drawn:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if datasets is not None and datasets_drawn:
            datasets.enable_progress_bars()


def config_from_scratch(given: dict[str, Any], where: str) -> Any:
    """The configuration of transformers that ``model.config`` describes: ``model_type`` and its options.

    Args:
        where: The recipe and the key, for messages.

    Raises:
        RecipeError: There is no such type or option, or a value is invalid.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = list(CONFIG_MAPPING.keys())
    kind = given["model_type"]
    rest = {str(key): value for key, value in given.items() if key != "model_type"}
    if kind not in kinds:
        near = did_you_mean(kind, kinds)
        raise RecipeError(f"transformers has no {kind!r}.{near}", code="unknown-model", place=f"{where}.model_type")
    cls = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    for key in rest:
        if key not in known:  # transformers would store it and never read it
            raise RecipeError(
                f"{kind} has no such option.",
                code="unknown-option",
                place=f"{where}.{key}",
                remedy=did_you_mean(key, known),
            )
    for key, value in rest.items():
        if "layer" in key and isinstance(value, int) and value > LAYERS:
            raise RecipeError(
                code="too-large", place=f"{where}.{key}", found=f"{value:,} layers", expected=f"at most {LAYERS:,}"
            )
    try:
        with quiet():  # the default end token may be outside a small vocabulary; build() sets it
            return AutoConfig.for_model(kind, **rest)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise RecipeError(" ".join(str(error).split()), code="invalid-value", place=where) from None


def build_from_config(auto: Any, config: Any, where: str, **arguments: Any) -> Any:
    """A model with initial weights.

    Args:
        auto: One of transformers' Auto classes.
        config: The configuration, whose model the class has.
        where: The place of the configuration in the recipe.
        arguments: Further arguments of ``from_config``.

    Raises:
        RecipeError: The values of the configuration do not fit together, or the model needs more memory than the
            machine has.
    """
    import torch

    try:
        with quiet():
            if torch.get_default_device().type != "meta" and largest_size(config.to_dict()) > host_memory():
                unallocated = _build_on_meta(auto, config, arguments)
                if unallocated is not None:
                    _check_size(unallocated, where)
            return auto.from_config(config, **arguments)
    except FAILURES as error:
        raise RecipeError(f"{typed_clause(error)}.", code="invalid-value", place=where) from None


def largest_size(config: dict[str, Any]) -> int:
    """A bound of the bytes of a model's weights, from the numbers in its configuration alone.

    A model on meta has the exact size. Building one imports ``sympy`` and ``torch._dynamo``, which takes 0.4 seconds:
    this bound says for which models that is worth it.

    For a vocabulary of 1,000, a width of 64 and 2 layers, it is 4 * 64 * 2 * 1,000 * 64 bytes: 31 MiB.
    """
    sizes = [1, 1]
    repeats = 1
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            for number in value if isinstance(value, list | tuple) else [value]:
                if type(number) is not int or number < 1 or str(key).endswith("_id"):
                    continue
                sizes.append(number)
                if "layer" in str(key) or "expert" in str(key):
                    repeats *= number
    sizes.sort()
    return 4 * MATRICES * repeats * sizes[-1] * sizes[-2]


def _build_on_meta(auto: Any, config: Any, arguments: dict[str, Any]) -> nn.Module | None:
    """A model without memory. None: its code fails on meta, where no tensor has values, or fails anyway."""
    import torch

    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model: nn.Module = auto.from_config(config, **arguments)
    except Exception:
        return None
    return model


def _check_size(model: nn.Module, where: str) -> None:
    """Raise an error if the weights of a model on meta take more memory than the machine has: allocating them would
    end this process, or others, without an error.

    Args:
        where: The place of the configuration in the recipe.
    """
    size = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    limit = host_memory()
    if size <= limit:
        return
    count = sum(weight.numel() for weight in model.parameters())
    raise RecipeError(
        f"the model has {count:,} parameters, which take {size / 2**30:,.1f} GiB. This machine has "
        f"{limit / 2**30:,.1f} GiB of memory.",
        code="too-large",
        place=where,
        remedy="Correct the number or the width of its layers, or its vocabulary.",
    )


class MessagesOnce:
    """Lets each message of transformers pass once. ``generate`` repeats its log records and warnings for each batch."""

    def __init__(self) -> None:
        self._seen = set[str]()
        self._passed: logging.LogRecord | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a log record has a new message. Each handler calls it: a record that one lets pass, all do."""
        if record is not self._passed:
            if not self._is_new(record.getMessage()):
                return False
            self._passed = record
        return True

    def _is_new(self, message: str) -> bool:
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new

    @contextmanager
    def filtered(self) -> Iterator[None]:
        """Drop messages that have passed before, inside this context."""
        library = logging.getLogger("transformers")
        handlers = [*library.handlers]
        if library.propagate:
            handlers += logging.getLogger().handlers
        for handler in handlers:
            handler.addFilter(self.filter)
        try:
            with warnings.catch_warnings(record=True) as recorded:
                yield
        finally:
            for handler in handlers:
                handler.removeFilter(self.filter)
            for warning in recorded:
                if self._is_new(str(warning.message)):
                    warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

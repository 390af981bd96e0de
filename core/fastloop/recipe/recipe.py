"""The recipe: YAML and overrides in, one typed ``Recipe`` out.

    model:   {name: distilbert-base-uncased}
    data:    {name: imdb, text: text, label: label, max_length: 512}
    train:   {epochs: 3, batch_size: 12, lr: 5.0e-5}
    plugins:
      - amp: {dtype: bf16}
      - checkpoint-best
    output:  runs/distilbert_imdb

Order of precedence, low to high: the recipe named by ``extends:``, the file, ``--with``, overrides (``train.lr=1e-4``,
``plugins.amp.dtype=fp16``), ``--without``. An override may also set an option of a default plugin
(``plugins.progress.every=1``). ``${train.lr}`` stands for another key's value. Resolvers such as ``${oc.env:...}`` are
refused.

A recipe is data (``safe_yaml``). fastloop writes no values of keys such as token, key or password (``secrets``).

A list of plugins has names, packages or files:

      - my-plugin
      - my-package:my-plugin             # if several packages have a plugin of this name
      - ./my_plugin.py: {rate: 0.5}      # a file, in the current folder or beside the recipe
      - ./my_plugins.py:Second           # the class Second of a file with several plugins

Overrides and ``--without`` accept its ``name`` (``plugins.my-plugin.rate=0.5``) or the listed form. To get the name,
fastloop parses the file. The file's code runs when plugins are resolved.

The task plugin checks ``model`` and ``data``, and each plugin its options. This module checks ``train`` and the form of
the rest.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from fastloop import no_code
from fastloop.errors import RecipeError, did_you_mean
from fastloop.options import option, parse
from fastloop.plugins.installed import defaults, find_entry_point
from fastloop.plugins.plugin import Plugin
from fastloop.recipe import interpolation, safe_yaml, secrets
from fastloop.recipe.paths import anchored, check_path, find_path, find_recipe
from fastloop.recipe.plugin_references import plugin_name, plugins_by_name, split_file

SECTIONS = ("model", "data", "train", "plugins", "output")

_OVERRIDE = re.compile(r"(?P<key>(\\[.\[\]=]|[^=\\]|\\(?![.\[\]=]))*)=(?P<value>.*)", re.DOTALL)
"""``key=value``, divided at the first ``=``. A backslash before ``=`` makes it a part of the key: ``data.a\\=b=1``."""

DEFAULT_EPOCHS = 3
"""Passes over the training data of a recipe that has neither ``train.epochs`` nor ``train.max_steps``."""


@dataclass(kw_only=True)
class Train:
    """The ``train`` section."""

    epochs: int | None = option(
        "Passes over the training data; null: 3, or as many as max_steps needs.", default=None, ge=1
    )
    batch_size: int = option("Samples per optimizer step, over all processes.", default=32, ge=1)
    micro_batch_size: int | None = option(
        "Samples per micro-batch of one process; null: batch_size / world size.", default=None, ge=1
    )
    drop_last: bool = option(
        "Drop the samples at an epoch's end that do not fill a batch, such as a single one.", default=False
    )
    eval_batch_size: int | None = option(
        "Samples per evaluation batch of one process; null: as in training.", default=None, ge=1
    )
    lr: float = option("Peak learning rate.", default=5e-5, gt=0)
    optimizer: str | dict[str, Any] = option(
        "A class of torch.optim, package.module:name or file.py:name. With arguments: {name: SGD, momentum: 0.9}.",
        default="AdamW",
    )
    weight_decay: float = option("Weight decay of the optimizer.", default=0.0, ge=0)
    decay_biases_and_norms: bool = option(
        "Whether weight decay also applies to biases and to weights of norms.", default=True
    )
    layer_lr_decay: float | None = option(
        "Multiplies lr once for each layer below the output layer.", default=None, gt=0, le=1
    )
    parameter_groups: list[dict[str, Any]] | None = option(
        "Other arguments for some parameters, by name: [{match: 'head.*', lr: 1.0e-3}].", default=None
    )
    seed: int = option("Seeds initial weights, sample order and dropout.", default=123, ge=0, lt=2**32)
    max_steps: int | None = option("Optimizer steps of the run; null: all steps of the epochs.", default=None, ge=1)
    max_grad_norm: float | None = option(
        "Clip the gradients' total 2-norm to this; null: no clipping.", default=None, gt=0
    )
    log_every: int = option("Steps between two log points.", default=10, ge=1)
    evaluate_every: Literal["epoch"] | PositiveInt | None = option(
        "'epoch', a number of steps, or null: only at the end.", default="epoch"
    )
    save_every: Literal["epoch"] | PositiveInt | None = option(
        "When to save a checkpoint: 'epoch', a number of steps, or null: only on request (Ctrl-C).", default="epoch"
    )
    keep_checkpoints: int = option("Newest checkpoints kept.", default=1, ge=1)
    on_save_error: Literal["continue", "stop"] = option(
        "If a checkpoint cannot be written (full disk, quota): log the error and keep training, or end the run.",
        default="continue",
    )
    on_data_change: Literal["stop", "warn"] = option(
        "If the data differs from the checkpoint's on --resume: stop, or warn and continue.", default="stop"
    )
    device: Literal["auto", "cpu"] = option("'auto': the accelerator, if there is one, else the CPU.", default="auto")

    def __post_init__(self) -> None:
        if self.epochs is None and self.max_steps is None:
            self.epochs = DEFAULT_EPOCHS
        if isinstance(self.optimizer, dict) and not isinstance(self.optimizer.get("name"), str):
            raise ValueError(
                f"optimizer: found {self.optimizer!r} without a name. Expected such as {{name: SGD, momentum: 0.9}}."
            )

    @property
    def optimizer_name(self) -> str:
        """The optimizer's name or reference."""
        return self.optimizer if isinstance(self.optimizer, str) else str(self.optimizer["name"])

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """The optimizer's arguments in the recipe, without ``lr`` and ``weight_decay``."""
        return (
            {}
            if isinstance(self.optimizer, str)
            else {key: value for key, value in self.optimizer.items() if key != "name"}
        )


@dataclass(frozen=True)
class Inference:
    """The model and the data of a run that does not train, as in `fastloop evaluate` and `fastloop predict`.

    Attributes:
        model: Folder of the exported model, as an absolute path; None: the model as the task builds it.
        split: The only split that the run builds: one of the recipe's data, or ``predict`` for the samples of
            ``source``.
        source: A file or texts to predict; None: the split.
        start: Index of the first sample to predict.
        chunk: Samples to predict at once; 0: the run evaluates the split.
    """

    model: Path | None
    split: str
    source: Path | Iterable[str] | None = None
    start: int = 0
    chunk: int = 0


@dataclass(kw_only=True)
class Recipe:
    """A recipe.

    Attributes:
        plugins: Plugin name -> options, in the recipe's order. ``False`` turns a default plugin off.
        selected: Plugin name -> why another plugin, such as ``auto``, added it. ``resolve`` sets it and ``selector``.
        selector: That plugin, which builds the run (``Plugin.build_selected``); None: no plugin is selected.
        references: Plugin name -> its listed form, if that differs: ``package:name``, ``file.py``, ``file.py:Class``.
        source: The recipe's file, for messages and relative paths; None: made in Python.
        inference: The model to evaluate; None: the run trains.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    plugins: dict[str, dict[str, Any] | Literal[False]] = field(default_factory=dict)
    output: str = "runs/run"
    references: dict[str, str] = field(default_factory=dict)
    source: Path | None = None
    selected: dict[str, str] = field(default_factory=dict)
    selector: Plugin | None = None
    inference: Inference | None = None

    @property
    def where(self) -> str:
        """The recipe's name in messages."""
        return str(self.source) if self.source else "recipe"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as the mapping of its YAML file."""
        return {
            "model": self.model,
            "data": self.data,
            "train": dataclasses.asdict(self.train),
            "plugins": [
                entry if options == {} else {entry: options} for entry, options in self.listed(self.plugins).items()
            ],
            "output": self.output,
        }

    def listed(
        self, plugins: Mapping[str, dict[str, Any] | Literal[False]]
    ) -> dict[str, dict[str, Any] | Literal[False]]:
        """Replace plugin names by their listed form."""
        return {self.references.get(name, name): options for name, options in plugins.items()}

    def place(self, name: str) -> str:
        """The key of a plugin in messages, in its listed form."""
        return f"{self.where}: plugins.{self.references.get(name, name)}"

    def find(self, path: str) -> Path:
        """A path relative to the recipe's folder, if it exists only there; else the path as given."""
        return find_path(path, self.source)


def load_recipe(
    name: str, overrides: Iterable[str] = (), with_plugins: Iterable[str] = (), without_plugins: Iterable[str] = ()
) -> Recipe:
    """Read a recipe file and apply the command line's additions.

    Args:
        name: A path, or a shipped recipe's name.
        overrides: Dotlist items such as ``train.lr=1e-4`` or ``plugins.amp.dtype=fp16``.
        with_plugins: Plugins to add, as a recipe lists them. A plugin that the recipe lists keeps its options.
        without_plugins: Plugins to leave out, also default ones.

    Raises:
        RecipeError: The file cannot be read, or a key is invalid; names file, key and the expected value.
    """
    path = find_recipe(name)
    references: dict[str, str] = {}
    tree = _read(path, [], references)
    for plugin in with_plugins:
        name = plugin_name(plugin, "--with", path, references)
        if name not in tree["plugins"] and split_file(plugin) is None:
            find_entry_point(plugin, "--with")  # a misspelled name is reported where it was written
        tree["plugins"][name] = tree["plugins"].get(name) or {}
    listed = set(tree["plugins"])
    tree = _apply(tree, overrides, str(path), references)
    overridden = [name for name in tree["plugins"] if name not in listed]
    for plugin in without_plugins:
        name = plugin_name(plugin, "--without", path, {})
        if name not in tree["plugins"] and split_file(plugin) is None:
            find_entry_point(plugin, "--without")
        tree["plugins"][name] = False
    if no_code.is_forbidden():
        no_code.check_import_path(path.parent)
    recipe = make_recipe(tree, path, references)
    for name in overridden:
        if recipe.plugins[name] is not False and not defaults()[name].load().auto_enable(recipe):
            raise RecipeError(
                "an override sets its options, but the recipe does not list it, and it is not on by default here.",
                code="plugin-not-listed",
                place=f"{path}: plugins.{name}",
                remedy=f"Add it with --with {name}.",
            )
    return recipe


def make_recipe(
    tree: Mapping[str, Any], source: Path | None = None, references: Mapping[str, str] | None = None
) -> Recipe:
    """A typed recipe from plain mappings.

    Args:
        source: The recipe's file.
        references: Listed form of plugins that ``tree`` has by name.

    Raises:
        RecipeError: A key is invalid.
    """
    where = str(source) if source else "recipe"
    secrets.remember(tree, where)
    for key in tree:
        if key not in SECTIONS:
            raise RecipeError(
                "no such section.",
                code="unknown-section",
                place=f"{where}: {key}",
                remedy=did_you_mean(str(key), (*SECTIONS, "extends")),
            )
    safe_yaml.check_keys(tree, where)
    for section in ("model", "data"):
        if not isinstance(tree.get(section) or {}, Mapping):
            raise RecipeError(
                code="wrong-type",
                place=f"{where}: {section}",
                found=repr(tree[section]),
                expected="a mapping such as {name: ...}",
            )
    output = tree.get("output") or (f"runs/{source.stem}" if source else "runs/run")
    if not isinstance(output, str) or "://" in output:
        raise RecipeError(
            code="wrong-type",
            place=f"{where}: output",
            found=repr(output),
            expected="the path of a folder on this machine",
        )
    check_path(output, source)
    references = dict(references or {})
    return Recipe(
        model=dict(tree.get("model") or {}),
        data=dict(tree.get("data") or {}),
        train=parse(Train, tree.get("train"), f"{where}: train"),
        plugins=plugins_by_name(tree.get("plugins"), where, source, references),
        output=output,
        references=references,
        source=source,
    )


def _read(path: Path, seen: list[Path], references: dict[str, str]) -> dict[str, Any]:
    """Read a file and the recipes that it extends, with ``plugins`` by name. Adds to ``seen`` and ``references``.

    Args:
        seen: Files that extend this one, to find a circle.
    """
    if path.resolve() in seen:
        raise RecipeError(
            f"recipes extend each other: {' -> '.join(map(str, (*seen, path)))}.",
            code="extends-itself",
            place=f"{path}: extends",
        )
    seen.append(path.resolve())
    try:
        tree = safe_yaml.load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot be read: {error}.", code="file-unreadable", place=str(path)) from None
    if not isinstance(tree, dict) or not tree:
        raise RecipeError(
            code="wrong-type", place=str(path), expected=f"a mapping with the sections {', '.join(SECTIONS)}"
        )
    secrets.remember(tree, str(path))
    tree["plugins"] = plugins_by_name(tree.get("plugins"), str(path), path, references)
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise RecipeError(
            code="wrong-type", place=f"{path}: extends", found=repr(base), expected="one recipe's path or name"
        )
    beside = path.parent / check_path(base, path)
    home = beside if beside.is_file() else find_recipe(base)
    inherited: dict[str, str] = {}
    parent = _read(home, seen, inherited)
    for name, reference in inherited.items():
        references.setdefault(name, reference if home.parent == path.parent else anchored(reference, home.parent))
    return dict(_merge(parent, {section: value for section, value in tree.items() if value is not None}))


def _merge(base: Any, top: Any) -> Any:
    """Merge nested mappings; other values of ``top`` replace those of ``base``."""
    if not isinstance(base, Mapping) or not isinstance(top, Mapping):
        return top
    return {**base, **{key: _merge(base.get(key), value) for key, value in top.items()}}


def _apply(tree: dict[str, Any], overrides: Iterable[str], where: str, references: Mapping[str, str]) -> dict[str, Any]:
    """Apply overrides, then OmegaConf's interpolations (``${train.lr}``). Plugins are by name before and after."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        interpolation.measure(tree, where, (), {})
        config = OmegaConf.create(tree)
        for item in overrides:
            parts = _OVERRIDE.fullmatch(item)
            if parts is None or not parts["key"]:
                raise RecipeError(
                    "not an override.", code="not-an-override", place=item, expected="key=value, such as train.lr=1e-4"
                )
            key = parts["key"]
            value = parts["value"]
            head, _, rest = key.partition(".")
            if head not in SECTIONS:
                raise RecipeError(
                    f"there is no section {head!r}.",
                    code="unknown-section",
                    place=item,
                    remedy=did_you_mean(head, SECTIONS),
                )
            for listed, reference in references.items():
                if head == "plugins" and rest.startswith(f"{reference}."):
                    rest = listed + rest.removeprefix(reference)
                    key = f"plugins.{rest}"
                    item = f"{key}={value}"
            name = rest.partition(".")[0]
            if head == "plugins" and not name:
                raise RecipeError(
                    "expected plugins.NAME.OPTION=value. Plugins are added by --with, and left out by --without.",
                    code="not-an-override",
                    place=item,
                )
            on_by_default = [plugin for plugin in defaults() if plugin not in tree["plugins"]]
            if head == "plugins" and not isinstance(tree["plugins"].get(name), Mapping) and name not in on_by_default:
                there = [plugin for plugin, options in tree["plugins"].items() if options is not False]
                there += difflib.get_close_matches(name, on_by_default)
                raise RecipeError(
                    f"the recipe {where} does not list {name!r}.",
                    code="plugin-not-listed",
                    place=item,
                    remedy=f"{did_you_mean(name, there)} Add it with --with {name}.",
                )
            interpolation.measure(item, key, (), {})
            secrets.remember({key.rpartition(".")[2]: value}, key)
            try:
                change = OmegaConf.create()
                OmegaConf.update(change, key, safe_yaml.load(value, item, in_shell=True))
                config = OmegaConf.merge(config, change)  # type: ignore[assignment]
            except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
                raise RecipeError(
                    f"cannot be applied to {where}: {str(error).splitlines()[0]}.", code="override-failed", place=item
                ) from None
        resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise RecipeError(
            "found '???', which stands for a value to fill in.",
            code="missing-value",
            place=f"{where}: {error.full_key}",
            remedy="Set it.",
        ) from None
    except (OmegaConfBaseException, RecursionError) as error:
        raise RecipeError(f"{str(error).splitlines()[0]}.", code="invalid-recipe", place=where) from None
    resolved["plugins"] = plugins_by_name(resolved.get("plugins"), where, None, {})
    return resolved

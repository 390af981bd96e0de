"""The recipe: YAML and overrides in, one typed ``Recipe`` out.

    model:   {name: distilbert-base-uncased}
    data:    {name: imdb, text: text, label: label, max_length: 512}
    train:   {epochs: 3, batch_size: 12, lr: 5.0e-5}
    plugins:
      - amp: {dtype: bf16}
      - checkpoint-best
    output:  runs/distilbert_imdb

Order of precedence, low to high: what ``extends:`` names, the file, ``--with``, overrides (``train.lr=1e-4``,
``plugins.amp.dtype=fp16``), ``--without``. ``${train.lr}`` stands for another key's value.

``model`` and ``data`` are checked by the task plugin, each plugin's options by the plugin: this file knows only ``train`` and the
shape of the rest.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PositiveInt

from fastloop.errors import RecipeError, did_you_mean
from fastloop.options import option, parse

SECTIONS = ("model", "data", "train", "plugins", "output")
_RESOLVER = re.compile(r"\$\{[^}]*?[:$][^}]*\}*")


@dataclass(kw_only=True)
class Train:
    """The ``train`` section."""

    epochs: Annotated[int, option("Passes over the training data.", ge=1)] = 3
    batch_size: Annotated[int, option("Samples an optimizer step, over all processes.", ge=1)] = 32
    device_batch_size: Annotated[int | None, option("Samples one process holds at once; null: batch_size / world size.", ge=1)] = None
    eval_batch_size: Annotated[int | None, option("Samples one process evaluates at once; null: as in training.", ge=1)] = None
    lr: Annotated[float, option("Peak learning rate.", gt=0)] = 5e-5
    optimizer: Annotated[str, option("A class of torch.optim, such as AdamW, Adam or SGD.")] = "AdamW"
    weight_decay: Annotated[float, option("Weight decay of the optimizer.", ge=0)] = 0.0
    seed: Annotated[int, option("Seeds initial weights, sample order and dropout.", ge=0, lt=2**32)] = 123
    max_steps: Annotated[int | None, option("Stop after this many optimizer steps; null: after the epochs.", ge=1)] = None
    clip_norm: Annotated[float | None, option("Clip the gradients' total 2-norm to this, once a step; null: do not.", gt=0)] = None
    evaluate_every: Annotated[Literal["epoch"] | PositiveInt | None, option("'epoch', a number of steps, or null: only at the end.")] = (
        "epoch"
    )
    save_every: Annotated[
        Literal["epoch"] | PositiveInt | None,
        option("When to save what --resume needs: 'epoch', a number of steps, or null: only when asked (Ctrl-C)."),
    ] = "epoch"
    keep_checkpoints: Annotated[int, option("Newest checkpoints kept.", ge=1)] = 1
    on_data_change: Annotated[
        Literal["stop", "warn"], option("With --resume, when the data is not the checkpoint's: stop, or warn and go on.")
    ] = "stop"
    device: Annotated[Literal["auto", "cpu"], option("'auto' takes the accelerator when there is one.")] = "auto"


@dataclass(kw_only=True)
class Recipe:
    """A resolved recipe.

    Attributes:
        plugins: Plugin name -> options, in the recipe's order. ``False`` turns a default plugin off.
        source: The file it came from, for messages and for paths relative to it; None when made in Python.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    plugins: dict[str, dict[str, Any] | Literal[False]] = field(default_factory=dict)
    output: str = "runs/run"
    source: Path | None = None

    @property
    def where(self) -> str:
        """How messages name this recipe."""
        return str(self.source) if self.source else "recipe"

    def to_dict(self) -> dict[str, Any]:
        """The recipe as its YAML file would hold it."""
        plugins = [name if options == {} else {name: options} for name, options in self.plugins.items()]
        return {
            "model": self.model,
            "data": self.data,
            "train": dataclasses.asdict(self.train),
            "plugins": plugins,
            "output": self.output,
        }

    def find(self, path: str) -> Path:
        """A path of the recipe: as given (absolute, or from the current folder), else from the recipe's own folder."""
        given = Path(path).expanduser()
        if not given.exists() and self.source is not None and (self.source.parent / given).exists():
            return self.source.parent / given
        return given


def recipe_folders() -> list[Path]:
    """Where shipped recipes are: the checkout's recipes/ when there is one, else the copy inside the wheel."""
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent / "recipes"
    return [folder for folder in (checkout, package / "recipes") if folder.is_dir()][:1]


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of every shipped recipe."""
    return {path.stem: path for folder in recipe_folders() for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A path to a recipe file, or the name of a shipped one.

    Raises:
        RecipeError: There is no such file and no such shipped recipe.
    """
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    stem = path.stem if path.suffix in (".yaml", ".yml") and path.parent.name in ("", "recipes") else name
    if stem in shipped and (path.parent == Path() or path.parent.name == "recipes"):
        return shipped[stem]
    kind = "a folder" if path.is_dir() else "no such file"
    raise RecipeError(f"{name}: {kind}, and no shipped recipe has this name.{did_you_mean(stem, shipped)}")


def load_recipe(
    name: str,
    overrides: Iterable[str] = (),
    with_plugins: Iterable[str] = (),
    without_plugins: Iterable[str] = (),
) -> Recipe:
    """Read a recipe file and apply what the command line adds.

    Args:
        name: A path, or a shipped recipe's name.
        overrides: Dotlist items such as ``train.lr=1e-4`` or ``plugins.amp.dtype=fp16``.
        with_plugins: Names to add (those that are there already stay as they are).
        without_plugins: Names to leave out, default ones included.

    Raises:
        RecipeError: The file cannot be read, or something in it cannot be; names file, key, what was expected.
    """
    path = find_recipe(name)
    tree = _read(path, ())
    tree["plugins"] |= {plugin: tree["plugins"].get(plugin) or {} for plugin in with_plugins}
    tree = _apply(tree, overrides, str(path))
    for plugin in without_plugins:
        tree["plugins"][plugin] = False
    return make_recipe(tree, path)


def make_recipe(tree: Mapping[str, Any], source: Path | None = None) -> Recipe:
    """A typed recipe from plain mappings.

    Raises:
        RecipeError: As ``load_recipe``.
    """
    where = str(source) if source else "recipe"
    for key in tree:
        if key not in SECTIONS:
            raise RecipeError(f"{where}: {key}: no such section.{did_you_mean(str(key), (*SECTIONS, 'extends'))}")
    for section in ("model", "data"):
        if not isinstance(tree.get(section) or {}, Mapping):
            raise RecipeError(f"{where}: {section}: found {tree[section]!r}, expected a mapping such as {{name: ...}}.")
    output = tree.get("output") or (f"runs/{source.stem}" if source else "runs/run")
    if not isinstance(output, str):
        raise RecipeError(f"{where}: output: found {output!r}, expected the path of a folder.")
    return Recipe(
        model=dict(tree.get("model") or {}),
        data=dict(tree.get("data") or {}),
        train=parse(Train, tree.get("train"), f"{where}: train"),
        plugins=dict(_plugins_by_name(tree.get("plugins"), where)),
        output=output,
        source=source,
    )


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """One file with what it extends, as plain containers, ``plugins`` by name."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if path.resolve() in seen:
        raise RecipeError(f"{path}: extends: goes round in a circle: {' -> '.join(map(str, (*seen, path)))}.")
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}.") from None
    if not OmegaConf.is_dict(config) or not len(config):
        raise RecipeError(f"{path}: expected a mapping with the sections {', '.join(SECTIONS)}.")
    tree: dict[str, Any] = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    tree["plugins"] = _plugins_by_name(tree.get("plugins"), str(path))
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: found {base!r}, expected one recipe's path or name.")
    beside = path.parent / base
    parent = _read(beside if beside.is_file() else find_recipe(base), (*seen, path.resolve()))
    merged: dict[str, Any] = _merge(parent, {section: value for section, value in tree.items() if value is not None})
    return merged


def _merge(base: Any, top: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(top, Mapping):
        return top
    return {**base, **{key: _merge(base.get(key), value) for key, value in top.items()}}


def _refuse_resolvers(tree: Any, where: str) -> None:
    """``${key}`` is fine. ``${oc.env:HOME}`` is not: a recipe is data, and means the same on every machine and to whoever reads it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _refuse_resolvers(value, f"{where}.{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            _refuse_resolvers(value, f"{where}[{index}]")
    elif isinstance(tree, str) and (found := _RESOLVER.search(tree)):
        raise RecipeError(f"{where}: found {found[0]!r}. Expected ${{...}} with the name of another key of the recipe in it, and no more.")


def _plugins_by_name(plugins: Any, where: str) -> dict[str, dict[str, Any] | Literal[False]]:
    """The list of the recipe as a mapping: overrides address plugins by name, and a name stands once."""
    if plugins is None:
        return {}
    if isinstance(plugins, Mapping):
        items = list(plugins.items())
    elif isinstance(plugins, list):
        items = []
        for index, entry in enumerate(plugins):
            if isinstance(entry, str):
                items.append((entry, {}))
            elif isinstance(entry, Mapping) and len(entry) == 1:
                items.append(next(iter(entry.items())))
            else:
                raise RecipeError(f"{where}: plugins[{index}]: found {entry!r}, expected a name or one {{name: {{option: value}}}}.")
    else:
        raise RecipeError(f"{where}: plugins: found {plugins!r}, expected a list of names.")
    found: dict[str, dict[str, Any] | Literal[False]] = {}
    for name, options in items:
        if name in found:
            raise RecipeError(f"{where}: plugins: {name!r} is listed twice. Remove one.")
        if options is not None and options is not False and not isinstance(options, Mapping):
            raise RecipeError(f"{where}: plugins.{name}: found {options!r}, expected a mapping of options, or false to leave it out.")
        found[str(name)] = False if options is False else dict(options or {})
    return found


def _apply(tree: dict[str, Any], overrides: Iterable[str], where: str) -> dict[str, Any]:
    """Overrides, then OmegaConf's interpolations (``${train.lr}``)."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    for section, value in tree.items():
        _refuse_resolvers(value, f"{where}: {section}")
    config = OmegaConf.create(tree)
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key:
            raise RecipeError(f"{item}: not an override. Expected key=value, such as train.lr=1e-4.")
        head, _, rest = key.partition(".")
        if head not in SECTIONS:
            raise RecipeError(f"{item}: there is no section {head!r}.{did_you_mean(head, SECTIONS)}")
        name = rest.partition(".")[0]
        if head == "plugins" and not name:
            raise RecipeError(f"{item}: expected plugins.NAME.OPTION=value. Plugins are added by --with, and left out by --without.")
        if head == "plugins" and not isinstance(tree["plugins"].get(name), Mapping):
            listed = [plugin for plugin, options in tree["plugins"].items() if options is not False]
            raise RecipeError(f"{item}: the recipe {where} does not list {name!r}.{did_you_mean(name, listed)} Add it with --with {name}.")
        _refuse_resolvers(item, key)
        try:
            config = OmegaConf.merge(config, OmegaConf.from_dotlist([item]))  # type: ignore[assignment]
        except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError) as error:
            raise RecipeError(f"{item}: cannot be applied to {where}: {str(error).splitlines()[0]}.") from None
    try:
        resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        raise RecipeError(f"{where}: {error.full_key}: found '???', which stands for a value to fill in. Set it.") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{where}: {str(error).splitlines()[0]}.") from None
    resolved["plugins"] = _plugins_by_name(resolved.get("plugins"), where)
    return resolved

"""Overrides of the command line, such as ``train.lr=1e-4`` and ``plugins.amp.dtype=fp16``.

They are applied before keys are checked. Here, only the section and the plugin of an override must exist.
``fastloop.options.parse`` refuses unknown keys and wrong values later, those of overrides and of files alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastloop.errors import RecipeError, did_you_mean, find_close_match
from fastloop.plugins.installed import defaults
from fastloop.problem import clause
from fastloop.recipe import interpolation, safe_yaml, secrets
from fastloop.recipe.plugin_references import plugins_by_name
from fastloop.recipe.recipe import SECTIONS

_OVERRIDE = re.compile(r"(?P<key>(\\[.\[\]=]|[^=\\]|\\(?![.\[\]=]))*)=(?P<value>.*)", re.DOTALL)
"""``key=value``, divided at the first ``=``. A backslash before ``=`` makes it a part of the key: ``data.a\\=b=1``."""

_NAME = r"(?:\\[.\[\]=]|[^.\[])+"
_PATH = re.compile(rf"{_NAME}(?:\.{_NAME}|\[[^\[\]]+\])*")
"""The key of an override, without an empty name: ``data.files.train`` and ``model[config].width``, but not
``model..width``. OmegaConf accepts empty names, and leaves out the end of ``model[config]width``."""


@dataclass(frozen=True)
class Override:
    """An override of the command line.

    Attributes:
        text: The override for messages: ``key=value``.
        key: A path in the recipe, with plugins by name: ``plugins.amp.dtype``.
        value: YAML.
    """

    text: str
    key: str
    value: str

    @property
    def section(self) -> str:
        """The section of the recipe."""
        return self.key.partition(".")[0]

    @property
    def plugin(self) -> str:
        """The name of the plugin, in an override of ``plugins``; empty: it is missing."""
        return self.key.partition(".")[2].partition(".")[0]


def apply_overrides(
    tree: dict[str, Any], overrides: Iterable[str], where: str, references: Mapping[str, str]
) -> dict[str, Any]:
    """Apply overrides to a recipe, then OmegaConf's interpolations (``${train.lr}``).

    Args:
        tree: The recipe, with plugins by name. So is the result.
        where: The recipe, for messages.
        references: Plugin name -> its listed form, which an override may use, too.

    Raises:
        RecipeError: An override or an interpolation is invalid.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import (
        InterpolationResolutionError,
        InterpolationToMissingValueError,
        MissingMandatoryValue,
        OmegaConfBaseException,
    )

    try:
        interpolation.measure(tree, where, (), {})
        config = OmegaConf.create(tree)
        for item in overrides:
            override = parse_override(item, references)
            if override.section == "plugins":
                _check_plugin(override, tree["plugins"], where)
            config = _merge_override(config, override, where)
        resolved: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        missing = sorted(_missing_keys(OmegaConf.to_container(config, resolve=False), ""))
        raise RecipeError(
            "found '???', which stands for a value to fill in.",
            code="missing-value",
            place=f"{where}: {', '.join(missing)}",
            remedy="Set each of them.",
        ) from None
    except InterpolationResolutionError as error:
        siblings: Any = OmegaConf.to_container(error.parent_node, resolve=False)
        raise RecipeError(
            code="unresolved-interpolation",
            place=f"{where}: {error.full_key}",
            found=repr(siblings[error.key]),
            expected="${...} with the name of another key of the recipe, whose value does not depend on this one",
            remedy="Correct the name, or write the value itself.",
        ) from None
    except RecursionError:
        raise RecipeError(
            "its ${...} name each other in a chain that is too long.",
            code="unresolved-interpolation",
            place=where,
            remedy="Write the value itself in some of them.",
        ) from None
    except OmegaConfBaseException as error:
        raise RecipeError(
            f"cannot be read: {clause(error)}.",
            code="invalid-recipe",
            place=where,
            remedy="Use only text, numbers, lists and mappings.",
        ) from None
    resolved["plugins"] = plugins_by_name(resolved.get("plugins"), where, None, {})
    return resolved


def _missing_keys(tree: Any, key: str) -> list[str]:
    """The keys of a tree whose value is ``???``: ``data.files[0]``.

    Args:
        key: The key of the tree; empty for the recipe.
    """
    if tree == "???":
        return [key]
    keys = []
    if isinstance(tree, dict):
        for name, value in tree.items():
            keys += _missing_keys(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            keys += _missing_keys(value, f"{key}[{index}]")
    return keys


def parse_override(item: str, references: Mapping[str, str]) -> Override:
    """Divide ``key=value``, and replace the listed form of a plugin by its name.

    Raises:
        RecipeError: It has another form, or there is no such section.
    """
    parts = _OVERRIDE.fullmatch(item)
    if parts is None or not parts["key"]:
        raise RecipeError(
            "not an override.", code="not-an-override", place=item, expected="key=value, such as train.lr=1e-4"
        )
    key = parts["key"]
    text = item
    for name, reference in references.items():
        listed = f"plugins.{reference}."
        if key.startswith(listed):
            key = f"plugins.{name}.{key.removeprefix(listed)}"
            text = f"{key}={parts['value']}"
            break
    if _PATH.fullmatch(key) is None:
        raise RecipeError(
            code="not-an-override",
            place=item,
            found=f"the key {parts['key']!r}",
            expected="names with one dot between them, such as model.config.width",
        )
    override = Override(text, key, parts["value"])
    if override.section not in SECTIONS:
        raise RecipeError(
            f"there is no section {override.section!r}.",
            code="unknown-section",
            place=item,
            remedy=did_you_mean(override.section, SECTIONS),
        )
    return override


def _check_plugin(override: Override, plugins: Mapping[str, Any], where: str) -> None:
    """Check that a recipe has the plugin whose option an override sets: it is listed, or on by default.

    Raises:
        RecipeError: The plugin is missing in the override, or in the recipe.
    """
    name = override.plugin
    if not name:
        raise RecipeError(
            "expected plugins.NAME.OPTION=value. Plugins are added by --with, and left out by --without.",
            code="not-an-override",
            place=override.text,
        )
    on_by_default = [plugin for plugin in defaults() if plugin not in plugins]
    if isinstance(plugins.get(name), Mapping) or name in on_by_default:
        return
    known = [plugin for plugin, options in plugins.items() if options is not False]
    close_match = find_close_match(name, on_by_default)
    if close_match is not None:
        known.append(close_match)
    raise RecipeError(
        f"the recipe {where} does not list {name!r}.",
        code="plugin-not-listed",
        place=override.text,
        remedy=f"{did_you_mean(name, known)} Add it with --with {name}.",
    )


def _find_list(tree: Any, key: str) -> str:
    """The key of the list in which an override would set a value; empty: there is none.

    For ``data.drop[0].column`` and ``data.drop.0``, it is ``data.drop``.
    """
    for separator in re.finditer(r"[.\[]", key):
        above = key[: separator.start()]
        name = re.split(r"[.\[]", above)[-1]
        if not isinstance(tree, dict) or name not in tree:
            return ""
        tree = tree[name]
        if isinstance(tree, list):
            return above
    return ""


def _refuse_other_kind(before: Any, after: Any, key: str, override: Override, where: str) -> None:
    """Refuse an override that has a list where the recipe has a mapping, or the reverse.

    OmegaConf merges two mappings, and replaces lists and other values. It cannot merge a mapping with a list.

    Args:
        before: The value in the recipe.
        after: The value that the override sets.
        key: The key of both; empty for the recipe.

    Raises:
        RecipeError: Names the key.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in after.items():
            if name in before:
                escaped = re.sub(r"[.\[\]=]", r"\\\g<0>", str(name))
                _refuse_other_kind(before[name], value, f"{key}.{escaped}" if key else escaped, override, where)
        return
    if isinstance(before, dict) and isinstance(after, list):
        text = f"{key} is a mapping in {where}, and this override makes it a list."
    elif isinstance(before, list) and isinstance(after, dict):
        text = f"{key} is a list in {where}, and this override makes it a mapping."
    else:
        return
    raise RecipeError(
        text,
        code="override-failed",
        place=override.text,
        found=repr(before),
        remedy=f"To replace it, add {key}=null before this override.",
    )


def _merge_override(config: Any, override: Override, where: str) -> Any:
    """OmegaConf's configuration with the value of an override.

    Raises:
        RecipeError: The value is no YAML, or the key is that of a part of a list, or a list and a mapping meet.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    interpolation.measure(override.text, override.key, (), {})
    before = OmegaConf.to_container(config, resolve=False)
    above = _find_list(before, override.key)
    if above:
        raise RecipeError(
            f"{above} is a list, and an override cannot set a part of it.",
            code="override-failed",
            place=override.text,
            remedy="Set the whole list, or change the file.",
        )
    last_key = override.key.rpartition(".")[2]
    secrets.remember({last_key: override.value}, override.key)
    value = safe_yaml.load(override.value, override.text, in_shell=True)
    try:
        change = OmegaConf.create()
        OmegaConf.update(change, override.key, value)
        changed = OmegaConf.to_container(change, resolve=False)
        _refuse_other_kind(before, changed, "", override, where)
        return OmegaConf.merge(config, change)
    except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        raise RecipeError(
            f"cannot be applied to {where}: {clause(error)}.",
            code="override-failed",
            place=override.text,
            remedy="Give the key of an option, and a value that is text, a number, a list or a mapping.",
        ) from None

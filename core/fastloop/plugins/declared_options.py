"""The options that a plugin declares on its class: collected, checked, and read as attributes.

    class Warmth(Plugin):
        degrees: float = option("How warm.", default=20.0, ge=0)

``declare`` replaces each option of a new class by an ``Option``, which reads the value of a plugin. ``options_of``
makes a dataclass of all options of a class, the inherited ones included. Checks, tables, the schema and the docs use
that dataclass, as they use those of the sections of a recipe.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from typing import TYPE_CHECKING, Any

from fastloop import hookspecs
from fastloop.errors import PluginError
from fastloop.options import adapter
from fastloop.problem import clause, typed_clause

if TYPE_CHECKING:
    from fastloop.plugins.plugin import Plugin


class Option:
    """An option of a class of plugins. On a plugin, it reads as the option's value, and cannot be assigned.

    Attributes:
        name: The attribute of the class.
        key: The key in recipes.
        owner: The class that declares it.
        field: The result of ``option``.
    """

    def __init__(self, name: str, owner: type[Plugin], field: dataclasses.Field[Any]) -> None:
        self.name = name
        self.owner = owner
        self.field = field
        self.key: str = field.metadata.get("key") or name

    def __get__(self, plugin: Plugin | None, cls: type[Plugin]) -> Any:
        if plugin is None:
            return self
        try:
            return plugin._options[self.key]
        except AttributeError:
            raise PluginError(
                f"{cls.__qualname__}.{self.name} has no value yet.",
                code="no-value-yet",
                remedy="Call super().__init__(**options) in __init__ first.",
            ) from None

    def __set__(self, plugin: Plugin, value: Any) -> None:
        raise PluginError(
            "options have the values of the recipe, and cannot be assigned.",
            code="option-assigned",
            place=f"{plugin.where}.{self.key}",
            remedy=f"Keep what the run changes in another attribute than {self.name!r}.",
        )

    def read_type(self) -> Any:
        """The type in the annotation, which may be a string. Raises ``NameError`` if a name in it is not defined."""
        annotation = inspect.get_annotations(self.owner)[self.name]
        holder = type(self.owner.__name__, (), {"__annotations__": {self.name: annotation}})
        holder.__module__ = self.owner.__module__
        return typing.get_type_hints(holder, include_extras=True)[self.name]


def declare(cls: type[Plugin]) -> None:
    """Replace the options that a class declares by ``Option`` objects.

    Raises:
        PluginError: An option has no type, or its name has another meaning in the class, a base class or as a hook.
    """
    for name, value in list(vars(cls).items()):
        inherited = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)]
        if not isinstance(value, dataclasses.Field):
            if any(isinstance(attribute, Option) for attribute in inherited):
                raise PluginError(
                    f"{cls.__qualname__}.{name} hides the option {name!r} of its base class.",
                    code="invalid-declaration",
                    remedy=f"Rename it, or declare the option again: {name}: TYPE = option(...).",
                )
            continue
        place = f"{cls.__qualname__}.{name}"
        if name not in inspect.get_annotations(cls):
            raise PluginError(
                "an option needs a type.",
                code="invalid-declaration",
                place=place,
                remedy=f"Write {name}: TYPE = option(...).",
            )
        taken = [attribute for attribute in inherited if not isinstance(attribute, Option)]
        if taken or hasattr(getattr(hookspecs, name, None), "fastloop_spec"):
            meaning = "is an attribute of its base class" if taken else "is a hook"
            raise PluginError(
                f"no option can have this name, because it {meaning}.",
                code="invalid-declaration",
                place=place,
                remedy=f'Rename it. If recipes need this key: {name}_option: TYPE = option(..., key="{name}").',
            )
        setattr(cls, name, Option(name, cls, value))


def find_options(cls: type[Plugin]) -> list[Option]:
    """The options of a class: first those of its base classes, then its own. ``on_error`` is one of read-only plugins
    alone, and comes last."""
    by_name: dict[str, Option] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Option):
                by_name[name] = value
    on_error = by_name.pop("on_error")
    return [*by_name.values(), on_error] if cls.read_only else [*by_name.values()]


def options_of(cls: type[Plugin]) -> type:
    """A dataclass of the options of a class of plugins, whose fields have the keys of recipes.

    Raises:
        NameError: The type of an option is not defined when the plugin is used.
        TypeError, ValueError: The options are no fields of a dataclass: two have one key, or a default is a list.
    """
    made: type | None = vars(cls).get("_options_class")
    if made is not None:
        return made
    fields: list[tuple[str, Any, Any]] = []
    for declared in find_options(cls):
        field = declared.field
        metadata = {name: value for name, value in field.metadata.items() if name != "key"}
        if field.default_factory is dataclasses.MISSING:
            copied = dataclasses.field(default=field.default, metadata=metadata)
        else:
            copied = dataclasses.field(default_factory=field.default_factory, metadata=metadata)
        fields.append((declared.key, declared.read_type(), copied))
    cls._options_class = dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
    return cls._options_class


def check_declared(cls: type[Plugin], label: str) -> None:
    """Check that values of a plugin's options can be checked.

    Args:
        label: The plugin, for messages.

    Raises:
        PluginError: A type is unknown, or pydantic does not support it.
    """
    try:
        adapter(options_of(cls))
    except NameError as error:
        raise PluginError(
            f"its options cannot be checked: {clause(error)}.",
            code="invalid-declaration",
            place=label,
            remedy="Import it outside of TYPE_CHECKING: values are checked by the types of the options.",
        ) from error
    except Exception as error:
        raise PluginError(
            f"its options cannot be checked: {typed_clause(error)}.", code="invalid-declaration", place=label
        ) from error

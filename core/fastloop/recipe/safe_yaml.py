"""YAML as plain data: mappings, lists, text, numbers, and nothing that runs, grows or is read two ways.

    check(text, "recipe.yaml")     # raises a RecipeError that names the line

The checks go over the parser's tokens one by one, before anything is made of them: nesting costs no stack, and an alias no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastloop.errors import RecipeError

DEEPEST = 32
"""Levels of nesting."""
LARGEST = 10_000
"""Values in a file, those that aliases repeat counted each time."""
TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))


@dataclass
class _Open:
    """A list or mapping that the parser is inside of; ``keys`` (key -> its line) is None for a list."""

    anchor: str | None
    before: int
    keys: dict[str, int] | None
    parts: int = 0


def check(text: str, where: str) -> None:
    """Refuse YAML that is more than plain data.

    Raises:
        RecipeError: A tag that asks for an object, a key that stands twice, too deep a nesting, or aliases that stand for too much.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    sizes: dict[str, int] = {}
    inside: list[_Open] = []
    count = 0
    token: Any
    for token in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        line = token.start_mark.line + 1
        place = f"{where}, line {line}"
        if isinstance(token, yaml.CollectionEndEvent):
            ended = inside.pop()
            if ended.anchor:
                sizes[ended.anchor] = count - ended.before + 1
            continue
        if not isinstance(token, yaml.NodeEvent):
            continue
        count += sizes.get(str(token.anchor), 1) if isinstance(token, yaml.AliasEvent) else 1
        if count > LARGEST:
            raise RecipeError(
                f"{place}: more than {LARGEST:,} values, with what aliases stand for. Write ${{key}} for another key's value."
            )
        if inside and (keys := inside[-1].keys) is not None:
            inside[-1].parts += 1
            if inside[-1].parts % 2 and isinstance(token, yaml.ScalarEvent) and token.value != "<<":
                if token.value in keys:
                    raise RecipeError(f"{place}: the key {token.value!r} is there twice, first in line {keys[token.value]}. Remove one.")
                keys[token.value] = line
        tag = getattr(token, "tag", None)
        if tag and tag not in TAGS:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            raise RecipeError(f"{place}: found the tag {shown}. A recipe is data, and makes no objects: text, numbers, lists and mappings.")
        if isinstance(token, yaml.CollectionStartEvent):
            inside.append(_Open(token.anchor, count, {} if isinstance(token, yaml.MappingStartEvent) else None))
            if len(inside) > DEEPEST:
                raise RecipeError(f"{place}: nested deeper than {DEEPEST} levels.")
        elif isinstance(token, yaml.ScalarEvent) and token.anchor:
            sizes[token.anchor] = 1


def load(text: str, where: str) -> Any:
    """The mapping or list that a text holds, as OmegaConf reads YAML (``1e-4`` is a number, a date is text; ``${...}`` stays); or None.

    Raises:
        RecipeError: It is not YAML, or more than plain data; names the line.
    """
    import io

    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        check(text, where)
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text), max_yaml_expanded_nodes=LARGEST), resolve=False)
    except OSError:  # a lone number, which OmegaConf does not take
        return None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}.") from None

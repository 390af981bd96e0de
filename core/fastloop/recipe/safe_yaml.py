"""Read YAML as plain data: mappings, lists, text and numbers, without tags, duplicate keys or expanding aliases.

The checks process the parser's events before any object is created, so nesting needs no stack, and aliases no memory.
"""

from __future__ import annotations

from types import SimpleNamespace as _Open
from typing import Any

from fastloop.errors import RecipeError

MAX_DEPTH = 32
"""Maximum levels of nesting."""
MAX_VALUES = 10_000
"""Maximum number of values in a file, with expanded aliases."""
TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))


def check(text: str, where: str) -> None:
    """Check that a text is plain data.

    Raises:
        RecipeError: It has a tag for an object, a duplicate key, too many levels, or too many values.
        yaml.YAMLError: It is not YAML.
    """
    import yaml

    sizes: dict[str, int] = {}
    # The lists and mappings that are not closed yet. before: values counted before it. keys: key -> line; None for a
    # list. parts: keys and values of a mapping so far.
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
        if count > MAX_VALUES:
            raise RecipeError(
                f"{place}: more than {MAX_VALUES:,} values, with expanded aliases. Write ${{key}} for another "
                "key's value."
            )
        if inside and (keys := inside[-1].keys) is not None:
            inside[-1].parts += 1
            if inside[-1].parts % 2 and isinstance(token, yaml.ScalarEvent) and token.value != "<<":
                if token.value in keys:
                    raise RecipeError(
                        f"{place}: the key {token.value!r} appears twice, first in line {keys[token.value]}. "
                        "Remove one."
                    )
                keys[token.value] = line
        tag = getattr(token, "tag", None)
        if tag and tag not in TAGS:
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            raise RecipeError(
                f"{place}: found the tag {tag}. A recipe contains only text, numbers, lists and mappings."
            )
        if isinstance(token, yaml.CollectionStartEvent):
            inside.append(
                _Open(
                    anchor=token.anchor,
                    before=count,
                    keys={} if isinstance(token, yaml.MappingStartEvent) else None,
                    parts=0,
                )
            )
            if len(inside) > MAX_DEPTH:
                raise RecipeError(f"{place}: nested deeper than {MAX_DEPTH} levels.")
        elif isinstance(token, yaml.ScalarEvent) and token.anchor:
            sizes[token.anchor] = 1


def load(text: str, where: str) -> Any:
    """Load a mapping or list with OmegaConf's rules: ``1e-4`` is a number, a date is text, ``${...}`` is kept. None:
    another value.

    Raises:
        RecipeError: The text is not YAML, or not plain data; names the line.
    """
    import io

    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        check(text, where)
        return OmegaConf.to_container(
            OmegaConf.load(io.StringIO(text), max_yaml_expanded_nodes=MAX_VALUES), resolve=False
        )
    except OSError:  # a single number, which OmegaConf does not accept
        return None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(
            f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}."
        ) from None

"""Writes recipes as YAML with comments, for ``fastloop bench --select`` and ``fastloop import``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from fastloop.recipe import safe_yaml


def recipe_text(
    recipe: Mapping[str, Any], head: Iterable[str], remarks: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The recipe as YAML, a line for each key and plugin.

    Args:
        head: Lines of the comment at the top.
        remarks: Plugin, ``SECTION.KEY`` or ``output`` -> comment behind its line.
    """
    lines = [f"# {line}".rstrip() for line in head]
    for section, value in recipe.items():
        lines.append("")
        if isinstance(value, Mapping):
            lines.append(f"{section}:")
            for key, item in value.items():
                lines.append(_remarked(f"  {key}: {inline(item)}", remarks.get(f"{section}.{key}")))
        elif isinstance(value, list) and value:
            lines.append(f"{section}:")
            for entry in value:
                ((name, options),) = entry.items() if isinstance(entry, Mapping) else [(entry, {})]
                text = name if options == {} else f"{name}: {inline(options)}"
                lines.append(_remarked(f"  - {text}", remarks.get(name)))
        else:
            lines.append(_remarked(f"{section}: {inline(value)}", remarks.get(section)))
    return "\n".join(lines) + "\n"


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes text that ``safe_yaml`` reads as a float, such as ``1e-3``."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write each value where it is, without anchors."""
        return True


_Dumper.add_implicit_resolver(f"{safe_yaml.PREFIX}float", safe_yaml.FLOAT, safe_yaml.FIRST_OF_FLOAT)


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6, default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _remarked(line: str, remark: str | None) -> str:
    return line if not remark else f"{line:<40}  # {remark}"

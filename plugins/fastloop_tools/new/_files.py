"""Templates of ``fastloop new``, and the files that are made from them."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fastloop.errors import UsageError
from fastloop.problem import clause
from fastloop.runtime.files import missing_folders, refuse_full_disk, remove_empty

if TYPE_CHECKING:
    import jinja2


def render(template: str, words: Mapping[str, Any]) -> str:
    """The text of a template of the folder ``template``.

    Args:
        template: Its path without ``.jinja``, such as ``job/slurm.sh``.
        words: The values that it names.
    """
    return _environment().get_template(f"{template}.jinja").render(words)


@cache
def _environment() -> jinja2.Environment:
    """The templates. Filters: ``toml`` and ``yaml`` write a quoted string, ``sh`` one word of a shell."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastloop_tools.new", "template"),
        autoescape=False,  # none of it is HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["toml"] = _quoted
    environment.filters["yaml"] = _quoted
    environment.filters["sh"] = shlex.quote
    return environment


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write new files, and print their paths. After an error, none of them is there, so that the same command works
    later.

    Args:
        files: Path in ``folder`` -> text.

    Raises:
        UsageError: A file exists already, or cannot be written.
    """
    there = [path for path in files if os.path.lexists(folder / path)]
    if there:
        raise UsageError(
            f"{folder} already contains {', '.join(there)}. Nothing was written; use another --folder.",
            code="folder-not-empty",
        )
    try:
        with ExitStack() as after_error:
            for path, text in files.items():
                target = folder / path
                after_error.callback(remove_empty, missing_folders(target.parent))
                target.parent.mkdir(parents=True, exist_ok=True)
                after_error.callback(target.unlink, missing_ok=True)
                target.write_text(text, encoding="utf-8")
            after_error.pop_all()
    except OSError as error:
        refuse_full_disk(error, folder)
        raise UsageError(
            f"cannot be written: {clause(error)}.", code="folder-not-writable", place=str(folder)
        ) from None
    for path in files:
        typer.echo(str(folder / path))

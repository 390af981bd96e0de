"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one (`fastloop recipes`).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as train.lr=1e-4 or plugins.amp.dtype=fp16."),
]
With = Annotated[str, typer.Option("--with", metavar="A,B", help="Plugins to add.")]
Without = Annotated[str, typer.Option("--without", metavar="A,B", help="Plugins to leave out, default ones included.")]


def names(listed: str) -> list[str]:
    """``"a, b"`` -> ``["a", "b"]``."""
    return [name.strip() for name in listed.split(",") if name.strip()]

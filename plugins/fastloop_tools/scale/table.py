"""The estimates as a table of 80 columns, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fastloop.recipe import secrets
from fastloop_tools.scale.estimate import Estimate, MemoryVariant
from fastloop_tools.scale.sizes import format_size, unit_for

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.scale.change import Command

COLUMNS = {
    "weight": "weights", "grad": "gradients", "optim": "optimizer", "activ": "activations", "bucket": "buckets",
    "total": "total", "wire": "sent_bytes",
}  # fmt: skip
"""Head of a column -> the field of ``MemoryVariant``."""


def write_json(found: Estimate, file: str) -> None:
    """Write the estimates to a file, or to stdout if it is ``-``."""
    text = json.dumps(secrets.hidden(found.to_dict()), indent=1)
    if file == "-":
        typer.echo(text)
        return
    from fastloop.runtime.files import write

    write(Path(file), text + "\n", hidden=True)


def show(found: Estimate, recipe: Recipe, command: Command) -> None:
    """Print the table and the smallest change that fits, as a change of the recipe's command."""
    for line in lines(found, recipe, command):
        typer.echo(line)


def lines(found: Estimate, recipe: Recipe, command: Command) -> Iterator[str]:
    """The lines of the output."""
    unit, size = unit_for(max(variant.total for variant in found.variants))
    timed = any(variant.seconds is not None for variant in found.variants)
    yield f"{found.parameters:,} parameters on {found.processes} processes, precision {found.precision}, {unit}"
    shapes = ", ".join("x".join(map(str, shape)) or "1" for shape in found.batch)
    yield f"micro-batch of {found.micro_batch_size} samples ({shapes}), {found.micro_steps} a step"
    yield ""
    widths = {head: max(len(head), 5) for head in COLUMNS}
    heads = " ".join(f"{head:>{width}}" for head, width in widths.items())
    yield f"{'strategy':<16} ckpt {heads}" + (" fits" if found.device_memory else "") + (" seconds" if timed else "")
    for variant in found.variants:
        sizes = " ".join(
            f"{format_size(getattr(variant, name) / size):>{widths[head]}}" for head, name in COLUMNS.items()
        )
        line = f"{'*' * variant.listed + variant.name:<16} {'yes' if variant.checkpointing else '':<4} {sizes}"
        line += f" {'yes' if variant.fits else 'no':<4}" if found.device_memory else ""
        line += f" {variant.seconds:>7.2g}" if variant.seconds is not None else ""
        yield line.rstrip()
    yield ""
    yield from notes(found, recipe, command, unit, size)


def notes(found: Estimate, recipe: Recipe, command: Command, unit: str, size: float) -> Iterator[str]:
    """The lines below the table."""
    yield "Sizes of one process. wire: bytes that it sends in a step. ckpt: activation"
    yield "checkpointing. *: the recipe's. Not counted: the device's own libraries"
    yield "(often 1 GiB), fragmentation, temporary tensors of the optimizer."
    for name, samples in {
        variant.name: variant.samples for variant in found.variants if variant.samples != found.micro_batch_size
    }.items():
        yield f"{name}: a micro-batch has {samples} samples."
    if any(variant.seconds is not None for variant in found.variants):
        yield "seconds: a step if communication and computation overlap: a lower bound."
    if found.device_memory is None:
        return
    current = next((variant for variant in found.variants if variant.listed), None)
    if current is not None and current.fits:
        yield f"The recipe fits: {label(current)} needs {format_size(current.total / size)} {unit}."
        return
    if (best := found.smallest_change) is None:
        if refused := [label(variant) for variant in found.variants if variant.fits]:
            yield f"The recipe's plugins or its optimizer refuse each variant that fits: {', '.join(refused)}."
            return
        least = min(found.variants, key=lambda variant: variant.total)
        yield f"Nothing fits. {label(least)} needs {format_size(least.total / size)} {unit}."
        smaller = f", or a smaller train.micro_batch_size (now {found.micro_batch_size})" * (found.micro_batch_size > 1)
        yield f"Use more processes{smaller}."
        return
    yield f"Smallest change that fits ({format_size(best.total / size)} {unit}): {label(best)}"
    yield from ("  " + line for line in command.changed(recipe, best, found.variants).lines(76))


def label(variant: MemoryVariant) -> str:
    """A variant's name, with activation checkpointing."""
    return variant.name + " + activation checkpointing" * variant.checkpointing

"""The estimates as a table of 80 columns, or as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import typer

from fastloop_tools.scale.estimate import CHECKPOINTING, Estimate, Variant
from fastloop_tools.scale.sizes import format_size, unit_for

COLUMNS = {
    "weight": "weights", "grad": "gradients", "optim": "optimizer", "activ": "activations", "bucket": "buckets", "total": "total",
    "wire": "wire",
}  # fmt: skip
"""Head of a column -> the field of ``Variant``."""


def write_json(found: Estimate, file: str) -> None:
    """Write the estimates to a file, or to stdout if it is ``-``."""
    text = json.dumps(found.to_dict(), indent=1)
    if file == "-":
        typer.echo(text)
        return
    from fastloop.runtime.files import write

    write(Path(file), text + "\n")


def show(found: Estimate, recipe: str) -> None:
    """Print the table and the smallest change that fits."""
    for line in lines(found, recipe):
        typer.echo(line)


def lines(found: Estimate, recipe: str) -> Iterator[str]:
    """The lines of the output."""
    unit, size = unit_for(max(variant.total for variant in found.variants))
    timed = any(variant.seconds is not None for variant in found.variants)
    yield f"{found.parameters:,} parameters on {found.processes} processes, precision {found.precision}, {unit}"
    shapes = ", ".join("x".join(map(str, shape)) or "1" for shape in found.batch)
    yield f"micro-batch of {found.micro_batch_size} samples ({shapes}), {found.micro_steps} a step"
    yield ""
    widths = {head: max(len(head), 5) for head in COLUMNS}
    heads = " ".join(f"{head:>{width}}" for head, width in widths.items())
    yield f"{'strategy':<15} ckpt {heads}" + (" fits" if found.device_memory else "") + (" seconds" if timed else "")
    for variant in found.variants:
        sizes = " ".join(f"{format_size(getattr(variant, name) / size):>{widths[head]}}" for head, name in COLUMNS.items())
        line = f"{'*' * variant.listed + variant.name:<15} {'yes' if variant.checkpointing else '':<4} {sizes}"
        line += f" {'yes' if variant.fits else 'no':<4}" if found.device_memory else ""
        line += f" {variant.seconds:>7.2g}" if variant.seconds is not None else ""
        yield line.rstrip()
    yield ""
    yield from notes(found, recipe, unit, size)


def notes(found: Estimate, recipe: str, unit: str, size: float) -> Iterator[str]:
    """The lines below the table."""
    yield "Sizes of one process. wire: bytes that it sends in a step. ckpt: activation"
    yield "checkpointing. *: the recipe's. Not counted: the device's own libraries"
    yield "(often 1 GiB), fragmentation, temporary tensors of the optimizer."
    if any(variant.seconds is not None for variant in found.variants):
        yield "seconds: a step if communication and computation overlap: a lower bound."
    if found.device_memory is None:
        return
    current = next((variant for variant in found.variants if variant.listed), None)
    if current is not None and current.fits:
        yield f"The recipe fits: {label(current)} needs {format_size(current.total / size)} {unit}."
        return
    if (best := found.smallest_change) is None:
        least = min(found.variants, key=lambda variant: variant.total)
        yield f"Nothing fits. {label(least)} needs {format_size(least.total / size)} {unit}."
        yield f"Use more processes, or a smaller train.micro_batch_size (now {found.micro_batch_size})."
        return
    yield f"Smallest change that fits ({format_size(best.total / size)} {unit}): {label(best)}"
    wrapped = textwrap.wrap(command(best, current, recipe), 74, break_long_words=False, break_on_hyphens=False)
    yield from ("  " + line + " \\" * (line != wrapped[-1]) for line in wrapped)


def label(variant: Variant) -> str:
    """A variant's name, with activation checkpointing."""
    return variant.name + " + activation checkpointing" * variant.checkpointing


def command(variant: Variant, current: Variant | None, recipe: str) -> str:
    """The command that trains a variant."""
    added, removed = [], []
    if current is None or variant.plugin != current.plugin:
        added.append(variant.plugin)
        removed += [current.plugin] if current else []
    if variant.checkpointing and not (current and current.checkpointing):
        added.append(CHECKPOINTING)
    if current and current.checkpointing and not variant.checkpointing:
        removed.append(CHECKPOINTING)
    words = ["fastloop train", recipe]
    same = current.options if current and current.plugin == variant.plugin else {}
    off = {key: False for key in same if key not in variant.options}
    for key, value in {**variant.options, **off}.items():
        if same.get(key) != value:
            words.append(f"plugins.{variant.plugin}.{key}={str(value).lower()}")
    words += [f"--with {','.join(added)}"] * bool(added) + [f"--without {','.join(removed)}"] * bool(removed)
    return " ".join(words)

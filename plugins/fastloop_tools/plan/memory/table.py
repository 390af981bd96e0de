"""The estimates as a table of 80 columns, or as JSON, with the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fastloop.problem import counted
from fastloop.recipe import secrets
from fastloop_tools.plan.memory.estimate import Estimate, MemoryVariant
from fastloop_tools.plan.memory.sizes import format_size, unit_for
from fastloop_tools.plan.plan_json import plan_to_dict

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop_tools.plan.memory.change import Command
    from fastloop_tools.plan.show import Plan

COLUMNS = {
    "weight": "weights", "grad": "gradients", "optim": "optimizer", "activ": "activations", "bucket": "buckets",
    "total": "total", "wire": "sent_bytes",
}  # fmt: skip
"""Head of a column -> the field of ``MemoryVariant``."""
WIDTH = 5
"""Characters of a column at least."""


def write_json(estimate: Estimate, plan: Plan, file: str) -> None:
    """Write the estimates and the plan to a file, or to stdout if it is ``-``."""
    text = json.dumps(secrets.hidden(estimate.to_dict() | {"plan": plan_to_dict(plan)}), indent=1)
    if file == "-":
        typer.echo(text)
        return
    from fastloop.runtime.files import write

    write(Path(file), text + "\n", hidden=True)


def show(estimate: Estimate, recipe: Recipe, command: Command) -> None:
    """Print the table and the smallest change that fits, as a change of the recipe's command."""
    for line in lines(estimate, recipe, command):
        typer.echo(line)


def lines(estimate: Estimate, recipe: Recipe, command: Command) -> Iterator[str]:
    """The lines of the output."""
    unit, size = unit_for(max(variant.total for variant in estimate.variants))
    model = f"{estimate.parameters:,} parameters on {counted(estimate.processes, 'process')}"
    yield f"{model}, precision {estimate.precision}, {unit}"
    shapes = ", ".join("x".join(map(str, shape)) or "1" for shape in estimate.batch)
    yield f"micro-batch of {counted(estimate.micro_batch_size, 'sample')} ({shapes}), {estimate.micro_steps} a step"
    yield ""
    head = f"{'strategy':<16} ckpt"
    for name in COLUMNS:
        head += f" {name:>{WIDTH}}"
    if estimate.device_memory is not None:
        head += " fits"
    if any(variant.seconds is not None for variant in estimate.variants):
        head += " seconds"
    yield head
    for variant in estimate.variants:
        yield row(variant, size)
    yield ""
    yield from notes(estimate, recipe, command, unit, size)


def row(variant: MemoryVariant, size: float) -> str:
    """The line of a variant.

    Args:
        size: Bytes of the table's unit.
    """
    name = f"*{variant.name}" if variant.listed else variant.name
    checkpointing = "yes" if variant.checkpointing else ""
    line = f"{name:<16} {checkpointing:<4}"
    for head, field in COLUMNS.items():
        line += f" {format_size(getattr(variant, field) / size):>{max(len(head), WIDTH)}}"
    if variant.fits is not None:
        line += " yes " if variant.fits else " no  "
    if variant.seconds is not None:
        line += f" {variant.seconds:>7.2g}"
    return line.rstrip()


def notes(estimate: Estimate, recipe: Recipe, command: Command, unit: str, size: float) -> Iterator[str]:
    """The lines below the table."""
    yield "Sizes of one process. wire: bytes that it sends in a step. ckpt: activation"
    yield "checkpointing. *: the recipe's. Not counted: the device's own libraries"
    yield "(often 1 GiB), fragmentation, temporary tensors of the optimizer."
    other_sizes = {}
    for variant in estimate.variants:
        if variant.samples != estimate.micro_batch_size:
            other_sizes[variant.name] = variant.samples
    for name, samples in other_sizes.items():
        yield f"{name}: a micro-batch has {counted(samples, 'sample')}."
    if any(variant.seconds is not None for variant in estimate.variants):
        yield "seconds: a step if communication and computation overlap: a lower bound."
    if estimate.device_memory is None:
        return
    current = next((variant for variant in estimate.variants if variant.listed), None)
    if current is not None and current.fits:
        yield f"The recipe fits: {label(current)} needs {format_size(current.total / size)} {unit}."
        return
    best = estimate.smallest_change
    fitting = [label(variant) for variant in estimate.variants if variant.fits]
    if best is None and fitting:
        yield f"The recipe's plugins or its optimizer refuse each variant that fits: {', '.join(fitting)}."
        return
    if best is None:
        least = min(estimate.variants, key=lambda variant: variant.total)
        yield f"Nothing fits. {label(least)} needs {format_size(least.total / size)} {unit}."
        advice = "Use more processes"
        if estimate.micro_batch_size > 1:
            advice += f", or a smaller train.micro_batch_size (now {estimate.micro_batch_size})"
        yield f"{advice}."
        return
    yield f"Smallest change that fits ({format_size(best.total / size)} {unit}): {label(best)}"
    yield from ("  " + line for line in command.changed(recipe, best, estimate.variants).lines(76))


def label(variant: MemoryVariant) -> str:
    """A variant's name, with activation checkpointing."""
    return f"{variant.name} + activation checkpointing" if variant.checkpointing else variant.name

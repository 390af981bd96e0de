"""``fastloop plan``: resolve a recipe and show the plugins with reasons, without training or loading data."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names
from fastloop.distributed import ranks
from fastloop.recipe import secrets


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="For N processes.")] = None,
) -> None:
    """Resolve a recipe and print what would run: files with code, plugins in order with their effects, device, effective batch."""
    from fastloop.cli.messages import show_messages
    from fastloop.options import describe
    from fastloop.recipe import load_recipe
    from fastloop.recipe.importing import files
    from fastloop.registry import resolve
    from fastloop.runtime.hardware import this_machine
    from fastloop.state import AcceleratorDraft, DataLoaderDraft, OptimizerDraft

    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    show_messages()
    for file in files(loaded):
        typer.echo(f"runs the code of {file}")
    resolution = resolve(loaded)
    resolution.hooks.check_recipe(recipe=loaded)
    from fastloop.data.loaders import micro_batches
    from fastloop.distributed.accelerator import check_launcher

    drafts = [
        resolution.draft("configure_accelerator", AcceleratorDraft()),
        resolution.draft("configure_dataloader", DataLoaderDraft(pad_to_multiple_of=loaded.data.get("pad_to_multiple_of"))),
        resolution.draft("configure_optimizer", OptimizerDraft()),
    ]
    world_size = nproc or ranks.world_size()
    check_launcher(loaded, resolution, drafts[0].mixed_precision, world_size)
    device_batch, micro_steps = micro_batches(loaded, world_size)
    machine = this_machine(loaded.train.device)

    for number, plugin in enumerate(resolution.plugins, start=1):
        reference = loaded.references.get(plugin.name)
        reason = resolution.reasons[plugin.name] + (f" as {reference}" if reference else "")
        details = ", ".join(filter(None, (plugin.slot and f"slot {plugin.slot}", plugin.numerics, reason)))
        typer.echo(f"{number:>2}. {plugin.name}  ({details})")
        options = [
            f"{field.name}={secrets.hidden({field.name: value})[field.name]}"
            for field, default in zip(dataclasses.fields(plugin.config), describe(type(plugin).Config), strict=True)
            if (value := getattr(plugin.config, field.name)) is not None and str(value) != default.default
        ]
        options += [f"on_error={plugin.on_error}"] * (plugin.on_error != "raise")
        changes = [
            name if callable(value) else f"{name}={value}" for draft in drafts for name, value in draft.written_by(plugin.name).items()
        ]
        for line in (plugin.description, ", ".join(options), ", ".join(changes) and "sets " + ", ".join(changes)):
            if line:
                typer.echo(f"      {secrets.hide(line)}")
    typer.echo()
    typer.echo(f"recipe   {loaded.where}")
    typer.echo(f"device   {machine.device} ({machine.name}), computes in {', '.join(machine.dtypes)}")
    shares = f"= {device_batch} x {micro_steps} micro-steps x {world_size} processes"
    if splitter := drafts[1].writers.get("split"):
        shares = f"over {world_size} processes, split by {splitter}"
    typer.echo(f"batch    {loaded.train.batch_size} samples a step {shares}")
    typer.echo(f"length   {loaded.train.max_steps or f'{loaded.train.epochs} epochs'}{' steps' * bool(loaded.train.max_steps)}")
    typer.echo(f"output   {loaded.output}")

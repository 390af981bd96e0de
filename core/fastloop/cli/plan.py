"""``fastloop plan``: what would run, and why; trains nothing and loads no data."""

from __future__ import annotations

import dataclasses
import os

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names


def plan(recipe: RecipeName, overrides: Overrides = None, with_: With = "", without: Without = "") -> None:
    """Resolve a recipe and print what would run: plugins in order, what each changes, device, effective batch."""
    import rich
    from rich.table import Table

    from fastloop.machine import this_machine
    from fastloop.recipe import load_recipe
    from fastloop.registry import resolve
    from fastloop.state import AcceleratorDraft, DataLoaderDraft, OptimizerDraft

    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    resolution = resolve(loaded)
    resolution.hooks.check_recipe(recipe=loaded)
    from fastloop.accelerator import micro_batches

    drafts = [
        resolution.draft("configure_accelerator", AcceleratorDraft()),
        resolution.draft("configure_dataloader", DataLoaderDraft()),
        resolution.draft("configure_optimizer", OptimizerDraft()),
    ]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device_batch, micro_steps = micro_batches(loaded, world_size)
    machine = this_machine(loaded.train.device)

    table = Table("plugin", "slot", "numbers", "changes", "why", box=None, pad_edge=False)
    for plugin in resolution.plugins:
        written = [f"{name}={value}" for draft in drafts for name, value in draft.written_by(plugin.name).items()]
        options = [f"{field.name}={getattr(plugin.config, field.name)}" for field in dataclasses.fields(plugin.config)]
        changes = "; ".join(filter(None, (plugin.configures, ", ".join(written or options))))
        table.add_row(plugin.name, plugin.slot or "", plugin.parity, changes, resolution.reasons[plugin.name])
    rich.print(table)
    typer.echo()
    typer.echo(f"recipe   {loaded.where}")
    typer.echo(f"device   {machine.device} ({machine.name}), computes in {', '.join(machine.dtypes)}")
    typer.echo(f"batch    {loaded.train.batch_size} samples a step = {device_batch} x {micro_steps} micro-steps x {world_size} processes")
    typer.echo(f"length   {loaded.train.max_steps or f'{loaded.train.epochs} epochs'}{' steps' * bool(loaded.train.max_steps)}")
    typer.echo(f"output   {loaded.output}")

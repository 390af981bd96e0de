"""``fastloop plan``: resolve a recipe and show the plugins with reasons, without training or loading data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names
from fastloop.distributed import ranks
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from fastloop.plugins.manager import PluginSet


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="For N processes.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show slots, effects, options and all reasons.")
    ] = False,
) -> None:
    """Resolve a recipe and show what would run, without training.

    It shows the files whose code runs, the plugins in call order, the device and the effective batch.
    """
    from fastloop.cli.code_files import code_files
    from fastloop.cli.messages import show_messages
    from fastloop.cli.option_table import describe
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import load_recipe
    from fastloop.runtime.hardware import this_machine

    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    show_messages()
    for file in code_files(loaded):
        typer.echo(f"runs the code of {file}")
    with ranks.planned(nproc):
        world_size = ranks.world_size()
        resolved = resolve(loaded)
        loaded, resolution = resolved.recipe, resolved.plugins
        resolution.hooks.check_recipe(recipe=loaded, plugins=resolution)
        settings = resolution.configure(loaded)
    from fastloop.data.loaders import micro_batches
    from fastloop.distributed.groups import check_groups, count_sharing

    check_groups(loaded, settings, world_size)
    sharing = count_sharing(world_size, settings.processes_per_batch)
    device_batch, micro_steps = micro_batches(loaded, sharing)
    machine = this_machine(loaded.train.device)
    values = vars(settings) | {
        f"{field}[{key!r}]": value
        for field, mapping in vars(settings).items()
        if isinstance(mapping, Mapping)
        for key, value in mapping.items()
    }

    if not verbose:
        show_table(resolution)
    for number, plugin in enumerate(resolution.plugins if verbose else (), start=1):
        reference = loaded.references.get(plugin.name)
        reason = resolution.reasons[plugin.name] + (f" as {reference}" if reference else "")
        details = ", ".join(filter(None, (plugin.slot and f"slot {plugin.slot}", plugin.numerics, reason)))
        typer.echo(f"{number:>2}. {plugin.name}  ({details})")
        options = [
            f"{field.name}={secrets.hidden(value, secrets.is_secret(field.name))}"
            for field, default in zip(dataclasses.fields(plugin.config), describe(type(plugin).Config), strict=True)
            if (value := getattr(plugin.config, field.name)) is not None and str(value) != default.default
        ]
        options += [f"on_error={plugin.on_error}"] * (plugin.on_error != "raise")
        changes = [
            name if callable(values[name]) else f"{name}={values[name]}"
            for name, writer in settings.writers.items()
            if writer == plugin.name
        ]
        for line in (plugin.description, ", ".join(options), ", ".join(changes) and "sets " + ", ".join(changes)):
            if line:
                typer.echo(f"      {secrets.hide(line)}")
    typer.echo()
    typer.echo(f"recipe   {loaded.where}")
    typer.echo(f"device   {machine.device} ({machine.name}), computes in {', '.join(machine.dtypes)}")
    dealt = f"x {sharing} processes" if sharing == world_size else "on every process"
    shares = f"= {device_batch} x {micro_steps} micro-steps {dealt}"
    if splitter := settings.writers.get("split"):
        shares = f"over {world_size} processes, split by {splitter}"
    typer.echo(f"batch    {loaded.train.batch_size} samples a step {shares}")
    wrappers = [impl.plugin_name for impl in resolution.manager.hook.compute_loss.get_hookimpls() if impl.wrapper]
    if len(wrappers) > 1:
        typer.echo(f"loss     {' around '.join([*reversed(wrappers), str(resolution.in_slot('task'))])}")
    lengths = []
    if loaded.train.epochs is not None:
        lengths.append(f"{loaded.train.epochs} epochs")
    if loaded.train.max_steps is not None:
        lengths.append(f"{loaded.train.max_steps} steps")
    typer.echo(f"length   {' or '.join(lengths)}{', the shorter' if len(lengths) > 1 else ''}")
    typer.echo(f"output   {loaded.output}")
    if not verbose:
        typer.echo(f"\n`fastloop plan {recipe} -v` shows each plugin's effect and options.")


def show_table(resolution: PluginSet) -> None:
    """Print one row for each plugin: its place in call order, its numerics class, and why it runs."""
    import rich
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "plugin", "numerics", "reason", box=None, pad_edge=False)
    for number, plugin in enumerate(resolution.plugins, start=1):
        # without the details of a default
        parts = [part.partition(":")[0] for part in resolution.reasons[plugin.name].split("; ")]
        table.add_row(f"{number:>2}.", plugin.name, plugin.numerics, escape("; ".join(parts)))
    rich.print(table)

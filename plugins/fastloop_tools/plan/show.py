"""Show a resolved recipe: its files with code, its plugins with reasons, the device, the batch and the length.

``plan_to_dict`` has the same parts for programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from fastloop.cli.arguments import RecipeArguments
from fastloop.cli.messages import show_messages
from fastloop.cli.option_table import describe
from fastloop.cli.tables import print_table
from fastloop.distributed import ranks
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.manager import PluginSet
from fastloop.plugins.plugin import Plugin, shown_numerics
from fastloop.plugins.resolve import resolve
from fastloop.problem import counted
from fastloop.recipe import Recipe, secrets
from fastloop.runtime import hardware
from fastloop.settings import Settings
from fastloop_tools.plan.code_files import code_files
from fastloop_tools.shared.command_lines import command_line


@dataclass(frozen=True)
class Plan:
    """A recipe that was resolved and checked, without data and weights.

    Attributes:
        world_size: Number of processes.
    """

    recipe: Recipe
    plugins: PluginSet
    settings: Settings
    world_size: int


@dataclass(frozen=True)
class StepBatch:
    """How the samples of a step are shared.

    Attributes:
        samples: Samples of a step, over all processes.
        micro_batch_size: Samples of a micro-batch of one process.
        micro_steps: Micro-batches of a step on one process.
        processes: Number of processes.
        shares: Number of groups of processes that read different samples.
        splitter: The plugin that splits a step over the processes in another way; empty: none does.
    """

    samples: int
    micro_batch_size: int
    micro_steps: int
    processes: int
    shares: int
    splitter: str

    def __str__(self) -> str:
        """For people: ``32 samples a step = 8 x 2 micro-steps x 2 processes``."""
        micro_steps = f"{self.micro_batch_size} x {counted(self.micro_steps, 'micro-step')}"
        if self.splitter:
            shares = f"over {counted(self.processes, 'process')}, split by {self.splitter}"
        elif self.shares == self.processes:
            shares = f"= {micro_steps} x {counted(self.shares, 'process')}"
        else:
            shares = f"= {micro_steps} on every process"
        return f"{self.samples} samples a step {shares}"


def show_plan(arguments: RecipeArguments, nproc: int | None, verbose: bool) -> None:
    """Resolve a recipe, and print what would run.

    Args:
        nproc: Plan for this many processes; None: for those of the launcher.

    Raises:
        UsageError: The recipe is wrong.
    """
    recipe = arguments.load()
    show_messages()
    for file in code_files(recipe):
        typer.echo(f"runs the code of {file}")
    plan = make_plan(recipe, nproc)
    check_output(plan)
    batch = read_batch(plan)  # refuses a batch that does not divide, before anything else is printed
    if verbose:
        for number, plugin in enumerate(plan.plugins, start=1):
            show_plugin(number, plugin, plan)
    else:
        show_table(plan.plugins)
    typer.echo()
    show_facts(plan, batch)
    if not verbose:
        plugins = {"--with": list(arguments.with_plugins), "--without": list(arguments.without_plugins)}
        options = plugins | {"--nproc": nproc, "-v": True}
        command = command_line("plan", [arguments.recipe, *arguments.overrides], options)
        typer.echo(f"\n`{command}` shows each plugin's effect and options.")


def make_plan(recipe: Recipe, nproc: int | None, any_machine: bool = False) -> Plan:
    """Resolve and check a recipe, and collect the settings of its plugins.

    Args:
        nproc: See ``show_plan``.
        any_machine: Whether the plugins may lack a requirement on this machine.

    Raises:
        UsageError: The recipe is wrong.
    """
    with ranks.planned(nproc):
        world_size = ranks.world_size()
        resolved = resolve(recipe, any_machine=any_machine)
        plugins = resolved.plugins
        # only here: it imports torch, and errors of the recipe come before
        from fastloop.lifecycle import check_task

        plugins.hooks.check_recipe(recipe=resolved.recipe, plugins=plugins)
        check_task(resolved.recipe, plugins)
        settings = plugins.configure(resolved.recipe)
    return Plan(resolved.recipe, plugins, settings, world_size)


def check_output(plan: Plan) -> None:
    """Check that a new run may use the output folder of a recipe.

    Raises:
        RecipeError: It holds other files than those of a run.
    """
    from fastloop.checkpoint.run_folder import check_contents  # imports torch

    check_contents(Path(plan.recipe.output), plan.recipe.where)


def read_batch(plan: Plan) -> StepBatch:
    """How the samples of a step are shared.

    Raises:
        UsageError: The batch or the processes do not divide.
    """
    from fastloop.data.loaders import divide_step  # imports torch
    from fastloop.distributed.groups import check_groups, count_sharing

    recipe = plan.recipe
    settings = plan.settings
    check_groups(recipe, settings, plan.world_size)
    shares = count_sharing(plan.world_size, settings.processes_per_batch)
    micro_batches = divide_step(recipe, shares)
    return StepBatch(
        samples=recipe.train.batch_size,
        micro_batch_size=micro_batches.size,
        micro_steps=micro_batches.steps,
        processes=plan.world_size,
        shares=shares,
        splitter=settings.writers.get("split_step", ""),
    )


def show_table(plugins: PluginSet) -> None:
    """Print one row for each plugin: its place in call order, its numerics class, and why it runs."""
    table = Table("", "plugin", "numerics", "reason", box=None, pad_edge=False)
    for number, plugin in enumerate(plugins, start=1):
        # a reason such as "on by default: every run logs; moved after 'x'", without the details of the default
        reasons = plugins.reasons[plugin.name].split("; ")
        short = "; ".join(reason.partition(":")[0] for reason in reasons)
        table.add_row(f"{number:>2}.", plugin.name, numerics_of(plugin), escape(short))
    print_table(table)


def show_plugin(number: int, plugin: Plugin, plan: Plan) -> None:
    """Print a plugin in detail: slot, numerics class, reason, effect, options and the settings that it changes."""
    details = [numerics_of(plugin), plan.plugins.reasons[plugin.name]]
    if plugin.slot:
        details.insert(0, f"slot {plugin.slot}")
    reference = plan.recipe.references.get(plugin.name)
    if reference:
        details[-1] += f" as {reference}"
    typer.echo(f"{number:>2}. {plugin.name}  ({', '.join(details)})")
    options = [f"{name}={value}" for name, value in changed_options(plugin).items()]
    lines = [plugin.description, ", ".join(options)]
    settings = []
    for name, value in changed_settings(plugin, plan.settings).items():
        settings.append(name if callable(value) else f"{name}={value}")
    if settings:
        lines.append("sets " + ", ".join(settings))
    for line in lines:
        if line:
            typer.echo(f"      {secrets.hide(line)}")


def numerics_of(plugin: Plugin) -> str:
    """The numerics class of a plugin with its options, which may change it: ``not declared`` if it declares none."""
    return plugin.numerics if "numerics" in vars(plugin) else shown_numerics(type(plugin))


def changed_options(plugin: Plugin) -> dict[str, Any]:
    """The options that differ from their defaults, with secrets hidden."""
    defaults = {info.name: info.default for info in describe(options_of(type(plugin)))}
    changed = {}
    for name, value in plugin.option_values().items():
        if value is not None and str(value) != defaults[name]:
            changed[name] = secrets.hidden(value, secrets.is_secret(name))
    return changed


def changed_settings(plugin: Plugin, settings: Settings) -> dict[str, Any]:
    """The settings that a plugin has set, such as ``mixed_precision`` and ``optimizer['fused']``."""
    values: dict[str, Any] = dict(vars(settings))
    for field, mapping in vars(settings).items():
        if isinstance(mapping, Mapping):
            values |= {f"{field}[{key!r}]": value for key, value in mapping.items()}
    return {name: values[name] for name, writer in settings.writers.items() if writer == plugin.name}


def loss_order(plan: Plan) -> list[str]:
    """The plugins that compute the loss, the outermost wrapper first and the task last."""
    wrappers = [impl.plugin_name for impl in plan.plugins.manager.hook.compute_loss.get_hookimpls() if impl.wrapper]
    return [*reversed(wrappers), str(plan.plugins.in_slot("task"))]


def show_facts(plan: Plan, batch: StepBatch) -> None:
    """Print the recipe's file, the device, the batch, the loss, the length and the output folder."""
    recipe = plan.recipe
    machine = hardware.this_machine(recipe.train.device)
    typer.echo(f"recipe   {recipe.where}")
    typer.echo(f"device   {machine.device} ({machine.name}), computes in {', '.join(machine.dtypes)}")
    typer.echo(f"batch    {batch}")
    order = loss_order(plan)
    if len(order) > 2:
        typer.echo(f"loss     {' around '.join(order)}")
    lengths = []
    if recipe.train.epochs is not None:
        lengths.append(counted(recipe.train.epochs, "epoch"))
    if recipe.train.max_steps is not None:
        lengths.append(counted(recipe.train.max_steps, "step"))
    shorter = ", the shorter" if len(lengths) > 1 else ""
    typer.echo(f"length   {' or '.join(lengths)}{shorter}")
    typer.echo(f"output   {recipe.output}")

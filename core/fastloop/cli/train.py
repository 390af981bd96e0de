"""``fastloop train``: train a recipe and print its summary."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli import launch
from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names
from fastloop.distributed import signals
from fastloop.metric_modes import direction
from fastloop.plugins.hook_replacement import replace
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from fastloop.cli.hook_timing import HookTimer


def with_resume_value(arguments: list[str]) -> list[str]:
    """``--resume`` of `train` has an optional value. Add an empty value to the bare option, so that the next argument
    is not parsed as its value. Arguments of other commands stay as they are."""
    if arguments[:1] != ["train"]:
        return arguments
    result = []
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        bare = argument == "--resume" and (
            following is None or following.startswith("-") or "=" in following or following.endswith((".yaml", ".yml"))
        )
        result.append("--resume=" if bare else argument)
    return result


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            help="Resume from the newest checkpoint in PATH, or from the checkpoint PATH. Without PATH: from the "
            "output folder; "
            "start a new run if it has no checkpoint.",
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")] = None,
    nnodes: Annotated[int, typer.Option(min=1, metavar="K", help="Machines that start N processes each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, metavar="I", help="Index of this machine, from 0.")] = 0,
    master: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of machine 0.")] = None,
    trace_hooks: Annotated[
        bool, typer.Option("--trace-hooks", help="Print the number and time of the calls of each plugin's hooks.")
    ] = False,
    fast_dev_run: Annotated[
        bool,
        typer.Option(
            "--fast-dev-run",
            help="Check the recipe: two steps, one batch of each evaluation, save, resume, export. Keeps no files.",
        ),
    ] = False,
    overfit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Check the recipe: train on N samples until the loss is near zero."),
    ] = None,
) -> None:
    """Train a recipe: write the run folder and print its summary.

    SIGTERM, SIGUSR1 and Ctrl-C save at the end of the step and stop; a second one stops at once. Exit codes: 0 done; 1
    the run failed; 2 usage error; 75 stopped by SIGTERM or SIGUSR1, continue with --resume; 130 stopped by Ctrl-C.
    """
    from fastloop.cli import quick_checks
    from fastloop.cli.hook_timing import HookTimer
    from fastloop.cli.messages import show_messages
    from fastloop.cli.startup import reduced_gc, start_run, started_from
    from fastloop.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    loaded.source = loaded.source and started_from(loaded.source)
    command = ["train", recipe, *(overrides or ())]
    for key, listed in (("--with", names(with_)), ("--without", names(without))):
        command += [key, ",".join(listed)] if listed else []
    command += (
        ["--trace-hooks"] * trace_hooks
        + ["--fast-dev-run"] * fast_dev_run
        + ["--overfit", str(overfit)] * (overfit is not None)
    )
    quick_checks.check_options(fast_dev_run, overfit, resume, nproc)
    if fast_dev_run or overfit:
        quick_checks.prepare(loaded, overfit)
    if nproc is not None:
        resumed = [] if resume is None else [f"--resume={resume}"]
        raise typer.Exit(launch.launch([*command, *resumed], nproc, nnodes, node_rank, master, Path(loaded.output)))
    launch.end_with_launcher()
    timer = HookTimer()
    with signals.on_signals(signals.stop_now):
        show_messages()
        with reduced_gc():
            resolved = launch.resolve_early(loaded)
            launch.start_again(resolved)
        if fast_dev_run or overfit:
            raise typer.Exit(
                quick_checks.run_overfit(resolved, overfit) if overfit else quick_checks.run_fast_dev_run(resolved)
            )
        if trace_hooks:
            replace(resolved.plugins, timer)
        with start_run(resolved, resume=launch.resume_from(resume, Path(loaded.output))) as run:
            from fastloop.lifecycle import execute  # only here: it imports torch, and errors of the recipe come before

            if trace_hooks and run.plugins is not resolved.plugins:  # some of the selected plugins were left out
                replace(run.plugins, timer)
            summary = execute(run)
        if run.is_main:
            if trace_hooks:
                show_calls(timer)
            show_summary(summary, run.folder)
            if run.interrupted:
                resume_command = " ".join(
                    filter(None, [shlex.join(["fastloop", *command]), launch.options(), "--resume"])
                )
                saved = (
                    "and saved"
                    if run.saver.last_saved_step == run.state.step
                    else f"(newest checkpoint: {run.saver.last_saved_step})"
                )
                typer.echo(secrets.hide(f"Stopped {saved} at step {run.state.step}. Continue with: {resume_command}"))
        raise typer.Exit(launch.end(run, signals.exit_code(run.interrupted) if run.interrupted else 0))


def show_calls(timer: HookTimer) -> None:
    """Print the number and time of the calls of plugins' hooks in this process, in the order of their first calls."""
    import rich
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("plugin", "hook"):
        table.add_column(column, no_wrap=True)
    for column in ("calls", "seconds", "us a call"):
        table.add_column(column, justify="right", no_wrap=True)
    for calls in timer.sorted_calls():
        microseconds = 1e6 * calls.seconds / calls.count
        table.add_row(calls.plugin, calls.hook, str(calls.count), f"{calls.seconds:.3f}", f"{microseconds:,.1f}")
    rich.print(table)
    typer.echo("Seconds on the host, without nested hooks.\n")


def describe_model(summary: Mapping[str, Any]) -> str:
    """Which weights ``model/`` has: ``weights of step 54, f1 0.9889, the best``. Their metrics follow if they are not
    those of the row ``validation``."""
    step, best = summary["model_step"], summary["best"]
    parts = [f"weights of step {step}"]
    if summary["model_weights"] != "trained":
        parts.append(summary["model_weights"])
    metrics = summary["model_metrics"] or {}
    is_best = best is not None and best["step"] == step
    shown = {} if metrics == summary["validation"] else metrics
    if is_best:  # first the metric that chose them
        shown = {best["metric"]: best["value"], **shown}
    parts += [f"{name} {value:.4f}" for name, value in shown.items()]
    if is_best:
        parts.append("the best")
    elif step == summary["steps"]:
        parts.append("the last")
    return ", ".join(parts)


def show_summary(summary: dict[str, Any], folder: Path) -> None:
    """Print the table at a run's end."""
    import rich
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: str) -> None:
        table.add_row(name, value)

    row("status", summary["status"] + (f" ({secrets.hide(summary['reason'])})" if summary["reason"] else ""))
    for split in ("validation", "test"):
        if summary[split]:
            row(split, ", ".join(f"{name} {value:.4f}" for name, value in summary[split].items()))
    if best := summary["best"]:
        better = direction(best.get("mode"))  # a plugin of somebody else's may leave it out
        row("best", f"{best.get('metric', '')} {best['value']:.4f} at step {best['step']}{better}".lstrip())
    if summary["model_step"] is not None:
        row("model", describe_model(summary))
    row("steps", f"{summary['steps']} ({summary['epochs']} epochs, {summary['samples']} samples)")
    spent = ("train", "evaluate", "save", "startup", "compile")
    row(
        "seconds", ", ".join(f"{name} {summary[f'{name}_seconds']:.1f}" for name in spent if summary[f"{name}_seconds"])
    )
    tokens = f", {summary['tokens_per_second']:.0f} tokens/s" if summary["tokens_per_second"] else ""
    row("speed", f"{summary['samples_per_second']:.1f} samples/s{tokens}")
    processes = "1 process" if summary["world_size"] == 1 else f"{summary['world_size']} processes"
    row("memory", f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB at the peak, {summary['device']}, {processes}")
    row("plugins", ", ".join(name + " (disabled)" * (name in summary["disabled"]) for name in summary["plugins"]))
    row("run folder", str(folder))
    rich.print(table)

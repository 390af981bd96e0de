"""``fastloop train``: train a recipe and print its summary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastloop.cli import launch
from fastloop.cli.arguments import NoCode, Overrides, RecipeArguments, RecipeName, With, Without
from fastloop.distributed import signals
from fastloop.recipe import secrets

if TYPE_CHECKING:
    from fastloop.plugins.resolve import ResolvedRecipe
    from fastloop.recipe import Recipe
    from fastloop.run import Run


def with_resume_value(arguments: list[str]) -> list[str]:
    """``--resume`` of `train` has an optional value. Add an empty value to the bare option, so that the next argument
    is not parsed as its value."""
    complete = []
    for index, argument in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else None
        is_bare = argument == "--resume" and not _is_resume_path(following)
        complete.append("--resume=" if is_bare else argument)
    return complete


def _is_resume_path(argument: str | None) -> bool:
    """Whether the argument after ``--resume`` is its value, and no option, override or recipe."""
    if argument is None or argument.startswith("-") or "=" in argument:
        return False
    return not argument.endswith((".yaml", ".yml"))


def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[PATH]",
            help="Resume from the newest checkpoint in PATH, or from the checkpoint PATH. Without PATH: from the "
            "output folder; start a new run if it has no checkpoint.",
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

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C save at the end of the step and stop; a second one stops at once. Exit codes: 0
    done; 1 the run failed; 2 usage error; 75 stopped by SIGTERM, SIGUSR1 or SIGHUP; 130 stopped by Ctrl-C. After both,
    continue with --resume.
    """
    from fastloop.cli import quick_checks, startup
    from fastloop.cli.messages import show_messages

    arguments = RecipeArguments.read(recipe, overrides, with_, without)
    loaded = arguments.load()
    if loaded.source is not None:
        loaded.source = startup.started_from(loaded.source)
    quick_checks.check_options(fast_dev_run, overfit, resume, nproc)
    if fast_dev_run or overfit is not None:
        quick_checks.prepare(loaded, overfit)
    command = ["train", *arguments.words(), *_quick_words(trace_hooks, fast_dev_run, overfit)]
    if nproc is not None:
        if resume is not None:
            command.append(f"--resume={resume}")
        raise typer.Exit(launch.launch(command, nproc, nnodes, node_rank, master, Path(loaded.output)))

    startup.end_with_launcher()
    with signals.on_signals(signals.stop_now):
        show_messages()
        resolved = _start_process(loaded)
        if fast_dev_run:
            code = quick_checks.run_fast_dev_run(resolved)
        elif overfit is not None:
            code = quick_checks.run_overfit(resolved, overfit)
        else:
            resume_path = startup.resume_from(resume, Path(loaded.output))
            code = _train_and_report(resolved, resume_path, trace_hooks, command)
        raise typer.Exit(code)


def _quick_words(trace_hooks: bool, fast_dev_run: bool, overfit: int | None) -> list[str]:
    """The options of a command line that change no recipe."""
    words = []
    if trace_hooks:
        words.append("--trace-hooks")
    if fast_dev_run:
        words.append("--fast-dev-run")
    if overfit is not None:
        words += ["--overfit", str(overfit)]
    return words


def _start_process(recipe: Recipe) -> ResolvedRecipe:
    """Resolve a recipe, and restart this process if its plugins need environment variables."""
    from fastloop.cli import startup

    with startup.reduced_gc():
        resolved = startup.resolve_early(recipe)
        startup.start_again(resolved)
    return resolved


def _train_and_report(resolved: ResolvedRecipe, resume: Path | None, trace_hooks: bool, command: Sequence[str]) -> int:
    """Train, and print the summary.

    Args:
        resume: The run folder or checkpoint to resume from.
        command: The words of this command, without ``--resume``: a stopped run prints them.

    Returns:
        The exit code.
    """
    from fastloop.cli.ending import end_process_group
    from fastloop.cli.hook_timing import HookTimer, show_calls
    from fastloop.cli.startup import start_run
    from fastloop.cli.summary import is_brief, show_line, show_summary
    from fastloop.plugins.hook_replacement import replace

    timer = HookTimer()
    if trace_hooks:
        replace(resolved.plugins, timer)
    with start_run(resolved, resume=resume) as run:
        from fastloop.lifecycle import execute  # only here: it imports torch, and errors of the recipe come before

        if trace_hooks and run.plugins is not resolved.plugins:  # some of the selected plugins were left out
            replace(run.plugins, timer)
        summary = execute(run)
    if run.is_main:
        if trace_hooks:
            show_calls(timer)
        if is_brief():
            show_line(summary, run.folder)
        else:
            show_summary(summary, run.folder)
            if run.interrupted:
                _show_stop(run, command)
    return end_process_group(run)


def _show_stop(run: Run, command: Sequence[str]) -> None:
    """Print that a signal stopped the run, and the command that continues it."""
    words = [shlex.join(["fastloop", *command]), launch.options(), "--resume"]
    resume_command = " ".join(word for word in words if word)
    last_saved = run.saver.last_saved_step
    if last_saved is None:
        typer.echo(f"Stopped at step {run.state.step} without a checkpoint.")
        return
    saved = "and saved" if last_saved == run.state.step else f"(newest checkpoint: {last_saved})"
    typer.echo(secrets.hide(f"Stopped {saved} at step {run.state.step}. Continue with: {resume_command}"))

"""``fastloop evaluate``: the metrics of a trained model, without training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import Annotated, Any

import typer

from fastloop.cli import ending, launch, startup
from fastloop.cli.arguments import NoCode, With, Without, names, output_file
from fastloop.cli.tables import print_table
from fastloop.distributed import signals
from fastloop.errors import UsageError
from fastloop.problem import counted
from fastloop.recipe import Inference, Recipe, secrets
from fastloop.runtime import json_text

Target = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run folder, such as runs/quickstart, or an exported model.")
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...",
        help="The recipe of an exported model, and overrides, such as data.limit.test=1000. A run has its own recipe.",
    ),
]


@dataclass(frozen=True)
class Request:
    """One call of `fastloop evaluate` for a split or a file.

    Attributes:
        arguments: The recipe and overrides, as on the command line.
        file: The file to evaluate as ``split``; None: the recipe's data.
        worst: Samples to show and store; 0: none.
        keep: Columns of the file to show with them.
        plugin_options: --with and --without, as on the command line.
    """

    target: str
    arguments: list[str]
    split: str
    file: Path | None
    json_file: str
    worst: int
    keep: list[str]
    plugin_options: list[str]


def evaluate(
    target: Target,
    arguments: Arguments = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The split to evaluate: train, validation or test. Default: test, or validation if the run had no "
            "test split.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A file to evaluate instead, with the recipe's columns."),
    ] = None,
    json_file: Annotated[
        str,
        output_file(
            "--json", "Also write the results to this file, and the confusion matrix beside it as .svg.", stdout=True
        ),
    ] = "",
    worst: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Also show and store the N samples whose targets have the lowest probability, with file, line and "
            "input.",
        ),
    ] = 0,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B", help="With --worst: columns of the file to show, such as id; all: every one."),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Evaluate a language model on these tasks of the library lm-eval instead; needs the extra lm-eval.",
        ),
    ] = None,
    task_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with your own task files, for --tasks.")
    ] = None,
    trust_task_code: Annotated[
        bool, typer.Option("--trust-task-code", help="Let the files of --task-folder run code.")
    ] = False,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")] = None,
    with_: With = None,
    without: Without = None,
    no_code: NoCode = False,
) -> None:
    """Evaluate a trained model on a split or a file.

    Shows the loss, the task's metrics, and the metrics of each class. They equal the metrics that the training run
    computes for the same split and number of processes, up to the rounding of the plugins that `auto` selects. The
    results are also written to RUN/evaluation, where `fastloop report RUN` finds them.
    """
    from fastloop_tools.inference.target import default_split, load

    if task_folder and not tasks:
        raise UsageError(
            "expected the names of its tasks, too: --tasks A,B",
            code="missing-value",
            place=f"--task-folder {task_folder}",
        )
    if tasks:
        refuse_beside_tasks(
            {
                "--file": file,
                "--worst": worst,
                "--keep": keep,
                "--nproc": nproc,
                "--with": with_,
                "--without": without,
            }
        )
        evaluate_tasks(target, arguments or [], names(tasks), task_folder, trust_task_code, json_file)
        return
    if keep and not worst:
        raise UsageError(
            "it adds columns to the samples of --worst.",
            code="missing-value",
            place="--keep",
            remedy="Give --worst N, too. For the predictions of all rows: `fastloop predict RUN FILE --keep ...`.",
        )
    if split is None:
        split = "test" if file is not None else default_split(target, arguments or [])
    request = Request(
        target=target,
        arguments=arguments or [],
        split=split,
        file=file,
        json_file=json_file,
        worst=worst,
        keep=names(keep),
        plugin_options=plugin_options(names(with_), names(without)),
    )
    recipe = load(target, request.arguments, Inference(Path(), split), names(with_), names(without))
    if nproc is None:
        evaluate_here(recipe, request)
    else:
        raise typer.Exit(start_processes(recipe, request, nproc))


def refuse_beside_tasks(options: Mapping[str, Any]) -> None:
    """Raise an error for options that have no effect beside --tasks: option -> its value."""
    without_effect = [name for name, value in options.items() if value]
    if without_effect:
        raise UsageError(
            f"found {', '.join(without_effect)} beside it, which has no effect on tasks.",
            code="exclusive-options",
            place="--tasks",
            remedy="Leave it out.",
        )


def evaluate_tasks(
    target: str, arguments: list[str], tasks: list[str], folder: Path | None, trust_code: bool, json_file: str
) -> None:
    """Evaluate a language model on tasks of lm-eval, and report the results."""
    from fastloop_tools.inference import benchmarks

    with signals.on_signals(signals.stop_now):
        log_to_stderr(json_file)
        record = benchmarks.evaluate_tasks(target, arguments, tasks, folder, trust_code)
        report(record, json_file)


def plugin_options(with_plugins: list[str], without_plugins: list[str]) -> list[str]:
    """The options of plugins as on a command line: ``["--with", "amp,ema"]``."""
    options: list[str] = []
    if with_plugins:
        options += ["--with", ",".join(with_plugins)]
    if without_plugins:
        options += ["--without", ",".join(without_plugins)]
    return options


def start_processes(recipe: Recipe, request: Request, count: int) -> int:
    """Evaluate on several processes of this machine: each runs the same command without --nproc. Returns the exit
    code."""
    command = ["evaluate", request.target, *request.arguments, "--split", request.split]
    command += ["--worst", str(request.worst), *request.plugin_options]
    if request.file is not None:
        command += ["--file", str(request.file)]
    if request.keep:
        command += ["--keep", ",".join(request.keep)]
    if request.json_file:
        command += ["--json", request.json_file]
    assert recipe.inference is not None
    assert recipe.inference.model is not None
    return launch.launch(command, nproc=count, nnodes=1, node_rank=0, master=None, output=recipe.inference.model)


def evaluate_here(recipe: Recipe, request: Request) -> None:
    """Evaluate in this process, one of several if a launcher has started it. The main process reports the results."""
    from fastloop_tools.inference.class_scores import ClassCounts, scored_classes
    from fastloop_tools.inference.target import open_inference, read_file_instead
    from fastloop_tools.inference.worst import worst_samples

    if request.file is not None:
        read_file_instead(recipe, request.file)
    startup.end_with_launcher()
    with signals.on_signals(signals.stop_now):
        log_to_stderr(request.json_file)
        counts = ClassCounts()
        with open_inference(recipe, [counts], request.file) as run:
            from fastloop import loop  # only here: it imports torch

            started = perf_counter()
            loop.evaluate(run, request.split)
            record: dict[str, Any] = {
                "model": request.target,
                "split": request.split,
                "file": str(request.file) if request.file else None,
                "arguments": [*request.arguments, *request.plugin_options],
                "metrics": run.state.metrics[request.split],
                "metric_classes": scored_classes(run),
                **counts.results(run),
                "device": str(run.device),
                "world_size": run.world_size,
                "seconds": perf_counter() - started,
            }
            if request.worst:
                record["worst"] = worst_samples(run, request.split, request.worst, request.keep)
            if run.is_main:
                report(record, request.json_file)
        ending.end_process_group(run)


def log_to_stderr(json_file: str) -> None:
    """If the results go to stdout, print log messages to stderr."""
    if json_file == "-":
        import rich

        rich.reconfigure(stderr=True)


def report(record: dict[str, Any], json_file: str) -> None:
    """Show the results, and write them to the run folder, if the model is one of a run."""
    from fastloop_tools.inference.saved import save

    target = record["model"]
    show(record, json_file)
    if not (Path(target) / "recipe.yaml").is_file():
        return
    saved = save(Path(target), record, record["arguments"])
    if saved and json_file != "-":
        typer.echo(f"written to {saved}; page: fastloop report {quote(target)}")


def show(record: dict[str, Any], json_file: str) -> None:
    """Print the results as tables, and write them to ``json_file``; ``-``: print JSON only."""
    text = json_text.dumps(secrets.hidden(record), indent=2) + "\n"
    if json_file == "-":
        typer.echo(text, nl=False)
        return
    if "tasks" in record:
        from fastloop_tools.inference.benchmarks import show_tasks

        show_tasks(record["tasks"])
    else:
        show_metrics(record["metrics"], record["metric_classes"], record["file"] or record["split"])
    show_classes(record.get("entities") or [], "entity")
    show_classes(record.get("classes") or [], "class")
    if "worst" in record:
        show_worst(record["worst"])
    if json_file:
        write_results(record, text, Path(json_file))


def show_metrics(metrics: Mapping[str, float], classes: Mapping[str, str], source: str) -> None:
    """Print a line for each metric: ``test accuracy 0.9300``, or ``test f1 of spam 0.8600``.

    Args:
        classes: Metric -> the class that it scores, for metrics of one of two classes.
        source: The split or file.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in metrics.items():
        scored = classes.get(name)
        of_class = f" of {scored}" if scored else ""
        table.add_row(escape(f"{source} {name}{of_class}"), f"{value:.4f}")
    print_table(table)


def show_classes(classes: list[dict[str, Any]], title: str) -> None:
    """Print precision, recall, f1 and samples of each class, if there are any."""
    from fastloop_tools.shared.tables import show_table

    columns = ("precision", "recall", "f1")
    rows = []
    for row in classes:
        values = [f"{row[column]:.4f}" for column in columns]
        rows.append([row["name"], *values, str(row["samples"])])
    if rows:
        show_table([title, *columns, "samples"], rows)


def write_results(record: dict[str, Any], text: str, file: Path) -> None:
    """Write the results, and beside them a picture of the confusion matrix, if the task has classes."""
    from fastloop.runtime.files import write

    write(file, text, hidden=True)
    typer.echo(f"written to {file}")
    classes = record["classes"]
    if not classes:
        return
    from fastloop_tools.shared.matrix_picture import draw

    picture = file.with_suffix(".svg")
    samples = sum(row["samples"] for row in classes)
    title = f"{record['model']} on {record['file'] or record['split']}: {counted(samples, 'sample')}"
    write(picture, draw([row["name"] for row in classes], record["confusion"], title))
    typer.echo(f"confusion matrix in {picture}")


def show_worst(rows: list[dict[str, Any]]) -> None:
    """Print the samples that the model got most wrong."""
    from fastloop_tools.shared.tables import show_table

    if not rows:
        typer.echo("--worst: the task gives no score for each class, so there is no order of its samples.")
        return
    cells = []
    for row in rows:
        cells.append(
            [
                row["place"] or str(row["index"]),
                row["target"],
                f"{row['target_probability']:.4f}",
                row["prediction"],
                f"{row['prediction_probability']:.4f}",
                *(str(value) for value in row["kept"].values()),
                row["input"] or "",
            ]
        )
    kept_names = list(rows[0]["kept"])
    head = ["sample", "target", "P(target)", "prediction", "P(prediction)", *kept_names, "input"]
    show_table(head, cells, wraps=-1)

"""``fastloop lr-find``: suggests a learning rate by a range test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli import launch
from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names, output_file
from fastloop.errors import UsageError
from fastloop_tools.report.charts import Frame, Size, find_limits, line_chart
from fastloop_tools.report.charts import svg as document
from fastloop_tools.report.metrics import Series

if TYPE_CHECKING:
    from fastloop.recipe import Recipe
    from fastloop.run import Run
    from fastloop_tools.lr_find.finder import LRFinder

ROWS = 12
"""Rows of the table, at equal distances of the steps."""
LEFT_OUT = ("checkpoint-best", "early-stopping", "nan-guard")
"""Plugins that have no part in a range test, beside those that only observe: two need an evaluation, and one ends a run
that diverges."""
SIZE = Size(width=480, height=240, top=10, right=12, bottom=30, ticks=4)
TITLE, FOOT = 34, 24
"""Pixels above and below the chart, for the title and the name of the axis."""
STYLE = (
    ".axis { stroke: #c4cad4; } .line { fill: none; stroke-width: 2; } .loss { stroke: #8a8f98; stroke-width: 1; } "
    ".smoothed { stroke: #2f6db5; } .chosen { stroke: #2a7f62; stroke-width: 2; stroke-dasharray: 4 3; }"
)


def lr_find(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    low: Annotated[float, typer.Option("--min", metavar="RATE", help="The rate of the first step.")] = 1e-7,
    high: Annotated[float, typer.Option("--max", metavar="RATE", help="The rate of the last step.")] = 10.0,
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Optimizer steps at most.")] = 100,
    nproc: Annotated[int | None, typer.Option(min=1, metavar="N", help="Start N processes on this machine.")] = None,
    svg: Annotated[str, output_file("--svg", "The chart to write [default: runs/lr-find-RECIPE.svg].")] = "",
    json_file: Annotated[str, output_file("--json", "Also write the results to this file; -: stdout.")] = "",
) -> None:
    """Suggest a learning rate, from a few steps with growing rates.

    The rate grows exponentially from --min to --max. The test stops when the loss diverges. It suggests a tenth of the
    rate at which the loss was lowest. No run and no checkpoint is written.
    """
    from fastloop.cli.messages import show_messages
    from fastloop.recipe import load_recipe

    if not 0 < low < high:
        raise UsageError(f"--min {low:g} --max {high:g}: expected two rates above 0, the lower one first.")
    loaded = load_recipe(recipe, overrides or (), names(with_), names(without))
    name = loaded.source.stem if loaded.source else "recipe"
    picture = Path(svg or f"runs/lr-find-{name}.svg")
    if nproc is not None:
        from fastloop_tools.trials.runs import option_words

        given = {"--with": names(with_), "--without": names(without), "--min": low, "--max": high, "--steps": steps}
        command = ["lr-find", recipe, *(overrides or ()), *option_words(given | {"--svg": svg, "--json": json_file})]
        raise typer.Exit(launch.launch(command, nproc, 1, 0, None, picture))
    launch.end_with_launcher()
    if json_file == "-":
        import rich

        rich.reconfigure(stderr=True)  # log messages must not mix with JSON
    show_messages()
    launch.start_again(resolved := launch.resolve_early(loaded))
    from fastloop_tools.lr_find.finder import LRFinder

    finder = LRFinder(low, high, steps)
    run = range_test(resolved.recipe, finder)
    if run.is_main:
        show(describe(finder, name), picture, json_file)
    launch.end(run)


def range_test(recipe: Recipe, finder: LRFinder) -> Run:
    """Train the steps of a range test. Its run folder is temporary."""
    from fastloop.plugins.installed import defaults
    from fastloop.plugins.resolve import load_listed
    from fastloop_tools.trials.worker import train_short

    plugins = {name: load_listed(recipe, name) for name, options in recipe.plugins.items() if options is not False}
    plugins |= {name: point.load() for name, point in defaults().items()}
    observers = [name for name, plugin in plugins.items() if plugin.read_only]
    return train_short(recipe, finder, [*observers, *LEFT_OUT], max_steps=finder.steps, evaluate_every=None)


def describe(finder: LRFinder, recipe: str) -> dict[str, Any]:
    """The results as JSON values: ``suggestion`` is None if the loss did not fall by more than its noise."""
    from dataclasses import asdict

    from fastloop_tools.lr_find.finder import smooth, suggest

    found = suggest(finder.rates, finder.losses, finder.steps)
    return {
        "recipe": recipe,
        "suggestion": asdict(found) if found else None,
        "diverged": finder.diverged,
        "rates": finder.rates,
        "losses": finder.losses,
        "smoothed": smooth(finder.losses, finder.steps),
    }


def show(record: Mapping[str, Any], picture: Path, json_file: str) -> None:
    """Write the chart, and print the table and the suggestion; with ``json_file`` ``-``, print JSON only."""
    from fastloop.runtime.files import write
    from fastloop_tools.trials.tables import dump, show_table

    drawn = math.isfinite(record["smoothed"][0])
    if drawn:
        picture.parent.mkdir(parents=True, exist_ok=True)
        write(picture, draw(record))
    if json_file == "-":
        typer.echo(dump(record), nl=False)
        return
    if json_file:
        write(Path(json_file), dump(record), hidden=True)
    last = len(record["rates"]) - 1
    steps = sorted({round(index * last / (ROWS - 1)) for index in range(ROWS)})
    columns = (("rates", ".1e"), ("losses", ".4g"), ("smoothed", ".4g"))
    rows = [[f"{record[key][step]:{form}}" for key, form in columns] for step in steps]
    show_table(["train.lr", "loss", "smoothed"], rows)
    for line in sentences(record):
        typer.echo(line)
    if drawn:
        typer.echo(f"chart in {picture}")


def sentences(record: Mapping[str, Any]) -> list[str]:
    """The result as lines of text, with the override to use."""
    found, steps = record["suggestion"], len(record["rates"])
    end = f"The loss diverged in step {steps}." if record["diverged"] else f"The loss did not diverge in {steps} steps."
    if found is None:
        return [
            end,
            "No suggestion: the loss did not fall by more than its noise. Raise --steps, or move --min and --max.",
        ]
    lines = [f"{end} It was lowest at {found['minimum']:.1e}, and fell most steeply at {found['steepest']:.1e}."]
    if found["at_end"]:
        lines.append("The last step has the lowest loss: a larger --max may suggest a higher rate.")
    return [*lines, f"Suggestion: train.lr={found['lr']:.1e}"]


def draw(record: Mapping[str, Any]) -> str:
    """The loss of each step and its average, over the logarithm of the rate. A dashed line shows the suggestion.

    Args:
        record: The contents of the ``--json`` file. Losses far above those before the divergence are left out.
    """
    logs, chosen = [math.log10(rate) for rate in record["rates"]], record["suggestion"]
    finite = [value for value in record["smoothed"] if math.isfinite(value)]
    lowest = min(range(len(finite)), key=finite.__getitem__)
    most = 1.2 * max(finite[: lowest + 1])
    series = {
        name: (
            number,
            Series().extend([(x, value) for x, value in zip(logs, record[key], strict=True) if value <= most]),
        )
        for number, (name, key) in enumerate([("loss", "losses"), ("smoothed", "smoothed")])
    }
    limits = find_limits(line for _, line in series.values())
    chart = line_chart(record["recipe"], series, limits=limits, size=SIZE)
    assert chart is not None
    assert limits is not None
    left, right, bottom = chart.left, SIZE.width - SIZE.right, TITLE + SIZE.height - SIZE.bottom
    title = f"{record['recipe']}: " + (f"suggested train.lr {chosen['lr']:.1e}" if chosen else "no suggestion")
    lines = [f'<text x="12" y="24">{escape(title)}</text>']
    for tick in chart.ys:
        y = TITLE + tick.place
        lines.append(f'<path class="axis" d="M{left} {y}H{right}"/>')
        lines.append(f'<text x="{left - 6:g}" y="{y + 4}" text-anchor="end">{tick.label}</text>')
    lines += [
        f'<text x="{tick.text}" y="{bottom + 18}" text-anchor="middle">1e{tick.label}</text>'
        for tick in chart.xs
        if tick.label
    ]
    lines.append(
        f'<text x="{(left + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">train.lr; thin: each step, thick: '
        "smoothed</text>"
    )
    if chosen and limits.left <= math.log10(chosen["lr"]) <= limits.right:
        x, _ = Frame(limits, SIZE).place(math.log10(chosen["lr"]), limits.low)
        lines.append(f'<path class="chosen" d="M{x:.1f} {TITLE + SIZE.top}V{bottom}"/>')
    for line in chart.lines:
        lines.append(f'<path class="line {line.name}" transform="translate(0 {TITLE})" d="{line.path}"/>')
    return document(title, SIZE.width, TITLE + SIZE.height + FOOT, lines, STYLE)

"""``fastloop lr-find``: suggests a learning rate by a range test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastloop.cli import launch
from fastloop.cli.arguments import Overrides, RecipeName, With, Without, names, output_file
from fastloop.errors import UsageError
from fastloop_tools.report.charts import Size, find_limits, line_chart
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
SIZE = Size(width=480, height=264, top=34, right=12, bottom=38, ticks=4)
STYLE = (
    ".axis, .base { stroke: #c4cad4; } .line { fill: none; stroke: #8a8f98; stroke-width: 1; } "
    ".s1 { stroke: #2f6db5; stroke-width: 2; }"
)


def lr_find(
    recipe: RecipeName,
    overrides: Overrides = None,
    with_: With = None,
    without: Without = None,
    low: Annotated[float, typer.Option("--min", metavar="RATE", help="The rate of the first step.")] = 1e-7,
    high: Annotated[float, typer.Option("--max", metavar="RATE", help="The rate of the last step.")] = 10.0,
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Optimizer steps at most.")] = 100,
    svg: Annotated[str, output_file("--svg", "The chart to write [default: runs/lr-find-RECIPE.svg].")] = "",
    json_file: Annotated[str, output_file("--json", "Also write the results to this file.")] = "",
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
    launch.end_with_launcher()
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
    """Write the chart, and print the table and the suggestion."""
    from fastloop.runtime.files import write
    from fastloop_tools.trials.tables import dump, show_table

    drawn = math.isfinite(record["smoothed"][0])
    if drawn:
        picture.parent.mkdir(parents=True, exist_ok=True)
        write(picture, draw(record))
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
    lines = [f"{end} It was lowest at {found['minimum']:.1e}."]
    if found["at_end"]:
        lines.append("The last step has the lowest loss: a larger --max may suggest a higher rate.")
    return [*lines, f"Suggestion: train.lr={found['lr']:.1e}"]


def draw(record: Mapping[str, Any]) -> str:
    """The loss of each step and its average, over the logarithm of the rate.

    Args:
        record: The contents of the ``--json`` file. Losses far above those before the divergence are left out.
    """
    from fastloop_tools.report.page import drawing

    logs, chosen = [math.log10(rate) for rate in record["rates"]], record["suggestion"]
    finite = [value for value in record["smoothed"] if math.isfinite(value)]
    lowest = min(range(len(finite)), key=finite.__getitem__)
    most = 1.2 * max(finite[: lowest + 1])
    series = {
        key: (number, Series().extend([(x, y) for x, y in zip(logs, record[key], strict=True) if y <= most]))
        for number, key in enumerate(("losses", "smoothed"))
    }
    title = f"{record['recipe']}: " + (f"suggested train.lr {chosen['lr']:.1e}" if chosen else "no suggestion")
    chart = line_chart(title, series, title, find_limits(line for _, line in series.values()), SIZE)
    assert chart is not None
    chart.across = "train.lr; thin: each step, thick: smoothed"
    chart.xs = [tick._replace(label=tick.label and f"1e{tick.label}") for tick in chart.xs]
    return document(title, SIZE.width, SIZE.height, [drawing(chart)], STYLE)

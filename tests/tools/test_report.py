"""`fastloop report`: one page about runs, ablations and profiles, that needs nothing else.

Modules:
    plugins/fastloop_tools/report/charts.py
    plugins/fastloop_tools/report/command.py
    plugins/fastloop_tools/report/metrics_log.py
    plugins/fastloop_tools/report/page.py
    plugins/fastloop_tools/report/read.py
    plugins/fastloop_tools/report/sweeps.py
    plugins/fastloop_tools/report/tables.py
    plugins/fastloop_tools/shared/differing_keys.py
    plugins/fastloop_tools/shared/json_files.py
    plugins/fastloop_tools/shared/svg.py
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from torch import nn

from fastloop import Trainer
from fastloop.cli import main
from fastloop.errors import UsageError
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model
from fastloop_tools.report.charts import CHARACTER, FULL, SMALL, line_chart, tick_labels, ticks
from fastloop_tools.report.metrics_log import MOST, Series, read_log
from fastloop_tools.report.page import MANY, Bar, final_metrics, scale
from fastloop_tools.report.read import TrainedRun, read
from fastloop_tools.report.sweeps import ALL, SERIES, axis, plots
from fastloop_tools.report.tables import differences, environment
from fastloop_tools.shared.svg import number
from fastloop_tools.trials.record import Record
from fastloop_tools.trials.runs import TrialRun

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

VARIANTS = {
    "unit": "tokens",
    "tokens_per_second": {"median": 100.0, "low": 90.0, "high": 110.0},
    "samples_per_second": {"median": 1.0, "low": 0.9, "high": 1.1},
    "over_before": None,
    "over_baseline": None,
    "peak_memory_bytes": 2**30,
}
ABLATION = {
    "command": "fastloop bench tiny",
    "variants": [
        {"title": "baseline", "kind": "baseline", "results": VARIANTS},
        {
            "title": "+ amp",
            "kind": "step",
            "results": VARIANTS
            | {
                "tokens_per_second": {"median": 250.0, "low": 240.0, "high": 260.0},
                "over_before": {"verdict": "faster"},
                "over_baseline": {"median": 2.5},
            },
        },
        {"title": "+ fp8", "kind": "step", "results": None, "why_not": "not measurable here", "error": None},
        {"title": "all but amp", "kind": "without", "results": VARIANTS},
    ],
}
PROFILE = {
    "profile": {"seconds": 0.2, "regions": {"loss": 0.08, "backward": 0.1, "data": 0.02}},
    "suggestions": [{"edit": "plugins: + amp", "seconds": 0.05, "why": "Products are slow."}],
}


class Page(HTMLParser):
    """Parses a page, and fails if open tags are not closed in order."""

    VOID = ("meta", "line", "path", "br", "circle", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID or (tag == "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs that differ."""
    folder = tmp_path_factory.mktemp("trained")
    for name, plugins, lr in (("plain", ["log"], 1e-2), ("averaged", ["log", "ema"], 2e-2)):
        trainer = Trainer(
            tiny_model(),
            tiny_data(),
            tiny_data(32, seed=1),
            plugins=plugins,
            loss=nn.functional.cross_entropy,
            epochs=3,
            lr=lr,
            batch_size=8,
            output=folder / name,
        )
        trainer.fit()
    return folder


@pytest.fixture
def folders(trained: Path, tmp_path: Path) -> list[str]:
    """Copies of two runs that differ, an ablation and a profile."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name, record in (("bench-tiny", ABLATION), ("profile-tiny", PROFILE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / name.replace("-tiny", ".json")).write_text(json.dumps(record))
    return ["plain", "averaged", "bench-tiny", "profile-tiny"]


def report(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastloop", "report", *arguments])
    try:
        main()
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def test_report_shows_runs_metrics_differences_curves_ablations_and_steps(folders, monkeypatch):
    assert report(monkeypatch, *folders, "--title", "Two runs") == 0
    text = Path("report.html").read_text()
    page = Page(text)
    words = " ".join(" ".join(page.words).split())
    for expected in (
        "Two runs",
        "plain",
        "averaged",
        "completed",
        "validation loss",
        "train.lr",
        "plugins.ema",
        "Training loss",
    ):
        assert expected in words, expected
    told = (
        "250 tokens/s, x 2.50; faster; 1,024 MiB",
        "not measured; not measurable here",
        "backward 100.0 ms, 50%",
        "plugins: + amp",
    )
    for expected in told:
        assert expected in words, expected
    assert "validation epoch" not in words
    assert "all but amp" not in words
    assert words.index("backward 100.0") < words.index("loss 80.0") < words.index("data 20.0")
    headings = [
        words.index(heading)
        for heading in ("Curves", "Final metrics", "Where the recipes differ", "Runs", "Ablation:", "Where a step")
    ]
    assert headings == sorted(headings)
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) >= 5
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in charts)
    lines = [attributes["d"] for tag, attributes in page.tags if tag == "path"]
    assert all(re.fullmatch(r"M[\d. L-]+", line or "") for line in lines)
    assert "&#9679;" in text or "●" in text, "the better of two is marked"


@pytest.mark.parametrize(
    ("modes", "best"),
    [(["min", "min"], "0.1"), (["max", "max"], "0.4"), (["min", "max"], None), ([None, None], None), ([], None)],
)
def test_the_best_value_is_that_of_the_modes_which_the_runs_recorded(modes, best):
    """The name looks as if a higher value were better."""
    summaries: list[dict[str, Any]] = [{"validation": {"hamming": 0.1}}, {"validation": {"hamming": 0.4}}]
    for summary, mode in zip(summaries, modes, strict=False):
        summary["metric_modes"] = {"hamming": mode}
    runs = [TrainedRun(Path(name), name, summary) for name, summary in zip("ab", summaries, strict=True)]
    ((_, cells),) = final_metrics(runs)
    assert [cell.text for cell in cells if cell.best] == ([best] if best else [])


def test_report_shows_the_newest_rows_of_each_name(folders, monkeypatch):
    rows = Path(folders[0], "rows")
    rows.mkdir()
    lines = [{"step": 2, "answer": "an old one"}, {"step": 4, "answer": "<b>new</b>"}, {"step": 4, "score": [1]}]
    (rows / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report(monkeypatch, folders[0]) == 0
    page = Path("report.html").read_text()
    assert "Rows: samples of" in page
    assert "&lt;b&gt;new&lt;/b&gt;" in page
    assert "an old one" not in page


def test_report_needs_no_network_or_script(folders, monkeypatch):
    report(monkeypatch, *folders)
    text = Path("report.html").read_text()
    assert not re.search(r"https?://|<script|@import|url\(|<link|<img", text)
    assert "default-src 'none'" in text


def test_report_escapes_text_of_runs(folders, monkeypatch, tmp_path):
    evil = tmp_path / "<img src=x onerror=alert(1)>"
    (tmp_path / "plain").rename(evil)
    summary = json.loads((evil / "summary.json").read_text()) | {
        "status": "failed",
        "reason": "</table><script>alert(1)</script>",
    }
    (evil / "summary.json").write_text(json.dumps(summary))
    with (evil / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "<script>alert(2)</script>": 1.0}) + "\n")
    assert report(monkeypatch, str(evil), "averaged") == 0
    text = Path("report.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)" in text
    Page(text)


def test_report_shows_killed_run(folders, monkeypatch):
    Path("plain/summary.json").unlink()
    lines = Path("plain/metrics.jsonl").read_text().splitlines()
    Path("plain/metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 99, "epoch": 1, "loss": None})]) + "\n"
    )
    assert report(monkeypatch, "plain") == 0
    assert "not finished" in Path("report.html").read_text()


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (
            lambda: Path("plain/metrics.jsonl").write_text('{"step": 1}\n{"loss"\n'),
            "wrong-format plain/metrics.jsonl line 2 JSON",
        ),
        (lambda: Path("plain/summary.json").write_text("{"), "file-unreadable plain/summary.json"),
        (lambda: Path("plain/recipe.yaml").write_text("a: ]"), "invalid-yaml plain/recipe.yaml line 1 YAML"),
        (lambda: shutil.rmtree("plain"), "not-a-run plain"),
        (
            lambda: [path.unlink() for path in Path("plain").iterdir() if path.is_file()],
            "not-a-run plain",
        ),
    ],
)
def test_report_rejects_unreadable_file_by_name(folders, monkeypatch, capsys, harm, expected):
    harm()
    assert report(monkeypatch, "plain", "averaged") == 2
    assert_problem(capsys.readouterr().err, expected)
    assert not Path("report.html").exists()


def test_a_file_among_the_folders_of_a_pattern_is_named_with_its_folder(folders, monkeypatch, capsys):
    assert report(monkeypatch, "plain", "plain/summary.json") == 2
    error = capsys.readouterr().err
    assert_problem(error, "not-a-run plain/summary.json")
    assert "is a file" in error
    assert "fastloop report plain" in " ".join(error.split())


def test_report_distinguishes_runs_with_same_name(folders, tmp_path):
    shutil.copytree("plain", "other/plain")
    assert [run.name for run in read([Path("plain"), Path("other/plain")]).runs] == ["plain", "plain (2)"]


def recipes(*folders: str) -> list[dict[str, Any]]:
    return [run.recipe for run in read(map(Path, folders)).runs]


def test_the_same_recipe_has_no_differences(folders):
    shutil.copytree("plain", "again")
    assert differences(recipes("plain", "again")) == []
    keys = [key for key, _ in differences(recipes("plain", "averaged"))]
    assert "train.lr" in keys
    assert "train.epochs" not in keys


def shown_points(folder: Path) -> dict[str, Any]:
    return {key: series.points for key, series in read([folder]).runs[0].lines.items()}


def test_report_ignores_a_line_that_the_run_is_writing(folders):
    log = Path("plain/metrics.jsonl")
    before = shown_points(Path("plain"))
    line = json.dumps({"step": 99, "epoch": 1, "loss": 0.123456})
    for end in range(len(line)):
        with log.open("a") as file:
            file.write(line[:end])
        assert shown_points(Path("plain")) == before
        with log.open("r+") as file:
            file.truncate(log.stat().st_size - end)
    with log.open("a") as file:
        file.write(line)
    assert read([Path("plain")]).runs[0].lines["loss"].points[-1] == (99, 0.123456)


def test_a_log_is_read_by_split_and_key_and_a_wrong_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [
        {"step": 1, "epoch": 1, "loss": 1.0, "grad_norm": None, "note": "text", "on": True},
        {"step": 1, "epoch": 1, "split": "validation", "loss": 0.5, "accuracy": 1},
        {"step": 2, "epoch": 1, "loss": 0.25, "late": 3},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + '{"step": 99')
    assert {key: series.points for key, series in read_log(path).items()} == {
        "epoch": [(1, 1.0), (2, 1.0)],
        "loss": [(1, 1.0), (2, 0.25)],
        "validation epoch": [(1, 1.0)],
        "validation loss": [(1, 0.5)],
        "validation accuracy": [(1, 1.0)],
        "late": [(2, 3.0)],
    }
    for wrong in ('{"step": 1', '{"loss": 1}', "", "[1]", '{"step": null}'):
        path.write_text(f'{text}{wrong}\n{{"step": 1}}\n')
        with expect_problem("wrong-format 4 JSON", UsageError):
            read_log(path)


def test_environments_differ_in_known_facts_only():
    first = {
        "device": "cpu",
        "world_size": 1,
        "plugins": ["log", "amp"],
        "train_seconds": 1.0,
        "versions": {"torch": "2.5", "python": "3.11"},
    }
    second = first | {
        "device": "cuda:0",
        "plugins": ["log"],
        "train_seconds": 2.0,
        "versions": {"torch": "2.6", "python": "3.11"},
    }
    assert environment([first, {}, second]) == [
        ("device", ["cpu", "", "cuda:0"]),
        ("plugins", ["log, amp", "", "log"]),
        ("versions: torch", ["2.5", "", "2.6"]),
    ]
    assert environment([first, {}]) == environment([first, {"device": "cpu"}]) == []


def test_report_rejects_unwritable_output(folders, monkeypatch, capsys):
    assert report(monkeypatch, "plain", "--output", "no/such/report.html") == 2
    assert_problem(capsys.readouterr().err, "folder-missing")
    with pytest.raises(UsageError):
        read([Path("nowhere")])


# -- many runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(folders) -> list[str]:
    """Copies of a run, one more than share a chart; the last one has a larger loss."""
    names = [f"run-{index}" for index in range(MANY + 1)]
    for name in names:
        shutil.copytree("plain", name)
    last = Path(names[-1], "metrics.jsonl")
    last.write_text(last.read_text() + json.dumps({"step": 500, "epoch": 4, "loss": 1000.0}) + "\n")
    return names


def test_many_runs_have_small_charts_with_common_axes(many, monkeypatch):
    assert report(monkeypatch, *many) == 0
    text = Path("report.html").read_text()
    Page(text)
    panel = text.partition("Training loss")[2].partition("</figure>")[0]
    assert re.findall(r"<h4[^>]*>([^<]+)</h4>", panel) == many
    drawings = re.findall(r"<svg.*?</svg>", panel, re.DOTALL)
    assert len(drawings) == len(many)
    labels = [re.findall(r"<text[^>]*>([^<]*)</text>", drawing) for drawing in drawings]
    assert labels == [labels[0]] * len(many), "common axes have the same labels"
    assert {"1000", "500"} <= set(labels[0])
    heads = re.findall(r"<thead><tr>(.*?)</tr>", text.partition("Final metrics")[2], re.DOTALL)[0]
    assert ">validation loss<" in heads, "a row for each run"


def test_few_runs_share_a_chart(many, monkeypatch):
    assert report(monkeypatch, *many[:-1]) == 0
    text = Path("report.html").read_text()
    assert "<h4" not in text
    chart = text.partition("Training loss")[2].partition("</figure>")[0]
    assert len(re.findall('class="line s', chart)) == MANY


# -- sweeps ------------------------------------------------------------------------------------------------------------


def sweep(values: dict[tuple[str, ...], list[float]], keys: tuple[str, ...] = ("train.lr",)) -> dict[str, Any]:
    """The record that `fastloop sweep` writes for results of several seeds. NaN: the run failed."""
    runs = []
    for texts, results in values.items():
        for seed, value in enumerate(results):
            failed = math.isnan(value)
            metrics = None if failed else {"loss": value}
            name = "_".join(map("-".join, zip(keys, texts, strict=True)))
            runs.append(
                TrialRun(
                    f"{name}_seed-{seed}",
                    dict(zip(keys, texts, strict=True)),
                    seed,
                    "failed" if failed else "finished",
                    metrics,
                )
            )
    record = Record(Path("sweep"), {"recipe": "r.yaml", "base": {}}, runs, "loss", mode="min")
    Path("sweep").mkdir(exist_ok=True)
    record.write()
    found: dict[str, Any] = json.loads(Path("sweep/sweep.json").read_text())
    return found


def test_a_sweep_is_drawn_with_points_means_and_deviations(monkeypatch):
    results = {("1e-4",): [1.0, 2.0], ("1e-3",): [0.5, 0.5], ("1e-2",): [3.0, math.nan]}
    (chart,) = plots(sweep(results))
    (line,) = chart.lines
    assert len(line.dots) == 5
    assert [mean.label.partition(": ")[2] for mean in line.means] == [
        "mean 1.5, deviation 0.7071",
        "mean 0.5, deviation 0",
        "mean 3",
    ]
    places = [mean.x for mean in line.means]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1], abs=0.2), "the axis is logarithmic"
    first = line.means[0]
    dots = sorted(y for x, y, _ in line.dots if x == first.x)
    middle, half = (dots[0] + dots[1]) / 2, (dots[1] - dots[0]) / 2
    assert first.y == pytest.approx(middle, abs=0.1)
    assert first.end - first.y == pytest.approx(half * 2**0.5, abs=0.2), (
        "the deviation of two values is their distance over sqrt(2)"
    )
    assert chart.across == "train.lr, logarithmic"
    assert [tick.label for tick in chart.xs] == ["1e-4", "1e-3", "1e-2"]
    assert chart.rows == [("1e-4", "2", "1.5", "0.7071"), ("1e-3", "2", "0.5", "0"), ("1e-2", "1", "3", "")]
    assert report(monkeypatch, "sweep") == 0
    text = Path("report.html").read_text()
    Page(text)
    assert text.count('class="mean f0"') == 3
    assert text.index("validation loss by train.lr") < text.index("<h3>Points</h3>")


def test_a_sweep_of_two_keys_has_a_plot_for_each():
    keys = ("train.lr", "model.name")
    found = plots(sweep({(lr, name): [1.0, 2.0] for lr in ("0.1", "0.2") for name in ("small", "large")}, keys))
    assert [chart.title for chart in found] == ["validation loss by train.lr", "validation loss by model.name"]
    assert [[line.name for line in chart.lines] for chart in found] == [
        ["name=small", "name=large"],
        ["lr=0.1", "lr=0.2"],
    ]
    names = [str(index) for index in range(SERIES + 1)]
    found = plots(sweep({(lr, name): [1.0, 2.0] for lr in ("0.1", "0.2") for name in names}, keys))
    assert [line.name for line in found[0].lines] == [ALL]
    assert len(found[0].lines[0].dots) == 4 * len(names)


def test_a_sweep_of_seeds_or_without_results_has_no_plot(monkeypatch):
    assert plots(sweep({(): [1.0, 2.0]}, ())) == []
    assert plots(sweep({("1",): [math.nan]})) == []
    assert report(monkeypatch, "sweep") == 0


def test_values_are_placed_by_number_or_in_order():
    assert axis(["3", "1", "2"], "key") == ({"3": 3.0, "1": 1.0, "2": 2.0}, "key")
    assert axis(["b", "a"], "key") == ({"b": 0.0, "a": 1.0}, "key")
    assert axis(["1", "1.0"], "key")[0] == {"1": 0.0, "1.0": 1.0}, "equal numbers are different values"
    assert axis(["1", "10"], "key")[1] == "key, logarithmic"
    assert axis(["0", "10"], "key")[1] == "key"


@pytest.mark.parametrize(
    "harm",
    [
        {"runs": [{"name": "a"}]},
        {"points": 3},
        {"monitor": None},
        {"runs": [{"name": "a", "values": 3, "metrics": None}]},
    ],
)
def test_a_broken_sweep_is_named(monkeypatch, capsys, harm):
    record = sweep({("1",): [1.0]})
    Path("sweep/sweep.json").write_text(json.dumps(record | harm))
    assert report(monkeypatch, "sweep") == 2
    assert_problem(capsys.readouterr().err, "wrong-format sweep/sweep.json")


# -- charts ------------------------------------------------------------------------------------------------------------


def test_labels_of_ticks_differ_and_have_one_form():
    for values, labels in (
        ([0.6931, 0.69315, 0.6932], ["0.69310", "0.69315", "0.69320"]),
        ([0, 5000, 10000], ["0", "5k", "10k"]),
        ([0, 500, 1000], ["0", "500", "1000"]),
        ([0, 5e-6, 1e-5], ["0", "0.5e-5", "1.0e-5"]),
        ([-0.5, 0.0, 0.5], ["-0.5", "0", "0.5"]),
        ([1e6, 1.5e6], ["1.0M", "1.5M"]),
        ([3], ["3"]),
    ):
        assert tick_labels(values) == labels


@pytest.mark.parametrize("size", [FULL, SMALL])
@pytest.mark.parametrize("last", [7, 100, 12_345, 200_000, 3_000_000])
def test_labels_stay_inside_the_picture_and_apart(size, last):
    points = [(0.0, -1.23e-7), (float(last), 1e-9)]
    chart = line_chart("one", {"a": (0, Series().extend(points))}, size=size)
    assert chart is not None
    ends = [
        (tick.text - CHARACTER * len(tick.label) / 2, tick.text + CHARACTER * len(tick.label) / 2)
        for tick in chart.xs
        if tick.label
    ]
    assert len(ends) >= 2
    assert all(start >= 0 and end <= size.width + 0.1 for start, end in ends)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(ends))
    assert all(chart.left - 6 - CHARACTER * len(tick.label) >= 0 for tick in chart.ys)


def test_ticks_are_round_and_inside():
    assert ticks(0, 100) == [0, 50, 100]
    assert ticks(0.63, 0.71) == pytest.approx([0.64, 0.66, 0.68, 0.7])
    assert ticks(3, 3) == [3]
    for low, high in ((1e-9, 5e-9), (-3.0, 7.0), (0, 1e12)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 6
        assert all(low - 1e-12 <= value <= high * (1 + 1e-9) for value in found)


@pytest.mark.parametrize("count", [1, MOST, MOST + 1, 2 * MOST + 3, 7 * MOST + 13])
@pytest.mark.parametrize("part", [7, 997, 10 * MOST])
def test_a_series_keeps_means_of_neighbours_and_exact_ends(count, part):
    points = [(float(step), math.sin(step) + step) for step in range(count)]
    series = Series()
    for start in range(0, count, part):
        series.extend(points[start : start + part])
    values = [value for _, value in points]
    assert (series.start, series.first, series.last, series.least, series.most) == (
        0,
        values[0],
        values[-1],
        min(values),
        max(values),
    )
    kept = series.points
    if count <= MOST:
        assert kept == points
        return
    assert MOST // 2 <= len(kept) <= MOST + 1
    assert kept[-1][0] == count - 1
    size = int(kept[0][0]) + 1  # points in a group
    groups = [points[start : start + size] for start in range(0, count, size)]
    assert kept == [(group[-1][0], pytest.approx(fmean(value for _, value in group))) for group in groups]


def test_chart_omits_nan():
    assert line_chart("empty", {"a": (0, Series().extend([(1.0, float("nan"))]))}) is None
    chart = line_chart("one", {"a": (0, Series().extend([(1.0, 2.0), (2.0, float("inf"))]))})
    assert chart is not None
    assert len(chart.lines[0].dots) == 1
    assert chart.rows == [("a", "2", "2", "2", "2")]


def test_numbers_are_short():
    shown = {
        0: "0",
        0.123456: "0.1235",
        12345.6: "12.35k",
        5.24e8: "524M",
        2.5e9: "2.5G",
        5e-5: "5e-05",
        float("nan"): "-",
    }
    assert [number(value) for value in shown] == list(shown.values())


def test_bars_share_one_scale():
    found = scale([Bar("a", 1.0, "", 0.5, 2.0), Bar("b", 1.5, "")])
    assert [(bar.size, bar.low, bar.high) for bar in found] == [(0.5, 0.25, 1.0), (0.75, None, None)]
    assert scale([Bar("none", 0.0, "")])[0].size == 0


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1200, True)])
def test_a_browser_shows_it_without_sideways_scrolling(folders, monkeypatch, width, dark):
    with Path("plain/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "seen_once": 1.0}) + "\n")
    sweep(
        {(lr, size): [1.0, 2.0] for lr in ("1e-5", "3e-5") for size in ("small", "a-very-large-model")},
        ("train.lr", "model.name"),
    )
    Path("plain/evaluation").mkdir()
    scores = dict.fromkeys(("precision", "recall", "f1", "samples"), 1)
    names = ["a", "a class of a long name", "third"]
    result = {
        "split": "test",
        "file": None,
        "metrics": {},
        "classes": [scores | {"name": name} for name in names],
        "confusion": [[9, 0, 1]] * 3,
    }
    Path("plain/evaluation/test.json").write_text(json.dumps(result))
    assert report(monkeypatch, *folders, "sweep") == 0
    text = Path("report.html").read_text()
    probe = """<script>document.querySelectorAll("details").forEach(part => part.open = true);
    const colour = getComputedStyle(document.body).backgroundColor;
    const lone = getComputedStyle(document.querySelector("svg g:has(circle:only-of-type) circle")).opacity;
    const takes = part => { part.focus(); return document.activeElement === part; };
    const reached = [...document.querySelectorAll("[tabindex], summary, a")].every(takes);
    const lines = document.querySelectorAll("svg path");
    const inside = (part, whole) => part.left >= whole.left - 1 && part.right <= whole.right + 1
      && part.top >= whole.top - 1 && part.bottom <= whole.bottom + 1;
    const box = part => part.getBoundingClientRect();
    const clipped = [...document.querySelectorAll("svg text")]
      .filter(part => !inside(box(part), box(part.closest("svg"))));
    const fits = document.documentElement.scrollWidth <= innerWidth;
    const texts = clipped.map(part => part.textContent);
    parent.document.title = [innerWidth, fits, colour, reached, lines.length, lone, texts].join("|");
    </script>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", probe + "</body>")
    frame = (
        # a window has at least 500 pixels
        f'<iframe style="border: 0; width: {width}px; height: 3000px" srcdoc="{escape(text)}"></iframe>'
    )
    Path("probe.html").write_text(f'<meta name="color-scheme" content="light dark"><title></title>{frame}')
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,3000", "--dump-dom"]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, Path("probe.html").resolve().as_uri()], capture_output=True, text=True, timeout=600, check=True
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout)
    assert found is not None
    shown, fits, colour, reached, lines, lone, clipped = found[1].split("|")
    assert int(shown) == width
    assert clipped == "", "labels are inside their pictures"
    assert lone == "1", "a line of one point is a dot"
    assert fits == "true"
    assert reached == "true"
    assert int(lines) >= 5
    assert colour == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")


def test_the_title_names_the_task_and_the_runs(folders, monkeypatch):
    def title(*given: str) -> str:
        assert report(monkeypatch, *given) == 0
        match = re.search(r"<title>(.*?)</title>", Path("report.html").read_text())
        assert match is not None
        return match[1]

    assert title("plain") == "trainer: plain"
    assert title("plain", "averaged") == "trainer: plain, averaged"
    assert title(*folders) == "trainer: 4 results"
    assert title("bench-tiny") == "bench-tiny"


def test_values_are_those_of_yaml():
    plugins = [{"amp": {"dtype": None, "on": True}}]
    recipe = {"train": {"lr": 1e-5, "max_steps": None, "drop_last": True, "betas": [0.9, None]}, "plugins": plugins}
    other = {"train": {"lr": 1, "max_steps": 2, "drop_last": False, "betas": []}, "plugins": []}
    found = dict(differences([recipe, other]))
    assert {key: values[0] for key, values in found.items()} == {
        "train.lr": "1e-05",
        "train.max_steps": "null",
        "train.drop_last": "true",
        "train.betas": "[0.9, null]",
        "plugins.amp": "dtype: null, on: true",
    }
    summaries = [{"versions": {"cuda": None}}, {"versions": {"cuda": "13.0"}}]
    assert environment(summaries) == [("versions: cuda", ["null", "13.0"])]


def test_charts_have_the_order_of_the_log(tmp_path):
    names = [f"value{number}" for number in range(12)]  # a set of these has this order once in 479 million runs
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **dict.fromkeys(names, 0.5)}) + "\n")
    assert list(read_log(tmp_path / "metrics.jsonl")) == names

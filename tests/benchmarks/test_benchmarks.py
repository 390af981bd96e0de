"""The scripts in benchmarks/: their common arithmetic, and that the ladder runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import _measure

    return _measure


def test_every_second_round_goes_backwards(measure: Any) -> None:
    assert list(measure.rounds(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_a_ratio_is_the_median_of_pairs_inside_its_interval(measure: Any) -> None:
    found = measure.ratio([2.0, 30.0, 6.0], [1.0, 10.0, 1.5])  # the pairs' ratios are 2, 3, 4: the speeds' medians would say 4
    assert found["ratios"] == [2.0, 3.0, 4.0]
    assert found["median"] == 3.0
    assert found["interval95"] == (2.0, 4.0)


def test_a_section_takes_the_place_of_its_older_self(measure: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for title, text in (("One", "first"), ("Two", "second\n\n### Part\n\nthird"), ("One", "newer")):
        measure.write_section(title, text, page)
    text = page.read_text()
    assert text.index("## One\n\nnewer\n") < text.index("## Two\n\nsecond\n\n### Part\n\nthird\n")
    assert text.count("## One\n") == 1
    assert "first" not in text


def test_a_process_gives_its_last_line_and_a_failed_one_its_error(measure: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\nprint('noise')\nif len(sys.argv) > 1: raise ValueError('broken')\nprint(json.dumps({'a': os.environ['A']}))"
    )
    assert measure.spawn([script], {"A": "1"})["a"] == "1"
    with pytest.raises(SystemExit, match="broken"):
        measure.spawn([script, "fail"], {"A": "1"})


def test_the_reviews_of_a_round_are_drawn_from_all_lengths(measure: Any, tmp_path: Path) -> None:
    import peers
    import pyarrow
    from pyarrow import parquet

    source, folder = tmp_path / "all.parquet", tmp_path / "drawn"
    folder.mkdir()
    parquet.write_table(pyarrow.table({"text": ["x" * length for length in range(1, 4801)], "label": [0, 1] * 2400}), source)
    peers.draw(source, folder, steps=4, seed=3)
    lengths = sorted(len(text) for text in parquet.read_table(folder / "train.parquet")["text"].to_pylist())
    assert [length - 1 for length in lengths] == pytest.approx([100 * part + 50 for part in range(48)], abs=50)


@pytest.mark.slow
def test_the_ladder_measures_both_its_ends_and_the_whole_job(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "ladder_gpu.py"), "--tiny", "--ends", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(next(tmp_path.glob("ladder_*.json")).read_text())
    assert found["failures"] == []
    assert found["summary"][0]["rung"] == "baseline"
    assert all(row["samples_per_second"] > 0 and row["peak_bytes"] > 0 for row in found["summary"])
    first, *rest = (rounds["0"] for rounds in found["rounds"].values())
    assert "amp" not in first["plugins"]
    assert all({"amp", "length-bucketing", "fused-optimizer", "memory"} <= set(row["plugins"]) for row in rest)
    assert all(row["evaluate"]["accuracy"] >= 0 and row["texts"] == 96 for row in found["job"].values())

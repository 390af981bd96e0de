"""The shared helpers of the scripts in benchmarks/."""

from __future__ import annotations

import re
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
    # the pairs' ratios are 2, 3, 4: the speeds' medians would say 4
    found = measure.ratio([2.0, 30.0, 6.0], [1.0, 10.0, 1.5])
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
        "import json, os, sys\nprint('noise')\nif len(sys.argv) > 1: raise "
        "ValueError('broken')\nprint(json.dumps({'a': os.environ['A']}))"
    )
    assert measure.spawn([script], {"A": "1"})["a"] == "1"
    with pytest.raises(SystemExit, match="broken"):
        measure.spawn([script, "fail"], {"A": "1"})


def test_reviews_are_drawn_evenly_over_all_lengths(measure: Any) -> None:
    import _reviews

    drawn = _reviews.spread(range(1, 4801), 48, seed=3)
    assert sorted(drawn) == pytest.approx([100 * part + 50 for part in range(48)], abs=50)
    assert drawn != sorted(drawn)


def test_reviews_are_read_as_they_were_written(measure: Any, tmp_path: Path) -> None:
    import _reviews

    written = _reviews.generate(50, seed=1)
    _reviews.save(tmp_path / "reviews.npz", train=written.keep([3, 7]), evaluate=written)
    read = _reviews.load(tmp_path / "reviews.npz")
    assert [len(split) for split in read.values()] == [2, 50]
    assert [read["train"][index] for index in range(2)] == [written[3], written[7]]
    assert max(written.lengths) == _reviews.MAX_LENGTH
    with pytest.raises(IndexError):  # by which a plain iteration ends
        read["train"][2]


@pytest.mark.parametrize(
    ("estimate", "ratios", "off", "sign"),
    [
        (1.5, [1.1, 1.2, 1.3], 0.25, "right"),
        (1.5, [0.3, 0.5, 0.6], 2.0, "wrong"),
        (1.08, [0.8, 0.9, 1.0], 0.2, ""),
        (1.08, [0.7, 0.8, 0.9], 0.35, ""),
        (1.5, [0.9, 1.2, 1.3], 0.25, ""),
    ],
)
def test_an_estimate_has_an_error_and_a_sign(
    measure: Any, estimate: float, ratios: list[float], off: float, sign: str
) -> None:
    import planted

    trial = {"estimate": estimate, "ratios": ratios}
    assert planted.error(trial) == pytest.approx(off)
    assert planted.sign(trial) == sign


@pytest.mark.usefixtures("suite_modules")
def test_the_picture_of_the_readme_has_the_newest_results():
    import speed_picture

    shown = (FOLDER.parent / "docs" / "speed.svg").read_text()
    assert shown == speed_picture.picture(), "run benchmarks/speed_picture.py"
    readme = (FOLDER.parent / "README.md").read_text()
    named = re.findall(r"([\d,]+) (?:real tokens per second|with all plugins|for the HF Trainer)", readme)
    assert len(named) == 3
    for value in named:
        assert f">{value} tokens/s<" in shown

"""The generated dates: each occurs once, and its text names the same day as its target.

Modules:
    plugins/fastloop_plugins/datasets/dates.py
"""

from __future__ import annotations

import re
from datetime import date

import pytest

from fastloop_plugins.datasets.dates import FORMS, MONTHS, WEEKDAYS, dates


def test_all_dates_differ_and_their_texts_name_them():
    rows = [row for split in dates().values() for row in split]
    assert len({row["iso"] for row in rows}) == len(rows) == 6800
    for row in rows:
        day = date.fromisoformat(row["iso"])
        numbers = list(map(int, re.findall(r"\d+", row["text"])))
        assert numbers == [day.day, day.month, day.year] if row["text"].count(".") == 2 else [day.day, day.year]
        names = re.findall(r"[A-Z][a-z]+", row["text"])
        assert all(name == WEEKDAYS[day.weekday()] or MONTHS[day.month - 1].startswith(name) for name in names)
    texts = "\n".join(row["text"] for row in rows)
    for suffix in ("1st", "2nd", "3rd", "11th", "12th", "13th", "21st", "22nd", "23rd", "31st"):
        assert re.search(rf"(?m)\b{suffix}\b", texts)
    assert not re.search(r"11st|12nd|13rd", texts)
    assert len(FORMS) == 6


def test_the_test_split_depends_on_the_seed_alone():
    assert dates(train=10, validation=300)["test"] == dates()["test"] != dates(seed=1)["test"]
    with pytest.raises(ValueError, match="there are 36525 dates, and the splits need 36801"):
        dates(train=36_001)

"""Dates as people write them, and in ISO form, for a recipe that must run offline.

    input    Tuesday, March 5th 2024
    target   2024-03-05

A model must find the day, the month and the year, whose order depends on the form, and write the day and the month with
two digits. No date occurs in two splits, so a model cannot memorize targets.

Only the standard library is needed, and one seed gives the same rows in every process.
"""

from datetime import date, timedelta
from random import Random

FIRST = date(1950, 1, 1)
"""The first date."""
DAYS = 36_525
"""Days in the hundred years from there."""
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
FORMS = (
    "{day} {month} {year}",
    "{month} {day}, {year}",
    "{weekday}, {month} {day}{suffix} {year}",
    "the {day}{suffix} of {month}, {year}",
    "{day}.{number}.{year}",
    "{weekday} {day} {month:.3} {year}",
)


def dates(train: int = 6000, validation: int = 300, test: int = 500, seed: int = 0) -> dict[str, list[dict[str, str]]]:
    """Write three splits of the given sizes: split -> rows of ``text`` and ``iso``, each of another date between 1950
    and 2049.

    The test split does not change with the other two sizes.

    Raises:
        ValueError: The splits need more dates than there are.
    """
    if train + validation + test > DAYS:
        raise ValueError(f"there are {DAYS} dates, and the splits need {train + validation + test}")
    rng = Random(seed)
    order = rng.sample(range(DAYS), DAYS)
    rows = [_row(FIRST + timedelta(days=index), rng.choice(FORMS)) for index in order]
    first = test + validation
    return {"train": rows[first : first + train], "validation": rows[test:first], "test": rows[:test]}


def _row(day: date, form: str) -> dict[str, str]:
    suffix = "th" if day.day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    text = form.format(
        day=day.day,
        suffix=suffix,
        month=MONTHS[day.month - 1],
        number=day.month,
        weekday=WEEKDAYS[day.weekday()],
        year=day.year,
    )
    return {"text": text, "iso": day.isoformat()}

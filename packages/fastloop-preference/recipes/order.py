"""Digits and the same digits in order, for a recipe that must run offline. One seed gives the same rows."""

from random import Random


def pairs(train: int = 3000, validation: int = 200, test: int = 200, digits: int = 5, seed: int = 0):
    """Three splits of rows with other prompts: their digits in order are chosen, and with two exchanged rejected."""
    rng = Random(seed)
    rows = {}
    while len(rows) < train + validation + test:
        prompt = "".join(rng.sample("0123456789", digits))
        chosen = "".join(sorted(prompt))
        place = rng.randrange(digits - 1)
        rejected = chosen[:place] + chosen[place + 1] + chosen[place] + chosen[place + 2 :]
        rows[prompt] = {"prompt": f"{prompt}=", "chosen": chosen, "rejected": rejected}
    unique_rows = list(rows.values())
    first = test + validation
    return {"train": unique_rows[first:], "validation": unique_rows[test:first], "test": unique_rows[:test]}

"""Synthetic news lines whose names are tagged, for a recipe that must run offline.

A line names people, places and companies:

    Ada     Marlow  of  Port   Elmby   joined  Tarton  Group  in  Holford  .
    B-PER   I-PER   O   B-LOC  I-LOC   O       B-ORG   I-ORG  O   B-LOC    O

Every surname is also the name of places and of companies, so that a tag depends on the words around it. A fifth of the
surnames occur in the test split only.

Only the standard library is needed, and one seed gives the same rows in every process.
"""

from random import Random

GIVEN = (
    "Ada",
    "Ben",
    "Cora",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ivo",
    "June",
    "Karl",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Pia",
)
STARTS = (
    "Ash",
    "Bar",
    "Cal",
    "Dun",
    "Elm",
    "Fern",
    "Gor",
    "Hol",
    "Kin",
    "Lin",
    "Mar",
    "Nor",
    "Ost",
    "Ped",
    "Rud",
    "Sel",
    "Tar",
    "Win",
)
ENDS = ("by", "combe", "den", "field", "ford", "ham", "low", "ton", "wick", "worth")
SURNAMES = [start + ENDS[(row + column) % len(ENDS)] for row, start in enumerate(STARTS) for column in range(len(ENDS))]
"""Surnames, which places and companies have too."""
UNSEEN = SURNAMES[::5]
"""Surnames of the test split only."""
FORMS = {
    "PER": ("{given} {name}", "{given} {name}", "{name}"),
    "LOC": ("{name}", "{name}", "Port {name}", "New {name}"),
    "ORG": ("{name} Group", "{name} and {other}", "{name}"),
}
"""Type of an entity -> its forms."""
LINES = (
    "{PER} of {LOC} joined {ORG} in {LOC} .",
    "{PER} leaves {ORG} after two years .",
    "Shares of {ORG} fell by a tenth in {LOC} .",
    "{ORG} hired {PER} as its new head .",
    "The train from {LOC} to {LOC} was late again .",
    '" We never met {PER} , " said {PER} .',
    "Storms closed the harbour of {LOC} on Monday .",
    "{ORG} will buy {ORG} , its bank said .",
    "The mayor of {LOC} , {PER} , thanked {ORG} .",
    "Rain is expected in {LOC} and {LOC} .",
    "{PER} beat {PER} in two sets in {LOC} .",
    "Prices rose again , the ministry said .",
)
"""Lines. Words in braces are entities."""


def dispatches(
    train: int = 1500, validation: int = 200, test: int = 300, seed: int = 0
) -> dict[str, list[dict[str, list[str]]]]:
    """Write three splits of the given sizes: split -> rows of ``words`` and ``tags``, two lists of equal lengths.

    The tags are those of IOB2. The test split does not change with the other two sizes.
    """
    rng = Random(seed)
    known = [name for name in SURNAMES if name not in UNSEEN]
    sizes = {"test": (test, SURNAMES), "validation": (validation, known), "train": (train, known)}
    return {split: [_row(rng, names) for _ in range(size)] for split, (size, names) in sizes.items()}


def _row(rng: Random, names: list[str]) -> dict[str, list[str]]:
    words = list[str]()
    tags = list[str]()
    for part in rng.choice(LINES).split():
        kind = part.strip("{}")
        if part == kind:
            words.append(part)
            tags.append("O")
            continue
        entity = (
            rng.choice(FORMS[kind])
            .format(given=rng.choice(GIVEN), name=rng.choice(names), other=rng.choice(names))
            .split()
        )
        words += entity
        tags += [f"B-{kind}", *[f"I-{kind}"] * (len(entity) - 1)]
    return {"words": words, "tags": tags}

"""Synthetic film reviews with a sentiment label, for a recipe that must run offline.

Four kinds of review, in equal parts:

* ``plain``        praise or criticism, stated directly;
* ``negation``     one opinion is stated and the opposite one denied
                   ("The score is moving and the plot never drags.");
* ``contrast``     two opinions disagree and the grammar decides which one counts
                   ("Although the acting shines, the plot is dull.");
* ``intensifier``  two opinions disagree and the stronger one counts
                   ("The ending is slightly clumsy but deeply moving.").

Reviews come in twins, one positive and one negative, and both twins are in the same split. Except for
the plain kind, twins consist of *the same words*: one template is filled twice, with the two opinions
swapped. A classifier that only counts words gives both twins the same answer, so it is right on exactly
half of those reviews; a correct classifier must read the word order. With the default sizes, logistic
regression on word counts scores 100% on the plain kind, 50% on each of the others and 62.5% overall.

The template determines the label: the opinion in the ``win`` slot decides, and
the one in the ``lose`` slot is denied, conceded or played down.

Only the standard library is needed, and one seed gives the same rows in every process.
"""

from random import Random
from typing import NamedTuple

KINDS = ("plain", "negation", "contrast", "intensifier")
LABELS = ("negative", "positive")


class Lexicon(NamedTuple):
    """Words of one polarity; ``gradable`` adjectives go with "slightly", ``extreme`` ones do not."""

    gradable: tuple[str, ...]
    extreme: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]


class Opinion(NamedTuple):
    """One opinion, in every form that a template may use."""

    gradable: str  # "dull"
    adjective: str  # "dull" or "dreadful"
    noun: str  # "bore", to follow "a"
    verb: str  # "drags", agreeing with the aspects
    predicate: str  # "is dull", "drags", "is not witty" or "never shines"


# fmt: off
LEXICON = {
    "positive": Lexicon(
        gradable=("clever", "charming", "graceful", "inventive", "moving", "gripping", "memorable", "fresh", "witty",
                  "impressive", "satisfying", "lovely", "vivid", "lively"),
        extreme=("brilliant", "wonderful", "superb", "stunning"),
        nouns=("masterpiece", "triumph", "treasure", "joy", "treat", "gem"),
        verbs=("shine", "delight", "impress us", "soar", "sparkle", "lift the film"),
    ),
    "negative": Lexicon(
        gradable=("dull", "clumsy", "tedious", "bland", "sloppy", "tiresome", "predictable", "shallow", "messy",
                  "irritating", "feeble", "hollow", "lazy", "stale"),
        extreme=("dreadful", "awful", "terrible", "horrible"),
        nouns=("disaster", "bore", "mess", "failure", "letdown", "chore"),
        verbs=("drag", "disappoint", "annoy us", "stumble", "grate", "sink the film"),
    ),
}

SINGULAR = ("acting", "plot", "score", "ending", "dialogue", "pacing", "camera work", "lighting", "editing",
            "script", "directing", "humour", "opening", "casting", "sound design", "romance")
PLURAL = ("characters", "jokes", "songs", "costumes", "visual effects", "performances", "action scenes", "sets")

MILD = ("slightly", "somewhat", "mildly", "a little", "faintly", "a bit")
STRONG = ("deeply", "thoroughly", "extremely", "remarkably", "incredibly", "exceptionally", "truly")

OPENERS = ("I saw it on a Friday.", "We went with the whole family.", "My sister picked this one.",
           "It runs for two hours.", "I knew nothing about it beforehand.", "This is a debut feature.",
           "The cinema was half full.", "I read the novel years ago.", "Here is my view.",
           "It came out last autumn.", "We watched it at home.", "A friend lent me the disc.")
CLOSERS = ("That is my verdict.", "I left thinking about it.", "My friends agree.", "Others may differ.",
           "That settles it for me.", "It will be on television soon.", "The credits are long.",
           "I told my neighbour so.", "That is all I can say.", "A sequel is planned.")
# fmt: on

# A hard template uses each form of ``win`` as often as of ``lose``, so that twins consist of the same words.
TEMPLATES = {
    "plain": (
        "The {one} {be} {win.adjective}.",
        "The {one} {win.verb} and the {two} {be} {win.adjective}.",
        "The {one} {be} {win.adjective} and the {two} {be} {also.adjective}.",
        "What a {win.noun}! The {one} {be} {win.adjective}.",
        "It is a {win.noun} and the {one} {win.verb}.",
        "I found the {one} {strong} {win.gradable}.",
        "I found the {one} {mild} {win.gradable} and the {two} {also.adjective}.",
        "With the {one} so {win.adjective}, the film is a {win.noun}.",
    ),
    "negation": (
        "The {one} {be} not {lose.adjective}, but {win.adjective}.",
        "The {one} {be} {win.adjective}, not {lose.adjective}.",
        "The {one} {be} {win.adjective} and the {two} {be} never {lose.adjective}.",
        "The {one} {be} never {lose.adjective} and the {two} {be} {win.adjective}.",
        "The {one} {win.verb} and the {two} never {lose.verb}.",
        "The {one} never {lose.verb} and the {two} {win.verb}.",
        "It is hardly a {lose.noun}, I would call it a {win.noun}.",
        "Call it a {win.noun}, it is hardly a {lose.noun}.",
        "This is not a {lose.noun} but a {win.noun}.",
        "I found the {one} far from {lose.adjective} and the {two} {win.adjective}.",
        "I found the {one} {win.adjective} and the {two} anything but {lose.adjective}.",
        "It would be wrong to call the {one} {lose.adjective}, {win.adjective} is the word.",
        "Nobody could call the {one} {lose.adjective}, and the {two} {be} {win.adjective}.",
    ),
    "contrast": (
        "The {one} {lose.predicate}, but the {two} {win.predicate}.",
        "Although the {one} {lose.predicate}, the {two} {win.predicate}.",
        "The {one} {win.predicate}, although the {two} {lose.predicate}.",
        "Even if the {one} {lose.predicate}, the {two} {win.predicate}.",
        "The {one} {win.predicate}, even if the {two} {lose.predicate}.",
        "Granted, the {one} {lose.predicate}, yet the {two} {win.predicate}.",
        "I expected a {lose.noun}, but it is a {win.noun}.",
        "It is a {win.noun}, although I expected a {lose.noun}.",
    ),
    "intensifier": (
        "The {one} {be} {mild} {lose.gradable} but {strong} {win.gradable}.",
        "The {one} {be} {strong} {win.gradable} but {mild} {lose.gradable}.",
        "The {one} {be} {mild} {lose.gradable} and the {two} {be} {strong} {win.gradable}.",
        "The {one} {be} {strong} {win.gradable} and the {two} {be} {mild} {lose.gradable}.",
        "I found the {one} {strong} {win.gradable} and the {two} {mild} {lose.gradable}.",
        "I found the {one} {mild} {lose.gradable} and the {two} {strong} {win.gradable}.",
    ),
}


def _opinion(rng: Random, label: str, plural: bool) -> Opinion:
    own = LEXICON[label]
    opposite = LEXICON[LABELS[label == "negative"]]
    be = "are" if plural else "is"

    def inflected(verb: str) -> str:
        head, *rest = verb.split()
        ending = "es" if head.endswith("s") else "s"
        if plural:
            ending = ""
        return " ".join([head + ending, *rest])

    gradable = rng.choice(own.gradable)
    extreme = rng.choice(own.extreme)
    adjective = rng.choice((gradable, gradable, extreme))
    verb = inflected(rng.choice(own.verbs))
    denied = (f"{be} not {rng.choice(opposite.gradable)}", f"never {inflected(rng.choice(opposite.verbs))}")
    predicate = rng.choice((*[f"{be} {adjective}"] * 3, verb, verb, rng.choice(denied)))
    return Opinion(gradable, adjective, rng.choice(own.nouns), verb, predicate)


def _twins(rng: Random, kind: str) -> dict[str, str]:
    """One review of the kind for each label, alike in everything but the opinions."""
    plural = rng.random() < 0.3
    template = rng.choice(TEMPLATES[kind])
    one, two = rng.sample(PLURAL if plural else SINGULAR, 2)
    words = {"one": one, "two": two, "be": "are" if plural else "is"}
    words |= {"mild": rng.choice(MILD), "strong": rng.choice(STRONG)}
    opener = rng.choice(OPENERS) if rng.random() < 0.4 else ""
    closer = rng.choice(CLOSERS) if rng.random() < 0.4 else ""
    opinions = {label: _opinion(rng, label, plural) for label in LABELS}
    more = {label: _opinion(rng, label, plural) for label in LABELS}
    twins = {}
    for win, lose in (LABELS, LABELS[::-1]):
        body = template.format(win=opinions[win], lose=opinions[lose], also=more[win], **words)
        twins[win] = " ".join(part for part in (opener, body, closer) if part)
    return twins


def reviews(
    train: int = 6000, validation: int = 500, test: int = 1000, seed: int = 0
) -> dict[str, list[dict[str, str]]]:
    """Write three splits of the given sizes: split -> rows of ``text``, ``label`` and ``kind``.

    Sizes must be even, because half of each split is positive. No text occurs twice, within a split
    or across them. The test split is written first: it does not change with the other two sizes.
    """
    rng = Random(seed)
    seen = set[str]()
    splits: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    for split, size in (("test", test), ("validation", validation), ("train", train)):
        if size < 0 or size % 2:
            raise ValueError(f"the {split} split needs an even size, half of it for each label; got {size}")
        rows = splits[split]
        while len(rows) < size:
            kind = KINDS[len(rows) // 2 % len(KINDS)]
            twins = _twins(rng, kind)
            if seen.isdisjoint(twins.values()):
                seen.update(twins.values())
                rows += ({"text": text, "label": label, "kind": kind} for label, text in twins.items())
        rng.shuffle(rows)
    return splits

"""Finds the entities that the tags of a sentence describe, and tags that do not follow their scheme.

A scheme has rules for two neighbouring tags: whether an entity starts at the second, continues from the first to the
second, or ends after the first. An entity that starts but does not end by a rule is none. Without a scheme, entities
are those of CoNLL's evaluation script (conlleval), which also reads tags in an order that no scheme allows.

Source of the schemes and their names: Sang and Veenstra, "Representing Text Chunks", 1999 (IOB, IOE); Ratinov and Roth,
"Design Challenges and Misconceptions in Named Entity Recognition", 2009 (BILOU). Where these leave a case open, the
rules are those of seqeval 1.2.2 in its strict and default modes, so that scores can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, get_args

Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]
Entity = tuple[str, int, int]
"""Type, first word and last word."""

PREFIXES = {"IOB1": "IB", "IOB2": "IB", "IOE1": "IE", "IOE2": "IE", "IOBES": "IBES", "BILOU": "BILU", None: "IBES"}
"""Scheme -> first letters of its tags, beside ``O``. None: those of CoNLL's evaluation script."""
RULES = {
    "IOB1": ("OI I!I BI I=B B=B", "B=I I=I", "I!I IO IB BO B!I B=B"),
    "IOB2": ("*B", "B=I I=I", "**"),
    "IOE1": ("OI I!I EI E=E", "I=I I=E", "I!I IO I!E E=I E=E"),
    "IOE2": ("OI OE EI EE I!I I!E", "I=I I=E", "E*"),
    "IOBES": ("*B *S", "B=I B=E I=I I=E", "E* S*"),
    "BILOU": ("*B *U", "B=I B=L I=I I=L", "L* U*"),
    None: ("*B *S OI OE EI EE SI SE B!I B!E I!I I!E", "B=I B=E I=I I=E", "**"),
}
"""Scheme -> when an entity starts, continues and ends: letters of two neighbouring tags (``*``: any). Between them is
``=`` for tags of the same type, ``!`` for different types, and nothing for both. The end of a sentence is an ``O``."""

Rules = tuple[frozenset[tuple[str, str, bool]], ...]
"""Of starts, continuations and ends: the letters of two neighbouring tags, and whether their types are equal."""


@cache
def _rules(scheme: Scheme | None) -> Rules:
    letters = "O" + PREFIXES[scheme]
    return tuple(
        frozenset(
            (first, second, same)
            for rule in rules.split()
            for first in (letters if rule[0] == "*" else rule[0])
            for second in (letters if rule[-1] == "*" else rule[-1])
            for same in {"=": (True,), "!": (False,)}.get(rule[1:-1], (True, False))
        )
        for rules in RULES[scheme]
    )


def entity_type(tag: str, scheme: Scheme | None) -> str:
    """The type of a tag that is not ``O``; ``_`` for a tag without one."""
    return (tag[1:].partition("-")[2] if scheme is None else tag[1:].strip("-")) or "_"


def find_entities(sentences: Iterable[Sequence[str]], scheme: Scheme | None) -> list[list[Entity]]:
    """The entities of each sentence.

    Args:
        sentences: The tags of each sentence. ``misfit`` finds none that is not of the scheme.
        scheme: The rules; None: those of CoNLL's evaluation script.
    """
    starts, continues, ends = _rules(scheme)
    types: dict[str, str] = {}
    found = []
    for tags in sentences:
        entities: list[Entity] = []
        first, before, kind = None, "O", "_"
        for place, tag in enumerate((*tags, "O")):
            if tag not in types:
                types[tag] = entity_type(tag, scheme)
            pair = (before, tag[0], kind == types[tag])
            if first is not None and pair not in continues:
                if pair in ends:
                    entities.append((kind, first, place - 1))
                first = None
            if first is None and pair in starts:
                first = place
            before, kind = tag[0], types[tag]
        found.append(entities)
    return found


def misfit(names: Sequence[str], scheme: Scheme | None) -> str | None:
    """The first tag that does not describe a part of an entity under a scheme; None if all do."""
    fits = re.compile(rf"[{PREFIXES[scheme]}](-.+)?|O")
    return next((name for name in names if not fits.fullmatch(name)), None)


def describe_misfit(sentences: Sequence[Sequence[str]], scheme: Scheme, where: str) -> str | None:
    """Describe the tagged words that belong to no entity under a scheme, and name the scheme that the tags follow; None
    if there are none.

    Args:
        sentences: The tags of each sentence; each is one of the scheme.
        where: The key of the scheme, for the message.
    """
    lost = _outside(sentences, scheme)
    if not lost:
        return None
    tagged, (tags, place) = sum(tag != "O" for tags in sentences for tag in tags), lost[0]
    before = f"{tags[place - 1]!r}" if place else "the beginning of a sentence"
    names = sorted({tag for tags in sentences for tag in tags})
    schemes: tuple[Scheme, ...] = get_args(Scheme)
    fits = next((other for other in schemes if misfit(names, other) is None and not _outside(sentences, other)), None)
    remedy = f"The tags follow {fits}: {where}={fits}" if fits else f"To count them, as conlleval does: {where}=null"
    return (
        f"{len(lost)} of {tagged} tagged words belong to no entity of {scheme}, and metrics leave them out, such as "
        f"{tags[place]!r} after {before}. {remedy}"
    )


def _outside(sentences: Iterable[Sequence[str]], scheme: Scheme) -> list[tuple[Sequence[str], int]]:
    """The tagged words that belong to no entity: the tags of the sentence, and the word's place."""
    found: list[tuple[Sequence[str], int]] = []
    for tags, entities in zip(sentences, find_entities(sentences, scheme), strict=True):
        inside = {place for _, first, last in entities for place in range(first, last + 1)}
        found += [(tags, place) for place, tag in enumerate(tags) if tag != "O" and place not in inside]
    return found

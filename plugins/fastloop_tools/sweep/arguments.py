"""The arguments of ``fastloop sweep`` that a grid and a search share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SweepArguments:
    """The arguments of the command line.

    Attributes:
        recipe: The recipe, by path or name.
        values: The overrides: those with several values, or with ranges, span the space.
        added: The plugins of ``--with``.
        left_out: The plugins of ``--without``.
        seeds: Seeds of each point; None: the recipe's one.
        monitor: The metric to compare; None: not given.
        mode: ``auto``, ``min`` or ``max``.
        nproc: Processes of each run.
    """

    recipe: str
    values: list[str]
    added: list[str]
    left_out: list[str]
    seeds: int | None
    monitor: str | None
    mode: str
    nproc: int

"""Checks that a state that was read from a checkpoint has the expected keys and types, before anything uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

LARGEST = 2**63
"""Integers of a state are smaller than this, so that torch and NumPy can hold them."""


def check_form(state: Any, like: Any, name: str = "state") -> None:
    """Check that a state has the form of another one: ``check_form(state, {"best": None, "waited": 0})``.

    A mapping has the keys of ``like``, and may have more. If ``like`` has one element with a key that is not a string,
    such as ``{0: [0]}``, the keys and values have the form of that element, and so do the elements of a list such as
    ``[0]``. A number fits a number, and anything fits None.

    Args:
        like: A value of the expected form.
        name: The state's name, for messages.

    Raises:
        ValueError: The form differs. Names the place, the value and the expected type.
    """
    if like is None:
        return
    if isinstance(like, Mapping):
        _check_mapping(state, like, name)
    elif isinstance(like, list | tuple):
        _check_sequence(state, like, name)
    elif isinstance(like, bool | str):
        _expect(isinstance(state, type(like)), state, like, name)
    elif isinstance(like, Tensor | int | float):
        fits_tensor = isinstance(state, Tensor) and isinstance(like, Tensor)
        _expect(fits_tensor or _is_number(state), state, like, name)


def _check_mapping(state: Any, like: Mapping[Any, Any], name: str) -> None:
    _expect(isinstance(state, Mapping), state, like, name)
    for key, value in like.items():
        if not isinstance(key, str):
            for own_key, own_value in state.items():
                check_form(own_key, key, f"a key of {name}")
                check_form(own_value, value, f"{name}.{own_key}")
        elif key in state:
            check_form(state[key], value, f"{name}.{key}")
        elif isinstance(value, int | float | list | tuple | Mapping) and not isinstance(value, bool):
            # others may be new in this version of torch, which then sets them
            raise ValueError(f"{name}.{key} is missing")


def _check_sequence(state: Any, like: list[Any] | tuple[Any, ...], name: str) -> None:
    _expect(isinstance(state, list | tuple), state, like, name)
    if isinstance(like, tuple) and len(state) != len(like):
        raise ValueError(f"{name}: found {len(state)} values, expected {len(like)}")
    first = like[0] if like else None
    for index, value in enumerate(state):
        template = like[index] if len(state) == len(like) else first
        check_form(value, template, f"{name}.{index}")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, float | Tensor) or (isinstance(value, int) and abs(value) < LARGEST)


def _expect(fits: bool, value: Any, like: Any, name: str) -> None:
    if not fits:
        raise ValueError(f"{name}: found {value!r:.40} ({type(value).__name__}), expected a {type(like).__name__}")

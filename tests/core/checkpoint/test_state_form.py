"""A state of another form is refused with its place; a state of the same form is accepted.

Modules:
    core/fastloop/checkpoint/state_form.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastloop.checkpoint.state_form import check_form

ACCEPTED: dict[str, tuple[Any, Any]] = {
    "more keys": ({"a": 1, "b": 2}, {"a": 0}),
    "another number": ({"a": 1.5}, {"a": 0}),
    "anything for None": ({"a": "text"}, {"a": None}),
    "a flag that is new": ({"a": 1}, {"a": 0, "flag": False}),
    "a longer list": ([1, 2, 3], [0]),
    "an empty list": ([], [0]),
    "a list for a tuple": ([0.9, 0.99], (0.0, 0.0)),
    "different elements": ([{"a": 1}, {"b": 1}], [{"a": 0}, {"b": 0}]),
    "numbers as keys": ({3: [1], 4: []}, {0: [0]}),
    "tensors": ({"a": torch.ones(2), "b": torch.tensor(1.0)}, {"a": torch.zeros(2), "b": 0.0}),
}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no mapping": (5, {"a": 0}, "state: .* 5 "),
    "a missing number": ({}, {"a": 0}, r"state\.a "),
    "a missing list": ({}, {"a": [0]}, r"state\.a "),
    "a text": ({"a": {"b": "1"}}, {"a": {"b": 0}}, r"state\.a\.b: .*'1' \(str\).* int"),
    "a flag for a number": ({"a": True}, {"a": 0}, r"state\.a: .* True"),
    "a number for a flag": ({"a": 1}, {"a": False}, r"state\.a: .* 1"),
    "a huge number": ({"a": 2**63}, {"a": 0}, r"state\.a: .* 9223372036854775808"),
    "a text in a list": ([1, "2"], [0], r"state\.1: .*'2'"),
    "a shorter tuple": ((0.9,), (0.0, 0.0), "state: .* 1 .* 2"),
    "a text as key": ({"a": [1]}, {0: [0]}, "key of state: .*'a'"),
    "a text in a list of a mapping": ({3: ["a"]}, {0: [0]}, r"state\.3\.0: .*'a'"),
    "no tensor": ({"a": "text"}, {"a": torch.zeros(2)}, r"state\.a: .*'text'"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_state_of_the_same_form_is_accepted(case):
    check_form(*ACCEPTED[case])


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_of_another_form_is_refused_with_its_place(case):
    state, like, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        check_form(state, like)

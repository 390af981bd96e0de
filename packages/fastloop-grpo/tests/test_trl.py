"""Losses, advantages and gradients equal those of TRL: computed beside it, and as recorded numbers."""

import json
import warnings

import pytest
import torch
from trl_cases import CASES, EXPECTED, ours, theirs


def check(numbers, expected):
    """Compare numbers, of which a sorted list of advantages: rows are logged in the order of the batch."""
    assert numbers.keys() == expected.keys()
    for name, value in expected.items():
        if name == "gradients":
            for update, known in zip(numbers[name], value, strict=True):
                assert known[0] > 1e-2
                assert (torch.tensor(update) - torch.tensor(known)).norm() <= 1e-5 * known[0]
        elif name == "advantages":
            assert sorted(numbers[name]) == pytest.approx(sorted(value), rel=1e-5, abs=1e-5)
        else:
            assert numbers[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("case", CASES)
def test_numbers_equal_the_recorded_ones(case, tmp_path):
    numbers, _ = ours(case, tmp_path)
    check(numbers, json.loads(EXPECTED.read_text())[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_numbers_equal_those_of_trl(case, tmp_path):
    pytest.importorskip("trl")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (tmp_path / "trl").mkdir()
        expected, their_gradients = theirs(case, tmp_path / "trl")
    (tmp_path / "ours").mkdir()
    numbers, our_gradients = ours(case, tmp_path / "ours")
    check(numbers, expected)
    for update, known in zip(our_gradients, their_gradients, strict=True):
        assert (update - known).norm() <= 1e-5 * known.norm()

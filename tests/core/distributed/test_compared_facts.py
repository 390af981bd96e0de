"""Processes compare what must be equal or disjoint, and every process raises the same error.

Modules:
    core/fastloop/data/digests.py
    core/fastloop/data/equal_steps.py
    core/fastloop/distributed/compared_facts.py
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import forked
import numpy as np
import pytest
import torch
from compared_facts_runs import OTHER_KEYS, SAMPLES, WEIGHT_CASES, all_of, train_weight_cases, train_with_other_keys

from fastloop.data.digests import sample_digest
from fastloop.distributed import compared_facts
from fastloop.errors import ProcessesDisagree
from fastloop.testing import expect_problem

CASES = [
    ("whole", "train", 0),
    ("whole", "train", 2),
    ("sharded", "train", 0),
    ("sharded", "train", 2),
    ("sharded", "validation", 0),
    ("noisy", "train", 0),
    ("declared", "train", 0),
    ("uneven", "train", 0),
    ("uneven", "validation", 0),
    ("empty", "train", 0),
]


@pytest.fixture(scope="module")
def results(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str, int], Any]]:
    """For each process: case -> result."""
    ended = processes(2, all_of, CASES, folder=tmp_path_factory.mktemp("compared_facts"))
    return [dict(zip(CASES, process.result, strict=True)) for process in ended]


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in ("sharded", "empty")])
def test_each_sample_is_trained_once(results, case):
    assert [process[case]["error"] for process in results] == [None, None]
    trained = [target for process in results for target in process[case]["trained"]]
    assert sorted(trained) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "sharded"])
def test_a_dataset_that_shards_itself_is_an_error_on_each_process(results, case):
    errors = [process[case] for process in results]
    assert errors[0] == errors[1]
    assert errors[0]["class"] == "ProcessesDisagree"
    assert "shards_itself" in errors[0]["error"]


@pytest.mark.slow
def test_a_share_without_a_sample_is_an_error_on_each_process(results):
    for process in results:
        error = process["empty", "train", 0]["error"]
        assert error.startswith("Empty shards itself, and has no sample for process 1.")


@pytest.mark.slow
def test_a_key_of_train_that_differs_is_named_on_each_process(processes):
    for process in processes(2, train_with_other_keys, limit=200):
        for key in OTHER_KEYS:
            assert f"disagree on the key train.{key}: process 0 has " in process.result.get(key, ""), process.result


def test_processes_with_equal_facts_agree():
    compared_facts.compare([{"first sample": "a"}, {"first sample": "a"}], "r.yaml")


@pytest.mark.parametrize("name", compared_facts.REMEDIES)
def test_a_fact_that_differs_is_an_error_that_names_both_processes(name):
    with pytest.raises(ProcessesDisagree) as raised:
        compared_facts.compare([{name: "a"}, {name: "a"}, {name: "b"}], "r.yaml: step 1")
    for part in (name, "'a'", "'b'", "process 0", "process 2", compared_facts.REMEDIES[name]):
        assert part in str(raised.value)


def facts(*processes: tuple[int, tuple[int, ...]]) -> list[compared_facts.StepFacts]:
    return [compared_facts.StepFacts(share=share, ids=ids, equal={}) for share, ids in processes]


@pytest.mark.parametrize(
    "processes",
    [
        [(0, (1, 2)), (1, (3, 4))],
        [(0, (1, 2)), (0, (1, 2)), (1, (3,)), (1, (3,))],
        [(0, (1, 2)), (1, ())],
    ],
    ids=["two shares", "two processes a share", "a filler"],
)
def test_disjoint_samples_agree(processes):
    compared_facts._compare_samples(facts(*processes), "r.yaml")


@pytest.mark.parametrize(
    "processes", [[(0, (1, 2)), (1, (2, 3))], [(0, (1, 2)), (0, (1, 3))]], ids=["in common", "other samples of a share"]
)
def test_other_samples_are_an_error(processes):
    with expect_problem("processes-disagree r.yaml: 0 1", ProcessesDisagree):
        compared_facts._compare_samples(facts(*processes), "r.yaml")


def test_a_digest_changes_with_each_value_and_is_that_of_an_equal_sample():
    def sample(**changed: Any) -> dict[str, Any]:
        values = {
            "tensor": torch.arange(3.0),
            "small": torch.ones(2, dtype=torch.bfloat16),
            "empty": torch.zeros(0),
            "array": np.arange(4),
            "text": "a",
            "number": 1,
            "nested": [(1.5, None)],
        }
        return {**values, **changed}

    changes: list[dict[str, Any]] = [
        {"tensor": torch.arange(1.0, 4.0)},
        {"small": torch.zeros(2, dtype=torch.bfloat16)},
        {"array": np.arange(1, 5)},
        {"text": "b"},
        {"number": 2},
        {"nested": [(1.5, 0)]},
        {"nested": [(1.5,)]},
    ]
    digests = [sample_digest(sample(**change)) for change in changes]
    assert sample_digest(sample()) == sample_digest(sample())
    assert len({sample_digest(sample()), *digests}) == len(changes) + 1


PEAK = """
import re
import sys
from pathlib import Path
import torch
from fastloop.distributed import compared_facts


def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


weight = torch.ones(50 * 2**10, 2**10)
weights = {"weight": weight.T if sys.argv[1] == "transposed" else weight}
before = peak()
assert compared_facts._checksum(weights, torch.device("cpu"))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_checksum_copies_no_weight(tmp_path, layout):
    script = tmp_path / "peak.py"
    script.write_text(PEAK)
    done = forked.run(str(script), layout, timeout=300)
    assert done.returncode == 0, done.stderr
    mib = float(done.stdout)
    assert mib < 100, "the weight has 200 MiB"


def test_a_checksum_counts_each_element(monkeypatch):
    monkeypatch.setattr(compared_facts, "SUMMED", 4)
    cpu = torch.device("cpu")
    checksums = {compared_facts._checksum({"weight": torch.zeros(10)}, cpu)}
    for index in range(10):
        weight = torch.zeros(10)
        weight[index] = 1 + index
        checksums.add(compared_facts._checksum({"weight": weight}, cpu))
    assert len(checksums) == 11
    assert compared_facts._checksum({"weight": torch.zeros(10)}, cpu) in checksums
    transposed = torch.arange(10.0).view(2, 5).T
    checksum = compared_facts._checksum({"weight": transposed}, cpu)
    assert checksum == compared_facts._checksum({"weight": transposed.contiguous()}, cpu)
    assert checksum not in checksums


def test_a_run_of_one_process_exchanges_nothing(tiny_run, monkeypatch):
    monkeypatch.setattr(compared_facts, "check_step", lambda run, batches: pytest.fail("compared"))
    assert tiny_run(max_steps=3).summary["steps"] == 3


def test_an_object_counts_by_its_class():
    assert sample_digest(SimpleNamespace(a=1)) == sample_digest(SimpleNamespace(a=2))


def test_weights_that_differ_without_a_declaration_are_an_error_on_each_process(processes, tmp_path):
    refused = {
        "alone": ("step 2", "'alone'", "in Alone"),
        "alone, one step": ("step 1", "'alone'", "in Alone"),
        "alone, frozen": ("step 2", "'alone'", "such as 1.weight"),
        "own noise": ("step 2", "'ddp'", "a hook changes gradients"),
    }
    first, second = processes(2, train_weight_cases, list(WEIGHT_CASES), folder=tmp_path)
    assert first.result == second.result
    for name, error in first.result.items():
        if name in refused:
            for part in (*refused[name], "process 1", "average gradients"):
                assert part in error
            can_edit = "'alone'" in error
            assert ("keeps_weights_equal = False" in error) == can_edit, "users cannot edit ddp"
        else:
            assert error is None, name

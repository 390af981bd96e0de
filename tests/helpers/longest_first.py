"""The order in which pytest-xdist's workers take modules and classes of tests."""

from __future__ import annotations

from collections import Counter

import pytest

LONGEST = (
    "tests/packages/test_packages.py",
    "tests/plugins/strategies/test_plugins_on_two_processes.py",
    "tests/round_trip/test_round_trip.py",
    "tests/reliability/test_two_machines.py",
    "tests/packages/test_examples.py",
    "tests/security/test_hostile_data.py",
    "tests/reliability/test_lost_processes.py",
    "tests/recipes/test_recipes.py",
    "tests/core/cli/test_launchers.py",
    "tests/reliability/test_stopping.py",
    "tests/plugins/strategies/test_ddp_fsdp.py",
    "tests/plugins/text/streaming/test_streaming_runs.py",
    "tests/benchmarks/test_gpu_suite.py",
    "tests/plugins/kernels/test_compile.py",
    "tests/security/test_users.py",
    "tests/benchmarks/test_architectures.py",
    "tests/benchmarks/test_mutants.py",
    "tests/plugins/text/test_flat_memory.py",
    "tests/plugins/text/streaming/test_shards.py",
    "tests/plugins/text/streaming/test_remote_shards.py",
)
"""Files whose slow tests take more than a minute, the longest first, then those of few tests that take half a minute.
One that begins near the end of a run leaves the other workers idle."""


def sort_longest_first(tests: list[pytest.Item]) -> None:
    """Sort tests in place: files of ``LONGEST``, then the modules and classes with most tests. Those of one module or
    class stay together, in their order."""
    counts = Counter(_scope(test) for test in tests)

    def position(test: pytest.Item) -> tuple[int, int]:
        file = test.nodeid.partition("::")[0]
        rank = LONGEST.index(file) if file in LONGEST else len(LONGEST)
        return rank, -counts[_scope(test)]

    tests.sort(key=position)


def _scope(test: pytest.Item) -> str:
    """Its module or class, as pytest-xdist's ``loadscope`` names it."""
    return test.nodeid.rpartition("::")[0]

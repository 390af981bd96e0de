"""sample-audit, length-bucketing and activation-checkpointing on two real processes, resumed on three, then on one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugin_runs import all_of

from fastloop.testing import ProcessResult

pytestmark = pytest.mark.slow

SPLIT: dict[str, Any] = {"data": "lengths", "bucketing": {"window": 2, "max_tokens": 40}, "dropout": 0.0}
SOURCES = {"map": {}, "stream": {"data": "stream"}, "stream, workers": {"data": "stream", "workers": 2}}
PRECISIONS = {"fp32": [], "bf16": [{"amp": {"dtype": "bf16"}}]}
RECOMPUTED = [("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "fp32")]


def run(name: str, steps: int | None, micro: int, plugins: Any = ("ddp",), **more: Any) -> dict[str, Any]:
    return {"name": name, "plugins": plugins, "train": {"max_steps": steps, "micro_batch_size": micro}, **more}


TWO = [
    run("split", 8, None, audit={}, **SPLIT),
    run("split, static graph", None, None, [{"ddp": {"static_graph": True}}], **SPLIT),
    *(run(name, 8, 3, audit={}, **source) for name, source in SOURCES.items()),
    *(run(f"{kind}, not shared out", None, 3, audit={}, faulty=True, data=kind) for kind in ("map", "stream")),
    run("warned", None, 3, audit={"on_violation": "warn"}, faulty=True),
    run("sharded", None, 3, audit={}, data="sharded"),
    *(
        run(f"{strategy} {precision}{with_it}", None, 3, [strategy, *plugins], **({"recompute": {}} if with_it else {}))
        for strategy, precision in RECOMPUTED
        for plugins in [PRECISIONS[precision]]
        for with_it in ("", " recomputed")
    ),
]
THREE = [run("split", 10, None, audit={}, resume=True, **SPLIT)]
THREE += [run(name, 10, 2, audit={}, resume=True, **source) for name, source in SOURCES.items()]
ONE = [run("split", None, None, (), audit={}, resume=True, **SPLIT), run("split whole", None, None, (), **SPLIT)]
ONE += [run(name, None, 6, (), audit={}, resume=True, **source) for name, source in SOURCES.items()]


@pytest.fixture(scope="module")
def ended(processes: Callable[..., list[ProcessResult]], folder: Path) -> dict[int, list[ProcessResult]]:
    """Number of processes -> how each ended."""
    return {count: processes(count, all_of, runs, folder=folder) for count, runs in ((2, TWO), (3, THREE), (1, ONE))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs are."""
    return tmp_path_factory.mktemp("plugins")


@pytest.fixture(scope="module")
def results(ended: dict[int, list[ProcessResult]]) -> dict[int, dict[str, Any]]:
    """Number of processes -> the first one's results by run."""
    return {count: processes[0].result for count, processes in ended.items()}


def recorded(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Rank -> lines."""
    files = sorted((folder / "sample-audit").iterdir())
    return {rank: [json.loads(line) for line in file.read_text().splitlines()] for rank, file in enumerate(files)}


@pytest.mark.parametrize("name", SOURCES)
def test_every_sample_is_on_record_once_an_epoch_on_two_then_three_then_one_process(results, folder, name):
    for count, samples, epochs in ((2, 67 + 24, 1), (3, 67 + 48, 1), (1, 134, 2)):
        audit = results[count][name]["sample-audit"]
        assert audit["samples"] == samples
        assert (audit["epochs"], audit["missing"], audit["repeated"], audit["unknown"]) == (epochs, 0, 0, 0)
    assert [len(by_rank) for by_rank in (results[count][name]["sample-audit"]["by_rank"] for count in (2, 3, 1))] == [
        2,
        3,
        3,
    ]
    workers = {"0", "1"} if "workers" in name else {"-1"}
    assert all(set(by_worker) <= workers for by_worker in audit["by_worker"])
    lines = recorded(folder / name)
    assert {rank: [line["step"] for line in found] for rank, found in lines.items()} == {
        0: [*range(12)],
        1: [*range(10)],
        2: [8, 9],
    }
    for epoch in (0, 1):
        ids = [
            number
            for found in lines.values()
            for line in found
            if line["epoch"] == epoch
            for batch in line["batches"]
            for number in batch["ids"]
        ]
        assert sorted(ids) == list(range(67))


def test_a_process_that_only_computes_along_has_nothing_on_record(results, folder):
    last = [found[5]["batches"] for rank, found in recorded(folder / "map").items() if rank < 2]  # 7 of 12 samples
    assert [[len(batch["ids"]) for batch in batches] for batches in last] == [[3, 1], [3]]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_processes_that_do_not_share_out_end_together(ended, folder, kind):
    name = f"{kind}, not shared out"
    errors = [process.result[name]["error"] for process in ended[2]]
    assert errors[0] == errors[1]
    assert errors[0].startswith("AuditError: plugin 'sample-audit': epoch 0: ")
    assert "samples are missing (" in errors[0]
    assert re.search(r"more than once \(\d+: rank 0 at step (\d+) and rank 1 at step \1; ", errors[0])
    summary = json.loads((folder / name / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["sample-audit"]["repeated"] > 30


def test_violation_warning_continues_training(results):
    assert results[2]["warned"]["sample-audit"]["epochs"] == 2
    assert results[2]["warned"]["sample-audit"]["repeated"] > 60


def test_a_stream_that_shards_itself_is_counted(results):
    assert results[2]["sharded"]["sample-audit"]["by_rank"] == [66, 66]


@pytest.mark.parametrize(("strategy", "precision"), RECOMPUTED)
def test_recomputed_activations_change_no_bit_on_two_processes(results, strategy, precision):
    plain, ours = (results[2][f"{strategy} {precision}{with_it}"] for with_it in ("", " recomputed"))
    assert len(set(plain["losses"])) == 12
    assert ours["losses"] == plain["losses"]
    assert ours["weights"] == plain["weights"]


def test_steps_that_are_split_by_length_train_the_same_on_two_then_three_then_one_process(results, folder):
    whole = results[1]["split whole"]["losses"]
    found = [*results[2]["split"]["losses"], *results[3]["split"]["losses"], *results[1]["split"]["losses"]]
    assert len(whole) == 12
    assert found == pytest.approx(whole, rel=1e-5)
    audit = results[1]["split"]["sample-audit"]
    assert (audit["epochs"], audit["missing"], audit["repeated"], audit["unknown"]) == (2, 0, 0, 0)
    first = [len(line["batches"]) for line in recorded(folder / "split")[0]]
    assert max(first) > 1, "there are steps of several micro-steps"
    assert len(set(first)) > 1, "and not always of as many"


def test_a_static_graph_and_split_steps_are_refused_together(results):
    assert (
        "'length-bucketing' splits each step by the lengths of its samples"
        in results[2]["split, static graph"]["error"]
    )

"""sample-audit: records the samples of each process and worker, and reports an epoch without every sample once.

The faults are real ones: an order drawn with replacement, processes that do not share out, a dataset whose length is
not true.

Modules:
    plugins/fastloop_plugins/data/_audit_files.py
    plugins/fastloop_plugins/data/sample_audit.py
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import exit_code
from torch.utils.data import IterableDataset, get_worker_info

from fastloop import Plugin, hookimpl
from fastloop.data import StepSampler
from fastloop.testing import assert_problem, expect_problem, tiny_data
from fastloop_plugins.data.sample_audit import AuditError, SampleAudit

ALL = list(range(67))


class Stream(IterableDataset):
    """67 samples, one after another."""

    def __iter__(self):
        return iter(tiny_data())


class Says(Stream):
    """The same stream, with a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


class Sharded(IterableDataset):
    """Shares itself out among the workers."""

    shards_itself = True

    def __iter__(self):
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        return (sample for index, sample in enumerate(tiny_data()) if index % every == first)


class Dies(Plugin):
    """SIGKILL to its own process, within a step."""

    name = "dies"

    @hookimpl
    def after_backward(self, run) -> None:
        if run.state.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"sample-audit/rank-{rank}.jsonl").read_text().splitlines()]


def ids(folder: Path, epoch: int) -> list[int]:
    """All sample ids of an epoch, over all processes."""
    ranks = range(len(list((folder / "sample-audit").iterdir())))
    return [
        number
        for rank in ranks
        for line in lines(folder, rank)
        if line["epoch"] == epoch
        for batch in line["batches"]
        for number in batch["ids"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [tiny_data, Stream], ids=["map-style", "iterable"])
def test_it_records_every_sample_once_an_epoch_with_the_worker_that_read_it(tiny_run, data, workers):
    result = tiny_run(
        [SampleAudit(), {"dataloader-workers": {"num_workers": workers}}],
        data=data(),
        micro_batch_size=3,
        batch_size=12,
        epochs=2,
    )
    folder = result.trainer.run.folder
    assert [(line["step"], line["epoch"]) for line in lines(folder)] == [(step, step // 6) for step in range(12)]
    assert [len(batch["ids"]) for batch in lines(folder)[5]["batches"]] == [3, 3, 1]
    assert sorted(ids(folder, 0)) == sorted(ids(folder, 1)) == ALL
    if data is tiny_data:
        assert ids(folder, 1) == torch.randperm(67, generator=torch.Generator().manual_seed(123 + 1)).tolist()
    by_worker = {str(worker): 0 for worker in (range(workers) if workers else [-1])}
    for line in lines(folder):
        for batch in line["batches"]:
            by_worker[str(batch["worker"])] += len(batch["ids"])
    assert result.summary["sample-audit"] == {
        "samples": 134, "epochs": 2, "missing": 0, "repeated": 0, "unknown": 0, "by_rank": [134],
        "by_worker": [by_worker]
    }  # fmt: skip


def test_it_changes_no_number(tiny_run):
    plain, result = tiny_run(micro_batch_size=4), tiny_run([SampleAudit()], micro_batch_size=4)
    assert result.losses == plain.losses
    assert all(torch.equal(result.weights[name], plain.weights[name]) for name in plain.weights)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [tiny_data, Stream], ids=["map-style", "iterable"])
def test_audit_of_resumed_epoch_is_complete(tiny_run, data, workers):
    def run(**arguments):
        plugins = [SampleAudit(), {"dataloader-workers": {"num_workers": workers}}]
        return tiny_run(plugins, data=data(), output="run", epochs=2, save_every=4, **arguments)

    cut = run(max_steps=13)
    assert cut.summary["sample-audit"] | {"by_worker": 0} == {
        "samples": 67 + 32, "epochs": 1, "missing": 0, "repeated": 0, "unknown": 0, "by_rank": [99], "by_worker": 0
    }  # fmt: skip
    whole = run(resume=True)
    assert whole.summary["sample-audit"]["samples"] == 134
    assert whole.summary["sample-audit"]["epochs"] == 2
    assert [line["step"] for line in lines(Path("run"))] == list(range(18))
    assert sorted(ids(Path("run"), 1)) == ALL


def test_what_a_killed_run_recorded_after_its_checkpoint_is_dropped(tiny_run):
    assert exit_code([SampleAudit(), Dies()], output="run", save_every=4) == -signal.SIGKILL
    assert [line["step"] for line in lines(Path("run"))] == list(range(15))
    with Path("run/sample-audit/rank-0.jsonl").open("a") as file:
        file.write('{"step":15,"epo')  # as a machine that goes down leaves it
    result = tiny_run([SampleAudit()], output="run", resume=True)
    assert len(result.losses) == 18 - 12
    assert [line["step"] for line in lines(Path("run"))] == list(range(18))
    assert result.summary["sample-audit"]["samples"] == 134


def test_a_run_that_goes_on_in_another_folder_takes_its_record_along(tiny_run):
    tiny_run([SampleAudit()], output="a", max_steps=12)
    result = tiny_run([SampleAudit()], output="b", resume="a/checkpoints/step-00000012")
    assert (result.summary["sample-audit"]["epochs"], result.summary["sample-audit"]["missing"]) == (2, 0)
    assert len(lines(Path("a"))) == 12
    assert len(lines(Path("b"))) == 18


def test_an_epoch_that_began_without_it_is_checked_for_repeats_only(tiny_run, caplog):
    tiny_run(output="run", max_steps=12)
    tiny_run([SampleAudit()], output="run", epochs=3, max_steps=15, resume=True)
    assert (
        caplog.text.count(
            "sample-audit: the beginning of epoch 1 is not recorded: it is only checked for repeated samples"
        )
        == 1
    )
    result = tiny_run([SampleAudit()], output="run", epochs=3, resume=True)
    assert result.summary["sample-audit"]["samples"] == 67 - 24 + 67
    assert result.summary["sample-audit"]["epochs"] == 2
    assert result.summary["sample-audit"]["missing"] == 0


def with_replacement(sampler: StepSampler) -> list[int]:
    return torch.randint(sampler.size, (sampler.size,), generator=torch.Generator().manual_seed(sampler.epoch)).tolist()


def test_samples_drawn_with_replacement_end_the_run(tiny_run, monkeypatch):
    monkeypatch.setattr(StepSampler, "order", with_replacement)
    drawn = torch.randint(67, (67,), generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=67)
    missing, repeated = (counts == 0).nonzero().flatten().tolist(), (counts > 1).nonzero().flatten().tolist()
    with pytest.raises(AuditError) as error:
        tiny_run([SampleAudit()], output="run")
    said = str(error.value)
    assert_problem(error.value.problem, f"samples-differ 'sample-audit': 0: {len(missing)} 67 run/sample-audit")
    assert f"({', '.join(map(str, missing[:5]))}, ...)" in said
    steps = [int(place) // 8 for place in (drawn == repeated[0]).nonzero().flatten()]
    places = f"({repeated[0]}: rank 0 at step {steps[0]} and rank 0 at step {steps[1]}"
    assert re.search(rf" {len(repeated)} [\w ]+{re.escape(places)}", said)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "failed"
    assert (summary["sample-audit"]["missing"], summary["sample-audit"]["repeated"]) == (len(missing), len(repeated))


def test_on_violation_warn_continues_and_counts(tiny_run, monkeypatch, caplog):
    monkeypatch.setattr(StepSampler, "order", with_replacement)
    result = tiny_run([SampleAudit(on_violation="warn")])
    assert result.summary["status"] == "completed"
    assert result.summary["sample-audit"]["epochs"] == 2
    assert result.summary["sample-audit"]["missing"] > 30
    assert "plugin 'sample-audit': epoch 0: " in caplog.text
    assert "plugin 'sample-audit': epoch 1: " in caplog.text


def test_an_epoch_cut_short_is_checked_for_repeats(tiny_run, monkeypatch):
    monkeypatch.setattr(StepSampler, "order", lambda sampler: [7] * 67)
    with expect_problem("samples-differ 0 1 7", AuditError):
        tiny_run([SampleAudit()], max_steps=2, batch_size=2)


@pytest.mark.parametrize(
    ("says", "found"),
    [(70, "samples-differ 3 70 67 68 69"), (60, "samples-differ 7 60")],
    ids=["longer", "shorter"],
)
def test_a_stream_must_be_as_long_as_it_says(tiny_run, says, found):
    with expect_problem(found, AuditError):
        tiny_run([SampleAudit()], data=Says(says))


def test_a_record_that_lost_lines_is_found(tiny_run):
    tiny_run([SampleAudit()], output="run", max_steps=4)
    path = Path("run/sample-audit/rank-0.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with expect_problem("samples-differ 0 8 67", AuditError):
        tiny_run([SampleAudit()], output="run", resume=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_shards_itself_is_counted_only(tiny_run, caplog, workers):
    result = tiny_run([SampleAudit(), {"dataloader-workers": {"num_workers": workers}}], data=Sharded())
    assert caplog.text.count("Sharded shards itself: its samples have no ids to check, and are only counted") == 1
    assert result.summary["sample-audit"]["by_rank"] == [134]
    assert set(result.summary["sample-audit"]["by_worker"][0]) == ({"0", "1"} if workers else {"-1"})
    assert lines(result.trainer.run.folder)[0]["batches"] == [{"worker": 0 if workers else -1, "samples": 8}]


def test_memory_holds_counts_only(tiny_run):
    def characters(audit: SampleAudit) -> int:
        read_until = [str(entry) for entry in audit.files.read_until.items()]
        return len(json.dumps([audit.totals, list(audit.readers.items()), read_until]))

    small = SampleAudit()
    tiny_run([small], epochs=1)
    large = SampleAudit()
    tiny_run([large], epochs=5, data=tiny_data(200))
    assert characters(large) < characters(small) + 20

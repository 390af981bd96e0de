"""Data that cannot be read, has changed, or whose readers die.

Modules:
    plugins/fastloop_plugins/data/skip_unreadable.py
"""

from __future__ import annotations

import copy
import ctypes
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_runs import times
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset
from training_runs import execute

from fastloop import CheckpointError, Plugin, RecipeError, Trainer, hookimpl
from fastloop.errors import DataError, FastloopError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.testing import assert_problem, expect_problem, tiny_data, tiny_model

TIMES = times(3)
WORKERS: dict[str, Any] = {"dataloader-workers": {"num_workers": 2}}
TINY = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}
SKIP = {"skip-unreadable": {}}


class Rows(Dataset):
    """67 samples, of which some cannot be read."""

    def __init__(self, bad: tuple[int, ...] = (), size: int = 67) -> None:
        self.data, self.bad, self.size = tiny_data(), bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"row {index} is spoilt")
        return self.data[index]


class Kills(Plugin):
    """Ends a worker that reads data, by a signal, at some moment."""

    name = "kills"

    def __init__(self, moment: str, step: int, worker: int, signum: int) -> None:
        super().__init__()
        self.moment, self.step, self.worker, self.signum = moment, step, worker, signum

    def here(self, moment: str, run: Any) -> None:
        if moment == self.moment and run.state.step == self.step:
            os.kill(run.train_loader.loader.processes[self.worker].pid, self.signum)

    @hookimpl
    def before_step(self, run: Any) -> None:
        self.here("before a step", run)

    @hookimpl
    def after_backward(self, run: Any) -> None:
        self.here("in a step", run)
        if self.moment == "in a step":
            time.sleep(0.05)  # SIGCHLD comes in here, and is not this plugin's fault

    @hookimpl
    def before_evaluate(self, run: Any) -> None:
        self.here("in an evaluation", run)


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
# torch's handler may raise within a finaliser: found later
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_killed_worker_is_named_with_its_signal_and_what_to_do(tiny_run, record_property):
    """a worker killed at any moment: an error names the worker, its signal and what to do, and proposes to resume only
    a run with a checkpoint"""
    draw = random.Random(0)
    for number in range(TIMES):
        moment = ("before a step", "in a step", "in an evaluation")[number % 3]
        worker, signum = draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
        step = 9 if moment == "in an evaluation" else draw.randrange(1, 6)
        save_every = number % 2 or None
        expected = f"worker-killed worker {worker} 2 pid {signal.Signals(signum).name}."
        with expect_problem(expected, DataError) as caught:
            tiny_run([WORKERS, Kills(moment, step, worker, signum)], data=Rows(), epochs=9, save_every=save_every)
        has_checkpoint = bool(save_every and step > 1)
        assert ("`--resume`" in str(caught.value)) == has_checkpoint, (moment, step)
    record_property("faults", TIMES)


@pytest.mark.slow
def test_resume_after_killed_worker_is_bitwise(tiny_run, tmp_path):
    """a worker killed, then --resume: the bits of the undisturbed run"""
    whole = tiny_run([WORKERS], data=Rows(), save_every=4)
    with pytest.raises(DataError):
        tiny_run(
            [WORKERS, Kills("before a step", 13, 1, signal.SIGKILL)], data=Rows(), save_every=4, output=tmp_path / "run"
        )
    ran = tiny_run([WORKERS], data=Rows(), save_every=4, output=tmp_path / "run", resume=True)
    assert ran.losses == whole.losses[-len(ran.losses) :]
    assert all(torch.equal(ran.weights[name], whole.weights[name]) for name in whole.weights)


class Stuck(Rows):
    """Hangs inside of native code that holds the interpreter, where a process takes no signal but SIGKILL."""

    def __getitem__(self, index: int) -> Any:
        ctypes.PyDLL(None).sleep(600)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_its_run(tiny_run):
    """a worker that hangs in native code: an error after the timeout"""
    with expect_problem("worker-hangs 1", DataError):
        tiny_run([{"dataloader-workers": {"num_workers": 1, "timeout": 1.0}}], data=Stuck())
    for worker in multiprocessing.active_children():
        worker.join(60)
        assert not worker.is_alive()


@pytest.mark.parametrize("plugins", [[], [WORKERS]], ids=["alone", "workers"])
def test_raising_row_stops_run_with_its_error(tiny_run, plugins):
    """a corrupt row: the run stops with the dataset's error"""
    with expect_problem("reading-failed ValueError row 17 is spoilt", DataError):
        tiny_run(plugins, data=Rows((17,)))


class Refuses(Rows):
    """Raises an error of fastloop at a row."""

    def __init__(self, error: FastloopError) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise self.error
        return super().__getitem__(index)


class RefusesInStream(IterableDataset):
    """The same as a stream."""

    def __init__(self, error: FastloopError) -> None:
        super().__init__()
        self.rows = Refuses(error)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(67))


@pytest.mark.parametrize("plugins", [[], [WORKERS]], ids=["alone", "workers"])
@pytest.mark.parametrize("dataset", [Refuses, RefusesInStream])
@pytest.mark.parametrize(
    "error",
    [
        DataError("is damaged.", code="wrong-file", place="train.parquet, row 17", remedy="Copy it."),
        RecipeError("is unknown.", code="unknown-option", place="recipe.yaml: data.files"),
    ],
    ids=lambda error: error.problem.code,
)
def test_an_error_of_fastloop_keeps_its_class_and_fields(tiny_run, plugins, dataset, error):
    """an error with place and code, in a worker or not: the run stops with this error"""
    with pytest.raises(FastloopError) as raised:
        tiny_run(plugins, data=dataset(error))
    assert type(raised.value) is type(error)
    assert raised.value.problem == error.problem


# -- rows that are left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugins", [[], [WORKERS]], ids=["alone", "workers"])
def test_raising_rows_are_skipped_and_counted(tiny_run, plugins, caplog, record_property):
    """corrupt rows with skip-unreadable: they are left out and counted in the summary"""
    bad, seen = (3, 17, 40), []

    class Sees(Plugin):
        name = "sees"

        @hookimpl
        def before_step(self, batches: Any) -> None:
            seen.extend(index for batch in batches for index in batch.ids)

    ran = tiny_run([*plugins, SKIP, Sees()], data=Rows(bad))
    assert ran.summary["unreadable_samples"] == 3
    assert (ran.summary["steps"], ran.summary["samples"]) == (18, 2 * 64)
    assert sorted(seen) == sorted(2 * [index for index in range(67) if index not in bad])
    assert_problem(caplog, "sample-unreadable 17 ValueError")
    assert caplog.text.count("cannot be read and is left out") == 3, "once each, in two epochs"
    record_property("faults", 6)


def test_skipped_micro_batches_have_zero_weight(tiny_run):
    """a micro-batch or a step of corrupt rows: the others make the step"""
    order = torch.randperm(67, generator=torch.Generator().manual_seed(123)).tolist()
    one = tiny_run([SKIP], data=Rows(tuple(order[8:10])), micro_batch_size=2, epochs=1)
    assert one.summary["samples"] == 65
    step = tiny_run([SKIP], data=Rows(tuple(order[8:16])), epochs=1)
    assert (step.summary["samples"], step.summary["steps"]) == (59, 9)
    assert all(bool(tensor.isfinite().all()) for tensor in step.weights.values())


class Stream(IterableDataset):
    """Samples that can only be read in their order."""

    def __iter__(self) -> Iterator[Any]:
        data = tiny_data()
        return iter([data[index] for index in range(16)])


def test_a_stream_whose_samples_cannot_be_skipped_is_reported(tiny_run, caplog):
    """skip-unreadable with an iterable dataset: a warning says that it has no effect"""
    tiny_run([SKIP], data=Stream(), epochs=1)
    assert_problem(caplog, "no-effect skip-unreadable: Stream iterable")


def test_without_corrupt_rows_nothing_changes(tiny_run):
    """control: without corrupt rows, the same bits with skip-unreadable as without"""
    plain, skipping = tiny_run([], data=Rows()), tiny_run([SKIP], data=Rows())
    assert plain.losses == skipping.losses
    assert "unreadable_samples" not in skipping.summary


def test_skipping_resumes_at_its_position(tiny_run, tmp_path):
    """corrupt rows, and a stop within an epoch: position and count continue"""
    whole = tiny_run([SKIP], data=Rows((3, 17, 40)))
    tiny_run([SKIP], data=Rows((3, 17, 40)), max_steps=5, output=tmp_path / "run")
    ran = tiny_run([SKIP], data=Rows((3, 17, 40)), output=tmp_path / "run", resume=True)
    assert ran.losses == whole.losses[5:]
    assert ran.summary["unreadable_samples"] == whole.summary["unreadable_samples"]


def test_leaving_out_is_bounded(tiny_run):
    """too many corrupt rows for plugins.skip-unreadable.limit: the run ends with an error"""
    with expect_problem("sample-unreadable plugins.skip-unreadable.limit 5", DataError):
        tiny_run([{"skip-unreadable": {"limit": 5}}], data=Rows(tuple(range(0, 67, 3))))
    ran = tiny_run([{"skip-unreadable": {"limit": 3}}], data=Rows((3, 17, 40)), epochs=4)
    assert (ran.summary["status"], ran.summary["unreadable_samples"]) == ("completed", 3)
    with expect_problem("sample-unreadable plugins.skip-unreadable.limit 2", DataError):
        tiny_run([{"skip-unreadable": {"limit": 2}}], data=Rows((3, 17, 40)))
    with expect_problem("sample-unreadable 100 ValueError row", DataError):
        tiny_run([SKIP], data=Rows(tuple(range(67))))


def count_on_processes() -> tuple[int, list[int]]:
    settings: dict[str, Any] = {"batch_size": 8, "lr": 0.01, "device": "cpu", "plugins": ["ddp", SKIP]}
    trainer = Trainer(tiny_model(), Rows((3, 17, 40)), loss=cross_entropy, epochs=2, output="run", **settings)
    summary = trainer.fit()
    return summary["unreadable_samples"], trainer.run.state.unreadable_ids


def test_processes_count_each_unreadable_row_once(processes):
    """corrupt rows on two processes: all count the same ones, each once"""
    first, second = [process.result for process in processes(2, count_on_processes)]
    assert first == second
    assert first[0] == 3
    assert sorted(first[1]) == [3, 17, 40]


def test_a_rollback_counts_each_unreadable_row_once(tiny_run):
    """corrupt rows in steps that are repeated or left out after a rollback: each is counted once"""

    class Fails(Plugin):
        """Makes the inputs of the third step and of the first one of the second epoch NaN."""

        name = "fails"

        @hookimpl
        def before_step(self, run: Any, batches: list[Any]) -> None:
            if (run.state.epoch, run.state.epoch_samples) in ((0, 16), (1, 0)):
                batches[0].inputs[0].fill_(float("nan"))

    order = torch.randperm(67, generator=torch.Generator().manual_seed(123)).tolist()
    bad = (order[0], order[9], order[17], order[40])  # in the steps 1, 2, 3, which is left out, and 6
    plugins = [SKIP, {"nan-guard": {"action": "rollback"}}, Fails()]
    ran = tiny_run(plugins, data=Rows(bad), save_every=1)
    assert ran.summary["nan-guard"]["acted"] == 2
    assert ran.summary["unreadable_samples"] == 4
    assert sorted(ran.trainer.run.state.unreadable_ids) == sorted(bad)


# -- files -------------------------------------------------------------------------------------------------------------


def text_run(
    plugins: tuple[Any, ...] = (),
    max_length: int = 16,
    resume: Path | None = None,
    streaming: bool = False,
    **files: str,
) -> Run:
    data: dict[str, Any] = {"files": files, "text": "text", "label": "label", "max_length": max_length}
    if streaming:
        data |= {"streaming": True, "validation_fraction": 0}
    tree = {
        "model": {"config": TINY, "tokenizer": {"kind": "word"}},
        "data": data,
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
        "plugins": ["text-classification", {"progress": False}, *plugins],
        "output": "run",
    }
    recipe = make_recipe(tree, Path("recipe.yaml"))
    return build(resolve(recipe), resume=resume)


def good(count: int = 40) -> list[dict[str, Any]]:
    return [{"text": f"{('dull', 'fine')[i % 2]} film number {i}", "label": i % 2} for i in range(count)]


def jsonl(name: str, rows: list[Any]) -> None:
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


BROKEN: list[Any] = [
    '{"text": "cut o',
    {"text": 7, "label": 1},
    {"text": "no label", "label": None},
    {"label": 0, "text": ["a list"]},
]


@pytest.mark.parametrize("row", BROKEN, ids=["no JSON", "no text", "no label", "a list"])
def test_a_corrupt_row_of_a_file_is_named_before_training(row):
    """a corrupt row in a file: refused with file and row, or left out and counted"""
    jsonl("train.jsonl", [*good()[:4], row, *good()[4:]])
    with pytest.raises(RecipeError) as refused:
        text_run(train="train.jsonl")
    assert refused.value.problem.place in ("train.jsonl, row 5", "train.jsonl, line 5")
    summary = execute(text_run((SKIP,), train="train.jsonl"))
    assert summary["unreadable_samples"] == 1
    assert summary["samples"] == 36  # a tenth of 40 is held out


def test_corrupt_rows_of_a_csv_are_left_out_by_choice_too(tmp_path, caplog):
    """rows of a csv with a cell too many: refused, or left out and counted"""
    lines = [f'"{row["text"]}",{row["label"]}' for row in good()]
    Path("train.csv").write_text("\n".join(["text,label", *lines[:9], "a,b,c", *lines[9:], "d,e,f,g", ""]))
    with expect_problem("invalid-row train.csv line 11 3 2", RecipeError):
        text_run(train="train.csv")
    for _ in range(2):
        run = text_run((SKIP, {"token-cache": {"folder": str(tmp_path / "cache")}}), train="train.csv")
        assert run.state.unreadable == 2
    assert_problem(caplog, "rows-unreadable train.csv 2")


def test_a_truncated_parquet_is_refused_wherever_it_is_cut(record_property):
    """a parquet file cut at any byte: refused by name"""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(good()), "whole.parquet")
    assert len(text_run(train="whole.parquet").datasets["train"]) == 36
    content = Path("whole.parquet").read_bytes()
    for cut in random.Random(0).sample(range(len(content)), TIMES):
        Path("cut.parquet").write_bytes(content[:cut])
        with expect_problem("file-unreadable cut.parquet", RecipeError):
            text_run(train="cut.parquet")
    record_property("faults", TIMES)


@pytest.mark.slow
def test_parquet_file_whose_footer_is_malformed(record_property):
    """a flipped bit of a parquet footer: read, or refused by name"""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["fine film", "dull"] * 9, "score": [0.5, 1.0] * 9, "words": [["a", "b"], []] * 9})
    parquet.write_table(table, "whole.parquet", row_group_size=18, store_schema=False)
    content = Path("whole.parquet").read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    footer = range(8 * (len(content) - 8 - length), 8 * (len(content) - 8))
    faults = footer if TIMES > 3 else footer[:: max(1, len(footer) // 40)]
    malformed = 0
    for bit in faults:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        malformed += read_in_a_child(bytes(damaged))
    assert malformed > 0, "no bit mattered"
    record_property("faults", len(faults))


@pytest.mark.slow
def test_parquet_file_whose_pages_are_malformed(record_property):
    """a flipped bit of a parquet page: read, or refused by name"""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["fine film", "dull"] * 4, "words": [["a", "b"], []] * 4})
    parquet.write_table(table, "whole.parquet", store_schema=False, compression="none")
    content = Path("whole.parquet").read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    pages = range(32, 8 * (len(content) - 8 - length))
    faults = pages if TIMES > 3 else pages[:: max(1, len(pages) // 40)]
    malformed = 0
    for bit in faults:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        malformed += read_in_a_child(bytes(damaged))
    assert malformed > 0, "no bit mattered"
    record_property("faults", len(faults))


@pytest.mark.slow
def test_parquet_statistics_that_do_not_fit_their_column():
    """wrong size statistics of a parquet column: refused by name"""
    import pyarrow
    from pyarrow import parquet

    from fastloop_plugins.rows.parquet import check_footer

    parquet.write_table(pyarrow.table({"text": ["fine"] * 9, "label": [1, 2, 3] * 3}), "whole.parquet")
    content = Path("whole.parquet").read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    start = len(content) - 8 - length
    refused = set()
    for bit in range(8 * start, 8 * (len(content) - 8)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        Path("damaged.parquet").write_bytes(damaged)
        try:
            file = parquet.ParquetFile("damaged.parquet")
            with pyarrow.OSFile("damaged.parquet") as source:
                check_footer(source, len(content), file.metadata.schema)
        except OSError as error:
            refused |= {words for words in ("histogram of", "counts bytes of texts") if words in str(error)}
        except Exception:  # pyarrow's own refusals have many types
            continue
    assert refused == {"histogram of", "counts bytes of texts"}


def read_in_a_child(content: bytes) -> bool:
    """Whether a process that reads a Parquet file refuses it by name. A crash of the process fails the test."""
    import pyarrow

    from fastloop_plugins.rows.options import Read
    from fastloop_plugins.rows.parquet import BoundedParquet

    Path("damaged.parquet").write_bytes(content)
    if (child := os.fork()) == 0:
        code = 3
        try:
            signal.alarm(60)
            with BoundedParquet(pyarrow.OSFile("damaged.parquet"), "damaged.parquet", Read()) as file:
                list(file.batches(file.names))
            code = 0
        except (OSError, RecipeError, pyarrow.ArrowException, ValueError):
            code = 1
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status), f"signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) in (0, 1), f"exit code {os.WEXITSTATUS(status)}"
    return os.WEXITSTATUS(status) == 1


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.txt"])
def test_a_wrong_encoding_is_refused_with_the_line_and_what_to_do(name):
    """a file that is not UTF-8: refused with the remedy"""
    rows = [b'{"text": "fine", "label": 0}', '{"text": "café", "label": 1}'.encode("latin1")]
    if name.endswith("csv"):
        rows = [b"text,label", b"fine,0", "café,1".encode("latin1")]
    Path(name).write_bytes(b"\n".join(rows) + b"\n")
    with pytest.raises(RecipeError) as refused:
        text_run(train=name)
    message = str(refused.value)
    assert message.startswith(name)
    assert "UTF-8" in message or "UTF8" in message
    if not name.endswith("csv"):
        assert "line 2: not UTF-8" in message
        assert "iconv" in message


def test_a_parquet_whose_text_is_not_utf8_is_refused():
    """a parquet file whose text is not UTF-8: refused with its column"""
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"text": ["fine", "no cafe"], "label": [0, 1]}),
        "train.parquet",
        compression="none",
        use_dictionary=False,
    )
    Path("train.parquet").write_bytes(Path("train.parquet").read_bytes().replace(b"no cafe", b"no caf\xe9"))
    with expect_problem("wrong-encoding train.parquet 'text' data.text 8 again", RecipeError):
        text_run(train="train.parquet")


@pytest.mark.slow
def test_a_huge_text_is_cut_before_it_is_tokenised():
    """a text of 4 million characters: its tokens come from its first words alone, or from its last ones"""
    from fastloop_plugins.text.encoding import encode

    long = " ".join(f"word{i % 977}" for i in range(500_000))
    jsonl("train.jsonl", [*good(), {"text": long, "label": 0}])
    run = text_run(train="train.jsonl")
    tokenizer = run.plugins.plugins[0].text_model.tokenizer
    of_the_end = copy.deepcopy(tokenizer)
    of_the_end.truncation_side = "left"
    read: list[int] = []

    def counted(texts: Any, **arguments: Any) -> Any:
        read.append(max(map(len, [texts] if isinstance(texts, str) else texts)))
        return tokenizer(texts, **arguments)

    texts = [long, "a b", long[:900], "x" * 5000, " " * 5000]
    found = list(encode(counted, texts, {"truncation": True, "max_length": 16}))
    assert found == tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    found = list(encode(of_the_end, texts, {"truncation": True, "max_length": 16}))
    assert found == of_the_end(texts, truncation=True, max_length=16)["input_ids"]
    assert 5000 in read
    assert max(read) < 6000
    assert execute(run)["status"] == "completed"


def test_empty_text_is_trained_and_logged(caplog):
    """a text that is empty, or only spaces: said, and no failure"""
    jsonl("train.jsonl", [*good(), {"text": "", "label": 0}, {"text": "  ", "label": 1}])
    assert execute(text_run(train="train.jsonl"))["status"] == "completed"
    assert_problem(caplog, "empty-texts 2 42")


# -- data that changed -------------------------------------------------------------------------------------------------


def test_dataset_of_another_size_is_rejected_or_logged_at_resume(tiny_run, tmp_path, caplog):
    """rows added since the checkpoint: --resume shows the change, and continues if the recipe permits it"""
    folder = tmp_path / "run"
    tiny_run([], data=Rows(), max_steps=5, output=folder)
    with expect_problem("data-changed 67 60 train.on_data_change=warn", CheckpointError):
        tiny_run([], data=Rows(size=60), output=folder, resume=True)
    ran = tiny_run([], data=Rows(size=60), output=folder, resume=True, on_data_change="warn")
    assert ran.summary["status"] == "completed"
    assert_problem(caplog, "data-changed")


def test_dataset_fingerprint_method_is_used(tiny_run, tmp_path):
    """rows changed since the checkpoint: a dataset's own fingerprint() shows it"""

    class Versioned(Rows):
        def __init__(self, version: str) -> None:
            super().__init__()
            self.version = version

        def fingerprint(self) -> str:
            return self.version

    tiny_run([], data=Versioned("a"), max_steps=5, output=tmp_path / "run")
    with expect_problem("data-changed run/checkpoints/step-00000005: train: 67 a, b", CheckpointError):
        tiny_run([], data=Versioned("b"), output=tmp_path / "run", resume=True)
    assert tiny_run([], data=Versioned("a"), output=tmp_path / "run", resume=True).summary["status"] == "completed"


@pytest.mark.parametrize("change", [{"text": "dull movie number 8"}, {"label": 1}], ids=["one word", "one label"])
def test_file_with_one_changed_word_is_detected(change):
    """one changed word or label of a file: refused at --resume"""
    rows = good()
    jsonl("train.jsonl", rows)
    run = text_run(train="train.jsonl")
    summary = execute(run)
    assert summary["status"] == "completed"
    checkpoint = next(Path("run/checkpoints").glob("step-*"))
    jsonl("train.jsonl", [*rows[:8], rows[8] | change, *rows[9:]])
    with expect_problem("data-changed", CheckpointError):
        text_run(train="train.jsonl", resume=checkpoint)


@pytest.mark.parametrize("change", ["labels", "rows", "one word"])
def test_streamed_parquet_file_whose_sizes_stay_is_detected(change):
    """labels, rows or a word of a streamed parquet file that change, and no size does: refused at --resume"""
    import pyarrow
    from pyarrow import parquet

    rows = good()
    parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    assert execute(text_run(train="train.parquet", streaming=True))["status"] == "completed"
    checkpoint = next(Path("run/checkpoints").glob("step-*"))
    text_run(train="train.parquet", streaming=True, resume=checkpoint)  # the same rows: resumed
    if change == "labels":
        rows[8]["label"] = 1
        rows[9]["label"] = 0
    elif change == "rows":
        rows[8:10] = rows[9:7:-1]
    else:
        rows[8]["text"] = rows[8]["text"].replace("dull", "fine")
    parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    with expect_problem("data-changed", CheckpointError):
        text_run(train="train.parquet", streaming=True, resume=checkpoint)

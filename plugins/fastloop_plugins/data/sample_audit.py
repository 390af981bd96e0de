"""Records the ids of the samples that a run trains on, and checks that each occurs exactly once in an epoch.

    plugins:
      - sample-audit: {on_violation: error}

``sample-audit/rank-R.jsonl`` in the run folder has a line for each optimizer step of process R: ``step`` and ``epoch``
(both from 0), and for each micro-batch its data-loader ``worker`` (-1: the process itself) and sample ``ids``. The main
process checks them at an epoch's end, so machines must share the folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from operator import length_hint
from typing import IO, TYPE_CHECKING, Any, Literal

from fastloop import FastloopError, Plugin, PluginError, Problem, hookimpl, option
from fastloop.problem import typed_clause
from fastloop.runtime.files import check_links, no_follow
from fastloop_plugins.data._audit_files import AuditFiles, check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fastloop import Batch, Run

logger = logging.getLogger("fastloop")


class AuditError(FastloopError):
    """Samples of an epoch are missing, or occurred more than once."""


class SampleAudit(Plugin):
    """Records sample ids, and checks that each occurs once an epoch. The records name process and worker."""

    name = "sample-audit"
    numerics = "bitwise"

    on_violation: Literal["error", "warn"] = option("What to do if samples are missing or repeated.", default="error")

    files: AuditFiles  # from before_fit on
    has_ids: bool  # whether the ids of samples mean the same on all processes; from before_fit on

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.file: IO[str] | None = None
        self.loaded = False
        self.drawn = 0  # samples drawn in the epoch, over all processes
        self.unrecorded = -1  # epoch whose beginning is not recorded
        # over all checked epochs, on the main process
        self.totals = {"epochs": 0, "missing": 0, "repeated": 0, "unknown": 0}
        self.readers: Counter[tuple[int, int]] = Counter()  # (rank, worker) -> samples

    @hookimpl
    def load_state(self, run: Run, state: dict[str, Any]) -> None:
        from fastloop.checkpoint.state_form import check_form

        check_form(state, {"unrecorded": 0, "totals": self.totals, "readers": [(0, 0, 0)]})
        self.loaded = True
        self.unrecorded = state["unrecorded"]
        self.totals = dict(state["totals"])
        self.readers = Counter({(rank, worker): samples for rank, worker, samples in state["readers"]})

    @hookimpl
    def check_run(self, run: Run) -> None:
        sampler = run.train_loader.sampler
        dataset = run.datasets["train"]
        if sampler is not None and sampler.fingerprint() and len(set(sampler.order())) < len(dataset):
            raise PluginError(
                "the training order leaves samples out or repeats some (drop_last or a sampler), and sample-audit "
                "checks that every sample occurs once an epoch.",
                code="samples-left-out",
                place=f"{run.recipe.where}: plugins.sample-audit",
                remedy="Remove it, or give a loader that takes each sample once.",
            )

    @hookimpl
    def before_fit(self, run: Run) -> None:
        files = AuditFiles(run.folder / "sample-audit")
        self.files = files
        dataset = run.datasets["train"]
        self.has_ids = run.train_loader.stream is None or not getattr(dataset, "shards_itself", False)
        if run.is_main:
            self._open(run, files)
            if not self.has_ids:
                self.log.warning(
                    Problem(
                        f"{type(dataset).__name__} shards itself: its samples have no ids to check, and are only "
                        "counted.",
                        code="samples-without-ids",
                    )
                )
        run.processes.barrier()  # the folder is there
        if run.rank in files.ranks():
            files.cut(run.rank, run.state.step)
        self.file = open(files.path(run.rank), "a", opener=no_follow)  # noqa: SIM115 # teardown closes it

    def _open(self, run: Run, files: AuditFiles) -> None:
        """Create the folder. For a resumed run, include the records from before."""
        if run.resume_point is not None:
            source = run.resume_point.checkpoint.resolve().parent.parent / "sample-audit"
            if source.is_dir() and source != files.folder.resolve():  # the run resumes in another folder
                check_links(source.parent)
                shutil.copytree(source, files.folder, dirs_exist_ok=True)
        files.folder.mkdir(exist_ok=True)
        for rank in files.ranks():
            if rank >= run.world_size:  # the run had more processes before; keep their records
                files.cut(rank, run.state.step)
        if run.state.epoch_samples and not (self.loaded and files.ranks()):
            epoch = run.state.epoch
            self.unrecorded = epoch
            self.log.warning(
                Problem(
                    f"the beginning of epoch {epoch} is not recorded: it is only checked for repeated samples.",
                    code="epoch-not-recorded",
                )
            )

    @hookimpl
    def before_epoch(self, run: Run) -> None:
        self.drawn = run.state.epoch_samples

    @hookimpl
    def before_step(self, run: Run, batches: list[Batch]) -> None:
        assert self.file is not None
        rows = [
            {"worker": batch.worker} | ({"ids": batch.ids} if self.has_ids else {"samples": batch.drawn})
            for batch in batches
            if batch.samples  # batches without samples only keep processes in step
        ]
        line = {"step": run.state.step, "epoch": run.state.epoch, "batches": rows}
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.file.flush()  # a killed process loses no line

    @hookimpl
    def after_step(self, run: Run) -> None:
        self.drawn = run.state.epoch_samples

    @hookimpl
    def after_epoch(self, run: Run) -> None:
        self._verify(run, run.state.epoch - 1, self.drawn, done=True)

    @hookimpl
    def after_fit(self, run: Run) -> None:
        if run.state.epoch_samples:
            self._verify(run, run.state.epoch, run.state.epoch_samples, done=False)

    @hookimpl
    def save_state(self, run: Run) -> dict[str, Any]:
        if self.file is not None:
            os.fsync(self.file.fileno())  # no checkpoint is ahead of the audit, even after a power failure
        return {
            "totals": self.totals,
            "readers": [[*key, count] for key, count in self.readers.items()],
            "unrecorded": self.unrecorded,
        }

    @hookimpl
    def write_summary(self, run: Run, summary: dict[str, Any]) -> None:
        ranks = range(1 + max((rank for rank, _ in self.readers), default=-1))
        workers = [
            {str(worker): samples for (of, worker), samples in sorted(self.readers.items()) if of == rank}
            for rank in ranks
        ]
        by_rank = [sum(samples.values()) for samples in workers]
        summary["sample-audit"] = {"samples": sum(by_rank), **self.totals, "by_rank": by_rank, "by_worker": workers}

    @hookimpl
    def teardown(self) -> None:
        if self.file is not None:
            self.file.close()

    def _verify(self, run: Run, epoch: int, drawn: int, done: bool) -> None:
        """Check an epoch on the main process, and act on the result on every process.

        Raises:
            AuditError: Samples are missing or occurred more than once; raised on every process.
        """
        run.processes.barrier()  # all processes have written
        wrong = ""
        if run.is_main:
            try:
                wrong = self._check(run, epoch, drawn, done)
            except (OSError, ValueError, KeyError, TypeError) as error:
                wrong = f"{self.files.folder} cannot be read: {typed_clause(error)}"
        wrong = run.processes.all_gather_object(wrong)[0]
        if not wrong:
            return
        expected = f"Every sample must occur once an epoch. The records are in {self.files.folder}."
        message = f"plugin 'sample-audit': epoch {epoch}: {wrong}. {expected}"
        if self.on_violation == "error":
            raise AuditError(message, code="samples-differ")
        if run.is_main:
            logger.warning(Problem(f"{message}.", code="samples-differ"))

    def _check(self, run: Run, epoch: int, drawn: int, done: bool) -> str:
        """Describe the problems of an epoch of which ``drawn`` samples were drawn; empty if there are none."""
        stream = run.train_loader.samples_per_epoch is None  # ids are positions
        size = length_hint(run.datasets["train"], drawn) if done or not stream else drawn

        def ids() -> Iterator[list[int]]:
            for rank, _, batch in self.files.batches(epoch):
                self.readers[rank, batch["worker"]] += len(batch["ids"]) if self.has_ids else batch["samples"]
                yield batch.get("ids", [])

        absent = set(range(run.world_size)) - set(self.files.ranks())
        if absent:
            return f"{self.files.path(min(absent)).name} is not there (machines must share the run folder)"
        recorded = self.has_ids and epoch != self.unrecorded
        report = check(ids(), size, recorded and (done or stream), getattr(run.datasets["train"], "repeats", False))
        counts = {
            "epochs": done,
            "missing": len(report.missing) + report.lost,
            "repeated": len(report.repeated),
            "unknown": report.unknown,
        }
        self.totals = {name: total + counts[name] for name, total in self.totals.items()}
        wrong = report.text(self.files, epoch)
        if done:
            self.files.epoch_ended()
        return wrong

"""Trains the cases of the round-trip test, exports them, and loads every export in one fresh process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import reload_exports
import torch
import yaml
from reload_exports import Job, Result
from round_trip_cases import KINDS, Case, Form, Refusal
from round_trip_data import MAX_LENGTH, Bases, read_rows, write_data
from safetensors.torch import load_file
from training_runs import execute

from fastloop import Plugin, UsageError, hookimpl
from fastloop.cli import main
from fastloop.errors import FastloopError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.run import Run

NEW_TOKENS = 10
"""``max_new_tokens``: more than an answer has."""
PROMPTS = 3
"""Rows of the test split whose prompts are continued."""


class Watch(Plugin):
    """Keeps the predictions of the last evaluation, and the weights that the checkpoint lacks.

    Args:
        checkpoint: The folder of the checkpoint; None: from scratch.

    Attributes:
        outputs: The logits of each row of the test split; of each word, for tags.
        fresh: Name -> initial value of the weights that no tensor of the checkpoint equals.
        trained: Their names -> whether training has changed the weight itself.
        classes: The names of the classes in the order of the logits.
    """

    name = "watch"

    def __init__(self, checkpoint: Path | None) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.outputs: list[list[float]] = []
        self.fresh: dict[str, torch.Tensor] = {}
        self.trained: dict[str, bool] = {}
        self.classes: list[str] = []
        self._evaluating = False

    @hookimpl(wrapper=True)
    def build_model(self) -> Generator[None, Any, Any]:
        model = yield
        config = getattr(model, "config", None)
        names = getattr(config, "id2label", None) or {}
        self.classes = [str(names[index]) for index in range(len(names))]
        if self.checkpoint is not None:
            saved = [
                tensor.float() for tensor in load_file(self.checkpoint / "model.safetensors").values() if tensor.dim()
            ]
            for name, weight in model.named_parameters():
                values = weight.detach()
                known = (torch.equal(values[: len(tensor)], tensor) for tensor in saved)
                if not any(known):
                    self.fresh[name] = values.clone()
        return model

    @hookimpl
    def after_fit(self, run: Run) -> None:
        for name, weight in run.unwrap_model().named_parameters():
            if ".original_module." in name:
                continue  # the copy that peft keeps beside the trained module
            for part in ("base_model.model.", ".modules_to_save.default", ".base_layer"):
                name = name.replace(part, "")
            if name in self.fresh:
                self.trained[name] = not torch.equal(weight, self.fresh[name])

    @hookimpl
    def before_evaluate(self, split: str) -> None:
        self._evaluating = True
        self.outputs = []

    @hookimpl
    def after_evaluate(self, split: str) -> None:
        self._evaluating = False

    @hookimpl(wrapper=True)
    def compute_loss(self) -> Generator[None, Any, Any]:
        output = yield
        if self._evaluating and output.predictions is not None:
            predictions = output.predictions
            targets = output.targets
            if predictions.dim() == 2 and targets.dim() == 1:
                predictions = predictions[targets != reload_exports.IGNORED]  # ends of sentences
            self.outputs += (predictions if predictions.dim() == 2 else predictions[:, None]).float().tolist()
        return output


@dataclass(kw_only=True)
class Trained:
    """A run, as it was before its process ended.

    Attributes:
        loss: That of the test split, evaluated with the weights that are exported.
        outputs: See ``Watch``.
        predicted: The lines that ``fastloop predict`` writes.
        fresh: Weights that the checkpoint lacked -> whether they were trained.
        messages: All that was logged.
        folders: Form -> folder.
        errors: Form, or ``predict``, -> why the command failed.
    """

    loss: float = 0.0
    outputs: list[list[float]] = field(default_factory=list)
    predicted: list[dict[str, Any]] = field(default_factory=list)
    fresh: dict[str, bool] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)


class Messages(logging.Handler):
    """Keeps the messages of fastloop."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def kept_messages() -> Iterator[list[str]]:
    """The messages that fastloop logs in this context."""
    logger = logging.getLogger("fastloop")
    handler = Messages()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def command(*arguments: str) -> str:
    """Run a command of fastloop in this process. Returns the error message; empty: it succeeded."""
    given = sys.argv
    sys.argv = ["fastloop", *arguments]
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as printed:
            main()
    except SystemExit as end:
        return f"exit code {end.code}: {printed.getvalue().strip()[-500:]}" if end.code else ""
    finally:
        sys.argv = given
    return ""


class RoundTrip:
    """A folder in which cases are trained and loaded again.

    Attributes:
        trained: Name of a case -> its run.
        results: Name of a case and form -> what the fresh process found.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bases = Bases(folder)
        self.trained: dict[str, Trained] = {}
        self.jobs: dict[tuple[str, str], Job] = {}
        self.results: dict[tuple[str, str], Result] = {}
        write_data(folder)
        asked = [{**row, "document": row["prompt"]} for row in read_rows(folder, "test")[:PROMPTS]]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")

    def run(self, cases: Sequence[Case]) -> None:
        """Train cases, and load all their exports in one process."""
        for case in cases:
            self.trained[case.name] = self._train(case)
        self._reload()

    def refused(self, refusal: Refusal) -> str:
        """The message with which a combination is refused."""
        if refusal.form != "model":
            trained = Trained()
            self._export(refusal.case, refusal.form, self._run_folder(refusal.case), trained)
            return trained.errors[refusal.form]
        with pytest.raises(UsageError) as caught:
            self._build(refusal.case, Watch(None))
        return str(caught.value)

    def _run_folder(self, case: Case) -> Path:
        return self.folder / "runs" / case.name

    def _build(self, case: Case, watch: Watch) -> Run:
        path = self.folder / f"{case.name}.yaml"
        recipe = case.recipe(self.bases, str(self._run_folder(case)))
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        loaded = load_recipe(str(path))
        loaded.plugins |= {"progress": False}
        return build(resolve(loaded, objects=[watch]))

    def _train(self, case: Case) -> Trained:
        run_folder = self._run_folder(case)
        base = case.pretrained()
        watch = Watch(None if base is None else self.bases.find(base))
        with kept_messages() as messages:
            try:
                summary = execute(self._build(case, watch))
            except FastloopError as error:
                return Trained(errors=dict.fromkeys(("model", "predict", "weights", *case.forms), str(error)))
        trained = Trained(loss=summary["test"]["loss"], outputs=watch.outputs, messages=messages)
        trained.classes = watch.classes
        trained.folders["model"] = run_folder / "model"
        for form in case.forms:
            self._export(case, form, run_folder, trained)
        self._predict(case, run_folder, trained)
        trained.fresh = dict.fromkeys(watch.fresh, False) | watch.trained
        for form, folder in trained.folders.items():
            self.jobs[case.name, form] = self._job(case, form, folder, trained)
        return trained

    def _export(self, case: Case, form: Form, run_folder: Path, trained: Trained) -> None:
        folder = self.folder / "exports" / case.name / form
        arguments = [str(run_folder), "--to", form, "--out", str(folder)]
        if form == "adapter" and case.method == "merged":
            arguments += ["--checkpoint", "last"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        error = command("export", *arguments)
        if error:
            trained.errors[form] = error
        else:
            trained.folders[form] = folder

    def _predict(self, case: Case, run_folder: Path, trained: Trained) -> None:
        out = run_folder / "predictions.jsonl"
        kind = KINDS[case.kind]
        source = [str(self.folder / "prompts.jsonl")] if kind.generates else ["--split", "test"]
        more = [f"plugins.{kind.task}.max_new_tokens={NEW_TOKENS}"] if kind.generates else []
        error = command("predict", str(run_folder), *source, *more, "--out", str(out), "--without", "auto")
        if error:
            trained.errors["predict"] = error
        else:
            trained.predicted = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]

    def _job(self, case: Case, form: str, folder: Path, trained: Trained) -> Job:
        kind = KINDS[case.kind]
        library = "transformers" if kind.head else "torch"
        options: dict[str, Any] = {}
        classes: list[str] = []
        if form == "adapter" or (form == "model" and case.method == "unmerged"):
            library = "peft"
            if trained.classes:
                classes = trained.classes
                options = {"num_labels": len(classes), "ignore_mismatched_sizes": True}
        elif form == "onnx":
            library = "onnxruntime"
        return Job(
            kind=case.kind,
            library=library,
            folder=str(folder),
            auto=f"AutoModel{kind.head}",
            data=str(self.folder),
            max_length=MAX_LENGTH,
            options=options,
            classes=classes,
            max_new_tokens=NEW_TOKENS if kind.generates else 0,
        )

    def _reload(self) -> None:
        jobs = self.folder / "jobs.json"
        results = self.folder / "results.json"
        jobs.write_text(json.dumps([asdict(job) for job in self.jobs.values()]), encoding="utf-8")
        arguments = [sys.executable, "-W", "ignore", reload_exports.__file__, str(jobs), str(results)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(results.read_text(encoding="utf-8"))
        self.results = {key: Result(**result) for key, result in zip(self.jobs, found, strict=True)}


def differences(case: Case, trained: Trained, result: Result) -> list[str]:
    """In what an export differs from the run."""
    if result.error:
        return [f"cannot be loaded: {result.error}"]
    found = []
    if abs(result.loss - trained.loss) > 1e-5 * max(1.0, abs(trained.loss)):
        found.append(f"loss {result.loss:.6f}, the run's is {trained.loss:.6f}")
    if trained.outputs and not KINDS[case.kind].generates:
        ours = torch.tensor(trained.outputs)
        theirs = torch.tensor(result.outputs)
        if ours.shape != theirs.shape:
            found.append(f"outputs of shape {tuple(theirs.shape)}, the run's are {tuple(ours.shape)}")
        elif not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
            found.append(f"outputs differ by {float((ours - theirs).abs().max()):.2g}")
    if result.dtype not in ("", "torch.float32"):
        found.append(f"the weights have {result.dtype}, and the run's float32")
    predicted = [row.get("text", "") for row in trained.predicted]
    if result.texts and trained.predicted and result.texts != predicted:
        found.append(f"generates {result.texts}, and predict {predicted}")
    for text, count in zip(predicted, result.new_tokens, strict=False):
        if result.texts and count > len(text.split()) + 1:
            found.append(f"generates {count} tokens where predict writes {text!r}")
    return found

"""The checks of benchmarks/architectures.py: tiny runs of an architecture, compared with PyTorch or each other."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import _plain_loops as plain
import torch
import transformers
from _tiny_models import make_model, padding_side
from torch import Tensor

from fastloop import FastloopError, Plugin, UsageError, hookimpl
from fastloop.cli.numerics import BOUNDS, largest_difference
from fastloop.lifecycle import open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, make_recipe
from fastloop.testing.runs import Trained, train
from fastloop_plugins.text.tokenizers import check_saved_tokenizer
from fastloop_tools.inference.chunks import Chunks
from fastloop_tools.inference.predictions import predict_dataset

OK = "ok"
"""Equal within the bound."""
REFUSED = "refused"
"""Refused by a message of fastloop."""
WARNED = "warned"
"""Differs, with a warning."""
WRONG = "WRONG"
"""Differs without a warning."""
ERROR = "ERROR"
"""Another exception."""
LOSS = 1e-4
"""Largest relative difference of a step's loss. Rounding gives up to a tenth of it in three steps, since the weights
are large; a wrong mask or weight gives ten times it."""
UPDATE = 1e-2
"""Largest difference of the weights, as a share of their change in training. Rounding and faults: as for ``LOSS``."""
BF16 = 0.03
"""Largest relative difference of the last loss in bf16."""
ROUNDING = 1e-6
"""Relative change of weights that stands for rounding, eight times the precision of float32: sums over many numbers
lose a few bits."""
TIMES = 4
"""A difference counts as noise up to this many times the measured one, the largest of three draws."""
NEW = 6
"""Tokens that a language model generates."""
IDLE = ("log", "progress", "speed-check", "metric-check")
TEXTS = ("text-classification", "token-classification")
PLUGINS: dict[str, tuple[str, ...]] = {
    "packing": (*TEXTS, "causal-lm"),
    "fast-dropout": (*TEXTS, "causal-lm", "seq2seq", "image-classification"),
    "attention": (*TEXTS, "causal-lm", "seq2seq", "image-classification"),
    "eager": (*TEXTS, "causal-lm", "seq2seq", "image-classification"),
    "cls-last-layer": ("text-classification",),
    "channels-last": ("image-classification",),
    "fused-optimizer": (*TEXTS, "causal-lm", "seq2seq", "image-classification"),
    "activation-checkpointing": (*TEXTS, "causal-lm", "seq2seq", "image-classification"),
}
"""Speed plugin -> the tasks that it can act on. Each trains alone."""
AMP = {"amp": {"dtype": "bf16"}}
OPTIONS: dict[str, dict[str, Any]] = {"eager": {"attention": {"implementation": "eager"}}}
"""Column -> plugins and their options, if it is not one plugin without options."""

Cell = tuple[str, str]


class StopAfter(Plugin):
    """Requests a stop after two steps, as Ctrl-C does."""

    name = "stop-after"

    @hookimpl
    def after_step(self, run: Any) -> None:
        if run.state.step == 2:
            run.signals.record("SIGINT")


class Pair:
    """An architecture and a task, in a folder of its own.

    Attributes:
        folder: Holds the data, the model and the runs.
        messages: Warnings of the newest run.
    """

    def __init__(self, task: str, kind: str, folder: Path) -> None:
        self.name = task
        self.kind = kind
        self.folder = folder
        self.task = plain.TASKS[task]
        self.images = task == "image-classification"
        self.model = folder / "model"
        self.messages = list[str]()
        tokenizer = None if self.images else plain.make_tokenizer(padding_side(kind))
        make_model(kind, self.task.auto, tokenizer, self.model)
        if tokenizer is not None:
            check_saved_tokenizer(
                tokenizer, transformers.AutoConfig.from_pretrained(self.model), list(plain.WORDS), "model"
            )

    def recipe(
        self, output: str, plugins: Mapping[str, Any], settings: Mapping[str, Any], model: Path | None = None
    ) -> dict[str, Any]:
        """The recipe of a run, with the default guards and without the default observers."""
        data = dict(self.task.data)
        if self.images:
            data["images"] = str(self.folder / "images")
        else:
            data["files"] = {split: str(self.folder / f"{split}.jsonl") for split in ("train", "validation")}
        train = {
            "epochs": plain.EPOCHS,
            "batch_size": plain.BATCH,
            "seed": plain.SEED,
            "lr": plain.LR,
            "optimizer": {"name": "SGD", "momentum": plain.MOMENTUM},
            "max_grad_norm": plain.NORM,
            "device": "cpu",
            "save_every": None,
            "log_every": 1,
        }
        return {
            "model": {"name": str(model or self.model)},
            "data": data,
            "train": train | dict(settings),
            "plugins": {self.name: {}} | dict.fromkeys(IDLE, False) | dict(plugins),
            "output": str(self.folder / output),
        }

    def train(
        self,
        plugins: Mapping[str, Any] = MappingProxyType({}),
        *objects: Plugin,
        output: str = "run",
        resume: bool = False,
        model: Path | None = None,
        **settings: Any,
    ) -> Trained:
        """Train in this process. Its warnings are in ``messages``."""
        folder = self.folder / output
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        with self.recorded():
            return train(self.recipe(output, plugins, settings, model), *objects, resume=folder if resume else None)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the warnings of fastloop inside the block."""

        def keep(record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage())

        handler = logging.Handler(logging.WARNING)
        logger = logging.getLogger("fastloop")
        self.messages = []
        handler.emit = keep  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    @cached_property
    def before(self) -> dict[str, Tensor]:
        """The weights before training, without buffers: a norm's statistics depend on the order of samples."""
        model = plain.load(self.model, self.task)[0]
        return {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @cached_property
    def rows(self) -> list[plain.Row]:
        """The samples of the training split."""
        return plain.read_rows(self.folder, "train", self.images)

    @cached_property
    def plain(self) -> Trained:
        """The run without plugins. It stays in the folder ``plain``."""
        return self.train(output="plain")

    @cached_property
    def noise(self) -> tuple[float, float]:
        """Largest differences of losses and weights between plain loops with other random numbers, and with weights
        changed by rounding."""
        losses, weights = plain.train(self.model, self.task, self.rows, seed=1)
        of_losses = []
        of_weights = []
        for seed in (2, 3, 4):
            other_losses, other_weights = plain.train(self.model, self.task, self.rows, seed=seed, nudge=ROUNDING)
            of_losses.append(largest_difference(other_losses, losses))
            of_weights.append(self.update(other_weights, weights))
        return max(of_losses), max(of_weights)

    def update(self, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
        """The norm of the difference of two models' weights, as a share of the norm of the change in training."""
        names = [name for name, tensor in self.before.items() if tensor.is_floating_point()]
        apart = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in names)
        moved = sum(float((theirs[name].double() - self.before[name].double()).square().sum()) for name in names)
        return float((apart / max(moved, 1e-30)) ** 0.5)

    def same(self, ours: Trained, losses: Sequence[float], weights: Mapping[str, Tensor]) -> Cell:
        """Compare a run with the losses and weights of another one, within rounding, or within the noise."""
        loss = largest_difference(ours.losses, losses)
        update = self.update(ours.weights, weights)
        difference = f"loss {loss:.1e}, update {update:.1e}"
        if loss <= LOSS and update <= UPDATE:
            return OK, difference
        of_loss, of_update = self.noise
        is_noise = loss <= max(LOSS, TIMES * of_loss) and update <= max(UPDATE, TIMES * of_update)
        return self.verdict(is_noise, difference)

    def near(self, ours: Trained, losses: Sequence[float]) -> Cell:
        """Compare the losses of a run of reduced precision with those of another one."""
        loss = largest_difference(ours.losses, losses)
        return self.verdict(loss <= max(BOUNDS["reduced-precision"], TIMES * self.noise[0]), f"loss {loss:.1e}")

    def verdict(self, equal: bool, difference: str) -> Cell:
        """A cell for a comparison. A difference that a warning of the newest run announces is no silent one."""
        if equal:
            return OK, difference
        for message in self.messages:
            if re.search(r"padd|micro-batch|batch norm|recompute", message):
                return WARNED, f"{difference}: {message}"
        return WRONG, difference

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_loop(self) -> Cell:
        """The run without plugins, against the loop in plain PyTorch."""
        return self.same(self.plain, *plain.train(self.model, self.task, self.rows))

    def check_micro(self) -> Cell:
        """Micro-batches of one sample, against whole batches."""
        whole = self.plain
        return self.same(self.train(micro_batch_size=1), whole.losses, whole.weights)

    def check_bucketing(self) -> Cell:
        """Micro-batches of similar length, against the same batches in micro-batches of chance: one batch an epoch."""
        batches: dict[str, Any] = {"batch_size": plain.ROWS, "epochs": 3}
        whole = self.train(**batches)
        bucketed = self.train({"length-bucketing": {}}, micro_batch_size=4, **batches)
        return self.same(bucketed, whole.losses, whole.weights)

    def check_plugin(self, column: str) -> Cell:
        """A speed plugin alone, against the run without plugins."""
        whole = self.plain
        return self.same(self.train(OPTIONS.get(column, {column: {}})), whole.losses, whole.weights)

    def check_amp(self) -> Cell:
        """``amp`` in bf16, against the loop in plain PyTorch under autocast."""
        ours = self.train(AMP)
        return self.near(ours, plain.train(self.model, self.task, self.rows, bf16=True)[0])

    def check_kernel(self) -> Cell:
        """``cpu-attention`` with ``amp``, against ``amp`` alone."""
        whole = self.train(AMP)
        return self.near(self.train(AMP | {"cpu-attention": {}}), whole.losses)

    def check_auto(self) -> Cell:
        """``auto``: it trains, and its last validation loss is near that of the run without plugins, or of one with
        ``amp`` alone."""
        last = [self.plain.metrics[-1][1]["loss"]]
        ours = self.train_auto().metrics[-1][1]["loss"]
        if abs(ours - last[0]) > BF16 * last[0]:
            last.append(self.train(AMP).metrics[-1][1]["loss"])
        difference = min(abs(ours - loss) / loss for loss in last)
        return self.verdict(difference <= max(BF16, TIMES * self.noise[0]), f"last loss {difference:.1e}")

    def train_auto(self, **settings: Any) -> Trained:
        """Train with ``auto``, which must not refuse a recipe that trains without it."""
        try:
            return self.train({"auto": {}}, **settings)
        except UsageError as error:
            self.train(**settings)
            raise RuntimeError(str(error)) from error

    def check_dropout(self) -> Cell:
        """``auto`` with dropout: it trains, and evaluates like plain PyTorch."""
        dropped = self.folder / "dropped"
        shutil.copytree(self.model, dropped, dirs_exist_ok=True)
        text = (dropped / "config.json").read_text()
        (dropped / "config.json").write_text(re.sub(r'("\w*drop\w*": )0\.0\b', r"\g<1>0.1", text))
        loss = self.train_auto(model=dropped).metrics[-1][1]["loss"]
        rows = plain.read_rows(self.folder, "validation", self.images)
        bf16 = "amp:" in (self.folder / "run" / "recipe.yaml").read_text()
        theirs = plain.evaluate(self.folder / "run" / "model", self.task, rows, bf16)
        difference = abs(loss - theirs) / theirs
        return self.verdict(difference <= BF16, f"evaluation {difference:.1e}")

    def check_resume(self) -> Cell:
        """A run that is stopped after two steps and resumed, against the one that is not."""
        whole = self.plain
        self.train({}, StopAfter(), output="resumed")
        ours = self.train(output="resumed", resume=True)
        update = self.update(ours.weights, whole.weights)
        return self.verdict(update == 0, f"update {update:.1e}")

    def check_predict(self) -> Cell:
        """Batched predictions of a trained model, against those of plain PyTorch for one sample at a time."""
        self.plain  # noqa: B018 # trains, and exports the model
        model = self.folder / "plain" / "model"
        rows = plain.read_rows(self.folder, "validation", self.images)
        if self.name in ("causal-lm", "seq2seq"):
            texts = [row["text"] for row in rows]
            generated = self.predict({self.name: {"max_new_tokens": NEW}}, texts)["text"]
            expected = plain.generate(model, self.task, texts, NEW)
            wrong = sum(one != other for one, other in zip(generated, expected, strict=True))
            return self.verdict(not wrong, f"{wrong} of {len(texts)} texts")
        columns = self.predict({})
        logits = plain.predict(model, self.task, rows)
        probabilities = [row.float().softmax(-1) for row in logits]
        if self.name == "token-classification":
            ours = [torch.tensor(row) for row in columns["probabilities"]]
            # without the special tokens at both ends, the probability of the best tag of each word
            probabilities = [row[1:-1].max(-1).values for row in probabilities]
        else:
            ours = list(torch.tensor([columns[f"probability_{name}"] for name in plain.CLASSES]).T)
        largest = max(float((one - other).abs().max()) for one, other in zip(ours, probabilities, strict=True))
        return self.verdict(largest <= LOSS, f"probability {largest:.1e}")

    def predict(self, plugins: Mapping[str, Any], texts: list[str] | None = None) -> dict[str, list[Any]]:
        """The predictions of `fastloop predict` for the validation split or for texts, with the model in the folder
        ``plain``."""
        recipe = make_recipe(self.recipe("predicted", plugins, {}))
        split = "validation" if texts is None else "predict"
        recipe.inference = Inference((self.folder / "plain" / "model").resolve(), split, texts, chunk=plain.BATCH)
        reader = Chunks(None)
        with self.recorded(), open_run(resolve(recipe), [reader]) as run:
            (chunk,) = reader.chunks
            return predict_dataset(run, run.loaders.replace(split, chunk))


FIRST = "hand-written loop"
"""The first check. If it is refused, the task does not accept the architecture, and the other checks are left out."""
CHECKS: dict[str, Callable[[Pair], Cell]] = {
    FIRST: Pair.check_loop,
    "micro-batches": Pair.check_micro,
    **{column: partial(Pair.check_plugin, column=column) for column in PLUGINS},
    "length-bucketing": Pair.check_bucketing,
    "amp": Pair.check_amp,
    "cpu-attention": Pair.check_kernel,
    "auto": Pair.check_auto,
    "auto, dropout": Pair.check_dropout,
    "resume": Pair.check_resume,
    "predict": Pair.check_predict,
}
"""Column of the table -> its check."""


def columns(task: str) -> list[str]:
    """The checks of a task."""
    names = []
    for name in CHECKS:
        has_lengths = "image" not in task
        if name == "length-bucketing" and not has_lengths:
            continue
        if name not in PLUGINS or task in PLUGINS[name]:
            names.append(name)
    return names


def guarded(check: Callable[[], Any]) -> tuple[Any, Cell]:
    """The result of a function, or None and a cell for the exception that it raised."""
    try:
        return check(), (OK, "")
    except UsageError as error:
        return None, (REFUSED, " ".join(str(error).split()))
    except Exception as error:  # models raise errors of any type
        cause: BaseException = error
        if isinstance(error, FastloopError) and error.__cause__ is not None:
            cause = error.__cause__
        place = traceback.extract_tb(cause.__traceback__)[-1]
        text = " ".join(str(cause).split())[:300]
        return None, (ERROR, f"{type(cause).__name__}: {text} ({Path(place.filename).name}:{place.lineno})")


def serve(pipe: Any) -> None:
    """A worker: receives ``(task, kind, names of checks)``, and answers ``(name, outcome, detail)`` for each check,
    then None."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("fastloop").propagate = False
    while True:
        request = pipe.recv()
        if request is None:
            return
        task, kind, names = request
        with tempfile.TemporaryDirectory() as folder:
            for name, (outcome, detail) in check_pair(task, kind, names, Path(folder)):
                pipe.send((name, outcome, detail.replace(f"{folder}/", "")))
        pipe.send(None)


def check_pair(task: str, kind: str, names: Sequence[str], folder: Path) -> Iterator[tuple[str, Cell]]:
    """Check -> its cell. If the model cannot be built, the only one is ``model``."""
    plain.write_data(folder)
    pair, failure = guarded(partial(Pair, task, kind, folder))
    if pair is None:
        yield "model", failure
        return
    for name in names:
        cell, failure = guarded(partial(CHECKS[name], pair))
        yield name, failure if cell is None else cell
        if name == FIRST and failure[0] == REFUSED:
            return

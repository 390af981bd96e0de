"""Runs that one process and two processes train alike: ``processes(2, all_of, cases)``.

The model has what processes must share beside its trained weights: batch norm, a running mean of its own, a frozen
layer, tied weights, and a buffer that is not saved. In one process with micro-batches of the same size, it computes
what two processes compute, because processes take the micro-batches of a step in turns.
"""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from strategy_runs import wait_for_errors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastloop import FastloopError, Plugin, hookimpl
from fastloop.cli.launch import process_variables
from fastloop.distributed.ranks import LOOPBACK
from fastloop.distributed.tensors import gather_full
from fastloop.lifecycle import execute, open_run
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.run import Run
from fastloop.testing.runs import DisableDropout, RunRecorder, Trained

TRAIN: dict[str, Any] = {
    "max_steps": 5,
    "batch_size": 8,
    "micro_batch_size": 4,
    "optimizer": {"name": "SGD", "momentum": 0.9},
    "lr": 0.05,
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
    "evaluate_every": 2,
    "save_every": 4,
    "log_every": 1,
    "seed": 1,
    "device": "cpu",
}
LONGEST_NAME = 200
"""Characters of a case's name in the name of its folder, which file systems limit to 255 bytes."""


class TracksSomePasses(nn.Module):
    """A module that updates buffers in the training passes of process 0.

    Attributes:
        turns: Number of processes that take turns in the passes of a step. 1: every pass is one of this process.
        passes_of_step: Number of training passes since the step began.
    """

    turns = 1
    passes_of_step = 0

    def is_tracked(self) -> bool:
        """Whether this training pass is one of process 0. With two turns, passes 0 and 2 of a step are."""
        if self.turns == 1:
            return True
        tracked = self.passes_of_step % self.turns == 0
        self.passes_of_step += 1
        return tracked


class BatchNorm(nn.BatchNorm1d, TracksSomePasses):
    """Batch norm whose running statistics are those of process 0."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training or self.is_tracked():
            return super().forward(inputs)
        mean = self.running_mean.clone()
        variance = self.running_var.clone()
        return nn.functional.batch_norm(inputs, mean, variance, self.weight, self.bias, training=True, eps=self.eps)


class Centered(TracksSomePasses):
    """Subtracts the mean of a micro-batch in training, and the running mean in evaluation, as batch norm does.

    Attributes:
        mean: Running mean, float32.
        passes: Number of tracked passes, int64.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return inputs - self.mean
        mean = inputs.detach().float().mean(0)  # fsdp casts inputs to bf16
        if self.is_tracked():
            self.mean.lerp_(mean, 0.3)
            self.passes += 1
        return inputs - mean


class Block(nn.Module):
    """A layer with a norm of its samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden)).relu()


class Net(nn.Module):
    """Two blocks between layers of all other kinds, of a width that two processes cannot share evenly. The run's seed
    determines the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.center = Centered(8)
        self.norm = BatchNorm(13)
        self.first = nn.Linear(8, 13, bias=False)  # batch norm subtracts a bias, whose gradient would be noise
        self.blocks = nn.ModuleList([Block(13), Block(13)])
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.tied = nn.Linear(13, 13)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.tied.weight
        self.register_buffer("scale", torch.full((13,), 1.5), persistent=False)
        self.head = nn.Linear(13, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, 8) float32 -> (batch, 3) scores."""
        hidden = self.norm(self.first(self.center(inputs)))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.tied(self.frozen(hidden).tanh()) + self.again(hidden) * self.scale
        scores: Tensor = self.head(hidden)
        return scores


def vectors() -> dict[str, TensorDataset]:
    """Vectors (8, float32) of three classes. The last step of an epoch has micro-batches of 4 and 2 samples."""
    splits = {}
    for split, size in (("train", 30), ("validation", 13)):
        inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(size)) + 0.5
        splits[split] = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return splits


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        name: Unique among the cases.
        task: A recipe's ``model`` and ``data``, and maybe ``plugins`` and ``train``.
        plugins: Name -> options.
        turns: Processes whose turns a single process imitates; 1 for a run of several processes.
    """

    name: str
    task: Mapping[str, Any]
    plugins: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)
    turns: int = 1

    @property
    def folder(self) -> str:
        """The name of its run folder: its own name, or the beginning of a long one and a checksum."""
        if len(self.name) <= LONGEST_NAME:
            return self.name
        return f"{self.name[:LONGEST_NAME]} {zlib.crc32(self.name.encode()):08x}"

    def recipe(self) -> dict[str, Any]:
        """The recipe."""
        task = dict(self.task)
        plugins: dict[str, Any] = {"log": False, "progress": False, "speed-check": False}
        for entry in task.pop("plugins", ()):
            plugins |= {entry: {}} if isinstance(entry, str) else entry
        train = TRAIN | task.pop("train", {}) | dict(self.train)
        return {**task, "plugins": plugins | dict(self.plugins), "train": train, "output": self.folder}


@dataclass(kw_only=True)
class Ended:
    """A training on one process.

    Attributes:
        error: Type and message, if it was refused or failed; then the rest is empty.
        trained: The recorded results.
        state: Name -> parameter or persistent buffer, in full.
        buffers: Name -> buffer of this process.
    """

    error: str = ""
    trained: Trained | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class TakeTurns(Plugin):
    """Sets whose passes the modules of a model track."""

    name = "take-turns"

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    @hookimpl
    def before_prepare(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, TracksSomePasses):
                module.turns = self.turns

    @hookimpl
    def before_step(self, run: Run) -> None:
        for module in run.unwrap_model().modules():
            if isinstance(module, TracksSomePasses):
                module.passes_of_step = 0


def train(case: Case) -> Ended:
    """Train on this process, which may be one of several."""
    recorder = RunRecorder()
    resolved = resolve(make_recipe(case.recipe()))
    with open_run(resolved, [DisableDropout(), TakeTurns(case.turns), recorder]) as run:
        summary = execute(run)
    state = {name: gather_full(tensor).cpu().clone() for name, tensor in run.strategy.model_state(run).items()}
    buffers = {name: buffer.cpu().clone() for name, buffer in run.unwrap_model().named_buffers()}
    return Ended(trained=recorder.result(run, summary), state=state, buffers=buffers)


def all_of(cases: list[Case]) -> dict[str, Ended]:
    """Case -> how it ended on this process."""
    results = {}
    for case in cases:
        try:
            results[case.name] = train(case)
        except FastloopError as error:
            if case is not cases[-1]:  # at the end, the exit of this process ends the wait of others
                wait_for_errors(case.name, error)
            results[case.name] = Ended(error=f"{type(error).__name__}: {error}")
        gc.collect()
        gc.freeze()  # what is left are results and imported modules: the next collection need not visit them
    return results


def all_in_group_of_one(cases: list[Case]) -> dict[str, Ended]:
    """``all_of`` in a process that forms a group of its own, so that ``fsdp`` shards: each shard is a whole weight."""
    os.environ.update(process_variables(0, 1, LOOPBACK, "0"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return all_of(cases)

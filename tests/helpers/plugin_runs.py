"""Runs on several processes of plugins that act on more than one: ``processes(2, all_of, runs)``.

A run: ``name``, its folder; ``plugins``: names; ``audit``, ``bucketing`` and ``recompute``: options of those;
``faulty``: each process takes the same share; ``data``: map, lengths, stream or sharded; ``dropout``; ``workers``;
``train``; ``resume``. Its result: losses, weights, the summary's audit or the error.
"""

from __future__ import annotations

from typing import Any

import torch
from strategy_runs import Deep, Stream, data
from torch import nn

from fastloop import FastloopError, Plugin, Trainer, hookimpl
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.sample_audit import SampleAudit
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing

TRAIN = {"batch_size": 12, "epochs": 2, "lr": 1e-2, "device": "cpu", "save_every": 4, "keep_checkpoints": 9}


class Faulty(Plugin):
    """Every process takes the share of the first."""

    name = "faulty"

    @hookimpl
    def check_run(self, run: Any) -> None:
        (run.train_loader.sampler or run.train_loader.stream).rank = 0

    @hookimpl
    def before_epoch(self, run: Any) -> None:
        run.steps_to_compare = 0  # the processes would find it in the first step


class Sharded(Stream):
    """Shares itself out among the processes."""

    shards_itself = True

    def __iter__(self) -> Any:
        import torch.distributed as dist

        return (sample for index, sample in enumerate(self.samples) if index % dist.get_world_size() == dist.get_rank())


class Losses(Plugin):
    """Keeps them."""

    name = "losses"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    @hookimpl
    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())


def lengths() -> Any:
    """Samples that claim lengths from 1 to 20."""
    found: Any = data(67, 0)
    found.lengths = [1 + index * 7 % 20 for index in range(67)]
    return found


DATA = {"lengths": lengths, "map": lambda: data(67, 0), "stream": lambda: Stream(67), "sharded": lambda: Sharded(66)}


def run_one(spec: dict[str, Any]) -> dict[str, Any]:
    """One run, or its error."""
    model = Deep()
    losses = Losses()
    for block in model.blocks:
        block.dropout.p = spec.get("dropout", 0.2)
    objects: list[Plugin] = [losses]
    objects += [SampleAudit(**spec["audit"])] if "audit" in spec else []
    objects += [ActivationCheckpointing(**spec["recompute"])] if "recompute" in spec else []
    objects += [LengthBucketing(**spec["bucketing"])] if "bucketing" in spec else []
    objects += [Faulty()] * spec.get("faulty", False)
    plugins = [
        {"log": False},
        {"progress": False},
        {"dataloader-workers": {"num_workers": spec.get("workers", 0)}},
        *spec["plugins"],
    ]
    try:
        trainer = Trainer(
            model,
            DATA[spec.get("data", "map")](),
            plugins=[*plugins, *objects],
            loss=nn.functional.cross_entropy,
            output=spec["name"],
            resume=spec.get("resume", False),
            **TRAIN | spec.get("train", {}),
        )
        summary = trainer.fit()
    except FastloopError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    weights = {name: tensor.tolist() for name, tensor in trainer.run.full_state_dict().items()}
    return {"losses": losses.losses, "weights": weights, "sample-audit": summary.get("sample-audit")}


def all_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by name."""
    return {spec["name"]: run_one(spec) for spec in runs}

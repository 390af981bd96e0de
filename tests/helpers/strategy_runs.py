"""Runs on several processes: ``processes(2, all_of, runs)``.

A run: ``name``, which is its folder too; ``plugins``; ``train``: keys of a recipe's ``train``; ``resume``: a
checkpoint; ``model``: a name in ``MODELS``; ``data``: a name in ``DATA``; ``model_mode``: train or eval; ``fp16``:
force it; ``overflow``: use ``Overflow``; ``log``: options of the plugin; ``twice``: ``add`` or ``replace``, for two
passes a step. Its result: losses, learning rates and gradient norms of the steps, metrics, how often gradients were
exchanged, loss scales, or the error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training_runs import execute

from fastloop import Batch, FastloopError, Plugin, Trainer, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe

TRAIN = {
    "lr": 1e-2,
    "batch_size": 8,
    "device": "cpu",
    "epochs": 2,
    "save_every": 4,
    "keep_checkpoints": 9,
    "max_grad_norm": 0.5,
}
PATIENCE = 30.0
"""Seconds that a process with an error waits for the errors of the others."""


class Net(nn.Module):
    """Sizes that two processes cannot halve, a buffer, a frozen weight, and one module used under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 13)
        self.norm = nn.LayerNorm(13)
        self.frozen = nn.Parameter(torch.randn(13), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 1.5))
        self.second = nn.Linear(13, 3)
        self.again = self.first

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs).relu()) + self.frozen
        return self.second(self.again(inputs).tanh() + hidden) * self.scale


def data(size: int, seed: int) -> TensorDataset:
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.linear(self.norm(hidden)).relu())


class Deep(nn.Module):
    """Three like blocks of a width that two or four processes cannot share evenly, a tied weight and a buffer that is
    not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([Block(9) for _ in range(3)])
        self.first = nn.Linear(8, 9)
        self.last = nn.Linear(9, 9, bias=False)
        self.tied = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.full((9,), 1.5), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.tied(hidden.tanh()) + self.last(hidden) * self.scale)


class Uniform(Deep):
    """The same numbers without the buffer in fp32."""

    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.5


class Normed(nn.Sequential):
    """With batch norm."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 3))


class OwnLoss(Net):
    """Returns its loss, like models of transformers."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Unused(Net):
    """Forgets a weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class LeftOut(nn.Module):
    """Leaves a layer out on process 1 from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 9)
        self.middle = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.step < 2 or torch.distributed.get_rank() == 0:  # the plugin sets the step
            hidden = hidden + self.middle(hidden)
        return self.head(hidden)


class Detached(nn.Module):
    """Gives an output that depends on no weight, from the third step on.

    Args:
        everywhere: On each process, and not on process 1 alone.
    """

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 9)
        self.head = nn.Linear(9, 3)
        self.everywhere = everywhere
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.step < 2 or (torch.distributed.get_rank() == 0 and not self.everywhere):  # the plugin sets the step
            output: torch.Tensor = self.head(self.first(inputs))
            return output
        return torch.zeros(len(inputs), 3, requires_grad=True)


class Routed(nn.Module):
    """Uses one of two layers, chosen by a micro-batch's first sample, and a third one in half of the steps.

    Args:
        unequal: Give one of the two weights of other shapes.
    """

    def __init__(self, unequal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 9)
        self.one = nn.Linear(9, 9)
        self.other = nn.Sequential(nn.Linear(9, 5), nn.Linear(5, 9)) if unequal else nn.Linear(9, 9)
        self.paused = nn.Linear(9, 9)
        self.never = nn.Linear(9, 9)
        self.head = nn.Linear(9, 3)
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        hidden = hidden + (self.one if inputs[0, 0] > 0 else self.other)(hidden).tanh()
        if self.step % 4 < 2:  # the plugin sets it
            hidden = hidden + self.paused(hidden)
        return self.head(hidden)


class Skipped(nn.Module):
    """Five blocks: a micro-batch's first sample chooses one that is left out, and half of the steps use one less."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 9)
        self.blocks = nn.ModuleList([Block(9) for _ in range(5)])
        self.head = nn.Linear(9, 3)
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        left_out = {1 if inputs[0, 0] > 0 else 4} | ({2} if self.step % 4 > 1 else set())
        for index, block in enumerate(self.blocks):
            if index not in left_out:
                hidden = block(hidden)
        return self.head(hidden)


class Stream(IterableDataset[Any]):
    """The same samples one after the other."""

    def __init__(self, size: int) -> None:
        self.samples = data(size, 0)

    def __iter__(self) -> Any:
        return iter(self.samples)


def weighted(samples: list[Any]) -> Batch:
    """A batch whose loss is a mean over more than samples: see ``LOSSES``."""
    inputs, targets = torch.utils.data.default_collate(samples)
    return Batch((inputs, targets), loss_weight=int((targets + 1).sum()))


def named(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch for ``OwnLoss``."""
    inputs, targets = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "labels": targets}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "routed": Routed,
    "routed unequal": lambda: Routed(unequal=True),
    "skipped": Skipped,
    "net": Net,
    "own loss": OwnLoss,
    "deep": Deep,
    "uniform": Uniform,
    "normed": Normed,
    "unused": Unused,
    "left out": LeftOut,
    "detached": Detached,
    "detached everywhere": lambda: Detached(everywhere=True),
}
DATA: dict[str, Callable[[], Any]] = {
    "even": lambda: data(64, 0),
    "uneven": lambda: data(59, 0),
    "stream": lambda: Stream(59),
    "weighted": lambda: DataLoader(data(59, 0), batch_size=8, collate_fn=weighted),
    "named": lambda: DataLoader(data(60, 0), batch_size=8, collate_fn=named),  # the last step has 4 samples
}
LOSSES = {"weighted": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), "named": None}
"""Data -> its loss. Torch's weighted one is a mean weighted by class. The model of named inputs returns its own."""


class Fp16(Plugin):
    """fp16 where Accelerate and DeepSpeed refuse it as too slow: it runs on a CPU too."""

    name = "fp16"

    @hookimpl(wrapper=True)
    def build_collator(self, run: Any) -> Generator[None, Any, Any]:
        from fastloop_plugins.strategies._deepspeed_state import imported

        imported("cpu").accelerator.get_accelerator().is_fp16_supported = lambda: True
        run.accelerator.state._mixed_precision = "fp16"
        run.accelerator.scaler = object()
        run.accelerator.scaler_handler = None
        return (yield)

    @hookimpl
    def check_run(self, run: Any) -> None:
        run.accelerator.state._mixed_precision = "no"


class Overflow(Plugin):
    """fp16 with loss scaling on a CPU, and gradients of one process that overflow in the third step.

    Attributes:
        scales: The loss scale after each step, which all processes share.
    """

    name = "overflow"

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    @hookimpl(wrapper=True)
    def build_collator(self, run: Any) -> Generator[None, Any, Any]:
        run.accelerator.state._mixed_precision = "fp16"
        run.accelerator.native_amp = True
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        return (yield)

    @hookimpl
    def check_run(self, run: Any) -> None:
        run.accelerator.state._mixed_precision = "no"

    @hookimpl(wrapper=True)
    def compute_loss(self, run: Any) -> Generator[None, Any, Any]:
        output = yield
        if run.unwrap_model().training and run.state.step == 2 and run.rank == run.world_size - 1:
            output.loss.register_hook(lambda gradient: gradient * torch.inf)
        return output

    @hookimpl
    def after_step(self, run: Any) -> None:
        (scale,) = set(run.processes.all_gather_object(run.accelerator.scaler.get_scale()))
        self.scales.append(scale)


class Watch(Plugin):
    """Records a run, and trains with two parameter groups."""

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.result: dict[str, Any] = {"losses": [], "lrs": [], "norms": [], "metrics": [], "modes": [], "skipped": 0}

    @hookimpl
    def build_optimizer(self, run: Any, model: nn.Module) -> Any:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim > 1]
        others = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.ndim < 2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 5e-3}]
        return getattr(torch.optim, run.recipe.train.optimizer_name)(
            groups, lr=run.recipe.train.lr, **run.recipe.train.optimizer_arguments
        )

    @hookimpl
    def before_step(self, run: Any) -> None:
        run.unwrap_model().step = run.state.step

    @hookimpl
    def before_optimizer_step(self, run: Any, grad_norm: Any) -> None:
        norm = run.gradient_norm()
        assert grad_norm is None or norm.item() == grad_norm.item() or norm.isnan()
        self.result["norms"].append(norm.item())
        self.result["modes"].append(run.unwrap_model().training)

    @hookimpl
    def after_step(self, run: Any, loss: torch.Tensor) -> None:
        self.result["losses"].append(loss.item())
        self.result["lrs"].append([group["lr"] for group in run.optimizer.param_groups])
        self.result["skipped"] += run.step_was_skipped()

    @hookimpl
    def after_evaluate(self, metrics: dict[str, float]) -> None:
        self.result["metrics"].append(metrics["loss"])


class Exchanges(Plugin):
    """Counts what torch.distributed does from ``before_fit`` to ``after_fit``: name -> times."""

    name = "exchanges"

    @hookimpl
    def before_fit(self) -> None:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    @hookimpl
    def after_fit(self) -> None:
        self.profile.stop()
        # key_averages() would build a tree of all operations, for seconds
        recorded = self.profile.profiler.kineto_results.events()
        self.counts = Counter(event.name() for event in recorded if event.name().startswith("gloo:"))


class Twice(Plugin):
    """Computes the gradients of each step twice.

    Args:
        adds: Add the second ones to the first, instead of replacing them.
    """

    name = "twice"

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds

    @hookimpl
    def train_step(self, run: Any, batches: list[Batch]) -> torch.Tensor:
        run.accumulate_gradients(batches)
        if not self.adds:
            run.optimizer.zero_grad()
        loss: torch.Tensor = run.accumulate_gradients(batches)
        run.apply_gradients(loss)
        return loss


def from_recipe(spec: dict[str, Any], plugins: list[Any]) -> dict[str, Any]:
    """The run of a recipe of a text task."""
    named = [plugin for plugin in plugins if not isinstance(plugin, Plugin)]
    tree = {"train": TRAIN | spec.get("train", {}), "plugins": [*named, {"module": False}], "output": spec["name"]}
    recipe = make_recipe(spec["recipe"] | tree, Path("recipe.yaml"))
    resolved = resolve(recipe, objects=[plugin for plugin in plugins if isinstance(plugin, Plugin)])
    return execute(build(resolved, resume=Path(spec["resume"]) if "resume" in spec else None))


def run_one(spec: dict[str, Any], is_last: bool) -> dict[str, Any]:
    """One run, or its error."""
    watch = Watch()
    before = dict(os.environ)
    model = MODELS[spec.get("model", "net")]().train(spec.get("model_mode") != "eval")
    plugins: list[Any] = [
        {"log": spec.get("log", False)},
        {"progress": False},
        *spec["plugins"],
        watch,
        *[Fp16()] * spec.get("fp16", False),
    ]
    if "twice" in spec:
        plugins.append(Twice(adds=spec["twice"] == "add"))
    if spec.get("overflow"):
        plugins.append(overflow := Overflow())
    if spec.get("exchanges"):
        plugins.append(exchanges := Exchanges())
    arguments = {**TRAIN, "output": spec["name"], **spec.get("train", {})}
    try:
        if "recipe" in spec:
            return watch.result | {"summary": from_recipe(spec, plugins)}
        trainer = Trainer(
            model,
            DATA[spec.get("data", "even")](),
            data(30, 1),
            plugins=plugins,
            loss=LOSSES.get(spec.get("data", ""), nn.functional.cross_entropy),
            resume=spec.get("resume", False),
            **arguments,
        )
        summary = trainer.fit()
    except FastloopError as error:
        if not is_last:  # at the end, the exit of this process ends the wait of others
            wait_for_errors(spec["name"], error)
        return {"error": f"{type(error).__name__}: {error}"}
    ours = {key for key in os.environ.keys() | before.keys() if "DS_" in key or "DEEPSPEED" in key}
    changed = sorted(key for key in ours if os.environ.get(key) != before.get(key))
    return (
        watch.result
        | {"environment": changed, "compile": summary.get("compile"), "summary": summary}
        | ({"scales": overflow.scales} if spec.get("overflow") else {})
        | ({"exchanges": exchanges.counts} if spec.get("exchanges") else {})
    )


def wait_for_errors(name: str, error: FastloopError) -> None:
    """Wait until every process has an error of this run. One that does not would wait in an exchange that the others
    have left, until the time limit of the start."""
    if not torch.distributed.is_initialized():
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    rank = torch.distributed.get_rank()
    store.set(f"{name}/{rank}", "failed")
    names = [f"{name}/{other}" for other in range(torch.distributed.get_world_size())]
    try:
        store.wait(names, timedelta(seconds=PATIENCE))
    except torch.distributed.DistStoreError:
        raise RuntimeError(f"the run {name!r} failed on process {rank}, and not on all: {error}") from error


def all_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by name."""
    return {spec["name"]: run_one(spec, is_last=spec is runs[-1]) for spec in runs}

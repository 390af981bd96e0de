"""Runs on two processes of models whose buffers training changes: ``processes(2, all_of, CASES)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fastloop import Plugin, Trainer, hookimpl

STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "deepspeed 0": {"deepspeed": {"stage": 0}},
    "deepspeed 2": {"deepspeed": {"stage": 2}},
}
HALF = 4
"""Steps of an epoch, after which the runs evaluate and save."""


def data(size: int, seed: int) -> TensorDataset:
    inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Constant(nn.Module):
    """Subtracts a persistent buffer from its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 9)
        self.last = nn.Linear(9, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def track(self, mean: Tensor) -> None:
        """Update the buffers by the mean of a micro-batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.track(inputs.detach().mean(0))
        outputs: Tensor = self.last(self.first(inputs - self.mean).relu())
        return outputs


class Updated(Constant):
    """The buffer is a running mean."""

    def track(self, mean: Tensor) -> None:
        self.mean.lerp_(mean, 0.3)
        self.passes += 1
        self.seen |= mean[:3] > 0


class Detached(Constant):
    """The same, by ``data``, which torch does not notice."""

    def track(self, mean: Tensor) -> None:
        self.mean.data.lerp_(mean, 0.3)


class Replaced(Constant):
    """The same, by a new tensor."""

    def track(self, mean: Tensor) -> None:
        self.mean = self.mean.lerp(mean, 0.3)


class Late(Constant):
    """The same, from the fourth pass on."""

    def track(self, mean: Tensor) -> None:
        if self.passes_here >= HALF - 1:
            self.mean.lerp_(mean, 0.3)
        self.passes_here += 1

    def __init__(self) -> None:
        super().__init__()
        self.passes_here = 0


class Normed(nn.Sequential):
    """With batch norm."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(8, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 1))


class Bare(nn.Sequential):
    """Without buffers."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": Bare,
    "constant": Constant,
    "updated": Updated,
    "detached": Detached,
    "replaced": Replaced,
    "late": Late,
    "normed": Normed,
}


class Watch(Plugin):
    """Records the losses, the exchanges of each step, and the buffers at the end.

    Attributes:
        exchanges: Broadcasts and reductions before each step.
    """

    name = "watch"

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.exchanges: list[int] = []
        self.buffers: dict[str, Tensor] = {}
        self._count = 0
        self._originals: dict[str, Any] = {}

    @hookimpl
    def before_fit(self) -> None:
        for name in ("broadcast", "all_reduce"):
            self._originals[name] = getattr(torch.distributed, name)
            setattr(torch.distributed, name, self._counted(self._originals[name]))

    @hookimpl(tryfirst=True)
    def before_step(self) -> None:
        self.exchanges.append(self._count)

    @hookimpl
    def after_step(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    @hookimpl
    def after_fit(self, run: Any) -> None:
        self.buffers = {name: buffer.clone() for name, buffer in run.unwrap_model().named_buffers()}

    @hookimpl
    def teardown(self) -> None:
        for name, original in self._originals.items():
            setattr(torch.distributed, name, original)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._count += 1
            return function(*arguments, **options)

        return counted


def run(model: str, strategy: str, resumed: bool) -> dict[str, Any]:
    """Train two epochs, or the second one alone, from the checkpoint of the run of both."""
    watch = Watch()
    whole = f"{model}-{strategy}"
    options: dict[str, Any] = {"output": whole}
    if resumed:
        options = {"output": f"{whole}-resumed", "resume": f"{whole}/checkpoints/step-{HALF:08d}"}
    trainer = Trainer(
        MODELS[model](),
        data(8 * HALF, 0),
        data(16, 1),
        plugins=[STRATEGIES[strategy], watch],
        loss=nn.functional.mse_loss,
        batch_size=8,
        epochs=2,
        lr=1e-2,
        device="cpu",
        evaluate_every=HALF,
        save_every=HALF,
        keep_checkpoints=9,
        **options,
    )
    summary = trainer.fit()
    return {
        "losses": watch.losses,
        "exchanges": watch.exchanges,
        "buffers": watch.buffers,
        "validation": summary["validation"]["loss"],
    }


def all_of(cases: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Case -> its whole and its resumed run, on this process."""
    results = {}
    for model, strategy in cases:
        whole = run(model, strategy, resumed=False)
        results[model, strategy] = {"whole": whole, "resumed": run(model, strategy, resumed=True)}
    return results

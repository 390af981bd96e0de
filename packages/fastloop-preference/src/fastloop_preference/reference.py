"""The model before training: the log-probabilities of its completions, computed once and kept by content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastloop import UsageError
from fastloop_plugins.text import cache_token_ids, split
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")
FILE = "reference.npz"
"""The reference's log-probabilities of the training run's rows, beside the exported model."""


class Missing(Exception):
    """The cache has no such entry."""


class Reference:
    """Log-probabilities by the hash of a completion and its prompt.

    Args:
        keys: int64, (completions,).
        values: float32, (completions,).
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, order = keys.sort(stable=True)
        self.values = values[order]

    def find(self, keys: Tensor) -> Tensor:
        """The values of these keys; NaN for one that is not known."""
        if not len(self.keys):
            return torch.full(keys.shape, torch.nan, device=keys.device)
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys, self.values[places], torch.nan)

    def save(self, path: Path) -> None:
        """Write a file that ``load`` reads."""
        part = path.with_name(f".{path.name}")
        with part.open("wb") as file:
            np.savez(file, keys=self.keys.cpu().numpy(), values=self.values.cpu().numpy())
        part.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Reference:
        """The values of a file; none if there is no file."""
        if not path.is_file():
            return cls(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device))
        with np.load(path, allow_pickle=False) as found:
            return cls(*(torch.from_numpy(found[name]).to(device) for name in ("keys", "values")))


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and buffers."""
    found = blake2b(digest_size=20)
    for name, value in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def compute_reference(run: Run, compute: Callable[..., Any], known: str, cache: Context) -> Reference:
    """The values of all splits, from ``cache`` or by ``compute_all``. Every process calls it.

    Args:
        known: What determines them beside the tokens.
        cache: The context in which ``cache_token_ids`` finds its folder.
    """
    about = ["preference reference 1", known, *(data.fingerprint() for data in run.datasets.values())]

    def stop() -> Iterator[Any]:
        raise Missing
        yield

    found: Any = None
    if run.is_main:
        try:
            found = np.array(cache.run(cache_token_ids, about, stop())[0])
        except Missing:
            pass
    found = run.processes.all_gather_object(found)[0]
    if found is None:
        parts = [compute_all(run, data, run.loaders.collators[name], compute) for name, data in run.datasets.items()]
        keys, values = map(torch.cat, zip(*parts, strict=True))
        found = np.concatenate([keys.numpy().view(np.int32), values.numpy().view(np.int32)])
        if run.is_main:
            cache.run(cache_token_ids, about, iter([found.tolist()]))
        logger.info("reference: computed the log-probabilities of %d completions", len(keys))
    keys, values = np.split(found, [len(found) // 3 * 2])
    tensors = torch.from_numpy(keys.view(np.int64)), torch.from_numpy(values.view(np.float32))
    return Reference(*(tensor.to(run.device) for tensor in tensors))


def compute_all(run: Run, dataset: Any, collate: Callable[..., Any], compute: Callable[..., Any]) -> Sequence[Tensor]:
    """``compute(inputs)`` of all samples, without gradients and dropout: tensors on the CPU, end to end in the same
    order on each process. Batches have similar lengths, and processes share them.
    """
    processes, results = run.loaders.processes, list[Any]()
    size = run.recipe.train.eval_batch_size or run.loaders.micro_batch_size
    batches = np.array_split(np.argsort(-dataset.lengths, kind="stable"), -(-len(dataset) // size))
    steps = range(processes.rank, -(-len(batches) // processes.world_size) * processes.world_size, processes.world_size)
    for place in steps:  # as many on each process: one without a batch of its own repeats another
        inputs = move(collate([dataset[int(index)] for index in batches[place % len(batches)]]).inputs, run.device)
        with torch.no_grad():
            found = compute(inputs)
        results += [found] if place < len(batches) else []
    own = [torch.cat(parts).cpu() for parts in zip(*results, strict=True)]
    return [torch.cat(parts) for parts in zip(*filter(None, processes.all_gather_object(own)), strict=True)]


def move(value: Any, device: torch.device) -> Any:
    """The tensors of nested mappings on a device."""
    if isinstance(value, Mapping):
        return {name: move(part, device) for name, part in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode inside the block."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def load_model(run: Run, where: str) -> nn.Module:
    """The model that a run was trained from, to predict rows that the run did not have.

    Raises:
        UsageError: It began from a configuration, or from ``model.weights``.
    """
    from transformers import AutoModelForCausalLM

    given = run.recipe.model
    if given.get("name") is None or given.get("weights") is not None:
        raise UsageError(
            f"{where}: a reward compares the model with its reference, the model before training, and only model.name "
            "is one that can be loaded again. Predict a split of the run's data: --split NAME."
        )
    folder = run.recipe.find(given["name"])
    model = AutoModelForCausalLM.from_pretrained(
        str(folder) if folder.is_dir() else given["name"],
        revision=None if folder.is_dir() else given.get("revision"),
        trust_remote_code=bool(given.get("trust_remote_code")),
        use_safetensors=True,
        dtype=torch.float32,
    )
    return model.eval().requires_grad_(False).to(run.device)


def unpack(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as a plain model reads it: padded on the right, if it is packed or padded otherwise."""
    tokens = {"input_ids": 0, "targets": -100, "completion": 0}
    rows = {name: split(batch[name], batch) for name in tokens}
    padded = {name: pad_sequence(rows[name], True, fill) for name, fill in tokens.items()}
    mask = pad_sequence([torch.ones_like(row) for row in rows["input_ids"]], True)
    return {**padded, "attention_mask": mask, "sizes": batch["sizes"]}

"""The model before training: the log-probabilities of its completions, computed once and kept by content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from fastloop import UsageError
from fastloop.evaluation_results import evaluating
from fastloop_plugins.text import cache_token_ids, split
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from fastloop import Run

logger = logging.getLogger("fastloop")
FILE = "reference.logps"
"""The values of the training run's rows, beside the exported model. Loaders of weights would read *.safetensors."""


class Reference:
    """Log-probabilities, (completions,) float32, by the int64 hash of a completion and its prompt."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, order = keys.sort(stable=True)
        self.values = values[order]

    def find(self, keys: Tensor) -> Tensor:
        """The values of these keys; NaN for one that is not known."""
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys, self.values[places], torch.nan)

    def save(self, path: Path) -> None:
        """Write a file that ``load`` reads."""
        part = path.with_name(f".{path.name}")
        save_file({"keys": self.keys, "values": self.values}, part)
        part.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Reference:
        """The values of a file; without a file, one that no completion has."""
        found = (
            load_file(path) if path.is_file() else {"keys": torch.zeros(1).long(), "values": torch.tensor([torch.nan])}
        )
        return cls(found["keys"].to(device), found["values"].to(device))


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and buffers."""
    found = blake2b(digest_size=20)
    for name, value in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def compute_reference(run: Run, model: nn.Module, compute: Callable[..., Any], known: str, cache: Context) -> Reference:
    """The values of all splits, from the folder that ``cache_token_ids`` finds in the context ``cache``, or by
    ``compute_all``. Every process calls it. ``known`` describes weights and precision."""
    about = ["preference reference 1", known, *(data.fingerprint() for data in run.datasets.values())]
    found: Any = None
    if run.is_main:
        with suppress(KeyError):  # the cache reads the rows, because it has no such entry
            found = np.array(cache.run(cache_token_ids, about, ({}[name] for name in about))[0])
    found = run.processes.all_gather_object(found)[0]
    if found is None:
        collators = run.loaders.collators
        parts = [compute_all(run, model, data, collators[name], compute) for name, data in run.datasets.items()]
        keys, values = map(torch.cat, zip(*parts, strict=True))
        found = np.concatenate([keys.numpy().view(np.int32), values.numpy().view(np.int32)])
        if run.is_main:
            cache.run(cache_token_ids, about, iter([found.tolist()]))
        logger.info("reference: computed the log-probabilities of %d completions", len(keys))
    keys, values = np.split(found, [len(found) // 3 * 2])
    tensors = torch.from_numpy(keys.view(np.int64)), torch.from_numpy(values.view(np.float32))
    return Reference(*(tensor.to(run.device) for tensor in tensors))


def compute_all(
    run: Run, model: nn.Module, dataset: Any, collate: Callable[..., Any], compute: Callable[..., Any]
) -> Sequence[Tensor]:
    """``compute(inputs)`` of all samples, in eval mode and without gradients: tensors on the CPU, end to end, in the
    same order on each process. Batches have similar lengths, and processes share them."""
    processes, results = run.loaders.processes, list[Any]()
    size = run.recipe.train.eval_batch_size or run.loaders.micro_batch_size
    batches = np.array_split(np.argsort(-dataset.lengths, kind="stable"), -(-len(dataset) // size))
    steps = range(processes.rank, -(-len(batches) // processes.world_size) * processes.world_size, processes.world_size)
    with evaluating(model), torch.no_grad():
        for place in steps:  # as many on each process: one without a batch of its own repeats another
            inputs = collate([dataset[int(index)] for index in batches[place % len(batches)]]).inputs
            found = compute(send_to_device(inputs, run.device))
            results += [found] if place < len(batches) else []
    for module in model.modules():
        if hasattr(module, "reshard"):  # fsdp leaves some weights gathered
            module.reshard()
    own = [torch.cat(parts).cpu() for parts in zip(*results, strict=True)]
    return [torch.cat(parts) for parts in zip(*filter(None, processes.all_gather_object(own)), strict=True)]


def load_model(run: Run, where: str) -> nn.Module:
    """The model that a run was trained from, for rows that the run did not have. Only ``model.name`` has one."""
    from transformers import AutoModelForCausalLM

    given = run.recipe.model
    if given.get("name") is None or given.get("weights") is not None:
        problem = "a reward needs the model before training, and this run did not begin from a model.name"
        raise UsageError(f"{where}: {problem}. Predict a split of the run's data: --split NAME.")
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
    """A batch, which may be packed, padded on the right."""
    rows = {name: split(batch[name], batch) for name in ("input_ids", "targets", "completion")}
    rows["attention_mask"] = [torch.ones_like(row) for row in rows["input_ids"]]
    fills = {"targets": -100}
    padded = {name: pad_sequence(values, True, fills.get(name, 0)) for name, values in rows.items()}
    return padded | {"sizes": batch["sizes"]}

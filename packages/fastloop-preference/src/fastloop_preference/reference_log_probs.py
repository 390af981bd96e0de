"""The model before training: the log-probabilities of its completions, computed once and kept by content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastloop import Problem, UsageError
from fastloop_plugins.text import SecondModel, add_loss, cache_token_ids, compute_all, split
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from fastloop import Run

    from fastloop_preference.policy import PolicyTask

logger = logging.getLogger("fastloop")
FILE = "reference.logps"
"""The values of the training run's rows, beside the exported model. Loaders of weights would read *.safetensors."""


class ReferenceLogProbs:
    """Log-probabilities, float32, by the int64 hash of a completion and its prompt.

    Args:
        packed: Both for each completion, as ``pack`` returns them.
    """

    def __init__(self, packed: Tensor) -> None:
        keys, values = packed.unbind(1)
        self.keys, order = keys.sort(stable=True)
        self.values = values.int().view(torch.float32)[order]

    def find(self, keys: Tensor) -> Tensor:
        """The values of these keys; NaN for one that is not known."""
        places = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[places] == keys, self.values[places], torch.nan)

    def save(self, path: Path) -> None:
        """Write a file that ``load`` reads."""
        part = path.with_name(f".{path.name}")
        part.write_bytes(save({"packed": pack(self.keys, self.values)}))  # save_file ignores the user's umask
        part.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> ReferenceLogProbs:
        """The values of a file; without a file, one that no completion has."""
        nothing = pack(torch.zeros(1, dtype=torch.int64), torch.tensor([torch.nan]))
        return cls((load_file(path)["packed"] if path.is_file() else nothing).to(device))


def pack(keys: Tensor, values: Tensor) -> Tensor:
    """Hashes and log-probabilities of completions, (completions,) each, as (completions, 2) int64."""
    return torch.stack([keys, values.view(torch.int32).long()], 1)


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights and buffers, without adapters that add nothing yet: each seed draws others."""
    weights = model.state_dict()
    for name in idle_adapters(weights):
        del weights[name]
    digest = blake2b(digest_size=20)
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def idle_adapters(weights: Mapping[str, Tensor]) -> set[str]:
    """The names of the adapters of `lora` that add nothing, because one of their two factors is 0."""
    idle = set()
    for name, value in weights.items():
        for kind in ("lora_", "lora_embedding_"):
            other = name.replace(f".{kind}A.", f".{kind}B.")
            if other == name or other not in weights:
                continue
            if not value.any() or not weights[other].any():
                idle |= {name, other}
    return idle


class NoEntry(Exception):
    """The cache reads the rows of an entry, because it does not have them."""


class NoRows:
    """Rows of an entry that the cache is expected to have."""

    def __iter__(self) -> Iterator[list[int]]:
        raise NoEntry


def compute_reference(
    run: Run, model: nn.Module, compute: Callable[..., Tensor], known: str, cache: Context
) -> ReferenceLogProbs:
    """The values of all splits, from the folder that ``cache_token_ids`` finds in the context ``cache``, or by
    ``compute(model, inputs)``: those of ``pack``, (rows, ...). Every process calls it. ``known`` describes weights and
    precision."""
    about = ["preference reference 2", known, *(data.fingerprint() for data in run.datasets.values())]
    packed: Tensor | None = None
    if run.is_main:
        with suppress(NoEntry):
            ids, _ = cache.run(cache_token_ids, about, NoRows())
            packed = torch.tensor(ids).view(torch.int64)
    packed = run.processes.all_gather_object(packed)[0]
    if packed is None:
        collators = run.loaders.collators
        parts = [compute_all(run, model, data, collators[name], compute) for name, data in run.datasets.items()]
        packed = torch.cat([part.flatten() for part in parts]).cpu()
        if run.is_main:
            cache.run(cache_token_ids, about, iter([packed.view(torch.int32).tolist()]))
        logger.info("reference: computed the log-probabilities of %d completions", len(packed) // 2)
    return ReferenceLogProbs(packed.view(-1, 2).to(run.device))


def load_model(run: Run, task: PolicyTask) -> nn.Module:
    """The model that a run was trained from, for rows that the run did not have: ``model.name``, with the adapter that
    `lora` continued. Only ``model.name`` has one."""
    if run.recipe.model.get("name") is None:
        problem = "a reward needs the model before training, and this run did not begin from a model.name"
        raise UsageError(
            f"{problem}. Predict a split of the run's data: --split NAME.",
            code="nothing-to-predict",
            place=run.recipe.place(task.name),
        )
    lora = run.recipe.plugins.get("lora") or {}
    if lora.get("init_lora_weights") is False and lora.get("adapter") is None:
        raise UsageError(
            "the model before training had adapters with random values (init_lora_weights: false), which are not "
            "saved. Predict a split of the run's data: --split NAME.",
            code="nothing-to-predict",
            place=run.recipe.place(task.name),
        )
    if lora.get("quantize"):
        logger.warning(
            Problem(
                "the model before training had weights in 4 bits. Rows that the run did not have are compared with it "
                "in float32, so their rewards differ by that rounding.",
                code="other-precision",
                place=run.recipe.place(task.name),
            )
        )
    second_model = SecondModel(run.recipe, run.recipe.model, "AutoModelForCausalLM", "model", lora.get("adapter"))
    second_model.load_tokenizer(task.data.options.max_length)
    model, _ = second_model.build()
    add_loss(model)
    frozen: nn.Module = model.eval().requires_grad_(False).to(run.device)
    return frozen


def unpack(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch, which may be packed, padded on the right."""
    rows = {name: split(batch[name], batch) for name in ("input_ids", "targets", "completion")}
    rows["attention_mask"] = [torch.ones_like(row) for row in rows["input_ids"]]
    fills = {"targets": -100}
    padded = {name: pad_sequence(values, True, fills.get(name, 0)) for name, values in rows.items()}
    return padded | {"sizes": batch["sizes"]}

"""Log-probabilities of completions under the model before training, computed once and found by a hash of their tokens.

Reward of a completion: ``beta`` times its log-probability minus the one here. ``ValueCache`` keeps the values for later
runs, and the exported model has them in a file beside it, to evaluate and predict rows of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fastloop import Problem, UsageError
from fastloop_plugins.text import SecondModel, ValueCache, add_loss, compute_all, split
from fastloop_plugins.toolkit import counted
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from fastloop import Run

    from fastloop_preference.policy import PolicyTask

logger = logging.getLogger("fastloop")
FILE = "reference.logps"
"""The values of the training run's rows, beside the exported model. Loaders of weights would read *.safetensors."""
VERSION = "3"
"""Version of the code that computes the values. Another one does not read those of this one from the cache."""


class ReferenceLogProbs:
    """Log-probabilities, float32, by the int64 hash of a completion and its prompt.

    Args:
        packed: Both for each completion, as ``pack`` returns them: (completions, 2) int64.
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
    """One row for each completion, (completions, 2) int64: its hash, and the bits of its log-probability as a number.
    Processes gather both as one tensor.

    The hash 7 and the log-probability -1.0, whose bits are 0xBF800000, give the row [7, -1082130432].

    Args:
        keys: The hashes, (completions,) int64.
        values: The log-probabilities, (completions,) float32.
    """
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


def compute_reference(
    run: Run, model: nn.Module, compute: Callable[..., Tensor], facts: Mapping[str, str], cache: ValueCache
) -> ReferenceLogProbs:
    """The log-probabilities of the completions of all splits, read from a cache or computed. Every process calls it.

    Args:
        model: The prepared model before training.
        compute: ``(model, inputs)`` -> the rows of ``pack`` of a batch, (its rows, completions of each, 2).
        facts: Those of ``ValueCache.read``, without the data. Only the main process needs them.
    """
    packed: Tensor | None = None
    all_facts = {**facts, "version of the code": VERSION}
    if run.is_main:
        for split_name, data in run.datasets.items():
            all_facts[f"{split_name} split"] = data.fingerprint()
        packed = cache.read(all_facts)
    packed = run.processes.all_gather_object(packed)[0]
    if packed is None:
        parts = []
        for split_name, data in run.datasets.items():
            rows = compute_all(run, model, data, run.loaders.collators[split_name], compute)
            parts.append(rows.reshape(-1, 2).cpu())  # (rows, completions of each, 2) -> (completions, 2)
        packed = torch.cat(parts)
        if run.is_main:
            computed = counted(len(packed), "completion")
            logger.info("reference: computed the log-probabilities of %s: %s", computed, cache.explain_miss(all_facts))
            cache.write(all_facts, packed)
    return ReferenceLogProbs(packed.to(run.device))


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

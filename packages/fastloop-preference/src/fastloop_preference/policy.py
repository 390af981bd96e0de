"""Tasks on log-probabilities of completions, also under the model before training: ``dpo`` and ``kto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastloop import hookimpl, option
from fastloop_plugins.text import Ragged, ValueCache, add_loss, chunk_log_probabilities, log_probabilities, pool
from fastloop_plugins.toolkit import has_values

from fastloop_preference.task import PreferenceTask

if TYPE_CHECKING:
    from pathlib import Path

    from fastloop import Batch, Run
    from torch import Tensor

    from fastloop_preference.reference_log_probs import ReferenceLogProbs

LOSS_INPUTS = ("targets", "places", "completion", "keys", "sizes", "other")
"""Inputs of a batch that the model does not get."""
IGNORED = -100
"""Target that cross entropy ignores."""


class PolicyTask(PreferenceTask):
    """Trains a language model by the log-probabilities of completions."""

    auto_class = "AutoModelForCausalLM"
    runs_before = ("packing", "activation-checkpointing", "slot:strategy")  # which need the head as it will be
    completions = 2  # of a row
    reads_prompts = False  # whether the loss needs the log-probabilities of prompts, too
    has_reference = True
    reference: ReferenceLogProbs | None = None
    loaded: Any = None  # the model before training, to predict rows that the run did not have

    beta: float = option("Multiplies rewards: a larger one keeps the model nearer to its reference.", default=0.1, gt=0)

    cache: ValueCache  # keeps the reference for later runs
    facts: Mapping[str, str] = {}  # on the main process: what determines the reference, beside the data

    def join(self, signed: Sequence[Any], count: int) -> Ragged:
        """Adds ``targets``, the next token of each, -100 where the loss does not need it; ``completion``, 1 if that is
        one of a completion; ``sizes``, (completions, 2) int64, all tokens and those of the completion; ``keys``,
        (completions,) int64, their hashes.

        Args:
            signed: The ids of each prompt with a completion, in one array: ``~id`` for a token of the prompt. A prompt
                of the ids 5 and 6 with a completion of 7 and 8 is [-6, -7, 7, 8], whose targets are [-100, 7, 8].
        """
        from hashlib import blake2b

        import numpy as np
        import torch

        batch = super().join(signed, count)
        targets = [ids[1:] for ids in batch.columns["input_ids"][0]]
        if not self.reads_prompts:
            targets = [np.where(row[1:] >= 0, ids, IGNORED) for row, ids in zip(signed, targets, strict=True)]
        trained = [(row[1:] >= 0).astype(np.int32) for row in signed]
        columns = {**batch.columns, "targets": (targets, IGNORED), "completion": (trained, 0)}
        hashes = [blake2b(row.astype(np.int32).tobytes(), digest_size=8).digest() for row in signed]
        batch.columns = columns
        keys = [int.from_bytes(digest, "little", signed=True) for digest in hashes]
        batch.fixed["keys"] = torch.tensor(keys)
        batch.fixed["sizes"] = torch.tensor([[len(row), int((row >= 0).sum())] for row in signed])
        return batch

    def log_probabilities(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """The sums of those of the tokens of each completion, and of all its tokens with the prompt if the loss needs
        them: (completions, 2) float32."""
        import torch

        inputs = {name: value for name, value in batch.items() if name not in LOSS_INPUTS}
        targets = batch["targets"]
        places = batch.get("places")
        values = log_probabilities(model, inputs, targets, places)
        if places is not None:
            values = values.new_zeros(targets.numel()).index_copy(0, places, values).view_as(targets)
        with torch.autocast(values.device.type, enabled=False):
            means = pool(torch.stack([values * batch["completion"], values], -1), batch)
            sums: Tensor = means * batch["sizes"][:, :1]
            return sums

    @hookimpl
    def build_datasets(self, run: Run) -> Mapping[str, Any]:
        self.cache = ValueCache("reference")
        return super().build_datasets(run)

    @hookimpl
    def build_model(self, run: Run) -> Any:
        model: Any = super().build_model(run)
        add_loss(model)
        return model

    @hookimpl
    def before_prepare(self, run: Run, model: Any) -> None:
        from fastloop_preference.reference_log_probs import fingerprint

        super().before_prepare(run, model)
        if self.has_reference and run.is_main and run.recipe.inference is None and has_values(model):
            self.facts = {
                "model weights": fingerprint(model),
                "model configuration": model.config.to_json_string(),
                "precision": str(run.settings.mixed_precision),
                "options of lora": str(run.recipe.plugins.get("lora")),
            }
        chunk_log_probabilities(run, model)

    @hookimpl
    def after_prepare(self, run: Run, model: Any) -> None:
        """Computes the reference before a run that resumes loads its weights."""
        from fastloop_preference import reference_log_probs

        inference = run.recipe.inference
        if self.has_reference and inference is not None:
            assert inference.model is not None
            self.reference = reference_log_probs.ReferenceLogProbs.load(
                inference.model / reference_log_probs.FILE, run.device
            )
        elif self.has_reference:
            self.reference = reference_log_probs.compute_reference(run, model, self.keyed, self.facts, self.cache)

    def keyed(self, model: Any, batch: Mapping[str, Any]) -> Tensor:
        """Hashes and log-probabilities of the completions of a batch, (rows, completions, 2), as ``pack`` has them."""
        import torch

        from fastloop_preference.reference_log_probs import pack

        rows = pack(batch["keys"], self.log_probabilities(model, batch)[:, 0])
        return torch.stack(rows.chunk(self.completions), 1)

    def ratios(self, run: Run, log_probabilities: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """Log-probabilities of completions minus those of the reference, (completions,)."""
        if self.reference is None:  # a plugin tries the model before training
            return log_probabilities - log_probabilities.detach()
        reference_values = self.reference.find(batch["keys"])
        if run.recipe.inference is not None and reference_values.isnan().any():
            import torch

            from fastloop_preference.reference_log_probs import load_model, unpack

            self.loaded = self.loaded or load_model(run, self)
            with torch.no_grad():
                reference_values = self.log_probabilities(self.loaded, unpack(batch))[:, 0]
        return log_probabilities - reference_values

    @hookimpl
    def export_model(self, run: Run, folder: Path) -> Path:
        from fastloop_preference.reference_log_probs import FILE

        super().export_model(run, folder)
        if run.is_main and self.reference is not None:
            self.reference.save(folder / FILE)
        return folder

    def rewards(self, run: Run, batch: Mapping[str, Any]) -> Tensor:
        """The reward of each completion, for predictions."""
        return self.beta * self.ratios(run, self.log_probabilities(run.model, batch)[:, 0], batch)

    @hookimpl
    def predict(self, run: Run, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.name_rewards(run, self.rewards(run, batch))


def mean_of_step(run: Run, sums: Tensor, batches: list[Batch]) -> Tensor:
    """A sum over a step's rows on this process -> the mean over the rows of all processes, 0-dim, on the device."""
    import torch

    processes = run.loaders.processes
    pair = torch.stack([sums, sums.new_tensor(sum(batch.samples for batch in batches))])
    if processes.world_size > 1:
        pair = processes.all_reduce_sum(pair.cpu()).to(run.device)
    total, count = pair.unbind()
    return total / count

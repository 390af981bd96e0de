"""The completions of some prompts with their rewards, as samples of the loss, and as values and rows to log."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fastloop_plugins.text import Completion, Ragged
from fastloop_plugins.toolkit import without_nan
from numpy.typing import NDArray
from torch import Tensor

from fastloop_grpo.losses import advantages, deviations, equal_groups, loss_weight
from fastloop_grpo.metrics import Mean
from fastloop_grpo.rewards import RewardInputs

NO_TARGET = -100
"""Target of a token whose next one is none of a completion."""


@dataclass(frozen=True)
class CompletionSample:
    """A prompt with a completion, as a sample of the loss.

    For the prompt [5, 6] and the completion [7, 2], ``input_ids`` are [5, 6, 7, 2], and ``targets`` [-100, 7, 2, -100].

    Attributes:
        input_ids: All tokens, int32.
        targets: The next token where that is one of the completion, int32.
        size: The number of targets; 0: the completion has no loss.
        advantage: That of the completion.
        sampled: The log-probability of each target by an engine, (size,) float32; NaN: the model has drawn it.
    """

    input_ids: NDArray[np.int32]
    targets: NDArray[np.int32]
    size: int
    advantage: float
    sampled: NDArray[np.float32]


def completion_sample(
    prompt: Sequence[int], completion: Completion, advantage: float, masked: bool
) -> CompletionSample:
    """The sample of a completion. ``masked``: it has no loss."""
    ids = np.array([*prompt, *completion.ids], dtype=np.int32)
    targets = np.full(len(ids), NO_TARGET, dtype=np.int32)
    if masked:
        return CompletionSample(ids, targets, 0, advantage, np.zeros(0, dtype=np.float32))
    targets[len(prompt) - 1 : -1] = completion.ids
    size = len(completion.ids)
    sampled = np.full(size, np.nan, dtype=np.float32)
    if completion.log_probabilities is not None:
        sampled[:] = completion.log_probabilities
    return CompletionSample(ids, targets, size, advantage, sampled)


def empty_sample(token: int) -> CompletionSample:
    """A sample without a loss, of one token: for a process with fewer completions than another."""
    return completion_sample([], Completion([token], ended=True), 0.0, masked=True)


def ragged_completions(samples: Sequence[CompletionSample], pad_token: int, loss: str) -> Ragged:
    """A batch of the loss before padding or packing; see ``losses.policy_loss``."""
    ids = [sample.input_ids for sample in samples]
    targets = [sample.targets for sample in samples]
    sizes = torch.tensor([sample.size for sample in samples])
    sampled = torch.from_numpy(np.concatenate([sample.sampled for sample in samples]))
    fixed = {
        "completions": torch.repeat_interleave(torch.arange(len(samples)), sizes),
        "sizes": sizes.float(),
        "advantages": torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
    }
    if not sampled.isnan().all():
        fixed["sampled"] = sampled
    return Ragged(
        columns={"input_ids": (ids, pad_token), "targets": (targets, NO_TARGET)},
        fixed=fixed,
        loss_weight=loss_weight(int(sizes.sum()), len(samples), loss),
        tokens=sum(map(len, ids)),
    )


def trial_batch(
    batch: Mapping[str, Any], loss_inputs: Collection[str], rows: int, max_new_tokens: int, positions: int | None
) -> dict[str, Any]:
    """A batch of the loss with the shape of real ones, from a batch of prompts, to try a model without generating. It
    reads no value from the device. A packed row stays as it is.

    Args:
        loss_inputs: Inputs of a batch that the model does not get.
        rows: Completions of a forward pass.
        positions: Tokens that the model takes at most; None: not known.
    """
    inputs = {name: value for name, value in batch.items() if name not in loss_inputs}
    is_packed = "position_ids" in inputs
    if not is_packed:
        for name, prompts in inputs.items():
            inputs[name] = _add_tokens(prompts, max_new_tokens, rows)[:, :positions]
    ids = inputs["input_ids"]
    count = ids.numel()
    inputs["targets"] = ids.roll(-1, 1)
    inputs["places"] = torch.arange(count, device=ids.device)
    inputs["completions"] = torch.zeros(count, dtype=torch.int64, device=ids.device)
    inputs["sizes"] = torch.full((1,), float(count), device=ids.device)
    inputs["advantages"] = torch.ones(1, device=ids.device)
    return inputs


def _add_tokens(prompts: Tensor, count: int, rows: int) -> Tensor:
    """Add ``count`` ones to each prompt, and repeat the prompts until there are ``rows`` of them.

    For the prompts [[5, 6], [7, 8]], one token and 3 rows, it returns [[5, 6, 1], [7, 8, 1], [5, 6, 1]].

    Args:
        prompts: (prompts, tokens), token ids or another input of the model.
    """
    added = torch.ones_like(prompts[:, :1]).expand(-1, count)
    longer = torch.cat([prompts, added], 1)
    times = math.ceil(rows / len(prompts))
    return longer.repeat(times, 1)[:rows]


@dataclass
class Rollout:
    """Completions of prompts with their rewards.

    Attributes:
        prompts: The token ids of each prompt.
        completions: ``count`` of the first prompt, then those of the next ones.
        reward_sums: The weighted sum of the rewards of each completion, (prompts, count) float64; NaN: none applies.
        function_rewards: Name of a reward function -> its reward of each completion; NaN: it does not apply.
        reward_inputs: The arguments of the reward functions, and what these have logged.
    """

    prompts: list[list[int]]
    completions: list[Completion]
    reward_sums: Tensor
    function_rewards: dict[str, list[float]]
    reward_inputs: RewardInputs

    @property
    def count(self) -> int:
        """Completions of each prompt."""
        return self.reward_sums.shape[1]

    def advantages(self, scale: bool) -> list[float]:
        """The advantage of each completion."""
        values: list[float] = advantages(self.reward_sums, scale).flatten().tolist()
        return values

    def samples(self, advantages: Sequence[float], mask_truncated: bool) -> list[CompletionSample]:
        """The samples of the loss, the longest ones first, so that batches have little padding."""
        samples = []
        for place, (completion, advantage) in enumerate(zip(self.completions, advantages, strict=True)):
            masked = mask_truncated and not completion.ended
            samples.append(completion_sample(self.prompts[place // self.count], completion, advantage, masked))
        return sorted(samples, key=lambda sample: -len(sample.input_ids))

    def means(self) -> dict[str, Mean]:
        """The values that a training step logs, by name."""
        means = {"reward": Mean.of(self.reward_sums.flatten().tolist())}
        for name, values in self.function_rewards.items():
            means[f"rewards/{name}"] = Mean.of(values)
        means["reward_spread"] = Mean.of(deviations(self.reward_sums).tolist())
        means["groups_without_signal"] = Mean.of(equal_groups(self.reward_sums).double().tolist())
        means["completion_tokens"] = Mean.of(self.sizes())
        means["truncated"] = Mean.of(self.truncated())
        for name, values in self.reward_inputs.metrics.items():
            means[name] = Mean.of(values)
        return means

    def group_values(self) -> tuple[list[str], Tensor]:
        """The names of the values of an evaluation, and their means of each prompt: (prompts, names) float32."""
        columns = {"reward": self.reward_sums.flatten().tolist()}
        for name, values in self.function_rewards.items():
            columns[f"rewards/{name}"] = values
        columns |= {"completion_tokens": self.sizes(), "truncated": self.truncated()}
        table = torch.tensor([*columns.values()], dtype=torch.float64).view(len(columns), -1, self.count)
        return [*columns], table.nanmean(2).T.float()

    def sizes(self) -> list[float]:
        """The number of tokens of each completion."""
        return [float(len(completion.ids)) for completion in self.completions]

    def truncated(self) -> list[float]:
        """1 for a completion without an end token, and 0 for others."""
        return [float(not completion.ended) for completion in self.completions]

    def rows(self, advantages: Sequence[float], most: int) -> list[dict[str, Any]]:
        """The first completions, as rows to log."""
        reward_sums = self.reward_sums.flatten().tolist()
        rows = []
        for place, completion in enumerate(self.completions[:most]):
            row = {
                "prompt": self.reward_inputs.values["prompts"][place],
                "completion": self.reward_inputs.values["completions"][place],
                "tokens": len(completion.ids),
                "ended": completion.ended,
                "reward": reward_sums[place],
                "advantage": advantages[place],
            }
            for name, values in self.function_rewards.items():
                row[f"rewards/{name}"] = values[place]
            for name, extra in self.reward_inputs.extra.items():
                row[name] = extra[place] if place < len(extra) else None
            rows.append(without_nan(row))
        return rows

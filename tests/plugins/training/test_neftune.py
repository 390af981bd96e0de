"""The plugin ``neftune``.

Modules:
    plugins/fastloop_plugins/training/neftune.py
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fastloop import FastloopError, Plugin, hookimpl
from fastloop.testing import LANGUAGE, TEXTS, expect_problem, train, with_dropout, write_texts
from fastloop_plugins.training.neftune import text_lengths


class Noise(Plugin):
    """Records the noise of each pass in training, divided by its largest value for the text: (tokens, width)."""

    name = "noise"
    runs_after = ("neftune",)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []
        self.quiet = 0

    @hookimpl
    def after_prepare(self, run) -> None:
        embedding, plain = run.unwrap_model().get_input_embeddings(), torch.nn.functional.embedding

        def record(module, args, output):
            noise = output - plain(args[0], module.weight)
            if run.unwrap_model().training and torch.is_grad_enabled() and run.state.step >= 0 and noise.any():
                self.found.append(noise.detach())
            else:
                self.quiet += not noise.any()

        self.handle = embedding.register_forward_hook(record)

    @hookimpl
    def before_step(self, batches) -> None:
        self.batch = batches[0].inputs

    @hookimpl
    def teardown(self) -> None:
        self.handle.remove()


def recipe(task, *plugins, **keys):
    task, keys = with_dropout(task, 0.0), {"epochs": 1, "batch_size": 8, "device": "cpu", "lr": 1e-3, "seed": 1} | keys
    return {"model": task["model"], "data": task["data"], "plugins": list(plugins), "train": keys, "output": "run"}


@pytest.mark.parametrize("plugins", [(), ("packing",)], ids=["padded", "packed"])
def test_the_noise_of_a_text_depends_on_its_own_length_and_evaluation_has_none(plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    noise = Noise()
    result = train(recipe(TEXTS, {"neftune": {"alpha": 5.0}}, *plugins), noise)
    assert len(noise.found) == len(result.losses) == 5
    assert noise.quiet > 0
    batch, last = noise.batch, noise.found[-1]
    lengths = text_lengths(batch, None).expand(batch["input_ids"].shape)
    assert sorted({*lengths.flatten().tolist()}) == sorted({*lengths_of(batch)})
    share = last.abs().amax(-1) * (lengths * 16).sqrt() / 5  # the largest of 16 numbers, relative to the limit
    assert share.max() <= 1 + 1e-4
    assert share.mean() == pytest.approx(16 / 17, abs=0.05)
    assert last.mean() == pytest.approx(0, abs=0.02)


def lengths_of(batch):
    """The lengths of the texts, by a loop."""
    if "position_ids" in batch:
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
        return [float(end - start) for start, end in pairwise(starts)]
    return batch["attention_mask"].sum(1).float().tolist()


def test_padding_of_conversations_does_not_count():
    ids = torch.tensor([[5, 6, 7, 2, 2], [5, 2, 2, 2, 2]])
    targets = torch.tensor([[-100, 7, 2, -100, -100], [2, -100, -100, -100, -100]])
    assert text_lengths({"input_ids": ids, "targets": targets}, 2).flatten().tolist() == [3, 1]
    assert text_lengths({"input_ids": ids, "targets": targets}, None).flatten().tolist() == [5, 5]


def test_tasks_without_token_ids_are_refused(tiny_run):
    with expect_problem("missing-trait 'neftune' 'token-ids'", FastloopError):
        tiny_run(["neftune"])


def test_it_changes_the_training_of_a_language_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    losses = [train(recipe(LANGUAGE, *plugins)).losses for plugins in ((), ("neftune",), ("neftune",))]
    assert losses[0] != losses[1] == losses[2]

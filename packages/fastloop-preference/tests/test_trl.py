"""Tokens, log-probabilities, rewards, losses and gradients equal those of TRL: computed beside it, and as recorded
numbers (``python test_trl.py`` writes them)."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastloop_plugins.text import Split, add_loss
from preference_runs import CHATS, LABELLED, PAIRS, UNPROMPTED, tokenizer
from torch.nn.utils.rnn import pad_sequence

from fastloop_preference.dpo import DPO
from fastloop_preference.kto import KTO
from fastloop_preference.reference_log_probs import ReferenceLogProbs
from fastloop_preference.reward_model import RewardModel

EXPECTED = Path(__file__).with_name("expected_trl.json")
"""Case -> numbers of TRL 1.16.0, in float32."""
MOST = 30
"""Tokens of a prompt with a completion: some rows are cut, and one is dropped."""
CASES = {
    "sigmoid": (DPO, {"loss": "sigmoid", "beta": 0.2}, PAIRS),
    "chats": (DPO, {"loss": "sigmoid"}, CHATS),
    "unprompted": (DPO, {"loss": "sigmoid"}, UNPROMPTED),
    "robust": (DPO, {"loss": "robust", "label_smoothing": 0.2}, PAIRS),
    "ipo": (DPO, {"loss": "ipo", "beta": 0.5}, PAIRS),
    "orpo": (DPO, {"loss": "orpo"}, PAIRS[:5]),  # TRL keeps a row without a token of a completion
    "kto": (KTO, {"beta": 0.3, "desirable_weight": 1.5}, LABELLED),
    "reward": (RewardModel, {"center": 0.01}, PAIRS),
}


def model(seed, kind="AutoModelForCausalLM"):
    """A Llama of two layers, whose weights do not depend on a generator of random numbers."""
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer()), pad_token_id=tokenizer().pad_token_id, num_labels=1, **sizes
    )
    made = getattr(transformers, kind).from_config(config)
    start = seed
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_((torch.arange(start, start + weight.numel(), dtype=torch.float64) * 1.7).sin().view_as(weight))
            weight.mul_(0.4)
            start += weight.numel()
    if kind == "AutoModelForCausalLM":
        add_loss(made)
    return made.train()


def samples(task, rows, names):
    """The samples of a task."""
    read = [[task.read_conversation(row[name], name, name) for name in names] for row in rows]
    arguments = {"columns": names, "max_length": MOST, "template": None, "render": False, "keep": task.keep}
    lists = [*task.encode(tokenizer(), [tuple(row) for row in read], arguments)]
    labels = np.array([int(row["label"]) for row in rows]) if "label" in rows[0] else None
    split = Split(np.concatenate(lists).astype(np.int32), np.array([*map(len, lists)]), labels)
    dataset = task.build_dataset(split, arguments)
    return [dataset[index] for index in range(len(dataset))]


def batch(task, found):
    """A padded batch of samples."""
    ragged = task.build_batch(found)
    rows = ragged.columns["input_ids"][0]
    padded = {
        name: pad_sequence([torch.from_numpy(row).long() for row in values], True, fill)
        for name, (values, fill) in ragged.columns.items()
    }
    padded = {
        name: torch.nn.functional.pad(value, (0, max(map(len, rows)) - value.shape[1]), value=ragged.columns[name][1])
        for name, value in padded.items()
    }
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in rows], True)
    return padded | ragged.fixed | {"attention_mask": mask}


def ours(case):
    """Our numbers of a case: log-probabilities, those of the reference, rewards, loss; and the gradients."""
    kind, options, rows = CASES[case]
    task = kind(**options)
    task.text_model = SimpleNamespace(tokenizer=tokenizer())
    names = [name for name in ("prompt", "chosen", "rejected", "completion") if name in rows[0]]
    found = samples(task, rows, names)
    inputs = batch(task, found)
    if "other" in found[0]:
        inputs["other"] = batch(task, [{"completion": sample["other"]} for sample in found])
    policy = model(0, task.auto_class)
    run = SimpleNamespace(recipe=SimpleNamespace(inference=None))
    numbers = {}
    if kind is not RewardModel and case != "orpo":
        with torch.no_grad():
            task.reference = ReferenceLogProbs(task.keyed(model(5), inputs).flatten(0, 1))
        numbers["reference"] = task.reference.find(inputs["keys"])
    if kind is not RewardModel:
        numbers["log_probabilities"] = task.log_probabilities(policy, inputs)[:, 0].detach()
        if case == "orpo":
            numbers["log_probabilities"] /= inputs["sizes"][:, 1]
    arguments = {"model": policy, "batch": inputs} | ({} if kind is RewardModel else {"run": run})
    output = task.compute_loss(**arguments)
    output.loss.backward()
    numbers["rewards"] = output.predictions.nanmean(0)
    numbers["loss"] = output.loss.detach()
    return numbers, [weight.grad for weight in policy.parameters()], inputs


def theirs(case, folder):
    """The same by TRL, on its own batch of all rows."""
    import trl
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    kind, options, rows = CASES[case]
    policy = model(0, kind.auto_class)
    names = {"center": "center_rewards_coefficient", "loss": "loss_type"}
    given = {names.get(name, name): value for name, value in options.items()}
    common = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, "bf16": False, "max_length": MOST}
    common |= {"per_device_train_batch_size": 16, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    if kind is RewardModel:
        trainer = trl.RewardTrainer(policy, trl.RewardConfig(**common, **given), **data)
    elif case == "orpo":
        trainer = ORPOTrainer(policy, ORPOConfig(**common, beta=0.1), **data)
    else:
        config, made = (trl.KTOConfig, trl.KTOTrainer) if kind is KTO else (trl.DPOConfig, trl.DPOTrainer)
        trainer = made(policy, model(5), config(**common, **given), **data)
    order = trainer.train_dataset
    inputs = trainer._prepare_inputs(trainer.data_collator([order[index] for index in range(len(order))]))
    numbers = {}
    if kind is not RewardModel and case != "orpo":
        for name, each in (("reference", trainer.ref_model), ("log_probabilities", policy)):
            found = trainer.compute_ref_log_probs(each, inputs)
            numbers[name] = found[0] if kind is KTO else torch.cat(found)
    policy.train()
    if case == "orpo":
        numbers["log_probabilities"] = torch.cat(trainer.concatenated_forward(policy, inputs)[:2]).detach()
    loss = trainer.compute_loss(policy, dict(inputs))
    loss.backward()
    stored = trainer._stored_metrics["train"] if case == "orpo" else trainer._metrics["train"]
    if kind is RewardModel:
        scores = policy(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).logits[:, 0].view(2, -1)
        numbers["rewards"] = scores.detach().mean(1)
    else:
        numbers["rewards"] = torch.tensor([stored["rewards/chosen"][-1], stored["rewards/rejected"][-1]])
    numbers["loss"] = loss.detach()
    return numbers, [weight.grad for weight in policy.parameters()], inputs


def projections(gradients):
    """The norm of all gradients, and their products with three vectors."""
    every = torch.cat([gradient.flatten() for gradient in gradients]).double()
    places = torch.arange(len(every), dtype=torch.float64)
    return torch.stack([every.norm(), *((every * (places * step).sin()).sum() for step in (1.3, 2.1, 2.9))])


def check(numbers, expected):
    for name, value in expected.items():
        torch.testing.assert_close(numbers[name].float(), value.float(), rtol=1e-6, atol=1e-6 * (name != "loss"))


@pytest.mark.parametrize("case", CASES)
def test_numbers_equal_those_of_trl(case, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, their_gradients, their_inputs = theirs(case, tmp_path)
    found, gradients, inputs = ours(case)
    if case != "orpo":  # its tokens are divided otherwise
        ids = their_inputs["input_ids"]
        mask = their_inputs["attention_mask"].bool()
        assert inputs["input_ids"][mask].tolist() == ids[mask].tolist()
        if "completion_mask" in their_inputs:
            completion = their_inputs["completion_mask"][:, 1:]
            assert inputs["completion"][:, : completion.shape[1]].tolist() == completion.tolist()
    check(found, expected)
    one, other = (torch.cat([gradient.flatten() for gradient in each]) for each in (gradients, their_gradients))
    assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("case", CASES)
def test_numbers_equal_the_recorded_ones(case):
    expected = {name: torch.tensor(value) for name, value in json.loads(EXPECTED.read_text())[case].items()}
    found, gradients, _ = ours(case)
    numbers = projections(gradients)
    products = expected.pop("gradients")
    check(found, expected)
    assert (numbers - products).norm() <= 1e-5 * products[0]
    assert math.isfinite(products[0]) and products[0] > 1e-4


if __name__ == "__main__":
    import tempfile

    recorded = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found, gradients, _ = theirs(case, folder)
        recorded[case] = {name: value.tolist() for name, value in found.items()}
        recorded[case]["gradients"] = projections(gradients).tolist()
    EXPECTED.write_text(json.dumps(recorded) + "\n")

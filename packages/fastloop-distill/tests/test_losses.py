"""The loss and its gradients equal a plain loop over single texts in float64, however a step is divided."""

from types import SimpleNamespace

import pytest
import torch
from distill_runs import Double, recipe, teacher, train_double
from fastloop.testing import train
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastloop_distill.rows import TeacherRows

CLASSES = {"texts": AutoModelForSequenceClassification, "language": AutoModelForCausalLM}


def reference(kind, options, double):
    """The gradients of the first step, text by text, by torch and transformers alone."""
    large = CLASSES[kind].from_pretrained(f"{teacher(kind)}/model").double().eval()
    small = double.model.train()
    temperature = options["temperature"]
    weight = options["weight"]
    losses = []
    counts = []
    for sample in double.samples:
        ids = torch.tensor(sample["input_ids"]).long()[None]
        if kind == "language":
            targets = ids[0, 1:]
            ids = ids[:, :-1]
        else:
            targets = torch.tensor([sample["label"]])
        outputs = [model(input_ids=ids, output_hidden_states=True) for model in (small, large)]
        ours, theirs = (output.logits.reshape(-1, output.logits.shape[-1]) for output in outputs)
        wanted = (theirs.detach() / temperature).softmax(1)
        soft = (wanted * (wanted.log() - (ours / temperature).log_softmax(1))).sum(1) * temperature**2
        of_task = -ours.log_softmax(1)[torch.arange(len(targets)), targets]
        loss = weight * soft + (1 - weight) * of_task
        states = torch.zeros(())
        for layer, place in enumerate((1, 3)) if options["states"] != "none" else ():
            mine = outputs[0].hidden_states[layer + 1][0]
            right = outputs[1].hidden_states[place + 1][0].detach()
            mine = small.distill_projections[str(layer)](mine)
            mse = ((mine - right) ** 2).mean(1)
            distance = mse if options["states"] == "mse" else 1 - cosine_similarity(mine, right, dim=1)
            states = states + options["states_weight"] * (distance.mean() if kind == "texts" else distance.sum()) / 2
        losses.append(loss.sum() + states)
        counts.append(len(loss))
    names, weights = zip(*small.named_parameters(), strict=True)
    total = torch.stack(losses).sum() / sum(counts)
    found = torch.autograd.grad(total, weights, allow_unused=True)
    return {name: each for name, each in zip(names, found, strict=True) if each is not None}


def same(found, expected, rtol=1e-9, atol=1e-12):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol)


FLOAT32 = {"rtol": 1e-5, "atol": 1e-7}
"""Tolerances beside the loss of a task, which computes in float32."""


@pytest.mark.parametrize(("states", "weight"), [("none", 1.0), ("mse", 1.0), ("cosine", 1.0), ("none", 0.25)])
@pytest.mark.parametrize("kind", CLASSES)
def test_gradients_equal_those_of_a_plain_loop(kind, states, weight):
    options = {"weight": weight, "temperature": 3.0, "states": states, "states_weight": 0.5}
    tolerance = {} if weight == 1.0 else FLOAT32
    double = Double()
    whole = train(recipe(kind, options=options, max_steps=1), double).gradients
    same(whole, reference(kind, options, double), **tolerance)
    packing = ["packing"] if (kind, states) == ("texts", "none") else []
    given = recipe(kind, *packing, options=options, micro_batch_size=2, max_steps=1)
    same(train_double([given])[0], whole, **tolerance)


@pytest.mark.parametrize("ends", [[0, 2, 5, 7], [0, 2, 5, 5]])
def test_rows_are_those_of_a_packed_batch(ends):
    ids = torch.tensor([[5, 6, 7, 8, 9, 0, 0]])[:, : ends[-1]]
    batch = {"input_ids": ids, "position_ids": torch.zeros_like(ids)}
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    for sizes in ({"packed": SimpleNamespace(lengths=lengths)}, {"cu_seq_lens_q": torch.tensor(ends)}):
        rows = TeacherRows(batch | sizes)
        assert rows.inputs["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9], [0, 0, 0]]
        assert torch.equal(rows.flat(rows.inputs["input_ids"]), ids[0])


def test_two_processes_have_the_same_gradients(processes):
    alone = []
    divided = []
    tolerances = []
    for kind, strategy, states, weight in (("texts", "ddp", "mse", 1.0), ("language", "fsdp", "none", 0.25)):
        options = {"weight": weight, "states": states}
        keys = {"micro_batch_size": 2, "max_steps": 1}
        alone.append(recipe(kind, options=options, **keys))
        divided.append(recipe(kind, strategy, options=options, **keys))
        tolerances.append({} if weight == 1.0 else FLOAT32)
    found = processes(2, train_double, divided)[0].result
    for gradients, expected, tolerance in zip(found, train_double(alone), tolerances, strict=True):
        same(gradients, expected, **tolerance)

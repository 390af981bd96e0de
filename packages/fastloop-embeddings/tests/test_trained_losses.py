"""Losses, gradients and weights of both tasks equal those of torch alone, one text at a time, however a step is
divided."""

import copy

import pytest
import torch
from fastloop import Plugin, hookimpl
from fastloop.testing import TEXTS, train, with_dropout
from text_runs import DATA, SCORED

ROWS = 17
"""Two steps of six rows, and one of five."""
STEPS = 3
BATCH = 6
LR = 0.05
MOMENTUM = 0.9
SEED = 7
TEMPERATURE = 0.5
MARGIN = 5.0
TRAIN = {
    "max_steps": STEPS,
    "batch_size": BATCH,
    "optimizer": {"name": "SGD", "momentum": MOMENTUM},
    "lr": LR,
    "seed": SEED,
    "device": "cpu",
    "save_every": None,
}
ROWS_OF_TEXTS = DATA | {"module": DATA["module"].replace(":rows", ":few_rows"), "validation_fraction": 0}
LISTS = DATA | {"module": DATA["module"].replace(":rows", ":few_lists"), "validation_fraction": 0}
NEGATIVE = {"negative": "negative"}
WAYS = {"whole": (6, ()), "thirds": (2, ()), "packed": (2, ("packing",))}
"""Name -> rows of a micro-batch, and plugins. The last of three micro-batches may have one row."""


class Keep(Plugin):
    """Keeps the samples of training and the initial model."""

    name = "keep"

    @hookimpl(trylast=True)
    def before_prepare(self, run, model):
        dataset = run.datasets["train"]
        self.samples = [dataset[index] for index in range(len(dataset))]
        self.model = copy.deepcopy(model)


# -- embeddings --------------------------------------------------------------------------------------------------------


def pool(states, how):
    """The vector of a text of the states of its tokens, (tokens, D)."""
    if how == "first":
        return states[0]
    return states[-1] if how == "last" else states.sum(0) / len(states)


def unit(vector):
    return vector / vector.square().sum().sqrt()


def vectors_of(model, samples, columns, how, is_normalized):
    """The vector of each text: a list for each row."""
    found = []
    for sample in samples:
        vectors = []
        for column in columns:
            ids = torch.tensor(sample[column]).long()[None]
            vector = pool(model(input_ids=ids).last_hidden_state[0], how)
            vectors.append(unit(vector) if is_normalized else vector)
        found.append(vectors)
    return found


def negatives_of_rows(rows, scores):
    """Each first text is compared with all second and third texts."""
    total = 0.0
    for index, (anchor, *_) in enumerate(rows):
        others = [row[column] for column in range(1, len(rows[0])) for row in rows]
        similar = torch.stack([unit(anchor) @ unit(other) for other in others]) / TEMPERATURE
        total = total - similar[index] + similar.exp().sum().log()
    return total / len(rows)


def cosent(rows, scores):
    similar = [unit(first) @ unit(second) / TEMPERATURE for first, second in rows]
    total = torch.ones(())
    for low, score in zip(similar, scores, strict=True):
        for high, other in zip(similar, scores, strict=True):
            if score < other:
                total = total + (low - high).exp()
    return total.log()


def cosine(rows, scores):
    differences = [unit(first) @ unit(second) - score for (first, second), score in zip(rows, scores, strict=True)]
    return torch.stack(differences).square().mean()


def triplet(rows, scores):
    losses = []
    for text, near, far in rows:
        distance = (text - near).norm() - (text - far).norm()
        losses.append((distance + MARGIN).clamp(min=0))
    return torch.stack(losses).mean()


EMBEDDINGS = {
    "multiple_negatives": ({"dims": [8, 16]}, NEGATIVE, negatives_of_rows),
    "cosent": ({"loss": "cosent", "pooling": "last"}, SCORED, cosent),
    "cosine": ({"loss": "cosine", "pooling": "first"}, SCORED, cosine),
    "triplet": ({"loss": "triplet", "normalize": False, "margin": MARGIN}, NEGATIVE, triplet),
}
"""Loss -> options, data and formula."""


def embedding_loss(name):
    """``(model, samples) -> loss``."""
    options, data, formula = EMBEDDINGS[name]
    columns = ["text", "other", *data.keys() & {"negative"}]

    def compute(model, samples):
        how = options.get("pooling", "mean")
        rows = vectors_of(model, samples, columns, how, options.get("normalize", True))
        scores = [float(sample["label"]) for sample in samples] if "label" in data else None
        total = 0.0
        for size in options.get("dims", [16]):
            total = total + formula([[vector[:size] for vector in row] for row in rows], scores)
        return total

    return compute


# -- rerankers ---------------------------------------------------------------------------------------------------------


def scores_of(model, sample):
    """The score of each document of a query. Both texts have special tokens at their ends: [CLS] a [SEP] b [SEP]."""
    found = []
    for name in sample:
        if name in ("text", "label"):
            continue
        first = sample["text"].tolist()
        second = sample[name].tolist()[1:]
        ids = torch.tensor([first + second])
        types = torch.tensor([[0] * len(first) + [1] * len(second)])
        found.append(model(input_ids=ids, token_type_ids=types).logits[0, 0])
    return torch.stack(found)


def binary(scores, labels):
    (score,) = scores
    probability = 1 / (1 + (-score).exp())
    return -labels[0] * probability.log() - (1 - labels[0]) * (1 - probability).log()


def first_of_list(scores, labels):
    similar = scores.sigmoid() / TEMPERATURE
    return similar.exp().sum().log() - similar[0]


def list_net(scores, labels):
    shares = labels.exp() / labels.exp().sum()
    return -(shares * (scores - scores.exp().sum().log())).sum()


RERANKERS = {
    "binary": ({"loss": "binary"}, ROWS_OF_TEXTS | SCORED, binary),
    "multiple_negatives": ({"negatives": 3}, ROWS_OF_TEXTS | NEGATIVE, first_of_list),
    "list_net": ({"loss": "list_net"}, LISTS | SCORED, list_net),
}
"""Loss -> options, data and formula of a query."""


def reranker_loss(name):
    formula = RERANKERS[name][2]

    def compute(model, samples):
        losses = []
        for sample in samples:
            labels = torch.tensor(sample["label"]).float().reshape(-1)
            losses.append(formula(scores_of(model, sample), labels[~labels.isnan()]))
        return torch.stack(losses).mean()

    return compute


# -- the comparison ----------------------------------------------------------------------------------------------------

CASES = [("embedding", name) for name in EMBEDDINGS] + [("reranker", name) for name in RERANKERS]


def recipe(task, name, micro_batch, plugins):
    options, data, _ = (EMBEDDINGS if task == "embedding" else RERANKERS)[name]
    options = options | {"temperature": TEMPERATURE}
    return {
        "model": with_dropout(TEXTS, 0.0)["model"],
        "data": ROWS_OF_TEXTS | data,
        "train": TRAIN | {"micro_batch_size": micro_batch},
        "plugins": [{task: options}, *plugins, {"log": False}, {"progress": False}],
        "output": f"{task}-{name}-{micro_batch}-{len(plugins)}",
    }


def reference(task, name, kept):
    """Losses, gradients of the first step and weights after the last one, by the formulas of the losses and of SGD."""
    compute = embedding_loss(name) if task == "embedding" else reranker_loss(name)
    model = kept.model.train()
    weights = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    velocity = {}
    losses = []
    first = {}
    order = torch.randperm(len(kept.samples), generator=torch.Generator().manual_seed(SEED)).tolist()
    for step in range(STEPS):
        loss = compute(model, [kept.samples[index] for index in order[step * BATCH : (step + 1) * BATCH]])
        losses.append(loss.item())
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        gradients = {key: gradient for key, gradient in zip(weights, found, strict=True) if gradient is not None}
        first = first or gradients
        with torch.no_grad():
            for key, gradient in gradients.items():
                velocity[key] = MOMENTUM * velocity.get(key, 0) + gradient
                weights[key] -= LR * velocity[key]
    return losses, first, {key: weight.detach() for key, weight in weights.items()}


def compare(ours, expected):
    losses, gradients, weights = expected
    assert ours.losses == pytest.approx(losses, rel=1e-4)
    assert ours.gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(ours.gradients[key], gradient, rtol=1e-3, atol=1e-5, msg=key)
    for key, weight in weights.items():
        torch.testing.assert_close(ours.weights[key], weight, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("way", ["thirds", *(pytest.param(way, marks=pytest.mark.slow) for way in ("whole", "packed"))])
@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_loss_trains_as_torch_alone(tmp_path, monkeypatch, task, name, way):
    monkeypatch.chdir(tmp_path)
    kept = Keep()
    ours = train(recipe(task, name, *WAYS[way]), kept)
    assert len(kept.samples) == ROWS
    compare(ours, reference(task, name, kept))


def train_all():
    return {case: train(recipe(*case, 1, ("ddp",))) for case in CASES}


def test_two_processes_train_as_torch_alone(tmp_path, monkeypatch, processes):
    """The second process has two of the five rows of the last step."""
    monkeypatch.chdir(tmp_path)
    first, _ = processes(2, train_all, folder=tmp_path)
    for case, ours in first.result.items():
        kept = Keep()
        train(recipe(*case, BATCH, ()), kept)
        compare(ours, reference(*case, kept))

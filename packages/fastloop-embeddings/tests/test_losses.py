"""Losses and gradients equal those of Sentence Transformers: computed beside it, and as numbers that it gave."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastloop_embeddings import losses

ROWS = 5
SIZE = 6
SCORES = torch.tensor([0.125, 0.5, 0.875, 0.5, -0.25], dtype=torch.float64)
"""Numbers that float32 holds exactly, because one loss of Sentence Transformers rounds them; two are equal."""
EXPECTED = Path(__file__).with_name("expected_losses.json")
"""Case -> loss and gradient of the first column, by Sentence Transformers 6.2.0 in float64 (``python test_losses.py``
writes it)."""
OURS = {
    "multiple_negatives": (2, lambda vectors: losses.multiple_negatives(vectors, 0.05)),
    "multiple_negatives, hard": (3, lambda vectors: losses.multiple_negatives(vectors, 0.05)),
    "cosent": (2, lambda vectors: losses.cosent(vectors, SCORES, 0.05)),
    "cosine": (2, lambda vectors: losses.compute(vectors, SCORES, SimpleNamespace(loss="cosine"))),
    "triplet": (3, lambda vectors: losses.compute(vectors, None, SimpleNamespace(loss="triplet", margin=1.0))),
}
DIMS = (2, 4, 6)
CASES = [*OURS, *(f"{name}, dims" for name in OURS)]


def columns(case):
    """Vectors of each column of texts, without random numbers: those of a similar text are near the first."""
    count = OURS[case.removesuffix(", dims")][0]
    angles = torch.arange(ROWS * SIZE, dtype=torch.float64).view(ROWS, SIZE)
    first = (angles * 1.7).sin() * 2
    others = [first + (angles * 0.9 + 1).cos(), (angles * 2.3 + 2).sin()][: count - 1]
    return [column.clone().requires_grad_() for column in (first, *others)]


def ours(case):
    """Our loss of a case, and the gradient of each column."""
    vectors = columns(case)
    loss = OURS[case.removesuffix(", dims")][1]
    sizes = DIMS if case.endswith("dims") else ()
    found = sum(loss(losses.truncate(vectors, size)) for size in sizes) if sizes else loss(vectors)
    return found, torch.autograd.grad(found, vectors)


class Given(nn.Module):
    """Stands for a model of Sentence Transformers: its features are the vectors themselves."""

    def forward(self, features):
        return {"sentence_embedding": features["vectors"]}

    def get_embedding_dimension(self):
        return SIZE


def theirs(case):
    """The same by Sentence Transformers."""
    from sentence_transformers.sentence_transformer import losses as them

    name = case.removesuffix(", dims")
    model = Given()
    vectors = columns(case)
    loss = {
        "multiple_negatives": lambda: them.MultipleNegativesRankingLoss(model),
        "multiple_negatives, hard": lambda: them.MultipleNegativesRankingLoss(model),
        "cosent": lambda: them.CoSENTLoss(model),
        "cosine": lambda: them.CosineSimilarityLoss(model),
        "triplet": lambda: them.TripletLoss(model, triplet_margin=1.0),
    }[name]()
    if case.endswith("dims"):
        loss = them.MatryoshkaLoss(model, loss, DIMS)
    found = loss([{"vectors": column} for column in vectors], SCORES)
    return found, torch.autograd.grad(found, vectors)


def equal(one, other):
    assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), (one - other).abs().max()


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(case):
    pytest.importorskip("sentence_transformers")
    (loss, gradients), (their_loss, their_gradients) = ours(case), theirs(case)
    assert abs(loss - their_loss) <= 1e-9 * abs(their_loss)
    for one, other in zip(gradients, their_gradients, strict=True):
        equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_the_recorded_ones(case):
    expected, (loss, gradients) = json.loads(EXPECTED.read_text())[case], ours(case)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-9)
    equal(gradients[0], torch.tensor(expected["gradient"], dtype=torch.float64))


def test_a_loss_of_one_row_by_hand():
    first = torch.tensor([[1.0, 0.0]])
    second = torch.tensor([[0.0, 1.0]])
    assert losses.multiple_negatives([first, second], 0.05).item() == 0
    hard = losses.multiple_negatives([first, second, first], 1.0)
    assert hard.item() == pytest.approx(math.log(1 + math.e))
    triplet = OURS["triplet"][1]([first, second, first])
    assert triplet.item() == pytest.approx(1 + math.sqrt(2))
    cosine = losses.compute([first, second], torch.tensor([0.5]), SimpleNamespace(loss="cosine"))
    assert cosine.item() == pytest.approx(0.25)
    assert losses.cosent([first, second], torch.tensor([0.5]), 0.05).item() == 0  # no two rows to order


REPEATED = {
    "nothing": [[1, 11, 21], [2, 12, 22], [3, 13, 23]],
    "second texts": [[1, 11, 21], [2, 11, 22], [3, 13, 23]],
    "first texts": [[1, 11, 21], [1, 12, 22], [3, 13, 23], [1, 14, 24]],
    "a text that a third row gives": [[1, 11, 21], [1, 12, 22], [3, 12, 23]],
    "a negative that fits another row": [[1, 11, 12], [2, 12, 22], [2, 13, 11]],
    "a first text as a second one": [[1, 11, 21], [2, 1, 22], [3, 13, 2]],
    "own texts": [[1, 1, 11], [2, 12, 12], [3, 13, 3]],
    "all second texts": [[1, 11, 11], [2, 11, 11], [3, 11, 11]],
    "pairs": [[1, 11], [1, 12], [2, 11], [3, 13]],
}
"""Case -> keys of the texts of each row: of its first, second and maybe third text."""


def losses_without_false_negatives(vectors, keys, temperature):
    """The mean loss of rows, each computed from a list of its own, whose first text is the right one."""
    found = []
    for row, (anchor, *own) in enumerate(keys):
        right = {second for first, second, *_ in keys if first == anchor} | {anchor}
        candidates = [(row, place) for place in range(1, 1 + len(own))]
        for other, (_, *texts) in enumerate(keys):
            if other != row:
                candidates += [(other, place) for place, text in enumerate(texts, 1) if text not in right]
        similar = [torch.cosine_similarity(vectors[0][row], vectors[place][other], 0) for other, place in candidates]
        found.append(-(torch.stack(similar) / temperature).log_softmax(0)[0])
    return torch.stack(found).mean()


@pytest.mark.parametrize("case", REPEATED)
def test_repeated_texts_are_no_negatives_of_a_text_that_they_fit(case):
    keys = REPEATED[case]
    generator = torch.Generator().manual_seed(0)
    of_texts = {key: torch.randn(SIZE, generator=generator, dtype=torch.float64) for row in keys for key in row}
    columns = zip(*keys, strict=True)
    vectors = [torch.stack([of_texts[key] for key in column]).requires_grad_() for column in columns]
    # keys of texts are hashes of 64 bits
    hashes = (torch.tensor(keys) - 12) * 2**58 + 5
    loss = losses.multiple_negatives(vectors, 0.05, hashes)
    expected = losses_without_false_negatives(vectors, keys, 0.05)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    gradients = (torch.autograd.grad(value, vectors, allow_unused=True) for value in (loss, expected))
    for one, other in zip(*gradients, strict=True):
        equal(one, torch.zeros_like(one) if other is None else other)
    plain = losses.multiple_negatives(vectors, 0.05)
    assert (loss == plain) == (case in ("nothing", "own texts"))


if __name__ == "__main__":
    found = {case: theirs(case) for case in CASES}
    recorded = {
        case: {"loss": loss.item(), "gradient": gradients[0].tolist()} for case, (loss, gradients) in found.items()
    }
    EXPECTED.write_text(json.dumps(recorded) + "\n")

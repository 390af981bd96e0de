"""Losses of rerankers and their gradients equal those of Sentence Transformers, from the same texts and model."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_pairs import TEMPLATES, tokenizer
from text_runs import rows
from torch.nn.utils.rnn import pad_sequence

from fastloop_embeddings import losses
from fastloop_embeddings.pairs import Joiner, draw, group
from fastloop_embeddings.reranker import Reranker

ROWS = rows(5)["train"]
COLUMNS = {name: [row[name] for row in ROWS] for name in ("text", "other", "negative")}
LABELS = [1.0, 0.0, 0.5, 0.25, 1.0]
QUERIES = [0, 0, 0, 1, 1]
"""For ``list_net``: the text of each row, which has its own ``other``. The second list is shorter."""
LONGEST = 12
"""Tokens of a pair at most: some are truncated."""
CASES = ["binary", "multiple_negatives", "multiple_negatives, hard", "list_net"]


class Rows:
    """The rows, as ``TextTask`` gives them to the task."""

    def __init__(self, names, made, queries, labels):
        self.ids = {name: made(COLUMNS[name])["input_ids"] for name in names}
        self.queries = queries
        self.labels = labels
        self.lengths = np.ones(len(ROWS), np.int64)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        places = {"text": self.queries[index]}
        sample = {name: np.array(ids[places.get(name, index)], np.int32) for name, ids in self.ids.items()}
        return sample | ({} if self.labels is None else {"label": self.labels[index]})


@pytest.fixture
def doubles(monkeypatch):
    """float64 everywhere: Sentence Transformers rounds the scores of lists to float32 by ``Tensor.float``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield
    torch.set_default_dtype(before)


def theirs(case, encoder):
    """The loss by Sentence Transformers."""
    from sentence_transformers.cross_encoder import losses as them

    text, other, negative = COLUMNS.values()
    if case == "binary":
        return them.BinaryCrossEntropyLoss(encoder)([text, other], torch.tensor(LABELS))
    if case == "list_net":
        labels = torch.tensor(LABELS)
        return them.ListNetLoss(encoder)([text[:2], [other[:3], other[3:]]], [labels[:3], labels[3:]])
    loss = them.MultipleNegativesRankingLoss(encoder, num_negatives=None)
    return loss([text, other, negative] if "hard" in case else [text, other], None)


def ours(case, model, made):
    """The loss of the task for a batch of all rows."""
    task = Reranker(loss=case.partition(",")[0])
    names = ["text", "other", *["negative"] * ("hard" in case)]
    scored = case in ("binary", "list_net")
    found = Rows(names, made, QUERIES if case == "list_net" else range(5), LABELS if scored else None)
    if case != "binary":
        found = group(found) if scored else draw(found, names[1:], 10**6, 0)
    task.join = Joiner(made, LONGEST, "model")
    task.text_model = SimpleNamespace(tokenizer=made)
    batch = task.build_batch([found[index] for index in range(len(found))])
    assert max(map(len, batch.columns["input_ids"][0])) == LONGEST
    padded = {
        name: pad_sequence([torch.from_numpy(row).long() for row in ids], batch_first=True, padding_value=fill)
        for name, (ids, fill) in batch.columns.items()
    }
    mask = pad_sequence([torch.ones(len(row), dtype=torch.int64) for row in batch.columns["input_ids"][0]], True)
    return task.compute_loss(model, padded | batch.fixed | {"attention_mask": mask}).loss


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(case, doubles, tmp_path):
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder import CrossEncoder
    from transformers import BertConfig, BertForSequenceClassification

    made = tokenizer(**TEMPLATES["bert"], model_max_length=LONGEST)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(made), num_labels=1, initializer_range=0.3, pad_token_id=0, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    encoder = CrossEncoder(str(tmp_path), device="cpu", model_kwargs={"dtype": torch.float64}).eval()
    weights = [*encoder.parameters()]
    expected = theirs(case, encoder)
    found = ours(case, encoder.transformers_model, made)
    assert found.dtype == expected.dtype == torch.float64
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    for one, other in zip(*(torch.autograd.grad(loss, weights) for loss in (found, expected)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12), (one - other).abs().max()


def test_losses_by_hand():
    """Two documents with scores 0 and log 3: probabilities 1/2 and 3/4, and shares 1/4 and 3/4 of a list."""
    scores = torch.tensor([[0.0, math.log(3)]])
    labels = torch.tensor([[1.0, 0.0]])
    options = SimpleNamespace(loss="binary", temperature=0.1)
    found = losses.compute_of_lists(scores, labels, options)
    assert found.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    options.loss = "multiple_negatives"
    expected = math.log(1 + math.exp(2.5))
    assert losses.compute_of_lists(scores, labels, options).item() == pytest.approx(expected)
    more = torch.tensor([[0.0, math.log(3), 5.0]]), torch.tensor([[1.0, 0.0, math.nan]])  # without a third document
    assert losses.compute_of_lists(*more, options).item() == pytest.approx(expected)
    options.loss = "list_net"
    share = 1 / (1 + math.exp(-1))
    expected = share * math.log(4) + (1 - share) * math.log(4 / 3)
    assert losses.compute_of_lists(scores, labels, options).item() == pytest.approx(expected)
    longer = torch.tensor([[0.0, math.log(3), 9.0]]), torch.tensor([[1.0, 0.0, math.nan]])
    assert losses.compute_of_lists(*longer, options).item() == pytest.approx(expected)

"""Pairs of texts: their tokens are those of the tokenizer, and each text is paired with the right ones."""

import random

import numpy as np
import pytest
from fastloop import RecipeError
from fastloop_plugins.text import Sequences
from text_runs import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastloop_embeddings.pairs import Joiner, draw, group

TEMPLATES = {
    "bert": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"},
    "roberta": {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] [SEP] $B [SEP]"},
    "end": {"single": "$A [SEP]", "pair": "$A [SEP] $B [SEP]"},
    "none": {"single": "$A", "pair": "$A $B"},
}


def tokenizer(single, pair, **options):
    """A tokenizer of the words, with a template."""
    ids = {token: place for place, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(token, ids[token]) for token in ("[CLS]", "[SEP]") if token in single + pair]
    made.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", model_input_names=names, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_joined_ids_equal_those_of_the_tokenizer(template, side):
    made = tokenizer(**TEMPLATES[template], truncation_side=side)
    chance = random.Random(0)
    for _ in range(200):
        join = Joiner(made, chance.randint(6, 20), "model")
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(0, 15))) for _ in range(2)]
        full = made(texts)["input_ids"]
        alone = made(texts, truncation=True, max_length=join.max_length)["input_ids"]
        if min(map(len, full)) >= join.max_length:  # which of them is longer is not known then
            alone = full
        found = join(*(np.array(ids, np.int32) for ids in alone))
        expected = made([texts], truncation=True, max_length=join.max_length)
        assert {name: ids.tolist() for name, ids in found.items()} == {
            name: expected[name][0] for name in ("input_ids", "token_type_ids")
        }


@pytest.mark.parametrize("pair", ["[CLS] $B [SEP] $A [SEP]", "$A $A $B [SEP]"], ids=["other order", "repeated"])
def test_a_tokenizer_that_does_more_is_refused(pair):
    with pytest.raises(RecipeError, match=r"model\.tokenizer: it does not only put special tokens around"):
        Joiner(tokenizer("[CLS] $A [SEP]", pair), 20, "model")


class Rows(Sequences):
    """Rows of three texts with one token each, whose first token is 10 times the row and the place of the column."""

    columns = ("text", "other", "negative")

    def __init__(self, count, labels=None):
        super().__init__(np.arange(3 * count, dtype=np.int32), np.full(count, 3), labels)

    def __getitem__(self, index):
        return {name: np.array([10 * index + place]) for place, name in enumerate(self.columns)} | self.label(index)


@pytest.mark.parametrize("names", [("other",), ("other", "negative")])
def test_a_query_is_compared_with_texts_of_other_rows(names):
    rows = Rows(20)
    seen = set()
    lists = draw(rows, names, 4, seed=3)
    assert len(lists) == 20
    for index in range(20):
        sample = lists[index]
        assert sample["text"].tolist() == [10 * index]
        documents = [int(ids[0]) for key, ids in sample.items() if key.startswith("document")]
        own = [10 * index + 1, 10 * index + 2][: len(names)]
        assert [documents[0], *documents[5:]] == own
        drawn = documents[1:5]
        assert len({*drawn}) == 4
        assert not {place // 10 for place in drawn} & {index}
        assert {place % 10 for place in drawn} <= {1, 2}
        assert sample["label"].tolist() == [1.0] + [0.0] * (len(documents) - 1)
        seen |= {*drawn}
    assert len(seen) >= 20
    assert lists.fingerprint() == draw(rows, names, 4, seed=3).fingerprint() != draw(rows, names, 4, 4).fingerprint()
    every = [int(ids[0]) for key, ids in draw(rows, names, 10**6, 0)[7].items() if key.startswith("document")]
    assert sorted(every) == sorted(10 * row + place for row in range(20) for place in (1, 2)[: len(names)])


class Pairs(Sequences):
    """Rows of texts with one token each."""

    def __init__(self, texts):
        super().__init__(np.array(texts, np.int32).ravel(), np.full(len(texts), len(texts[0])))
        self.texts = texts

    def __getitem__(self, index):
        names = ("text", "other", "negative")[: len(self.texts[index])]
        return {name: np.array([text], np.int32) for name, text in zip(names, self.texts[index], strict=True)}


REPEATED = {
    "second texts": [[1, 11], [2, 11], [3, 13], [4, 14]],
    "first texts": [[1, 11], [1, 12], [3, 13], [3, 11]],
    "a text that a third row gives": [[1, 11], [1, 12], [3, 12], [4, 14]],
    "a first text as a second one": [[1, 11], [2, 1], [3, 2], [4, 14]],
    "a negative that fits another row": [[1, 11, 21], [2, 12, 11], [3, 13, 12], [1, 14, 13]],
}


@pytest.mark.parametrize("case", REPEATED)
def test_texts_that_fit_a_query_are_no_negatives_of_it(case):
    texts = REPEATED[case]
    names = ("other", "negative")[: len(texts[0]) - 1]
    lists = draw(Pairs(texts), names, 10**6, seed=0)
    for row, (query, *own) in enumerate(texts):
        right = {other for text, other, *_ in texts if text == query} | {query}
        others = []
        for place, (_, *more) in enumerate(texts):
            if place != row:
                others += [text for text in more if text not in right]
        sample = lists[row]
        documents = [int(ids[0]) for key, ids in sample.items() if key.startswith("document")]
        assert documents[0] == own[0]
        assert sorted(documents[1:]) == sorted([*others, *own[1:]])
        labels = sample["label"][: len(documents)].tolist()
        assert labels == [1.0] + [0.0] * (len(documents) - 1)
        assert np.isnan(sample["label"][len(documents) :]).all()


def test_rows_of_the_same_query_are_one_sample():
    class Repeated(Rows):
        columns = ("text", "other")

        def __getitem__(self, index):
            return super().__getitem__(index) | {"text": np.array([index % 2, index // 4])}

    lists = group(Repeated(6, np.arange(6, dtype=np.float32)))
    found = [[int(ids[0]) // 10 for key, ids in lists[place].items() if key.startswith("doc")] for place in range(4)]
    assert found == [[0, 2], [1, 3], [4], [5]]
    assert lists[1]["label"].tolist() == [1.0, 3.0]
    assert lists.lengths.tolist() == [6, 6, 3, 3]

"""Rankings of the documents of a collection in the layout of BEIR: https://arxiv.org/abs/2104.08663.

The folder has ``corpus.jsonl`` (``_id``, ``text``, maybe ``title``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/``, whose files have, after a header, lines of a query, a document and how relevant it is, divided by tabs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from fastloop import RecipeError
from fastloop_plugins.text import Split, compute_all
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fastloop_embeddings.metrics import measure, search
from fastloop_embeddings.task import PairTask

if TYPE_CHECKING:
    from fastloop import Run

FILES = {"validation": ("dev.tsv", "validation.tsv"), "test": ("test.tsv",)}
"""Split of the recipe -> names of its file in ``qrels``."""
RECALL_AT = (1, 10, 100)


@dataclass
class Judged:
    """A collection, and the queries of a split that have relevant documents. Its methods return gains, on the CPU: of
    ranked documents, (Q, depth), and of all relevant ones, (Q, most)."""

    queries: Mapping[str, str]  # id -> text
    corpus: Mapping[str, str]  # id -> text
    gains: Mapping[str, Mapping[str, float]]  # query -> relevant document -> how relevant it is

    def relevant(self) -> Tensor:
        gains = [torch.tensor(list(documents.values())) for documents in self.gains.values()]
        return pad_sequence(gains, batch_first=True)

    def search(self, run: Run, task: PairTask, vectors: Callable[..., Tensor]) -> Tensor:
        """Rank all documents by the cosine similarity of ``vectors(model, inputs)``."""
        queries = encode_and_compute(run, task, [self.queries[name] for name in self.gains], ["text"], vectors)
        documents = encode_and_compute(run, task, list(self.corpus.values()), ["other"], vectors)
        position = {name: index for index, name in enumerate(self.corpus)}
        positions = []
        for gains in self.gains.values():
            positions.append(torch.tensor([position[name] for name in gains]))
        relevant = pad_sequence(positions, batch_first=True, padding_value=-1).to(run.device)
        return search(queries, documents, relevant, self.relevant().to(run.device), max(RECALL_AT)).cpu()

    def rerank(self, run: Run, task: PairTask, candidates: Path | None, scores: Callable[..., Tensor]) -> Tensor:
        """Rank candidates by ``scores(model, inputs)`` of pairs; equal ones in the order of the file. Without
        candidates, rank all documents."""
        if candidates is None:
            lists = dict.fromkeys(self.gains, list(self.corpus))
        else:
            lists = read_candidates(candidates, self.gains, self.corpus)
        pairs = []
        for query, names in lists.items():
            for name in names:
                pairs.append((self.queries[query], self.corpus[name]))
        computed = encode_and_compute(run, task, pairs, ["text", "other"], scores).cpu()
        by_query = torch.split(computed, [len(names) for names in lists.values()])
        ranked = []
        for (query, names), query_scores in zip(lists.items(), by_query, strict=True):
            gains = torch.tensor([self.gains[query].get(name, 0.0) for name in names])
            ranked.append(gains[query_scores.argsort(descending=True, stable=True)])
        return pad_sequence(ranked, batch_first=True)


def evaluate(run: Run, task: Any, split: str) -> dict[str, float]:
    """The metrics of a split; empty if ``qrels`` has no file of it. Every process calls it."""
    paths = [task.folder / "qrels" / name for name in FILES.get(split, ())]
    existing = [path for path in paths if path.is_file()]
    if not existing:
        return {}
    queries = read_texts(task.folder / "queries.jsonl")
    corpus = read_texts(task.folder / "corpus.jsonl")
    judged = Judged(queries, corpus, read_gains(existing[0], queries, corpus))
    metrics = measure(task.rank(run, judged), judged.relevant(), RECALL_AT)
    return {f"beir_{name}": float(value) for name, value in metrics.items()}


def encode_and_compute(
    run: Run, task: PairTask, rows: Sequence[Any], columns: list[str], compute: Callable[..., Tensor]
) -> Tensor:
    """``compute(model, inputs)`` of all rows, on every process: (rows, ...). A row is a text, or a tuple of the texts
    of several ``columns``."""
    arguments = task.encoding_arguments() | {"columns": columns}
    encoded = [np.array(row, np.int32) for row in task.encode(task.text_model.tokenizer, rows, arguments)]
    split = Split(np.concatenate(encoded), np.array([len(ids) for ids in encoded]))
    return compute_all(run, run.model, task.build_dataset(split, arguments), task.build_collator(run), compute)


def refuse(path: Path, number: int, line: str, expected: str) -> NoReturn:
    raise RecipeError(
        code="invalid-row", place=f"{path}, line {number}", found=repr(line[:80]), expected=str(expected)
    ) from None


def read_texts(path: Path) -> dict[str, str]:
    """Id -> title and text."""
    texts = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                texts[str(row["_id"])] = f"{row.get('title') or ''} {row['text']}".strip()
            except (ValueError, TypeError, KeyError, AttributeError):
                refuse(path, number, line, "an object with _id and text")
    return texts


def read_gains(path: Path, queries: Mapping[str, str], corpus: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Query -> relevant document -> how relevant it is."""
    gains: dict[str, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        try:
            query, document, text = line.split("\t")
            gain = float(text)
            is_known = query in queries and document in corpus
        except ValueError:
            is_known = False
        if not is_known:
            refuse(path, number, line, "the id of a query, that of a document and a number, divided by tabs")
        if gain > 0:
            gains.setdefault(query, {})[document] = gain
    return gains


def read_candidates(path: Path, queries: Collection[str], corpus: Collection[str]) -> dict[str, list[str]]:
    """Query -> documents to rank, in the order of a file in the format of trec_eval: a query, ``Q0``, a document, its
    rank and score, and a name on each line. Lines of other queries are ignored."""
    candidates: dict[str, list[str]] = {query: [] for query in queries}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fields = line.split()
        if len(fields) != 6 or fields[2] not in corpus:
            refuse(path, number, line, "a query, Q0, a document of the corpus, its rank, its score and a name")
        query = fields[0]
        document = fields[2]
        if query in candidates:
            candidates[query].append(document)
    if not any(candidates.values()):
        raise RecipeError(
            f"found no document for the {len(candidates)} queries with relevant ones.",
            code="empty-file",
            place=str(path),
            remedy="Name another.",
        )
    return candidates

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
        return pad_sequence([torch.tensor([*known.values()]) for known in self.gains.values()], batch_first=True)

    def search(self, run: Run, task: PairTask, vectors: Callable[..., Tensor]) -> Tensor:
        """Rank all documents by the cosine similarity of ``vectors(model, inputs)``."""
        queries = encode_and_compute(run, task, [self.queries[name] for name in self.gains], ["text"], vectors)
        documents = encode_and_compute(run, task, [*self.corpus.values()], ["other"], vectors)
        places = {name: place for place, name in enumerate(self.corpus)}
        parts = [torch.tensor([places[name] for name in known]) for known in self.gains.values()]
        relevant = pad_sequence(parts, batch_first=True, padding_value=-1).to(run.device)
        return search(queries, documents, relevant, self.relevant().to(run.device), max(RECALL_AT)).cpu()

    def rerank(self, run: Run, task: PairTask, candidates: Path | None, scores: Callable[..., Tensor]) -> Tensor:
        """Rank candidates by ``scores(model, inputs)`` of pairs; equal ones in the order of the file. Without
        candidates, rank all documents."""
        every = dict.fromkeys(self.gains, [*self.corpus])
        lists = every if candidates is None else read_candidates(candidates, self.gains, self.corpus)
        pairs = [(self.queries[query], self.corpus[name]) for query, names in lists.items() for name in names]
        parts = encode_and_compute(run, task, pairs, ["text", "other"], scores).cpu().split([*map(len, lists.values())])
        gains = [torch.tensor([self.gains[query].get(name, 0.0) for name in names]) for query, names in lists.items()]
        found = [gain[part.argsort(descending=True, stable=True)] for gain, part in zip(gains, parts, strict=True)]
        return pad_sequence(found, batch_first=True)


def evaluate(run: Run, task: Any, split: str) -> dict[str, float]:
    """The metrics of a split; empty if ``qrels`` has no file of it. Every process calls it."""
    paths = (task.folder / "qrels" / name for name in FILES.get(split, ()))
    if (path := next((path for path in paths if path.is_file()), None)) is None:
        return {}
    queries, corpus = (read_texts(task.folder / f"{name}.jsonl") for name in ("queries", "corpus"))
    judged = Judged(queries, corpus, read_gains(path, queries, corpus))
    metrics = measure(task.rank(run, judged), judged.relevant(), RECALL_AT)
    return {f"beir_{name}": float(value) for name, value in metrics.items()}


def encode_and_compute(
    run: Run, task: PairTask, rows: Sequence[Any], columns: list[str], compute: Callable[..., Tensor]
) -> Tensor:
    """``compute(model, inputs)`` of all rows, on every process: (rows, ...). A row is a text, or a tuple of the texts
    of several ``columns``."""
    arguments = task.encoding_arguments() | {"columns": columns}
    encoded = [np.array(row, np.int32) for row in task.encode(task.text_model.tokenizer, rows, arguments)]
    split = Split(np.concatenate(encoded), np.array([*map(len, encoded)]))
    return compute_all(run, run.model, task.build_dataset(split, arguments), task.build_collator(run), compute)


def refuse(path: Path, number: int, line: str, expected: str) -> NoReturn:
    raise RecipeError(
        code="invalid-row", place=f"{path}, line {number}", found=repr(line[:80]), expected=str(expected)
    ) from None


def read_texts(path: Path) -> dict[str, str]:
    """Id -> title and text."""
    found = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                found[str(row["_id"])] = f"{row.get('title') or ''} {row['text']}".strip()
            except (ValueError, TypeError, KeyError, AttributeError):
                refuse(path, number, line, "an object with _id and text")
    return found


def read_gains(path: Path, queries: Mapping[str, str], corpus: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Query -> relevant document -> how relevant it is."""
    found: dict[str, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        try:
            query, document, gain = line.split("\t")
            known, value = query in queries and document in corpus, float(gain)
        except ValueError:
            known = False
        if not known:
            refuse(path, number, line, "the id of a query, that of a document and a number, divided by tabs")
        if value > 0:
            found.setdefault(query, {})[document] = value
    return found


def read_candidates(path: Path, queries: Collection[str], corpus: Collection[str]) -> dict[str, list[str]]:
    """Query -> documents to rank, in the order of a file in the format of trec_eval: a query, ``Q0``, a document, its
    rank and score, and a name on each line. Lines of other queries are ignored."""
    found: dict[str, list[str]] = {query: [] for query in queries}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        query, _, document, *more = parts if len(parts := line.split()) == 6 else [""] * 3
        if not more or document not in corpus:
            refuse(path, number, line, "a query, Q0, a document of the corpus, its rank, its score and a name")
        if query in found:
            found[query].append(document)
    if not any(found.values()):
        raise RecipeError(
            f"found no document for the {len(found)} queries with relevant ones.",
            code="empty-file",
            place=str(path),
            remedy="Name another.",
        )
    return found

"""Search in a collection of documents in the layout of BEIR: Thakur et al., 2021, https://arxiv.org/abs/2104.08663.

The folder has ``corpus.jsonl`` (``_id``, ``text``, maybe ``title``), ``queries.jsonl`` (``_id``, ``text``) and
``qrels/``, whose files have, after a header, lines of a query, a document and how relevant it is, divided by tabs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fastloop import RecipeError
from fastloop_plugins.text import Split, TextTask
from torch import Tensor

from fastloop_embeddings.metrics import rank

if TYPE_CHECKING:
    from fastloop import Run

FILES = {"validation": ("dev.tsv", "validation.tsv"), "test": ("test.tsv",)}
"""Split of the recipe -> names of its file in ``qrels``."""
RECALL_AT = (1, 10, 100)


def search(run: Run, task: TextTask, folder: Path, split: str, vectors: Callable[..., Tensor]) -> dict[str, float]:
    """The metrics of a split; empty if ``qrels`` has no file of it. Every process calls it.

    ``vectors(model, inputs)`` computes the vector of each text. Raises ``RecipeError`` for a line of another layout.
    """
    paths = (folder / "qrels" / name for name in FILES.get(split, ()))
    if (path := next((path for path in paths if path.is_file()), None)) is None:
        return {}
    queries, corpus = (read_texts(folder / f"{name}.jsonl") for name in ("queries", "corpus"))
    pairs = read_pairs(path, queries, corpus)
    used = dict.fromkeys(query for query, _ in pairs)
    places = [{name: place for place, name in enumerate(names)} for names in (used, corpus)]
    texts = [queries[name] for name in used], [*corpus.values()]
    found = [compute_all(run, task, each, vectors) for each in texts]
    relevant = torch.tensor([[known[name] for known, name in zip(places, pair, strict=True)] for pair in pairs])
    gains = torch.tensor([*pairs.values()])
    metrics = rank(*found, relevant.to(run.device), gains.to(run.device), RECALL_AT)
    return {f"beir_{name}": float(value) for name, value in metrics.items()}


def compute_all(run: Run, task: TextTask, texts: list[str], compute: Callable[..., Tensor]) -> Tensor:
    """``compute(model, inputs)`` of all texts, on every process: (texts, ...). Processes share the batches."""
    arguments = task.encoding_arguments() | {"columns": ["text"]}
    encoded = [np.array(row, np.int32) for row in task.encode(task.text_model.tokenizer, texts, arguments)]
    lengths = np.array([*map(len, encoded)])
    samples = task.build_dataset(Split(np.concatenate(encoded), lengths), arguments)
    processes, collate, training = run.loaders.processes, task.build_collator(run), run.model.training
    size = run.recipe.train.eval_batch_size or run.loaders.micro_batch_size
    batches = np.array_split(np.argsort(lengths, kind="stable"), -(-len(samples) // size))
    steps = range(processes.rank, -(-len(batches) // processes.world_size) * processes.world_size, processes.world_size)
    result: Any = None
    run.model.eval()
    with torch.no_grad():
        for place in steps:  # as many on each process: one without a batch of its own repeats another
            batch = batches[place % len(batches)]
            inputs = collate([samples[int(index)] for index in batch]).inputs
            found = compute(run.model, {name: value.to(run.device) for name, value in inputs.items()})
            result = found.new_zeros(len(samples), *found.shape[1:]) if result is None else result
            if place < len(batches):
                result[torch.from_numpy(batch).to(run.device)] = found
    run.model.train(training)
    return result if processes.world_size == 1 else processes.all_reduce_mean(result) * processes.world_size


def read_texts(path: Path) -> dict[str, str]:
    """Id -> title and text."""
    found = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                found[str(row["_id"])] = f"{row.get('title') or ''} {row['text']}".strip()
            except (ValueError, TypeError, KeyError, AttributeError):
                raise RecipeError(f"{path}, line {number}: expected an object with _id and text.") from None
    return found


def read_pairs(path: Path, queries: Mapping[str, str], corpus: Mapping[str, str]) -> dict[tuple[str, str], float]:
    """Query and relevant document -> how relevant it is."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], 2):
        try:
            query, document, gain = line.split("\t")
            known = query in queries and document in corpus
            found[query, document] = float(gain)
        except ValueError:
            known = False
        if not known:
            expected = "the id of a query, that of a document and a number, divided by tabs"
            raise RecipeError(f"{path}, line {number}: found {line[:80]!r}, expected {expected}.")
    return {pair: gain for pair, gain in found.items() if gain > 0}

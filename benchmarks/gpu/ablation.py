"""Command 2: the speedup of each plugin on a GPU, and the duration of the complete published job.

    bash benchmarks/gpu/all.sh ablation

* The work: DistilBERT's architecture (66M parameters, random weights) on IMDB's reviews as BERT's tokenizer cuts them,
  512 tokens at most. It trains by AdamW at 5e-5, 12 reviews a step, with the model's dropout. The baseline is fp32
  without TF32, every review padded to 512.
* A variant adds to the one that it names in ``over``. All see the same reviews, drawn evenly over all lengths.
* Each variant is a process that is started and warmed up once. Its windows are whole epochs over these reviews, with
  the device synchronized at both ends. Rounds are interleaved, A B C, C B A; ratios are formed inside a round.
* Before the first round, 20 steps of the recipe and of the baseline count the waits for the device, and 20 more record
  the kernels.
* ``auto`` has the plugins that the plugin ``auto`` selects for the recipe ``distilbert_imdb`` on an H200. A variant
  with the same plugins as an earlier one is not measured again.
* After the first round, a variant is dropped if its speed is below nine tenths of the variant that it extends.
* The whole job: the fastest variant of 12 reviews a step trains 3 epochs of 35,000 reviews, and evaluates 5,000 after
  each. A fresh process goes from token ids to the written model: with an empty folder of compiled code (cold), and with
  the one that this run left (warm).
* Accuracy: pretrained MiniLM-L6 trains one epoch with the baseline and with the fastest variant.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from _measure import rounds
from _reviews import save, spread
from _suite import (
    DATA,
    Budget,
    Failure,
    Records,
    command_budget,
    facts,
    find_device,
    options,
    read_reviews,
    record_ceilings,
    scratch,
    select_on_h200,
)
from _workers import (
    Worker,
    chunks,
    held_at_once,
    measure,
    probe,
    workers,
)

from fastloop.recipe import load_recipe

BATCH = 12
EPOCHS = 3
WORKER_BYTES = 10 * 2**30
"""Memory of the GPU that a worker needs: 3.3 GiB of tensors at the peak of ``batch-48``, the pools of its CUDA graphs,
and the context."""
HELD = 8
"""Workers at once on a large GPU, each with about 5 GiB of the host's memory and one core."""
PAYS = 0.9
"""After the first round, variants below this ratio to their base variant are dropped."""
AMP: dict[str, Any] = {"amp": {"dtype": "bf16"}}
BUCKETS: dict[str, Any] = {"length-bucketing": {}}
PREFETCH: dict[str, Any] = {"device-prefetch": {}}
WORKERS: dict[str, Any] = {"dataloader-workers": {"num_workers": 2}}
OPTIMIZER: dict[str, Any] = {"fused-optimizer": {}}
FIRST: dict[str, Any] = {"cls-last-layer": {}}
COMPILE: dict[str, Any] = {"compile": {}}
GRAPHS: dict[str, Any] = {"compile": {"mode": "reduce-overhead"}}


def recipe_plugins() -> dict[str, Any]:
    """The plugins of the recipe ``distilbert_imdb_gpu``, without those that save checkpoints."""
    listed = load_recipe("distilbert_imdb_gpu").plugins
    return {
        name: options or {} for name, options in listed.items() if options is not False and name != "checkpoint-best"
    }


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A set of plugins.

    Attributes:
        over: The base variant, whose speed it is compared with.
        plugins: Name -> options.
        environment: Environment variables of its process.
        cuda: Whether it needs a CUDA device.
    """

    over: str = "baseline"
    plugins: Mapping[str, Any] = field(default_factory=dict)
    padding: str = "longest"
    batch_size: int = BATCH
    environment: Mapping[str, str] = field(default_factory=dict)
    cuda: bool = False


def auto_plugins() -> dict[str, Any]:
    """The plugins that ``auto`` selects for the recipe ``distilbert_imdb`` on an H200."""
    recipe = load_recipe("distilbert_imdb")
    return select_on_h200(
        replace(recipe, plugins={name: given for name, given in recipe.plugins.items() if name != "auto"})
    )


EAGER = AMP | BUCKETS | PREFETCH | OPTIMIZER | FIRST
PACKED = AMP | {"packing": {}} | PREFETCH | OPTIMIZER | FIRST
VARIANTS: dict[str, Variant] = {
    "baseline": Variant(padding="max_length"),
    "tf32": Variant(plugins={"amp": {"dtype": "fp32", "fp32_matmul": "high"}}, padding="max_length", cuda=True),
    "bf16": Variant(plugins=AMP, padding="max_length"),
    "bucketing": Variant(over="bf16", plugins=AMP | BUCKETS),
    "device-prefetch": Variant(over="bucketing", plugins=AMP | BUCKETS | PREFETCH),
    "fused-optimizer": Variant(over="device-prefetch", plugins=AMP | BUCKETS | PREFETCH | OPTIMIZER),
    "cls-last-layer": Variant(over="fused-optimizer", plugins=EAGER),
    "compile": Variant(over="cls-last-layer", plugins=EAGER | COMPILE),
    "graphs": Variant(over="compile", plugins=EAGER | GRAPHS),
    "packing": Variant(over="cls-last-layer", plugins=PACKED),
    "packing-compile": Variant(over="packing", plugins=PACKED | {"compile": {}}),
    "packing-graphs": Variant(over="packing-compile", plugins=recipe_plugins()),
    "auto": Variant(over="packing-compile", plugins=auto_plugins()),
    "workers": Variant(over="packing-graphs", plugins=recipe_plugins() | WORKERS, cuda=True),
    "step-graph": Variant(over="packing-graphs", plugins=recipe_plugins() | COMPILE | {"step-graph": {}}, cuda=True),
    "no-cudnn-attention": Variant(
        over="graphs", plugins=EAGER | GRAPHS, environment={"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    ),
    "batch-48": Variant(over="packing-graphs", plugins=recipe_plugins(), batch_size=48),
}
"""``packing-graphs`` is the recipe ``distilbert_imdb_gpu``, with CUDA graphs of forward and backward. ``step-graph``
records whole steps instead. ``workers`` reads in worker processes instead of a thread."""
RECIPE = "packing-graphs"
JOB_SECONDS = 200.0
"""Seconds that are reserved for the whole job."""
CUDA_ALONE = ("tf32", "packing-graphs", "workers", "step-graph", "no-cudnn-attention")
"""Variants that differ from others only on CUDA."""


def shrunk(variant: Variant) -> Variant:
    """A variant for ``--tiny``: the compiler captures and differentiates it, but compiles no kernels, which takes
    minutes on a busy CPU."""
    if "compile" not in variant.plugins:
        return variant
    return replace(
        variant,
        plugins={
            **variant.plugins,
            "compile": {**variant.plugins["compile"], "backend": "aot_eager", "mode": "default"},
        },
    )


def repeated(chosen: Mapping[str, Variant]) -> dict[str, str]:
    """Variants that have the same plugins, batches and environment as an earlier one: name -> the earlier one."""
    same: dict[str, str] = {}
    for name, other in combinations(chosen, 2):
        if other not in same and replace(chosen[name], over="") == replace(chosen[other], over=""):
            same[other] = name
    return same


def probed_variants(names: Sequence[str]) -> list[str]:
    """The variants whose waits and kernels are recorded: the recipe, or else the last variant, and the baseline."""
    first = [RECIPE] if RECIPE in names else list(names[-1:])
    return first + [name for name in names if name == "baseline" and name not in first]


def spec(variant: Variant, reviews: Path, work: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The specification of a worker. ``work`` holds the parts that are the same for all."""
    plugins = [{name: dict(given)} for name, given in variant.plugins.items()]
    given = {
        "arm": "fastloop",
        "reviews": str(reviews),
        "plugins": plugins,
        "padding": variant.padding,
        "batch_size": variant.batch_size,
    }
    return {**work, **given, **more}


def job(
    name: str,
    given: Mapping[str, Any],
    compiled: Path,
    folder: Path,
    records: Records,
    budget: Budget,
    expected: float,
    **notes: Any,
) -> bool:
    """Train and evaluate in a fresh process, from its start to its end; returns whether that worked."""
    if not budget.fits(expected):
        records.skip(name, "job", expected, budget)
        return False
    started = time.monotonic()
    worker = Worker(name, given, folder, {"TORCHINDUCTOR_CACHE_DIR": str(compiled)})
    try:
        result = worker.ask("job", budget.left() - 2)
        worker.process.wait(max(budget.left(), 1))
    except Failure as error:
        records.failure(name, "job", error, worker.log, budget)
        return False
    except subprocess.TimeoutExpired:
        records.cut(name, "job", budget)
        return False
    finally:
        worker.stop()
    seconds = time.monotonic() - started
    spans = ", ".join(f"{span} {result[f'{span}_seconds']:.1f}" for span in ("startup", "compile", "train", "evaluate"))
    shown = f"{seconds:.1f} s from start to end: {spans}; accuracy {result['validation']['accuracy']:.3f}"
    records.add("job", shown, name=name, wall_seconds=seconds, **notes, **result)
    return True


def speeds(records: Records) -> dict[str, float]:
    """Variant -> median samples a second so far."""
    by_name: dict[str, list[float]] = {}
    for line in records.lines:
        if line["kind"] == "measure":
            by_name.setdefault(line["name"], []).append(line["samples_per_second"])
    return {name: statistics.median(values) for name, values in by_name.items()}


def run_rounds(
    chosen: Mapping[str, Variant],
    settings: argparse.Namespace,
    specs: Any,
    folder: Path,
    records: Records,
    budget: Budget,
    kept: float,
    probed: Sequence[str],
) -> None:
    """Run windows of all variants, round by round, after the probes of some.

    Args:
        kept: Seconds reserved for the later parts.
        probed: Names of the variants that are probed.
    """
    for names in chunks(chosen, settings.hold):
        with workers({name: specs[name] for name in names}, folder, records, budget, settings.parallel) as ready:
            probe(ready, [name for name in probed if name in names], records, budget, kept)
            last = 0
            for number, name in rounds(names, settings.rounds):
                if number == 1 and last == 0:
                    drop(names, chosen, ready, records)
                last = number
                measure(ready, name, "measure", records, budget, kept if number else 0.0, round=number)


def drop(names: list[str], chosen: Mapping[str, Variant], ready: dict[str, Worker], records: Records) -> None:
    """End the workers of variants that are too slow."""
    speed_of = speeds(records)
    candidates = [name for name in names if name in ready and name != "baseline"]
    for name in candidates:
        other = chosen[name].over
        if other in speed_of and name in speed_of and speed_of[name] < PAYS * speed_of[other]:
            records.add(
                "dropped",
                f"{speed_of[name] / speed_of[other]:.2f} of {other}",
                name=name,
                over=other,
                ratio=speed_of[name] / speed_of[other],
            )
            ready.pop(name).stop()


def main() -> None:
    """Run the rounds and the jobs."""

    def prepare(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--variants", nargs="+", choices=list(VARIANTS), help="default: all; tiny: those that differ on a CPU"
        )
        parser.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
        parser.add_argument("--steps", type=int, help="steps of 12 a window (default 192)")
        parser.add_argument(
            "--hold", type=int, help="workers that are held at once (default: by the memory of the GPU; 4 on a CPU)"
        )
        parser.add_argument("--jobs", action=argparse.BooleanOptionalAction, default=True, help="whole jobs too")
        parser.add_argument("--parallel", type=int, help="workers that start at once (default: half of the cores)")

    settings = options(__doc__, prepare)
    budget = command_budget(settings.seconds)
    records = Records(settings.results / "gpu-ablation.jsonl")
    device = find_device()
    cuda = device == "cuda"
    machine = facts(device)
    settings.rounds = settings.rounds or (1 if settings.tiny else 3)
    settings.hold = settings.hold or held_at_once(machine.get("memory_bytes"), WORKER_BYTES, HELD)
    settings.parallel = settings.parallel or max(2, (os.cpu_count() or 2) // 2)
    steps = settings.steps or (4 if settings.tiny else 192)
    model = "tiny" if settings.tiny else "distilbert"
    records.add("facts", **machine, tiny=settings.tiny, steps=steps, model=model)
    names = settings.variants or [name for name in VARIANTS if not settings.tiny or name not in CUDA_ALONE]
    chosen = {name: shrunk(VARIANTS[name]) if settings.tiny else VARIANTS[name] for name in names}
    needing_cuda = [name for name in chosen if chosen[name].cuda]
    for name in needing_cuda if not cuda else ():
        records.add("skipped", name=name, why="needs CUDA")
        chosen.pop(name)

    for name, other in repeated(chosen).items():
        records.add("skipped", name=name, why=f"it has the same plugins as {other}")
        chosen.pop(name)

    with scratch() as folder:
        record_ceilings(records, device, 0.2 if settings.tiny else 1.5)
        splits, longest = read_reviews(35_000, settings.tiny)
        work = {"model": model, "device": device, "max_length": longest}
        probed = probed_variants(list(chosen))
        windowed = folder / "window.npz"
        save(windowed, train=splits["train"].keep(spread(splits["train"].lengths, steps * BATCH, seed=0)))
        whole = folder / "whole.npz"
        save(whole, **splits)
        shared = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        trace = str(settings.results / "gpu-trace.json.gz")
        specs = {}
        for name, variant in chosen.items():
            given = spec(variant, windowed, work, trace=trace if name in probed[:1] else None)
            warmups = 2 if "compile" in variant.plugins else 1
            specs[name] = (given, {**shared, **variant.environment}, warmups)
        kept = 0.0 if settings.tiny or not settings.jobs else JOB_SECONDS
        run_rounds(chosen, settings, specs, folder, records, budget, kept, probed)

        speed_of = speeds(records)
        candidates = [name for name in speed_of if chosen[name].batch_size == BATCH and not chosen[name].environment]
        candidates.sort(key=speed_of.__getitem__)  # the fastest last
        total = EPOCHS * (len(splits["train"]) + len(splits["validation"]) / 3)
        if candidates and settings.jobs:
            best = candidates[-1]
            given = spec(chosen[best], whole, work, job=EPOCHS)
            training = total / speed_of[best]
            fresh = folder / "job-cache"
            if job("job-cold", given, fresh, folder, records, budget, training + 45, variant=best, cache="cold"):
                job("job-warm", given, fresh, folder, records, budget, training + 20, variant=best, cache="warm")
            elif len(candidates) > 1:
                second = spec(chosen[candidates[-2]], whole, work, job=EPOCHS)
                job(
                    "job-second",
                    second,
                    fresh,
                    folder,
                    records,
                    budget,
                    training + 60,
                    variant=candidates[-2],
                    cache="cold",
                )
            small = str(DATA / "minilm") if (DATA / "minilm").exists() and not settings.tiny else model
            for name in dict.fromkeys((best, "baseline")):
                if name in speed_of:  # MiniLM needs an eighth of DistilBERT's computation
                    expected = len(splits["train"]) / speed_of[name] / (1 if settings.tiny else 4) + 40
                    quality = spec(chosen[name], whole, work, model=small, job=1)
                    job(
                        f"accuracy-{name}",
                        quality,
                        fresh,
                        folder,
                        records,
                        budget,
                        expected,
                        variant=name,
                        cache="other model",
                    )

    from report import show_ablation

    print(f"\n{show_ablation(records.lines)}\n{records.path}")
    sys.exit(any(line["kind"] == "error" for line in records.lines))


if __name__ == "__main__":
    main()

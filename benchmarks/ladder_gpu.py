"""DistilBERT on a GPU: what each plugin adds to the one before, and how long the whole published job then takes.

    python3 benchmarks/ladder_gpu.py                 # under ten minutes on one CUDA device; no network, fastloop need not be installed
    python3 benchmarks/ladder_gpu.py --ends --repeats 3 --minutes 15     # the factor of the whole set alone; for a CPU
    python3 benchmarks/ladder_gpu.py --tiny          # a test of the script itself

* The model: DistilBERT's architecture, 66M parameters, random weights. The data: generated texts, as long as IMDB's reviews are in tokens
  (the lengths' quantiles are in ``LENGTHS``), cut at 512. AdamW at 5e-5, batch 12, dropout as the model has it.
* The first rung is fp32 with TF32 off and everything padded to 512. A rung is the one before and one plugin more; the last on a GPU takes
  another batch size, so it trains differently.
* A rung is a fresh process that trains a few epochs over ``--steps`` batches of 12 (three on a GPU, so that shapes are compiled; two on a
  CPU) and measures the last; all rungs see the same texts. Peak memory is that of the last epoch (on a CPU: of the process). Rounds are
  interleaved, up and down the rungs; ratios are formed inside a round, their median is reported with a 95% percentile bootstrap interval.
* The whole job: 3 epochs of 35,000 texts with an evaluation of 5,000 after each: seconds from the start of the process to its end, reading,
  tokenizing, compiling and writing the model included.

Rounds begin while there is time (``--minutes``); the results are written after each process. What a rung fails with is in the results too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    ROOT,
    caution,
    load,
    machine,
    memory,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    spawn,
    table,
    version,
    write,
    write_section,
)

LENGTHS = (14, 86, 122, 147, 158, 168, 178, 188, 204, 218, 236, 256, 277, 305, 338, 384, 437, 512, 512, 512, 512)
"""Tokens of IMDB's reviews by a BERT tokenizer, cut at 512: the quantiles 0%, 5%, ..., 100%."""
VOCABULARY, BATCH, LARGE_BATCH, EVAL_BATCH = 30_522, 12, 48, 96
MODEL: dict[str, Any] = {"model_type": "distilbert", "vocab_size": VOCABULARY}
TINY: dict[str, Any] = MODEL | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
NAMED_BATCH = f"batch {LARGE_BATCH}"
GPU_RUNGS: dict[str, Any] = {
    "baseline": None,
    "amp": {"dtype": "bf16"},
    "length-bucketing": {},
    "fused-optimizer": {},
    "compile": {},
    "attention": {},
    "first-token": {},
    "matmul-precision": {},
    "memory": {},
    NAMED_BATCH: None,
}
CPU_RUNGS: dict[str, Any] = {
    "baseline": None,
    "amp": {"dtype": "bf16"},
    "length-bucketing": {},
    "fused-optimizer": {},
    "attention": {},
    "fast-dropout": {},
    "first-token": {},
    "memory": {},
}
NEEDED = (
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "omegaconf",
    "packaging",
    "pluggy",
    "pydantic",
    "pyyaml",
    "safetensors",
    "torchmetrics",
)
"""Of fastloop's dependencies, those that this work loads."""
DISTRIBUTIONS = ("torch", "transformers", "accelerate", "fastloop")


# -- a rung, in a process of its own -----------------------------------------------------------------------------------------


def recipe(rung: str, folder: Path, files: dict[str, str], epochs: int, tiny: bool, cuda: bool) -> dict[str, Any]:
    """The recipe of a rung."""
    names = list(GPU_RUNGS if cuda else CPU_RUNGS)
    listed = {name: (GPU_RUNGS if cuda else CPU_RUNGS)[name] for name in names[: names.index(rung) + 1]}
    return {
        "model": {"config": TINY if tiny else MODEL, "tokenizer": {"kind": "word", "vocab_size": VOCABULARY}},
        "data": {
            "module": f"{__file__}:read",
            "arguments": {"files": {split: str(folder / file) for split, file in files.items()}},
            "label": "label",
            "max_length": 512,
            "padding": "longest" if "length-bucketing" in listed else "max_length",
            "held_out": 0.0,
        },
        "train": {
            "epochs": epochs,
            "batch_size": LARGE_BATCH if rung == NAMED_BATCH else BATCH,
            "eval_batch_size": EVAL_BATCH,
            "lr": 5e-5,
            "save_every": None,
            "device": "auto" if cuda else "cpu",
        },
        "plugins": [{name: options} for name, options in listed.items() if options is not None] + [{"progress": False}],
        "output": str(folder / f"run-{os.getpid()}"),
    }


def read(files: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The texts of each split. Not ``data.files``: that needs pyarrow."""
    return {split: [json.loads(line) for line in Path(file).open()] for split, file in files.items()}


def work(rung: str, folder: Path, job: bool, tiny: bool, cuda: bool) -> dict[str, Any]:
    """Train in this process."""
    from fastloop import Plugin, hookimpl, launch
    from fastloop.recipe import make_recipe
    from fastloop.registry import resolve, select

    files = {"train": "job.jsonl", "validation": "validation.jsonl"} if job else {"train": "rungs.jsonl"}
    made = make_recipe(recipe(rung, folder, files, 3 if job or cuda else 2, tiny, cuda))
    launch.start_again(select(made).environment(made))  # as `fastloop train` does, before it loads anything
    import torch

    from fastloop.run import Run

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False

    class Epochs(Plugin):
        name = "epochs"
        seconds: list[float] = []
        losses: list[Any] = []
        tokens = 0

        @hookimpl
        def before_epoch(self, run: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self.tokens, self.started = run.state.tokens, time.perf_counter()

        @hookimpl
        def after_step(self, loss: Any) -> None:
            self.losses.append(loss)

        @hookimpl
        def after_epoch(self, run: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)
            self.tokens = run.state.tokens - self.tokens

    epochs = Epochs()
    run = Run(made, resolve(made, objects=[epochs]))
    samples = len(run.datasets["train"])
    summary = run.execute()
    losses = [float(loss) for loss in epochs.losses]
    part = max(len(losses) // 10, 1)
    kept = ("startup_seconds", "compile_seconds", "train_seconds", "evaluate_seconds", "evaluate", "compile", "memory", "plugins")
    return {
        "rung": rung,
        "samples_per_second": samples / epochs.seconds[-1],
        "tokens_per_second": epochs.tokens / epochs.seconds[-1],
        "epoch_seconds": epochs.seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else memory("VmHWM"),
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "first_loss": statistics.fmean(losses[:part]),
        "last_loss": statistics.fmean(losses[-part:]),
        "parameters": sum(parameter.numel() for parameter in run.unwrapped().parameters()),
        "device": torch.cuda.get_device_name() if cuda else None,
    } | {key: summary[key] for key in kept if key in summary}


# -- all of them -------------------------------------------------------------------------------------------------------------


def write_texts(path: Path, count: int, seed: int) -> None:
    """Texts of two kinds, told apart by a few of their words; lengths as evenly spread over ``LENGTHS`` as their number allows."""
    import numpy as np

    chance = np.random.default_rng(seed)
    words = np.array([f"w{number}" for number in range(VOCABULARY - 10)])
    common = 1 / np.arange(10, len(words) + 10)  # as words are in any language: few make up most of a text
    edges = np.cumsum(common / common.sum())
    spread = np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(LENGTHS)), LENGTHS)
    with path.open("w") as file:
        for index, length in enumerate(chance.permutation(spread.astype(int) - 2)):  # less the two tokens that the tokenizer adds
            label = index % 2
            ids = np.minimum(np.searchsorted(edges, chance.random(length)), len(words) - 1)
            telling = chance.random(length) < 0.05
            side = np.where(chance.random(length) < 0.8, label, 1 - label)
            ids = np.where(telling, 100 + 100 * side + chance.integers(0, 100, length), ids)
            file.write(json.dumps({"text": " ".join(words[ids]), "label": label}) + "\n")


def install(folder: Path) -> str:
    """Metadata that lets plugins be found in this checkout as if it were installed; returns the PYTHONPATH for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"fastloop-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fastloop\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    return os.pathsep.join(filter(None, [str(folder), str(ROOT / "core"), str(ROOT / "plugins"), os.environ.get("PYTHONPATH")]))


def check_packages() -> None:
    """Say which of fastloop's dependencies are missing, and end when one of them is needed here."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=!~;\[ ]", line, maxsplit=1)[0] for line in listed]
    missing = [name for name in names if version(name) is None]
    needed = [name for name in missing if name in NEEDED]
    if rest := [name for name in missing if name not in NEEDED]:
        print(f"Not installed, and not needed here: {', '.join(rest)}")
    if needed:
        sys.exit(
            f"Not installed, and needed: {', '.join(needed)}. Put them into a folder where there is a network, "
            f"`pip install --target extra {' '.join(needed)}`, for this Python ({sys.version_info[0]}.{sys.version_info[1]}), "
            "bring it here, and start again with PYTHONPATH=extra."
        )


def pairs(found: dict[str, dict[int, dict[str, Any]]], ours: str, theirs: str) -> dict[str, Any] | None:
    """The ratio of two rungs over the rounds that have both."""
    both = sorted(found[ours].keys() & found[theirs].keys())
    if not both or ours == theirs:
        return None
    return ratio(*([found[rung][number]["samples_per_second"] for number in both] for rung in (ours, theirs)))


def summarise(found: dict[str, dict[int, dict[str, Any]]]) -> tuple[list[dict[str, Any]], str]:
    """Each rung's figures over the rounds, and the same as a table."""
    rungs = [rung for rung in found if found[rung]]
    rows, lines = [], []
    for index, rung in enumerate(rungs):
        medians = {
            key: statistics.median(one[key] for one in found[rung].values())
            for key in ("samples_per_second", "tokens_per_second", "peak_bytes", "startup_seconds")
        }
        compile_seconds = [one["compile_seconds"] for one in found[rung].values()]
        over = {"over_baseline": pairs(found, rung, rungs[0]), "over_previous": pairs(found, rung, rungs[max(index - 1, 0)])}
        rows.append({"rung": rung, "compile_seconds": compile_seconds, **medians, **over})
        lines.append(
            [
                rung,
                f"{medians['samples_per_second']:.1f}",
                f"{medians['tokens_per_second']:.0f}",
                *(show_ratio(value) if value else "" for value in over.values()),
                f"{medians['peak_bytes'] / 2**20:.0f}",
                f"{max(compile_seconds):.0f}" if max(compile_seconds) else "",
            ]
        )
    head = ["rung", "samples/s", "real tokens/s", "over the first", "over the one before", "peak MiB", "compile s, at most"]
    return rows, table(head, lines)


def main() -> None:
    """Run all rungs and the job and report, or be one process of one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="no process begins that would end later (default 9)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds at most (default 5)")
    parser.add_argument("--steps", type=int, help="batches of 12 an epoch of a rung (default: 96 on a GPU, 6 on a CPU)")
    parser.add_argument("--job", type=int, help="texts of the whole job; 0 leaves it out (default: 35000 on a GPU, 0 on a CPU)")
    parser.add_argument("--ends", action="store_true", help="the first rung and the whole set only")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, few steps, one round: to test this script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone")
    parser.add_argument("--rung", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cuda", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rung:
        print(json.dumps(work(options.rung, options.folder, options.whole, options.tiny, options.cuda)))
        return
    started = time.perf_counter()
    check_packages()
    import torch

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "cpu"
    rungs = list(GPU_RUNGS if cuda else CPU_RUNGS)
    jobs = rungs[-2:] if cuda else rungs[-1:]
    listed = rungs[1:]
    if options.ends:
        rungs = [rungs[0], *jobs]
    steps = options.steps or (4 if options.tiny else 96 if cuda else 6)
    texts = options.job if options.job is not None else 96 if options.tiny else 35_000 if cuda else 0
    found: dict[str, dict[int, dict[str, Any]]] = {rung: {} for rung in rungs}
    whole: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    facts = machine(*DISTRIBUTIONS) | {"device": device}

    def results() -> dict[str, Any]:
        every = [one for numbers in found.values() for one in numbers.values()]
        return {
            "machine": facts,
            "steps": steps,
            "tiny": options.tiny,
            "seconds": time.perf_counter() - started,
            "load": load(every),
            "summary": summarise(found)[0],
            "job": whole,
            "failures": failures,
            "rounds": found,
        }

    def save() -> Path:
        return write(f"ladder_{re.sub('[^a-z0-9]+', '_', device.lower())}", results(), options.results)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "path"
        path.mkdir()
        environment = {"PYTHONPATH": install(path), "HF_HUB_OFFLINE": "1"}
        write_texts(folder / "rungs.jsonl", steps * BATCH, 0)

        plan = [(number, rung, False) for number, rung in rounds(rungs, 1 if options.tiny else options.repeats)]
        if texts:  # after the first round: what is left of the time goes to more rounds
            plan[len(rungs) : len(rungs)] = [(0, rung, True) for rung in jobs]
            write_texts(folder / "job.jsonl", texts, 1)
            write_texts(folder / "validation.jsonl", texts // 7, 2)
        for number, rung, job in plan:
            needed = found[rung][0]["wall_seconds"] if 0 in found[rung] and not job else 10.0
            left = 60 * options.minutes - (time.perf_counter() - started)
            if left < needed:
                continue
            arguments = [__file__, "--rung", rung, "--folder", folder, *["--whole"] * job, *["--tiny"] * options.tiny, *["--cuda"] * cuda]
            try:
                row = spawn(arguments, environment, timeout=left)
            except SystemExit as error:
                failures.append(f"{rung}{' (the whole job)' * job}: {str(error)[-1500:]}")
                print(failures[-1], flush=True)
            else:
                print(f"{rung:16} {'job' * job:3} {row['samples_per_second']:8.1f} samples/s, {row['wall_seconds']:.0f} s", flush=True)
                if job:
                    whole[rung] = row | {"texts": texts}
                else:
                    found[rung][number] = row
            save()

    shown = summarise(found)[1]
    jobs_shown = []
    for rung, one in whole.items():
        spans = ", ".join(f"{span} {one[f'{span}_seconds']:.1f}" for span in ("startup", "compile", "train", "evaluate"))
        jobs_shown.append(
            f"The whole job ({one['texts']:,} texts, 3 epochs, 3 evaluations) with everything up to `{rung}`: "
            f"**{one['wall_seconds']:.1f} s** from start to end, of which {spans}; accuracy {one['evaluate']['accuracy']:.3f}."
        )
    text = "\n\n".join([shown, *jobs_shown, *(["Failed:\n\n" + "\n\n".join(failures)] if failures else [])])
    print(f"\n{text}\n\n{results()['load']}\n{save()}")
    if options.results == RESULTS and not options.tiny:
        about = (__doc__ or "").partition("the script itself\n\n")[2]
        repeats = max(map(len, found.values()))
        counts = f"{show_machine(facts)} {repeats} rounds of {steps} steps. {results()['load']} {caution(repeats)}"
        if options.ends:
            counts = f"`{rungs[-1]}` stands for all of them: {', '.join(listed)}.\n\n{counts}"
        write_section(f"DistilBERT on {device}", f"{text}\n\n{counts}\n\n{about}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

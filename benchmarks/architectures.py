"""Train a tiny model of every architecture of transformers, check it against PyTorch, and write docs/architectures.md.

    python benchmarks/architectures.py                        # every architecture; 45 minutes on one core
    python benchmarks/architectures.py --sample               # a few of them, for CI; writes no page
    python benchmarks/architectures.py --only llama bert      # these types of models, for all tasks; writes no page
    python benchmarks/architectures.py --again                # forget the results of an interrupted run

The models are those of transformers' Auto classes, with random weights that make attention matter, two layers and 64
features. They train for three steps on texts of 1 to 22 words, or on images of 64 pixels, on a CPU and without dropout.
A line names the checks that were refused with a reason, and those with another outcome, and the architectures that it
holds for. All other checks were equal:

- *hand-written loop*: losses and weights of a run without plugins equal those of a loop in plain PyTorch;
- *micro-batches* of one sample give the result of a whole batch;
- a plugin: a run with it alone gives the result of the run without it;
- `amp` in bf16 has the losses of plain PyTorch under autocast; `cpu-attention` is compared with it;
- *auto*: the last validation loss is within 3% of the run without plugins; *auto, dropout*: of plain PyTorch's;
- *resume*: a run that is stopped after two steps and resumed has the weights of one that is not, bit for bit;
- *predict*: predictions in batches equal those of plain PyTorch for one sample at a time.

Losses may differ by 1e-4 (in bf16 by 10%) and weights by 1% of their change. Models that draw random numbers (PhiMoE)
or in which rounding grows fast (MobileNet) may differ more. The limit is then four times the difference of two plain
loops, with two seeds and with weights that differ by 1e-6 (relative).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _measure import ROOT, version
from _plain_loops import TASKS
from _tiny_models import MAPPINGS

TABLE = ROOT / "docs" / "architectures.md"
RESULTS = ROOT / "build" / "architectures.jsonl"
"""The finished checks: a line for each, so that an interrupted run continues."""
PATIENCE = 180.0
"""Seconds for one check. Most take less than one; the first of a worker imports its libraries."""
BAD = ("WRONG", "ERROR")
EQUAL = "all equal"
SAMPLE = (
    ("text-classification", "distilbert"),
    ("text-classification", "gpt2"),
    ("token-classification", "bert"),
    ("causal-lm", "mixtral"),
    ("seq2seq", "t5"),
    ("image-classification", "vit"),
)

Pair = tuple[str, str]
Result = dict[str, str]


def every_pair() -> list[Pair]:
    """The tasks and types of models that transformers' lists name."""
    from transformers.models.auto import modeling_auto

    pairs = []
    for name, task in TASKS.items():
        for kind in getattr(modeling_auto, MAPPINGS[task.auto]):
            pairs.append((name, kind))
    return pairs


class Worker:
    """A process that checks pairs. A crash, or a check that takes too long, ends it; the next check starts another.

    Args:
        serve: The function of the process: see ``_architecture_checks.serve``.
    """

    def __init__(self, serve: Callable[[Any], None]) -> None:
        self.serve = serve
        self.process: Any = None

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self.process is not None and self.process.is_alive():
            return
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=self.serve, args=(other,))
        self.process.start()
        other.close()

    def check(self, pair: Pair, names: Sequence[str]) -> Iterator[Result]:
        """The results of these checks. Checks after one that ended the process run in a new one."""
        left = [*names]
        while left:
            self.start()
            self.pipe.send((*pair, left))
            try:
                while self.pipe.poll(PATIENCE):
                    answer = self.pipe.recv()
                    if answer is None:
                        return
                    name, outcome, detail = answer
                    # "model", the only result of a model that cannot be built, is not among them
                    left = left[left.index(name) + 1 :] if name in left else []
                    yield {"check": name, "outcome": outcome, "detail": detail}
                problem = f"no result in {PATIENCE:.0f} seconds"
            except EOFError:
                self.process.join()
                problem = f"the process ended with {self.process.exitcode}"
            self.process.kill()
            yield {"check": left.pop(0), "outcome": "ERROR", "detail": problem}

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()


def study(worker: Worker, pair: Pair, done: Sequence[Result], record: Callable[[Result], None]) -> list[Result]:
    """Run the checks of a pair that are not done, record and print them, and return all results."""
    from _architecture_checks import columns

    task, kind = pair
    finished = {result["check"] for result in done}
    missing = [name for name in columns(task) if name not in finished]
    if "model" in finished or (done and not is_accepted(done)):
        missing = []
    results = [*done]
    for result in worker.check(pair, missing):
        results.append(result)
        record({"task": task, "kind": kind, **result})
    print(f"{task:20} {kind:24} {len(results)} checks", flush=True)
    for result in results:
        if result["outcome"] in BAD:
            print(f"    {result['check']}: {result['outcome']} {result['detail']}", flush=True)
    return results


def write_result(result: Result) -> None:
    """Add a line to ``RESULTS``."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def read_results() -> dict[Pair, list[Result]]:
    """The finished checks of earlier runs."""
    results: dict[Pair, list[Result]] = {}
    if not RESULTS.exists():
        return results
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        pair = (result.pop("task"), result.pop("kind"))
        results.setdefault(pair, []).append(result)
    return results


# -- the page ----------------------------------------------------------------------------------------------------------


def is_accepted(results: Iterable[Result]) -> bool:
    """Whether the task accepts the architecture: its tiny model is built, and a run without plugins is not refused."""
    outcomes = {result["check"]: result["outcome"] for result in results}
    return "model" not in outcomes and outcomes.get("hand-written loop") != "refused"


def page(checked: dict[Pair, list[Result]]) -> str:
    """The text of docs/architectures.md."""
    accepted = {pair: results for pair, results in checked.items() if is_accepted(results)}
    counts = Counter[str]()
    trains = 0
    whole = 0
    for results in accepted.values():
        outcomes = {result["check"]: result["outcome"] for result in results}
        counts.update(outcomes.values())
        trains += outcomes.get("auto") == "ok"
        whole += not set(outcomes.values()) & set(BAD)
    sections: list[str] = []
    for task in TASKS:
        sections += outcomes_of(task, accepted)
    versions = f"transformers {version('transformers')} and torch {version('torch')}"
    text = [
        "# Architectures",
        "",
        f"Generated by `make architectures` ({Path(__file__).name}) with {versions}.",
        "",
        f"**{len(accepted)} pairs of a task and an architecture: {trains} train with `auto`, and {whole} pass every "
        f"check.** {counts.total()} checks: {counts['ok']} equal, {counts['refused']} refused with a reason, "
        f"{counts['warned']} different with a warning, {counts['WRONG']} different without one, {counts['ERROR']} with "
        "another error.",
        "",
        __doc__.partition("interrupted run\n")[2].strip(),
        "",
        *sections,
        "## Not accepted",
        "",
        "The tiny model could not be built, or the task refuses it without plugins. A run shows the reason.",
        "",
        *refusals(checked.keys() - accepted.keys()),
    ]
    return "\n".join(text) + "\n"


def outcomes_of(task: str, accepted: dict[Pair, list[Result]]) -> list[str]:
    """The section of a task: the architectures for each set of checks that were not equal."""
    groups: dict[str, list[str]] = {}
    for (name, kind), results in sorted(accepted.items()):
        if name == task:
            groups.setdefault(not_equal(results), []).append(kind)
    ordered = sorted(groups.items(), key=lambda group: (group[0] != EQUAL, -len(group[1])))
    return [f"## {task}", "", *(f"- {checks}: `{', '.join(kinds)}`" for checks, kinds in ordered), ""]


def not_equal(results: Iterable[Result]) -> str:
    """The checks that were not equal, or ``EQUAL``."""
    names = []
    for result in results:
        if result["outcome"] == "refused":
            names.append(result["check"])
        elif result["outcome"] != "ok":
            names.append(f"{result['check']} ({result['outcome']})")
    return ", ".join(names) or EQUAL


def refusals(pairs: Iterable[Pair]) -> list[str]:
    """The architectures that each task does not accept."""
    tasks: dict[str, list[str]] = {}
    for task, kind in sorted(pairs):
        tasks.setdefault(task, []).append(kind)
    return [f"- {task}: `{', '.join(kinds)}`" for task, kinds in tasks.items()]


def main() -> None:
    """Check and report. Exits with 1 if a check is wrong or ends in an error that is not fastloop's own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", action="store_true", help="a few architectures, without a page")
    parser.add_argument("--only", nargs="+", default=[], help="types of models, without a page")
    parser.add_argument("--task", choices=TASKS, help="with --only: this task")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check at the same time")
    parser.add_argument("--again", action="store_true", help="check again what an earlier run has finished")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    part = bool(options.sample or options.only)
    pairs = [*SAMPLE] if options.sample else every_pair()
    if options.only and not options.sample:
        pairs = [pair for pair in pairs if pair[1] in options.only]
    if options.task is not None:
        pairs = [pair for pair in pairs if pair[0] == options.task]
    RESULTS.parent.mkdir(exist_ok=True)
    if options.again and not part:
        RESULTS.unlink(missing_ok=True)
    done = {} if part else read_results()
    from _architecture_checks import serve

    workers: dict[int, Worker] = {}

    def record(result: Result) -> None:
        if not part:
            write_result(result)

    def check(pair: Pair) -> list[Result]:
        worker = workers.setdefault(threading.get_ident(), Worker(serve))
        return study(worker, pair, done.get(pair, []), record)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            checked = dict(zip(pairs, pool.map(check, pairs), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers.values():
                worker.stop()
    bad = 0
    for results in checked.values():
        if is_accepted(results):
            bad += sum(result["outcome"] in BAD for result in results)
    print(f"{len(checked)} pairs, {bad} checks wrong or with an error")
    if not part:
        TABLE.write_text(page({pair: checked[pair] for pair in pairs}), encoding="utf-8")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()

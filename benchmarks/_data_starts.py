"""The part ``starts`` of data.py: the start of a training on many rows, and its first steps."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

MIB = 2**20
STEPS = 100
"""Steps of a training that is measured, of ``BATCH`` rows."""
BATCH = 32
BASE_ROWS = 1000
"""Rows of the training whose memory is subtracted: libraries, model and optimizer have as much in each."""
AT_ONCE = 100_000
"""Rows to write at once."""
TOKENIZED_AT_ONCE = 1000
"""Rows that the arm ``tokenizer`` gives to the tokenizer at once."""
WORDS = 2000
"""Different words of the texts."""
LENGTHS = (4, 21)
"""Words of a text: from 4 to 20."""
LABELS = ("bad", "fair", "good")
TINY = {"model_type": "distilbert", "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
TINY_GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64}
PHASE = "phase"
"""The file in which a measured process names its phase, for the process that samples its memory."""

FIXED_BYTES = 60 * MIB
"""Gate: anonymous memory that data may take for any number of rows."""
ROW_BYTES = 6
"""Gate: anonymous memory that each row may take beside it."""
SECOND_START = 3.0
"""Gate: seconds of a second start with ``MOST_ROWS`` rows."""
MOST_ROWS = 10_000_000
CPU_BEFORE = {200_000: 2.5}
"""Gate: rows -> CPU time of a first start of the version of 2026-11-27 (commit d8376540), divided by that of the
tokenizer alone. Both were measured in turns, twice: 28.0 and 28.4 us a row, and 11.2 and 11.4."""


# -- files -------------------------------------------------------------------------------------------------------------


def draw_texts(count: int) -> Iterator[list[str]]:
    """Yield the words of each text."""
    import numpy as np

    draw = np.random.default_rng(0)
    words = [f"word{number}" for number in range(WORDS)]
    for first in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - first)
        lengths = draw.integers(*LENGTHS, size).tolist()
        numbers = draw.integers(0, WORDS, sum(lengths)).tolist()
        start = 0
        for length in lengths:
            yield [words[number] for number in numbers[start : start + length]]
            start += length


def classified(number: int, words: list[str]) -> dict[str, Any]:
    """A text with one of three labels."""
    return {"text": " ".join(words), "label": LABELS[number % 3]}


def conversation(_: int, words: list[str]) -> dict[str, Any]:
    """A question and its answer."""
    question = {"role": "user", "content": " ".join(words[:2])}
    return {"messages": [question, {"role": "assistant", "content": " ".join(words[2:])}]}


def tagged(_: int, words: list[str]) -> dict[str, Any]:
    """Words, some of which are a name."""
    return {"words": words, "tags": ["B-NAME" if word.endswith("7") else "O" for word in words]}


def write_rows(path: Path, count: int, make_row: Callable[[int, list[str]], dict[str, Any]]) -> None:
    """Write rows as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for number, words in enumerate(draw_texts(count)):
            file.write(json.dumps(make_row(number, words)) + "\n")


def write_tokenizers() -> None:
    """Save the tokenizers of the arms, as a pretrained model has one."""
    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    texts = [" ".join(words) for words in draw_texts(BASE_ROWS)]
    for kind in ("word", "bpe"):
        train_tokenizer(TrainedTokenizer(kind=kind, vocab_size=4000), texts, False).save_pretrained(kind)


# -- a measured process ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A training.

    Attributes:
        data: Its ``data`` section, without files that each arm has.
        train: Changes of its ``train`` section.
        make_row: Returns a row of its file, from its number and words.
    """

    task: str
    data: dict[str, Any]
    train: dict[str, Any] = field(default_factory=lambda: {"epochs": 1})
    make_row: Callable[[int, list[str]], dict[str, Any]] = classified


TEXTS = {"text": "text", "label": "label", "max_length": 32}
STREAMED = {"streaming": True, "files": {"train": "rows.jsonl", "validation": "few.jsonl"}}
CHATS = {"messages": "messages", "chat_template": "chatml", "max_length": 64}
TAGS = {"words": "words", "tags": "tags", "max_length": 64}
ARMS = {
    "scan": Arm("", {}),
    "tokenizer": Arm("", {}),
    "texts": Arm("text-classification", TEXTS),
    "texts, length-bucketing": Arm("text-classification", TEXTS),
    "texts, 100 steps": Arm("text-classification", TEXTS, {"max_steps": STEPS}),
    "texts, streamed": Arm("text-classification", TEXTS | STREAMED),
    "conversations": Arm("causal-lm", CHATS, make_row=conversation),
    "words with tags": Arm("token-classification", TAGS, make_row=tagged),
}
"""Those without a task are no training."""


MODULES = (
    "pyarrow.json",
    "text_helpers",
    "torch._dynamo",
    "transformers.models.distilbert.modeling_distilbert",
    "transformers.models.gpt2.modeling_gpt2",
    "fastloop.loop",
    "fastloop_plugins.text",
)
"""Modules that a training imports. They are imported before seconds and CPU seconds are measured."""


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def scan() -> dict[str, Any]:
    """Decode each line of the file."""
    began = time.perf_counter()
    cpu = cpu_seconds()
    with Path("rows.jsonl").open(encoding="utf-8") as file:
        for line in file:
            json.loads(line)
    return {"seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}


def tokenize() -> dict[str, Any]:
    """Give the texts to the tokenizer's backend in one thread, and use no result. The fastest of three passes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("word")
    tokenizer(["one text, which sets truncation"], truncation=True, max_length=TEXTS["max_length"])
    passes = []
    for _ in range(3):
        passes.append(tokenize_once(tokenizer.backend_tokenizer))
    return min(passes, key=itemgetter("cpu"))


def tokenize_once(tokenizer: Any) -> dict[str, float]:
    """Tokenize the file. Reading it is not measured."""
    seconds = cpu = 0.0
    with Path("rows.jsonl").open(encoding="utf-8") as file:
        while lines := list(islice(file, TOKENIZED_AT_ONCE)):
            texts = [json.loads(line)["text"] for line in lines]
            began = time.perf_counter()
            cpu_before = time.process_time()
            tokenizer.encode_batch_fast(texts)
            seconds += time.perf_counter() - began
            cpu += time.process_time() - cpu_before
    return {"seconds": seconds, "cpu": cpu}


def measure_start(arm: str) -> dict[str, Any]:
    """Train ``STEPS`` steps in this process, on the files of the current folder."""
    if arm == "scan":
        return scan()
    if arm == "tokenizer":
        return tokenize()
    for name in MODULES:
        importlib.import_module(name)
    from text_helpers import make_run

    from fastloop.loop import take_step
    from fastloop_plugins.data.length_bucketing import LengthBucketing
    from fastloop_plugins.data.token_cache import TokenCache

    chosen = ARMS[arm]
    model: dict[str, Any] = {"config": TINY | {"max_position_embeddings": 64}, "tokenizer": "word"}
    if chosen.task == "causal-lm":
        model = {"config": TINY_GPT, "tokenizer": "bpe"}
    plugins: list[Any] = [TokenCache(folder=f"cache of {arm}")]
    if "length-bucketing" in arm:
        plugins.append(LengthBucketing())
    began = time.perf_counter()
    cpu = cpu_seconds()
    Path(PHASE).write_text("start")
    data = {"files": {"train": "rows.jsonl"}} | chosen.data
    run = make_run(chosen.task, model, data, plugins, batch_size=BATCH, **chosen.train)
    steps = run.train_loader.steps(0, 0)
    take_step(run, next(steps))
    result = {"seconds": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}
    Path(PHASE).write_text("training")
    for step in islice(steps, STEPS - 1):
        take_step(run, step)
    return result


# -- the measuring process ---------------------------------------------------------------------------------------------


class PeakMemory:
    """Samples the anonymous memory of a process and its children. A page that several of them share counts once.

    Attributes:
        peaks: Phase -> the largest sample, in bytes.
    """

    def __init__(self) -> None:
        self.peaks = dict[str, int]()

    def sample(self, process: int) -> None:
        """Take a sample of a process, in the phase that it names."""
        try:
            phase = Path(PHASE).read_text()
        except FileNotFoundError:
            return  # it imports its libraries
        size = anonymous_bytes(process)
        if size is not None:
            self.peaks[phase] = max(self.peaks.get(phase, 0), size)


def anonymous_bytes(process: int) -> int | None:
    """The proportional anonymous memory of a process and its children, from Linux.

    None: one of them has started or ended meanwhile. A fork halves the parent's share of its pages. So if the parent is
    read before the fork and the child after it, their pages would count one and a half times.
    """
    try:
        processes = list_processes(process)
        total = sum(map(proportional_bytes, processes))
        if processes != list_processes(process):
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return total


def list_processes(process: int) -> list[int]:
    """A process, its children and theirs."""
    processes = [process]
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text().split():
            processes += list_processes(int(child))
    return processes


def proportional_bytes(process: int) -> int:
    """The anonymous memory of a process. A page that two processes have counts as half a page in each.

    Raises:
        ProcessLookupError: The process has ended.
    """
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "Pss_Anon":
            return 1024 * int(size.split()[0])  # "Pss_Anon:    1704 kB"
    raise ProcessLookupError(process)


def measure_arm(script: Path, arm: str, rows: int) -> Iterator[dict[str, Any]]:
    """Measure the first and the second start of an arm, on files in the current folder."""
    from _measure import spawn

    make_row = ARMS[arm].make_row
    write_rows(Path("rows.jsonl"), rows, make_row)
    write_rows(Path("few.jsonl"), BASE_ROWS, make_row)
    for start in ("first", "second") if ARMS[arm].task else ("first",):
        memory = PeakMemory()
        Path(PHASE).unlink(missing_ok=True)
        result = spawn([script, "starts", "--measure", arm], watch=memory.sample)
        cache = sum(path.stat().st_size for path in Path(f"cache of {arm}").rglob("*") if path.is_file())
        size = Path("rows.jsonl").stat().st_size
        about = {"arm": arm, "rows": rows, "start_number": start, "bytes": size, "cache": cache}
        yield about | {"peaks": memory.peaks} | result
    shutil.rmtree(f"cache of {arm}", ignore_errors=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def find(results: list[dict[str, Any]], arm: str, rows: int, start: str) -> dict[str, Any]:
    """The result of a start."""
    for row in results:
        if (row["arm"], row["rows"], row["start_number"]) == (arm, rows, start):
            return row
    raise LookupError(f"no result of {arm}, {rows} rows, {start} start")


def added(results: list[dict[str, Any]], row: Mapping[str, Any], phase: str) -> int:
    """Bytes of a phase that the same training on ``BASE_ROWS`` rows does not have."""
    base = find(results, row["arm"], BASE_ROWS, row["start_number"])
    return int(row["peaks"][phase] - base["peaks"][phase])


def gates(results: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table of gates: what, the figure, the limit, and whether it is met."""
    found = list[tuple[str, float, float, str]]()
    for row in results:
        if row["rows"] == BASE_ROWS or not row["peaks"]:
            continue
        name = f"{row['arm']}, {row['rows']:,} rows"
        most = max(added(results, row, phase) for phase in row["peaks"])
        limit = FIXED_BYTES + ROW_BYTES * row["rows"]
        found.append((f"memory: {name}, {row['start_number']} start and training", most / MIB, limit / MIB, "MiB"))
    for row in results:
        name = f"{row['arm']}, {row['rows']:,} rows"
        if row["arm"] == "tokenizer" and row["rows"] in CPU_BEFORE:
            start = find(results, "texts", row["rows"], "first")
            name = f"texts, {row['rows']:,} rows, first start"
            found.append((f"CPU time: {name}", start["cpu"] / row["cpu"], CPU_BEFORE[row["rows"]], "x tokenizer"))
        if row["arm"] == "texts" and row["start_number"] == "second" and row["rows"] == MOST_ROWS:
            found.append((f"second start: {name}", row["seconds"], SECOND_START, "s"))
    lines = []
    for name, value, limit, unit in found:
        verdict = "met" if value <= limit else "missed"
        lines.append([name, f"{value:.1f} {unit}", f"{limit:.1f} {unit}", verdict])
    return lines


def run_starts(script: Path, sizes: Sequence[int], chosen: Sequence[str]) -> None:
    """Measure the starts of some arms, and write them beside the results of others."""
    from _measure import RESULTS, load, machine, show_machine, table, write, write_section

    path = RESULTS / "data_starts.json"
    kept: list[dict[str, Any]] = json.loads(path.read_text())["starts"] if path.exists() else []
    results = list[dict[str, Any]]()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        write_tokenizers()
        for arm in chosen:
            for rows in (BASE_ROWS, *sizes):
                for result in measure_arm(script, arm, rows):
                    results.append(result)
                    print(result, flush=True)
        os.chdir(here)
    measured = {(row["arm"], row["rows"]) for row in results}
    results += [row for row in kept if (row["arm"], row["rows"]) not in measured]
    order = list(ARMS)
    results.sort(key=lambda row: (order.index(row["arm"]), row["rows"], row["start_number"]))
    facts = machine("torch", "transformers", "tokenizers", "pyarrow")
    write("data_starts", {"machine": facts, "starts": results})
    text = [
        f"The start of a training on many rows, and its first {STEPS} steps. Script: `benchmarks/data.py starts`. Its "
        "docstring describes the method.",
        "",
        table(["gate", "measured", "limit", ""], gates(results)),
        "",
        f"The limit of memory is {FIXED_BYTES // MIB} MiB, and {ROW_BYTES} bytes a row. CPU time is divided by "
        "that of the tokenizer alone. The limit is the quotient of the version before data was prepared in parallel.",
        "",
        table(HEAD, [show_start(results, row) for row in results if row["rows"] != BASE_ROWS], text_columns=1),
        "",
        f"{show_machine(facts)} {load(results)}",
    ]
    write_section("Training on many rows", "\n".join(text))


HEAD = [
    "",
    "rows",
    "start",
    "rows/s",
    "first step, s",
    "CPU us a row",
    "MiB to it",
    "MiB in training",
    "cached MB",
    "cores of others",
]


def show_start(results: list[dict[str, Any]], row: Mapping[str, Any]) -> list[str]:
    """A row of the table of all figures."""
    memory = ["", ""]
    if row["peaks"]:
        memory = [f"{added(results, row, phase) / MIB:.0f}" for phase in ("start", "training")]
    return [
        row["arm"],
        f"{row['rows']:,}",
        row["start_number"],
        f"{row['rows'] / row['seconds']:,.0f}",
        f"{row['seconds']:.1f}",
        f"{1e6 * row['cpu'] / row['rows']:.2f}",
        *memory,
        f"{row['cache'] / 1e6:.1f}",
        f"{row['foreign_cores']:.2f}",
    ]

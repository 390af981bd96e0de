"""Each command and option that a message proposes works: a test provokes the message, and runs its proposal.

``CASES`` has the messages. ``ELSEWHERE`` has the proposals that no case runs, each with the reason.
``test_every_proposal_of_the_sources_is_in_a_table`` compares both with the sources, so a new proposal needs a case or a
reason.
"""

from __future__ import annotations

import ast
import bz2
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_helpers import write_images, write_vit
from tag_helpers import write_jsonl
from text_helpers import TINY, TINY_GPT

ROOT = Path(__file__).parents[2]
ROWS = [(f"{('a dull', 'a fine')[i % 2]} film number {i}", ("neg", "pos")[i % 2]) for i in range(12)]
NET = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, flat=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layer = nn.Identity() if flat else nn.Linear(4, 4)
    def forward(self, inputs):
        return self.layer(inputs * self.scale)
def data(uneven=False, splits=("train", "validation", "test")):
    rows = [(torch.ones(4 + i % 2 * uneven), i % 2) for i in range(8)]
    return {split: rows for split in splits}
def short(rows):
    return torch.stack([inputs[:4] for inputs, _ in rows]), torch.tensor([label for _, label in rows])
"""
PLUGINS = """
import os, signal
from pathlib import Path
from fastloop import Plugin, hookimpl
class Stops(Plugin):
    name = "stops"
    @hookimpl
    def after_step(self):
        if Path("stop").exists():
            Path("stop").unlink()
            os.kill(os.getpid(), signal.SIGTERM)
class One(Plugin):
    name = "one"
    runs_after = ("two",)
class Two(Plugin):
    name = "two"
    runs_after = ("one",)
class Needs(Plugin):
    name = "needs"
    requires = ("ema",)
class Shards(Plugin):
    name = "shards"
    requires = ("slot:strategy",)
class First(Plugin):
    name = "first"
    @hookimpl
    def build_sampler(self):
        return None
class Second(First):
    name = "second"
"""

Make = Callable[[Any], list[str]]


@dataclass
class Case:
    """A command, and proposals in its output.

    Attributes:
        sources: The proposals of the sources that these are: folder, file, and beginning.
        make: Writes the files, and returns the command's arguments. It gets the command line.
        found: Patterns of the output, one after another. The group of each is a proposal: a command, options, or an
            override.
        fill: A part of a proposal that stands for a value -> the value.
        drop: Arguments of the command that a proposal replaces.
        code: The exit code of the command: 2 for an error, 0 for another line of output.
    """

    sources: tuple[str, ...]
    make: Make
    found: tuple[str, ...]
    fill: dict[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    code: int = 2


# -- recipes -----------------------------------------------------------------------------------------------------------


def write_recipe(*arguments: str, train: Any = None, plugins: Iterable[Any] = (), **sections: Any) -> list[str]:
    """Write a recipe of one step. Returns the arguments that train it."""
    tree: dict[str, Any] = {
        "output": "out",
        **sections,
        "plugins": [*plugins, {"progress": False}, {"speed-check": False}],
    }
    tree["train"] = {"max_steps": 1, "batch_size": 4, "device": "cpu", "lr": 1e-3} | (train or {})
    Path("r.yaml").write_text(yaml.safe_dump(tree))
    Path("plugin.py").write_text(PLUGINS)
    Path("net.py").write_text(NET)
    return ["train", "r.yaml", *arguments]


def write_file(path: str, content: Any) -> None:
    """Write characters or bytes, rows of a .jsonl file, or rows of ``text`` and ``label``."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        Path(path).write_bytes(content)
    elif isinstance(content, str):
        Path(path).write_text(content)
    elif isinstance(content[0], dict):
        write_jsonl(path, content)
    else:
        Path(path).write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in content))


def text(
    train: Any = ROWS,
    *arguments: str,
    path: str = "train.csv",
    test: Any = None,
    plugins: Any = (),
    model: Any = None,
    **data: Any,
) -> Make:
    """Train a text classifier, or with ``label=None`` another task of texts."""

    def make(_: Any) -> list[str]:
        write_file(path, train)
        files = {"train": path}
        if test is not None:
            files["test"] = f"test{Path(path).suffix}"
            write_file(files["test"], test)
        section = {"files": files, "label": "label", "max_length": 16, "validation_fraction": 0} | data
        section = {key: value for key, value in section.items() if value is not None}
        return write_recipe(
            *arguments, model=model or {"config": TINY, "tokenizer": {"kind": "word"}}, data=section, plugins=plugins
        )

    return make


def module(*arguments: str, plugins: Iterable[Any] = (), model: Any = None, data: Any = None, **train: Any) -> Make:
    """Train a small module."""

    def make(_: Any) -> list[str]:
        sections = {"model": {"module": "net.py:Net"} | (model or {}), "data": {"module": "net.py:data"} | (data or {})}
        return write_recipe(
            *arguments, **sections, plugins=[{"module": {"loss": "cross_entropy"}}, *plugins], train=train
        )

    return make


def images(name: str = "vit", split: str = "validation") -> Make:
    """Train an image classifier."""

    def make(_: Any) -> list[str]:
        write_images(Path("images"), {"train": 3, split: 2})
        write_vit(Path("vit"))
        return write_recipe(model={"name": name, "pretrained": False}, data={"images": "images", "image_size": 16})

    return make


def films(*labels: Any, times: int = 6) -> list[tuple[str, Any]]:
    """Rows with these labels in turn."""
    return [(f"film number {i}", labels[i % len(labels)]) for i in range(times * len(labels))]


def then(first: Make, *arguments: str, change: Callable[[], Any] = lambda: None, code: int = 0) -> Make:
    """Train, change a file, and return the arguments of another command."""

    def make(cli: Any) -> list[str]:
        found = cli(*first(cli))
        assert found[0] == code, found
        change()
        return list(arguments)

    return make


def stopped(make: Make) -> Make:
    """The plugin ``stops`` stops the next run."""

    def prepare(cli: Any) -> list[str]:
        Path("stop").touch()
        return make(cli)

    return prepare


def strip_tokenizer() -> None:
    """Copy the exported model to ``bare``, without its tokenizer."""
    shutil.copytree("out/model", "bare")
    for path in Path("bare").glob("*token*"):
        path.unlink()


HEADER = "text,label\n"
LISTS = [{"text": f"film {i}", "label": [["a"], ["a", "b"]][i % 2]} for i in range(12)]
HALVES = [{"text": f"film {i}", "label": i / 4} for i in range(12)]
SWITCHES = "text,label,a,b\n" + "".join(f"film {i},x,{i % 2},{i % 3 % 2}\n" for i in range(12))
PAIRS = [{"text": f"film {i}", "summary": "a film"} for i in range(12)]
TAGGED = [{"words": ["EU", f"film{i}"], "tags": ["I-ORG", "O"]} for i in range(6)]
OTHER_TAG = [{"words": ["EU", "film"], "tags": ["I-PER", "O"]}, {"words": ["film"], "tags": ["O"]}]
CHATS = [
    {"messages": [{"role": "user", "content": f"a {i}"}, {"role": "assistant", "content": "c d"}]} for i in range(6)
]
GPT = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
T5 = {
    "config": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "tokenizer": {"kind": "word"},
}
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% "
    "endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)


def chat(_: Any) -> list[str]:
    """Train on conversations without a template."""
    write_file("marked.jinja", MARKED)
    return text(CHATS, path="train.jsonl", model=GPT, messages="messages", label=None)(_)


CASES: dict[str, Case] = {
    # -- files and columns
    "delimiter, then columns": Case(
        ("rows/csv.py data.read.delimiter=", "rows/csv.py data.read.columns="),
        text("a stirring film;pos\ndull from start to end;neg\nfine work by all;pos\na waste of time;neg\n"),
        (r"give (data\.read\.delimiter=.*?)\.\s", r"give (data\.read\.columns=\[.*?\])"),
    ),
    "delimiter of a file without header": Case(
        ("rows/csv.py data.read.delimiter=",),
        text("a film;pos\na bore;neg\n" * 4, read={"columns": ["text", "label"]}),
        (r"give (data\.read\.delimiter=.*?)\.\s",),
    ),
    "stray quote": Case(
        ("rows/csv.py data.read.quoting=",),
        text(HEADER + '"good" film,pos\nbad,neg\n' * 4),
        (r"give (data\.read\.quoting=none); otherwise",),
    ),
    "quotes are text": Case(
        ("rows/csv.py data.read.quoting=",),
        text(HEADER + 'bad,neg\n"a dull film,neg\na fine one",pos\nbad,neg\n'),
        (r"give (data\.read\.quoting=none); if",),
    ),
    "a text spans lines": Case(
        ("rows/csv.py data.read.quoting=",),
        text(HEADER + 'bad,neg\n"a dull film,neg\na fine one",pos\nbad,neg\n'),
        (r"these lines, (data\.read\.quoting=double)",),
    ),
    "encoding": Case(
        ("rows/lines.py data.read.encoding=",),
        text((HEADER + "café,pos\nbad,neg\n").encode("cp1252")),
        (r"such as (data\.read\.encoding=cp1252)",),
    ),
    "utf-16": Case(
        ("rows/lines.py data.read.encoding=",),
        text((HEADER + "fine,pos\nbad,neg\n").encode("utf-16-le")),
        (r"give (data\.read\.encoding=\S+?)\.\s",),
    ),
    "a folder of files": Case(
        ("rows/paths.py data.files.{}=",),
        then(text(path="train/train-1.csv"), "train", "r.yaml", "data.files.train=train"),
        (r"(data\.files\.train=\S+)\.\s",),
    ),
    "a split as a key": Case(
        ("text/data.py data.files.{}=",),
        then(text(), "train", "r.yaml", "data.test=train.csv"),
        (r"For files: (data\.files\.test=\S+)\.\s",),
        drop=("data.test=train.csv",),
    ),
    "a file compressed by bz2": Case(
        ("rows/contents.py data.read.compression=",),
        text(bz2.compress((HEADER + "".join(f"{text},{label}\n" for text, label in ROWS)).encode())),
        (r"give (data\.read\.compression=bz2)",),
    ),
    "a file as name": Case(
        ("text/data.py data.files.train=",),
        then(text(), "train", "r.yaml", "data.files=null", "data.name=train.csv"),
        (r"as (data\.files\.train=\S+)\.\s",),
    ),
    "a local file instead of the hub": Case(
        ("text/data.py data.files.train=", "text/data.py data.name="),
        then(text(), "train", "r.yaml", "data.files=null", "data.name=nobody/nothing"),
        (r"(data\.files\.train=FILE) or data\.name=FOLDER",),
        {"FILE": "train.csv"},
    ),
    "streaming": Case(
        ("streaming/options.py data.streaming=",),
        text([{"text": text, "label": label} for text, label in ROWS], path="train.jsonl", lanes=1),
        (r"set (data\.streaming=true)",),
    ),
    "samples of a stream": Case(
        ("text/tokens.py data.streaming=",),
        lambda cli: (
            [
                "plan",
                *text([{"text": text, "label": label} for text, label in ROWS], path="train.jsonl", streaming=True)(
                    cli
                )[1:],
            ]
            + ["--samples", "1"]
        ),
        (r"Give (data\.streaming=false),",),
    ),
    # -- labels
    "label": Case(
        ("text/option_checks.py data.label=",),
        text(plugins=["text-classification"], label=None),
        (r"such as (data\.label=label)\.",),
    ),
    "text among numbers": Case(
        ("text/labels.py data.label_map=",),
        text(films("0", "1", "2+")),
        (r"name them: (data\.label_map=\{.*?\})",),
        {"NAME": "2"},
    ),
    "a number among texts": Case(
        ("text/labels.py data.label_map=",),
        text(films("neg", "pos", "3")),
        (r"name them: (data\.label_map=\{.*?\})",),
        {"NAME": "great"},
    ),
    "another spelling": Case(
        ("text/labels.py data.label_map=",),
        text(test=films("Pos ", "neg")),
        (r"one class: (data\.label_map=\{.*?\})",),
    ),
    "rows of another label": Case(
        ("text/labels.py data.label_map=",),
        text(test=films("-", "neg")),
        (r"leave out its rows: (data\.label_map=\{.*?\})",),
    ),
    "a split with another label": Case(
        ("text/labels.py data.splits.{}=",), text(test=films("-", "neg")), (r"(data\.splits\.test=null)",)
    ),
    "rows of -1": Case(
        ("text/labels.py data.label_map=",),
        text(films(0, 1, -1)),
        (r"leave them out: (data\.label_map=\{.*?\})",),
    ),
    "a name for -1": Case(
        ("text/labels.py data.label_map=",),
        text(films(0, 1, -1)),
        (r"name it: (data\.label_map=\{.*?\})",),
        {"NAME": "2"},
    ),
    "numbers with gaps": Case(
        ("text/labels.py data.label_map=",),
        text(films(5, 7)),
        (r"name them: (data\.label_map=\{.*?\})",),
        {"NUMBER: NAME": "5: neg, 7: pos"},
    ),
    "numbers from 1": Case(
        ("text/labels.py data.label_offset=",), text(films(1, 2, 3)), (r"give (data\.label_offset=1)",)
    ),
    "fractions": Case(
        ("text/labels.py data.label_type=",), text(films(0.5, 1.5)), (r"regression: (data\.label_type=number)",)
    ),
    "many numbers": Case(
        ("text/labels.py data.label_type=",),
        text(films(*range(20), times=1)),
        (r"regression: (data\.label_type=number)",),
    ),
    "lists": Case(
        ("text/labels.py data.label_type=",),
        text(LISTS, path="train.jsonl"),
        (r"labels: (data\.label_type=classes)",),
    ),
    "floats": Case(
        ("text/labels.py data.label_type=",),
        text(HALVES, path="train.jsonl"),
        (r"labels: (data\.label_type=number)",),
    ),
    "names, and no numbers": Case(
        ("text/targets.py data.label_type=",),
        text(ROWS, "data.label_type=number"),
        (r"For classes: (data\.label_type=class)\.",),
        drop=("data.label_type=number",),
    ),
    "columns of 0 and 1": Case(
        ("text/targets.py data.label=",),
        text(SWITCHES, label_type="classes"),
        (r"0 and 1: (data\.label=\[A,B\])",),
        {"A,B": "a,b"},
    ),
    "alike": Case(
        ("text/labels.py data.label_map=",),
        text(films("neg", "pos", "Neg ")),
        (r"equal: (data\.label_map=\{.*?\})",),
        code=0,
    ),
    "a missing value": Case(
        ("text/labels.py data.label_map=",),
        text(films("neg", "pos", "-")),
        (r"leave out its rows: (data\.label_map=\{.*?\})",),
        code=0,
    ),
    "rows without a label": Case(
        ("rows/drop.py data.drop=",),
        text(films("neg", "pos", "")),
        (r"leave out such rows: (data\.drop=\[.*?\])",),
    ),
    "rows that repeat": Case(
        ("text/repeats.py data.deduplicate=",),
        text([*films("neg", "pos"), *films("neg", "pos")], validation_fraction=0),
        (r"Remove them with (data\.deduplicate=true)",),
        code=0,
    ),
    "all rows of a split are left out": Case(
        ("text/dropped_rows.py data.splits.{}=",),
        text(films("neg", "pos", "-"), test=films("-"), label_map={"-": None}),
        (r"leave out the split: (data\.splits\.test=null)",),
    ),
    "a label that the model lacks": Case(
        ("text/labels.py data.label_map=",),
        then(
            text(), "evaluate", "out", "--file", "new.csv", change=lambda: write_file("new.csv", films("neg", "better"))
        ),
        (r"rename a label: (data\.label_map=\{.*?\})",),
        {"CLASS": "pos"},
    ),
    "classes of one row": Case(
        ("rows/splits.py data.validation_fraction=",),
        text(films("a", "b", "c", times=1), validation_fraction=0.5),
        (r"or (data\.validation_fraction=0)\.",),
    ),
    # -- tags
    "conll": Case(
        ("tags/data.py data.format=",),
        text("EU I-ORG\nfilm O\n\n" * 6, path="train.txt", tags=-1, label=None),
        (r"CoNLL file: (data\.format=conll)",),
    ),
    "a new tag": Case(
        ("tags/data.py data.tag_names=",),
        text(TAGGED, path="train.jsonl", test=OTHER_TAG, tags="tags", label=None),
        (r"this tag: (data\.tag_names=\[.*?\])",),
    ),
    "a split with a new tag": Case(
        ("tags/data.py data.splits.{}=",),
        text(TAGGED, path="train.jsonl", test=OTHER_TAG, tags="tags", label=None),
        (r"(data\.splits\.test=null)",),
    ),
    "scheme": Case(
        (),
        text(
            TAGGED, path="train.jsonl", tags="tags", label=None, plugins=[{"token-classification": {"scheme": "IOB2"}}]
        ),
        (r"(plugins\.token-classification\.scheme=\w+)",),
        code=0,
    ),
    # -- models
    "a classifier without a label": Case(
        ("models/checks.py data.label=",),
        text(label=None),
        (r"of their labels: (data\.label=COLUMN)",),
        {"COLUMN": "label"},
    ),
    "an encoder-decoder without a target": Case(
        ("models/checks.py data.target=",),
        text(PAIRS, path="train.jsonl", model=T5, label=None),
        (r"of its targets: (data\.target=COLUMN)",),
        {"COLUMN": "summary"},
    ),
    "target": Case(
        ("text/column_data.py data.{}=",),
        text(PAIRS, path="train.jsonl", model=T5, label=None, plugins=["seq2seq"]),
        (r"such as (data\.target=COLUMN)",),
        {"COLUMN": "summary"},
    ),
    "a local model instead of the hub": Case(
        ("models/hub.py model.name=", "text/model.py model.name="),
        then(
            text(),
            "train",
            "r.yaml",
            "output=new",
            "model={name: nobody/nothing}",
            "model.config=null",
            "model.tokenizer=null",
        ),
        (r"(model\.name=FOLDER)",),
        {"FOLDER": "out/model"},
    ),
    "a tokenizer": Case(
        ("text/model.py model.tokenizer=",),
        then(
            text(),
            "train",
            "r.yaml",
            "output=new",
            "model={name: bare, config: null, tokenizer: null}",
            change=strip_tokenizer,
        ),
        (r"(model\.tokenizer=FOLDER)",),
        {"FOLDER": "out/model"},
    ),
    "an image model": Case(
        ("models/hub.py model.name=",), images("nobody/nothing"), (r"(model\.name=FOLDER)",), {"FOLDER": "vit"}
    ),
    "a split of images": Case(
        ("image/data.py data.splits.validation=",),
        images(split="val"),
        (r"such as (data\.splits\.validation=val)\.",),
    ),
    "a template": Case(
        ("chat/model.py data.chat_template=",),
        chat,
        (r"(data\.chat_template=FILE\.jinja)",),
        {"FILE.jinja": "marked.jinja"},
    ),
    "collate": Case(
        ("tasks/module.py plugins.module.collate=",),
        module(data={"arguments": {"uneven": True}}),
        (r"(plugins\.module\.collate=FILE\.py:NAME)",),
        {"FILE.py:NAME": "net.py:short"},
        code=1,
    ),
    # -- plugins
    "one limit": Case(
        ("data/length_bucketing.py train.micro_batch_size=",),
        then(
            text(),
            "train",
            "r.yaml",
            "train.micro_batch_size=2",
            "--with",
            "length-bucketing",
            "plugins.length-bucketing.max_tokens=64",
        ),
        (r"one of them: (train\.micro_batch_size=null)",),
    ),
    "the other limit": Case(
        ("data/length_bucketing.py plugins.length-bucketing.max_tokens=",),
        then(
            text(),
            "train",
            "r.yaml",
            "train.micro_batch_size=2",
            "--with",
            "length-bucketing",
            "plugins.length-bucketing.max_tokens=64",
        ),
        (r"or (plugins\.length-bucketing\.max_tokens=null)",),
    ),
    "an optimizer without fused steps": Case(
        ("kernels/fused_optimizer.py --without",),
        lambda cli: ["plan", *module("train.optimizer=SparseAdam", plugins=["fused-optimizer"])(cli)[1:]],
        (r"Leave it out: (--without fused-optimizer)",),
    ),
    "no matrix for Muon": Case(
        ("training/muon.py train.optimizer=",),
        module("train.optimizer=Muon", model={"arguments": {"flat": True}}),
        (r"optimizer: (train\.optimizer=AdamW)",),
    ),
    "no validation split": Case(
        ("training/_monitor.py --without",),
        module(data={"arguments": {"splits": ["train"]}}, plugins=["early-stopping"]),
        (r"use (--without early-stopping)",),
    ),
    "another split than a fold": Case(
        ("sweep/folds.py --split",),
        then(module(plugins=["folds"]), "evaluate", "out", "--split", "validation"),
        (r"another split: (--split test)",),
        drop=("--split", "validation"),
    ),
    # -- the command line
    "an override": Case(("recipe/overrides.py train.lr=",), module("lr"), (r"such as (train\.lr=1e-4)",), drop=("lr",)),
    "a plugin that is not listed": Case(
        ("recipe/overrides.py --with", "recipe/loading.py --with"),
        module("plugins.ema.decay=0.9"),
        (r"Add it with (--with ema)",),
    ),
    "a required plugin": Case(
        ("plugins/declarations.py --with",), module("--with", "./plugin.py:Needs"), (r"Add it: (--with ema)",)
    ),
    "an empty slot": Case(
        ("plugins/declarations.py fastloop plugins",),
        module("--with", "./plugin.py:Shards"),
        (r"`(fastloop plugins)` shows who fills it",),
    ),
    "two plugins in a slot": Case(
        ("plugins/declarations.py --without",), module("--with", "ddp,fsdp"), (r"or (--without ddp)",)
    ),
    "the other of two plugins": Case(
        ("plugins/declarations.py --without",), module("--with", "ddp,fsdp"), (r"Keep one: (--without fsdp)",)
    ),
    "a package that is not installed": Case(
        ("plugins/resolve.py --without",),
        module("--with", "liger", "train.device=cpu"),
        (r"`(--without liger)`",),
    ),
    "a task without a trait": Case(
        ("fastloop_plugins/_task_traits.py --without",),
        module("--with", "cls-last-layer"),
        (r"Leave it out: (--without cls-last-layer)",),
    ),
    "a circle": Case(
        ("plugins/declarations.py --without",),
        module("--with", "./plugin.py:One,./plugin.py:Two"),
        (r"or a plugin: (--without \w+)",),
    ),
    "two plugins in a hook": Case(
        ("plugins/declarations.py --without",),
        module("--with", "./plugin.py:First,./plugin.py:Second"),
        (r"Keep one: (--without \w+)",),
    ),
    "an unknown plugin": Case(
        ("plugins/installed.py fastloop plugins",), module("--with", "nothing"), (r"`(fastloop plugins)`",)
    ),
    "a plugin's page": Case(
        ("cli/plugins.py fastloop plugins",),
        lambda _: ["plugins"],
        (r"`(fastloop plugins NAME)`",),
        {"NAME": "amp"},
        code=0,
    ),
    "a longer plan": Case(
        ("plan/show.py fastloop plan",),
        lambda cli: ["plan", *module()(cli)[1:]],
        (r"`(fastloop plan \S+ -v)`",),
        code=0,
    ),
    # -- runs
    "other data": Case(
        ("checks/resume.py train.on_data_change=",),
        then(
            stopped(text(plugins=["./plugin.py:Stops"])),
            "train",
            "r.yaml",
            "train.max_steps=2",
            "--resume",
            change=lambda: write_file("train.csv", ROWS[::-1]),
            code=75,
        ),
        (r"(train\.on_data_change=warn)",),
    ),
    "a complete run": Case(
        ("checkpoint/resume.py --resume",),
        then(
            module(save_every=None),
            "train",
            "r.yaml",
            "--resume",
            change=lambda: shutil.rmtree("out/checkpoints", ignore_errors=True),
        ),
        (r"Start a new run without --resume()",),
        drop=("--resume",),
    ),
    "a stopped run": Case(
        ("cli/train.py --resume",),
        stopped(module("train.max_steps=3", "data.arguments={uneven: false}", "--with", "./plugin.py:Stops")),
        (r"Continue with: (fastloop .*? --resume)",),
        code=75,
    ),
    "a model of a stopped run": Case(
        ("inference/target.py fastloop train", "inference/target.py --resume"),
        then(
            stopped(module("output=my runs/b", "train.max_steps=3", plugins=["./plugin.py:Stops"])),
            "predict",
            "my runs/b",
            "--split",
            "test",
            code=75,
        ),
        (r"complete it: (fastloop .*? --resume)",),
    ),
    "a report": Case(
        ("inference/evaluate.py fastloop report",),
        then(module(), "evaluate", "out"),
        (r"page: (fastloop report out)",),
        code=0,
    ),
    "nothing to predict": Case(
        ("inference/predict.py --split",), then(module(), "predict", "out"), (r"or (--split NAME)",), {"NAME": "test"}
    ),
    "a task that reads no files": Case(
        ("inference/chunks.py --split",),
        then(module(), "predict", "out", "net.py"),
        (r"a split: (--split test)",),
        drop=("net.py",),
    ),
    "a task that evaluates no files": Case(
        ("inference/target.py --split",),
        then(module(), "evaluate", "out", "--file", "net.py"),
        (r"Use (--split)\.",),
        {"--split": "--split test"},
        drop=("--file", "net.py"),
    ),
}
SLOW = {
    "values to sweep": Case(
        ("sweep/grid_runs.py train.lr=",),
        lambda cli: ["sweep", *module()(cli)[1:]],
        (r"such as (train\.lr=1e-5,3e-5),",),
    ),
    "another folder for a sweep": Case(
        ("trials/record.py output=",),
        then(module(), "sweep", "r.yaml", "train.lr=1e-5,3e-5", "output=out"),
        (r"such as (output=out-sweep)\.",),
        drop=("output=out",),
    ),
}
"""Cases that start processes."""

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "parts of commands that the code builds": (
        "cli/launch.py --nproc",
        "profile/suggestions.py plugins.{}.{}=",
        "sweep/grid_runs.py plugins.folds.of=",
        "trials/runs.py plugins.folds.number=",
        "trials/runs.py plugins.remote-output.folder=",
        "trials/runs.py train.seed=",
        "bench/selection.py --without",
    ),
    "names of options and commands in sentences that propose none of them": (
        "fastloop_migrate/keys.py --resume",
        "fastloop_migrate/import_config.py fastloop import",
        "inference/predict.py fastloop predict",
        "recipe/overrides.py --without",
        "report/read.py fastloop train",
        "report/read.py fastloop evaluate",
        "scale/model.py --without",
        "scale/model.py fastloop plan",
        "sweep/study.py fastloop sweep",
        "trials/record.py fastloop sweep",
        "chat/tokens.py data.max_length=",
        "streaming/dataset.py data.label_type=",
        "text/option_checks.py data.label_type=",
        "testing/conformance.py fastloop plan",
        "new/job.py fastloop new",
    ),
    "tests/tools/test_prepare.py trains on what is prepared, and gives data.streaming": (
        "prepare/command.py --with",
        "prepare/command.py fastloop train",
        "prepare/data.py data.streaming=",
    ),
    "tests/tools/test_inference_selection.py tries it": ("inference/target.py --without",),
    "several processes: tests/reliability and tests/plugins/strategies start them": (
        "fastloop_migrate/import_config.py --nproc",
        "cli/messages.py --resume",
        "cli/launch.py --resume",
        "distributed/accelerator.py --nproc",
        "distributed/ranks.py --nproc",
        "distributed/ranks.py fastloop train",
        "cli/quick_checks.py --nproc",
        "data/_watched_loader.py --resume",
        "scale/command.py --nproc",
        "strategies/_launcher.py --nproc",
        "checks/launcher.py --nproc",
        "checks/launcher.py fastloop train",
        "strategies/ddp.py --without",
        "strategies/_launcher.py fastloop train",
        "strategies/deepspeed.py --nproc",
        "strategies/deepspeed.py fastloop train",
    ),
    "a full disk, a lost file system, or a run that hangs: tests/reliability resumes such runs": (
        "checkpoint/store.py --resume",
        "fastloop/lifecycle.py --resume",
        "fastloop/run.py --resume",
        "guards/watchdog.py --resume",
        "memory/auto_micro_batch.py --resume",
    ),
    "measurements that take minutes, or depend on the machine": (
        "bench/ablation.py --without",
        "bench/plan.py --with",
        "inference/benchmarks.py fastloop export",
        "bench/plan.py fastloop plugins",
        "bench/command.py fastloop report",
        "observe/speed_check.py --with",
        "observe/speed_check.py fastloop profile",
        "sweep/search.py fastloop report",
        "sweep/search.py output=",
        "sweep/search.py train.batch_size=",
        "sweep/search.py train.lr=",
    ),
    "a plugin that needs CUDA: test_step_graph.py provokes its errors on a stand-in": (
        "kernels/step_graph.py --without",
    ),
    "the hub, or weights of torchvision and timm, which need a network": (
        "fastloop_migrate/keys.py fastloop export",
        "image/libraries.py model.pretrained=",
        "image/libraries.py model.weights=",
        "rows/paths.py data.name=",
    ),
    "run in the tests of the tool or plugin": (
        "fastloop_migrate/import_config.py fastloop plan",  # test_importing.py
        "fastloop_migrate/import_config.py fastloop train",
        "checkpoints/remote_output.py --resume",  # test_remote_output.py
        "export/source.py --checkpoint",  # test_export.py
        "fastloop/lifecycle.py fastloop plugins",  # test_cli.py
        "new/command.py fastloop train",  # tests/packages
        "scale/share.py train.optimizer=",  # test_scale.py
        "scale/change.py plugins.{}.{}=",  # test_scale_advice.py
        "trials/runs.py --resume",  # test_sweep.py
        "sweep/grid_runs.py fastloop report",
        "chat/data.py data.messages=",  # test_chat_rows.py
        "chat/data.py data.roles=",  # test_chat_roles.py
        "chat/template.py data.chat_template=",  # test_chat.py
        "chat/template.py data.train_on=",
        "streaming/shards.py data.files.train=",  # test_shards.py
        "streaming/shards.py data.name=",
        "text/padding_check.py data.padding=",  # test_padding.py
        "text/padding_check.py train.eval_batch_size=",
        "text/tokenizers.py model.tokenizer=",  # test_text_classification.py
    ),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_proposal_works(name: str, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = (CASES | SLOW)[name]
    arguments = case.make(cli)
    monkeypatch.setenv("COLUMNS", "3000")
    for pattern in case.found:
        code, out, err = cli(*arguments)
        shown = " ".join(f"{out} {err} ".split()) + " "
        assert code == case.code, shown
        match = re.search(pattern, shown)
        assert match is not None, shown
        proposal = match[1]
        for word, value in case.fill.items():
            proposal = proposal.replace(word, value)
        print(f"proposed: {proposal}")
        if proposal.startswith("fastloop "):
            arguments = shlex.split(proposal)[1:]
        else:
            added = [proposal] if re.match(r"[\w.-]+=", proposal) else shlex.split(proposal)
            arguments = [argument for argument in arguments if argument not in case.drop] + added
    code, out, err = cli(*arguments)
    assert code == 0, out + err


# -- the sources -------------------------------------------------------------------------------------------------------

COMMANDS = "bench|evaluate|export|import|new|plan|plugins|predict|profile|report|schema|sweep|train"
PROPOSAL = re.compile(
    r"(?:data|train|model|plugins)(?:\.(?:[a-z_-]+|\{\}))+=|(?<![\w-])--(?:with|without|resume|split|checkpoint|nproc)\b"
    rf"|fastloop (?:{COMMANDS})\b|(?<=[ `(])output="
)


def find_proposals(path: Path) -> Iterator[str]:
    """The beginning of each proposal in the strings of a file, without docstrings and the help of options."""
    tree, skipped = ast.parse(path.read_text(encoding="utf-8")), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "option",
            "Option",
            "Argument",
        ):
            skipped |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
        else:
            continue
        yield from (match[0] for match in PROPOSAL.finditer(words) if match[0] != words)


def test_every_proposal_of_the_sources_is_in_a_table() -> None:
    found = {
        f"{path.parent.name}/{path.name} {proposal}"
        for top in ("core", "plugins", "packages/fastloop-cpu/src", "packages/fastloop-migrate/src")
        for path in (ROOT / top).rglob("*.py")
        for proposal in find_proposals(path)
    }
    covered = {source for case in (CASES | SLOW).values() for source in case.sources}
    elsewhere = {source for sources in ELSEWHERE.values() for source in sources}
    assert covered & elsewhere == set(), "these have a case and a reason"
    assert found - covered - elsewhere == set(), "give these a case, or a reason"
    assert covered | elsewhere == found, "these are gone"

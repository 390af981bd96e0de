"""Each command and option that a message proposes works: a test provokes the message, and runs its proposal.

The proposals are fields of the messages, as programs read them with ``fastloop --json``. Whether all other remedies
name keys, options and commands that exist: ``test_remedies.py``.
"""

from __future__ import annotations

import ast
import bz2
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_helpers import write_images, write_vit
from tag_helpers import write_jsonl
from text_helpers import TINY, TINY_GPT

from fastloop.problem import shell_word

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
PRINTED = re.compile(r"`(fastloop [^`]+)`|(?<=: )(fastloop .+)$", re.MULTILINE)
"""A command in the output of another one: between backquotes, or at the end of a line."""
COMMAND_START = re.compile(r"fastloop (train|plan|bench|evaluate|export|predict|prepare|profile|report|sweep) ")
"""The text of an f-string before the arguments of a command."""


@dataclass
class Case:
    """A command, and proposals in its output.

    Attributes:
        make: Writes the files, and returns the command's arguments. It gets the command line.
        found: The beginnings of proposals, one after another: each is a command, options, or an override.
        fill: A part of a proposal that stands for a value -> the value.
        drop: Arguments of the command that a proposal replaces.
        code: The exit code of the command: 2 for an error, 0 for a warning or another line of output.
    """

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


def in_a_used_folder(cli: Any) -> list[str]:
    """Train into a folder that holds files of the user."""
    arguments = module()(cli)
    write_file("out/notes.txt", "mine")
    return arguments


CASES: dict[str, Case] = {
    # -- files and columns
    "delimiter, then columns": Case(
        text("a stirring film;pos\ndull from start to end;neg\nfine work by all;pos\na waste of time;neg\n"),
        (
            "data.read.delimiter=",
            "data.read.columns=[",
        ),
    ),
    "delimiter of a file without header": Case(
        text("a film;pos\na bore;neg\n" * 4, read={"columns": ["text", "label"]}),
        ("data.read.delimiter=",),
    ),
    "stray quote": Case(
        text(HEADER + '"good" film,pos\nbad,neg\n' * 4),
        ("data.read.quoting=none",),
    ),
    "quotes are text": Case(
        text(HEADER + 'bad,neg\n"a dull film,neg\na fine one",pos\nbad,neg\n'),
        ("data.read.quoting=none",),
    ),
    "a text spans lines": Case(
        text(HEADER + 'bad,neg\n"a dull film,neg\na fine one",pos\nbad,neg\n'),
        ("data.read.quoting=double",),
    ),
    "encoding": Case(
        text((HEADER + "café,pos\nbad,neg\n").encode("cp1252")),
        ("data.read.encoding=cp1252",),
    ),
    "utf-16": Case(
        text((HEADER + "fine,pos\nbad,neg\n").encode("utf-16-le")),
        ("data.read.encoding=",),
    ),
    "a folder of files": Case(
        then(text(path="train/train-1.csv"), "train", "r.yaml", "data.files.train=train"),
        ("data.files.train=",),
    ),
    "a split as a key": Case(
        then(text(), "train", "r.yaml", "data.test=train.csv"),
        ("data.files.test=",),
        drop=("data.test=train.csv",),
    ),
    "a file compressed by bz2": Case(
        text(bz2.compress((HEADER + "".join(f"{text},{label}\n" for text, label in ROWS)).encode())),
        ("data.read.compression=bz2",),
    ),
    "a file as name": Case(
        then(text(), "train", "r.yaml", "data.files=null", "data.name=train.csv"),
        ("data.files.train=",),
    ),
    "a local file instead of the hub": Case(
        then(text(), "train", "r.yaml", "data.files=null", "data.name=nobody/nothing"),
        ("data.files.train=FILE",),
        {"FILE": "train.csv"},
    ),
    "streaming": Case(
        text([{"text": text, "label": label} for text, label in ROWS], path="train.jsonl", lanes=1),
        ("data.streaming=true",),
    ),
    "samples of a stream": Case(
        lambda cli: (
            [
                "plan",
                *text([{"text": text, "label": label} for text, label in ROWS], path="train.jsonl", streaming=True)(
                    cli
                )[1:],
            ]
            + ["--samples", "1"]
        ),
        ("data.streaming=false",),
    ),
    # -- labels
    "label": Case(
        text(plugins=["text-classification"], label=None),
        ("data.label=label",),
    ),
    "text among numbers": Case(
        text(films("0", "1", "2+")),
        ("data.label_map={",),
        {"NAME": "2"},
    ),
    "a number among texts": Case(
        text(films("neg", "pos", "3")),
        ("data.label_map={",),
        {"NAME": "great"},
    ),
    "another spelling": Case(
        text(test=films("Pos ", "neg")),
        ("data.label_map={'Pos ': 'pos'",),
    ),
    "rows of another label": Case(
        text(test=films("-", "neg")),
        ("data.label_map={",),
    ),
    "a split with another label": Case(text(test=films("-", "neg")), ("data.splits.test=null",)),
    "rows of -1": Case(
        text(films(0, 1, -1)),
        ("data.label_map={-1: null",),
    ),
    "a name for -1": Case(
        text(films(0, 1, -1)),
        ("data.label_map={-1: NAME",),
        {"NAME": "2"},
    ),
    "numbers with gaps": Case(
        text(films(5, 7)),
        ("data.label_map={",),
        {"NUMBER: NAME": "5: neg, 7: pos"},
    ),
    "numbers from 1": Case(text(films(1, 2, 3)), ("data.label_offset=1",)),
    "fractions": Case(text(films(0.5, 1.5)), ("data.label_type=number",)),
    "many numbers": Case(
        text(films(*range(20), times=1)),
        ("data.label_type=number",),
    ),
    "lists": Case(
        text(LISTS, path="train.jsonl"),
        ("data.label_type=classes",),
    ),
    "floats": Case(
        text(HALVES, path="train.jsonl"),
        ("data.label_type=number",),
    ),
    "names, and no numbers": Case(
        text(ROWS, "data.label_type=number"),
        ("data.label_type=class",),
        drop=("data.label_type=number",),
    ),
    "columns of 0 and 1": Case(
        text(SWITCHES, label_type="classes"),
        ("data.label=[A,B]",),
        {"A,B": "a,b"},
    ),
    "alike": Case(
        text(films("neg", "pos", "Neg ")),
        ("data.label_map={",),
        code=0,
    ),
    "a missing value": Case(
        text(films("neg", "pos", "-")),
        ("data.label_map={",),
        code=0,
    ),
    "rows without a label": Case(
        text(films("neg", "pos", "")),
        ("data.drop=[",),
    ),
    "empty texts": Case(
        text([*films("neg", "pos"), (" ", "neg")]),
        ("data.drop=[",),
        code=0,
    ),
    "rows that repeat": Case(
        text([*films("neg", "pos"), *films("neg", "pos")], validation_fraction=0),
        ("data.deduplicate=true",),
        code=0,
    ),
    "all rows of a split are left out": Case(
        text(films("neg", "pos", "-"), test=films("-"), label_map={"-": None}),
        ("data.splits.test=null",),
    ),
    "a label that the model lacks": Case(
        then(
            text(), "evaluate", "out", "--file", "new.csv", change=lambda: write_file("new.csv", films("neg", "better"))
        ),
        ("data.label_map={",),
        {"CLASS": "pos"},
    ),
    "classes of one row": Case(
        text(films("a", "b", "c", times=1), validation_fraction=0.5),
        ("data.validation_fraction=0",),
    ),
    # -- tags
    "conll": Case(
        text("EU I-ORG\nfilm O\n\n" * 6, path="train.txt", tags=-1, label=None),
        ("data.format=conll",),
    ),
    "a new tag": Case(
        text(TAGGED, path="train.jsonl", test=OTHER_TAG, tags="tags", label=None),
        ("data.tag_names=[",),
    ),
    "a sentence without words": Case(
        text([*TAGGED, {"words": [], "tags": []}], path="train.jsonl", tags="tags", label=None),
        ("data.drop=[",),
        code=0,
    ),
    "a split with a new tag": Case(
        text(TAGGED, path="train.jsonl", test=OTHER_TAG, tags="tags", label=None),
        ("data.splits.test=null",),
    ),
    "scheme": Case(
        text(
            TAGGED, path="train.jsonl", tags="tags", label=None, plugins=[{"token-classification": {"scheme": "IOB2"}}]
        ),
        ("plugins.token-classification.scheme=",),
        code=0,
    ),
    # -- models
    "a classifier without a label": Case(
        text(label=None),
        ("data.label=COLUMN",),
        {"COLUMN": "label"},
    ),
    "an encoder-decoder without a target": Case(
        text(PAIRS, path="train.jsonl", model=T5, label=None),
        ("data.target=COLUMN",),
        {"COLUMN": "summary"},
    ),
    "target": Case(
        text(PAIRS, path="train.jsonl", model=T5, label=None, plugins=["seq2seq"]),
        ("data.target=COLUMN",),
        {"COLUMN": "summary"},
    ),
    "a local model instead of the hub": Case(
        then(
            text(),
            "train",
            "r.yaml",
            "output=new",
            "model={name: nobody/nothing}",
            "model.config=null",
            "model.tokenizer=null",
        ),
        ("model.name=FOLDER",),
        {"FOLDER": "out/model"},
    ),
    "a tokenizer": Case(
        then(
            text(),
            "train",
            "r.yaml",
            "output=new",
            "model={name: bare, config: null, tokenizer: null}",
            change=strip_tokenizer,
        ),
        ("model.tokenizer=FOLDER",),
        {"FOLDER": "out/model"},
    ),
    "an image model": Case(images("nobody/nothing"), ("model.name=FOLDER",), {"FOLDER": "vit"}),
    "a split of images": Case(
        images(split="val"),
        ("data.splits.validation=val",),
    ),
    "a template": Case(
        chat,
        ("data.chat_template=FILE.jinja",),
        {"FILE.jinja": "marked.jinja"},
    ),
    "collate": Case(
        module(data={"arguments": {"uneven": True}}),
        ("plugins.module.collate=FILE.py:NAME",),
        {"FILE.py:NAME": "net.py:short"},
        code=1,
    ),
    # -- plugins
    "one limit": Case(
        then(
            text(),
            "train",
            "r.yaml",
            "train.micro_batch_size=2",
            "--with",
            "length-bucketing",
            "plugins.length-bucketing.max_tokens=64",
        ),
        ("train.micro_batch_size=null",),
    ),
    "the other limit": Case(
        then(
            text(),
            "train",
            "r.yaml",
            "train.micro_batch_size=2",
            "--with",
            "length-bucketing",
            "plugins.length-bucketing.max_tokens=64",
        ),
        ("plugins.length-bucketing.max_tokens=null",),
    ),
    "an argument of the optimizer that has a key of train": Case(
        module("train.optimizer={name: SGD, lr: 0.1}"),
        ("train.lr=0.1",),
        drop=("train.optimizer={name: SGD, lr: 0.1}",),
    ),
    "an optimizer without fused steps": Case(
        lambda cli: ["plan", *module("train.optimizer=SparseAdam", plugins=["fused-optimizer"])(cli)[1:]],
        ("--without fused-optimizer",),
    ),
    "no matrix for Muon": Case(
        module("train.optimizer=Muon", model={"arguments": {"flat": True}}),
        ("train.optimizer=AdamW",),
    ),
    "no validation split": Case(
        module(data={"arguments": {"splits": ["train"]}}, plugins=["early-stopping"]),
        ("--without early-stopping",),
    ),
    "another split than a fold": Case(
        then(module(plugins=["folds"]), "evaluate", "out", "--split", "validation"),
        ("--split test",),
        drop=("--split", "validation"),
    ),
    # -- the command line
    "an override": Case(module("lr"), ("train.lr=1e-4",), drop=("lr",)),
    "a plugin that is not listed": Case(module("plugins.ema.decay=0.9"), ("--with ema",)),
    "a required plugin": Case(module("--with", "./plugin.py:Needs"), ("--with ema",)),
    "an empty slot": Case(
        module("--with", "./plugin.py:Shards"),
        ("fastloop plugins",),
    ),
    "two plugins in a slot": Case(module("--with", "ddp,fsdp"), ("--without ddp",)),
    "the other of two plugins": Case(module("--with", "ddp,fsdp"), ("--without fsdp",)),
    "a package that is not installed": Case(
        module("--with", "liger", "train.device=cpu"),
        ("--without liger",),
    ),
    "a task without a trait": Case(
        module("--with", "cls-last-layer"),
        ("--without cls-last-layer",),
    ),
    "a circle": Case(
        module("--with", "./plugin.py:One,./plugin.py:Two"),
        ("--without",),
    ),
    "two plugins in a hook": Case(
        module("--with", "./plugin.py:First,./plugin.py:Second"),
        ("--without first",),
    ),
    "an unknown plugin": Case(module("--with", "nothing"), ("fastloop plugins",)),
    "a plugin's page": Case(
        lambda _: ["plugins"],
        ("fastloop plugins NAME",),
        {"NAME": "amp"},
        code=0,
    ),
    "a longer plan": Case(
        lambda cli: ["plan", *module()(cli)[1:]],
        ("fastloop plan",),
        code=0,
    ),
    # -- runs
    "other data": Case(
        then(
            stopped(text(plugins=["./plugin.py:Stops"])),
            "train",
            "r.yaml",
            "train.max_steps=2",
            "--resume",
            change=lambda: write_file("train.csv", ROWS[::-1]),
            code=75,
        ),
        ("train.on_data_change=warn",),
    ),
    "a damaged checkpoint": Case(
        then(
            module(max_steps=4, save_every=2, keep_checkpoints=2),
            "train",
            "r.yaml",
            "--resume",
            "out/checkpoints/step-00000004",
            change=lambda: Path("out/checkpoints/step-00000004/state.json").write_text("{}"),
        ),
        ("--resume out/checkpoints/step-00000002",),
        drop=("--resume", "out/checkpoints/step-00000004"),
    ),
    "a complete run": Case(
        then(
            module(save_every=None),
            "train",
            "r.yaml",
            "--resume",
            change=lambda: shutil.rmtree("out/checkpoints", ignore_errors=True),
        ),
        ("",),
        drop=("--resume",),
    ),
    "a stopped run": Case(
        stopped(module("train.max_steps=3", "data.arguments={uneven: false}", "--with", "./plugin.py:Stops")),
        ("fastloop",),
        code=75,
    ),
    "a model of a stopped run": Case(
        then(
            stopped(module("output=my runs/b", "train.max_steps=3", plugins=["./plugin.py:Stops"])),
            "predict",
            "my runs/b",
            "--split",
            "test",
            code=75,
        ),
        ("fastloop",),
    ),
    "a report": Case(
        then(module(), "evaluate", "out"),
        ("fastloop report out",),
        code=0,
    ),
    "a folder of other files": Case(in_a_used_folder, ("output=out-run",)),
    "nothing to predict": Case(then(module(), "predict", "out"), ("--split NAME",), {"NAME": "test"}),
    "a task that reads no files": Case(
        then(module(), "predict", "out", "net.py"),
        ("--split test",),
        drop=("net.py",),
    ),
    "a task that evaluates no files": Case(
        then(module(), "evaluate", "out", "--file", "net.py"),
        ("--split NAME",),
        {"NAME": "test"},
        drop=("--file", "net.py"),
    ),
}
SLOW = {
    "values to sweep": Case(lambda cli: ["sweep", *module()(cli)[1:]], ("train.lr=1e-5,3e-5",)),
}
"""Cases that start processes."""


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_proposal_works(name: str, cli: Any) -> None:
    case = (CASES | SLOW)[name]
    arguments = case.make(cli)
    for beginning in case.found:
        code, out, err = cli("--json", *arguments)
        assert code == case.code, out + err
        proposal = find_proposal(beginning, out, err)
        for word, value in case.fill.items():
            proposal = proposal.replace(word, value)
        print(f"proposed: {proposal}")
        if proposal.startswith("fastloop "):
            arguments = shlex.split(proposal)[1:]
        else:
            words = shell_word(proposal) if re.match(r"[\w.-]+=", proposal) else proposal
            added = shlex.split(words)
            arguments = [argument for argument in arguments if argument not in case.drop] + added
    code, out, err = cli(*arguments)
    assert code == 0, out + err


def find_proposal(beginning: str, out: str, err: str) -> str:
    """The only proposal with this beginning, of errors and warnings as JSON, or of other output. Empty for an empty
    beginning: the case only drops arguments."""
    if not beginning:
        return ""
    proposals = [match[1] or match[2] for match in PRINTED.finditer(out)]
    for line in err.splitlines():
        if line.startswith("{"):
            problem = json.loads(line)
            proposals += problem["proposals"]
            overrides = [proposal for proposal in problem["proposals"] if re.match(r"[\w.-]+=", proposal)]
            for override in overrides:
                assert shell_word(override) in problem["message"]
    matches = {proposal for proposal in proposals if proposal.startswith(beginning)}
    assert len(matches) == 1, f"{proposals} in:\n{out}{err}"
    return matches.pop()


def unquoted_words(text: ast.JoinedStr) -> list[str]:
    """The values of an f-string in a command without ``quote``, as source text. A command ends at a backquote."""
    unquoted = []
    is_command = False
    for value in text.values:
        if isinstance(value, ast.Constant):
            *earlier, last = str(value.value).split("`")
            if earlier:
                is_command = False
            if COMMAND_START.search(last):
                is_command = True
        elif is_command and isinstance(value, ast.FormattedValue):
            source = ast.unparse(value.value)
            if not source.startswith(("quote(", "shlex.quote(")):
                unquoted.append(source)
    return unquoted


def test_values_in_proposed_commands_are_quoted():
    """`fastloop report {folder}` needs quotes for a folder with a space."""
    texts = 0
    for folder in ("core", "plugins", "packages"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    texts += 1
                    assert unquoted_words(node) == [], f"{path.relative_to(ROOT)}, line {node.lineno}"
    assert texts > 100

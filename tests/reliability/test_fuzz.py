"""Recipes, overrides, options, data and checkpoints, changed at random: each gives an answer or one named error, soon.

CI has 200 examples of each, always the same; more of them (FASTLOOP_RELIABILITY) differ from run to run.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fault_runs import times
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from fastloop import CheckpointError, FastloopError, PluginCrash, checkpoint
from fastloop.cli.option_table import describe
from fastloop.data.loaders import divide_step
from fastloop.plugins.declared_options import options_of
from fastloop.plugins.installed import installed, is_own, load
from fastloop.plugins.plugin import listed_at
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe, make_recipe, safe_yaml, secrets, shipped_recipes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),  # hypothesis' own, of a huge text
]
SECONDS = 10
"""Limits of one example, far above the usual values."""


def fuzz(examples: int = 200) -> Callable[[Any], Any]:
    return settings(
        max_examples=times(examples),
        derandomize=times(1) == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@contextmanager
def soon() -> Iterator[None]:
    """A hang is a failure that says where."""

    def stop(signum: int, frame: Any) -> None:
        raise AssertionError(f"still busy after {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def named_errors_only() -> Iterator[None]:
    """Any error that is not fastloop's own is raised again and fails the test, and so does a plugin that crashes."""
    try:
        with soon():
            yield
    except PluginCrash as error:
        raise AssertionError(f"a plugin of ours crashed: {error}") from error
    except FastloopError as error:
        said, code = str(error), error.exit_code
        event(type(error).__name__)
    else:
        said, code = "taken", 1
        event(said)
    assert said.strip()
    assert len(said) < 20_000
    assert code in (1, 2)


# -- what is changed at random -----------------------------------------------------------------------------------------

WORDS = (
    "~ ~nobody/x - . .. / * [ { ??? null nowhere.py nowhere.py:Class : a:b .py :.py a.b.c:d ${train.lr} ${train} "
    "${nothing} ${ ${oc.env:HOME} 1e400 -0 0x 1_0 = \\ é 🙂 true amp plugins %s{} (hidden) https://x/y a/b/c/d "
    "__class__ name 12345678901234567890"
)
NASTY = [*WORDS.split(), "", " ", "a\0b", "\x07", "\u202e", "x" * 5000, "x" * 5000 + ".py", "${train.lr}" * 50]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(-(10**300), 10**300),
    st.floats(),
    st.sampled_from(NASTY),
    st.text(max_size=8),
)
keys = st.one_of(
    st.sampled_from(["name", "lr", "amp", "type", "module", "arguments", "config", "files", *NASTY]),
    st.text(max_size=5),
)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(keys, st.integers(0, 3)), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values below the top."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here for key, value in items for here in [(*path, key), *places(value, (*path, key))]]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def mutate(draw: Any, tree: Any) -> Any:
    """One change somewhere in a tree of mappings and lists."""
    paths = places(tree)
    if not paths:
        return draw(junk)
    path = draw(st.sampled_from(paths))
    parent, key = at(tree, path[:-1]), path[-1]
    kind = draw(st.sampled_from(["replace", "replace", "delete", "add", "rename", "wrap", "unwrap", "swap", "again"]))
    if kind == "replace":
        parent[key] = draw(junk)
    elif kind == "delete":
        del parent[key]
    elif kind == "add":
        if isinstance(parent, dict):
            parent[draw(keys)] = draw(junk)
        else:
            parent.insert(key, draw(junk))
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw(st.one_of(keys, st.integers(0, 9), st.booleans()))] = parent.pop(key)
    elif kind == "wrap":
        parent[key] = draw(st.sampled_from([[parent[key]], {"name": parent[key]}, [parent[key]] * 2, str(parent[key])]))
    elif kind == "unwrap" and isinstance(parent[key], dict | list) and parent[key]:
        parent[key] = next(iter(parent[key].values() if isinstance(parent[key], dict) else parent[key]))
    elif kind == "swap":
        other = draw(st.sampled_from(paths))
        parent[key] = copy.deepcopy(at(tree, other))
    elif kind == "again" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    return tree


def damage_text(draw: Any, text: str) -> str:
    """One change somewhere in a text."""
    where, size = draw(st.integers(0, max(len(text) - 1, 0))), draw(st.integers(0, 12))
    kind = draw(st.sampled_from(["insert", "delete", "double", "cut", "line", "indent"]))
    if kind == "insert":
        piece = draw(
            st.one_of(
                st.sampled_from(
                    [
                        "\t",
                        "\n",
                        ": ",
                        "- ",
                        "{",
                        "[",
                        "]",
                        "}",
                        "&a ",
                        "*a",
                        "!!python/none",
                        "'",
                        '"',
                        "#",
                        "\0",
                        "---\n",
                        "<<: ",
                        "? ",
                    ]
                ),
                st.text(max_size=3),
            )
        )
        return text[:where] + piece + text[where:]
    if kind == "delete":
        return text[:where] + text[where + size :]
    if kind == "double":
        return text[:where] + text[where : where + size] * 2 + text[where + size :]
    if kind == "cut":
        return text[:where]
    lines = text.splitlines(keepends=True) or [""]
    number = draw(st.integers(0, len(lines) - 1))
    lines[number] = lines[number] * 2 if kind == "line" else "  " + lines[number]
    return "".join(lines)


def bases() -> dict[str, dict[str, Any]]:
    """The shipped recipes, and one that lists much more."""
    found = {name: safe_yaml.load(path.read_text(encoding="utf-8"), name) for name, path in shipped_recipes().items()}
    many = [
        "amp",
        {"compile": {"backend": "eager"}},
        {"ema": {"decay": 0.9}},
        {"early-stopping": {"patience": 2}},
        "length-bucketing",
        {"lora": {"r": 4}},
    ]
    many += [
        {"lr-scheduler": {"schedule": "cosine", "warmup": 0.1}},
        {"dataloader-workers": {"num_workers": 2}},
        "ddp",
        {"progress": {"every": 3}},
        "tensorboard",
    ]
    found["many"] = copy.deepcopy(found["quickstart"]) | {"plugins": many}
    return found


@st.composite
def recipes(draw: Any) -> str:
    """The text of a recipe that was a good one."""
    tree = copy.deepcopy(draw(st.sampled_from(list(BASES.values()))))
    for _ in range(draw(st.integers(1, 4))):
        tree = mutate(draw, tree)
    text: str = yaml.safe_dump(
        tree, allow_unicode=draw(st.booleans()), default_flow_style=draw(st.sampled_from([None, False, True]))
    )
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        text = damage_text(draw, text)
    return text


BASES = bases()


def check(recipe: Any) -> None:
    """All that `fastloop plan` does with a recipe; and it is the same recipe when it was saved and read again."""
    resolved = resolve(recipe)
    recipe, resolution = resolved.recipe, resolved.plugins
    with resolution.attributing_errors():
        resolution.hooks.check_recipe(recipe=recipe, plugins=resolution)
        resolution.configure(recipe)
    divide_step(recipe, 1)
    OmegaConf.save(OmegaConf.create(secrets.hidden(recipe.to_dict())), "saved.yaml")
    assert load_recipe("saved.yaml").to_dict() == recipe.to_dict()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that shipped recipes name."""
    home = next(iter(shipped_recipes().values())).parent
    for file in home.iterdir():
        if file.is_file():
            shutil.copy(file, file.name)


def test_recipes(beside, record_property):
    """a recipe with anything in it: accepted, and the same when saved and read again, or refused"""

    @fuzz()
    @given(recipes())
    def attempt(text: str) -> None:
        Path("r.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        with named_errors_only():
            check(load_recipe("r.yaml"))

    attempt()
    record_property("faults", times(200))


def test_bytes_as_a_recipe(record_property):
    """a recipe file with any bytes: refused by one message, or taken"""

    @fuzz()
    @given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda text: text.encode())))
    def attempt(data: bytes) -> None:
        Path("r.yaml").write_bytes(data)
        with named_errors_only():
            load_recipe("r.yaml")

    attempt()
    record_property("faults", times(200))


def test_overrides(record_property):
    """any words on the command line: taken, or refused by one message"""
    known = [".".join(map(str, path)) for path in places(BASES["quickstart"]) if "plugins" not in path]
    paths = st.one_of(
        st.sampled_from(
            [
                *known,
                "plugins.checkpoint-best.monitor",
                "plugins.checkpoint-best",
                "plugins",
                "plugins.",
                "train.",
                "train[lr]",
                "model.a.b.c",
                "train" + ".a" * 500,
            ]
        ),
        st.text(max_size=10),
        st.sampled_from(NASTY),
    )
    values = st.one_of(
        junk.map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip()),
        st.text(max_size=10),
        st.sampled_from(NASTY),
    )
    items = st.one_of(st.tuples(paths, values).map("=".join), st.text(max_size=12))
    plugins = st.one_of(st.sampled_from([*installed(), "amp", "fastloop-train:amp", *NASTY]), st.text(max_size=8))

    @fuzz()
    @given(st.lists(items, max_size=3), st.lists(plugins, max_size=2), st.lists(plugins, max_size=2))
    def attempt(overrides: list[str], with_plugins: list[str], without: list[str]) -> None:
        with named_errors_only():
            load_recipe("quickstart", overrides, with_plugins, without)

    attempt()
    record_property("faults", times(200))


# -- options of plugins ------------------------------------------------------------------------------------------------


def values_for(kind: str) -> st.SearchStrategy[Any]:
    """Values near what an option's type, as tables show it, asks for; and others."""
    words = [word.strip() for word in kind.split("|")]
    near = [st.just(word) for word in words]
    near += [st.integers(-2, 9), st.floats(-0.5, 1.5)] * any(word in ("int", "float") for word in words)
    near += [st.booleans()] * ("bool" in words)
    return st.one_of(*near, junk)


def test_options_of_every_plugin(record_property):
    """any options of any plugin: taken, or refused with the option's place"""
    classes = {name: load(name) for name, point in installed().items() if is_own(point)}
    assert len(classes) > 25

    @fuzz()
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(classes)))
        kinds = {info.name: info.type for info in describe(options_of(classes[name]))}
        chosen = data.draw(st.lists(st.sampled_from([*kinds, "unknown"]), max_size=3, unique=True))
        options = {key: data.draw(values_for(kinds.get(key, "int"))) for key in chosen}
        with named_errors_only():
            with listed_at(f"r.yaml: plugins.{name}"):
                plugin = classes[name](**options)
            assert plugin.option_values().keys() == kinds.keys()
            recipe = make_recipe({"plugins": [{name: options}]})
            resolved = resolve(recipe)
            assert name in resolved.plugins.names() or resolved.recipe.selected, "or it selected others in its place"

    attempt()
    record_property("faults", times(200))


# -- data --------------------------------------------------------------------------------------------------------------

texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "NA", "null", "\0", "\r\n", '"', "🙂" * 10, "x" * 200_000, "1", "a,b", "\ufeff"]),
)
cells = st.one_of(texts, junk)
rows = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": texts, "label": st.sampled_from([0, 1])}),
        st.fixed_dictionaries({"text": texts, "label": st.sampled_from(["good", "bad"])}),
        st.dictionaries(st.sampled_from(["text", "label", "more", ""]), cells, max_size=3),
        junk,
    ),
    max_size=6,
)


def read_data(path: str) -> Any:
    from fastloop_plugins.text.data import TextData

    recipe = make_recipe(
        {"data": {"files": {"train": path}, "text": "text", "label": "label", "validation_fraction": 0.0}}
    )
    return TextData(recipe, labelled=True).load()["train"]


def test_rows_of_a_dataset(record_property):
    """rows of any types, columns and lengths: read unchanged, or refused with file and row"""

    @fuzz()
    @given(rows)
    def attempt(given_rows: list[Any]) -> None:
        Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given_rows), encoding="utf-8")
        with named_errors_only():
            found = read_data("train.jsonl")
            assert list(found.texts) == [row.get("text") or "" for row in given_rows]
            assert len(found.labels) == len(given_rows)

    attempt()
    record_property("faults", times(200))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt"])
def test_corrupt_data_files(suffix, record_property):
    """data files with bytes changed, lost or added: read, or refused by name"""
    good = [{"text": f"film {i}, fine\nand long", "label": ("good", "bad")[i % 2]} for i in range(12)]
    path = Path(f"train{suffix}")
    if suffix in (".csv", ".tsv", ".parquet"):
        import pyarrow
        from pyarrow import csv, parquet

        table = pyarrow.Table.from_pylist(good)
        if suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            csv.write_csv(table, path, csv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ","))
    elif suffix == ".json":
        path.write_text(json.dumps(good))
    else:
        path.write_text("".join((json.dumps(row) if suffix == ".jsonl" else row["text"]) + "\n" for row in good))
    whole = path.read_bytes()

    @fuzz(100)
    @given(damages(len(whole)))
    def attempt(harm: Harm) -> None:
        path.write_bytes(harm.done_to(whole))
        with named_errors_only():
            read_data(str(path))

    attempt()
    record_property("faults", times(100))


# -- checkpoints -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Harm:
    """Changes to the bytes of a file."""

    kind: str
    where: int
    size: int

    def done_to(self, data: bytes) -> bytes:
        start = self.where % max(len(data), 1)
        if self.kind == "flip":
            return data[:start] + bytes([data[start] ^ (1 << self.size % 8)]) + data[start + 1 :] if data else b"x"
        if self.kind == "cut":
            return data[:start]
        if self.kind == "zeros":
            return data[:start] + bytes(len(data[start : start + self.size])) + data[start + self.size :]
        if self.kind == "lose":
            return data[:start] + data[start + self.size :]
        return data[:start] + bytes(range(self.size % 256)) + data[start:]


def damages(size: int) -> st.SearchStrategy[Harm]:
    return st.builds(
        Harm,
        st.sampled_from(["flip", "flip", "cut", "zeros", "lose", "grow"]),
        st.integers(0, size - 1),
        st.integers(1, 64),
    )


def same(left: Any, right: Any) -> bool:
    """Equal in every bit."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def test_corrupt_checkpoints(tiny_run, tmp_path, record_property):
    """any checkpoint file with bytes changed, lost or added: found, or without effect"""
    tiny_run(["ema", {"lr-scheduler": {"warmup": 0.1}}], max_steps=3, output=tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    before = checkpoint.read(folder)

    @fuzz()
    @given(st.sampled_from(sorted(files)), damages(max(map(len, files.values()))))
    def attempt(name: str, harm: Harm) -> None:
        harmed = harm.done_to(files[name])
        (folder / name).write_bytes(harmed)
        with soon():
            try:
                found, _ = checkpoint.find_newest(tmp_path / "run")
            except CheckpointError:
                assert harmed != files[name]
            else:
                assert same(checkpoint.read(found), before)
        (folder / name).write_bytes(files[name])

    attempt()
    record_property("faults", times(200))


def test_corrupt_checkpoints_with_valid_checksums(tiny_run, tmp_path, record_property):
    """damage that checksums do not show: read, or refused by one message"""
    tiny_run([], max_steps=3, output=tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    files = {name: (folder / name).read_bytes() for name in ("model.safetensors", "state.safetensors", "state.json")}

    @fuzz()
    @given(st.sampled_from(sorted(files)), damages(max(map(len, files.values()))))
    def attempt(name: str, harm: Harm) -> None:
        (folder / name).write_bytes(harm.done_to(files[name]))
        with named_errors_only():
            checkpoint.read(folder)
        (folder / name).write_bytes(files[name])

    attempt()
    tree = json.loads(files["state.json"])

    @fuzz()
    @given(st.data())
    def attempt_tree(data: st.DataObject) -> None:
        (folder / "state.json").write_text(json.dumps(mutate(data.draw, copy.deepcopy(tree))))
        with named_errors_only():
            checkpoint.read(folder)

    attempt_tree()
    record_property("faults", times(400))

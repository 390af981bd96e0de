"""Recipes, checkpoints, models, data and caches from others run no code, read no other files, and reveal no secrets.

The hostile pickle of these tests writes a file when it is loaded, as the first test shows.

Modules:
    core/fastloop/recipe/secrets.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from omegaconf import OmegaConf

from fastloop import CheckpointError, Plugin, RecipeError, UsageError, checkpoint, hookimpl
from fastloop.cli import main
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe, make_recipe, secrets
from fastloop.run import Run
from fastloop.testing import assert_problem, expect_problem

TINY = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 32,
}
ROWS = [{"text": f"{('dull', 'fine')[i % 2]} film number {i}", "label": i % 2} for i in range(24)]


def write(text: str, name: str = "r.yaml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastloop", *arguments])
    with pytest.raises(SystemExit) as exited:
        main()
    return int(exited.value.code or 0)


# -- recipes -----------------------------------------------------------------------------------------------------------

BOMB = "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n" for last, name in zip("abcdefgh", "bcdefghi", strict=True)
)

# name -> (recipe, the line with the error, the text that the message must contain)
HOSTILE: dict[str, tuple[str, int, str]] = {
    "a call": (
        "train: {epochs: 1}\nmodel: !!python/object/apply:os.system ['touch pwned']\n",
        2,
        "yaml-tag !!python/object/apply:os.system",
    ),
    "an object": (
        "model:\n  name: !!python/object:fastloop.run.Run {}\n",
        2,
        "yaml-tag !!python/object:fastloop.run.Run",
    ),
    "a path object, which OmegaConf would make": (
        "model:\n\n  a: !!python/object/apply:pathlib.Path [x]\n",
        3,
        "yaml-tag pathlib.Path",
    ),
    "a function by name": (
        "train: {epochs: 1}\nplugins:\n- !!python/name:os.system\n",
        3,
        "yaml-tag !!python/name:os.system",
    ),
    "a tag of one's own": ("data: {a: !env HOME}\n", 1, "yaml-tag !env"),
    "a key twice": ("train:\n  lr: 0.1\n  epochs: 1\n  lr: 0.2\n", 4, "repeated-key 'lr' line 2"),
    "a section twice": (
        "train: {lr: 0.1}\nmodel: {}\n\ntrain: {lr: 0.2}\n",
        4,
        "repeated-key 'train' line 1",
    ),
    "a number as a key twice": ("data:\n  arguments: {1: a, 2: b,\n    1: c}\n", 3, "repeated-key '1'"),
    "aliases in aliases": ("a: &a [x, x, x, x, x, x, x, x, x]\n" + BOMB, 5, "too-large 10,000"),
    "an alias of itself": ("train: {}\nmodel: &m {again: *m}\n", 2, "recursive-alias"),
    "a hundred thousand lists": (
        "data:\n  a: " + "[" * 100_000 + "]" * 100_000,
        2,
        "too-deep",
    ),  # or the parser's own limit
    "ten thousand mappings": ("data: " + "{a: " * 10_000 + "1" + "}" * 10_000, 1, "too-deep 32"),
}


@pytest.mark.parametrize(("text", "line", "expected"), HOSTILE.values(), ids=HOSTILE.keys())
def test_recipe_with_yaml_tags_is_rejected_with_its_line(text, line, expected):
    """a recipe with objects, repeated keys, bombs: refused, with file and line"""
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(text))
    assert str(refused.value).startswith(f"r.yaml, line {line}: ")
    assert_problem(refused.value.problem, expected)
    assert not Path("pwned").exists()
    write("train: {epochs: 1}", "good.yaml")
    write("extends: r.yaml\n", "child.yaml")
    with expect_problem(expected, RecipeError) as inherited:  # is no better trusted
        load_recipe("child.yaml")
    assert inherited.value.problem.place.startswith(f"r.yaml, line {line}")


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system ['touch pwned']", "[" * 5000 + "]" * 5000, "{a: 1, a: 2}"]
)
def test_an_override_is_data_too(value):
    """a hostile value on the command line: refused"""
    write("data: {arguments: {}}")
    with pytest.raises(RecipeError, match=r"data\.arguments\.x="):
        load_recipe("r.yaml", [f"data.arguments.x={value}"])
    assert not Path("pwned").exists()


def test_harmless_yaml_features_are_supported():
    """control: anchors, merged mappings and every scalar of a recipe are read as before"""
    tree = (
        "data:\n  a: &a {x: 1, y: [1.5, true, null, 2020-01-01, 1e-4]}\n  b: *a\n  c: {<<: *a, x: 2}\n  d: '1'\n  "
        "e: !!str 1\n"
    )
    data = load_recipe(write(tree)).data
    assert data["b"] == {"x": 1, "y": [1.5, True, None, "2020-01-01", 1e-4]}
    assert data["c"] == data["b"] | {"x": 2}
    assert data["d"] == data["e"] == "1"


def test_a_bound_on_aliases_is_not_lifted_by_the_environment(monkeypatch):
    """an environment variable that lifts OmegaConf's bounds: has no effect"""
    monkeypatch.setenv("OMEGACONF_MAX_YAML_EXPANDED_NODES", "none")
    with pytest.raises(RecipeError, match="line 5"):
        load_recipe(write(HOSTILE["aliases in aliases"][0]))


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:CANARY}",
        "x${oc.env:CANARY,none}",
        "${oc.decode:${oc.env:CANARY}}",
        "${oc.create:x}",
        "\\${oc.env:CANARY}",
    ],
)
def test_no_resolver_is_called_and_no_environment_reaches_the_recipe(text, monkeypatch):
    """a recipe that reads an environment variable: refused without its value"""
    monkeypatch.setenv("CANARY", "yellow-bird")
    for tree, overrides in (
        ({"data": {"arguments": {"x": [text]}}}, []),
        ({"output": text}, []),
        ({"train": {}}, [f"output={text}"]),
    ):
        with pytest.raises(RecipeError) as refused:
            load_recipe(write(yaml.safe_dump(tree)), overrides)
        assert "yellow-bird" not in str(refused.value)
    recipe = load_recipe(write(yaml.safe_dump({"data": {"arguments": {text: 1}}})))  # a key is not resolved
    assert "yellow-bird" not in OmegaConf.to_yaml(OmegaConf.create(recipe.to_dict()))


@pytest.mark.parametrize(
    "path", ["a\0b.py", "x" * 5000 + ".py", "~nobody-of-this-name/x.py"], ids=["null byte", "long", "no home"]
)
def test_invalid_path_is_rejected(path):
    """a path that no file can have: a message, no traceback"""
    for tree in ({"plugins": [path]}, {"extends": path}, {"output": path}):
        with expect_problem("wrong-path", RecipeError):
            load_recipe(write(yaml.safe_dump(tree)))


# -- pickles -----------------------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def payload(tmp_path: Path) -> dict[str, bytes]:
    """The pickle in the forms that libraries read: bare, and in torch's zip file."""
    evil = {"weight": Evil(tmp_path / "pwned")}
    torch.save(evil, "evil.pt")
    forms = {"pickle": pickle.dumps(evil, protocol=2), "torch": Path("evil.pt").read_bytes()}
    Path("evil.pt").unlink()
    return forms


@pytest.fixture(autouse=True)
def _nothing_was_run(tmp_path: Path):
    yield
    assert not (tmp_path / "pwned").exists(), "the hostile pickle was executed"


def test_the_hostile_pickle_is_hostile(payload, tmp_path):
    """control: the hostile pickle of these tests does run where it is loaded carelessly"""
    pickle.loads(payload["pickle"])
    assert (tmp_path / "pwned").exists()
    (tmp_path / "pwned").unlink()
    Path("evil.pt").write_bytes(payload["torch"])
    torch.load("evil.pt", weights_only=False)
    assert (tmp_path / "pwned").exists()
    (tmp_path / "pwned").unlink()


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_torch_itself_refuses_it(form, payload):
    """a hostile pickle, loaded by torch with weights_only: refused, not run"""
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    Path("evil.pt").write_bytes(payload[form])
    with pytest.raises(pickle.UnpicklingError):
        torch.load("evil.pt", weights_only=True)


def seal(folder: Path) -> None:
    """Write a manifest that fits whatever files there are: what someone does who wants a checkpoint to be believed."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != checkpoint.MANIFEST]
    facts = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"format": 1, "files": facts}))


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_pickle_in_the_place_of_a_checkpoints_file(name, form, payload, tiny_run, tmp_path):
    """a hostile pickle as a checkpoint's file: refused, not run"""
    tiny_run([], max_steps=2, output=tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    (folder / name).write_bytes(payload[form])
    with pytest.raises(CheckpointError):
        tiny_run([], max_steps=4, output=tmp_path / "run", resume=True)
    if name != checkpoint.MANIFEST:
        seal(folder)
        with expect_problem("damaged-checkpoint", CheckpointError):
            tiny_run([], max_steps=4, output=tmp_path / "run", resume=True)


def test_a_pickle_beside_a_checkpoints_files(payload, tiny_run, tmp_path):
    """hostile pickles under the names that other trainers use: not opened"""
    tiny_run([], max_steps=2, output=tmp_path / "run")
    (folder,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    for name in (
        "optimizer.pt",
        "optimizer.bin",
        "pytorch_model.bin",
        "scheduler.bin",
        "random_states_0.pkl",
        ".metadata",
        "state.pkl",
    ):
        (folder / name).write_bytes(payload["torch" if name.endswith(("pt", "bin")) else "pickle"])
    seal(folder)
    assert tiny_run([], max_steps=4, output=tmp_path / "run", resume=True).summary["steps"] == 4


def test_a_pickle_among_the_shards(payload, tmp_path):
    """hostile metadata among sharded tensors: not opened"""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    folder = checkpoint.write(Path("run/checkpoints/step-00000001"), {"a": torch.ones(3)}, {"step": 1})
    writer = HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        state_dict_saver.save({"model.b": torch.full((4,), 2.0)}, storage_writer=writer, no_dist=True)
    for name in (".metadata", "__0_0.distcp", "metadata.pkl"):
        (folder / "sharded" / name).write_bytes(payload["pickle"])
    assert "does not list sharded/" in (checkpoint.verify(folder) or "")
    seal(folder)
    assert checkpoint.verify(folder) is None
    model, state = checkpoint.read(folder)
    assert model["b"].tolist() == [2.0] * 4
    assert state == {"step": 1}
    (folder / "sharded" / "extra.safetensors").write_bytes(payload["pickle"])
    seal(folder)
    with pytest.raises(CheckpointError):
        checkpoint.read(folder)


def test_no_file_of_a_run_is_a_pickle(tiny_run, tmp_path):
    """control: everything that a run leaves is safetensors, JSON, YAML, Markdown or text"""
    tiny_run(["checkpoint-best", "ema", {"lr-scheduler": {"warmup": 0.1}}], max_steps=4, output=tmp_path / "run")
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    formats = {".safetensors", ".json", ".jsonl", ".yaml", ".md", ".txt", ".lock"}
    assert {path.suffix or path.name for path in left} <= formats
    for path in left:
        if path.suffix == ".safetensors":
            size = int.from_bytes(path.read_bytes()[:8], "little")
            assert isinstance(json.loads(path.read_bytes()[8 : 8 + size]), dict)
        else:
            path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as save_pretrained writes it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from fastloop_plugins.text.tokenizers import TrainedTokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    tokenizer = train_tokenizer(TrainedTokenizer(kind="word"), [row["text"] for row in ROWS], True)
    config = AutoConfig.for_model(**TINY, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_run(model: Any, data: Any = None, **more: Any) -> Run:
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = data or {"files": {"train": "train.jsonl"}, "text": "text", "label": "label", "max_length": 16}
    train = {"epochs": 1, "batch_size": 8, "device": "cpu"}
    recipe = make_recipe({"model": model, "data": data, "train": train, "output": "run", **more}, Path("r.yaml"))
    return build(resolve(recipe))


@pytest.fixture
def model_folder(pretrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pretrained, tmp_path / "model"))


def test_the_model_folder_of_these_tests_is_good(model_folder):
    """control: an honest model folder is loaded"""
    assert text_run({"name": "model"}).unwrap_model().config.dim == 16


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json", "tokenizer.json"])
def test_a_pickle_in_a_model_folder(name, form, payload, model_folder):
    """a hostile pickle as a model's weights, configuration or tokenizer: refused"""
    if name == "pytorch_model.bin":
        (model_folder / "model.safetensors").unlink()
    (model_folder / name).write_bytes(payload[form])
    with pytest.raises(RecipeError, match=r"model\.name"):
        text_run({"name": "model"})


def test_a_pickle_beside_a_models_files(payload, model_folder):
    """hostile pickles beside a good model: not opened"""
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tf_model.h5", "vocab.pkl"):
        (model_folder / name).write_bytes(payload["torch"])
    assert text_run({"name": "model"}).unwrap_model().config.dim == 16


def test_a_pickle_as_an_adapter(payload, model_folder):
    """a hostile adapter in a model folder: not run"""
    (model_folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_lin"], "r": 2, "task_type": "SEQ_CLS"})
    )
    (model_folder / "adapter_model.bin").write_bytes(payload["torch"])
    with pytest.raises(UsageError):
        text_run({"name": "model"})


def with_code(folder: Path, tmp_path: Path) -> None:
    """Give a model a class of its own, in a file that leaves a trace when it is imported."""
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "custom-thing",
        "auto_map": {"AutoConfig": "configuring.Config", "AutoModelForSequenceClassification": "configuring.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "ran"
    (folder / "configuring.py").write_text(
        "from pathlib import Path\n"
        "from transformers import DistilBertConfig, DistilBertForSequenceClassification\n"
        f"Path({str(trace)!r}).touch()\n"
        "class Config(DistilBertConfig):\n    model_type = 'custom-thing'\n"
        "class Model(DistilBertForSequenceClassification):\n    config_class = Config\n"
    )


def test_code_that_comes_with_a_model_runs_only_when_the_recipe_says_so(model_folder, tmp_path, monkeypatch, caplog):
    """a model with its own code: run only with model.trust_remote_code"""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with_code(model_folder, tmp_path)
    with pytest.raises(RecipeError, match=r"model\.name"):
        text_run({"name": "model"})
    assert not (tmp_path / "ran").exists()
    with caplog.at_level(logging.WARNING, logger="fastloop"):
        make = text_run({"name": "model", "trust_remote_code": True})
    assert_problem(caplog, "runs-remote-code model.trust_remote_code")
    assert (tmp_path / "ran").exists()
    assert type(make.unwrap_model()).__name__ == "Model"


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_as_a_data_file(form, suffix, payload):
    """a hostile pickle under each suffix of data files: refused, not run"""
    Path(f"hostile{suffix}").write_bytes(payload[form] + b"\x80\xff")
    with pytest.raises(RecipeError):
        text_run(
            {"config": TINY},
            {"files": {"train": f"hostile{suffix}"}, "text": "text", "label": "label", "max_length": 16},
        )


def test_a_pickle_in_a_parquet_files_types(payload):
    """a parquet column type that old readers unpickled: not run"""
    import pyarrow
    from pyarrow import parquet

    hostile = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload["pickle"]}
    fields = [pyarrow.field("text", pyarrow.string(), metadata=hostile), pyarrow.field("label", pyarrow.int64())]
    table = pyarrow.table(
        [[row["text"] for row in ROWS], [row["label"] for row in ROWS]], schema=pyarrow.schema(fields)
    )
    parquet.write_table(table, "train.parquet")
    data = {"files": {"train": "train.parquet"}, "text": "text", "label": "label", "max_length": 16}
    assert text_run({"config": TINY}, data).datasets["train"] is not None


def test_a_dataset_folder_with_pickles_and_a_script(payload, tmp_path):
    """a dataset folder with a loading script and pickles: neither is run"""
    folder = tmp_path / "reviews"
    folder.mkdir()
    (folder / "reviews.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'pwned')!r}).touch()\n")
    for name in ("train.pkl", "train.pickle", "dataset.pt"):
        (folder / name).write_bytes(payload["pickle"])
    with pytest.raises(RecipeError, match=r"data\.name"):
        text_run({"config": TINY}, {"name": "reviews", "text": "text", "label": "label", "max_length": 16})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    # a library may refuse a folder with other files in it: all that counts is that none is run
    with contextlib.suppress(RecipeError):
        text_run({"config": TINY}, {"name": "reviews", "text": "text", "label": "label", "max_length": 16})


@pytest.mark.parametrize("form", ["pickle", "object array", "archive", "empty"])
def test_a_pickle_in_the_cache_of_tokens(form, payload, tmp_path, caplog):
    """a hostile file in the cache of tokens: made again, not run"""
    from fastloop_plugins import _cache

    _cache.read_or_write(tmp_path, "key", lambda start: [[1, 2], [3]][start:])
    lengths = tmp_path / "key" / "lengths.npy"
    if form == "object array":
        np.save(lengths, np.array([Evil(tmp_path / "pwned")], dtype=object), allow_pickle=True)
    elif form == "archive":
        with lengths.open("wb") as file:
            np.savez(file, a=np.array([Evil(tmp_path / "pwned")], dtype=object))
    else:
        lengths.write_bytes(payload["pickle"] if form == "pickle" else b"")
    with caplog.at_level(logging.WARNING, logger="fastloop"):
        ids, found = _cache.read_or_write(tmp_path, "key", lambda start: [[1, 2], [3]][start:])
    assert_problem(caplog, "damaged-cache tokens:")
    assert ids.tolist() == [1, 2, 3]
    assert found.tolist() == [2, 1]


@pytest.mark.slow
def test_a_cache_of_compiled_code_that_others_may_write_to_is_not_used(tiny_run, tmp_path, monkeypatch, caplog):
    """compiled code that others may write to: not used, with a message"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    used: list[Path] = []

    class Looks(Plugin):
        name = "looks"

        @hookimpl
        def before_fit(self) -> None:
            used.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))

    folder = tmp_path / "cache" / "fastloop" / "compiled"
    tiny_run([{"compile": {"backend": "eager"}}, Looks()], max_steps=1)
    assert used == [folder]
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="fastloop"):
        tiny_run([{"compile": {"backend": "eager"}}, Looks()], max_steps=1)
    assert_problem(caplog, f"unsafe-folder {folder}")
    assert used[1] != folder
    assert used[1].stat().st_mode & 0o077 == 0
    used[1].rmdir()


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "sharded/../../outside.safetensors", "{absolute}", "./sub/../../outside.safetensors"],
)
def test_a_manifest_does_not_lead_out_of_its_checkpoint(name, tmp_path):
    """a manifest that names a file elsewhere: the checkpoint is not whole"""
    folder = checkpoint.write(Path("run/checkpoints/step-00000001"), {"a": torch.ones(3)}, {"step": 1})
    outside = tmp_path / "run" / "checkpoints" / "outside.safetensors"
    shutil.copy(folder / "model.safetensors", outside)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name.format(absolute=outside)] = manifest["files"]["model.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "is missing" in (checkpoint.verify(folder) or "")


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "sharded"])
def test_a_link_in_a_checkpoint_is_not_followed(name, tmp_path):
    """a link in the place of a checkpoint's file: the checkpoint is not whole"""
    folder = checkpoint.write(Path("run/checkpoints/step-00000001"), {"a": torch.ones(3)}, {"step": 1})
    (folder / "sharded").mkdir()
    (folder / "sharded" / "one.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    seal(folder)
    assert checkpoint.verify(folder) is None
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert "is a link" in (checkpoint.verify(folder) or "")


def test_an_index_of_weights_does_not_lead_out_of_its_folder(model_folder, tmp_path):
    """a model's index that names files elsewhere: refused"""
    weights = model_folder / "model.safetensors"
    names = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    weights.rename(tmp_path / "outside.safetensors")
    for place in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"metadata": {}, "weight_map": {name: place for name in names if name != "__metadata__"}}
        (model_folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with expect_problem("unsafe-link", RecipeError):
            text_run({"name": "model"})


# -- secrets -----------------------------------------------------------------------------------------------------------

TOKEN, KEY, PASSWORD = "hf_DoNotShowThisToken", "sk-DoNotShow\"This'Key", "DoNotShowThisPassword"

CODE = """
import logging, os
import torch
from torch import nn
from fastloop import Plugin, hookimpl, option

def data(api_key, deep):
    assert api_key and deep["password"]
    inputs = torch.randn(32, 8)
    return {"train": torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))}

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 3))

class Chatty(Plugin):
    name = "chatty"
    runs_after = ("log",)

    auth_token: str = option("A secret.", default="")
    fail: bool = option("Whether it fails.", default=False)

    @hookimpl
    def before_fit(self, run):
        log = logging.getLogger("fastloop")
        log.info("token %s", os.environ["HF_TOKEN"])
        log.warning("recipe %s", run.recipe.data)
        try:
            raise ValueError(os.environ["HF_TOKEN"])
        except ValueError:
            log.exception("caught")

    @hookimpl
    def save_state(self, run):
        return None

    @hookimpl
    def write_summary(self, summary):
        summary["chatty"] = [os.environ["HF_TOKEN"], {self.auth_token: 1}]

    @hookimpl
    def after_fit(self, run):
        if self.fail:
            raise ValueError(f"cannot log in as {os.environ['HF_TOKEN']} with {run.recipe.data}")
"""


def secret_recipe() -> str:
    write(CODE, "code.py")
    tree = {
        "model": {"module": "code.py:Net"},
        "data": {"module": "code.py:data", "arguments": {"api_key": KEY, "deep": {"password": PASSWORD}}},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy"}}, {"./code.py": {"auth_token": TOKEN[::-1]}}, "tensorboard"],
        "output": "run",
    }
    return write(yaml.safe_dump(tree))


def leaks(text: str) -> list[str]:
    secret = (TOKEN, TOKEN[::-1], KEY, json.dumps(KEY)[1:-1], PASSWORD, "DoNotShow")
    return [value for value in secret if value in text]


class FileTracker(GeneralTracker):
    """A tracker of Accelerate that writes what it receives into a file of the run folder."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.received: list[Any] = [*arguments, options]

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: Any) -> None:
        self.received.append(values)

    def log(self, values: Any, step: Any = None, **options: Any) -> None:
        self.received.append(values)

    def finish(self, exit_code: int = 0) -> None:
        Path("run/tracker.json").write_text(json.dumps(self.received))


@pytest.mark.parametrize("fail", [False, True], ids=["completed", "failed"])
def test_secrets_reach_no_file_no_tracker_and_no_console(fail, monkeypatch, capfd):
    """tokens in the environment and the recipe: in nothing that a run writes, sends or shows"""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", FileTracker)
    Path("site").mkdir()
    write("", "site/wandb.py")
    monkeypatch.syspath_prepend(Path("site").absolute())
    name = secret_recipe()
    arguments = [
        name,
        "--with",
        "trackers",
        "plugins.trackers.trackers=[wandb]",
        f"plugins.chatty.fail={str(fail).lower()}",
    ]
    assert command(monkeypatch, "train", *arguments) == int(fail)
    shown = capfd.readouterr()
    assert not leaks(shown.out + shown.err)
    assert secrets.HIDDEN in shown.out + shown.err
    left = [path for path in Path("run").rglob("*") if path.is_file()]
    assert any("tensorboard" in str(path) for path in left)
    assert secrets.HIDDEN in Path("run/tracker.json").read_text()
    for path in left:
        assert not leaks(path.read_bytes().decode("latin-1")), path
    assert secrets.HIDDEN in Path("run/log.txt").read_text()
    assert secrets.HIDDEN in Path("run/summary.json").read_text()
    saved = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert saved["data"]["arguments"] == {"api_key": secrets.HIDDEN, "deep": {"password": secrets.HIDDEN}}
    assert command(monkeypatch, "plan", *arguments) == 0
    assert command(monkeypatch, "report", "run", "--output", "page.html") == 0
    shown = capfd.readouterr()
    assert not leaks(shown.out + shown.err + Path("page.html").read_text())


def test_saved_recipe_needs_secrets_again_on_resume(monkeypatch, capfd):
    """a saved recipe without its secrets: the error names the variable to set"""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    name = secret_recipe()
    assert command(monkeypatch, "train", name, "train.max_steps=2") == 0
    assert command(monkeypatch, "train", name, "--resume") == 0
    capfd.readouterr()
    assert command(monkeypatch, "train", "run/recipe.yaml") == 2
    assert_problem(capfd.readouterr().err, "hidden-secret data.arguments.api_key")


def test_invalid_secret_option_is_not_printed(monkeypatch, capfd):
    """a mistake in a recipe beside a secret: the message is without it"""
    write(yaml.safe_dump({"plugins": [{"amp": {"hf_token": PASSWORD, "dtype": PASSWORD}}]}))
    assert command(monkeypatch, "train", "r.yaml") == 2
    error = capfd.readouterr().err
    assert "plugins.amp.hf_token" in error
    assert not leaks(error)


SECRET_KEYS = """token hf_token api_key apikey secret client_secret db_password access-key credentials authorization
Authorization cookie proxy-authorization Set-Cookie accessToken refreshToken apiKey x-api-key secretKey
secret_access_key access_key_id private_key privateKey ssh_key signing_key encryption_key account_key storageKey pwd
pass db_pass passphrase auth bearer pat dsn connection_string connectionString database_url jwt sas_token webhook_url
clientSecret token_value password2 credentials_json license_key otp X-CSRF-Token"""
PLAIN_KEYS = """pad_token pad_token_id tokens tokenizer key monkey label_key max_tokens secretary image_token
next_token padToken primary_key forward_pass passes compass pattern author authors patience token_column sort_key
keyword bypass n_tokens tokens_per_second secret_name"""
SECRET_VARIABLES = """HF_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN GITHUB_TOKEN GITHUB_PAT
PGPASSWORD MYSQL_PWD SENTRY_DSN DATABASE_URL REDIS_URL MONGODB_URI WANDB_API_KEY OPENAI_API_KEY OPENAI_APIKEY
SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING KAGGLE_KEY AZURE_STORAGE_KEY AZURE_SAS_TOKEN SSH_PRIVATE_KEY
ENCRYPTION_KEY JWT SESSION_COOKIE AUTHORIZATION DOCKER_AUTH_CONFIG NPM_CONFIG__AUTH DB_PASS SMTP_PASS SECRET_KEY_BASE
GPG_PASSPHRASE API_TOKEN_V2 MLFLOW_TRACKING_PASSWORD TWINE_PASSWORD GOOGLE_APPLICATION_CREDENTIALS"""
PLAIN_VARIABLES = (
    "PWD OLDPWD SSH_AUTH_SOCK XAUTHORITY TOKENIZERS_PARALLELISM GIT_ASKPASS KEYBOARD XDG_SESSION_ID "
    "DBUS_SESSION_BUS_ADDRESS"
)


def test_names_of_secrets():
    """keys that are called like secrets: hidden"""
    shown = [
        key for key in SECRET_KEYS.split() if secrets.hidden({"a": [{key: "x"}]}) != {"a": [{key: secrets.HIDDEN}]}
    ]
    assert shown == []


def test_names_of_no_secrets():
    """control: keys of tokenizers and the like do not change"""
    tree = {"a": [dict.fromkeys(PLAIN_KEYS.split(), "x")], "b": dict.fromkeys(PLAIN_KEYS.split(), 3)}
    assert secrets.hidden(tree) == tree


def test_names_of_secret_variables(monkeypatch):
    """variables with usual names of secrets: their values are in no text"""
    for name in (SECRET_VARIABLES + " " + PLAIN_VARIABLES).split():
        monkeypatch.setenv(name, f"value<{name}>")
    assert [name for name in SECRET_VARIABLES.split() if f"<{name}>" in secrets.hide(f"value<{name}>")] == []
    assert [name for name in PLAIN_VARIABLES.split() if f"<{name}>" not in secrets.hide(f"value<{name}>")] == []


def test_passwords_of_urls(monkeypatch):
    """URLs with a password: the password is hidden everywhere"""
    monkeypatch.setenv("PLACE", "postgres://me:DoNotShow1@host/x")
    make_recipe({"data": {"arguments": {"place": "redis://:DoNotShow2@host"}}})
    text = "DoNotShow1 DoNotShow2 https://DoNotShow3@host/x mongodb://me:DoNot@Show4@host s3://me:DoNotShow5@host"
    assert "Show" not in secrets.hide(text)
    harmless = "ssh://git@host/x s3://bucket/a@b http://localhost:8080/a b@c"
    assert secrets.hide(harmless) == harmless


def test_secret_that_is_a_word_changes_no_key_of_a_file(tiny_run, tmp_path, monkeypatch):
    """a secret that equals keys of files: the keys stay"""
    before = tiny_run([], max_steps=2, output=tmp_path / "before").summary
    for index, word in enumerate(("status", "validation", "plugins", "batch_size", "train_seconds")):
        monkeypatch.setenv(f"X{index}_KEY", word)
    tiny_run([], max_steps=2, output=tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text()).keys() == before.keys()
    saved = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())
    assert {"plugins", "train"} <= saved.keys()
    assert "batch_size" in saved["train"]


def test_short_values_and_other_variables_stay(monkeypatch):
    """control: variables that are no secrets, or too short to distinguish from words, stay in text"""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallel")
    monkeypatch.setenv("SOME_KEY", "abc")
    monkeypatch.setenv("SOME_TOKEN", "abcdef")
    assert secrets.hide("abc parallel abcdef abcdefg") == "abc parallel (hidden) (hidden)g"


# -- the report --------------------------------------------------------------------------------------------------------

EVIL = (
    "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt;b onclick=x()>{{ 7*7 }}{% raw "
    "%}</title></style></svg>"
)
KNOWN = (
    "html head meta title style body a main h1 h2 h3 h4 section div table thead tbody tr th td figure svg line text g "
    "path circle rect ul ol li i details summary span p small code footer"
)


class Markup(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.words += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_report_escapes_every_field(tmp_path, monkeypatch):
    """hostile text in every field of a report: text, and no markup"""
    numbers = dict.fromkeys(("train_seconds", "samples_per_second", "tokens_per_second"), 1.0) | {
        "steps": 3,
        "peak_memory_bytes": 2**20,
    }
    for number in range(2):
        run = tmp_path / f"{EVIL.replace('/', '|')}{number}"
        run.mkdir()
        summary = numbers | dict.fromkeys(("status", "reason", "device", "world_size"), EVIL)
        summary |= {"plugins": [EVIL], "validation": {EVIL: 0.5 + number}, "test": {EVIL: 0.5}, "best": {"path": EVIL}}
        (run / "summary.json").write_text(json.dumps(summary))
        recipe = {
            "model": {EVIL: f"{EVIL}{number}"},
            "plugins": [{EVIL: {EVIL: f"{EVIL}{number}"}}],
            "data": {"x": [EVIL, number]},
        }
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": s, "split": EVIL, EVIL: s, "loss": s}) + "\n" for s in (1, 2))
        )
    rate = {"median": 1.0, "low": 0.5, "high": 2.0}
    results = {
        "unit": EVIL,
        f"{EVIL}_per_second": rate,
        "over_before": {"verdict": EVIL},
        "over_baseline": None,
        "peak_memory_bytes": 1,
    }
    variants = [{"title": EVIL, "results": results}, {"title": EVIL, "results": None, "why_not": EVIL}]
    (tmp_path / "ablation").mkdir()
    (tmp_path / "ablation" / "bench.json").write_text(json.dumps({"command": EVIL, "variants": variants}))
    (tmp_path / "profile").mkdir()
    suggestions = [{"edit": EVIL, "seconds": 0.1, "why": EVIL}]
    (tmp_path / "profile" / "profile.json").write_text(
        json.dumps({"profile": {"regions": {EVIL: 0.1}, "seconds": 0.2}, "suggestions": suggestions})
    )
    point = {"point": EVIL, "runs": [EVIL], "finished": 1, "mean": 0.5, "deviation": 0.1, "difference": None}
    member = {"name": EVIL.replace("/", "|"), "values": {EVIL: EVIL}, "metrics": {EVIL: 0.5}}
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(
        json.dumps({"monitor": f"validation {EVIL}", "best": EVIL, "points": [point], "runs": [member]})
    )
    scores = dict.fromkeys(
        ("precision", "recall", "f1", "samples", "target_probability", "prediction_probability", "index"), 1
    )
    evaluation = dict.fromkeys(("file", "split"), EVIL) | {
        "arguments": [EVIL],
        "metrics": {EVIL: 0.5},
        "confusion": [[1]],
        "steps": 7,
    }
    evaluation |= {
        "classes": [scores | {"name": EVIL}],
        "worst": [scores | dict.fromkeys(("target", "prediction", "input"), EVIL)],
    }
    (run / "evaluation").mkdir()
    (run / "evaluation" / "test.json").write_text(json.dumps(evaluation))
    folders = [str(path) for path in sorted(tmp_path.iterdir()) if path.is_dir()]
    assert command(monkeypatch, "report", *folders, "--output", "page.html", "--title", EVIL) == 0
    text = Path("page.html").read_text()
    page = Markup(text)
    assert page.tags <= set(KNOWN.split())
    assert not [name for name in page.attributes if name.startswith("on") or name in ("src", "formaction")]
    _, style_end, body = text.partition("</style>")
    assert style_end
    assert "49" not in body.partition("<svg")[0]
    words = "".join(page.words)
    assert words.count("<script>alert(1)</script>") >= 24


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("recipe.yaml", HOSTILE["a call"][0]),
        ("recipe.yaml", HOSTILE["aliases in aliases"][0]),
        ("recipe.yaml", HOSTILE["a hundred thousand lists"][0]),
        ("recipe.yaml", "- 1\n"),
        ("summary.json", "[" * 100_000),
        ("summary.json", '{"steps": "many", "peak_memory_bytes": []}'),
        ("summary.json", '{"validation": 3, "plugins": 5}'),
        ("metrics.jsonl", "[" * 100_000),
        ("metrics.jsonl", '{"step": 1e999, "loss": 1}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}"),
        ("metrics.jsonl", "[" * 100_000 + "\n"),
        ("evaluation/test.json", "[" * 100_000),
        ("evaluation/test.json", '{"metrics": {"loss": "low"}, "classes": 3}'),
    ],
)
def test_a_broken_run_folder_is_no_traceback(file, text, monkeypatch, capfd):
    """a run folder with broken files: a page, or a message that names the file"""
    Path("run/evaluation").mkdir(parents=True)
    write("train: {epochs: 1}\n", "run/recipe.yaml")
    write("{}", "run/summary.json")
    write('{"step": 1, "loss": 1}\n', "run/metrics.jsonl")
    write(text, f"run/{file}")
    code = command(monkeypatch, "report", "run", "--output", "page.html")
    error = capfd.readouterr().err
    assert code == 0 or (code == 2 and "run" in error), error
    assert "Traceback" not in error
    assert not Path("pwned").exists()


SWEEP = {
    "monitor": "validation loss",
    "best": "lr=1",
    "points": [{"point": "lr=1", "runs": ["lr-1"], "finished": 1, "mean": 0.5, "deviation": None, "difference": None}],
    "runs": [{"name": "lr-1", "values": {"lr": "1"}, "seed": None, "status": "finished", "metrics": {"loss": 0.5}}],
}
RATE = {"median": 1.0, "low": 0.5, "high": 2.0}
BENCH = {
    "variants": [{"title": "a", "results": {"unit": "samples", "samples_per_second": RATE, "peak_memory_bytes": 1}}]
}
PROFILE = {
    "profile": {"regions": {"forward": 0.1}, "seconds": 0.2},
    "suggestions": [{"edit": "x", "seconds": 0.1, "why": "y"}],
}
SUMMARY = {
    "status": "completed",
    "reason": None,
    "steps": 3,
    "plugins": ["ema"],
    "validation": {"loss": 0.5},
    "device": "cpu",
}
RECORDS: dict[str, Any] = {"sweep.json": SWEEP, "bench.json": BENCH, "profile.json": PROFILE, "summary.json": SUMMARY}
WRONG: list[Any] = [5, 10**400, "text", None, [], {}, [[]], {"a": [None]}, True, -1e308]


def mutations(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Copies of a JSON tree, each with one value replaced or left out: where, and the tree."""
    for value in WRONG:
        yield place, value
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        rest = (
            {name: item for name, item in tree.items() if name != key}
            if isinstance(tree, dict)
            else tree[:key] + tree[key + 1 :]
        )
        yield (*place, key, "left out"), rest
        for at, changed in mutations(tree[key], (*place, key)):
            yield at, {**tree, key: changed} if isinstance(tree, dict) else [*tree[:key], changed, *tree[key + 1 :]]


@pytest.mark.parametrize("file", RECORDS)
def test_a_malformed_record_is_no_traceback(file, tmp_path):
    """a record with a wrong or missing value: a page, or a message that names the file"""
    from fastloop_tools.report.page import render
    from fastloop_tools.report.read import read

    (tmp_path / "made").mkdir()
    Path("made/recipe.yaml").write_text("train: {epochs: 1}\n")
    Path("made", file).write_text(json.dumps(RECORDS[file]))
    assert "<html" in render(read([Path("made")]), "control")
    refused = []
    for at, changed in mutations(RECORDS[file]):
        Path("made", file).write_text(json.dumps(changed))
        try:
            render(read([Path("made")]), "title")
        except UsageError as error:
            refused.append((at, str(error)))
    assert len(refused) > 20
    assert all(file in message for _, message in refused)


@pytest.mark.parametrize("name", ["../outside", "..", ".", "", "/etc", "a/b", "a/../../b"])
def test_a_run_of_a_sweep_is_in_its_folder(name, tmp_path):
    """a sweep.json whose runs are in other folders: refused"""
    from fastloop_tools.report.read import read
    from fastloop_tools.trials.record import Record
    from fastloop_tools.trials.runs import TrialRun

    (tmp_path / "sweep").mkdir()
    runs = [{**SWEEP["runs"][0], "name": name}]  # type: ignore[index]
    Path("sweep/sweep.json").write_text(json.dumps(SWEEP | {"runs": runs}))
    with expect_problem("wrong-format sweep.json", UsageError):
        read([Path("sweep")])
    with expect_problem("wrong-format sweep.json", UsageError):
        Record(Path("sweep"), {}, [TrialRun("lr-1", {"lr": "1"}, None)], "loss", True).start(resume=True, again="")


PARTS = {"ema": ["average"], "early-stopping": ["waited"], "checkpoint-best": ["kept", "saved"], "log": ["offset"]}
PARTS |= {"nan-guard": ["counts"], "sample-audit": ["totals", "readers"], "lr-scheduler": []}
"""Plugin -> keys of its state."""
STATES: list[tuple[tuple[str, ...], Any]] = [
    *(((), value) for value in (5, None, [], {}, "text")),
    *(
        ((key,), value)
        for key in ("state", "clock", "recipe", "random", "optimizer", "plugins", "scalars")
        for value in (5, None)
    ),
    *((("state", key), value) for key in ("step", "epoch", "samples") for value in (10**400, "text", None, -5, 1.5)),
    *((("state", key), 5) for key in ("metrics", "left_out", "unreadable_ids", "nothing", "stop_reason_")),
    *((("clock", "train"), value) for value in ("text", None, 10**400)),
    *((("recipe", key), value) for key in ("train", "model", "data") for value in (5, None)),
    *((("scheduler", key), value) for key in ("base_lrs", "last_epoch") for value in ("text", None, [])),
    *((("scalars", 0, "values", "train/loss"), value) for value in ("text", None, ["text"])),
    *((("optimizer", "param_groups", 0, key), value) for key in ("lr", "betas", "eps") for value in ("text", None, [])),
    *((("plugins", name), value) for name, keys in PARTS.items() if keys for value in (5, [], "text")),
    *(
        (("plugins", name, key), value)
        for name, keys in PARTS.items()
        for key in keys
        for value in (None, [[]], "text")
    ),
]


@pytest.mark.slow
def test_a_malformed_state_is_no_traceback(tiny_run, tmp_path, record_property):
    """a checkpoint's state with a wrong value: refused with its name"""
    plugins = [*PARTS][:-1] + [{"lr-scheduler": {"schedule": "cosine"}}]
    tiny_run(plugins, max_steps=2, output=tmp_path / "run")
    (folder,) = (tmp_path / "run/checkpoints").glob("step-*")
    text = (folder / "state.json").read_text()
    record_property("faults", len(STATES))
    for place, value in STATES:
        tree = {"state": json.loads(text)}
        inner = tree
        for key in ("state", *place)[:-1]:
            inner = inner[key]
        inner[("state", *place)[-1]] = value
        (folder / "state.json").write_text(json.dumps(tree["state"]))
        seal(folder)
        with pytest.raises(CheckpointError) as refused:
            tiny_run(plugins, max_steps=4, output=tmp_path / "run", resume=True)
        assert refused.value.problem.code in ("invalid-state", "resume-differs")
        assert "step-00000002" in str(refused.value)
    (folder / "state.json").write_text(text)
    seal(folder)
    assert tiny_run(plugins, max_steps=4, output=tmp_path / "run", resume=True).summary["steps"] == 4  # control

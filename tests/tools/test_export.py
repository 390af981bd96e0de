"""`fastloop export`: models that other programs load, compared with those programs.

Modules:
    plugins/fastloop_tools/export/calls.py
    plugins/fastloop_tools/export/command.py
    plugins/fastloop_tools/export/folder.py
    plugins/fastloop_tools/export/onnx_model.py
    plugins/fastloop_tools/export/source.py
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml
from cards import load_by_card
from inference_runs import CLASSES, TRAIN, texts, train, write_recipe
from long_form import LONG
from needed_packages import skip_file_without
from safetensors.torch import load_file
from text_helpers import TINY_GPT

from fastloop.errors import SaveError
from fastloop.export.text_inputs import TextInputs
from fastloop.recipe import load_recipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_tools.export import folder as folders
from fastloop_tools.export import onnx_model, source

skip_file_without("onnxruntime")

CODE = """
import torch
from torch import nn

def data(splits=("train", "validation", "test")):
    rows = [(torch.full((1, 6, 6), float(i % 3)) + torch.arange(6) / 10, i % 3) for i in range(30)]
    return {split: rows for split in splits}

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
                         nn.Linear(144, 3))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 36, bias=False), nn.Linear(36, 36, bias=False)
        self.last.weight = self.first.weight

    def forward(self, images):
        return self.last(self.first(images.flatten(1)).tanh())

class Depends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, images):
        rows = images.mean((1, 2))
        if rows.sum() > 1:                      # a graph has one branch only
            rows = rows * 2
        return self.layer(rows)

class Noisy(Net):
    def forward(self, images):
        logits = super().forward(images)
        return logits + torch.rand_like(logits)

def tables():
    rows = [{"left": torch.randn(4), "right": torch.randn(i % 3 + 2), "labels": i % 2} for i in range(24)]
    return {"train": rows}

def padded(samples):
    longest = max(len(row["right"]) for row in samples)
    right = torch.stack([torch.nn.functional.pad(row["right"], (0, longest - len(row["right"]))) for row in samples])
    labels = torch.tensor([row["labels"] for row in samples])
    return {"left": torch.stack([row["left"] for row in samples]), "right": right, "labels": labels}

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, left, right, labels=None):
        logits = self.layer(left) * right.sum(1, keepdim=True)
        result = {"logits": logits}
        return result | {"loss": nn.functional.cross_entropy(logits, labels)} if labels is not None else result
"""


class Scores(NamedTuple):
    """A result of a model with two tensors for each sample, and a number for the batch."""

    mean: Any
    variance: Any
    count: int


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a recipe of a tiny classifier, its files and its run, which keeps a checkpoint and the best one."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder, ["checkpoint-best"], train=TRAIN | {"save_every": "epoch"}))
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The same with LoRA adapters."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("adapted")
    base = str(folder / "base")
    train(write_recipe(folder, train=TRAIN | {"epochs": 1}, output=base))
    options = {"r": 2, "target_modules": ["q_lin", "v_lin"]}
    model = {"name": f"{base}/model"}
    train(write_recipe(folder, [{"lora": options}], model=model, train=TRAIN | {"save_every": "epoch"}))
    return folder


def module_run(folder: Path, model: str = "Net", **options: Any) -> Path:
    (folder / "code.py").write_text(CODE)
    recipe = {
        "model": {"module": f"code.py:{model}"},
        "data": {"module": "code.py:data"},
        "train": {"epochs": 1, "batch_size": 8, "lr": 0.01, "device": "cpu"},
        "plugins": [{"module": {"loss": "cross_entropy"}}],
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | options))
    train(folder / "recipe.yaml")
    return folder / "run"


def export(cli: Any, *arguments: Any) -> str:
    code, out, err = cli("export", *map(str, arguments))
    assert code == 0, err
    printed: str = out
    return printed


def refused(cli: Any, *arguments: Any, code: int = 2) -> str:
    found, _, err = cli("export", *map(str, arguments))
    assert found == code
    error: str = err
    return error


def session(folder: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])


def no_leftovers(folder: Path) -> bool:
    return not list(folder.glob(".*partial"))


# -- ONNX --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_classifier_in_onnxruntime_is_that_of_transformers(trained, cli):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = export(cli, trained / "run", "--to", "onnx", "--out", "onnx")
    assert "equals torch" in out
    assert "batches of the recipe's data" in out
    assert "written to onnx" in out
    model = AutoModelForSequenceClassification.from_pretrained(trained / "run" / "model").eval()
    tokenizer, runtime = AutoTokenizer.from_pretrained("onnx"), session(Path("onnx"))
    rows = [row["text"] for row in texts(40, 500)]
    for batch in (rows[:1], rows[1:4], rows[4:40]):
        encoded = tokenizer(batch, padding=True, return_tensors="pt")
        inputs = {name: encoded[name].numpy() for name in ("input_ids", "attention_mask")}
        (logits,) = runtime.run(["logits"], inputs)
        with torch.no_grad():
            expected = model(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).logits
        assert np.abs(logits - expected.numpy()).max() < 1e-5
    labels = json.loads(Path("onnx/config.json").read_text())["id2label"]
    assert list(labels.values()) == list(CLASSES)
    assert not list(Path("onnx").glob("*.safetensors"))
    text = Path("onnx/README.md").read_text()
    for line in (
        "| input | `input_ids` | int64 | `[batch, sequence]` |",
        "| input | `attention_mask` | int64 | `[batch, sequence]` |",
        "| output | `logits` | float32 | `[batch, 3]` |",
        "| 2 | good |",
        "ONNX with opset 20",
        "- Base model: none: trained from scratch",
        "- Task: text-classification",
    ):
        assert line in text
    assert [(value.name, value.shape) for value in runtime.get_inputs()] == [
        ("input_ids", ["batch", "sequence"]), ("attention_mask", ["batch", "sequence"])
    ]  # fmt: skip


@pytest.mark.slow
def test_without_data_the_batches_are_synthetic(trained, cli):
    shutil.copytree(trained / "run" / "model", "model")
    recipe = yaml.safe_load((trained / "recipe.yaml").read_text())
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = export(cli, "model", "recipe.yaml", "--to", "onnx")
    assert "synthetic batches" in out
    assert (Path("model-onnx") / "model.onnx").is_file()


@pytest.mark.slow
def test_a_language_model_gives_logits(tmp_path, cli):
    from transformers import AutoModelForCausalLM

    recipe = write_recipe(tmp_path)
    tree = yaml.safe_load(recipe.read_text())
    tree["model"] = {"config": TINY_GPT, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    tree["data"] = {"files": tree["data"]["files"], "max_length": 16}
    recipe.write_text(yaml.safe_dump(tree))
    train(recipe)
    export(cli, tmp_path / "run", "--to", "onnx", "--out", "onnx")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    for rows, length in ((1, 3), (5, 16)):
        ids = torch.randint(300, (rows, length), generator=torch.Generator().manual_seed(rows))
        (logits,) = session(Path("onnx")).run(None, {"input_ids": ids.numpy(), "attention_mask": np.ones_like(ids)})
        with torch.no_grad():
            assert np.abs(logits - model(input_ids=ids, use_cache=False).logits.numpy()).max() < 1e-4


@pytest.mark.slow
def test_a_module_with_images(tmp_path, cli):
    run = module_run(tmp_path)
    export(cli, run, "--to", "onnx")
    runtime = session(run / "model-onnx")
    assert [(value.name, value.shape) for value in runtime.get_inputs()] == [("input", ["batch", 1, 6, 6])]
    weights = load_file(run / "model" / "model.safetensors")
    images = torch.randn(7, 1, 6, 6)
    with torch.no_grad():
        hidden = torch.nn.functional.conv2d(images, weights["0.weight"], weights["0.bias"], padding=1)
        hidden = torch.nn.functional.batch_norm(
            hidden, weights["1.running_mean"], weights["1.running_var"], weights["1.weight"], weights["1.bias"]
        )
        expected = hidden.relu().flatten(1) @ weights["5.weight"].T + weights["5.bias"]
    (found,) = runtime.run(["output"], {"input": images.numpy()})
    assert np.abs(found - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("kind", "names"),
    [(tuple, ["output_0", "output_1"]), (list, ["output_0", "output_1"]), (Scores._make, ["mean", "variance"])],
    ids=["tuple", "list", "namedtuple"],
)
def test_the_outputs_of_a_sequence_have_names(kind, names):
    tensors = [torch.zeros(1), torch.ones(1), 3]
    found = onnx_model.outputs_of(kind(tensors))
    assert list(found) == names
    assert list(found.values()) == tensors[:2]


@pytest.mark.slow
def test_a_module_with_tied_weights(tmp_path, cli):
    run = module_run(tmp_path, "Tied")
    export(cli, run, "--to", "onnx", "--out", "onnx")
    weight, images = load_file(run / "model" / "model.safetensors")["first.weight"], torch.randn(2, 1, 6, 6)
    (found,) = session(Path("onnx")).run(None, {"images": images.numpy()})
    assert np.abs(found - ((images.flatten(1) @ weight.T).tanh() @ weight.T).numpy()).max() < 1e-5


@pytest.mark.slow
def test_a_module_with_named_inputs_of_changing_sizes(tmp_path, cli):
    options = {"data": {"module": "code.py:tables"}, "plugins": [{"module": {"collate": "code.py:padded"}}]}
    run = module_run(tmp_path, "Table", **options)
    export(cli, run, "--to", "onnx", "--out", "onnx", "train.eval_batch_size=1")
    inputs = {value.name: value.shape for value in session(Path("onnx")).get_inputs()}
    assert inputs == {"left": ["batch", 4], "right": ["batch", "right_1"]}
    (found,) = session(Path("onnx")).run(
        ["logits"], {"left": np.ones((2, 4), np.float32), "right": np.ones((2, 9), np.float32)}
    )
    weights = load_file(run / "model" / "model.safetensors")
    assert found[0] == pytest.approx((9 * (weights["layer.weight"].sum(1) + weights["layer.bias"])).numpy(), rel=1e-4)


@pytest.mark.slow
def test_a_model_that_cannot_be_exported(tmp_path, cli):
    run = module_run(tmp_path, "Depends")
    error = refused(cli, run, "--to", "onnx", "--out", "onnx")
    assert_problem(error, "export-failed run: Depends ONNX data-dependent")
    assert re.search(r"code\.py:\d+\)\. \[export-failed\]\n$", error)
    assert len(error.splitlines()) == 1
    assert not Path("onnx").exists()
    assert no_leftovers(Path())


@pytest.mark.slow
def test_many_weights_are_in_a_file_of_their_own(tmp_path, cli, monkeypatch):
    run = module_run(tmp_path)
    monkeypatch.setattr(onnx_model, "LARGEST_FILE", 100)
    export(cli, run, "--to", "onnx", "--out", "onnx")
    weights = sum(tensor.nbytes for tensor in load_file(run / "model" / "model.safetensors").values())
    assert Path("onnx/model.onnx.data").stat().st_size > 0.8 * weights  # the smallest stay in model.onnx
    (found,) = session(Path("onnx")).run(None, {"input": np.zeros((2, 1, 6, 6), np.float32)})
    assert found.shape == (2, 3)


@pytest.mark.slow
def test_outputs_that_differ_are_refused_with_the_numbers(tmp_path, cli):
    run = module_run(tmp_path, "Noisy")
    error = refused(cli, run, "--to", "onnx", "--out", "onnx", code=1)
    assert_problem(error, "export-differs Noisy: 0.000")
    assert not Path("onnx").exists()


@pytest.mark.slow
def test_a_missing_extra_names_the_command(trained, cli, monkeypatch):
    from importlib import metadata

    version = metadata.version

    def missing(name: str) -> str:
        if name == "onnxscript":
            raise metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(metadata, "version", missing)
    error = refused(cli, trained / "run", "--to", "onnx")
    assert "onnxscript>=0.2" in error
    assert "pip install 'fastloop-train[onnx]'" in error
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    assert "needs onnx>=1.17, found 0.1. Upgrade it" in refused(cli, trained / "run", "--to", "onnx")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["modernbert", *(["roberta", "llama"] if LONG else [])])
def test_architectures(tmp_path, cli, architecture):
    config = {"model_type": architecture, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 32, "max_position_embeddings": 64}
    train(write_recipe(tmp_path, model={"config": config, "tokenizer": {"kind": "word"}}, train=TRAIN | {"epochs": 1}))
    assert "equals torch" in export(cli, tmp_path / "run", "--to", "onnx", "--out", "onnx")


# -- safetensors and adapters ------------------------------------------------------------------------------------------


def test_safetensors_are_the_exported_weights(trained, cli):
    from transformers import pipeline

    export(cli, trained / "run", "--out", "out")
    assert Path("out/model.safetensors").read_bytes() == (trained / "run/model/model.safetensors").read_bytes()
    assert pipeline("text-classification", "out", device="cpu")("a lovely film")[0]["label"] in CLASSES
    assert "library_name: transformers" in Path("out/README.md").read_text()


@pytest.mark.parametrize("name", ["last", "best", "folder"])
def test_a_checkpoint(trained, cli, name):
    kinds = {"last": "step-*", "best": "best-*", "folder": "best-*"}
    (checkpoint,) = (trained / "run" / "checkpoints").glob(kinds[name])
    before = sorted((trained / "run").rglob("*"))
    export(cli, trained / "run", "--checkpoint", checkpoint.name if name == "folder" else name, "--out", "out")
    weights, saved = load_file("out/model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[key], saved[key]) for key in saved)
    tokenizer = trained / "run" / "model" / "tokenizer.json"
    assert Path("out/tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert sorted((trained / "run").rglob("*")) == before


def test_a_run_that_has_exported_nothing(trained, cli):
    shutil.copytree(trained, "copy")
    shutil.rmtree("copy/run/model")
    assert_problem(refused(cli, "copy/run"), "no-exported-model")
    export(cli, "copy/run", "--checkpoint", "last")
    (folder,) = Path("copy/run").glob("step-*-safetensors")
    assert (folder / "tokenizer.json").is_file()


def logits_of(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(
            **tokenizer(["a lovely film", "a dull film indeed"], padding=True, return_tensors="pt")
        ).logits


@pytest.mark.slow
def test_the_adapter_alone_and_merged_again(adapted, cli):
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = adapted / "run"
    export(cli, run, "--to", "adapter", "--checkpoint", "last", "--out", "adapter")
    assert not Path("adapter/model.safetensors").exists()
    assert json.loads(Path("adapter/adapter_config.json").read_text())["r"] == 2
    size = Path("adapter/adapter_model.safetensors").stat().st_size
    assert size < (run / "model" / "model.safetensors").stat().st_size
    tokenizer = AutoTokenizer.from_pretrained("adapter")
    exported = AutoModelForSequenceClassification.from_pretrained(run / "model")
    expected = logits_of(exported, tokenizer)

    export(cli, run, "--checkpoint", "last", "--out", "merged")
    merged = AutoModelForSequenceClassification.from_pretrained("merged")
    assert torch.equal(logits_of(merged, tokenizer), expected)
    assert not any("lora" in name for name in load_file("merged/model.safetensors"))

    shutil.copytree(adapted, "copy")  # as if the run had `merge: false`
    shutil.rmtree("copy/run/model")
    shutil.copytree("adapter", "copy/run/model")
    export(cli, "copy/run", "--out", "again")
    again = AutoModelForSequenceClassification.from_pretrained("again")
    assert torch.equal(logits_of(again, tokenizer), expected)

    # peft itself: it adds the adapter to base weights
    base = AutoModelForSequenceClassification.from_pretrained("again")
    saved = load_file(next(run.glob("checkpoints/*/model.safetensors")))
    names = {
        name: name.replace("base_model.model.", "").replace(".base_layer", "").replace(".original_module", "")
        for name in saved
    }
    base.load_state_dict(
        {short: saved[name] for name, short in names.items() if "lora" not in name and "modules_to_save" not in name}
    )
    # peft uses a deprecated name of transformers
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    with_adapter = PeftModel.from_pretrained(base, "adapter")
    assert torch.allclose(logits_of(with_adapter, tokenizer), expected, atol=1e-5)


@pytest.mark.slow
def test_an_adapter_as_onnx_is_merged(adapted, cli):
    out = export(cli, adapted / "run", "--checkpoint", "last", "--to", "onnx", "--out", "onnx")
    assert "equals torch" in out


@pytest.mark.slow
def test_adapters_that_are_not_there(trained, adapted, cli):
    assert "the recipe trains no adapter" in refused(cli, trained / "run", "--to", "adapter")
    shutil.copytree(adapted / "run", "copy")
    (checkpoint,) = Path("copy/checkpoints").glob("step-*")
    checkpoint.rename(checkpoint.with_name("step-00000001"))  # of another step than the exported model
    assert_problem(refused(cli, "copy", "--to", "adapter"), "no-adapter copy --checkpoint last best")


def test_the_model_of_an_adapter_is_built_with_the_plugins_of_the_run_alone(adapted, tmp_path):
    run = adapted / "run"
    recipe, _ = source.find_weights(str(run), [], None, True, [], [])
    built = source.training_recipe(recipe, True, tmp_path)
    active = {name for name, options in built.plugins.items() if options is not False}
    assert active <= set(load_recipe(str(run / "recipe.yaml")).plugins)


@pytest.mark.slow
def test_the_adapter_without_a_checkpoint_is_that_of_the_exported_model(adapted, cli):
    shown = export(cli, adapted / "run", "--to", "adapter", "--out", "alone")
    messages = [line for line in shown.splitlines() if not line.startswith("warning: ")]
    assert messages == ["written to alone"], "none of a training"
    export(cli, adapted / "run", "--to", "adapter", "--checkpoint", "last", "--out", "last")
    assert Path("alone/adapter_model.safetensors").read_bytes() == Path("last/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("run", ["trained", "best"])
def test_the_checkpoint_of_the_exported_model(trained, adapted, run):
    """The best one if it is exported, else the last one."""
    folder = {"trained": adapted, "best": trained}[run] / "run"
    summary = json.loads((folder / "summary.json").read_text())
    kind = {"trained": "step", "best": "best"}[run]
    expected = folder / "checkpoints" / f"{kind}-{summary['model_step']:08d}"
    assert source.find_checkpoint_of_model(folder) == expected


def test_checkpoints_that_are_refused(trained, adapted, cli):
    assert "there is no checkpoint 'step-7'. There are: best-0000" in refused(
        cli, trained / "run", "--checkpoint", "step-7"
    )
    assert "The plugin checkpoint-best keeps the best one" in refused(cli, adapted / "run", "--checkpoint", "best")
    assert_problem(refused(cli, trained / "run" / "model", "--checkpoint", "last"), "not-a-run recipe.yaml")
    assert "Leave it out" in refused(cli, trained / "run", "recipe.yaml", "--checkpoint", "last")
    shutil.copytree(trained, "copy")
    (best,) = Path("copy/run/checkpoints").glob("best-*")
    (best / "model.safetensors").write_bytes(b"x")
    assert_problem(refused(cli, "copy/run", "--checkpoint", "best"), "damaged-checkpoint model.safetensors")
    assert_problem(refused(cli, trained / "run", "model.config.dim=32", "--checkpoint", "last"), "damaged-checkpoint")


def test_a_module_as_safetensors(tmp_path, cli):
    run = module_run(tmp_path)
    export(cli, run, "--out", "out")
    assert "load_state_dict" in Path("out/README.md").read_text()
    assert load_file("out/model.safetensors").keys() == load_file(run / "model" / "model.safetensors").keys()


# -- the folder --------------------------------------------------------------------------------------------------------


def test_files_are_not_overwritten_unasked(trained, cli):
    Path("out").mkdir()
    export(cli, trained / "run", "--out", "out")  # empty
    Path("out/notes.txt").write_text("mine")
    assert_problem(refused(cli, trained / "run", "--out", "out"), "folder-not-empty --out out")
    assert Path("out/notes.txt").exists()
    export(cli, trained / "run", "--out", "out", "--overwrite")
    assert not Path("out/notes.txt").exists()
    assert no_leftovers(Path())
    Path("file").touch()
    assert_problem(refused(cli, trained / "run", "--out", "file"), "not-a-folder file")
    assert "contains" in refused(cli, trained / "run", "--out", ".", "--overwrite")
    assert "contains" in refused(cli, trained / "run", "--out", trained, "--overwrite")


def test_a_failed_export_keeps_the_old_folder(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()

    def fail() -> None:
        with folders.written(out) as made:
            (made / "new").touch()
            raise OSError("no space")

    with expect_problem("save-failed", SaveError):
        fail()
    assert [path.name for path in out.iterdir()] == ["old"]
    with folders.written(out) as made:
        (made / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert no_leftovers(tmp_path)


def test_the_card_of_an_export_names_its_own_folder(trained, cli):
    assert f'folder = "{trained / "run/model"}"' in (trained / "run/model/README.md").read_text()
    export(cli, trained / "run", "--out", "out")
    assert 'folder = "out"' in Path("out/README.md").read_text()
    (trained / "run/model/README.md").rename("README.md")  # an earlier version wrote none
    export(cli, trained / "run", "--out", "again")
    Path("README.md").rename(trained / "run/model/README.md")
    for name in ("out", "again"):
        found = load_by_card(Path(name))
        assert type(found["model"]).__name__ == "DistilBertForSequenceClassification"


@pytest.mark.parametrize(
    ("form", "result"),
    [("safetensors", "model"), pytest.param("onnx", "outputs", marks=pytest.mark.slow)],
)
def test_the_code_of_a_card_runs_where_the_export_was_started(trained, cli, capsys, form, result):
    shutil.copytree(trained, "copy")
    printed = export(cli, "copy/run", "--to", form)
    folder = Path(printed.splitlines()[-1].removeprefix("written to "))
    capsys.readouterr()
    names = load_by_card(folder)
    assert names["folder"] == str(folder) == f"copy/run/model-{form}"
    assert result in names
    words = capsys.readouterr().out.split()
    labels = [word for word in words if word in CLASSES]
    assert len(labels) == 2, "one for each text of the example"
    if form == "onnx":
        check_that_a_card_cuts_texts(folder)


def check_that_a_card_cuts_texts(folder: Path) -> None:
    """The code of an ONNX card cuts texts that are too long for the model."""
    page = folder / "README.md"
    page.write_text(page.read_text().replace("a second one", "a stirring film " * 200))
    names = load_by_card(folder)
    assert names["inputs"]["input_ids"].shape == (2, names["tokenizer"].model_max_length)
    assert names["outputs"][0].shape == (2, len(CLASSES))


@pytest.mark.parametrize("form", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_code_of_a_card_gives_the_probabilities_of_predict(tmp_path, cli, form):
    """Also of a text that training cuts before the limit of the model."""
    recipe = write_recipe(tmp_path)
    data = yaml.safe_load(recipe.read_text())["data"] | {"max_length": 6}
    train(write_sections(recipe, data=data))
    export(cli, tmp_path / "run", "--to", form, "--out", "exported")
    text = "a dull film number 3 indeed lovely superb fine lovely superb fine"
    page = Path("exported/README.md")
    assert "cut at 6 tokens" in page.read_text()
    page.write_text(page.read_text().replace("a second one", text))
    names = load_by_card(page.parent)
    assert names["inputs"]["input_ids"].shape == (2, 6)
    logits = names["outputs"].logits if form == "safetensors" else torch.from_numpy(names["outputs"][0])
    code, out, err = cli("predict", str(tmp_path / "run"), text)
    assert code == 0, err
    predicted = json.loads(out.splitlines()[-1])
    probabilities = [predicted[f"probability_{name}"] for name in CLASSES]
    assert logits.softmax(1)[1].tolist() == pytest.approx(probabilities, abs=1e-6)


@pytest.mark.slow
def test_the_code_of_a_card_gives_pairs_of_texts_to_a_model_of_two_columns(tmp_path, cli):
    recipe = write_recipe(tmp_path)
    for file in tmp_path.glob("*.csv"):
        lines = file.read_text().splitlines()
        file.write_text("\n".join([f"claim,{lines[0]}", *(f"a film,{line}" for line in lines[1:])]))
    data = yaml.safe_load(recipe.read_text())["data"]
    data["text"] = ["claim", "text"]
    train(write_sections(recipe, data=data))
    export(cli, tmp_path / "run", "--to", "onnx", "--out", "pairs")
    of_run = load_by_card(tmp_path / "run/model")
    of_onnx = load_by_card(Path("pairs"))
    for names in (of_run, of_onnx):
        separators = (names["inputs"]["input_ids"] == names["tokenizer"].sep_token_id).sum(1)
        assert separators.tolist() == [2, 2]
        assert names["outputs"][0].shape == (2, len(CLASSES))


def write_sections(recipe: Path, **sections: Any) -> Path:
    """Replace sections of a recipe file."""
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | sections))
    return recipe


@pytest.mark.parametrize(
    ("text", "config", "columns"),
    [
        (["claim", "proof"], {"sep_token": "[SEP]"}, ["claim", "proof"]),
        (["claim", "proof"], {}, ["text"]),
        (["claim", "proof", "source"], {"sep_token": "[SEP]"}, ["text"]),
        ("review", {"sep_token": "[SEP]"}, ["text"]),
        ("review", None, []),
    ],
)
def test_only_a_pair_of_columns_is_a_pair_of_the_tokenizer(text, config, columns):
    if config is not None:
        Path("tokenizer_config.json").write_text(json.dumps(config))
    assert list(TextInputs.of_export({"text": text}, Path()).columns) == columns


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
def test_the_code_of_an_adapters_card_runs_where_the_export_was_started(adapted, cli):
    shutil.copytree(adapted, "copy")
    export(cli, "copy/run", "--to", "adapter")
    assert load_by_card(Path("copy/run/model-adapter"))["folder"] == "copy/run/model-adapter"


def test_a_page_of_the_user_stays(trained, cli):
    shutil.copytree(trained / "run/model", "model")
    Path("model/README.md").write_text("# Mine\n")
    export(cli, "model", trained / "recipe.yaml", "--out", "out")
    assert Path("out/README.md").read_text() == "# Mine\n"

"""`fastloop export --quantize int8`: the printed metrics are those of the written files.

Modules:
    plugins/fastloop_tools/export/quantize.py
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from inference_runs import CLASSES, texts, train, write_recipe
from needed_packages import skip_file_without

from fastloop.testing import assert_problem

skip_file_without("onnxruntime")

VALIDATION = texts(24, 100)
MODEL = {"model_type": "distilbert", "dim": 64, "hidden_dim": 256, "n_layers": 2, "n_heads": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder, model={"config": MODEL, "tokenizer": {"kind": "word"}}))
    return folder / "run"


def quality(logits: torch.Tensor) -> tuple[float, float]:
    """Loss and accuracy on the validation split."""
    labels = torch.tensor([CLASSES.index(row["label"]) for row in VALIDATION])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()


def printed(out: str, name: str) -> tuple[float, float]:
    """The values before and after."""
    before, after = re.search(rf"^{name} +(\S+) +(\S+)", out, re.M).groups()  # type: ignore[union-attr]
    return float(before), float(after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao
@pytest.mark.parametrize("to", ["onnx", "safetensors"])
def test_the_metrics_are_those_of_the_written_files(trained, cli, to):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    if to == "safetensors":
        pytest.importorskip("torchao")
    code, out, err = cli("export", str(trained), "--to", to, "--quantize", "int8", "--out", "out")
    assert code == 0, err
    encoded = AutoTokenizer.from_pretrained("out")([row["text"] for row in VALIDATION], padding=True)
    ids, mask = (np.array(encoded[name]) for name in ("input_ids", "attention_mask"))
    models = [trained / "model", *([Path("out")] if to == "safetensors" else [])]
    found = []
    for model in models:
        network = AutoModelForSequenceClassification.from_pretrained(model).eval()
        with torch.no_grad():
            found.append(network(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).logits)
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession("out/model.onnx", providers=["CPUExecutionProvider"])
        # in batches of 8, as in the recipe: a tensor has one scale
        parts = []
        for start in range(0, 24, 8):
            rows = slice(start, start + 8)
            longest = mask[rows].sum(1).max()
            parts.append(
                session.run(None, {"input_ids": ids[rows, :longest], "attention_mask": mask[rows, :longest]})[0]
            )
        found.append(torch.from_numpy(np.concatenate(parts)))
    (loss, accuracy), (rounded_loss, rounded_accuracy) = map(quality, found)
    assert not torch.equal(*found)
    assert printed(out, "validation accuracy") == pytest.approx((accuracy, rounded_accuracy), abs=1e-4)
    assert printed(out, "validation loss") == pytest.approx((loss, rounded_loss), abs=2e-3)
    before, after = printed(out, "MiB")
    assert after < 0.6 * before
    check_page(Path("out/README.md").read_text(), to)


def check_page(page: str, to: str) -> None:
    """The README names no equality that rounding has ended."""
    assert "are then rounded to int8, so the outputs differ from those of `fastloop predict`" in page
    assert "validation accuracy" in page
    assert "Texts are cut at 32 tokens" in page
    assert "probabilities equal" not in page
    assert page.count("equals torch") == page.count("Before the weights were rounded, onnxruntime")
    assert page.count("equals torch") == int(to == "onnx")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao
def test_a_page_of_the_user_stays_with_a_warning(trained, cli):
    pytest.importorskip("torchao")
    shutil.copytree(trained / "model", "model")
    Path("model/README.md").write_text("# Mine\n")
    recipe = str(trained.parent / "recipe.yaml")
    code, out, err = cli("export", "model", recipe, "--quantize", "int8", "--out", "out")
    assert code == 0, err
    assert_problem(out, "page-kept --quantize int8: README.md")
    assert Path("out/README.md").read_text() == "# Mine\n"


def test_what_cannot_be_quantized_is_refused(trained, cli, monkeypatch):
    code, _, err = cli("export", str(trained), "--to", "adapter", "--quantize", "int8")
    assert code == 2
    assert_problem(err, "exclusive-options --quantize int8: --to adapter, safetensors onnx")
    assert cli("export", str(trained), "--quantize", "int9")[0] == 2
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    code, _, err = cli("export", str(trained), "--quantize", "int8")
    assert (code, "pip install 'fastloop-train[int8]'" in err) == (2, True)

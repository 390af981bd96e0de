"""``model.weights``: a warm start, and what it logs about tensors that do not match.

Modules:
    plugins/fastloop_plugins/_names.py
    plugins/fastloop_plugins/models/warm_start.py
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from log_lines import find_lines
from recipe_runs import assert_same, make_run, user_code
from safetensors.torch import save_file
from training_runs import execute

from fastloop import RecipeError
from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import make_recipe
from fastloop.runtime.step_folders import checkpoints
from fastloop.testing import LANGUAGE, assert_problem, expect_problem, write_texts


def other_weights() -> dict[str, torch.Tensor]:
    """Weights of the shapes of ``Net``, with other values."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: torch.randn(tensor.shape, generator=generator)
        for name, tensor in user_code()["Net"]().state_dict().items()
    }


def save(weights, path="weights.safetensors"):
    save_file(weights, path) if path.endswith(".safetensors") else torch.save(weights, path)
    return path


FORMS = {
    "safetensors": lambda weights: save(weights),
    "pt": lambda weights: save(weights, "weights.pt"),
    "nested": lambda weights: save({"state_dict": weights, "epoch": 3}, "last.ckpt"),
    "ddp": lambda weights: save({f"module.{name}": tensor for name, tensor in weights.items()}, "ddp.pth"),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_model_begins_with_the_weights_of_the_file(form, caplog):
    caplog.set_level(logging.INFO, "fastloop")
    path = FORMS[form](other_weights())
    run = make_run(model={"weights": path, "weights_strict": True})
    assert_same(run.unwrap_model().state_dict(), other_weights())
    assert find_lines(caplog, f"r.yaml: model.weights: {path}: 12 of 12")


def test_a_run_folder_is_a_source():
    first = make_run()
    execute(first)
    assert_same(
        make_run("output=second", model={"weights": "out"}).unwrap_model().state_dict(),
        first.unwrap_model().state_dict(),
    )


def test_a_checkpoint_is_a_source(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    first = make_run("train.save_every=1")
    execute(first)
    shutil.rmtree("out/model")
    checkpoint = checkpoints(Path("out"))[-1]
    with expect_problem(f"file-missing model.weights={checkpoint}", RecipeError):
        make_run("output=second", model={"weights": "out"})
    second = make_run("output=third", model={"weights": str(checkpoint), "weights_strict": True})
    assert_same(second.unwrap_model().state_dict(), first.unwrap_model().state_dict())
    assert find_lines(caplog, f"r.yaml: model.weights: {checkpoint}: 12 of 12"), "none of the optimizer's tensors"


def test_shards_may_repeat_a_tensor():
    weights = other_weights()
    weights["head.bias"][0] = torch.nan
    Path("shards").mkdir()
    save(weights, "shards/model-00001-of-00002.safetensors")
    save({"head.bias": weights["head.bias"]}, "shards/model-00002-of-00002.safetensors")
    run = make_run(model={"weights": "shards", "weights_strict": True})
    torch.testing.assert_close(run.unwrap_model().state_dict(), weights, rtol=0.0, atol=0.0, equal_nan=True)


def test_mismatches_are_logged_and_keep_their_initial_values(caplog):
    weights = other_weights()
    weights["head.weight"] = torch.zeros(5, 8)
    weights["classifier.bias"] = weights.pop("head.bias")
    run = make_run(model={"weights": save(weights)})
    state, initial = run.unwrap_model().state_dict(), user_code()["Net"]().state_dict()
    assert_same(
        {name: state[name] for name in initial if "head" in name},
        {name: initial[name] for name in initial if "head" in name},
    )
    assert_same(
        {name: state[name] for name in initial if "head" not in name},
        {name: weights[name] for name in initial if "head" not in name},
    )
    assert_problem(
        caplog,
        "weights-differ r.yaml: model.weights: weights.safetensors: 10 12 head.bias head.weight (3, 8) (5, 8) "
        "classifier.bias",
    )


def test_tied_weights_are_saved_once_and_not_missing(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    write_texts(Path.cwd())
    config = {**LANGUAGE["model"]["config"], "tie_word_embeddings": True}
    tree = {
        **LANGUAGE,
        "model": {**LANGUAGE["model"], "config": config},
        "train": {"device": "cpu", "epochs": 1},
        "output": "first",
    }
    first = build(resolve(make_recipe(tree)))
    execute(first)
    warm = make_recipe(
        {**tree, "model": {**tree["model"], "weights": "first", "weights_strict": True}, "output": "second"}
    )
    second = build(resolve(warm))
    assert_same(second.unwrap_model().state_dict(), first.unwrap_model().state_dict())


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("touched"),))


def broken() -> str:
    Path("broken.safetensors").write_bytes(b"no weights")
    return "broken.safetensors"


def two_exports() -> str:
    """A folder with shards, and the file of an earlier export beside them."""
    Path("other").mkdir()
    save({"head.bias": torch.zeros(3)}, "other/model-00001-of-00001.safetensors")
    save({"head.bias": torch.ones(3)}, "other/model.safetensors")
    return "other"


ERRORS = {
    "missing": (
        lambda: "nowhere.pt",
        False,
        "file-missing model.weights: nowhere.pt: .safetensors",
    ),
    "empty folder": (
        lambda: str(Path("empty").mkdir() or "empty"),
        False,
        "file-missing model.weights: empty: .safetensors",
    ),
    "broken": (broken, False, "file-unreadable broken.safetensors header"),
    "code": (lambda: save({"head.bias": Evil()}, "evil.pt"), False, "file-unreadable evil.pt eights"),
    "no tensors": (lambda: save({"epoch": 3}, "none.pt"), False, "wrong-format none.pt"),
    "nothing matches": (
        lambda: save({"encoder.weight": torch.zeros(2)}),
        False,
        "weights-differ encoder.weight; embed.weight, embed.bias, ...",
    ),
    "two exports": (two_exports, False, "weights-differ other/model.safetensors head.bias"),
    "strict": (lambda: save({"head.bias": torch.zeros(3)}), True, "weights-differ 1 12 11 model.weights_strict"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_key_and_the_file(case):
    make, strict, expected = ERRORS[case]
    with expect_problem(expected, RecipeError):
        make_run(model={"weights": make(), "weights_strict": strict})
    assert not Path("touched").exists()
    assert not Path("out").exists()

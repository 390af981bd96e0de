"""attention: the implementation is chosen, said, and gives the same numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from text_kit import TINY, make_run

from fastloop import PluginError
from fastloop_plugins.attention import Attention

DATA = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 32}
STILL = TINY | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}


def run(*objects, output="run"):
    Path("a.csv").write_text("text,label\n" + "".join(f"{'good ' * (1 + i % 9)},{i % 2}\n" for i in range(32)))
    return make_run("text-classification", {"config": STILL, "tokenizer": {"kind": "word"}}, DATA, objects=list(objects))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "auto"])
def test_every_implementation_gives_the_same_loss(implementation):
    made = run(Attention(implementation=implementation))
    plain = run()
    expected = {"auto": "sdpa"}.get(implementation, implementation)
    assert made.unwrapped().config._attn_implementation == expected
    batch = next(made.train_loader.batches()).inputs
    losses = [one.hooks.compute_loss(run=one, model=one.model.eval(), batch=batch).loss.item() for one in (made, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_choice_and_its_reason_are_said(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run(Attention())
    assert "attention: sdpa, since the device is cpu" in caplog.text


def test_a_model_that_is_not_transformers_is_left_alone(tiny_run, caplog):
    tiny_run([Attention()], epochs=1)
    assert "Sequential is no transformers model" in caplog.text


def test_flash_attention_is_refused_where_it_cannot_be():
    with pytest.raises(PluginError, match=r"'attention' needs (flash-attn|a device of type cuda)"):
        run(Attention(implementation="flash_attention_2"))

"""packing: the same numbers from one row of sequences, and nothing computed that is padding.

Modules:
    plugins/fastloop_plugins/data/_packing.py
    plugins/fastloop_plugins/data/_packing_trial.py
    plugins/fastloop_plugins/data/packing.py
"""

from __future__ import annotations

import logging
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_helpers import make_run
from training_runs import execute

from fastloop import Batch, Plugin, PluginError, hookimpl
from fastloop.lifecycle import build
from fastloop.plugins.resolve import ResolvedRecipe
from fastloop.testing import assert_problem, expect_problem
from fastloop_cpu.fast_dropout import FastDropout
from fastloop_plugins.data._packing import PackedCollator
from fastloop_plugins.data.dataloader_workers import DataLoaderWorkers
from fastloop_plugins.data.length_bucketing import LengthBucketing
from fastloop_plugins.data.packing import Packing
from fastloop_plugins.data.sample_audit import SampleAudit
from fastloop_plugins.guards.watchdog import Watchdog
from fastloop_plugins.kernels.attention import Attention
from fastloop_plugins.kernels.cls_last_layer import ClsLastLayer, at_first
from fastloop_plugins.kernels.compile import Compile
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing
from fastloop_plugins.precision.amp import Amp

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {
    "model_type": "distilbert",
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "max_position_embeddings": 48,
}
ENCODERS = {
    "bert": {"model_type": "bert", **SIZES, **STILL},
    "distilbert": DISTILBERT | {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "roberta": {"model_type": "roberta", **SIZES, **STILL},
    "electra": {"model_type": "electra", "embedding_size": 16, **SIZES, **STILL},
    "one layer": {"model_type": "bert", **SIZES, **STILL, "num_hidden_layers": 1},
}
DECODERS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 48}
    | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"model_type": "llama", **SIZES},
    "grouped": {"model_type": "llama", **SIZES, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
}
DATA = {"files": {"train": "a.csv", "validation": "a.csv"}, "max_length": 32}


def run(
    config: dict[str, Any], *objects: Plugin, output: str = "run", multiple: int | None = None, **train: Any
) -> Any:
    """A run on texts of 1 to 25 words, of which the label is the first; ``multiple`` is ``data.pad_to_multiple_of``."""
    lines = [
        f"{('bad', 'good')[i % 2]} {' '.join(f'w{(i * k) % 7}' for k in range(i * 5 % 25))},{i % 2}\n"
        for i in range(40)
    ]
    Path("a.csv").write_text("text,label\n" + "".join(lines))
    decoder = config in DECODERS.values()
    task, data = ("causal-lm", {}) if decoder else ("text-classification", {"label": "label"})
    data |= {"pad_to_multiple_of": multiple}
    return make_run(task, {"config": config, "tokenizer": {"kind": "word"}}, DATA | data, objects, **train)


class Uneven(Plugin):
    """Blocks of a language model of unequal lengths."""

    name = "uneven"

    @hookimpl(wrapper=True)
    def build_datasets(self) -> Any:
        from fastloop_plugins.text.sequences import Sequences

        datasets = yield
        cut = {
            split: [dataset[i]["input_ids"][: 2 + i * 7 % 30] for i in range(len(dataset))]
            for split, dataset in datasets.items()
        }
        return {split: Sequences(np.concatenate(ids), np.array(list(map(len, ids)))) for split, ids in cut.items()}


def made(config: dict[str, Any], *objects: Plugin, **train: Any) -> Any:
    return run(config, *objects, *([Uneven()] if config in DECODERS.values() else []), **train)


def computed(run: Any, batch: Batch) -> tuple[float, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Loss, predictions and gradients of a batch, in train mode."""
    run.model.train()
    output = run.hooks.compute_loss(run=run, model=run.model, batch=batch.inputs)
    run.model.zero_grad()
    output.loss.backward()
    gradients = {
        name: parameter.grad for name, parameter in run.unwrap_model().named_parameters() if parameter.grad is not None
    }
    return output.loss.item(), output.predictions, gradients


def assert_same(packed: Any, plain: Any, batches: int | None = None, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    for one, other in islice(zip(packed.train_loader.batches(), plain.train_loader.batches(), strict=True), batches):
        assert (one.ids, one.loss_weight, one.tokens, one.samples) == (
            other.ids,
            other.loss_weight,
            other.tokens,
            other.samples,
        )
        (loss, predictions, gradients), (expected, wanted, others) = computed(packed, one), computed(plain, other)
        assert loss == pytest.approx(expected, rel=max(1e-5, tolerance["rtol"]))
        if wanted is not None:
            torch.testing.assert_close(predictions, wanted, **tolerance)
        assert gradients.keys() == others.keys()
        for name in others:
            torch.testing.assert_close(gradients[name], others[name], **tolerance)


@pytest.mark.parametrize("config", [*ENCODERS.values(), *DECODERS.values()], ids=[*ENCODERS, *DECODERS])
def test_every_sample_has_the_loss_and_the_gradient_that_it_has_padded(config):
    packed, plain = made(config, Packing()), made(config)
    assert len({len(row["input_ids"]) for row in packed.datasets["train"]}) > 3
    assert_same(packed, plain)


@pytest.mark.parametrize("config", [ENCODERS["bert"], DECODERS["gpt2"]], ids=["bert", "gpt2"])
def test_no_padding_is_computed(config):
    packed = made(config, Packing())
    seen: list[int] = []
    packed.model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: seen.append(output[..., 0].numel())
    )
    for batch in packed.train_loader.batches():
        computed(packed, batch)
        assert seen.pop() == batch.tokens


class Multiple(Plugin):
    """Pads to a multiple of 16."""

    name = "multiple"

    @hookimpl
    def configure(self) -> dict[str, int]:
        return {"pad_to_multiple_of": 16}


@pytest.mark.parametrize("config", [ENCODERS["roberta"], DECODERS["llama"]], ids=["roberta", "llama"])
def test_a_row_is_padded_to_a_multiple_at_its_end_alone(config):
    packed = made(config, Packing(), Multiple())
    for batch in packed.train_loader.batches():
        row, tokens = batch.inputs["input_ids"], batch.tokens
        assert row.shape == (1, tokens + -tokens % 16)
    assert_same(packed, made(config))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_as_chosen_is_asked_for_each_sequence(implementation):
    bert = ENCODERS["bert"]
    assert_same(made(bert, Attention(implementation=implementation), Packing()), made(bert))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("bert", [], id="bert-alone"),
        pytest.param("distilbert", [], id="distilbert-alone"),
        pytest.param("roberta", [Multiple()], id="roberta-to a multiple"),
        pytest.param("bert", [Multiple()], marks=pytest.mark.slow, id="bert-to a multiple"),
        pytest.param("distilbert", [Multiple()], marks=pytest.mark.slow, id="distilbert-to a multiple"),
        pytest.param("roberta", [], marks=pytest.mark.slow, id="roberta-alone"),
    ],
)
def test_the_last_layer_may_be_computed_at_first_tokens_alone(name, more):
    config = ENCODERS[name]
    assert_same(made(config, ClsLastLayer(), Packing(), *more), made(config))


def test_flash_attention_gets_first_tokens():
    told: dict[str, Any] = {}

    def forward(hidden_states: torch.Tensor, attention_mask: Any, everything: torch.Tensor, **kwargs: Any) -> None:
        told.update(kwargs, shapes=(hidden_states.shape, everything.shape))

    ends = torch.tensor([0, 3, 7, 8], dtype=torch.int32)  # the last is a row's end
    at_first(
        forward,
        torch.ones(1, 8, 4),
        first_tokens=torch.tensor([0, 3]),
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=4,
    )
    assert told["shapes"] == ((1, 2, 4), (1, 8, 4))
    assert told["cu_seq_lens_q"].tolist() == [0, 1, 2, 2]
    assert (told["cu_seq_lens_q"].dtype, told["max_length_q"]) == (torch.int32, 1)
    assert told["cu_seq_lens_k"] is ends


def test_attention_ends_with_its_sequence():
    packed = made(DECODERS["gpt2"], Packing())
    batch = next(packed.train_loader.batches())
    cut = batch.inputs["packed"].lengths[0]
    with torch.no_grad():
        inputs = {name: value for name, value in batch.inputs.items() if name != "targets"}
        before = packed.model(**inputs).logits
        inputs["input_ids"][:, :cut] = 3
        after = packed.model(**inputs).logits
    assert torch.equal(before[:, cut:], after[:, cut:])
    assert not torch.equal(before[:, :cut], after[:, :cut])


def test_a_padded_batch_is_still_taken():
    packed, plain = made(ENCODERS["bert"], Packing()), made(ENCODERS["bert"])
    batch = next(plain.train_loader.batches())
    assert computed(packed, batch)[0] == pytest.approx(computed(plain, batch)[0], rel=1e-6)


@pytest.mark.slow
def test_activations_are_computed_again_as_they_were():
    dropping = ENCODERS["bert"] | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    results = []
    for plugins in ([], [ActivationCheckpointing()]):
        one = made(dropping, Packing(), *plugins)
        torch.manual_seed(5)
        results.append(computed(one, next(one.train_loader.batches())))
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(gradient, results[1][2][name])


@pytest.mark.parametrize("size", [2, 4])
def test_accumulated_micro_batches_make_the_same_step(size):
    bert = {"config": ENCODERS["bert"], "epochs": 1, "optimizer": "SGD"}
    weights = []
    for plugins, train in (([], {}), ([Packing()], {"micro_batch_size": size})):
        one = made(bert["config"], *plugins, max_steps=3, **train)
        execute(one)
        weights.append({name: value.clone() for name, value in one.unwrap_model().state_dict().items()})
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


def learn(*plugins: Plugin, **train: Any) -> dict[str, Any]:
    config = ENCODERS["bert"] | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    summary: dict[str, Any] = execute(run(config, Packing(), *plugins, **{"epochs": 8, "lr": 1e-2} | train))
    return summary


@pytest.mark.parametrize(
    "plugins",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param([Amp(dtype="bf16")], marks=pytest.mark.slow),
        pytest.param([FastDropout()], marks=pytest.mark.slow),
        [FastDropout(), Amp(dtype="bf16"), LengthBucketing(), ClsLastLayer()],
        pytest.param([DataLoaderWorkers(num_workers=1), SampleAudit()], marks=pytest.mark.slow),
    ],
    ids=["alone", "amp", "fast-dropout", "all of them", "workers"],
)
def test_it_learns_with(plugins):
    summary = learn(*plugins)
    assert summary["validation"]["accuracy"] > 0.9
    assert summary.get("sample-audit", {"missing": 0})["missing"] == 0
    assert "packed" not in Path("run/model/config.json").read_text()


def test_fast_dropout_attention_runs_for_each_sequence():
    config = ENCODERS["bert"] | {"attention_probs_dropout_prob": 0.5}
    one = run(config, FastDropout(), Packing())
    assert one.unwrap_model().config._attn_implementation == "packed_fast_dropout"
    batch = next(one.train_loader.batches())
    assert computed(one, batch)[0] != computed(one, batch)[0]


def test_evaluation_has_the_same_metrics():
    metrics = [
        execute(run(ENCODERS["distilbert"], *plugins, max_steps=2))["validation"] for plugins in ([Packing()], [])
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_inside_an_epoch():
    bert = ENCODERS["bert"] | {"hidden_dropout_prob": 0.1}
    whole = run(bert, Packing(), epochs=2)
    execute(whole)
    expected = {name: value.clone() for name, value in whole.unwrap_model().state_dict().items()}
    shutil.rmtree("run")
    execute(run(bert, Packing(), epochs=2, max_steps=3, save_every=3))
    again = run(bert, Packing(), epochs=2)
    rest = build(ResolvedRecipe(again.recipe, again.plugins), resume=Path("run"))
    execute(rest)
    assert all(torch.equal(value, expected[name]) for name, value in rest.unwrap_model().state_dict().items())


@pytest.mark.slow
# within torch's compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_compiled_it_computes_the_same():
    packed = made(ENCODERS["one layer"], Packing(), Compile(backend="eager", cache=False))
    assert_same(packed, made(ENCODERS["one layer"]), batches=2, rtol=1e-4, atol=1e-5)
    summary: dict[str, Any] = {}
    compiling = next(plugin for plugin in packed.plugins.plugins if plugin.name == "compile")
    compiling.write_summary(summary)
    compiling.teardown()
    assert summary["compile"]["failure"] is None
    assert summary["compile"]["graphs"] > 0


def test_flash_attention_gets_sequence_ends():
    plain = made(ENCODERS["bert"])
    samples = [plain.datasets["train"][i] for i in (3, 4, 6)]
    collator = PackedCollator(plain.loaders.collators["train"], 16)
    collator.varlen = True
    inputs, lengths = collator(samples).inputs, [len(sample["input_ids"]) for sample in samples]
    ends = [0, lengths[0], lengths[0] + lengths[1], sum(lengths), inputs["input_ids"].shape[1]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == ends
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(*lengths, ends[4] - ends[3])
    assert inputs["first_tokens"].tolist() == ends[:3]


def test_packing_logs_saved_padding(caplog):
    caplog.set_level(logging.INFO, "fastloop")
    run(ENCODERS["bert"], Packing())
    found = re.search(r"packing: removes padding, (\d+)% of the tokens", caplog.text)
    assert found is not None
    assert 20 < int(found[1]) < 70


def test_packing_logs_little_padding(caplog):
    run(DECODERS["gpt2"], Packing())
    assert_problem(caplog, "no-effect packing:")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"model_type": "modernbert", **SIZES, "num_hidden_layers": 3, "local_attention": 8},
            "unsupported-model",
        ),
        (
            {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 48},
            "unsupported-model",
        ),
        (
            {"model_type": "deberta-v2", **SIZES},
            "unsupported-model DebertaV2ForSequenceClassification",
        ),
    ],
    ids=["sliding window", "pools elsewhere", "own attention"],
)
def test_a_model_that_cannot_be_packed_is_refused(config, why):
    with expect_problem(why, PluginError):
        run(config, Packing())


QWEN_MOE = {
    "model_type": "qwen2_moe",
    **SIZES,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
}
QWEN_MOE |= {"num_experts_per_tok": 2, "use_sliding_window": True, "max_window_layers": 2}
PHI_MOE = {"model_type": "phimoe", **SIZES, "num_key_value_heads": 1, "num_local_experts": 2}
LLAMA4 = {
    "model_type": "llama4_text",
    **SIZES,
    "num_key_value_heads": 1,
    "intermediate_size_mlp": 32,
    "head_dim": 8,
    "num_local_experts": 2,
    "attention_chunk_size": 8,
}
MASK_WINDOWS = {"sliding_window: 8": [QWEN_MOE, PHI_MOE], "attention_chunk_size: 8": [LLAMA4]}
"""Models that limit attention by their mask alone."""


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    ("config", "field"),
    [(config, field) for field, configs in MASK_WINDOWS.items() for config in configs],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_window_that_only_the_mask_has_is_refused(monkeypatch, config, field, scale):
    window = {"sliding_window": 8} if "sliding" in field else {}
    monkeypatch.setitem(DECODERS, "window", config | window | {"initializer_range": scale})
    with pytest.raises(PluginError) as caught:
        made(DECODERS["window"], Packing())
    assert_problem(caught.value.problem, f"unsupported-model {field}")


def test_a_window_longer_than_every_sequence_is_packed(monkeypatch):
    monkeypatch.setitem(DECODERS, "window", QWEN_MOE | {"sliding_window": 40, "initializer_range": 0.2})
    assert_same(made(DECODERS["window"], Packing()), made(DECODERS["window"]))


def test_a_refused_model_stays_as_it_is(monkeypatch):
    monkeypatch.setitem(DECODERS, "window", QWEN_MOE | {"sliding_window": 8})
    one = made(DECODERS["window"])
    model, packing = one.unwrap_model(), Packing()
    packing.collator = PackedCollator(one.loaders.collators["train"], None)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    assert packing.adapt(one, model, model, trial=False) is None
    assert [len(module._forward_hooks) for module in model.modules()] != hooks
    model = made(DECODERS["window"]).unwrap_model()
    result = packing.adapt(one, model, model, trial=True)
    assert result is not None
    assert result.refusal is not None
    assert model.config._attn_implementation == "sdpa"
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


class Forgetful(Plugin):
    """A task's loss that gives the model the ids alone."""

    name = "forgetful"

    @hookimpl(tryfirst=True)
    def compute_loss(self, model: Any, batch: Any) -> Any:
        from fastloop import Output

        logits = model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
        return Output(torch.nn.functional.cross_entropy(logits, batch["labels"]), logits, batch["labels"])


class Careless(Forgetful):
    """One that lets attention cross from one sequence to the next."""

    name = "careless"

    @hookimpl(tryfirst=True)
    def compute_loss(self, model: Any, batch: Any) -> Any:
        from fastloop import Output

        logits = model(**{name: value for name, value in batch.items() if name not in ("targets", "packed")}).logits
        return Output(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()))


def test_a_task_that_knows_no_rows_is_refused():
    with expect_problem("unsupported-model", PluginError):
        run(ENCODERS["bert"], Packing(), Forgetful())


@pytest.mark.parametrize("config", DECODERS.values(), ids=DECODERS)
def test_a_task_that_lets_sequences_see_each_other_is_refused(config):
    with expect_problem("unsupported-model", PluginError):
        run(config, Packing(), Careless())


def test_a_model_that_is_not_transformers_is_refused(tiny_run):
    with expect_problem("unsupported-model", PluginError):
        tiny_run([Packing()], epochs=1)


def test_the_model_is_tried_before_the_watchdog_starts():
    assert made(ENCODERS["bert"], Packing(), Watchdog()).loaders.collators["train"].first_position == 0

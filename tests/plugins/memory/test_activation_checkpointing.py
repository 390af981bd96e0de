"""activation-checkpointing: the same numbers to the bit, dropout included, from far fewer bytes kept for backward.

Modules:
    plugins/fastloop_plugins/memory/activation_checkpointing.py
    plugins/fastloop_plugins/models/blocks.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from long_form import LONG
from text_helpers import TINY_GPT, make_run
from torch import nn
from training_runs import execute

from fastloop import Plugin, PluginError, Trainer, hookimpl
from fastloop.testing import Recorder, TinyResult, assert_problem, expect_problem, tiny_data
from fastloop_plugins.memory.activation_checkpointing import ActivationCheckpointing


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow, self.dropout = norm(8), nn.Linear(8, 64), nn.Linear(64, 8), nn.Dropout(0.2)
        self.forwards = 0

    def forward(self, hidden):
        self.forwards += 1
        return hidden + self.dropout(self.narrow(self.wide(self.norm(hidden)).relu()))


class Deep(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


class Twice(nn.Module):
    """A block that has blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(), Block()])

    def forward(self, hidden):
        return self.parts[1](self.parts[0](hidden))


class Kept(Plugin):
    """Counts the bytes that forward keeps for backward in the first micro-step, weights apart."""

    name = "kept"
    bytes = 0

    @hookimpl(wrapper=True)
    def compute_loss(self, model):
        if self.bytes or not model.training:
            return (yield)
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = yield
        self.bytes = sum(storage.nbytes() for storage in kept.values())
        return output


@pytest.fixture
def pair(tiny_run):
    """Two runs that differ in the plugin only, and the bytes kept by each: without, with."""

    def runs(plugins: Any = (), options: Any = None, model: Callable[[], nn.Module] = Deep, **arguments: Any):
        results = []
        for ours in ([], [ActivationCheckpointing(**options or {})]):
            kept = Kept()
            results.append(tiny_run([*copy.deepcopy(plugins), *ours, kept], model=model(), **arguments))
            results[-1].kept = kept.bytes
        return results

    return runs


def equal(one, other) -> bool:
    same = one.weights.keys() == other.weights.keys() and all(
        torch.equal(one.weights[name], other.weights[name]) for name in one.weights
    )
    return same and one.losses == other.losses and one.recorder.metrics == other.recorder.metrics


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], [{"amp": {"dtype": "bf16"}}]], ids=["fp32", "bf16"])
def test_numbers_are_the_same_to_the_bit_and_far_less_is_kept(pair, plugins):
    plain, ours = pair(plugins, micro_batch_size=4)
    assert equal(plain, ours)
    assert len(set(ours.losses)) == 18
    assert ours.kept < 0.2 * plain.kept


def test_what_is_kept_grows_by_the_inputs_of_a_block_only(pair):
    kept = {count: pair(model=lambda count=count: Deep(count=count), max_steps=1) for count in (2, 6)}
    plain, ours = ((kept[6][index].kept - kept[2][index].kept) / 4 for index in (0, 1))
    assert ours == 8 * 8 * 4  # 8 samples of 8 floats
    assert plain > 10 * ours


@pytest.mark.slow
def test_every_second_block(pair):
    (plain, half), (_, every) = pair(options={"every": 2}), pair()
    assert equal(plain, half)
    assert every.kept < half.kept < plain.kept
    assert [
        block.forwards - other.forwards for block, other in zip(half.model.blocks, plain.model.blocks, strict=True)
    ] == [18, 0] * 3


@pytest.mark.slow
def test_evaluation_computes_nothing_twice(pair):
    plain, ours = pair(evaluate_every=3)
    steps = len(ours.losses)
    assert [block.forwards for block in ours.model.blocks] == [block.forwards + steps for block in plain.model.blocks]
    block = ours.model.blocks[0].eval()
    before = block.forwards
    block(torch.randn(2, 8).to(ours.model.head.weight.device)).sum().backward()
    assert block.forwards == before + 1, "nor does a block in eval mode"


def test_blocks_within_blocks_are_computed_twice_not_three_times(pair):
    plain, ours = pair(model=lambda: Deep(Twice, 3), evaluate_every=None)
    assert equal(plain, ours)
    assert ours.kept < 0.2 * plain.kept
    part = ours.model.blocks[1].parts[0]
    assert part.forwards == plain.model.blocks[1].parts[0].forwards + len(ours.losses)


def test_blocks_are_named_by_class(pair):
    def model():
        torch.manual_seed(3)
        return nn.Sequential(Block(), Block(), nn.Linear(8, 3))

    plain, ours = pair(options={"blocks": ["Block"]}, model=model)
    assert equal(plain, ours)
    assert ours.kept < 0.3 * plain.kept


def test_a_class_that_is_not_there_is_refused(tiny_run):
    with expect_problem("unknown-module plugins.activation-checkpointing.blocks 'Blok' 'Block'", PluginError):
        tiny_run([ActivationCheckpointing(blocks=["Blok"])], model=Deep())


def test_checkpointing_logs_model_without_repeated_blocks(tiny_run, caplog):
    tiny_run([ActivationCheckpointing()], epochs=1)
    assert_problem(caplog, "no-blocks")


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm1d, lambda size: nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))],
    ids=["batch norm", "spectral norm"],
)
def test_blocks_that_change_themselves_as_they_compute_are_left_alone(pair, caplog, norm):
    def model():
        deep = Deep(count=3)
        deep.blocks[1] = Block(norm)
        return deep

    plain, ours = pair(model=model)
    assert equal(plain, ours)
    assert (
        "1 of 3 blocks (Block) has batch or spectral norm, which must not see a batch twice: it is not recomputed"
        in caplog.text
    )
    assert [block.forwards for block in ours.model.blocks][1] == plain.model.blocks[1].forwards
    assert ours.kept < plain.kept


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_it(tiny_run):
    whole = tiny_run(model=Deep())
    tiny_run([ActivationCheckpointing()], model=Deep(), epochs=1, output="run")
    on = tiny_run(model=Deep(), output="run", resume=True)
    assert equal_weights(on, whole)
    tiny_run(model=Deep(), epochs=1, output="other")
    assert equal_weights(tiny_run([ActivationCheckpointing()], model=Deep(), output="other", resume=True), whole)


def equal_weights(one, other) -> bool:
    return all(torch.equal(one.weights[name], other.weights[name]) for name in other.weights)


def test_a_copy_of_the_model_computes_with_its_own_weights(tiny_run):
    model = tiny_run([ActivationCheckpointing()], model=Deep(), epochs=1).model.train()
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.head.weight)
    for weight in twin.blocks.parameters():
        nn.init.zeros_(weight)
    inputs = torch.randn(4, 8).to(twin.head.weight.device)
    assert torch.equal(twin(inputs), twin.head(inputs))
    assert twin.blocks[0].forwards == model.blocks[0].forwards + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "regional"), [("aot_eager", False), *([("inductor", True), ("inductor", False)] if LONG else [])]
)
# torch's own, inside inductor
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
# the compiler asks, and looks away
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_it_is_compiled_along(pair, backend, regional):
    options = {
        "backend": backend,
        "regional": regional,
        "fullgraph": not regional,
        "cache": False,
        "on_failure": "error",
    }

    class Plain(Block):
        def forward(self, hidden):
            return hidden + self.dropout(self.narrow(self.wide(self.norm(hidden)).relu()))

    # few graphs: one shape, no evaluation
    arguments = {"data": tiny_data(64), "batch_size": 64, "epochs": 3, "evaluate_every": None}
    plain, ours = pair([{"compile": options}], model=lambda: Deep(Plain, 3), **arguments)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert ours.summary["compile"]["graphs"] > 0
    assert ours.summary["compile"]["graph_breaks"] == 0
    assert ours.kept < 0.5 * plain.kept
    torch._dynamo.reset()


def test_a_backend_that_would_draw_other_dropout_is_refused(tiny_run):
    with expect_problem("conflicting-values plugins.compile.backend 'eager' 'aot_eager'", PluginError):
        tiny_run([ActivationCheckpointing(), {"compile": {"backend": "eager"}}], model=Deep())


@pytest.fixture
def text() -> dict[str, Any]:
    Path("train.txt").write_text("\n\n".join(f"one two three four five {i}" for i in range(40)))
    return {"files": {"train": "train.txt", "validation": "train.txt"}, "max_length": 16}


def test_a_language_model_trains_the_same_and_is_exported(text):
    from transformers import AutoModelForCausalLM

    model = {"config": TINY_GPT | {"n_layer": 3}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    results = []
    for objects in ([], [ActivationCheckpointing()]):
        kept = Kept()
        run = make_run("causal-lm", model, text, [*objects, kept], micro_batch_size=4)
        results.append(
            (
                execute(run)["validation"],
                {name: value.clone() for name, value in run.model.state_dict().items()},
                kept.bytes,
            )
        )
    (metrics, weights, plain), (ours, same, less) = results
    assert metrics == ours
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert less < 0.5 * plain
    exported = AutoModelForCausalLM.from_pretrained("run/model")
    assert exported.config.use_cache
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, run.model.eval()(ids).logits)
    assert exported.generate(ids, max_new_tokens=3, do_sample=False).equal(
        run.model.generate(ids, max_new_tokens=3, do_sample=False)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_model_of_transformers_keeps_no_cache_while_it_trains(kind):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    configs = {
        "gpt2": (
            AutoModelForCausalLM,
            {**TINY_GPT, "n_layer": 2, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0},
        ),
        "t5": (
            AutoModelForSeq2SeqLM,
            {"d_model": 16, "d_ff": 32, "num_layers": 3, "num_heads": 2, "d_kv": 8, "vocab_size": 20},
        ),
    }
    cls, options = configs[kind]
    options = options | {"model_type": kind} | ({"decoder_start_token_id": 0} if kind == "t5" else {})

    def train(*plugins: Plugin, **extra: Any):
        return language_model(lambda: cls.from_config(AutoConfig.for_model(**options | extra)), *plugins)

    plain, ours, cached = train(use_cache=False), train(ActivationCheckpointing()), train()
    assert equal(plain, ours)
    assert ours.kept < 0.6 * plain.kept
    assert ours.losses == pytest.approx(cached.losses, rel=1e-4)


def language_model(build: Callable[[], nn.Module], *plugins: Any) -> TinyResult:
    """A run of a model of transformers that its user calls as ``model(input_ids=..., labels=...)``."""
    data = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(1, 20, (32, 8), generator=torch.Generator().manual_seed(0))
    ]
    torch.manual_seed(1)
    model, recorder, kept = build(), Recorder(), Kept()
    trainer = Trainer(model, data, plugins=[*plugins, recorder, kept], batch_size=8, epochs=2, lr=1e-2)
    result = TinyResult(trainer, trainer.fit(), model, recorder)
    result.kept = kept.bytes
    return result


def test_a_model_that_makes_a_cache_for_each_forward_trains_the_same():
    """XLM gives the cache to its blocks, without an option to leave it out. Recomputed, they would add each key and
    value again."""
    Path("a.csv").write_text(
        "text,label\n" + "".join(f"{('bad', 'good')[i % 2]} film {i},{i % 2}\n" for i in range(24))
    )
    model = {"config": {"model_type": "xlm", "emb_dim": 16, "n_layers": 3, "n_heads": 2, "max_position_embeddings": 40}}
    data = {"files": {"train": "a.csv", "validation": "a.csv"}, "label": "label", "max_length": 16}
    results = []
    for objects in ([], [ActivationCheckpointing()]):
        kept = Kept()
        run = make_run("text-classification", model | {"tokenizer": {"kind": "word"}}, data, [*objects, kept])
        results.append((execute(run)["validation"], run.full_state_dict(), kept.bytes))
    (metrics, weights, plain), (ours, same, less) = results
    assert metrics == ours
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert less < 0.7 * plain


def test_adapters_train_the_same():
    pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {
        "model_type": "llama",
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
    }
    config |= {"vocab_size": 20, "use_cache": False, "attention_dropout": 0.1}

    def train(*plugins: Plugin):
        return language_model(
            lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)),
            *plugins,
            {"lora": {"dropout": 0.1}},
        )

    plain, ours = train(), train(ActivationCheckpointing())
    assert equal(plain, ours)
    assert ours.kept < 0.5 * plain.kept
    assert ours.losses[-1] < ours.losses[0]

"""The plugin ``auto``.

Modules:
    plugins/fastloop_plugins/_listed_strategy.py
    plugins/fastloop_plugins/auto.py
    plugins/fastloop_plugins/models/wrapped.py
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from fastloop.errors import PluginError
from fastloop.plugins.resolve import resolve
from fastloop.recipe import Inference, load_recipe, make_recipe
from fastloop.runtime.hardware import Machine
from fastloop.testing import assert_problem, expect_problem
from fastloop_plugins._selection import dependents
from fastloop_plugins.data.dataloader_workers import DataLoaderWorkers
from fastloop_plugins.data.device_prefetch import DevicePrefetch

CPU = Machine("cpu", "AVX512", ("fp32", "bf16"), ("bf16",))
OLD_CPU = Machine("cpu", "AVX2", ("fp32", "bf16"))
H100 = Machine("cuda", "H100", ("fp32", "bf16", "fp16", "fp8"), ("bf16", "fp16", "fp8"))
MODEL = {"model": {"name": "distilbert-base-uncased"}, "data": {"name": "imdb", "text": "text", "label": "label"}}


def select(machine: Machine, *plugins: object, **sections: object) -> dict[str, object]:
    """The plugins of a recipe after it is resolved for a machine."""
    recipe = make_recipe({**MODEL, "plugins": list(plugins), **sections})
    recipe = resolve(recipe, machine).recipe
    return recipe.plugins


def listed(name: str) -> dict[str, object]:
    return {
        plugin: options
        for plugin, options in load_recipe(name).plugins.items()
        if options is not False and plugin != "checkpoint-best"
    }


def test_auto_on_a_cpu_selects_the_plugins_of_the_cpu_recipe():
    assert select(CPU, "auto") == listed("distilbert_imdb_cpu")


def test_auto_on_a_gpu_selects_the_plugins_of_the_gpu_recipe():
    assert select(H100, {"auto": {"numerics": "changes-training"}}) == listed("distilbert_imdb_gpu")


def test_flagship_recipe_lists_auto_and_resolves_to_the_cpu_recipe():
    recipe = load_recipe("distilbert_imdb")
    assert "auto" in recipe.plugins
    recipe = resolve(recipe, CPU).recipe
    assert {name: options for name, options in recipe.plugins.items() if name != "checkpoint-best"} == listed(
        "distilbert_imdb_cpu"
    )


def test_inference_gets_only_what_pays_without_training():
    recipe = make_recipe({**MODEL, "plugins": [{"auto": {"numerics": "reassociated"}}]})
    recipe.inference = Inference(Path("model"), "test")
    for machine, plugins in ((CPU, {"cls-last-layer", "packing"}), (H100, {"cls-last-layer", "device-prefetch"})):
        assert set(resolve(recipe, machine, any_machine=True).recipe.selected) == plugins


def test_default_numerics_keep_the_batches():
    chosen = select(H100, "auto")
    assert "length-bucketing" not in chosen
    assert chosen["packing"] == {}
    assert chosen["compile"] == {"mode": "reduce-overhead"}, "packed rows have few shapes"
    assert chosen["amp"] == {"dtype": "bf16"}


def test_no_parts_of_a_step_are_recorded_where_whole_steps_are():
    chosen = select(H100, "auto", "step-graph")
    assert chosen["compile"] == {}
    assert "step-graph" not in select(H100, "auto"), "no figures show yet that it pays"


@pytest.mark.parametrize(
    ("data", "mode"),
    [
        ({"files": {"train": "a.txt"}, "max_length": 64}, "reduce-overhead"),
        ({"files": {"train": "a.txt"}, "max_length": 64, "streaming": True, "blocks": True}, "reduce-overhead"),
        ({"files": {"train": "a.txt"}, "max_length": 64, "streaming": True}, "reduce-overhead"),
        ({"files": {"train": "a.jsonl"}, "messages": "messages"}, "reduce-overhead"),
        ({"files": {"train": "a.csv"}, "target": "summary"}, None),
    ],
    ids=["blocks", "streamed blocks", "streamed texts", "conversations", "pairs"],
)
def test_cuda_graphs_are_recorded_for_blocks_and_packed_rows(data, mode):
    recipe = make_recipe({"model": {"config": {"model_type": "gpt2"}}, "data": data, "plugins": ["auto"]})
    recipe = resolve(recipe, H100).recipe
    assert recipe.plugins["compile"].get("mode") == mode


@pytest.mark.parametrize(("strategy", "gathers"), [("ddp", False), ("fsdp", True), ("deepspeed", True)])
def test_no_cuda_graphs_and_no_background_saves_where_weights_are_gathered(strategy, gathers):
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    chosen = select(dataclasses.replace(H100, processes=2), "auto", strategy)
    assert chosen["compile"] == ({} if gathers else {"mode": "reduce-overhead"})
    assert ("async-save" in chosen) is not gathers


@pytest.mark.parametrize(
    ("plugins", "data", "workers"),
    [
        ([], {"files": {"train": "a.csv"}, "label": "label"}, False),
        ([], {"files": {"train": "a.csv"}, "target": "summary"}, False),
        ([], {"files": {"train": "a.txt"}}, False),
        (["causal-lm"], {"files": {"train": "a.txt"}}, False),
        ([], {"files": {"train": "a.txt"}, "streaming": True}, True),
        ([], {"images": {"train": "a"}, "label": "label"}, True),
        (["image-classification"], {"folder": "a"}, True),
    ],
    ids=["classes", "pairs", "blocks", "listed task", "stream", "images", "listed task of images"],
)
def test_workers_read_on_cuda_unless_token_ids_are_in_memory(plugins, data, workers):
    recipe = make_recipe({"model": {"name": "a-model"}, "data": data, "plugins": plugins})
    assert (DataLoaderWorkers.recommend(recipe, H100) is not None) == workers
    assert DataLoaderWorkers.recommend(recipe, dataclasses.replace(H100, device="mps")) is not None
    assert DataLoaderWorkers.recommend(recipe, CPU) is None
    assert DevicePrefetch.recommend(recipe, H100) is not None


@pytest.mark.parametrize(
    ("data", "plugins", "is_chosen"),
    [
        ({"files": {"train": "a.jsonl"}, "messages": "messages"}, [], True),
        ({"files": {"train": "a.jsonl"}, "messages": "messages"}, ["fused-loss"], False),
        ({"files": {"train": "a.jsonl"}, "messages": "messages"}, ["tensor-parallel"], False),
        ({"files": {"train": "a.jsonl"}, "messages": "messages", "padding": "max_length"}, [], False),
        ({"files": {"train": "a.jsonl"}, "prompt": "question", "completion": "answer"}, [], True),
        ({"files": {"train": "a.txt"}}, [], False),
        ({"files": {"train": "a.csv"}, "label": "label"}, [], False),
    ],
    ids=["messages", "fused-loss", "divided head", "padded to the maximum", "completions", "blocks", "classes"],
)
def test_only_tokens_with_a_loss_pass_the_head_on_a_cpu(data, plugins, is_chosen):
    recipe = make_recipe({"model": {"name": "a-model"}, "data": data, "plugins": [*plugins, "auto"]})
    assert ("target-logits" in resolve(recipe, CPU, any_machine=True).recipe.selected) is is_chosen
    assert "target-logits" not in resolve(recipe, H100, any_machine=True).recipe.selected


def test_without_a_kernel_for_rows_a_gpu_pads():
    """No bf16, or packing turned off: the lengths of batches vary."""
    for machine, listed in ((dataclasses.replace(H100, fast_dtypes=("fp16",)), ()), (H100, ({"packing": False},))):
        chosen = select(machine, "auto", *listed)
        assert chosen.get("packing", False) is False
        assert chosen["compile"] == {}, "no CUDA graphs for shapes that vary"
        assert "length-bucketing" in select(machine, {"auto": {"numerics": "changes-training"}}, *listed)


def test_options_follow_the_plugins_that_are_left_out():
    """`auto` records CUDA graphs for packed rows only. A model that cannot be packed leaves batches of many shapes."""
    recipe = make_recipe({**MODEL, "plugins": ["auto"]})
    recipe = resolve(recipe, H100).recipe
    before = dict(recipe.plugins)
    del recipe.plugins["packing"], recipe.selected["packing"]
    assert dependents(recipe, before, H100)["compile"].options == {}


@pytest.mark.parametrize(
    ("numerics", "absent"), [("reassociated", {"amp"}), ("bitwise", {"amp", "packing", "cls-last-layer"})]
)
def test_numerics_limits_the_selection(numerics, absent):
    chosen = select(CPU, {"auto": {"numerics": numerics}})
    assert not absent & chosen.keys()
    assert "allocator" in chosen


def test_no_amp_without_matrix_units_for_bf16():
    assert "amp" not in select(OLD_CPU, "auto")


@pytest.mark.slow
def test_several_processes_get_ddp_unless_a_strategy_is_listed():
    two = dataclasses.replace(CPU, processes=2)
    assert "ddp" in select(two, "auto")
    assert "ddp" not in select(two, "auto", "fsdp")
    assert "ddp" not in select(CPU, "auto")


def test_it_says_nothing_about_a_plugin_for_whose_purpose_the_recipe_lists_another(caplog):
    caplog.set_level(logging.INFO, logger="fastloop")
    chosen = select(dataclasses.replace(CPU, processes=2), "auto", "fsdp")
    assert "ddp" not in chosen
    assert "ddp" not in caplog.text


def test_listed_options_are_kept_and_plugins_that_are_off_stay_off():
    chosen = select(CPU, "auto", {"amp": {"dtype": "bf16", "init_scale": 8.0}}, {"packing": False})
    assert chosen["amp"] == {"dtype": "bf16", "init_scale": 8.0}
    assert chosen["packing"] is False
    assert "fast-dropout" not in select(CPU, "auto", "compile"), "each mask would break compile's graph"


@pytest.mark.parametrize(
    ("sections", "absent"),
    [
        ({"model": {"name": "an-unknown-model"}}, {"packing", "cls-last-layer", "fast-dropout"}),
        ({"model": {"config": {"model_type": "gpt2"}}}, {"cls-last-layer"}),
        ({"data": {"name": "imdb", "text": "text", "label": "label", "padding": "max_length"}}, {"packing"}),
        ({"train": {"optimizer": "LBFGS"}}, {"fused-optimizer"}),
    ],
)
def test_rules_follow_model_data_and_optimizer(sections, absent):
    chosen = select(CPU, "auto", **sections)
    assert not absent & chosen.keys()
    assert "allocator" in chosen


def test_model_type_is_read_from_a_local_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "packing" in select(CPU, "auto", model={"name": str(tmp_path)})


def test_sentences_of_tagged_words_are_packed_but_keep_their_last_layer():
    chosen = select(CPU, "auto", data={"files": {"train": "train.conll"}})
    assert "packing" in chosen
    assert "cls-last-layer" not in chosen


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2"])
def test_texts_of_a_decoder_are_not_packed_but_its_tagged_words_are(kind):
    model = {"config": {"model_type": kind}}
    assert "packing" not in select(CPU, "auto", model=model), "it classifies a text by the last token"
    assert "packing" in select(CPU, "auto", model=model, data={"files": {"train": "train.conll"}})


def test_reasons_name_auto_and_resolving_twice_keeps_them():
    recipe = make_recipe({**MODEL, "plugins": ["auto"]})
    first = resolve(recipe, CPU).plugins
    assert first.reasons["packing"] == "auto: no padding is computed"
    assert resolve(resolve(recipe, CPU).recipe, CPU).plugins.reasons == first.reasons


def test_an_error_of_the_recipe_is_reported_once(caplog):
    with (
        caplog.at_level(logging.INFO, "fastloop"),
        expect_problem("slot-filled-twice 'deepspeed' 'fsdp'", PluginError),
    ):
        select(CPU, "auto", "deepspeed", "fsdp")
    assert not caplog.messages


def test_a_machine_without_a_known_speedup_is_reported(tiny_run, caplog, monkeypatch):
    monkeypatch.setattr(
        "fastloop.runtime.hardware.this_machine", lambda device="auto": Machine("mps", "mps", ("fp32",))
    )
    with caplog.at_level(logging.WARNING, "fastloop"):
        result = tiny_run(["auto", {"dataloader-workers": False}])
    assert "auto" in result.summary["plugins"]
    assert_problem(caplog, "nothing-selected auto: cpu")


def test_only_the_task_in_use_decides_whether_blocks_are_fixed():
    """A recipe that lists another task than `causal-lm` may have the same keys of data."""
    from fastloop_plugins._task_traits import recipe_traits

    data = {"files": {"train": "train.txt"}, "text": "text", "max_length": 64}
    assert "fixed-length" in recipe_traits(make_recipe({"data": data}))
    assert "fixed-length" not in recipe_traits(make_recipe({"data": data, "plugins": ["module"]}))

"""Runs: how they are divided and resumed, and with which plugins they compute the same."""

import json

import pytest
import torch
from fastloop import FastloopError, Plugin, hookimpl
from fastloop.testing import Conformance, run_commands, train
from grpo_cases import lines, recipe, write_model
from grpo_runs import DATA, MODEL, OPTIONS, sampled, train_all

SETTINGS = {
    "dapo": {"loss": "dapo", "beta": 0.3, "updates_per_generation": 2, "loss_batch_size": 3},
    "gspo": {"loss": "gspo", "mask_truncated": True, "loss_batch_size": 7},
}
"""Settings whose micro-batches have different numbers of tokens."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with the fixed completions of ``grpo_cases``."""
    return write_model(tmp_path_factory.mktemp("base"))


def same_weights(one, other, share):
    """Whether the weights after training differ by a share of their size at most."""
    difference = torch.cat([(one.weights[name] - other.weights[name]).flatten() for name in other.weights])
    size = torch.cat([weight.flatten() for weight in other.weights.values()]).norm()
    return float(difference.norm() / size) <= share


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_as_one(strategy, base, tmp_path, processes):
    """One of them has three prompts, and the other two."""
    alone = {}
    for name, options in SETTINGS.items():
        alone[name] = train(recipe(tmp_path / f"one-{name}", base, options, batch_size=6, lr=0.05))
    given = [
        recipe(tmp_path / f"two-{name}", base, options, ["fixed-engine", strategy], batch_size=6, lr=0.05)
        for name, options in SETTINGS.items()
    ]
    first, _ = processes(2, train_all, given)
    for name, found in zip(SETTINGS, first.result, strict=True):
        assert found.losses == pytest.approx(alone[name].losses, rel=1e-5, abs=1e-6), name
        assert same_weights(found, alone[name], 1e-6), name
        (one,), (two,) = (lines(tmp_path / f"{kind}-{name}" / "run" / "metrics.jsonl") for kind in ("one", "two"))
        skipped = {key for key in one if key.startswith("seconds/") or key.endswith(("_per_second", "_bytes"))}
        for key in one.keys() - skipped:
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(
    "plugin",
    [
        "packing",
        "activation-checkpointing",
        pytest.param({"compile": {"backend": "aot_eager"}}, marks=pytest.mark.slow, id="compile"),
    ],
)
def test_plugins_change_no_gradient(plugin, base, tmp_path):
    for name, options in SETTINGS.items():
        plain = train(recipe(tmp_path / f"plain-{name}", base, options, lr=0.05))
        found = train(recipe(tmp_path / f"with-{name}", base, options, ["fixed-engine", plugin], lr=0.05))
        assert found.losses == pytest.approx(plain.losses, rel=1e-5, abs=1e-6), name
        assert same_weights(found, plain, 1e-6), name


def test_packing_computes_rows_without_padding(base, tmp_path):
    seen = Inputs()
    train(recipe(tmp_path, base, {"loss_batch_size": 7}, ["fixed-engine", "packing"]), seen)
    assert [shape[0] for shape in seen.shapes] == [1, 1, 1]
    rows = lines(tmp_path / "run" / "rows" / "completions.jsonl")
    tokens = sum(len(row["prompt"]) + row["tokens"] for row in rows)
    assert tokens <= sum(shape[1] for shape in seen.shapes) <= 1.2 * tokens


class Inputs(Plugin):
    """Records the shapes of what the loss computes."""

    name = "inputs"

    def __init__(self):
        super().__init__()
        self.shapes = []

    @hookimpl(wrapper=True)
    def compute_loss(self, batch):
        if "targets" in batch:
            self.shapes.append(tuple(batch["input_ids"].shape))
        return (yield)


LORA = {"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"], "merge": False}}


def test_the_reference_is_the_model_before_training(base, tmp_path):
    """A first update diverges by nothing from it, with adapters and without."""
    for name, plugins in (("full", []), ("lora", [LORA])):
        options = {"beta": 0.5}
        train(recipe(tmp_path / name, base, options, ["fixed-engine", *plugins], epochs=2, lr=0.5))
        first, second = lines(tmp_path / name / "run" / "metrics.jsonl")
        assert first["kl"] == pytest.approx(0, abs=1e-7)
        assert second["kl"] > 1e-6


def test_adapters_alone_are_trained(base, tmp_path):
    found = train(recipe(tmp_path, base, {"beta": 0.1}, ["fixed-engine", LORA]))
    assert found.gradients
    assert all("lora_" in name for name in found.gradients)
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()


DROPPING = {
    "llama": MODEL["config"] | {"attention_dropout": 0.5},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "opt": {
        "model_type": "opt",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 24,
        "word_embed_proj_dim": 16,
        "max_position_embeddings": 64,
        "dropout": 0.5,
    },
}


@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_is_off_in_training_and_kept_in_the_export(kind, tmp_path):
    """The second update of the same completions has the log-probabilities of the first one, if no weight changed."""
    model = {"config": DROPPING[kind], "tokenizer": {"kind": "char"}}
    ratios = Ratios()
    options = {"updates_per_generation": 2}
    train(sampled(tmp_path, options, model=model, optimizer="torch.optim:SGD", lr=1e-12, max_steps=1), ratios)
    assert len(ratios.largest) == 2
    assert max(ratios.largest) < 1e-5
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    rates = {"llama": {"attention_dropout": 0.5}, "gpt2": {"resid_pdrop": 0.1}, "opt": {"dropout": 0.5}}
    assert rates[kind].items() <= config.items()


class Ratios(Plugin):
    """Records how far the log-probabilities of an update are from those of the first one."""

    name = "ratios"

    def __init__(self):
        super().__init__()
        self.largest = []

    @hookimpl(wrapper=True)
    def compute_loss(self, run, model, batch):
        output = yield
        if "old" in batch:
            task = next(plugin for plugin in run.plugins if plugin.name == "grpo")
            with torch.no_grad():
                found = task.log_probabilities(model, batch)
            self.largest.append(float((found - batch["old"]).abs().max()))
        return output


class StopAtStep(Plugin):
    """Stops a run as Ctrl-C does."""

    name = "stop-at-step"

    @hookimpl
    def after_step(self, run):
        if run.state.step == 2:
            run.signals.record("SIGINT")


@pytest.mark.parametrize("plugins", [[], [{"lora": {"r": 2}}]], ids=["full", "lora"])
def test_a_resumed_run_equals_a_whole_one_to_the_bit(plugins, base, tmp_path):
    """Each draws completions by the model itself, also in evaluations, and has a reference."""
    options = {"beta": 0.1, "updates_per_generation": 2}
    model = {"model": {"name": str(base)}} if plugins else {}
    given = {"save_every": 1, "evaluate_every": 1, "max_steps": 4} | model
    whole = train(sampled(tmp_path / "whole", options, plugins, **given))
    train(sampled(tmp_path / "parts", options, plugins, **given), StopAtStep())
    resumed = train(sampled(tmp_path / "parts", options, plugins, **given), resume=tmp_path / "parts" / "run")
    assert len(resumed.losses) == 2
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    one, other = (lines(tmp_path / name / "run" / "rows" / "completions.jsonl") for name in ("whole", "parts"))
    assert one == other
    assert len({row["completion"] for row in one}) > 4


def test_an_evaluation_reports_the_mean_reward_of_its_prompts(tmp_path):
    """A checkpoint of the best reward is kept, and an evaluation of the export draws as the last one of the run."""
    plugins = [{"checkpoint-best": {"monitor": "reward"}}]
    given = sampled(tmp_path, {"eval_generations": 3}, plugins, evaluate_every=2, save_every=2)
    trained = train(given)
    metrics = trained.summary["validation"]
    assert metrics["reward"] == pytest.approx(metrics["rewards/repeats"]) == pytest.approx(-metrics["loss"])
    assert 1 <= metrics["completion_tokens"] <= OPTIONS["max_new_tokens"]
    assert trained.summary["best"]["mode"] == "max"
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "12="}\n{"prompt": "3="}\n')
    run_commands(
        [
            (tmp_path, "evaluate", "run", "--split", "validation", "--json", "metrics.json"),
            (tmp_path, "predict", "run", "rows.jsonl", "--out", "texts.jsonl"),
        ]
    )
    (tmp_path / "long.jsonl").write_text('{"prompt": "12="}\n{"prompt": "123456789="}\n')
    (output,) = run_commands([(tmp_path, "predict", "run", "long.jsonl", "--out", "long.npy")], code=2)
    assert "10 tokens" in output
    evaluated = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert evaluated == pytest.approx(trained.summary["best"]["metrics"], rel=1e-5)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt in ("12=", "3="):
        inputs = tokens(prompt, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=OPTIONS["max_new_tokens"], do_sample=False)
        expected.append(tokens.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert [row["text"] for row in lines(tmp_path / "texts.jsonl")] == expected


def evaluations(folder, size, plugins=()):
    """A recipe whose evaluations have batches of a size, before anything is learned."""
    return sampled(folder, {"eval_generations": 3}, plugins, lr=1e-9, max_steps=1, batch_size=4, eval_batch_size=size)


def test_the_batch_size_of_an_evaluation_changes_no_completion(tmp_path):
    found = [train(evaluations(tmp_path / str(size), size)).summary["validation"] for size in (1, 3, 8)]
    assert found[0]["completion_tokens"] > 1
    for metrics in found[1:]:
        assert metrics == pytest.approx(found[0], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_evaluate_the_same_completions(strategy, tmp_path, processes):
    alone = train(evaluations(tmp_path / "one", 3)).summary["validation"]
    first, _ = processes(2, train_all, [evaluations(tmp_path / "two", 4, [strategy])])
    assert first.result[0].summary["validation"] == pytest.approx(alone, rel=1e-6)


def test_a_reward_rises(tmp_path):
    rows = {"epochs": 20, "max_steps": 40, "lr": 1e-2, "batch_size": 8, "evaluate_every": 20}
    train(sampled(tmp_path, {"num_generations": 8}, max_grad_norm=1.0, **rows))
    points = [point for point in lines(tmp_path / "run" / "metrics.jsonl") if "split" not in point]
    first, last = ([point["reward"] for point in part] for part in (points[:5], points[-5:]))
    assert sum(last) / 5 > 2 * sum(first) / 5 + 0.1
    assert {"seconds/generation", "seconds/training", "truncated", "clipped", "reward_spread"} <= points[0].keys()


def test_a_plan_shows_prompts_and_estimates_memory(tmp_path):
    """It builds no model with weights, and draws no completion."""
    (tmp_path / "recipe.yaml").write_text(json.dumps(sampled(tmp_path)))
    samples, memory = run_commands(
        [
            (tmp_path, "plan", "recipe.yaml", "--samples", "1"),
            (tmp_path, "plan", "recipe.yaml", "--device-memory", "8GB"),
        ]
    )
    assert "1" in samples and "=" in samples
    assert "ddp" in memory


@pytest.mark.parametrize("adapters", ["none", "new", "continued"])
def test_a_plan_counts_the_reference(adapters, tmp_path):
    """With new adapters, it is the model without them."""
    model = MODEL
    plugins = []
    if adapters == "new":
        plugins = [{"lora": {"r": 2}}]
    if adapters == "continued":
        train(sampled(tmp_path / "base"))
        model = {"name": str(tmp_path / "base" / "run" / "model")}
        train(sampled(tmp_path / "adapted", plugins=[{"lora": {"r": 2, "merge": False}}], model=model))
        plugins = [{"lora": {"adapter": str(tmp_path / "adapted" / "run" / "model")}}]
    commands = []
    for beta in (0.0, 0.1):
        (tmp_path / f"{beta}.yaml").write_text(json.dumps(sampled(tmp_path, {"beta": beta}, plugins, model)))
        commands.append((tmp_path, "plan", f"{beta}.yaml", "--device-memory", "8GB", "--json", f"{beta}.json"))
    run_commands(commands)
    before, after = [json.loads((tmp_path / f"{beta}.json").read_text()) for beta in (0.0, 0.1)]
    second_model = 0 if adapters == "new" else 4 * after["parameters"]
    for plain, variant in zip(before["variants"], after["variants"], strict=True):
        assert variant["weights"] >= plain["weights"] + second_model
        assert variant["weights"] <= plain["weights"] + 1.05 * second_model  # buffers
        assert variant["flops"] > plain["flops"]


CALLING = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look", "arguments": {}}]}
ONLY_CALLS = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}{{ call['name'] ~ call['arguments'] | tojson }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A template that leaves out the content beside a call, as those of Llama 3 and Mistral."""


def called():
    """Prompts, of which one has a content beside a call, and a column that the task does not read."""
    asked = {"role": "user", "content": "1"}
    rows = [{"prompt": [asked], "answer": "1", "history": "once"} for _ in range(4)]
    rows[2]["prompt"] = [asked, CALLING, asked]
    return {"train": rows}


def test_parts_of_prompts_that_the_model_does_not_read_are_warnings(base, tmp_path):
    (tmp_path / "calls.jinja").write_text(ONLY_CALLS)
    data = {"module": f"{__file__}:called", "chat_template": "calls.jinja", "validation_fraction": 0, "max_length": 48}
    given = sampled(tmp_path, model={"name": str(base)}, data=data, max_steps=1)
    given["plugins"][0]["grpo"]["rewards"] = [f"{__file__}:size"]
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    (output,) = run_commands([(tmp_path, "train", "recipe.yaml")])
    words = " ".join(output.split())
    assert "1 of 4 rows has a content beside tool_calls that the chat template leaves out" in words
    assert "they may belong to the conversations: history" in words


def size(completion_ids, **kwargs):
    """The number of tokens of each completion."""
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("plugin", ["tensor-parallel", "neftune", "context-parallel"])
def test_refused_plugins(plugin, tmp_path):
    with pytest.raises(FastloopError, match=plugin):
        train(sampled(tmp_path, plugins=[plugin]))


class TestConformance(Conformance):
    plugin = "grpo"
    options = OPTIONS
    task = {"model": MODEL, "data": DATA}

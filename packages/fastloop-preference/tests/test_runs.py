"""Runs: their division, their reference, predictions, exported models, formats of rows, and what is refused."""

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastloop import FastloopError
from fastloop.testing import Conformance, run_commands, train
from fastloop_plugins.text import Chat, RowError, Split, template_text
from preference_runs import MODEL, ROWS, message, points, recipe, rows, tokenizer, train_all, write_recipe
from test_trl import model

from fastloop_preference.dpo import DPO
from fastloop_preference.rows import MARK, Completions

AUTO = ("auto", {"amp": False})
CASES = {
    "dpo": ("dpo", {}, {"fast": (1, AUTO), "shared": (2, ["ddp"])}),
    "orpo": ("dpo", {"loss": "orpo"}, {"shared": (2, ["ddp", "packing"])}),
    "kto": ("kto", {"undesirable_weight": 0.5}, {"parts": (1, ()), "shared": (2, ["ddp"])}),
    "reward-model": ("reward-model", {"center": 0.1}, {"shared": (2, ["ddp"])}),
}
"""Case -> task, options, and further ways to train it, in micro-batches of 3 rows: processes and plugins."""


def test_micro_batches_packing_and_processes_do_not_change_the_loss(tmp_path, processes):
    """In the last step, a process has no row, or fewer rows."""
    recipes = {1: {}, 2: {}}
    for case, (task, options, ways) in CASES.items():
        recipes[1][case, "whole"] = recipe(tmp_path / case / "whole", task, options, epochs=1)
        for way, (count, plugins) in ways.items():
            sizes = {"micro_batch_size": 3, "eval_batch_size": 5, "epochs": 1}
            recipes[count][case, way] = recipe(tmp_path / case / way, task, options, plugins=plugins, **sizes)
    found = {}
    for count, known in recipes.items():
        found |= zip(known, processes(count, train_all, [*known.values()])[0].result, strict=True)
    assert "packing" in found["dpo", "fast"]
    for case, way in found.keys() - {(case, "whole") for case in CASES}:
        for split, count in ((None, 7), ("validation", 1), ("test", 1)):
            values, expected = (points(tmp_path / case / name, split) for name in (way, "whole"))
            assert len(expected) == count
            for one, other in zip(values, expected, strict=True):
                assert "rewards/margins" in other
                assert one == pytest.approx(other, rel=1e-3, abs=2e-5), (case, way, split)


def test_pairs_that_are_equal_after_the_cut_are_counted():
    """A prompt of 2 tokens, and completions of 3 tokens each, which differ in the last token or in the first."""
    late = [2, 3, 3, 7, 8, 4, 5, 6, 4, 5, 9]
    early = [2, 3, 3, 7, 8, 4, 5, 6, 9, 5, 6]
    split = Split(np.array([*early, *late], np.int32), np.array([11, 11]))
    findings = {}
    for most in (4, 5):
        pairs = Completions(split, ["chosen", "rejected"], most, "begun")
        findings[most] = {text: rows.tolist() for text, rows in pairs.findings.items() if "twice" in text}
    assert [*findings[4].values()] == [[], [1]]
    assert [*findings[5].values()] == [[], []]


@pytest.mark.parametrize(("keep", "count"), [("begun", 1), ("whole", 2), ("all", 2)])
def test_rows_with_a_completion_of_no_token_are_left_out(keep, count):
    """A mean over its tokens, as in ipo and orpo, would be NaN."""
    empty = [2, 0, 1, 7, 8, 4]
    pair = [2, 1, 1, 7, 8, 4, 5]
    split = Split(np.array([*empty, *pair], np.int32), np.array([6, 7]))
    pairs = Completions(split, ["chosen", "rejected"], 5, keep)
    assert len(pairs) == count
    left_out = pairs.findings["are left out: a completion has no token"]
    assert left_out.tolist() == ([0] if keep == "begun" else [])


@pytest.mark.parametrize("case", CASES)
def test_folds_divide_the_rows_of_each_task(tmp_path, case):
    """An evaluation reads the rows of its fold alone."""
    task, options, _ = CASES[case]
    folds = {"folds": {"number": 1, "of": 3}}
    divided = recipe(tmp_path / "folds", task, options, plugins=[folds], max_steps=1, eval_batch_size=4)
    whole = recipe(tmp_path / "whole", task, options, plugins=[folds], max_steps=1, eval_batch_size=64)
    train_all([divided, whole])
    found, expected = (points(tmp_path / name, "validation") for name in ("folds", "whole"))
    assert found == [pytest.approx(point, rel=1e-4, abs=1e-6) for point in expected]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with ``base``, a model; ``dpo``, trained from it with adapters; and ``reward-model``."""
    folder = tmp_path_factory.mktemp("trained")
    model(3).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    given = {"model": {"name": str(folder / "base")}, "epochs": 1, "lr": 0.05}
    cache = {"token-cache": {"folder": str(folder / "cache")}}
    dpo = write_recipe(folder / "dpo", "dpo", plugins=["lora", cache], **given)
    again = write_recipe(folder / "again", "dpo", {"beta": 0.5}, plugins=["lora", cache], **given)
    reward = write_recipe(folder / "reward-model", "reward-model", **given)
    lines = [{name: row[name] for name in ("prompt", "chosen")} for row in rows(50)[-5:]]
    roles = {"prompt": "user", "chosen": "assistant"}
    lines[-1] = {name: [message(roles[name], text)] for name, text in lines[-1].items()}
    for name in ("dpo", "reward-model"):
        (folder / name / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    predict = ("predict", "run", "rows.jsonl", "--out")
    run_commands(
        [
            (dpo, "train", "recipe.yaml"),
            (dpo, *predict, "rewards.jsonl"),
            (dpo, *predict, "packed.jsonl", "--with", "packing", "--keep", "all"),
            (dpo, "evaluate", "run", "--json", "known.json"),
            (reward, "train", "recipe.yaml"),
            (reward, *predict, "rewards.jsonl"),
            (again, "train", "recipe.yaml"),
        ]
    )
    (folder / "dpo" / "run" / "model" / "reference.logps").unlink()
    run_commands([(dpo, "evaluate", "run", "--json", "loaded.json")])
    lines = [reference_line(folder / name) for name in ("dpo", "again")]
    assert (
        lines[0] == f"computed the log-probabilities of 110 completions: {folder / 'cache'} has none of an earlier run"
    )
    assert lines[1].startswith(f"read from {folder / 'cache' / 'reference-'}")
    return folder


def reference_line(folder):
    """The line of a run's log about its reference, without its name."""
    (line,) = [line for line in (folder / "run" / "log.txt").read_text().splitlines() if "reference: " in line]
    return line.partition("reference: ")[2]


def read(path):
    return [json.loads(line)["reward"] for line in path.read_text().splitlines()]


def texts():
    """The predicted rows: the ids of each, and the number of them that are the prompt's. The last one is rendered."""
    found = [(row["prompt"], row["chosen"]) for row in rows(50)[-5:]]
    found[-1] = f"u:{found[-1][0]}<end>a:", found[-1][1]
    encode = tokenizer()
    return [
        (torch.tensor([encode(f"{asked}{answer}<end>")["input_ids"]]), len(encode(asked)["input_ids"]))
        for asked, answer in found
    ]


def test_predictions_are_log_probabilities_relative_to_the_model_before_training(trained):
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(trained / name) for name in ("dpo/run/model", "base")]
    expected = []
    for tokens, start in texts():
        with torch.no_grad():
            every = [each(tokens).logits[0, :-1].log_softmax(-1) for each in models]
        after, before = (found.gather(1, tokens[0, 1:, None])[start - 1 :].sum() for found in every)
        expected.append(0.1 * float(after - before))
    assert max(map(abs, expected)) > 1e-2
    for name in ("rewards", "packed"):
        assert read(trained / "dpo" / f"{name}.jsonl") == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this deprecated name of transformers
def test_predictions_of_a_continued_adapter_are_relative_to_it(trained):
    """The model before training is the base with the adapter that the run began with."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base():
        return AutoModelForCausalLM.from_pretrained(trained / "base")

    adapter = trained / "adapter"
    torch.manual_seed(0)
    options = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    get_peft_model(base(), LoraConfig(**options)).save_pretrained(adapter)
    given = {"model": {"name": str(trained / "base")}, "epochs": 1, "lr": 0.05}
    folder = write_recipe(trained / "continued", "dpo", plugins=[{"lora": {"adapter": str(adapter)}}], **given)
    (folder / "rows.jsonl").write_text((trained / "dpo" / "rows.jsonl").read_text())
    predict = ("predict", "run", "rows.jsonl", "--out", "rewards.jsonl")
    run_commands([(folder, "train", "recipe.yaml"), (folder, *predict)])
    after = AutoModelForCausalLM.from_pretrained(folder / "run" / "model")
    before = PeftModel.from_pretrained(base(), adapter)
    expected = [0.1 * (sum_of(after, *text) - sum_of(before, *text)) for text in texts()]
    assert read(folder / "rewards.jsonl") == pytest.approx(expected, abs=1e-5)


def sum_of(model, tokens, start):
    """The log-probability of the tokens from ``start`` on."""
    with torch.no_grad():
        every = model(tokens).logits[0, :-1].log_softmax(-1)
    return float(every.gather(1, tokens[0, 1:, None])[start - 1 :].sum())


def test_predictions_keep_the_columns_of_their_rows(trained):
    given, found = (
        [json.loads(line) for line in (trained / "dpo" / name).read_text().splitlines()]
        for name in ("rows.jsonl", "packed.jsonl")
    )
    assert [list(row) for row in found] == [["prompt", "chosen", "reward"]] * len(given)
    for row, kept in zip(given, found, strict=True):
        assert kept == {**row, "reward": kept["reward"]}


def test_a_trained_model_stops_at_the_end_token_of_its_tokenizer(trained):
    from transformers import GenerationConfig

    before = GenerationConfig.from_pretrained(trained / "base").eos_token_id
    assert before != tokenizer().eos_token_id, "the default of the architecture"
    assert GenerationConfig.from_pretrained(trained / "dpo" / "run" / "model").eos_token_id == tokenizer().eos_token_id


def test_an_evaluation_reads_the_reference_or_loads_it_again(trained):
    trained_metrics = json.loads((trained / "dpo" / "run" / "summary.json").read_text())["test"]
    for name in ("known", "loaded"):
        found = json.loads((trained / "dpo" / f"{name}.json").read_text())["metrics"]
        assert found == pytest.approx(trained_metrics, abs=1e-5)


def test_the_reference_is_read_from_the_cache(trained):
    one, other = (points(trained / name)[1]["rewards/margins"] for name in ("dpo", "again"))
    assert other == pytest.approx(5 * one, rel=1e-3) != 0  # Adam's first step does not depend on beta


def test_adapters_with_other_initial_values_have_another_reference_in_the_cache(trained):
    """The adapters are a part of the model before training, and each seed draws others. So the first loss is ln 2."""
    plugins = [{"lora": {"init_lora_weights": False}}, {"token-cache": {"folder": str(trained / "cache")}}]
    given = {"model": {"name": str(trained / "base")}, "epochs": 1, "plugins": plugins}
    folders = [write_recipe(trained / f"seed-{seed}", "dpo", seed=seed, **given) for seed in (1, 2)]
    run_commands([(folder, "train", "recipe.yaml") for folder in folders])
    assert [points(folder)[0]["loss"] for folder in folders] == pytest.approx([math.log(2)] * 2)
    differing = [reference_line(folder).partition(" differ in ")[2] for folder in folders]
    assert differing == ["model weights, options of lora", "model weights"]
    (folders[0] / "rows.jsonl").write_text((trained / "dpo" / "rows.jsonl").read_text())
    (output,) = run_commands([(folders[0], "predict", "run", "rows.jsonl", "--out", "rewards.jsonl")], code=2)
    assert "adapters with random values (init_lora_weights: false), which are not saved" in " ".join(output.split())


def test_transformers_computes_the_scores_of_a_reward_model(trained):
    from transformers import AutoModelForSequenceClassification

    found = AutoModelForSequenceClassification.from_pretrained(trained / "reward-model" / "run" / "model")
    assert found.config.num_labels == 1
    with torch.no_grad():
        expected = [float(found(tokens).logits) for tokens, _ in texts()]
    assert read(trained / "reward-model" / "rewards.jsonl") == pytest.approx(expected, abs=1e-5)


QUESTION, GOOD, BAD = (
    message(role, text) for role, text in (("user", "Hi?"), ("assistant", "Yo"), ("assistant", "No"))
)
FORMATS = {
    "chatml.intel": (
        {"system": "Be.", "question": "Hi?", "chosen": "Yo", "rejected": "No"},
        {"system": "system", "prompt": "question", "chat_template": "chatml"},
        "<|im_start|>system\nBe.<|im_end|>\n",
    ),
    "chatml.ultra": (
        {"prompt": "Hi?", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": None, "chat_template": "chatml"},
        "",
    ),
    "chat_template.default": (
        {"messages": [QUESTION], "chosen": GOOD, "rejected": BAD},
        {"prompt": "messages", "chat_template": "chatml"},
        "",
    ),
}
"""Format of Axolotl -> a row, options of ``data``, and the beginning of its text."""


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_of_axolotl(name):
    row, options, start = FORMATS[name]
    keys = {key: options.get(key, key) for key in ("system", "prompt", "chosen", "rejected")}
    keys = {key: column for key, column in keys.items() if column in row}
    template = template_text(SimpleNamespace(find=Path, where="recipe"), options["chat_template"])
    arguments = {"columns": [*keys], "template": template, "render": True}
    values = [DPO.read_conversation(row[column], column, key) for key, column in keys.items()]
    (numbers,) = DPO.encode(copy.deepcopy(tokenizer()), [tuple(values)], arguments)
    parts = np.split(numbers[3:], np.cumsum(numbers[:2]))
    asked = f"{start}<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    assert [*map(tokenizer().decode, parts)] == [asked, "Yo<|im_end|>\n", "No<|im_end|>\n"]


@pytest.mark.parametrize("alone", [False, True], ids=["prompt", "completions"])
def test_tools_of_a_row_are_in_its_prompt(alone):
    """A row has them in each of its conversations."""
    tools = [{"name": "search"}]
    columns = ["chosen", "rejected"] if alone else ["prompt", "chosen", "rejected"]
    chats = [[QUESTION, GOOD], [QUESTION, BAD]] if alone else [[QUESTION], [GOOD], [BAD]]
    values = tuple(MARK + Chat(messages, tools).dumps() for messages in chats)
    template = template_text(SimpleNamespace(find=Path, where="recipe"), "chatml")
    arguments = {"columns": columns, "template": template, "render": False}
    (numbers,) = DPO.encode(copy.deepcopy(tokenizer()), [values], arguments)
    parts = np.split(numbers[3:], np.cumsum(numbers[:2]))
    prompt, *answers = map(tokenizer().decode, parts)
    assert '<tools>\n{"name": "search"}\n</tools>' in prompt
    assert answers == ["Yo<|im_end|>\n", "No<|im_end|>\n"]
    with pytest.raises(RowError, match="tools, which the chat template does not read"):
        [*DPO.encode(tokenizer(), [values], arguments | {"template": None})]


def test_a_completion_ends_once_if_the_tokenizer_ends_each_text():
    from tokenizers.processors import TemplateProcessing

    ending = copy.deepcopy(tokenizer())
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <end>", pair="$A <end> $B <end>", special_tokens=[("<end>", ending.eos_token_id)]
    )
    values = ("a=", "A", "B<end>")
    arguments = {"columns": ["prompt", "chosen", "rejected"], "template": None, "render": False}
    assert [*DPO.encode(ending, [values], arguments)] == [*DPO.encode(tokenizer(), [values], arguments)]


def test_commands_that_train_nothing_need_no_reference(trained):
    showing = ("plan", "recipe.yaml")
    commands = [(*showing, "--samples", "1"), (*showing, "--device-memory", "16GiB"), ("prepare", "recipe.yaml")]
    shown, estimated, prepared = run_commands([(trained / "dpo", *command) for command in commands])
    assert "chosen (" in shown and "rejected (" in shown
    assert "optimizer" in estimated
    assert "tokens: " in prepared


CALLING = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"name": "look", "arguments": {}}]}
ONLY_CALLS = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['tool_calls'] %}"
    "{% for call in message['tool_calls'] %}{{ call['name'] ~ call['arguments'] | tojson }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A template that leaves out the content beside a call, as those of Llama 3 and Mistral."""


def called():
    """Rows of conversations, of which two have a content beside a call, and a column that the task does not read."""
    found = [{"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD], "history": "once"} for _ in range(4)]
    found[1]["prompt"] = [QUESTION, CALLING, QUESTION]
    found[3]["chosen"] = [CALLING]
    return {"train": found}


def test_parts_of_rows_that_the_model_does_not_read_are_warnings(trained, tmp_path):
    template = tmp_path / "calls.jinja"
    template.write_text(ONLY_CALLS)
    given = {"module": f"{__file__}:called", "chat_template": str(template), "validation_fraction": 0}
    model = {"name": str(trained / "base")}
    case = write_recipe(tmp_path / "case", "dpo", data=given, model=model, max_steps=1, epochs=None)
    (case / "rows.jsonl").write_text(json.dumps({"prompt": [QUESTION, CALLING, QUESTION], "chosen": [GOOD]}))
    outputs = run_commands(
        [(case, "train", "recipe.yaml"), (case, "predict", "run", "rows.jsonl", "--out", "rewards.jsonl")]
    )
    of_training, of_prediction = (" ".join(output.split()) for output in outputs)
    assert "2 of 4 rows have a content beside tool_calls that the chat template leaves out" in of_training
    assert "they may belong to the conversations: history" in of_training
    assert "1 of 1 row has a content beside tool_calls" in of_prediction


REFUSED = {
    "smoothing": ("dpo", {"label_smoothing": 0.1}, {}, (), "it is for the loss robust, and the loss is sigmoid"),
    "packed": ("kto", {}, {}, ["packing"], "kto"),
    "short": ("dpo", {}, {"max_length": 2}, (), "no row of the train split fits into 2 tokens"),
    "labels": ("kto", {}, {"label": "prompt"}, (), "expected true and false, or 1 and 0"),
    "no template": ("dpo", {}, {"chat_template": "tokenizer"}, (), "row 1: the tokenizer has no chat template"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tmp_path):
    *given, message = REFUSED[case]
    with pytest.raises(FastloopError, match=message):
        train(recipe(tmp_path, *given))


class TestConformance(Conformance):
    plugin = "dpo"
    task = {"model": MODEL, "data": {"module": f"{ROWS}:pairs", "max_length": 32}}


class TestConformanceOfKTO(Conformance):
    plugin = "kto"
    task = {"model": MODEL, "data": {"module": f"{ROWS}:labelled", "max_length": 32}}

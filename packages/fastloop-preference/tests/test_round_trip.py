"""Policies and reward models, trained in full and with adapters: transformers and peft compute the numbers of the
run."""

import json
import warnings

import pytest
import torch
from fastloop.testing import run_commands
from preference_runs import rows, tokenizer, write_recipe
from test_trl import model

LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
METHODS = {"full": [], "merged": [{"lora": LORA}], "unmerged": [{"lora": {**LORA, "merge": False}}]}
CASES = [("dpo", "unmerged"), ("kto", "merged"), ("reward-model", "unmerged")]
"""Task and method: each task and each method once. ``test_runs`` has others."""
SLOW = [("kto", "full"), ("kto", "unmerged"), ("reward-model", "merged")]
"""The other combinations, which repeat what these show."""
PARAMETERS = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
PAIRS = [(row["prompt"], row["chosen"]) for row in rows(50)[-4:]]
"""Prompts with the completions to predict."""
BETA = 0.1


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """A folder with ``base``, a language model, and a run of each selected case, with its predictions and its
    evaluation."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("trained")
    is_short = request.config.option.markexpr == "not slow"
    model(3).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    commands = []
    for task, method in CASES if is_short else [*CASES, *SLOW]:
        given = {"model": {"name": str(folder / "base")}, "epochs": 1, "lr": 0.05}
        case = write_recipe(folder / f"{task}-{method}", task, plugins=METHODS[method], **given)
        name = "completion" if task == "kto" else "chosen"
        lines = [json.dumps({"prompt": prompt, name: answer}) for prompt, answer in PAIRS]
        (case / "rows.jsonl").write_text("\n".join(lines))
        commands.append((case, "train", "recipe.yaml"))
        commands.append((case, "predict", "run", "rows.jsonl", "--out", "rewards.jsonl"))
        commands.append((case, "evaluate", "run", "--json", "evaluation.json"))
    run_commands(commands)
    return folder


def exported(folder, task, method):
    """The exported model of a case."""
    import transformers

    head = "ForSequenceClassification" if task == "reward-model" else "ForCausalLM"
    auto = getattr(transformers, f"AutoModel{head}")
    path = folder / f"{task}-{method}" / "run" / "model"
    if method != "unmerged":
        return auto.from_pretrained(path).eval()
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")  # peft uses a deprecated name
        base = auto.from_pretrained(folder / "base", num_labels=1) if head != "ForCausalLM" else None
        base = base or auto.from_pretrained(folder / "base")
        return PeftModel.from_pretrained(base, path).eval()


def log_probability(model, tokens, start):
    """The log-probability of the tokens from ``start`` on."""
    every = model(tokens).logits[0, :-1].log_softmax(-1)
    return float(every.gather(1, tokens[0, 1:, None])[start - 1 :].sum())


@pytest.mark.parametrize(("task", "method"), PARAMETERS)
@torch.no_grad()
def test_an_exported_model_gives_the_rewards_of_the_run(trained, task, method):
    from transformers import AutoModelForCausalLM

    found = exported(trained, task, method)
    before = AutoModelForCausalLM.from_pretrained(trained / "base").eval()
    expected = []
    for prompt, answer in PAIRS:
        tokens = torch.tensor([tokenizer()(f"{prompt}{answer}<end>")["input_ids"]])
        start = len(tokenizer()(prompt)["input_ids"])
        if task == "reward-model":
            expected.append(float(found(tokens).logits))
        else:
            ratio = log_probability(found, tokens, start) - log_probability(before, tokens, start)
            expected.append(BETA * ratio)
    lines = (trained / f"{task}-{method}" / "rewards.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-3


@pytest.mark.parametrize(("task", "method"), PARAMETERS)
def test_an_evaluation_of_the_export_gives_the_metrics_of_the_run(trained, task, method):
    folder = trained / f"{task}-{method}"
    summary = json.loads((folder / "run" / "summary.json").read_text())["test"]
    assert json.loads((folder / "evaluation.json").read_text())["metrics"] == pytest.approx(summary, abs=1e-5)

"""Embedding models and rerankers with adapters, merged and alone: transformers, peft and Sentence Transformers compute
the numbers of the run."""

import json

import numpy as np
import pytest
import torch
from fastloop.testing import run_commands
from sentence_bases import train_model
from text_runs import SCORED, run_python, write_recipe

LORA = {"r": 2, "target_modules": ["query", "value"]}
METHODS = {"merged": {"lora": LORA}, "unmerged": {"lora": {**LORA, "merge": False}}}
TASKS = {
    "embedding": ({"pooling": "mean"}, {"text": "text", "other": "other"}),
    "reranker": ({"loss": "binary"}, SCORED),
}
CASES = [(task, method) for task in TASKS for method in METHODS]
PAIRS = [("red dog", "dog red"), ("red dog", "old slow house"), ("fish", "fish")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of each case in its own folder, and its predictions in ``found.npy``."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("trained")
    (folder / "first").mkdir()
    command, base = train_model(folder / "first")
    run_commands([command])
    commands = []
    for task, method in CASES:
        options, data = TASKS[task]
        case = folder / f"{task}-{method}"
        case.mkdir()
        model = {"name": str(base)}
        write_recipe(case, options, data, METHODS[method], task=task, model=model, epochs=2, lr=0.02)
        names = [data["text"], data["other"]]
        lines = [",".join(names), *(",".join(pair) for pair in PAIRS)]
        (case / "rows.csv").write_text("\n".join(lines) + "\n")
        commands.append([str(case), "train", "recipe.yaml"])
        commands.append([str(case), "predict", "run", "rows.csv", "--out", "found.npy"])
        commands.append([str(case), "evaluate", "run", "--json", "evaluation.json"])
    run_commands(commands)
    return folder


@pytest.mark.parametrize(("task", "method"), CASES)
def test_an_evaluation_of_the_export_gives_the_metrics_of_the_run(trained, task, method):
    folder = trained / f"{task}-{method}"
    summary = json.loads((folder / "run" / "summary.json").read_text())["test"]
    assert json.loads((folder / "evaluation.json").read_text())["metrics"] == pytest.approx(summary, abs=1e-5)


def predict_by_libraries(task, folder, is_adapter):
    """The predictions of ``PAIRS`` by transformers and peft alone."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    auto = AutoModel if task == "embedding" else AutoModelForSequenceClassification
    options = {} if task == "embedding" else {"num_labels": 1}
    base = PeftConfig.from_pretrained(folder).base_model_name_or_path if is_adapter else folder
    model = auto.from_pretrained(base, **options)
    model = PeftModel.from_pretrained(model, folder).eval() if is_adapter else model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    values = []
    for pair in PAIRS:
        with torch.no_grad():
            if task == "embedding":
                states = model(**tokenizer(pair[0], return_tensors="pt")).last_hidden_state[0].mean(0)
                values.append((states / states.norm()).tolist())
            else:
                values.append(float(model(**tokenizer(*pair, return_tensors="pt")).logits.sigmoid()))
    return values


@pytest.mark.parametrize(("task", "method"), CASES)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this deprecated name of transformers
def test_transformers_and_peft_compute_the_same_predictions(trained, task, method):
    folder = trained / f"{task}-{method}"
    theirs = predict_by_libraries(task, str(folder / "run" / "model"), method == "unmerged")
    np.testing.assert_allclose(np.load(folder / "found.npy"), theirs, rtol=1e-4, atol=1e-5)


SENTENCES = """
import json, sys
from sentence_transformers import CrossEncoder, SentenceTransformer
pairs, cases = json.loads(sys.stdin.read())
found = []
for task, folder, _ in cases:
    if task == "embedding":
        found.append(SentenceTransformer(folder, device="cpu").encode([pair[0] for pair in pairs]).tolist())
    else:
        found.append(CrossEncoder(folder, device="cpu").predict(pairs).tolist())
print(json.dumps(found))
"""


def test_sentence_transformers_computes_the_same_predictions(trained):
    pytest.importorskip("sentence_transformers")
    cases = [(task, str(trained / f"{task}-{method}" / "run" / "model"), False) for task, method in CASES]
    predictions = run_python(SENTENCES, [PAIRS, cases])
    for (task, method), theirs in zip(CASES, predictions, strict=True):
        ours = np.load(trained / f"{task}-{method}" / "found.npy")
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=f"{task}-{method}")

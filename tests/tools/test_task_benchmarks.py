"""`fastloop evaluate --tasks`: accuracies of lm-eval equal those computed by hand from log-likelihoods.

Modules:
    plugins/fastloop_tools/inference/benchmarks.py
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from training_runs import execute

from fastloop.lifecycle import build
from fastloop.plugins.resolve import resolve
from fastloop.recipe import load_recipe
from fastloop.testing import assert_problem

with_lm_eval = pytest.mark.skipif(find_spec("lm_eval") is None, reason="the extra lm-eval is not installed")
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA |= {"intermediate_size": 32, "max_position_embeddings": 64}
# Some questions are another question with the beginning of a choice: lm-eval's cache mixes up their log-likelihoods.
ROWS = [
    {"question": " ".join(f"a {word} film number".split()[: 1 + n % 4]), "choices": choices, "answer": n % 3}
    for n, word in enumerate(["fine", "dull", "odd"] * 4)
    for choices in (["fine", "film", "number", "7"], ["dull film", "film", "number 3", "odd"])
]
TASK = {
    "task": "films",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "questions.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
OWN = ("--task-folder", "tasks", "--trust-task-code")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run of a tiny llama."""
    folder = tmp_path_factory.mktemp("trained")
    lines = [f"a {('fine', 'dull', 'odd')[i % 3]} film number {i}\n" for i in range(60)]
    (folder / "train.txt").write_text("".join(lines))
    recipe = {
        "model": {"config": LLAMA, "tokenizer": {"kind": "bpe", "vocab_size": 300}},
        "data": {"files": {"train": "train.txt"}, "max_length": 32, "validation_fraction": 0},
        "train": {"max_steps": 60, "batch_size": 8, "device": "cpu", "lr": 1e-2},
        "plugins": [{"progress": False}, {"speed-check": False}],
        "output": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    execute(build(resolve(load_recipe(str(folder / "recipe.yaml")))))
    return folder / "run"


@pytest.fixture
def run(trained, monkeypatch):
    """A copy of the run in the current folder."""
    shutil.copytree(trained, "run")
    # lm-eval logs to the stderr of its first import, which is closed in later tests
    monkeypatch.setattr(logging, "raiseExceptions", False)


def write_task(**changed) -> None:
    Path("tasks").mkdir()
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("tasks/films.yaml").write_text(
        yaml.safe_dump(TASK | changed).replace("'!function code.f'", "!function code.f")
    )
    Path("tasks/code.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\ndef f(row):\n    return row['question']\n"
    )


def accuracies(model: Path) -> tuple[list[int], float, float]:
    """The choices of the highest log-likelihood, the accuracy, and that of log-likelihoods per character."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    chosen, right, right_by_length = [], [], []
    for row in ROWS:
        start = len(tokenizer.encode(row["question"]))
        scores = []
        for choice in row["choices"]:
            ids = torch.tensor(tokenizer.encode(f"{row['question']} {choice}"))
            with torch.no_grad():
                chances = network(input_ids=ids[None]).logits[0].log_softmax(-1)
            scores.append(sum(chances[place - 1, ids[place]].item() for place in range(start, len(ids))))
        lengths = [len(choice) for choice in row["choices"]]
        chosen.append(max(range(4), key=scores.__getitem__))
        right.append(chosen[-1] == row["answer"])
        right_by_length.append(max(range(4), key=lambda n: scores[n] / lengths[n]) == row["answer"])
    return chosen, sum(right) / len(ROWS), sum(right_by_length) / len(ROWS)


@pytest.mark.slow
@with_lm_eval
@pytest.mark.filterwarnings("ignore")  # of lm-eval and what it imports
def test_the_accuracy_is_that_of_the_log_likelihoods(cli, run):
    write_task()
    chosen, accuracy, by_length = accuracies(Path("run/model"))
    assert len(set(chosen)) > 1
    code, out, err = cli("evaluate", "run", "--tasks", "films", *OWN, "train.eval_batch_size=3")
    assert code == 0, err
    assert ["films", "acc", f"{accuracy:.4f}"] in [line.split()[:3] for line in out.splitlines()]
    (saved,) = Path("run/evaluation").glob("lm-eval-*.json")
    record = json.loads(saved.read_text())
    assert record["metrics"] == pytest.approx({"films acc": accuracy, "films acc_norm": by_length})
    assert {(row["shots"], row["samples"]) for row in record["tasks"]} == {(0, len(ROWS))}
    assert cli("report", "run")[0] == 0
    assert "films acc_norm" in Path("report.html").read_text()
    # the exported folder alone, as JSON; the code of a task file runs, but not without the option
    code, out, _ = cli("evaluate", "run/model", "--tasks", "films", *OWN, "--json", "-")
    assert code == 0
    assert json.loads(out)["metrics"] == pytest.approx(record["metrics"])
    code, _, err = cli("evaluate", "run", "--tasks", "films,film", *OWN)
    assert code == 2
    assert_problem(err, "unknown-task --tasks: 'film' 'films'")
    Path("questions.jsonl").write_text('{"question": "a film"}\n')
    code, _, err = cli("evaluate", "run", "--tasks", "films", *OWN)
    assert code == 1
    assert_problem(err, "benchmark-failed --tasks films: lm-eval")


@pytest.mark.slow
@with_lm_eval
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changed",
    [
        {"doc_to_text": "!function code.f"},
        # lm-eval's templates are not in Jinja's sandbox
        {"doc_to_text": "{{ cycler.__init__.__globals__.os.close(cycler.__init__.__globals__.os.open('ran', 64)) }}"},
    ],
)
def test_code_of_task_files_runs_only_with_the_option(cli, run, changed):
    write_task(**changed)
    code, _, err = cli("evaluate", "run", "--tasks", "films", *OWN[:2])
    assert code == 2
    assert_problem(err, "code-refused --task-folder tasks: --trust-task-code")
    assert not Path("ran").exists()
    assert cli("evaluate", "run", "--tasks", "films", *OWN)[0] == 0
    assert Path("ran").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--task-folder", "tasks"), "missing-value --task-folder tasks --tasks A,B"),
        (("--tasks", "a", "--task-folder", "none"), "file-missing --task-folder none"),
        (("--tasks", "a", "--worst", "3"), "exclusive-options --tasks --worst"),
        (("--tasks", "a"), "unsupported-model BertForSequenceClassification"),
    ],
)
def test_a_wrong_command_line_is_refused_before_the_model_loads(cli, arguments, expected):
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    code, _, err = cli("evaluate", "model", *arguments)
    assert code == 2
    assert_problem(err, expected)


def test_a_missing_lm_eval_is_named_with_its_extra(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    Path("config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    code, _, err = cli("evaluate", ".", "--tasks", "hellaswag")
    assert code == 2
    assert "pip install 'fastloop-train[lm-eval]'" in err

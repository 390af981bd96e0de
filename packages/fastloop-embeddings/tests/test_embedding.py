"""Tests of embedding: it learns, predicts and exports vectors, refuses what it cannot do, and conforms."""

import json
from pathlib import Path

import numpy as np
import pytest
from fastloop.testing import TEXTS, Conformance, run_commands, with_dropout
from text_runs import (
    DATA,
    SCORED,
    check_few_steps,
    refused,
    rows,
    run_python,
    train_divided,
    write_collection,
    write_recipe,
)

CASES = {
    "multiple_negatives": (
        {"dims": [8, 16], "query_prompt": "old tree ", "document_prompt": "river : "},
        {"negative": "negative", "beir": "collection"},
        ("recall@1", 0.9),
    ),
    "triplet": ({"loss": "triplet", "pooling": "first", "normalize": False}, {"negative": "negative"}, ("mrr@10", 0.5)),
    "cosent": ({"loss": "cosent", "pooling": "last"}, SCORED, ("spearman", 0.8)),
    "cosine": ({"loss": "cosine"}, SCORED, ("spearman", 0.8)),
}
TEXTS_TO_PREDICT = ["red dog", "dog red", "old slow house", "fish"]
SUFFIXES = {"multiple_negatives": "npy", "triplet": "jsonl", "cosent": "parquet", "cosine": "jsonl"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder for each case, with a trained model in ``run``, vectors of ``TEXTS_TO_PREDICT`` and others, and for a
    collection those of its documents and ``TEXTS_TO_PREDICT`` in ``documents.npy``."""
    folders = {}
    commands = []
    more = {}
    for case, (options, data, (metric, _)) in CASES.items():
        folders[case] = folder = tmp_path_factory.mktemp(case)
        if "beir" in data:
            queries, documents, _ = write_collection(folder / "collection")
            more[case] = queries
            (folder / "documents.csv").write_text("\n".join(["other", *TEXTS_TO_PREDICT, *documents]) + "\n")
        elif "label" in data:
            more[case] = [row[name] for name in ("first", "second") for row in rows()["validation"]]
        monitor = "beir_recall@10" if "beir" in data else metric
        write_recipe(folder, options, data, {"early-stopping": {"monitor": monitor, "patience": 99}})
        texts = [*TEXTS_TO_PREDICT, *more.get(case, ())]
        (folder / "texts.csv").write_text("\n".join([data.get("text", "text"), *texts]) + "\n")
        commands.append([str(folder), "train", "recipe.yaml"])
        keep = ["--keep", "all"] if SUFFIXES[case] != "npy" else []
        commands.append([str(folder), "predict", "run", "texts.csv", "--out", f"vectors.{SUFFIXES[case]}", *keep])
    arguments = "predict run documents.csv --out documents.npy plugins.embedding.predict=other"
    commands.append([str(folders["multiple_negatives"]), *arguments.split()])
    run_commands(commands)
    return folders


def predicted(folder):
    """The vectors in the file that `fastloop predict` wrote, (texts, D)."""
    (path,) = folder.glob("vectors.*")
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = (folder / "texts.csv").read_text().splitlines()[1:]
    assert [next(iter(row.values())) for row in rows] == texts
    return np.array([row["vector"] for row in rows])


def validated(folder):
    """The metrics of the validation split."""
    return json.loads((folder / "run" / "summary.json").read_text())["validation"]


@pytest.mark.parametrize("case", CASES)
def test_it_learns_and_predicts(trained, case):
    options, _, (metric, least) = CASES[case]
    assert validated(trained[case])[metric] > least
    normalized = options.get("normalize", True)
    assert (abs((predicted(trained[case])[0] ** 2).sum() - 1) < 1e-5) == normalized
    modules = json.loads((trained[case] / "run" / "model" / "modules.json").read_text())
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"][: 2 + normalized]


def test_sentence_transformers_computes_the_same_vectors(trained):
    pytest.importorskip("sentence_transformers")
    script = """
import json, sys
from sentence_transformers import SentenceTransformer
texts, *folders = json.loads(sys.stdin.read())
models = [SentenceTransformer(folder, device="cpu") for folder in folders]
encode = lambda model, name: model.encode(texts, prompt_name=name).tolist()
print(json.dumps([[model.similarity_fn_name, encode(model, "query"), encode(model, "document")] for model in models]))
"""
    found = run_python(script, [TEXTS_TO_PREDICT, *(str(folder / "run" / "model") for folder in trained.values())])
    for folder, (similarity, theirs, documents) in zip(trained.values(), found, strict=True):
        assert similarity == "cosine"
        np.testing.assert_allclose(predicted(folder)[: len(theirs)], theirs, rtol=1e-4, atol=1e-5)
        if (folder / "documents.npy").exists():
            assert abs(np.array(theirs) - documents).max() > 1e-2  # the prompts count
            own = np.load(folder / "documents.npy")[: len(documents)]
            np.testing.assert_allclose(own, documents, rtol=1e-4, atol=1e-5)


def test_spearman_equals_that_of_scipy(trained):
    stats = pytest.importorskip("scipy.stats")
    scores = [row["score"] for row in rows()["validation"]]
    for case in ("cosent", "cosine"):
        vectors = predicted(trained[case])[len(TEXTS_TO_PREDICT) :]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        first, second = np.split(vectors, 2)
        expected = stats.spearmanr((first * second).sum(1), scores).statistic
        assert validated(trained[case])["spearman"] == pytest.approx(expected, abs=1e-5)


def test_a_search_equals_one_by_numpy(trained, tmp_path):
    _, documents, relevant = write_collection(tmp_path)
    found = predicted(trained["multiple_negatives"]), np.load(trained["multiple_negatives"] / "documents.npy")
    queries, vectors = (each[len(TEXTS_TO_PREDICT) :] for each in found)
    similar = queries @ vectors.T
    gains = np.zeros(similar.shape)
    for one, other, gain in relevant:
        gains[one, other] = gain
    ranked = np.take_along_axis(gains, (-similar).argsort(1), 1)
    places = np.arange(1, len(documents) + 1)
    hits = ranked > 0
    expected = {f"beir_recall@{k}": (hits[:, :k].sum(1) / hits.sum(1)).mean() for k in (1, 10, 100)}
    expected["beir_mrr@10"] = (hits / places)[:, :10].max(1).mean()
    ideal = -np.sort(-gains, 1)
    dcg, best = ((each / np.log2(places + 1))[:, :10].sum(1) for each in (ranked, ideal))
    expected["beir_ndcg@10"] = (dcg / best).mean()
    found = validated(trained["multiple_negatives"])
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    metrics = pytest.importorskip("sklearn.metrics")
    assert found["beir_ndcg@10"] == pytest.approx(metrics.ndcg_score(gains, similar, k=10), abs=1e-5)


def test_recipes_that_it_cannot_train_are_refused_by_name(tmp_path):
    write_collection(tmp_path / "layout")
    with (tmp_path / "layout" / "qrels" / "dev.tsv").open("a") as file:
        file.write("q0\tnowhere\t1\n")
    beir = {"beir": str(tmp_path / "layout")}
    cases = {
        "triplet": ({"loss": "triplet"}, {}, {}, "data.negative: missing, and the loss triplet reads it"),
        "negative": ({"loss": "cosine"}, SCORED | {"negative": "negative"}, {}, "data.negative: the loss cosine"),
        "classes": ({"loss": "cosine"}, SCORED | {"label_type": "class"}, {}, "label_type: found class, expected numb"),
        "dims": ({"dims": [8, 17]}, {}, {}, "dims: found 17, and vectors of the model have 16 numbers"),
        "no dims": ({"dims": [0]}, {}, {}, "dims: found 0 (int) (should be greater than 0)"),
        "no folder": ({}, {"beir": "nowhere"}, {}, "nowhere/corpus.jsonl is missing. Expected a folder as BEIR"),
        "one text": (
            {},
            {"module": DATA["module"].replace(":rows", ":alike")},
            {},
            "data.other: all 64 rows of train have the same text here, and the loss multiple_negatives compares",
        ),
        "no id": ({}, beir, {"epochs": 1}, "dev.tsv, line 17: found 'q0\\tnowhere\\t1', expected the id of a query"),
    }
    refused(tmp_path, cases)


DIVIDED = {
    "multiple_negatives": (
        {"dims": [8, 16]},
        {"negative": "negative", "module": DATA["module"].replace(":rows", ":repeated")},
    ),
    "cosent": ({"loss": "cosent"}, SCORED),
}
PLUGINS = Path(__file__).with_name("text_plugins.py")
WAYS = {
    "whole": ({}, (), 1),
    "parts": ({"micro_batch_size": 8}, (), 1),
    "packed": ({"micro_batch_size": 8}, ("packing",), 1),
    "full memory": ({}, ("auto-micro-batch", f"{PLUGINS}:FullMemory"), 1),
    "processes": ({"micro_batch_size": 6}, ("ddp",), 2),
}
SIZES = {"batch_size": 24, "epochs": 2, "log_every": 1, "eval_batch_size": 16}
"""The last batch has 16 of 24 rows, of which one process has fewer; it also has none of validation."""
WITHOUT_DROPOUT = with_dropout(TEXTS, 0.0)["model"]


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_few_steps_tokenizes_only_its_rows(tmp_path, monkeypatch, caplog, case):
    monkeypatch.chdir(tmp_path)
    options, data, _ = CASES[case]
    check_few_steps(monkeypatch, caplog, options, {key: data[key] for key in data if key != "beir"}, "embedding")


def test_micro_batches_and_processes_do_not_change_the_loss(tmp_path, processes):
    train_divided(processes, tmp_path, DIVIDED, WAYS, model=WITHOUT_DROPOUT, **SIZES)


def test_micro_batches_of_similar_length_do_not_change_the_loss(tmp_path, processes):
    """``length-bucketing`` draws other steps. ``max_tokens`` divides them unevenly, and batches of evaluation, too."""
    bucketing = {"window": 2}
    ways = {
        "whole": ({}, ({"length-bucketing": bucketing},), 1),
        "uneven": ({}, ({"length-bucketing": bucketing | {"max_tokens": 200}},), 1),
    }
    train_divided(processes, tmp_path, {"pairs": ({}, {})}, ways, splits=("training",), model=WITHOUT_DROPOUT, **SIZES)


@pytest.mark.parametrize("plugins", [(), ("packing", "fast-dropout")], ids=["padded", "packing and fast-dropout"])
def test_the_second_pass_has_the_dropout_of_the_first(tmp_path, plugins):
    write_recipe(tmp_path, {}, {}, *plugins, model=with_dropout(TEXTS, 0.3)["model"], micro_batch_size=4, epochs=1)
    recipe = json.loads((tmp_path / "recipe.yaml").read_text())
    recipe["plugins"][0] = f"{PLUGINS}:Checked"
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (output,) = run_commands([(tmp_path, "train", "recipe.yaml")])
    assert output.count("difference") == 4


class TestConformance(Conformance):
    plugin = "embedding"
    task = {"model": TEXTS["model"], "data": DATA}


class TestConformanceOfRowLosses(Conformance):
    plugin = "embedding"
    options = {"loss": "triplet"}
    task = {"model": TEXTS["model"], "data": DATA | {"negative": "negative"}}

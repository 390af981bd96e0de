"""Bases of Sentence Transformers: their modules and prompts are trained and kept, or refused by name."""

import json

import numpy as np
import pytest
import torch
from fastloop import FastloopError
from fastloop.testing import run_commands, train
from safetensors.torch import load_file
from sentence_bases import IDENTITY, LENGTH, NEW, SIZE, current, dense, legacy, train_model, write_base, write_json
from text_runs import DATA, SCORED, refused, run_python, train_divided, write_recipe

PROMPTS = {"prompts": {"query": "old tree ", "passage": "river : ", "other": "fish "}, "similarity_fn_name": "dot"}
DEFAULT = {"prompts": {"task": "slow house "}, "default_prompt_name": "task"}
ONE_PROMPT = {"prompts": {"query": "fish ", "document": ""}, "default_prompt_name": "query"}
IDENTITY_DENSE = dense(2 * SIZE, 8, bias=False, activation_function=IDENTITY)
BASES = {
    "cls": {"pooling": legacy("cls_token"), "stages": [None], "prompts": PROMPTS},
    "max": {"pooling": current("max"), "package": NEW, "prompts": ONE_PROMPT},
    "lasttoken": {"pooling": current("lasttoken"), "stages": [None], "prompts": DEFAULT, "package": NEW},
    "mean, dense": {"pooling": legacy("mean_tokens"), "stages": [dense(SIZE, 24), None, dense(24, 8), None]},
    "two modes": {"pooling": current("mean_sqrt_len_tokens", "weightedmean"), "stages": [IDENTITY_DENSE]},
    "lowercase": {"pooling": legacy("mean_tokens"), "stages": [None], "transformer": {"do_lower_case": True}},
}
"""Name -> arguments of ``write_base``."""
TEXTS = ["red dog", "Dog RED", "old slow house", "fish", "big " * 40]
EXPECTED_PROMPTS = {
    "cls": ("old tree ", "river : "),
    "max": ("fish ", ""),
    "lasttoken": ("slow house ", "slow house "),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A folder with the folder of each base, and the plain model ``plain``."""
    folder = tmp_path_factory.mktemp("bases")
    command, model = train_model(folder)
    run_commands([command])
    model.rename(folder / "plain")
    for name, arguments in BASES.items():
        write_base(folder / "plain", folder / name, **arguments)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (folder / "plain" / name).unlink()
    return folder


@pytest.fixture(scope="module")
def trained(bases, tmp_path_factory):
    """A folder for each base, with a model in ``run``, and the vectors of ``TEXTS`` as queries and as documents."""
    folders = {}
    commands = []
    for name in BASES:
        folders[name] = folder = tmp_path_factory.mktemp("trained")
        model = {"name": str(bases / name)}
        write_recipe(folder, {}, {"max_length": LENGTH}, model=model, epochs=1)
        commands.append([folder, "train", "recipe.yaml"])
        for column in ("text", "other"):
            (folder / f"{column}.csv").write_text("\n".join([column, *TEXTS]))
            arguments = ["predict", "run", f"{column}.csv", "--out", f"{column}.npy"]
            commands.append([folder, *arguments, f"plugins.embedding.predict={column}"])
    run_commands(commands)
    return folders


def states_of(folder, texts):
    """The vectors of the tokens of each text by transformers alone, (tokens, D) each."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.no_grad():
            yield model(**inputs).last_hidden_state[0]


def weighted_mean(states):
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return (states * weights).sum(0) / weights.sum()


def scaled(vector):
    return vector / vector.norm()


def expected_vector(name, states, weights):
    """The vector of one text by the definition of each module. ``weights``: of the modules Dense."""

    def project(vector, path):
        return weights[path]["linear.weight"] @ vector + weights[path].get("linear.bias", 0)

    if name == "cls":
        return scaled(states[0])
    if name == "max":
        return states.amax(0)
    if name == "lasttoken":
        return scaled(states[-1])
    if name == "lowercase":
        return scaled(states.mean(0))
    if name == "two modes":
        return project(torch.cat([states.sum(0) / len(states) ** 0.5, weighted_mean(states)]), "2_Dense")
    hidden = scaled(project(states.mean(0), "2_Dense").tanh())
    return scaled(project(hidden, "4_Dense").tanh())


@pytest.mark.parametrize("name", BASES)
def test_vectors_are_those_of_the_modules_of_the_base(trained, name):
    model = trained[name] / "run" / "model"
    weights = {path.parent.name: load_file(path) for path in model.glob("*/model.safetensors")}
    for column, prompt in zip(("text", "other"), EXPECTED_PROMPTS.get(name, ("", "")), strict=True):
        texts = [text.lower() if name == "lowercase" else text for text in TEXTS]
        found = np.load(trained[name] / f"{column}.npy")
        states = states_of(model, [prompt + text for text in texts])
        expected = np.stack([expected_vector(name, each, weights).numpy() for each in states])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BASES)
def test_the_export_keeps_modules_and_prompts(bases, trained, name):
    base = bases / name
    model = trained[name] / "run" / "model"
    for path in ("modules.json", "1_Pooling/config.json"):
        assert json.loads((model / path).read_text()) == json.loads((base / path).read_text())
    given = BASES[name].get("prompts") or {}
    config = json.loads((model / "config_sentence_transformers.json").read_text())
    query, document = EXPECTED_PROMPTS.get(name, ("", ""))
    assert config["prompts"] == given.get("prompts", {}) | {"query": query, "document": document}
    for key in ("default_prompt_name", "similarity_fn_name"):
        assert config[key] == given.get(key)
    names = load_file(model / "model.safetensors").keys()
    assert not [name for name in names if "sentence_head" in name]
    for path in base.glob("*_Dense/*"):
        exported = model / path.relative_to(base)
        if path.suffix == ".json":
            assert json.loads(exported.read_text()) == json.loads(path.read_text())
        else:
            before = load_file(path)
            after = load_file(exported)
            assert before.keys() == after.keys()
            assert all(0 < (before[key] - after[key]).abs().max() < 0.5 for key in before), "trained from the base"


def test_sentence_transformers_computes_the_same_vectors(trained):
    pytest.importorskip("sentence_transformers")
    script = """
import json, sys
from sentence_transformers import SentenceTransformer
texts, *folders = json.loads(sys.stdin.read())
models = [SentenceTransformer(folder, device="cpu") for folder in folders]
print(json.dumps([[model.encode_query(texts).tolist(), model.encode_document(texts).tolist()] for model in models]))
"""
    found = run_python(script, [TEXTS, *(str(folder / "run" / "model") for folder in trained.values())])
    for folder, (queries, documents) in zip(trained.values(), found, strict=True):
        np.testing.assert_allclose(np.load(folder / "text.npy"), queries, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.load(folder / "other.npy"), documents, rtol=1e-4, atol=1e-5)


WAYS = {
    "whole": ({}, (), 1),
    "packed": ({"micro_batch_size": 8}, ("packing",), 1),
    "processes": ({"micro_batch_size": 6}, ("ddp",), 2),
}


def test_micro_batches_packing_and_processes_do_not_change_the_loss(bases, tmp_path, processes):
    """``two modes`` pools each packed text alone, and its Dense is in both passes of a divided step."""
    sizes = {"batch_size": 24, "epochs": 2, "log_every": 1, "eval_batch_size": 16}
    model = {"name": str(bases / "two modes")}
    train_divided(processes, tmp_path, {"dense": ({}, {"max_length": LENGTH})}, WAYS, model=model, **sizes)


CASES = {
    "pooling": ("cls", {"pooling": "mean"}, "plugins.embedding.pooling"),
    "two poolings": ("two modes", {"pooling": "mean"}, "plugins.embedding.pooling"),
    "normalize": ("cls", {"normalize": False}, "plugins.embedding.normalize"),
    "no normalize": ("max", {"normalize": True}, "plugins.embedding.normalize"),
    "query": ("cls", {"query_prompt": ""}, "plugins.embedding.query_prompt"),
    "document": ("lasttoken", {"document_prompt": "river "}, "plugins.embedding.document_prompt"),
    "dims": ("mean, dense", {"dims": [9]}, "plugins.embedding.dims"),
}
"""Name -> base, options that contradict it, and the place that the message names."""


def test_options_that_contradict_the_base_are_refused(bases, tmp_path):
    refused(
        tmp_path,
        {
            name: (options, {}, {"model": {"name": str(bases / base)}}, place)
            for name, (base, options, place) in CASES.items()
        },
    )


UNSUPPORTED = {
    "module": ({"stages": [None], "package": "custom_st"}, {}, "custom_st.Transformer"),
    "prompt tokens": (
        {"pooling": current("mean") | {"include_prompt": False}, "prompts": PROMPTS},
        {},
        "include_prompt",
    ),
    "mode": ({"pooling": current("middle")}, {}, "pooling_mode"),
    "residual": ({"stages": [dense(SIZE, SIZE, use_residual=True)]}, {}, "use_residual"),
    "tokens": ({"stages": [dense(SIZE, 8, module_input_name="token_embeddings")]}, {}, "module_input_name"),
    "pickle": ({"stages": [dense(SIZE, 8)], "weights": False}, {}, "2_Dense/model.safetensors"),
    "size": ({"stages": [dense(9, 8)]}, {}, "in_features"),
    "activation": ({"stages": [dense(SIZE, 8, activation_function="os.system")]}, {}, "os.system"),
    "lengths": ({"transformer": {"query_length": 9}}, {}, "query_length"),
    "masked": ({"transformer": {"transformer_task": "fill-mask"}}, {}, "transformer_task"),
}
"""Name -> arguments of ``write_base``, options, and what the message names."""


def test_modules_that_are_not_supported_are_refused_by_name(bases, tmp_path):
    cases = {}
    for name, (arguments, options, named) in UNSUPPORTED.items():
        base = tmp_path / f"{name} base"
        write_base(bases / "plain", base, **{"pooling": legacy("mean_tokens")} | arguments)
        cases[name] = (options, {}, {"model": {"name": str(base)}}, named)
    lstm = tmp_path / "lstm"
    write_base(bases / "plain", lstm, legacy("mean_tokens"), [None])
    text = (lstm / "modules.json").read_text().replace("Normalize", "LSTM")
    (lstm / "modules.json").write_text(text)
    cases["known module"] = ({}, {}, {"model": {"name": str(lstm)}}, "sentence_transformers.models.LSTM")
    refused(tmp_path, cases)


def train_and_catch(recipe):
    """The message of the error that ends a training."""
    with pytest.raises(FastloopError) as caught:
        train(recipe)
    return str(caught.value)


def test_dense_is_refused_where_weights_are_sharded(bases, tmp_path, processes):
    write_recipe(tmp_path, {}, {}, "fsdp", model={"name": str(bases / "mean, dense")})
    recipe = json.loads((tmp_path / "recipe.yaml").read_text())
    for ended in processes(2, train_and_catch, recipe, folder=tmp_path):
        assert "Dense" in ended.result


def test_a_base_of_the_hub_is_read_from_its_cache(bases, tmp_path, monkeypatch, caplog):
    from fastloop_plugins.text import ModelOptions
    from huggingface_hub import constants

    from fastloop_embeddings.modules import find_folder

    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(bases / "cls")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    class Recipe:
        where = "recipe.yaml"

        @staticmethod
        def find(name):
            return tmp_path / "nowhere" / name

    assert find_folder(Recipe, ModelOptions(name="owner/name"), download=True) == snapshot
    assert not caplog.records
    assert find_folder(Recipe, ModelOptions(name="owner/name"), download=False) is None
    assert find_folder(Recipe, ModelOptions(name="owner/other"), download=True) is None
    snapshot.unlink()
    snapshot.symlink_to(bases / "plain")  # as a download by transformers leaves it
    assert find_folder(Recipe, ModelOptions(name="owner/name"), download=True) == snapshot
    assert "modules.json" in caplog.text


SCORES = {
    "of a base": ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.0.1"}}, None, False),
    "of an old base": ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, None, False),
    "of modules": ({}, {"model_type": "CrossEncoder", "activation_fn": IDENTITY, "prompts": {}}, False),
    "of an encoder": ({}, {"prompts": {"query": "find: "}}, False, ("Transformer", "Pooling", "Normalize")),
    "of another head": ({"sentence_transformers": {"activation_fn": IDENTITY}}, None, True),
    "of none": ({}, None, False),
}
"""Name -> keys of ``config.json``, ``config_sentence_transformers.json``, and whether the head has three labels."""
CROSS_ENCODER = {"model_type": "CrossEncoder"}
ACTIVATIONS = {"of a base": "Identity", "of an old base": "Tanh", "of modules": "Identity"}
PAIRS = [("red dog", "dog red"), ("red dog", "old slow house"), ("fish", "fish")]


def write_scoring_base(bases, folder, config, own, labels, modules=("Transformer",)):
    """A classifier of the plain model's architecture, as CrossEncoder has it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    built = AutoConfig.from_pretrained(bases / "plain", num_labels=3 if labels else 1)
    AutoModelForSequenceClassification.from_config(built).save_pretrained(folder)
    AutoTokenizer.from_pretrained(bases / "plain").save_pretrained(folder)
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | config)
    if own is not None:
        entries = [
            {"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.base.{kind}"} for kind in modules
        ]
        write_json(folder / "modules.json", entries)
        write_json(folder / "config_sentence_transformers.json", own)


@pytest.fixture(scope="module")
def scored(bases, tmp_path_factory):
    """A folder for each of ``SCORES``, with a reranker in ``run`` and the scores of ``PAIRS``."""
    return train_rerankers(bases, tmp_path_factory, SCORES)


@pytest.fixture(scope="module")
def adapted(bases, tmp_path_factory):
    """Two of ``scored`` with the adapters of `lora`, which are not merged."""
    pytest.importorskip("peft")
    adapter = {"lora": {"r": 2, "target_modules": ["query", "value"], "merge": False}}
    return train_rerankers(bases, tmp_path_factory, ("of a base", "of none"), adapter)


def train_rerankers(bases, tmp_path_factory, names, *plugins):
    folders = {}
    commands = []
    for name in names:
        folders[name] = folder = tmp_path_factory.mktemp("scored")
        write_scoring_base(bases, folder / "base", *SCORES[name])
        model = {"name": str(folder / "base")}
        write_recipe(folder, {"loss": "binary"}, SCORED, *plugins, task="reranker", model=model, epochs=1)
        (folder / "pairs.csv").write_text("\n".join(map(",".join, [("first", "second"), *PAIRS])))
        commands.append([folder, "train", "recipe.yaml"])
        commands.append([folder, "predict", "run", "pairs.csv", "--out", "scores.npy"])
    run_commands(commands)
    return folders


@pytest.mark.parametrize("name", SCORES)
def test_scores_have_the_activation_of_the_base(scored, name):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = scored[name] / "run" / "model"
    model, tokenizer = (each.from_pretrained(folder) for each in (AutoModelForSequenceClassification, AutoTokenizer))
    inputs = tokenizer(*map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits[:, 0]
    activation = ACTIVATIONS.get(name, "Sigmoid")
    expected = getattr(torch.nn, activation)()(logits)
    np.testing.assert_allclose(np.load(scored[name] / "scores.npy"), expected, rtol=1e-4, atol=1e-6)
    assert model.config.sentence_transformers["activation_fn"].endswith(activation)
    log = (scored[name] / "run" / "log.txt").read_text()
    classes = "its classes are 0 = LABEL_0, 1 = LABEL_1, 2 = LABEL_2, and the data's are 0 = LABEL_0:"
    assert (classes in log) == (name == "of another head")


CROSS_ENCODERS = """
import json, sys
from sentence_transformers import CrossEncoder
pairs, *folders = json.loads(sys.stdin.read())
found = []
for folder in folders:
    model = CrossEncoder(folder, device="cpu")
    found.append([type(model.activation_fn).__name__, model.max_seq_length, model.predict(pairs).tolist()])
print(json.dumps(found))
"""


@pytest.mark.parametrize("trained", ["scored", "adapted"])
def test_a_cross_encoder_computes_the_same_scores(trained, request):
    pytest.importorskip("sentence_transformers")
    folders = request.getfixturevalue(trained)
    found = run_python(CROSS_ENCODERS, [PAIRS, *(str(folder / "run" / "model") for folder in folders.values())])
    for (name, folder), (activation, length, scores) in zip(folders.items(), found, strict=True):
        assert activation == ACTIVATIONS.get(name, "Sigmoid"), name
        assert length == DATA["max_length"]
        np.testing.assert_allclose(np.load(folder / "scores.npy"), scores, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("trained", ["scored", "adapted"])
def test_the_export_names_the_activation_of_predictions(trained, request):
    for name, folder in request.getfixturevalue(trained).items():
        config = json.loads((folder / "run" / "model" / "config_sentence_transformers.json").read_text())
        assert config["activation_fn"].endswith(f".{ACTIVATIONS.get(name, 'Sigmoid')}")


def test_rerankers_that_are_not_supported_are_refused_by_name(bases, tmp_path):
    bad = {
        "activation": (({"sentence_transformers": {"activation_fn": "os.system"}}, None, False), "os.system"),
        "modules": (({}, CROSS_ENCODER, False, ("Transformer", "Pooling")), "Transformer, Pooling"),
        "module": (({}, CROSS_ENCODER, False, ("LogitScore",)), "LogitScore"),
        "prompts": (({}, CROSS_ENCODER | {"prompts": {"query": "find: "}}, False), "prompts"),
    }
    cases = {}
    for name, (arguments, named) in bad.items():
        base = tmp_path / f"{name} base"
        write_scoring_base(bases, base, *arguments)
        cases[name] = ({"loss": "binary"}, SCORED, {"model": {"name": str(base)}, "task": "reranker"}, named)
    refused(tmp_path, cases)

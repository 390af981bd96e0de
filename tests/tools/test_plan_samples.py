"""`fastloop plan --samples`: it shows the rows, tokens and loss masks that training has.

Modules:
    core/fastloop/built_model.py
    plugins/fastloop_plugins/text/samples.py
    plugins/fastloop_tools/plan/samples/command.py
    plugins/fastloop_tools/plan/samples/read.py
    plugins/fastloop_tools/plan/samples/show.py
    plugins/fastloop_tools/shared/data_plugins.py
    plugins/fastloop_tools/shared/visible_text.py
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from image_helpers import write_images
from text_helpers import TINY, TINY_GPT, make_run

from fastloop.recipe import make_recipe
from fastloop.testing import assert_problem
from fastloop_tools.plan.samples.read import read_samples

CHATS = [
    [{"role": "user", "content": "Say <b>hi</b>."}, {"role": "assistant", "content": "Hi & bye.\nTwo \x1b[31m lines"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "two"},
    ],
]
GPT = {"config": TINY_GPT | {"n_positions": 128}, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
TINY_T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
CHAT_DATA = {"messages": "messages", "chat_template": "chatml", "max_length": 64}


def write_rows(rows: list[dict]) -> dict[str, str]:
    """``data.files`` of these rows."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"train": "rows.jsonl", "validation": "rows.jsonl"}


def recipe_file(task: str, model: dict, data: dict) -> str:
    """A recipe of one task. Its name."""
    plugins = [task, {"module": False}]
    tree = {"model": model, "data": data, "train": {"batch_size": 2}, "plugins": plugins, "output": "run"}
    Path("recipe.json").write_text(json.dumps(tree))
    return "recipe.json"


def samples(task: str, model: dict, data: dict, count: int = 3) -> list[dict]:
    """The samples of a recipe: name of a part -> its content."""
    tree = json.loads(Path(recipe_file(task, model, data)).read_text())
    return [dict(sample) for sample in read_samples(make_recipe(tree, Path("recipe.json")), count)]


@pytest.fixture
def chats() -> str:
    """The recipe of ``CHATS``."""
    files = write_rows([{"messages": messages} for messages in CHATS])
    return recipe_file("causal-lm", GPT, CHAT_DATA | {"files": files})


def trained(tokens: list) -> str:
    """The tokens with a loss, joined."""
    return "".join(token for token, target in tokens if target is not None)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("causal-lm", {"samples": 2, "max_new_tokens": 4}),
        ("seq2seq", {"samples": 2, "max_new_tokens": 4}),
        ("seq2seq", {"generate": True, "max_new_tokens": 4}),
    ],
)
def test_options_whose_check_needs_the_model_show_samples(task, options):
    """`check_run` of these tasks enters the model that training has."""
    chats = [{"messages": messages} for messages in CHATS]
    pairs = [{"text": "a b", "target": "b a"}]
    rows = {"causal-lm": chats, "seq2seq": pairs}[task]
    data = {"causal-lm": CHAT_DATA, "seq2seq": {"target": "target"}}[task]
    model = {"causal-lm": GPT, "seq2seq": {"config": TINY_T5, "tokenizer": {"kind": "char"}}}[task]
    tree = json.loads(Path(recipe_file(task, model, data | {"files": write_rows(rows)})).read_text())
    tree["plugins"][0] = {task: options}
    assert len(read_samples(make_recipe(tree, Path("recipe.json")), 1)) == 1


def test_a_chat_shows_the_mask_of_training():
    files = write_rows([{"messages": messages} for messages in CHATS])
    data = CHAT_DATA | {"files": files}
    found = samples("causal-lm", GPT, data)
    run = make_run("causal-lm", GPT, data)
    dataset, tokenizer = run.datasets["train"], run.plugins.plugins[0].text_model.tokenizer
    assert len(found) == len(dataset) == 3
    for sample, index in zip(found, range(3), strict=True):
        row = dataset[index]
        length = len(row["input_ids"])  # training also leaves out what follows the last token with a loss
        names = [tokenizer.decode([token]) for token in row["input_ids"]]
        assert [token for token, _ in sample["tokens"]][:length] == names
        mask = np.array([target is not None for _, target in sample["tokens"]])
        assert mask[:length].tolist() == [False, *(row["targets"][:-1] != -100).tolist()]
        assert not mask[length:].any()
    assert found[0]["user"] == "Say <b>hi</b>."
    assert trained(found[0]["tokens"]) == "Hi & bye.\nTwo \x1b[31m lines<|im_end|>\n"
    assert trained(found[2]["tokens"]) == "two<|im_end|>\n", "an answer of weight 0 has no loss"


def test_a_long_chat_says_what_is_left_out_and_a_chat_without_a_loss_that_it_is_dropped():
    files = write_rows([{"messages": messages} for messages in CHATS])
    found = samples("causal-lm", GPT, CHAT_DATA | {"files": files, "max_length": 8})
    assert all(len(sample["tokens"]) == 8 for sample in found)
    assert "loss" in found[0]["left out"]
    pairs = read_samples(make_recipe(json.loads(Path("recipe.json").read_text()), Path("recipe.json")), 1)[0]
    assert next(content for name, content in pairs if name == "left out").startswith(
        "the tokens after data.max_length=8"
    )


def test_texts_show_the_loss_of_their_blocks():
    Path("train.txt").write_text("abcde\nfgh\nijklmn")
    files = {"train": "train.txt", "validation": "train.txt"}
    data = {"files": files, "max_length": 4}
    model = {"config": TINY_GPT, "tokenizer": {"kind": "char"}}
    found = samples("causal-lm", model, data)
    run = make_run("causal-lm", model, data)
    starts = {run.datasets["train"][index]["input_ids"][0] for index in range(len(run.datasets["train"]))}
    tokenizer = run.plugins.plugins[0].text_model.tokenizer
    without = [token for sample in found for token, target in sample["tokens"] if target is None]
    assert {tokenizer.convert_tokens_to_ids(token) for token in without} <= starts
    assert [sample["text"] for sample in found] == ["abcde", "fgh", "ijklmn"]
    assert "".join(token for token, _ in found[1]["tokens"]) == "fgh<|endoftext|>"
    assert found[0]["not shown"] == "the row's other tokens: 2"


def test_completions_labels_tags_and_targets():
    files = write_rows(
        [
            {"text": "ab cd", "pair": "ef", "label": "good", "score": 1.5, "prompt": "ab ", "completion": "cd",
             "target": "dc", "words": ["abc", "cd"], "tags": ["B-X", "O"]},
            {"text": "cd", "pair": "gh", "label": "bad", "score": 2, "prompt": "cd ", "completion": "ab",
             "target": "ba", "words": ["cd"], "tags": ["O"]},
        ]
    )  # fmt: skip
    data, char = {"files": files, "max_length": 16}, {"tokenizer": {"kind": "char"}}
    found = samples("causal-lm", {"config": TINY_GPT} | char, data | {"prompt": "prompt", "completion": "completion"})
    assert (found[0]["prompt"], found[0]["completion"]) == ("ab ", "cd")
    assert trained(found[0]["tokens"]) == "cd<|endoftext|>"

    found = samples("text-classification", {"config": TINY} | char, data | {"text": ["text", "pair"], "label": "label"})
    assert (found[1]["text"], found[1]["pair"], found[1]["label"]) == ("cd", "gh", "bad")
    assert "".join(token for token, _ in found[1]["tokens"]) == "[CLS]cd[SEP]gh[SEP]"
    found = samples("text-classification", {"config": TINY} | char, data | {"label": "score", "label_type": "number"})
    assert [sample["label"] for sample in found] == ["1.5", "2"]

    found = samples("token-classification", {"config": TINY} | char, data | {"words": "words", "tags": "tags"})
    assert found[0]["words"] == "abc/B-X cd/O"
    words = [("a", "B-X"), ("b", None), ("c", None), (" ", None), ("c", "O"), ("d", None)]
    assert found[0]["tokens"] == [("[CLS]", None), *words, ("[SEP]", None)]

    found = samples("seq2seq", {"config": TINY_T5} | char, data | {"target": "target", "prefix": "cd: "})
    assert (found[0]["input"], found[0]["target"]) == ("cd: ab cd", "dc")
    assert trained(found[0]["tokens of the input"]) == ""
    assert trained(found[0]["tokens of the target"]) == "dc<|endoftext|>"


def test_bytes_of_a_character_have_names():
    Path("train.txt").write_text("é")
    data = {"files": {"train": "train.txt", "validation": "train.txt"}, "max_length": 8}
    (sample,) = samples("causal-lm", {"config": TINY_GPT, "tokenizer": {"kind": "byte"}}, data)
    assert [token for token, _ in sample["tokens"]] == ["Ã", "©", "<|endoftext|>"]


def test_without_colour_brackets_mark_the_loss_and_escapes_of_the_data_are_text(cli, chats):
    code, out, _ = cli("plan", chats, "--samples", "1")
    assert code == 0
    assert "  user: Say <b>hi</b>.\n" in out
    tokens = out[out.index("  tokens (") :].replace("\n    ", "").replace("·", "")
    expected = "<|im_start|>assistant\\n[Hi & bye.\\nTwo \\x1b[31m lines<|im_end|>\\n]\n"
    assert expected in tokens
    assert "\x1b" not in out
    assert "\\x1b" in out
    assert "Tokens with a loss are in brackets." in out
    assert not Path("run").exists()


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_has_colours_unless_no_color_is_set(cli, chats, monkeypatch, no_color, coloured):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich finds a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    code, out, _ = cli("plan", chats, "--samples", "1")
    assert code == 0
    assert ("\x1b[30;42m" in out) == coloured
    assert ("in brackets" in out) != coloured


class Spans(HTMLParser):
    """The text of the tokens of a page, and of those with a loss."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.tokens, self.loss = set[str](), list[str](), list[str]()
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.add(tag)
        self.inside.append(dict(attrs).get("class") or "" if tag == "span" else "")

    def handle_endtag(self, tag: str) -> None:
        self.inside.pop()

    def handle_data(self, data: str) -> None:
        where = self.inside[-1] if self.inside else ""
        if where.startswith("token"):
            self.tokens.append(data)
            self.loss += [data] if "loss" in where else []


def test_the_page_has_escaped_text(cli, chats):
    code, out, _ = cli("plan", chats, "--samples", "1", "--output", "samples.html")
    assert code == 0
    assert out.endswith("written to samples.html\n")
    text = Path("samples.html").read_text()
    page = Spans(re.sub("<meta[^>]*>|<!DOCTYPE html>", "", text))
    assert "<pre>Say &lt;b&gt;hi&lt;/b&gt;.</pre>" in text
    assert not page.tags & {"b", "script"}
    assert "".join(page.loss) == "Hi & bye.\\nTwo \\x1b[31m lines<|im_end|>\\n"
    assert "".join(page.tokens).startswith("<|im_start|>user\\nSay <b>hi</b>.")


def test_images_show_path_class_and_size(cli):
    write_images(Path("images"), {"train": 4, "validation": 2}, ("red", "green"))
    model = {"config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}
    recipe = recipe_file("image-classification", model, {"images": "images", "image_size": 8})
    code, out, _ = cli("plan", recipe, "--samples", "2")
    assert code == 0
    assert re.search(r"image: .*images/.*green/.*\n  class: green\n  size: \d+ x \d+ pixels", out)
    assert "class: red" in out, "not only the first class"


def test_a_task_without_the_hook_shows_its_samples_in_short(cli):
    Path("mine.py").write_text(
        "import torch\ndef model(): return torch.nn.Linear(3, 2)\n"
        "def data(): return {'train': [(torch.ones(3), 1), (torch.ones(40, 40), 0)]}\n"
    )
    tree = {"model": {"module": "mine.py:model"}, "data": {"module": "mine.py:data"}, "output": "run"}
    Path("recipe.json").write_text(json.dumps(tree | {"plugins": [{"module": {"loss": "cross_entropy"}}]}))
    code, out, _ = cli("plan", "recipe.json", "--samples", "9")
    assert code == 0
    assert "sample 1\n  input: 1, 1, 1\n  target: 1\n" in out
    assert "sample 2\n  input: (40, 40) float32\n  target: 0\n" in out
    assert "loss are" not in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--samples", "0"], "invalid-value --samples 1"),
        (["--output", "page.html"], "missing-value --output --samples"),
        (["--samples", "1", "--json", "-"], "exclusive-options --samples --json"),
        (["--samples", "1", "--device-memory", "1GiB"], "exclusive-options --samples --device-memory"),
        (["--samples", "1", "--nproc", "2"], "exclusive-options --samples --nproc"),
        (["--samples", "1", "--nnodes", "2"], "exclusive-options --samples --nnodes"),
        (["--samples", "1", "--device-flops", "1e12"], "exclusive-options --samples --device-flops"),
        (["--samples", "1", "--bandwidth", "1GB/s"], "exclusive-options --samples --bandwidth"),
        (["--samples", "1", "-v"], "exclusive-options --samples --verbose"),
        (["--json", "-", "-v"], "exclusive-options --json --verbose"),
        (["--samples", "1", "--output", "missing/page.html"], "folder-missing"),
        (["--samples", "1", "data.streaming=true"], "no-streaming data.streaming --samples"),
        (["--samples", "1", "data.files.train=none.jsonl"], "file-missing none.jsonl"),
    ],
)
def test_errors_name_the_option(cli, chats, arguments, expected):
    code, out, err = cli("plan", chats, *arguments)
    assert code == 2
    assert_problem(out + err, expected)


def test_an_iterable_split_is_refused(cli):
    Path("mine.py").write_text(
        "import torch\ndef model(): return torch.nn.Linear(3, 2)\n"
        "class Rows(torch.utils.data.IterableDataset):\n    def __iter__(self): yield torch.ones(3), 1\n"
        "def data(): return {'train': Rows()}\n"
    )
    tree = {"model": {"module": "mine.py:model"}, "data": {"module": "mine.py:data"}, "train": {"max_steps": 1}}
    Path("recipe.json").write_text(json.dumps(tree | {"plugins": [{"module": {"loss": "cross_entropy"}}]}))
    code, out, err = cli("plan", "recipe.json", "--samples", "1")
    assert code == 2
    assert_problem(out + err, "iterable-dataset --samples")


def test_selected_plugins_and_plugins_of_the_data_do_not_disturb(cli, chats):
    base = cli("plan", chats, "--samples", "2")[1]
    for plugins in ("auto,packing", "folds", "length-bucketing,token-cache"):
        code, out, err = cli("plan", chats, "--samples", "2", "--with", plugins)
        assert code == 0, err
        assert out[out.index("sample 1") :] == base[base.index("sample 1") :]

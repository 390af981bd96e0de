"""Special tokens of language models: rows have those of the tokenizer, and the exported model, loaded by transformers,
answers and stops where `fastloop predict` does.

Modules:
    plugins/fastloop_plugins/text/chat/endings.py
    plugins/fastloop_plugins/text/chat/model.py
    plugins/fastloop_plugins/text/special_tokens.py
"""

from __future__ import annotations

import json
import logging
import random
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_helpers import make_run
from training_runs import execute

from fastloop_plugins.text.chat.endings import with_end
from fastloop_plugins.text.chat.rows import Chat
from fastloop_plugins.text.chat.template import CHATML, ChatRenderer, answer_end
from fastloop_plugins.text.chat.tokens import encode_rows
from fastloop_plugins.text.special_tokens import beginning_of, end_tokens, stop_at_end_tokens

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
}
ANIMALS = {"owl": "mice", "cow": "grass", "cat": "fish", "fox": "hens"}
ORDER = random.Random(0).choices(list(ANIMALS), k=64)
TURNS = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
NEXT_TURN = TURNS + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
ALPACA = (
    "{% for m in messages %}{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n"
    "{% else %}### Response:\n{{ m['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
END_IS_EOS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [A]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")


@dataclass
class Case:
    """A tokenizer, and the form of the rows.

    Attributes:
        units: byte, for a byte-level tokenizer, or metaspace.
        bos: Whether the tokenizer puts ``<s>`` before each text.
        eos: Its end token; None: it has none.
        pad: Its padding token.
        form: The option of ``data`` that names the column: text, prompt or messages.
        added: Tokens that the answer's ids have after those of the template.
    """

    units: str
    bos: bool
    eos: str | None
    pad: str | None
    form: str
    template: str | None = None
    marks: tuple[str, ...] = ()
    ends: tuple[str, ...] = field(default=())
    added: tuple[str, ...] = ()


CASES = {
    "byte, EOS pads, text": Case("byte", False, "</s>", "</s>", "text", ends=("</s>",)),
    "byte, BOS, text": Case("byte", True, "</s>", "<pad>", "text", ends=("</s>",)),
    "metaspace, BOS, completion": Case("metaspace", True, "</s>", "<pad>", "prompt", ends=("</s>",)),
    "metaspace, EOS pads, completion": Case("metaspace", False, "</s>", "</s>", "prompt", ends=("</s>",)),
    "byte, own end of turn": Case(
        "byte", True, "</s>", "</s>", "messages", CHATML, CHATML_MARKS, ends=("</s>", "<|im_end|>")
    ),
    "byte, no EOS": Case("byte", False, None, None, "messages", CHATML, CHATML_MARKS, ends=("<|im_end|>",)),
    "metaspace, end is EOS": Case("metaspace", True, "</s>", "<pad>", "messages", END_IS_EOS, ends=("</s>",)),
    "byte, next turn": Case(
        "byte",
        False,
        "</s>",
        "<pad>",
        "messages",
        NEXT_TURN,
        ROLES,
        ends=("</s>", "<|user|>", "<|tool|>"),
        added=("<|user|>",),
    ),
    "metaspace, no end": Case("metaspace", True, "</s>", "</s>", "messages", ALPACA, ends=("</s>",)),
}
QUICK = ("byte, BOS, text", "byte, own end of turn", "byte, next turn")
"""The others are slow: each trains a model."""


def question(animal: str) -> str:
    return f"{animal}: food?"


def answer(animal: str) -> str:
    return f"eats {ANIMALS[animal]}"


def make_tokenizer(case: Case) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>", "<pad>", *case.marks]
    if case.units == "byte":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([question(animal) + answer(animal) for animal in ANIMALS], trainer)
    if case.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=case.eos, pad_token=case.pad, unk_token="<unk>"
    )
    made.chat_template = case.template
    return made


def write_rows(case: Case) -> dict[str, Any]:
    """The ``data`` section."""
    rows: list[dict[str, Any]] = []
    for animal in ORDER:
        if case.form == "text":
            rows.append({"text": f"{question(animal)} {answer(animal)}"})
        elif case.form == "prompt":
            rows.append({"prompt": question(animal), "completion": " " + answer(animal)})
        else:
            asked, said = (
                {"role": "user", "content": question(animal)},
                {"role": "assistant", "content": answer(animal)},
            )
            rows.append({"messages": [asked, said]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {
        "files": {"train": "rows.jsonl", "validation": "rows.jsonl"},
        "max_length": 24 if case.form == "text" else 96,
    }
    columns = {"text": {"text": "text"}, "prompt": {"prompt": "prompt", "completion": "completion"}}
    return data | columns.get(case.form, {"messages": "messages"})


def expected_ids(case: Case, tokenizer: Any, animal: str) -> list[int]:
    """The ids of a row, by transformers and the saved tokenizer."""
    if case.form != "messages":
        return tokenizer(f"{question(animal)} {answer(animal)}")["input_ids"] + [tokenizer.eos_token_id]
    messages = [{"role": "user", "content": question(animal)}, {"role": "assistant", "content": answer(animal)}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return ids + tokenizer.convert_tokens_to_ids(list(case.added))


def trained_run(case: Case, objects: Any = (), **train: Any) -> Any:
    """A run that has memorised the answers, and its folder ``run/model``."""
    make_tokenizer(case).save_pretrained("tokenizer")
    options = {"epochs": 10, "batch_size": 8, "lr": 1e-2, "evaluate_every": None, "save_every": None} | train
    run = make_run("causal-lm", {"config": LLAMA, "tokenizer": "tokenizer"}, write_rows(case), objects, **options)
    execute(run)
    return run


def generate(case: Case, animal: str, folder: str = "run/model") -> tuple[list[int], Any]:
    """The ids that ``generate`` adds to a prompt by default, and the tokenizer: a user's way to an exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    if case.form == "messages":
        prompt: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": question(animal)}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        prompt = tokenizer(question(animal), return_tensors="pt")
    inputs = {name: prompt[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=40)[0].tolist()
    return ids[inputs["input_ids"].shape[1] :], tokenizer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_an_exported_model_answers_and_stops_where_predict_does(name, cli, capsys):
    from transformers import pipeline

    case = CASES[name]
    run = trained_run(case)
    added, tokenizer = generate(case, "cow")
    ends = tokenizer.convert_tokens_to_ids(list(case.ends))
    saved = json.loads(Path("run/model/generation_config.json").read_text())["eos_token_id"]
    assert sorted([saved] if isinstance(saved, int) else saved) == sorted(ends)
    assert tokenizer.eos_token_id in ends
    assert added[-1] in ends
    assert not {*added[:-1]} & {*ends}
    text = tokenizer.decode(added, skip_special_tokens=True)
    assert text.strip() in {answer(animal) for animal in ANIMALS}

    asked: Any = [user(question("cow"))] if case.form == "messages" else question("cow")
    pipe = pipeline("text-generation", model="run/model", device="cpu")
    (said,) = pipe(asked, do_sample=False, return_full_text=False)
    assert said["generated_text"] == text
    capsys.readouterr()  # some versions of transformers warn of the pipeline's own settings

    code, out, err = cli("predict", "run", question("cow"), "plugins.causal-lm.max_new_tokens=40")
    assert code == 0, err
    assert json.loads(out)["text"] == text

    dataset = run.datasets["train"]
    found = np.concatenate([dataset[index]["input_ids"] for index in range(len(dataset))]).tolist()
    assert found == [token for animal in ORDER for token in expected_ids(case, tokenizer, animal)]


# -- what a text begins and ends with ----------------------------------------------------------------------------------


@pytest.mark.parametrize("units", ["byte", "metaspace"])
@pytest.mark.parametrize("bos", [True, False])
def test_a_text_has_the_special_tokens_of_its_tokenizer_once(units, bos):
    tokenizer = make_tokenizer(Case(units, bos, "</s>", "</s>", "text"))
    first, last = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    assert beginning_of(tokenizer) == [first] * bos
    plain = tokenizer("owl: food?", add_special_tokens=False)["input_ids"]
    (text,) = encode_rows(tokenizer, ["owl: food?"], {"form": "text"})
    assert text == [first] * bos + plain + [last]
    (pair,) = encode_rows(tokenizer, [("owl: food?", " owl")], {"form": "prompt", "train_on": "assistant"})
    both = tokenizer("owl: food? owl", add_special_tokens=False)["input_ids"]
    assert both[: len(plain)] == plain
    assert pair == [~token for token in [first] * bos + plain] + both[len(plain) :] + [last]
    (rendered,) = encode_rows(tokenizer, ["<s>owl: food?</s>"], {"form": "text"})
    assert rendered.count(first) == rendered.count(last) == 1


def as_in_trl(tokenizer: Any, prompt: str, completion: str) -> list[int]:
    """The signed ids of the SFTTrainer of TRL 1.16: prompt and completion are one text, and the completion begins where
    its ids differ from those of the prompt."""
    if not completion.endswith(tokenizer.eos_token):
        completion += tokenizer.eos_token
    alone, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + completion)["input_ids"]
    start = 0
    while start < len(alone) and alone[start] == whole[start]:
        start += 1
    return [~token for token in whole[:start]] + whole[start:]


PAIRS = [
    ("what does the owl eat?", " mice"), ("what does the owl eat?", "mice"), ("owl:\n", "mice"), ("owl: ", "mice"),
    ("owl", "s eat mice"), ("owl:", " mice</s>"), ("owl:", ""), ("", "mice"), ("owl:", "  mice "),
    ("owl:\n\n", "\nmice"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("units", ["byte", "metaspace", "prepended", "words"])
def test_completions_have_the_tokens_of_trl_and_prompts_those_of_predictions(units, bos, pair, caplog):
    from tokenizers import models, normalizers, pre_tokenizers

    tokenizer = make_tokenizer(Case("byte" if units == "byte" else "metaspace", bos, "</s>", "<pad>", "prompt"))
    backend = tokenizer.backend_tokenizer
    if units == "prepended":  # as Llama 2's, which has no pre-tokenizer
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "isolated", invert=False)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif units == "words":
        names = ["what", "does", "the", "owl", "eat", "?", ":", "mice", "s"]
        vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *names])}
        backend.model, backend.pre_tokenizer = models.WordLevel(vocabulary, "<unk>"), pre_tokenizers.Whitespace()
    with caplog.at_level(logging.WARNING, "fastloop"):
        (row,) = encode_rows(tokenizer, [pair], {"form": "prompt", "train_on": "assistant"})
    expected = as_in_trl(tokenizer, *pair)
    prompt = tokenizer(pair[0])["input_ids"]
    assert [~token for token in row if token < 0] == prompt
    are_joined = expected[: len(prompt)] == [~token for token in prompt]
    assert bool(caplog.records) != are_joined
    if are_joined:
        assert row == expected
    else:
        completion = tokenizer(pair[1], add_special_tokens=False)["input_ids"]
        assert row[len(prompt) :] == [*completion, tokenizer.eos_token_id]


@pytest.mark.parametrize("blocks", [True, False])
def test_streamed_texts_begin_and_end_as_those_in_memory(blocks):
    case = CASES["byte, BOS, text"]
    make_tokenizer(case).save_pretrained("tokenizer")
    data = write_rows(case)
    model = {"config": LLAMA, "tokenizer": "tokenizer"}
    streamed = make_run("causal-lm", model, data | {"streaming": True, "blocks": blocks, "shuffle_buffer": 0})
    samples = [sample["input_ids"].tolist() for sample in streamed.datasets["train"]]
    texts = [expected_ids(case, make_tokenizer(case), animal) for animal in ORDER]
    if blocks:
        assert sorted(token for sample in samples for token in sample) == sorted(chain.from_iterable(texts))
        assert samples[0] == list(chain.from_iterable(texts))[:24]
    else:
        assert sorted(samples) == sorted(text[:24] for text in texts)


@pytest.mark.parametrize("name", ["byte, next turn", "metaspace, no end"])
def test_streamed_answers_end_as_those_in_memory(name):
    case = CASES[name]
    make_tokenizer(case).save_pretrained("tokenizer")
    model, data = {"config": LLAMA, "tokenizer": "tokenizer"}, write_rows(case)
    memory = make_run("causal-lm", model, data).datasets["train"]
    streamed = make_run("causal-lm", model, data | {"streaming": True, "shuffle_buffer": 0}).datasets["train"]
    samples = [[*memory[index]["targets"]] for index in range(len(memory))]
    assert sorted(samples) == sorted([*sample["targets"]] for sample in streamed)
    last = [max(place for place, target in enumerate(sample) if target >= 0) for sample in samples]
    ends = end_tokens(make_tokenizer(case))
    assert all(set(sample[: place + 1]) & {*ends} for sample, place in zip(samples, last, strict=True))


def test_a_prompt_to_continue_begins_as_a_text_and_the_log_names_the_tokens(caplog):
    case = CASES["byte, BOS, text"]
    make_tokenizer(case).save_pretrained("tokenizer")
    with caplog.at_level(logging.INFO, "fastloop"):
        run = make_run("causal-lm", {"config": LLAMA, "tokenizer": "tokenizer"}, write_rows(case))
    assert "'<s>'" in caplog.text
    assert "'</s>'" in caplog.text
    task = run.plugins.plugins[0]
    (prompts,) = task.build_prediction_data(["owl: food?", ""], 0, 8)
    tokenizer = task.text_model.tokenizer
    assert prompts[0]["input_ids"].tolist() == tokenizer("owl: food?")["input_ids"]
    assert prompts[1]["input_ids"].tolist() == [tokenizer.bos_token_id]


# -- how an answer ends ------------------------------------------------------------------------------------------------


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TWO_TURNS = [user("a"), assistant("b"), user("c"), assistant("d")]


def trained_text(case: Case, messages: list[dict[str, Any]], train_on: str = "assistant") -> tuple[str, str]:
    """The text of a conversation as it is trained, and the part of it that has a loss."""
    tokenizer = make_tokenizer(case)
    ids, mask = ChatRenderer(tokenizer, train_on).encode(Chat(messages))
    return tokenizer.decode(ids), tokenizer.decode(
        [token for token, has_loss in zip(ids, mask, strict=True) if has_loss]
    )


@pytest.mark.parametrize(
    ("messages", "loss"),
    [
        (TWO_TURNS, "b<|user|>d<|user|>"),
        (TWO_TURNS[:3], "b<|user|>"),
        ([*TWO_TURNS[:3], assistant("d", weight=0)], "b<|user|>"),
        ([user("a"), assistant("b", weight=0), user("c"), assistant("d")], "d<|user|>"),
        ([user("a"), assistant("b"), {"role": "tool", "content": "t"}, assistant("d")], "b<|tool|>d<|user|>"),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
def test_the_next_turn_ends_an_answer_and_has_a_loss(messages, loss, marked):
    template = NEXT_TURN
    if marked:
        content = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        template = template.replace("{{ m['content'] }}", content + "{% else %}{{ m['content'] }}{% endif %}")
    case = Case("byte", False, "</s>", "<pad>", "messages", template, ROLES)
    text, trained = trained_text(case, messages)
    assert trained == loss
    rendered = make_tokenizer(case).apply_chat_template([{**message} for message in messages], tokenize=False)
    assert text == rendered + "<|user|>" * (loss.endswith("d<|user|>"))


def test_a_conversation_that_has_a_loss_everywhere_ends_with_the_next_turn():
    text, trained = trained_text(CASES["byte, next turn"], TWO_TURNS, "all")
    assert text == trained
    assert text.endswith("<|assistant|>\nd<|user|>")


def test_a_template_without_an_end_gets_one_in_each_answer():
    case = CASES["metaspace, no end"]
    tokenizer = make_tokenizer(case)
    assert not answer_end(tokenizer).tokens
    before = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    tokenizer.chat_template = with_end(tokenizer.chat_template, "eos_token")
    assert answer_end(tokenizer).tokens == [tokenizer.eos_token_id]
    text = tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)
    assert text == before.replace("b\n\n", "b</s>\n\n").replace("d\n\n", "d</s>\n\n")
    asked = tokenizer.apply_chat_template(TWO_TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "### Instruction:\na\n\n### Response:\n"
    ids, mask = ChatRenderer(tokenizer).encode(Chat(TWO_TURNS))
    trained = [token for token, has_loss in zip(ids, mask, strict=True) if has_loss]
    assert trained.count(tokenizer.eos_token_id) == ids.count(tokenizer.eos_token_id) == 2


def test_an_end_is_added_to_parts_once_and_not_to_calls():
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}"
        "{% else %}{% for part in m['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(Case("byte", False, "</s>", "<pad>", "messages", with_end(template, "eos_token")))
    messages = [
        user("a"),
        assistant([{"type": "text", "text": "b"}]),
        assistant("c</s>"),
        assistant(None, tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "ab</s>c</s>"


MARKED_CHATML = CHATML.replace("{{ '<|im_end|>\\n' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\\n' }}")
WARNED = {
    "an answer ends with nothing": (ALPACA, (), True),
    "the end has no loss": (MARKED_CHATML, CHATML_MARKS, True),
    "chatml": (CHATML, CHATML_MARKS, False),
    "next turn": (NEXT_TURN, ROLES, False),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_warning_names_an_end_that_is_not_trained(name, caplog):
    template, marks, warns = WARNED[name]
    case = Case("byte", False, "</s>", "<pad>", "messages", template, marks)
    make_tokenizer(case).save_pretrained("tokenizer")
    make_run("causal-lm", {"config": LLAMA, "tokenizer": "tokenizer"}, write_rows(case))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(line.startswith("data.chat_template: ") for line in warnings) == warns


# -- exports -----------------------------------------------------------------------------------------------------------


def test_a_model_keeps_its_own_end_tokens_that_are_special_in_this_tokenizer():
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(Case("byte", False, "</s>", "<pad>", "messages", CHATML, (*CHATML_MARKS, "<|eom|>")))
    assert end_tokens(tokenizer) == sorted(tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"]))
    own, plain = tokenizer.convert_tokens_to_ids("<|eom|>"), tokenizer("a", add_special_tokens=False)["input_ids"][0]
    sizes = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer)))
    model.generation_config.eos_token_id = [own, plain]
    stop_at_end_tokens(model, tokenizer)
    assert model.generation_config.eos_token_id == sorted({own, *end_tokens(tokenizer)})


@pytest.mark.parametrize("merge", [True, False])
def test_exports_of_an_adapter_have_the_end_tokens(merge, cli):
    case = Case("byte", False, "</s>", "</s>", "messages", CHATML, CHATML_MARKS)
    tokenizer = make_tokenizer(case)
    tokenizer.chat_template = None
    tokenizer.save_pretrained("tokenizer")
    Path("base.txt").write_text("owl: food?\n")
    text = {"files": {"train": "base.txt", "validation": "base.txt"}, "max_length": 16}
    execute(make_run("causal-lm", {"config": LLAMA, "tokenizer": "tokenizer"}, text))
    Path("run/model").rename("base")
    assert json.loads(Path("base/generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id

    recipe = {
        "model": {"name": "base"},
        "data": write_rows(case) | {"chat_template": "chatml"},
        "train": {"max_steps": 2, "batch_size": 4, "lr": 1e-2, "device": "cpu", "save_every": 2},
        "plugins": ["causal-lm", {"lora": {"merge": merge}}],
        "output": "tuned",
    }
    Path("recipe.json").write_text(json.dumps(recipe))
    code, _, err = cli("train", "recipe.json")
    assert code == 0, err
    folders = ["tuned/model"]
    for to in ("adapter", "safetensors"):
        code, _, err = cli("export", "tuned", "--checkpoint", "last", "--to", to, "--out", to)
        assert code == 0, err
        folders.append(to)
    ends = sorted(tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"]))
    for folder in folders:
        from transformers import AutoTokenizer, GenerationConfig

        assert GenerationConfig.from_pretrained(folder).eos_token_id == ends
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML

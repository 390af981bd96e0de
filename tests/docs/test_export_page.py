"""docs/export.md: its Python code, on runs of the recipes of docs/index.md and docs/tasks/chat.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "export.md").read_text(encoding="utf-8")


def write_files(page: str) -> None:
    """Write the files of a page: blocks with a title."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, content in re.findall(r'(?ms)^```\w+ title="([^"]+)"\n(.*?)^```$', text):
        Path(name).write_text(content)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
def test_code_of_the_page_loads_exported_models(cli: Any, capsys: Any) -> None:
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    write_files("index.md")
    write_files("tasks/chat.md")
    base = ("model.name=base/model", "model.config=null", "model.tokenizer=null")
    question = "What is a plugin?"
    assert f'"content": "{question}"' in PAGE
    commands = (
        ("train", "reviews.yaml"),
        ("train", "chat.yaml", "output=base"),
        ("train", "chat.yaml", *base, "--with", "lora", "plugins.lora.target_modules=all-linear"),
        ("export", "runs/chat", "--to", "adapter"),
        ("predict", "runs/chat", question, "--without", "amp", "plugins.causal-lm.max_new_tokens=100"),
    )
    for command in commands:
        code, out, err = cli(*command)
        assert code == 0, err
    answer = json.loads(out)["text"]
    blocks = re.findall(r"(?ms)^```py\n(.*?)^```$", PAGE)
    printed = []
    for block in blocks:
        namespace: dict[str, Any] = {}
        capsys.readouterr()
        exec(block, namespace)
        printed.append(capsys.readouterr().out)
    assert "'label': " in printed[0]
    assert printed[1] == f"{answer}\n"
    merged = load_file("runs/chat/model/model.safetensors")
    weights = namespace["whole"].state_dict()
    for name, weight in merged.items():
        assert weights[name].equal(weight), name

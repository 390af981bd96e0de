"""benchmarks/architectures.py: checks find planted errors, and a crash costs one check."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import forked
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"

PLANTED = """
from fastloop import Plugin, PluginError, hookimpl

class Planted(Plugin):
    name = "planted"
    numerics = "reassociated"

    @hookimpl
    def before_prepare(self, model):
        if {fails!r}:
            raise {fails}("planted")
        forward = model.forward
        model.forward = lambda attention_mask=None, **inputs: forward(**inputs)
"""
"""A plugin that drops the mask of the padding, or raises an error."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import architectures

    return architectures


def test_the_page_has_every_architecture(script: Any) -> None:
    """A list for each task, and the list of architectures that a task does not accept."""
    text = script.TABLE.read_text(encoding="utf-8")
    lists, _, refused = text.partition("## Not accepted")
    accepted = []
    for task in script.TASKS:
        part = lists.partition(f"\n## {task}\n")[2].partition("\n## ")[0]
        for _, kinds in (line[2:-1].split(": `") for line in part.splitlines() if line):
            accepted += [(task, kind) for kind in kinds.split(", ")]
    groups = re.findall(r"(?m)^- ([\w-]+): `(.+)`$", refused)
    rest = [(task, kind) for task, kinds in groups for kind in kinds.split(", ")]
    assert sorted([*accepted, *rest]) == sorted(script.every_pair()), "run `make architectures`"
    assert f"**{len(accepted)} pairs of a task and an architecture" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checks_find_planted_errors(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _architecture_checks as checks

    checks.plain.write_data(tmp_path)
    pair = checks.Pair("text-classification", "distilbert", tmp_path)
    assert pair.check_loop()[0] == checks.OK
    found = {}
    for fails in ("", "PluginError", "IndexError"):
        (tmp_path / f"planted{fails}.py").write_text(PLANTED.format(fails=fails))
        monkeypatch.setitem(checks.OPTIONS, "planted", {f"{tmp_path}/planted{fails}.py": {}})
        result, cell = checks.guarded(lambda: pair.check_plugin("planted"))
        found[fails] = (result or cell)[0]
    assert found == {"": checks.WRONG, "PluginError": checks.REFUSED, "IndexError": checks.ERROR}


def end_at_second(pipe: Any) -> None:
    """A worker that dies in the check ``second``."""
    while True:
        for name in pipe.recv()[2]:
            if name == "second":
                os._exit(3)
            pipe.send((name, "ok", ""))
        pipe.send(None)


@pytest.mark.slow
def test_a_crash_costs_one_check(script: Any) -> None:
    worker = script.Worker(end_at_second)
    found = list(worker.check(("causal-lm", "llama"), ["first", "second", "third"]))
    worker.stop()
    assert [(result["check"], result["outcome"]) for result in found] == [
        ("first", "ok"),
        ("second", "ERROR"),
        ("third", "ok"),
    ]
    assert found[1]["detail"] == "the process ended with 3"


def test_results_become_a_page(script: Any) -> None:
    def results(**outcomes: str) -> list[dict[str, str]]:
        return [
            {"check": name, "outcome": outcome, "detail": f"recipe: plugins.{name}: because"}
            for name, outcome in outcomes.items()
        ]

    loop = {"hand-written loop": "ok"}
    found = {
        ("causal-lm", "llama"): results(**loop, auto="ok", packing="refused"),
        ("causal-lm", "bloom"): results(**loop, auto="WRONG"),
        ("seq2seq", "led"): results(**{"hand-written loop": "refused"}),
    }
    lines = script.page(found).splitlines()
    part = lines[lines.index("## causal-lm") :][:5]
    assert part == ["## causal-lm", "", "- auto (WRONG): `bloom`", "- packing: `llama`", ""]
    assert lines[-1] == "- seq2seq: `led`"
    assert any(
        line.startswith("**2 pairs of a task and an architecture: 1 train with `auto`, and 1 pass every check.**")
        for line in lines
    )


@pytest.mark.slow
def test_a_sample_of_architectures_equals_plain_pytorch() -> None:
    """The whole table takes most of an hour: `make architectures`."""
    done = forked.run(str(BENCHMARKS / "architectures.py"), "--sample", timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]

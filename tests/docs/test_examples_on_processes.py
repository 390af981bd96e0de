"""Every plugin that the pages show as an example trains and evaluates under each strategy as on one process."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_helpers import COMPILER, same
from strategy_runs import all_of

pytestmark = [pytest.mark.slow, *COMPILER]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STRATEGIES: dict[str, Any] = {"ddp": "ddp", "fsdp": "fsdp"}
if importlib.util.find_spec("deepspeed") is not None:
    STRATEGIES |= {f"deepspeed {stage}": {"deepspeed": {"stage": stage}} for stage in (0, 2, 3)}


def example_plugins() -> dict[str, str]:
    """Class -> the Python block of a page that defines it. Tasks are left out: they train on data of their own."""
    examples = {}
    for page in PAGES:
        for block in re.findall(r"(?ms)^```python[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8")):
            for name in re.findall(r"(?m)^class (\w+)\(Plugin\):", block):
                if 'slot = "task"' not in block:
                    examples[name] = block
    return examples


EXAMPLES = example_plugins()
CASES = [(example, strategy) for example in EXAMPLES for strategy in STRATEGIES]


def run(name: str, example: str, *strategy: Any) -> dict[str, Any]:
    """A run for ``strategy_runs.py``."""
    train = {"micro_batch_size": 2, "epochs": 1}
    return {"name": f"{example}, {name}", "plugins": [*strategy, f"./{example}.py"], "train": train}


@pytest.fixture(scope="module")
def results(processes: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the main process by name."""
    folder = tmp_path_factory.mktemp("examples")
    for example, block in EXAMPLES.items():
        (folder / f"{example}.py").write_text(block)
    one = [run("one process", example) for example in EXAMPLES]
    two = [run(strategy, example, STRATEGIES[strategy]) for example, strategy in CASES]
    alone = processes(1, all_of, one, folder=folder)[0].result
    together = processes(2, all_of, two, folder=folder)[0].result
    return {**alone, **together}


def test_the_examples_of_the_pages_are_found():
    assert {"LabelSmoothing", "CenteredGradients"} <= EXAMPLES.keys()


@pytest.mark.parametrize(("example", "strategy"), CASES)
def test_an_example_gives_the_losses_and_metrics_of_one_process(results, example, strategy):
    result = results[f"{example}, {strategy}"]
    if "conflicts" in EXAMPLES[example] and f'"{strategy.split()[0]}": ' in EXAMPLES[example]:
        assert result["error"].startswith("PluginError: ")
    else:
        same(result, results[f"{example}, one process"], 1e-5)

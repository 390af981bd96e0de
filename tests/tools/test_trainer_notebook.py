"""``Trainer`` in a real notebook kernel: its bar, its interrupt, and workers that read a dataset of a cell."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CELL = """
import os, time
import psutil, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from fastloop import Trainer

os.chdir({folder!r})

class Rows(Dataset):
    def __init__(self, wait):
        self.inputs, self.wait = torch.randn(80, 8, generator=torch.Generator().manual_seed(0)), wait
    def __len__(self):
        return 80
    def __getitem__(self, index):
        time.sleep(self.wait)
        return self.inputs[index], int(self.inputs[index, :3].argmax())

def make(output, wait=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    loader = DataLoader(Rows(wait), batch_size=4, shuffle=True, num_workers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {{"plugins": [{{"progress": {{"refresh": 0.01}}}}], "output": output, "epochs": 3, "device": "cpu"}}
    return Trainer(model, loader, loss=nn.functional.cross_entropy, optimizer=optimizer, **settings)
"""

Execute = Callable[..., list[tuple[str, Any]]]


@pytest.fixture
def execute() -> Iterator[Execute]:
    """Execute a cell: ``(type, content)`` of each message. ``interrupt_at``: interrupt the kernel when the bar shows
    this text."""
    client_module = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    manager = client_module.KernelManager(kernel_name="python3")
    manager.start_kernel(env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(120)

    def run(code: str, interrupt_at: str = "") -> list[tuple[str, Any]]:
        request, messages = client.execute(code), []
        while not messages or messages[-1] != ("status", {"execution_state": "idle"}):
            message = client.get_iopub_msg(timeout=600)
            if message["parent_header"].get("msg_id") == request:
                messages.append((message["msg_type"], message["content"]))
                if (
                    interrupt_at
                    and message["msg_type"] == "update_display_data"
                    and interrupt_at in message["content"]["data"]["text/plain"]
                ):
                    manager.interrupt_kernel()
                    interrupt_at = ""
        return messages

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def result(messages: list[tuple[str, Any]]) -> str:
    failed = [content["traceback"] for kind, content in messages if kind == "error"]
    assert not failed, "\n".join(failed[0])
    return next(content["data"]["text/plain"] for kind, content in messages if kind == "execute_result")


def test_it_shows_a_bar_and_an_interrupted_fit_continues_to_the_same_bits(execute: Execute, tmp_path: Path) -> None:
    execute(CELL.format(folder=str(tmp_path)))
    stopped = execute("trainer = make('run', wait=0.02)\ntrainer.fit()", interrupt_at="step ")
    assert [content["ename"] for kind, content in stopped if kind == "error"] == ["KeyboardInterrupt"]
    printed = "".join(content["data"]["text/plain"] for kind, content in stopped if kind == "display_data")
    assert "call fit() again to continue" in printed
    first, saved, workers = eval(
        result(execute("trainer.run.state.step, trainer.run.saver.last_saved_step, psutil.Process().children()"))
    )
    assert 1 <= first < 60
    assert saved == first
    assert workers == []

    finished = execute("trainer.fit()['status']")
    assert result(finished) == "'completed'"
    shown = [content["data"] for kind, content in finished if kind == "update_display_data"]
    assert shown[-1]["text/plain"].startswith("step 60")
    assert '<progress value="60" max="60"></progress>' in shown[-1]["text/html"]
    bars = [content for kind, content in finished if kind == "display_data" and "<progress" in str(content)]
    assert len(bars) == 1, "one element, which is updated"

    same = (
        "all(torch.equal(a, b) for a, b in zip(trainer.task.model.state_dict().values(), "
        "whole.task.model.state_dict().values()))"
    )
    assert result(execute(f"whole = make('whole')\nwhole.fit()\n{same}")) == "True"


def test_the_example_notebook_trains_and_predicts(execute: Execute, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "trainer.ipynb"
    execute(f"import os; os.chdir({str(tmp_path)!r})")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    messages = [execute("".join(cell["source"])) for cell in cells]
    assert not [content for cell in messages for kind, content in cell if kind == "error"]
    assert not [content for cell in messages for kind, content in cell if kind == "stream"], "such as a warning"
    validation = eval(result(messages[2]))
    assert validation["loss"] < 0.5
    *_, last = eval(result(messages[3]))
    assert last == (125, "validation", round(validation["loss"], 3))
    assert re.fullmatch(r"tensor\(\[([012], ){4}[012]\]\)", result(messages[-1]))

"""Libraries that few runs use are imported when something uses them, and are then the real ones everywhere.

Modules:
    core/fastloop/runtime/delayed_imports.py
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from types import ModuleType
from typing import Any

import pytest
from pinned import with_pinned_versions

from fastloop.runtime import delayed_imports
from fastloop.runtime.delayed_imports import DelayedModule, DelayingFinder, Places, StandIn, delay_imports

SUMS = """
class Overflow(Exception):
    pass


def add(one, other):
    return one + other


def raise_overflow():
    raise Overflow


limit = 7
"""
CATCHES = """
from slow_library.sums import Overflow

def call(function):
    try:
        function()
    except Overflow:
        return "overflow"
    except ValueError:
        return "value"
"""
FILES = {
    "slow_library/__init__.py": "",
    "slow_library/sums.py": SUMS,
    "slow_library/parts/__init__.py": "whole = 1\n",
    "slow_library/parts/inner.py": "depth = 2\n",
    "takes_function.py": "from slow_library.sums import add\n",
    "takes_exception.py": CATCHES,
    "takes_both.py": "import takes_exception\nfrom slow_library.sums import add\n",
    "takes_slowly.py": "import events\nevents.begun.set()\nevents.go_on.wait(60)\nfrom slow_library.sums import add\n",
    "events.py": "import threading\nbegun = threading.Event()\ngo_on = threading.Event()\n",
    "takes_value.py": "from slow_library.sums import add, limit\n",
    "takes_module.py": "import slow_library\n\ndef size():\n    return slow_library.sums.limit\n",
    "takes_submodule.py": "from slow_library.parts.inner import depth\n",
}
DELAYED = {
    "takes_function": DelayedModule("slow_library.sums", ("add",)),
    "takes_exception": DelayedModule("slow_library.sums", exceptions=("Overflow",)),
    "takes_both": DelayedModule("slow_library.sums", ("add",)),
    "takes_slowly": DelayedModule("slow_library.sums", ("add",)),
    "takes_value": DelayedModule("slow_library.sums", ("add",)),
    "takes_module": DelayedModule("slow_library"),
    "takes_submodule": DelayedModule("slow_library.parts"),
}
REAL = """
import sys
import pytest
from fastloop.runtime import delayed_imports
delayed_imports.delay_imports()
import torch
import torchmetrics
import transformers.masking_utils as masking
import transformers.modeling_utils
from transformers.integrations import finegrained_fp8
from transformers.loss import loss_for_object_detection as detection

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.1)
optimizer.zero_grad()
weight.sum().backward()
optimizer.step()  # a decay of 0.001, and a first step of the learning rate
assert torch.is_grad_enabled()
assert weight.tolist() == pytest.approx([0.899, 0.899], rel=1e-5)

@torch.compiler.disable
def shape_of(value):
    return value.shape[0]

assert shape_of(weight) == 2
assert "torch.distributed.tensor" in sys.modules
assert not {"torch._dynamo", "scipy.optimize", "scipy.signal", "sympy"} & sys.modules.keys()

assert detection.linear_sum_assignment([[4, 1], [2, 0]])[1].tolist() == [1, 0]
from scipy.optimize import linear_sum_assignment
assert detection.linear_sum_assignment is linear_sum_assignment

import scipy.signal
assert scipy.signal.windows.hamming(3)[1] == 1

from torch.distributed.tensor import _collective_utils, _decompositions
from torch.fx.experimental import symbolic_shapes
assert _collective_utils.guard_or_false is symbolic_shapes.guard_or_false
assert _decompositions.GuardOnDataDependentSymNode is symbolic_shapes.GuardOnDataDependentSymNode

graphs = []
def count(graph, inputs):
    graphs.append(len(list(graph.graph.nodes)))
    return graph.forward

@torch.compile(backend=count)
def step(value):
    optimizer.zero_grad()
    return value * shape_of(value) + 1

assert step(torch.ones(2)).tolist() == [3, 3]
assert graphs, "nothing was compiled"

weight.grad = torch.ones(2)
torch.compile(optimizer.step, backend=count)()
assert weight.tolist() == pytest.approx([0.798101, 0.798101], rel=1e-5)
assert torch.is_grad_enabled()
from torch._dynamo import trace_rules
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert masking.TransformGetItemToIndex is TransformGetItemToIndex
assert not delayed_imports._registrations
assert trace_rules.is_callable_allowed(finegrained_fp8._load_finegrained_fp8_kernel)
"""
FIRST_STEP = """
import os
import sys
from fastloop import Plugin, hookimpl

class FirstStep(Plugin):
    name = "first-step"

    @hookimpl
    def after_step(self):
        print("imported", *sys.modules, flush=True)
        os._exit(0)
"""
UNUSED = {"boto3", "datasets", "pandas", "pyarrow", "scipy.optimize", "scipy.signal", "sympy", "torch._dynamo"}
"""Libraries that the first step of the quickstart does without."""


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayingFinder]:
    """A finder that delays the modules of FILES, which can be imported."""
    for name, text in FILES.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setattr(delayed_imports, "DELAYED", DELAYED)
    monkeypatch.setattr(delayed_imports, "_places", Places())
    before = set(sys.modules)
    finder = DelayingFinder()
    sys.meta_path.insert(0, finder)
    yield finder
    sys.meta_path.remove(finder)
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_imports_its_module_when_it_is_called(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_function")
    assert "slow_library.sums" not in sys.modules
    assert user.add(2, 3) == 5
    assert user.add is sys.modules["slow_library.sums"].add


def test_a_module_that_another_one_imports_takes_the_place_of_its_delayed_names(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_function")
    real = importlib.import_module("slow_library.sums")
    assert user.add is real.add
    assert not finder.waiting


def test_a_name_that_is_not_listed_imports_the_module(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_value")
    assert user.limit == 7
    assert not isinstance(sys.modules["slow_library.sums"], StandIn)
    assert user.add(1, 1) == 2


def test_a_delayed_module_is_imported_for_its_first_attribute(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_module")
    assert "slow_library" not in sys.modules
    importlib.import_module("slow_library.sums")
    assert user.size() == 7


def test_a_submodule_of_a_delayed_module_is_imported_with_it(finder: DelayingFinder) -> None:
    assert importlib.import_module("takes_submodule").depth == 2
    real = sys.modules["slow_library.parts"]
    assert not isinstance(real, StandIn)
    assert real.whole == 1
    assert real.inner.depth == 2


def test_an_exception_is_the_real_one_once_something_can_raise_it(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_exception")

    def raise_value_error() -> None:
        raise ValueError

    assert user.call(raise_value_error) == "value"
    assert "slow_library.sums" not in sys.modules
    assert user.call(lambda: importlib.import_module("slow_library.sums").raise_overflow()) == "overflow"


def test_a_module_and_one_that_it_imports_can_do_without_the_same_module(finder: DelayingFinder) -> None:
    user = importlib.import_module("takes_both")
    assert "slow_library.sums" not in sys.modules
    real = importlib.import_module("slow_library.sums")
    assert user.add is real.add
    assert user.takes_exception.Overflow is real.Overflow


@pytest.fixture
def slow_import(finder: DelayingFinder) -> Iterator[Thread]:
    """A thread that executes ``takes_slowly``, and waits there while ``slow_library.sums`` has a stand-in."""
    events = importlib.import_module("events")
    thread = Thread(target=importlib.import_module, args=("takes_slowly",))
    thread.start()
    assert events.begun.wait(60)
    yield thread
    events.go_on.set()
    thread.join(60)


def finish(thread: Thread) -> ModuleType:
    """Let the thread of ``slow_import`` end, and return its module."""
    sys.modules["events"].go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    return sys.modules["takes_slowly"]


@pytest.mark.parametrize(
    "statement",
    [
        "import slow_library.sums; limit = slow_library.sums.limit",
        "import slow_library.sums as sums; limit = sums.limit",
        "from slow_library import sums; limit = sums.limit",
        "from slow_library.sums import limit",
        "import takes_value; limit = takes_value.limit",
    ],
)
def test_a_thread_imports_the_module_while_another_one_delays_it(slow_import: Thread, statement: str) -> None:
    names: dict[str, Any] = {}
    exec(statement, names)
    assert names["limit"] == 7
    user = finish(slow_import)
    real = sys.modules["slow_library.sums"]
    assert not isinstance(real, StandIn)
    assert user.add is real.add


def test_threads_that_import_at_once_have_one_module(
    finder: DelayingFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"user{number}" for number in range(24)]
    for number, name in enumerate(names):
        (tmp_path / "packages" / f"{name}.py").write_text("from slow_library.sums import add\n")
        if number % 3:
            monkeypatch.setitem(DELAYED, name, DelayedModule("slow_library.sums", ("add",)))
    start = Barrier(len(names))
    sums = []

    def use(name: str) -> None:
        start.wait(60)
        sums.append(importlib.import_module(name).add(1, 2))

    threads = [Thread(target=use, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == [3] * len(names)
    real = sys.modules["slow_library.sums"]
    assert {id(sys.modules[name].add) for name in names} == {id(real.add)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_has_no_stand_in_of_a_thread_that_it_lacks(slow_import: Thread) -> None:
    assert isinstance(sys.modules["slow_library.sums"], StandIn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            module = importlib.import_module("slow_library.sums")
            status = 0 if not isinstance(module, StandIn) and module.limit == 7 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert finish(slow_import).add(1, 1) == 2


def test_a_module_that_is_imported_already_is_not_delayed(finder: DelayingFinder) -> None:
    real = importlib.import_module("slow_library.sums")
    assert importlib.import_module("takes_function").add is real.add
    assert not finder.waiting


def test_a_package_that_is_not_installed_gets_no_stand_in(
    finder: DelayingFinder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DELAYED, "takes_module", DelayedModule("no_such_library"))
    assert importlib.import_module("takes_module").slow_library.__name__ == "slow_library"
    assert "no_such_library" not in sys.modules


def test_a_process_has_one_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    delay_imports()
    delay_imports()
    assert [type(finder) for finder in sys.meta_path].count(DelayingFinder) == 1


@pytest.mark.slow
@with_pinned_versions
def test_the_compiler_and_scipy_work_once_they_are_used() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, env=environment, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@with_pinned_versions
def test_the_first_step_of_the_quickstart_imports_no_library_that_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "first_step.py").write_text(FIRST_STEP)
    command = [sys.executable, "-m", "fastloop", "train", "quickstart", "--with", "first_step.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported ")]
    imported = set(lines[0].split())
    assert "torch.distributed.tensor" in imported
    assert not imported & UNUSED

"""Processes of a launcher with threads come from its zygote: ``tests/helpers/zygote.py``. So do workers of
pytest-xdist."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked
import pytest
import torch

CHILD = """
import json, os, sys, threading
facts = {
    "parent": os.getppid(),
    "threads": threading.active_count(),
    "folder": os.getcwd(),
    "variable": os.environ["OWN"],
    "has_torch": "torch" in sys.modules,
}
print(json.dumps(facts))
sys.exit(int(sys.argv[1]))
"""
LAUNCHER = """
import json, os, subprocess, sys, threading
from pathlib import Path
import forked
from zygote import Zygote
forked.use_zygote(Zygote.start(forked.become))
ended = threading.Event()
threading.Thread(target=ended.wait).start()  # a launcher with a thread, in which a fork is not safe
Path("inner").mkdir()
command = [sys.executable, "-u", os.path.abspath("child.py"), "7"]
options = {"env": os.environ | {"OWN": "own"}, "cwd": "inner", "start_new_session": True}
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
output, _ = child.communicate(timeout=60)
ended.set()
print(json.dumps([os.getpid(), child.returncode, json.loads(output)]))
"""


@pytest.mark.slow
def test_a_process_from_a_zygote_is_a_child_of_the_launcher_without_its_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(forked.__file__).parent))
    Path("child.py").write_text(CHILD)
    Path("launcher.py").write_text(LAUNCHER)
    done = forked.run("launcher.py", timeout=120)
    assert done.returncode == 0, done.stderr
    launcher, code, facts = json.loads(done.stdout)
    assert code == 7
    assert facts == {
        "parent": launcher,
        "threads": 1,
        "folder": os.path.realpath("inner"),
        "variable": "own",
        "has_torch": True,
    }


def test_a_worker_of_pytest_is_forked_from_a_process_that_has_collected_the_tests():
    if "PYTEST_XDIST_WORKER" not in os.environ or sys.platform != "linux" or torch.accelerator.is_available():
        pytest.skip("needs a worker of pytest-xdist, on Linux without an accelerator")
    assert "forked_workers" in sys.modules, "a new Python imports every file of tests anew"

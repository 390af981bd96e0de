"""The plugin ``remote-output`` with s3fs and a server that speaks S3, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fault_runs import RECIPE, record, said, steps, train, until, write_recipe

from fastloop import checkpoint
from fastloop.cli.launch import free_port
from fastloop_plugins.checkpoints._remote_folder import SMALL, RemoteFolder
from fastloop_plugins.checkpoints._uploader import Uploader

pytestmark = pytest.mark.slow

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with an empty bucket; the environment names it."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with (tmp_path / "server.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        until(lambda: answers(address))
        values = {
            "ENDPOINT_URL": address,
            "ACCESS_KEY_ID": "test",
            "SECRET_ACCESS_KEY": "test",
            "DEFAULT_REGION": "us-east-1",
        }
        for name, value in values.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield address
    finally:
        process.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10):
            return True
    except OSError:
        return False


def test_a_killed_run_continues_on_a_new_machine(server):
    """The run folder is lost after each SIGKILL, and the bucket stays."""
    write_recipe()
    assert train("output=whole") == 0
    write_recipe(plugins=[*RECIPE["plugins"], {"remote-output": {"url": "s3://bucket/runs", "every": 0.05}}])
    for step in (14, 9):
        wait = {"FAULT": f"step {step} 0 time.sleep(1.5); me('SIGKILL')"}
        assert train("output=run", "--resume", environment=wait) == -signal.SIGKILL, said()
        shutil.rmtree("run")
    assert train("output=run", "--resume") == 0, said()
    assert record()["model"] == record("whole")["model"]
    assert record()["metrics"] == record("whole")["metrics"]
    assert "remote-output: downloaded the newest checkpoint of s3://bucket/runs/run" in said()
    folder = RemoteFolder("s3://bucket/runs/run")
    assert folder.results() == [f"checkpoints/step-{step:08d}" for step in reversed(steps())] + ["model"]
    assert train("output=run") == 2
    assert "s3://bucket/runs/run holds a run already" in said()


def test_large_files_and_rotation(server, tmp_path):
    """A file above the limit of copies in memory goes up and down in parts, and old checkpoints go."""
    run, far = tmp_path / "run", RemoteFolder("s3://bucket/large")
    weight = torch.randn(SMALL // 4 + 1)
    uploader = Uploader(far, run, 1, 1.0, 0)
    for step in (1, 2):
        checkpoint.write(run / "checkpoints" / f"step-{step:08d}", {"weight": weight * step}, {"step": step})
        uploader.upload()
        assert uploader.error is None
    assert far.results() == ["checkpoints/step-00000002"]
    assert {name.split("/")[1] for name in far.names()} == {"step-00000002"}
    assert far.get_newest(tmp_path / "again")
    model, state = checkpoint.read(tmp_path / "again" / "checkpoints" / "step-00000002")
    assert model["weight"].equal(weight * 2)
    assert state == {"step": 2}
    assert os.listdir(tmp_path / "again" / "checkpoints") == ["step-00000002"]  # noqa: PTH208

"""The plugin ``remote-output``, on local file systems of fsspec: on disk, in memory, and one that fails and kills.

Modules:
    plugins/fastloop_plugins/checkpoints/_remote_folder.py
    plugins/fastloop_plugins/checkpoints/_uploader.py
    plugins/fastloop_plugins/checkpoints/remote_output.py
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fault_runs import RECIPE, record, said, steps, times, train, write_recipe
from fsspec.implementations.local import LocalFileSystem

from fastloop import PluginError, UsageError, checkpoint
from fastloop.errors import CheckpointError, FastloopError
from fastloop.testing import assert_problem, expect_problem, find_problems
from fastloop_plugins.checkpoints._remote_folder import PARTIAL, RemoteFolder
from fastloop_plugins.checkpoints._uploader import Uploader


class Faulty(LocalFileSystem):
    """Local files, at ``faulty://``. The first ``FAILS`` uploads raise. Upload number ``KILLS`` is cut and kills the
    process."""

    protocol = "faulty"
    uploads: list[str] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://"))

    def find(self, path: str, **options: Any) -> Any:
        if "UNREADABLE" in os.environ:
            raise PermissionError("access denied")
        return super().find(path, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.uploads.append(path.removesuffix(PARTIAL))
        if len(self.uploads) <= int(os.environ.get("FAILS", "0")):
            raise ConnectionError("no route to host")
        dies = len(self.uploads) == int(os.environ.get("KILLS", "0"))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(value[: len(value) // 2] if dies else value)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture(autouse=True)
def _no_uploads() -> None:
    Faulty.uploads.clear()


def remote(url: str = "far", **options: Any) -> dict[str, Any]:
    return {"remote-output": {"url": url, "every": 0.01, **options}}


def tree(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without hidden ones."""
    names = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def test_the_folder_at_the_url_equals_the_run_folder(tiny_run, tmp_path):
    best = {"checkpoint-best": {"monitor": "loss"}}
    result = tiny_run([remote(), best], output=tmp_path / "run", save_every=4, keep_checkpoints=1, test_loader=None)
    local, far = tree(tmp_path / "run"), tree(tmp_path / "far" / "run")
    different = {name for name in local.keys() | far.keys() if local.get(name) != far.get(name)}
    assert different <= {"log.txt"}  # which has the lines of the upload itself
    assert {"metrics.jsonl", "summary.json", "recipe.yaml", "model/model.safetensors"} <= far.keys()
    assert steps("far/run") == [18]
    assert result.summary["upload"] == {"url": "far/run", "errors": 0}
    assert result.losses == tiny_run([], save_every=4).losses


def test_a_checkpoint_is_complete_only_when_all_its_files_are_there(tiny_run):
    tiny_run([remote("faulty://far"), "async-save"], output="run", save_every=3, keep_checkpoints=1)
    names = [name.partition("/far/run/")[2] for name in Faulty.uploads]
    found = sorted({Path(name).parent for name in names if Path(name).parent.name.startswith("step-")})
    assert found
    for folder in found:
        files = [Path(name).name for name in names if Path(name).parent == folder]
        uploads = len(files) // 4
        assert files == ["model.safetensors", "state.json", "state.safetensors", "manifest.json"] * uploads
    assert "metrics.jsonl" in names[: names.index(f"{found[0]}/manifest.json")], (
        "the log, in which a checkpoint has a position, is there"
    )
    assert names[-1] == "summary.json"


def test_a_new_machine_resumes_from_the_url(tiny_run):
    """The URL in memory stays, and the run folder is gone."""
    plugins = [remote("memory://store"), {"checkpoint-best": {"monitor": "loss"}}]
    options = {"output": "run", "save_every": 4, "keep_checkpoints": 2}
    whole = tiny_run(plugins[1:], **options | {"output": "whole"})
    tiny_run(plugins, **options, max_steps=9)
    shutil.rmtree("run")
    result = tiny_run(plugins, **options, resume=True)
    assert result.losses == whole.losses[9:]
    assert all(result.weights[name].equal(weight) for name, weight in whole.weights.items())
    lines = [
        [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()] for run in ("run", "whole")
    ]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    found = RemoteFolder("memory://store/run").results()
    assert (found[0], found[-1]) == ("checkpoints/step-00000018", "model")
    assert len(found) <= 3


@pytest.mark.slow
def test_the_newer_of_both_folders_counts(tiny_run):
    options = {"output": "run", "save_every": 4}
    tiny_run([remote()], **options, max_steps=4)
    shutil.copytree("run", "older")
    tiny_run([remote()], **options, max_steps=8, resume=True)
    shutil.rmtree("run")
    Path("older").rename("run")
    assert len(tiny_run([remote()], **options, max_steps=12, resume=True).losses) == 4, "the URL is newer"
    shutil.rmtree("far/run/checkpoints/step-00000012")
    assert len(tiny_run([remote()], **options, max_steps=13, resume=True).losses) == 1, "the run folder is newer"


def test_a_damaged_checkpoint_at_the_url_is_not_used(tiny_run, caplog):
    tiny_run([remote()], output="run", save_every=4, keep_checkpoints=3)
    shutil.rmtree("far/run/checkpoints")
    # the upload may have skipped some, and kept earlier ones instead
    shutil.copytree("run/checkpoints", "far/run/checkpoints")
    assert steps("far/run") == [12, 16, 18]
    folder = Path("far/run/checkpoints/step-00000018")
    (folder / "state.json").write_bytes((folder / "state.json").read_bytes() + b" ")
    shutil.copytree(folder, "far/run/checkpoints/step-00000017")
    escape = {"format": 1, "files": {"../../escaped": {"bytes": 1, "sha256": ""}}}
    Path("far/run/checkpoints/step-00000017/manifest.json").write_text(json.dumps(escape))
    Path("far/run/checkpoints/escaped").write_text("x")
    shutil.rmtree("run")
    result = tiny_run([remote()], output="run", resume=True, save_every=4)
    assert_problem(caplog, "damaged-checkpoint step-00000018 state.json")
    assert_problem(caplog, "damaged-checkpoint step-00000017 manifest.json '../../escaped'")
    assert len(result.losses) == 2, "it resumed at step 16"
    assert not list(Path("run").rglob("escaped"))


def test_without_an_intact_checkpoint_a_resumed_run_stops(tmp_path):
    run, far = tmp_path / "run", RemoteFolder(str(tmp_path / "far"))
    checkpoint.write(run / "checkpoints" / "step-00000004", {}, {"step": 4})
    Uploader(far, run, 1, 1.0, 0).upload()
    (tmp_path / "far" / "checkpoints" / "step-00000004" / "state.json").unlink()
    with expect_problem("damaged-checkpoint checkpoints/step-00000004", CheckpointError):
        far.get_newest(tmp_path / "again")


def test_a_new_run_does_not_overwrite_another(tiny_run):
    tiny_run([remote()], output="run", save_every=4)
    shutil.rmtree("run")
    with expect_problem("folder-not-empty remote-output.url far/run checkpoints/step-00000018", UsageError):
        tiny_run([remote()], output="run", save_every=4)
    assert not Path("run").exists()
    assert steps("far/run")[-1] == 18


@pytest.mark.slow
def test_failed_uploads_are_repeated(tiny_run, monkeypatch, caplog):
    monkeypatch.setenv("FAILS", "1")
    result = tiny_run([remote("faulty://far", retries=1)], output="run", save_every=4)
    assert result.summary["upload"]["errors"] == 0
    assert steps("far/run")[-1] == 18
    assert not find_problems(caplog, "upload-failed")


@pytest.mark.slow
def test_a_url_that_takes_nothing_fails_the_run_at_its_end(tiny_run, monkeypatch, caplog):
    """Training is not disturbed: the run folder has all results."""
    monkeypatch.setenv("FAILS", "1000000")
    with expect_problem("save-failed far/run ConnectionError no route to host", FastloopError):
        tiny_run([remote("faulty://far", retries=0)], output="run", save_every=4)
    assert_problem(caplog, "upload-failed faulty://far/run: ConnectionError: no route to host")
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == 18
    assert Path("run/model/model.safetensors").exists()
    monkeypatch.delenv("FAILS")
    assert tiny_run([remote("faulty://far")], output="run", save_every=4, resume=True).summary["status"] == "completed"
    assert tree(Path("far/run")).keys() == tree(Path("run")).keys()


def test_a_checkpoint_that_the_run_removes_is_uploaded_all_the_same(tmp_path):
    """The run rotates faster than a slow store takes files."""
    run, far = tmp_path / "run", RemoteFolder(str(tmp_path / "far"))

    class Rotates(LocalFileSystem):
        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            shutil.rmtree(run / "checkpoints" / "step-00000001", ignore_errors=True)
            super().pipe_file(path, value, **options)

    far.files = Rotates(auto_mkdir=True)
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    checkpoint.write(run / "checkpoints" / "step-00000001", {}, {"step": 1})
    Uploader(far, run, 1, 1.0, 0).upload()
    assert checkpoint.verify(tmp_path / "far" / "checkpoints" / "step-00000001") is None
    assert not (run / ".upload").exists()


def test_a_checkpoint_that_is_removed_before_it_is_copied_is_not_uploaded(tmp_path):
    """The rotation of the run folder has removed one file of the checkpoint, and the manifest is still there."""
    run, far = tmp_path / "run", RemoteFolder(str(tmp_path / "far"))
    for step in (4, 8):
        checkpoint.write(run / "checkpoints" / f"step-{step:08d}", {}, {"step": step})
    uploader = Uploader(far, run, 1, 1.0, 0)
    (run / "checkpoints" / "step-00000008" / "state.json").unlink()
    uploader.upload()
    assert isinstance(uploader.error, FileNotFoundError)
    assert not far.names()
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    uploader.upload()
    assert uploader.error is None
    assert checkpoint.verify(tmp_path / "far" / "checkpoints" / "step-00000004") is None


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    run, far = tmp_path / "run", RemoteFolder(str(tmp_path / "far"))
    uploader = Uploader(far, run, 2, 1.0, 0)
    for number, step in enumerate((4, 8, 12, 4)):
        if step == 4:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)  # another branch from step 4 on
        checkpoint.write(run / "checkpoints" / f"step-{step:08d}", {}, {"number": number})
        uploader.upload()
        assert uploader.error is None
    assert steps(str(tmp_path / "far")) == [4]
    assert checkpoint.read(tmp_path / "far" / "checkpoints" / "step-00000004")[1] == {"number": 3}


def test_the_folder_at_the_url_can_be_named(tiny_run):
    result = tiny_run([remote(folder="mine/first")], output="run")
    assert result.summary["upload"]["url"] == "far/mine/first"
    assert tree(Path("far/mine/first")) == tree(Path("run"))


@pytest.mark.slow
def test_quick_checks_upload_nothing(cli):
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}, {"progress": False}, remote()], output="run")
    code, out, err = cli("train", "recipe.yaml", "--fast-dev-run")
    assert code == 0, err
    assert "fast-dev-run: 2 steps" in out
    assert not Path("far").exists()


def test_wrong_urls_are_refused(tiny_run, cli, monkeypatch):
    with expect_problem("wrong-url remote-output.url 'nowhere://x'", PluginError):
        tiny_run([remote("nowhere://x")])
    monkeypatch.setenv("UNREADABLE", "1")
    with expect_problem("unreachable-url remote-output.url: far/run PermissionError: access denied", UsageError):
        tiny_run([remote("faulty://far")])
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}, remote("gs://bucket/runs")])
    code, _, err = cli("plan", "recipe.yaml")
    assert code == 2
    assert_problem(err, "wrong-url remote-output.url 'gs://bucket/runs'")


def test_s3_names_the_command_that_installs_its_package(cli, monkeypatch):
    version = importlib.metadata.version

    def without_s3fs(name: str) -> str:
        if name == "s3fs":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_s3fs)
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}, remote("s3://bucket/runs")])
    code, _, err = cli("plan", "recipe.yaml")
    assert code == 2
    assert_problem(err, "requirement-missing s3fs 'fastloop-train[s3]'")


@pytest.mark.slow
def test_killed_while_uploading(record_property):
    """A run is killed by SIGKILL in an upload, and its machine is gone: it continues from the URL to the same
    numbers."""
    write_recipe()
    assert train("output=whole") == 0
    write_recipe(plugins=[*RECIPE["plugins"], remote("faulty://far")])
    chance, count = random.Random(3), times(3)
    for _ in range(count):
        shutil.rmtree("far", ignore_errors=True)
        code, moment = -signal.SIGKILL, chance.randrange(1, 25)
        while code == -signal.SIGKILL:
            shutil.rmtree("run", ignore_errors=True)  # the machine is gone
            code = train("output=run", "--resume", environment={"KILLS": str(moment)})
            moment += chance.randrange(10, 40)
        assert code == 0, said()
        assert record()["model"] == record("whole")["model"]
        assert record()["metrics"] == record("whole")["metrics"]
        assert record("far/run") == record()
    record_property("faults", count)

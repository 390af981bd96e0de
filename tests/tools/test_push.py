"""`fastloop export --push`: a repository of the hub, of which a server on this machine speaks the protocol.

Modules:
    plugins/fastloop_tools/export/hub.py
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from cards import load_by_card
from file_server import RangeHandler
from inference_runs import train, write_recipe
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from fastloop.testing import assert_problem

COMMIT = "/api/models/me/model/commit/main"


class Hub:
    """A repository.

    Attributes:
        seen: The content of the newest request of each path.
        answers: Path -> (status, JSON), in place of the usual answer.
        files: The files of the repository.
        commits: The number of commits.
    """

    def __init__(self) -> None:
        self.address = ""
        self.seen: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.commits = 0
        self.answers: dict[str, tuple[int, Any]] = {
            "/api/whoami-v2": (200, {"name": "me"}),
            "/api/validate-yaml": (200, {"errors": [], "warnings": []}),
        }

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        lines = [json.loads(line) for line in body.splitlines()]
        self.seen[path] = lines[0] if len(lines) == 1 else lines
        if path in self.answers:
            return self.answers[path]
        if path.endswith("/preupload/main"):
            names = [file["path"] for file in lines[0]["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if path == "/api/repos/create":
            return 200, {"url": f"{self.address}/me/model"}
        if path == COMMIT:
            self.commit(lines)
            return 200, {"commitUrl": f"{self.address}/me/model/commit/{self.sha()}", "commitOid": self.sha()}
        if "/tree/" in path:
            return 200, [entry(name, content) for name, content in self.files.items()]
        if path.startswith("/api/models/me/model"):
            siblings = [{"rfilename": name} for name in self.files]
            return 200, {"id": "me/model", "sha": self.sha(), "siblings": siblings}
        return 404, {}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        self.commits += 1
        for line in lines:
            if line["key"] == "file":
                self.files[line["value"]["path"]] = b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del self.files[line["value"]["path"]]

    def sha(self) -> str:
        return f"{self.commits:040x}"

    def write(self, folder: Path) -> Path:
        """Write the files of the repository, as ``git clone`` does."""
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder


def entry(name: str, content: bytes) -> dict[str, Any]:
    """A file in the list of a repository."""
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    served = Hub()

    class Handler(RangeHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            # transformers asks for `main`, and for a commit once it knows one
            path = self.path.replace("/resolve/main/", f"/resolve/{served.sha()}/")
            before, _, name = path.partition(f"/resolve/{served.sha()}/")
            if before == "/me/model" and name in served.files:
                self.send_file(served.files[name], {"X-Repo-Commit": served.sha()})
                return
            status, value = served.answer(self.path, body)
            self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

        do_GET = do_POST
        do_HEAD = do_POST

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
    monkeypatch.setattr(constants, "ENDPOINT", served.address)
    template = served.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a recipe of a tiny classifier, its files and its run."""
    folder = tmp_path_factory.mktemp("trained")
    train(write_recipe(folder))
    return folder


def push(cli: Any, *arguments: Any, code: int = 0) -> str:
    """Push to ``me/model``. Returns the output, or the error for an exit code that is not 0."""
    exit_code, out, err = cli("export", *map(str, arguments), "--push", "me/model")
    assert exit_code == code, err
    text: str = err if code else out
    return text


def test_push_uploads_every_file(trained, cli, hub):
    out = push(cli, trained / "run", "--out", "out")
    assert f"uploaded to {hub.address}/me/model" in out
    assert (
        hub.seen["/api/repos/create"].items()
        >= {"name": "model", "organization": "me", "visibility": "private"}.items()
    )
    assert hub.files == {path.name: path.read_bytes() for path in Path("out").iterdir()}


def test_a_second_push_removes_the_weights_of_the_first_in_the_same_commit(trained, cli, hub):
    """transformers reads an old model.safetensors, and not the new shards beside it."""
    push(cli, trained / "run", "--out", "first")
    model = AutoModelForSequenceClassification.from_pretrained(trained / "run/model")
    with torch.no_grad():
        model.classifier.bias.fill_(7)
    shutil.copytree(trained / "run/model", "sharded")
    Path("sharded/model.safetensors").unlink()
    model.save_pretrained("sharded", max_shard_size="5KB")
    others = {
        "notes.md": b"mine", "model_card.png": b"mine", "models/model.safetensors": b"mine", ".gitattributes": b"",
        "training_args.bin": b"mine", "onnx/model.onnx": b"mine",
    }  # fmt: skip
    earlier = ("pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors")
    hub.files |= others | dict.fromkeys(earlier, b"old")
    out = push(cli, "sharded", trained / "recipe.yaml", "--out", "second")
    assert hub.commits == 2
    for name in ("model.safetensors", *earlier):
        assert f"removed {name} from me/model" in out
    assert out.count("removed ") == 4
    assert hub.files == others | {path.name: path.read_bytes() for path in Path("second").iterdir()}
    loaded = AutoModelForSequenceClassification.from_pretrained(hub.write(Path("clone")))
    assert loaded.classifier.bias.tolist() == [7, 7, 7]


def test_the_configuration_of_an_earlier_adapter_stays_with_a_warning(trained, cli, hub):
    """With it, transformers loads no whole model."""
    pytest.importorskip("peft")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "base", "target_modules": ["q_lin"], "r": 2}
    hub.files["adapter_config.json"] = json.dumps(adapter).encode()
    out = push(cli, trained / "run", "--out", "out")
    assert_problem(out, "several-exports --push me/model: adapter_config.json")
    assert "adapter_config.json" in hub.files
    with pytest.raises(OSError, match="adapter_model"):
        AutoModelForSequenceClassification.from_pretrained(hub.write(Path("clone")))
    del hub.files["adapter_config.json"]
    assert "several-exports" not in push(cli, trained / "run", "--out", "again")


def test_shards_of_a_first_push_are_removed_with_their_index(trained, cli, hub):
    save_file({"weight": torch.ones(1)}, "old.safetensors")
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        hub.files[name] = Path("old.safetensors").read_bytes()
    hub.files["model.safetensors.index.json"] = b"{}"
    push(cli, trained / "run", "--out", "out")
    assert [name for name in hub.files if "model" in name] == ["model.safetensors"]


@pytest.mark.parametrize("form", ["safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_code_of_an_uploaded_card_loads_the_repository(trained, cli, hub, form, monkeypatch):
    """No folder of this machine is in it."""
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    push(cli, trained / "run", "--to", form, "--out", "a-local-folder")
    page = hub.files["README.md"].decode()
    assert "a-local-folder" not in page
    assert str(trained) not in page
    monkeypatch.chdir(hub.write(Path("clone")).parent)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    names = load_by_card(Path("../clone"))
    if form == "safetensors":
        assert names["folder"] == "me/model"
        assert type(names["model"]).__name__ == "DistilBertForSequenceClassification"
    else:
        assert len(names["outputs"][0]) == 2


@pytest.mark.parametrize("edit", ["a line", "its labels", "another page"])
def test_an_edited_page_of_the_repository_stays_with_a_warning(trained, cli, hub, edit):
    push(cli, trained / "run", "--out", "first")
    first = hub.files["README.md"].decode()
    edited = {
        "a line": first.replace("# run\n", "# run\n\nMy notes.\n"),
        "its labels": first.replace("tags: [fastloop]", "tags: [fastloop]\nlicense: mit"),
        "another page": "# Mine\n",
    }[edit]
    assert edited != first
    hub.files["README.md"] = edited.encode()
    out = push(cli, trained / "run", "--out", "second")
    assert_problem(out, "page-kept --push me/model: README.md")
    assert "hf upload me/model second/README.md README.md" in out
    assert hub.files["README.md"].decode() == edited
    assert Path("second/README.md").read_text() == first
    assert hub.files["model.safetensors"] == Path("second/model.safetensors").read_bytes()


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_page_that_nobody_edited_is_replaced(trained, cli, hub, ends):
    push(cli, trained / "run", "--out", "out")
    page = hub.files["README.md"]
    hub.files["README.md"] = page.replace(b"\n", ends.encode()) + ends.encode()
    assert "page-kept" not in push(cli, trained / "run", "--out", "again")
    assert hub.files["README.md"] == page


def test_a_page_of_the_user_is_uploaded(trained, cli, hub):
    shutil.copytree(trained / "run/model", "model")
    Path("model/README.md").write_text("# Mine\n")
    for out in ("first", "second"):
        assert "page-kept" not in push(cli, "model", trained / "recipe.yaml", "--out", out)
        assert hub.files["README.md"] == b"# Mine\n"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft uses this name of transformers
@pytest.mark.parametrize("merge", [True, False])
def test_an_uploaded_page_names_no_folder_of_this_machine(tmp_path, cli, hub, merge, monkeypatch):
    """The folder of the base model is named beside the recipe, and the command starts elsewhere."""
    pytest.importorskip("peft")
    train(write_recipe(tmp_path, output=str(tmp_path / "base")))
    lora = {"lora": {"r": 2, "target_modules": ["q_lin", "v_lin"], "merge": merge}}
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path, [lora], model={"name": "base/model"})
    train(recipe)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for model in (("../run",), ("../run/model", str(recipe))):
        out = push(cli, *model, "--to", "safetensors" if merge else "adapter", "--out", "out", "--overwrite")
        page = hub.files["README.md"].decode()
        assert "base/model" not in page
        assert "base_model" not in page
        assert str(tmp_path) not in page
        if merge:
            assert "base-model-missing" not in out
        else:
            assert_problem(out, "base-model-missing --push me/model: base/model")
            assert 'from_pretrained("FOLDER-OF-THE-BASE-MODEL"' in page


def test_a_failed_upload_keeps_the_folder(trained, cli, hub):
    hub.answers[COMMIT] = (403, {"error": "no room"})
    error = push(cli, trained / "run", "--out", "out", code=1)
    assert_problem(error, "upload-failed --push me/model: out")
    assert ": hf upload me/model out" in error
    assert Path("out/model.safetensors").is_file()


def test_push_is_refused_before_the_export(trained, cli, hub, monkeypatch):
    from huggingface_hub import constants

    command = ("export", str(trained / "run"), "--out", "out", "--push")

    def refused(repository: str = "me/model") -> str:
        code, _, err = cli(*command, repository)
        assert code == 2
        text: str = err
        return text

    hub.answers["/api/whoami-v2"] = (401, {"error": "unknown"})
    assert "--push me/model: the hub refused the token: Invalid user token" in refused()
    assert "Expected NAME/REPO" in refused("a/b/c")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = refused()
    assert_problem(error, "unreachable-url --push me/model http://127.0.0.1:9")
    assert_problem(error, "unreachable-url --push")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_problem(refused(), "hub-offline HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "nowhere")
    assert_problem(refused(), "no-token HF_TOKEN")
    assert not Path("out").exists()

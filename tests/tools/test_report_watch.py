"""`fastloop report --watch`: a page on this machine that follows a run while it trains."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml

from fastloop_tools.report.metrics import Metrics
from fastloop_tools.report.serve import LivePage, Server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CODE = """
import time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

class Rows(Dataset):
    def __init__(self, wait=False):
        self.x, self.wait = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)), wait
    def __len__(self):
        return 48
    def __getitem__(self, index):
        while self.wait and Path("run/metrics.jsonl").stat().st_size > 500 and not Path("free").exists():
            time.sleep(0.02)
        return self.x[index], int(self.x[index, :3].argmax())

def rows():
    return {"train": Rows(wait=True), "validation": Rows()}
"""
RECIPE: dict[str, Any] = {
    "model": {"module": "code.py:Net"},
    "data": {"module": "code.py:rows"},
    "train": {"epochs": 4, "batch_size": 8, "lr": 1e-2, "device": "cpu", "log_every": 1},
    "plugins": [{"module": {"loss": "cross_entropy"}}],
    "output": "run",
}


def wait_for(condition: Callable[[], Any], seconds: float = 300) -> Any:
    """The first true result of a function."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)
    return found


class Watch:
    """A started `fastloop report --watch`."""

    def __init__(self, *arguments: str) -> None:
        self.command = forked.Command("-m", "fastloop", "report", "--watch", *arguments)
        found = wait_for(
            lambda: (
                re.search(r"serving (http://127\.0\.0\.1:(\d+)/[\w-]+/),", self.command.stdout)
                or self.command.poll() is not None
            )
        )
        assert found is not True, self.command.stderr
        self.address, self.port = found[1], int(found[2])

    def get(self, path: str = "") -> str:
        with urllib.request.urlopen(self.address + path, timeout=300) as answer:
            text: str = answer.read().decode()
            return text


@pytest.fixture
def watch() -> Iterator[Callable[..., Watch]]:
    started: list[Watch] = []

    def start(*arguments: str) -> Watch:
        started.append(Watch(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.command.kill()


@pytest.fixture
def run(tiny_run: Callable[..., Any], tmp_path: Path) -> Path:
    """A finished run."""
    tiny_run(["log"], output=tmp_path / "run", epochs=2)
    return Path("run")


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def steps(page: str) -> int:
    """The last step that the page shows."""
    return max(map(int, re.findall(r"run, step (\d+):", page)))


@pytest.mark.slow
def test_the_page_follows_a_run_that_trains(watch):
    Path("code.py").write_text(CODE)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with forked.Command("-m", "fastloop", "train", "recipe.yaml") as training:
        wait_for(lambda: Path("run").is_dir() or training.poll() is not None)
        served = watch("run")
        page = wait_for(lambda: (text := served.get()).count("Training loss") and text)
        wait_for(lambda: Path("run/metrics.jsonl").stat().st_size > 500)
        assert "not finished" in page
        before, version = steps(served.get()), served.get("version")
        assert before < 24
        Path("free").touch()
        assert training.wait(120) == 0, training.stderr
    assert served.get("version") != version
    page = served.get()
    assert "completed" in page
    assert steps(page) == 24
    assert re.search(r'data-version="(\w+)"', page)[1] == served.get("version")  # type: ignore[index]
    served.command.send_signal(signal.SIGINT)
    assert served.command.wait(300) == 0
    assert "Traceback" not in served.command.stderr
    assert not Path("report.html").exists()


@pytest.mark.slow
def test_the_version_changes_with_the_files_only(run, watch):
    served = watch("run")
    version = served.get("version")
    assert served.get("version") == version
    assert served.get() == served.get()
    changes: list[Callable[[], Any]] = [
        lambda: append(run / "metrics.jsonl", '{"step": 99, "loss": 0.5}\n{"step": 100, "lo'),
        lambda: (run / "summary.json").unlink(),
        lambda: (run / "evaluation").mkdir() or (run / "evaluation" / "test.json").write_text("{"),
    ]
    for change in changes:
        change()
        assert served.get("version") != version
        version = served.get("version")
    assert "evaluation/test.json: cannot be read" in served.get()
    (run / "evaluation" / "test.json").unlink()
    page = served.get()
    assert "run, step 99: 0.5" in page
    assert "step 100" not in page


def read_anew(live: LivePage) -> str:
    """The page of the same files, from one that has read nothing before."""
    other = LivePage(live.folders, live.title)
    other.nonce = live.nonce
    return other.page()


def test_only_new_lines_are_read_again(run, monkeypatch):
    live, read = LivePage([run], "run"), bytearray()
    add = Metrics._add
    monkeypatch.setattr(Metrics, "_add", lambda log, data: (read.extend(data), add(log, data)))
    live.page()
    assert read == (run / "metrics.jsonl").read_bytes()
    read.clear()
    append(run / "metrics.jsonl", '{"step": 98, "loss": 0.25}\n{"step": 99, "loss": 0.5}\n{"step": 100, "lo')
    assert steps(live.page()) == 99
    append(run / "metrics.jsonl", 'ss": 0.75}\n')
    assert steps(live.page()) == 100
    assert read.decode() == (
        '{"step": 98, "loss": 0.25}\n{"step": 99, "loss": 0.5}\n{"step": 100, "lo{"step": 100, "loss": 0.75}\n'
    )
    assert live.page() == read_anew(live)


def half(text: str) -> str:
    return text[: len(text) // 2].rpartition("\n")[0] + "\n"


CHANGES: dict[str, Callable[[str], str]] = {
    "resumed, and longer than before": lambda text: half(text) + '{"step": 50, "loss": 0.5}\n' * 40,
    "resumed, and shorter": half,
    "started again": lambda text: '{"step": 1, "loss": 0.5}\n',
    "empty": lambda text: "",
    "without a last line break, and then with one": lambda text: text.rstrip("\n"),
    "broken, and then repaired": lambda text: text + "{}\n",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_log_that_is_written_again_is_read_again(run, change):
    live, log = LivePage([run], "run"), run / "metrics.jsonl"
    live.page()
    text = log.read_text()
    for content in (change(text), text, text + '{"step": 50, "loss": 0.5}\n'):
        log.write_text(content)
        assert live.page() == read_anew(live)
    assert steps(live.page()) == 50


@pytest.mark.slow
def test_the_page_survives_a_folder_that_is_moved_aside(run, watch):
    served = watch("run")
    run.rename("run.1")
    assert "run: no such folder" in served.get()
    Path("run").mkdir()
    assert "contains no run" in served.get()
    shutil.copytree("run.1", "run", dirs_exist_ok=True)
    assert "Training loss" in served.get()


def test_only_this_machine_reads_the_page(run, watch):
    served = watch("run")
    listeners = socket.socket()
    listeners.settimeout(5)
    own = next(
        (
            found[4][0]
            for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
            if not found[4][0].startswith("127.")
        ),
        "",
    )
    if own:  # the machine's address in its network
        with pytest.raises(OSError):
            listeners.connect((own, served.port))
    listeners.close()
    for host, status in (
        ("evil.example", 403),
        (f"evil.example:{served.port}", 403),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=300)
        connection.request("GET", urllib.parse.urlsplit(served.address).path + "version", headers={"Host": host})
        assert connection.getresponse().status == status
        connection.close()
    for path in ("run/summary.json", "../run/summary.json", "version/", "favicon.ico"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            served.get(path)


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_permits_its_own_script_only(run, watch):
    append(run / "metrics.jsonl", json.dumps({"step": 1, "<script>alert(1)</script>": 1.0}) + "\n")
    page = watch("run").get()
    nonce = re.search(r"script-src 'nonce-([\w-]+)'", page)
    assert nonce is not None
    assert re.findall(r"<script[^>]*>", page) == [f'<script nonce="{nonce[1]}">']
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|url\(|<link|<img| src=", page)


def test_wrong_uses_are_refused(run, watch, cli):
    served = watch("run")
    code, _, err = cli("report", "--watch", "run", "--port", str(served.port))
    assert code == 2
    assert f"--port {served.port}: another program uses it" in err
    assert cli("report", "--watch", "nowhere")[0] == 2
    code, _, err = cli("report", "run", "--port", "8000")
    assert code == 2
    assert "--port: it is for --watch" in err
    code, _, err = cli("report", "--watch", "run", "--output", "a.html")
    assert code == 2
    assert "--watch writes no file" in err


@pytest.mark.slow
def test_a_port_is_chosen_and_free_again_after_the_end(run, watch):
    served = watch("run")
    served.get()
    served.command.send_signal(signal.SIGINT)
    assert served.command.wait(300) == 0
    again = watch("run", "--port", str(served.port))
    assert again.port == served.port
    assert "Training loss" in again.get()


PROBE = """
const part = document.querySelector("details");
part.open = true;
part.querySelector("summary").focus({preventScroll: true});
scrollTo(0, 300);
const wide = document.querySelector("[aria-labelledby=runs][tabindex]");
wide.scrollLeft = 40;
setTimeout(() => {
  const now = document.querySelector("details"), again = document.querySelector("[aria-labelledby=runs][tabindex]");
  const kept = [now !== part, now.open, now.contains(document.activeElement), scrollY, again.scrollLeft];
  document.title = [...kept, document.documentElement.scrollWidth <= innerWidth].join("|");
}, 5000);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_the_new_page_in_the_same_place(run):
    class Probed(LivePage):
        """The page with a probe; the run writes a line as soon as the page is served."""

        served = 0

        def page(self) -> str:
            text = super().page().replace("</body>", f'<script nonce="{self.nonce}">{PROBE}</script></body>')
            self.served += 1
            if self.served == 1:
                append(run / "metrics.jsonl", '{"step": 777, "epoch": 3, "loss": 0.5}\n')
            return text

    live = Probed([run], "run")
    with Server(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=500,600",
            "--virtual-time-budget=9000",
        ]
        done = subprocess.run(
            [*command, "--dump-dom", server.address], capture_output=True, text=True, timeout=600, check=True
        )
        server.shutdown()
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None
    assert live.served == 2
    assert "run, step 777" in done.stdout
    assert title[1] == "true|true|true|300|40|true"

"""docs/conformance.md: made from a report of pytest's, with each of our plugins and those of the examples."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fastloop.plugins.installed import installed, is_own

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import conformance

    return conformance


def test_every_plugin_of_ours_is_on_the_page_and_breaks_no_promise(script: Any) -> None:
    text = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    lists = re.findall(r"(?m)^- .*: `(.+)`$", text)
    names = [name for names in lists for name in names.split(", ")]
    ours = [name for name, point in installed().items() if is_own(point)]
    for package in script.EXAMPLES:
        project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        ours += project["entry-points"]["fastloop.plugins"]
    assert "vllm-server" not in ours
    assert sorted(names) == sorted(ours)
    assert "FAILED" not in text


EMA = '<properties><property name="plugin" value="ema" /></properties>'
REPORT = f"""<testsuites><testsuite>
<testcase name="test_of_something_else" />
<testcase name="test_declared">{EMA}</testcase>
<testcase name="test_numerics">{EMA}<failure message="promised and not kept" /></testcase>
<testcase name="test_processes[ddp]">{EMA}<skipped message="declared: not with it" /></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_a_page(script: Any, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    plugins = script.read(tmp_path / "report.xml")
    assert plugins["ema"]["declared"] == script.Checked("passed")
    lines = script.lists(plugins).splitlines()
    assert lines[0].startswith(
        "- options, documented, batch norm, saved, loaded, killed, resumed, off, deepspeed, fsdp (1); "
    )
    assert lines[0].endswith("numerics class FAILED (2); ddp (3): `ema`")
    assert lines[-3:] == ["1. not reported", "2. promised and not kept", "3. declared: not with it"]


def test_a_strategy_of_another_package_is_reported_with_itself(script: Any, tmp_path: Path) -> None:
    report = REPORT.replace("ema", "local-sgd").replace(
        "</testsuite>", f'<testcase name="test_processes[local-sgd]">{EMA}</testcase></testsuite>'
    )
    (tmp_path / "report.xml").write_text(report.replace('value="ema"', 'value="local-sgd"'))
    checks = script.read(tmp_path / "report.xml")["local-sgd"]
    assert {check for check in checks if check.startswith("processes")} == {
        f"processes[{name}]" for name in ("ddp", "deepspeed", "fsdp")
    }
    assert checks["processes[ddp]"] == script.Checked("passed", "with itself: it fills the slot 'strategy', too")

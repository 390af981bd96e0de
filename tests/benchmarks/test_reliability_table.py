"""docs/reliability.md and docs/security-tests.md: made from pytest's reports, with a section for each file of tests."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import reliability

    return reliability


@pytest.fixture(params=["reliability", "security"])
def page(script: Any, request: pytest.FixtureRequest) -> Any:
    return script.PAGES[request.param]


def docstrings(file: Path) -> dict[str, str]:
    """Test -> docstring, as one line."""
    functions = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: " ".join((ast.get_docstring(node) or "").split())
        for node in functions
        if node.name.startswith("test_")
    }


def test_every_file_of_tests_has_its_group(page: Any) -> None:
    assert {path.stem for path in page.suite.glob("test_*.py")} == set(page.groups)


def test_every_docstring_is_a_fault_and_a_promise(page: Any) -> None:
    for path in page.suite.glob("test_*.py"):
        wrong = {
            name: words for name, words in docstrings(path).items() if not re.fullmatch(r"[^:\n]+: [^\n]*[^.\n]", words)
        }
        assert not wrong, path.name


def test_every_group_has_its_promise_and_the_count_of_its_tests(page: Any) -> None:
    text = page.table.read_text(encoding="utf-8")
    assert "lost**" not in text.replace("0 lost.**", "")
    for file, (title, promise) in page.groups.items():
        part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        assert promise in " ".join(part.split())
        assert f"`{file}.py`: {len(docstrings(page.suite / f'{file}.py'))} tests, " in part, f"write {page.table.name}"


def test_the_total_is_the_sum_of_the_groups(page: Any) -> None:
    text = page.table.read_text(encoding="utf-8")
    counts = [int(count.replace(",", "")) for count in re.findall(r"\d tests, ([\d,]+) \w+\.", text)]
    total = re.search(r"\*\*([\d,]+) \w+ tried", text)
    assert total is not None
    assert int(total[1].replace(",", "")) == sum(counts)


def case(file: str, name: str, fault: str, promise: str, inside: str = "", **more: int) -> str:
    """A test's case in a report."""
    said = {"fault": fault, "promise": promise, "times": 10, **more}
    properties = "".join(f'<property name="{key}" value="{value}" />' for key, value in said.items())
    return (
        f'<testcase classname="tests.reliability.{file}" '
        f'name="{name}"><properties>{properties}</properties>{inside}</testcase>'
    )


CASES = [
    case("test_saving", "test_kills[1-plain]", "a kill", "nothing | all", faults=1200),
    case("test_saving", "test_kills[2-plain]", "a kill", "nothing | all", '<skipped message="cannot&#10;fork" />'),
    case("test_saving", "test_disk", "a full disk", "said", '<failure message="E" />'),
    case("test_saving", "test_disk", "a full disk", "said", '<error message="when it is torn down" />'),
    case("test_soak", "test_same", "control", "the same"),
]


def test_a_report_becomes_a_page(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(CASES)}</testsuite></testsuites>")
    page = dataclasses.replace(script.PAGES["reliability"], table=tmp_path / "page.md")
    monkeypatch.setitem(script.PAGES, "reliability", page)
    monkeypatch.setattr("sys.argv", ["reliability.py", "--report", "report.xml"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code, "something was lost"
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "`test_saving.py`: 2 tests, 1,201 faults." in lines
    assert "- a kill: nothing | all (skipped 1 of 2 cases: cannot fork; 1,200)" in lines
    assert "- a full disk: said (**1 lost**)" in lines
    assert not any(line.startswith("- control") for line in lines)
    assert "**1,201 faults tried, 1,200 survived, 1 lost.**" in "\n".join(lines)


def test_reliability_test_without_docstring_is_rejected(script: Any, tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(
        '<testsuites><testcase classname="tests.core.test_data" name="test_order" /></testsuites>'
    )
    with pytest.raises(SystemExit, match=r"test_data.test_order"):
        script.read(script.PAGES["security"], tmp_path / "report.xml")

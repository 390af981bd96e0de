"""The page of the GPU suite: runs, ratios, and blanks for figures that were not measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_suite import GPU, window

pytestmark = pytest.mark.usefixtures("suite_modules")


def test_a_run_appends_to_the_records_of_earlier_runs(tmp_path: Path) -> None:
    import _suite
    import report

    path = tmp_path / "gpu-lm.jsonl"
    path.write_text('{"kind": "facts"}\n{"kind": "measure", "na')  # killed while it wrote
    records = _suite.Records(path)
    records.add("facts")
    records.add("measure", name="plain")
    assert [line["kind"] for line in records.lines] == ["facts", "measure"]
    assert [[line["kind"] for line in run] for run in report.split_runs(report.read(path))] == [
        ["facts"],
        ["facts", "measure"],
    ]


def test_the_section_has_ratios_formed_inside_rounds(tmp_path: Path) -> None:
    import report

    warm = [{"kind": "warmup", "name": name, "compile_seconds": 9.0} for name in ("baseline", "bf16")]
    speeds = [("baseline", 10.0, 20.0, 10.0), ("bf16", 30.0, 40.0, 30.0)]  # ratios 3, 2, 3; of the medians 3
    windows = [window(name, number, speed) for name, *row in speeds for number, speed in enumerate(row)]
    facts = {"kind": "facts", "tiny": False, "steps": 4, **GPU}
    lines = [
        facts,
        *warm,
        *windows,
        {"kind": "error", "name": "graphs", "during": "warm-up", "error": "a\nout of memory"},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "measure", "na'  # killed while it wrote
    (tmp_path / "gpu-ablation.jsonl").write_text(text)
    shown = report.section(tmp_path)
    assert shown is not None
    assert "### Ablation on NVIDIA H100" in shown
    assert "| `bf16` | `baseline` | 30 | 3.0 | 3.00 (2.00 to 3.00) | 3.00 (2.00 to 3.00) | 1024 | 9 |" in shown
    assert "failed: `graphs` (warm-up): `out of memory`" in shown


@pytest.mark.parametrize(
    ("profile", "shown"),
    [
        ({}, "| `bf16` |  | 0.15 |  |  |"),
        ({"attention": {}, "kernels_per_step": None, "busy": None}, "| `bf16` |  | 0.15 |  |  |"),
        (
            {"attention": {"fmha": 1.0}, "kernels_per_step": 300.0, "busy": 0.5},
            "| `bf16` | `fmha` | 0.15 | 300 | 50% |",
        ),
    ],
)
def test_a_probe_that_was_not_measured_is_blank(profile: dict[str, Any], shown: str) -> None:
    import report

    lines = [{"kind": "syncs", "name": "bf16", "syncs_per_step": 0.15}]
    if profile:
        lines.append({"kind": "profile", "name": "bf16", **profile})
    assert shown in report.show_probes(lines).splitlines()


def test_the_section_has_the_newest_run_and_earlier_ones_of_the_same_sources(tmp_path: Path) -> None:
    import report

    def run(speed: float, **facts: Any) -> list[dict[str, Any]]:
        shared = {"kind": "facts", "tiny": False, "steps": 4, **GPU, **facts}
        warm = {"kind": "warmup", "name": "baseline", "compile_seconds": 0.0}
        return [shared, warm, window("baseline", 0, speed), {"kind": "skipped", "name": "bf16", "why": "no time"}]

    later = [{"kind": "warmup", "name": "bf16", "compile_seconds": 0.0}, window("bf16", 0, 40.0)]
    runs = [run(1.0, sources="old"), run(10.0), run(20.0) + later, run(7.0, tiny=True)]
    lines = [line for run in runs for line in run]
    (tmp_path / "gpu-ablation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = report.section(tmp_path)
    assert shown is not None
    assert "| `baseline` |  | 15 |" in shown
    assert "| `bf16` | `baseline` | 40 | 3.0 | 2.00 (2.00 to 2.00) |" in shown
    assert shown.count("left out: `bf16`") == 1, "the newest run skips it before it measures it"


def test_runs_of_earlier_sources_are_shown_if_they_measured_something_else(tmp_path: Path) -> None:
    import report

    def run(sources: str, **speeds: float) -> list[dict[str, Any]]:
        warm = [{"kind": "warmup", "name": name, "compile_seconds": 0.0} for name in speeds]
        windows = [window(name, 0, speed) for name, speed in speeds.items()]
        return [{"kind": "facts", "tiny": False, "steps": 4, **GPU, "sources": sources}, *warm, *windows]

    runs = [run("a", baseline=10.0), run("b", baseline=11.0, bf16=30.0), run("c", baseline=12.0)]
    lines = [line for run in runs for line in run]
    (tmp_path / "gpu-ablation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = report.section(tmp_path)
    assert shown is not None
    titles = [line for line in shown.splitlines() if line.startswith("###")]
    assert titles == ["### Ablation on NVIDIA H100", "### Ablation on NVIDIA H100, sources b"]
    assert "| `baseline` |  | 12 |" in shown
    assert "| `baseline` |  | 11 |" in shown


def test_the_section_has_the_share_of_the_peak(tmp_path: Path) -> None:
    import report

    facts = {"kind": "facts", "tiny": False, "steps": 2, "batch": 4, "length": 32, "token_flops": 1e9, **GPU}
    ceilings = {"kind": "ceilings", "name": "cuda", "rows": 8192, "product_flops": 8e14, "product_flops_best": 9e14}
    ceilings |= {"copy_bytes": 4e12, "copy_bytes_best": 4.1e12, "nominal_flops": 1e15, "nominal_bytes": 4.8e12}
    warm = [{"kind": "warmup", "name": name, "compile_seconds": 9.0} for name in ("plain", "auto")]
    speeds = {"plain": 2.0, "auto": 1.0}  # seconds of 400,000 tokens
    windows = [
        window(name, number, 1 / seconds, computed=400_000, seconds=seconds)
        for name, seconds in speeds.items()
        for number in range(2)
    ]
    losses = [{"kind": "validate", "name": "auto", "trained_steps": 10, "validation_loss": 3.25}]
    (tmp_path / "gpu-lm.jsonl").write_text("\n".join(map(json.dumps, [facts, ceilings, *warm, *windows, *losses])))
    shown = report.section(tmp_path)
    assert shown is not None
    assert "| `auto` | 400,000 | 2.00 (2.00 to 2.00) | 50.0% | 40.0% | 1024 | 9 | 3.250 | 0.00 |" in shown
    assert "8192 x 8192 matrices in bf16 800 TFLOP/s (best window 900)" in shown
    assert "NVIDIA's figures: 1000 TFLOP/s and 4800 GB/s" in shown


@pytest.mark.parametrize("facts", [None, {"cpu": "x"}, GPU | {"tiny": True}])
def test_without_records_of_a_gpu_there_is_no_section(facts: dict[str, Any] | None, tmp_path: Path) -> None:
    import report

    if facts is not None:
        (tmp_path / "gpu-ablation.jsonl").write_text(json.dumps({"kind": "facts", **facts}) + "\n")
    assert report.section(tmp_path) is None

"""The GPU suite in benchmarks/gpu, in short form on this machine: its commands, records, and handling of failures."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from gpu_suite import BENCHMARKS, read, run
from long_form import long_form_only

pytestmark = pytest.mark.usefixtures("suite_modules")


@pytest.mark.slow
def test_the_ablation_measures_variants_and_the_whole_job(tmp_path: Path) -> None:
    lines = run("ablation", tmp_path, "--variants", "baseline", "bucketing")
    windows = {line["name"]: line for line in lines if line["kind"] == "measure"}
    assert windows.keys() == {"baseline", "bucketing"}
    assert all(line["samples"] == 48 and line["train_mode"] and line["flops"] > 0 for line in windows.values())
    assert windows["baseline"]["computed"] == 48 * 64
    assert windows["bucketing"]["tokens"] <= windows["bucketing"]["computed"] <= 48 * 64
    jobs = {line["name"]: line for line in lines if line["kind"] == "job"}
    assert {"job-cold", "job-warm"} < jobs.keys()
    assert jobs["job-cold"]["steps"] == 3 * 96 / 12
    assert 0 <= jobs["job-cold"]["validation"]["accuracy"] <= 1
    assert jobs["job-cold"]["wall_seconds"] > jobs["job-cold"]["train_seconds"]
    probes = [line for line in lines if line["kind"] in ("syncs", "profile")]
    assert [(line["name"], line["kind"]) for line in probes] == [
        ("bucketing", "syncs"),
        ("bucketing", "profile"),
        ("baseline", "syncs"),
        ("baseline", "profile"),
    ]
    assert probes[1]["attention"]
    first = next(index for index, line in enumerate(lines) if line["kind"] == "measure")
    assert lines.index(probes[-1]) < first, "probes come before the rounds"
    assert json.loads(gzip.decompress((tmp_path / "gpu-trace.json.gz").read_bytes()))["traceEvents"]
    assert [line["name"] for line in lines if line["kind"] == "ceilings"] == ["cpu"]


@pytest.mark.slow
def test_the_peers_are_measured_on_the_same_reviews(tmp_path: Path) -> None:
    lines = run(
        "peers", tmp_path, "--arms", "naive", "bare", "fastloop", "--variant", "fused-optimizer", "--no-overhead"
    )
    windows = {line["name"]: line for line in lines if line["kind"] == "measure"}
    assert windows.keys() == {"naive", "bare", "fastloop"}
    assert len({(line["samples"], line["tokens"]) for line in windows.values()}) == 1
    assert windows["fastloop"]["computed"] <= windows["naive"]["computed"]


@pytest.mark.slow
def test_the_language_arms_train_on_as_many_tokens(tmp_path: Path) -> None:
    lines = run("lm", tmp_path, "--arms", "plain", "auto")
    windows = {line["name"]: line for line in lines if line["kind"] == "measure"}
    assert windows.keys() == {"plain", "auto"}
    assert {line["computed"] for line in windows.values()} == {4 * 4 * 32}
    losses = {line["name"]: line for line in lines if line["kind"] == "validate"}
    assert {line["trained_steps"] for line in losses.values()} == {4 * 4}, "warm-up, two probes and a round"
    assert losses["plain"]["validation_loss"] == pytest.approx(losses["auto"]["validation_loss"], abs=0.05)
    assert losses["plain"]["validation_loss"] < 6.2  # ln 512 is 6.24
    (ceilings,) = (line for line in lines if line["kind"] == "ceilings")
    assert 0 < ceilings["product_flops"] <= ceilings["product_flops_best"]
    assert 0 < ceilings["copy_bytes"] <= ceilings["copy_bytes_best"]


@pytest.mark.slow
def test_the_job_reads_texts_by_the_command_line(tmp_path: Path) -> None:
    lines = run("job", tmp_path, "--caches", "cold", "--seeds", "1", "--work", str(tmp_path / "work"))
    jobs = {line["name"]: line for line in lines if line["kind"] == "job"}
    assert jobs.keys() == {"cold", "seed-1"}
    assert jobs["cold"]["steps"] == jobs["seed-1"]["steps"] == 3 * 96 / 12
    assert [(line["seed"], line["cache"]) for line in jobs.values()] == [(123, "cold"), (1, "cached")]
    assert "auto" not in jobs["cold"]["plugins"]
    assert jobs["cold"]["wall_seconds"] > jobs["cold"]["startup_seconds"] + jobs["cold"]["train_seconds"]


def write_run(folder: Path, steps: int, wait: bool) -> list[str]:
    """The command of a run that logs steps, and then waits or ends without a summary."""
    code = "import json, pathlib, sys, time\n"
    code += f"folder = pathlib.Path({str(folder)!r})\nfolder.mkdir()\n"
    code += "rows = [json.dumps({'step': step}) for step in range(1, " + str(steps + 1) + ")]\n"
    code += "(folder / 'metrics.jsonl').write_text('\\n'.join(rows) + '\\n{\"st')\n"
    code += "time.sleep(60)" if wait else "sys.exit('no space left')"
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("wait", [True, False])
def test_a_job_that_the_budget_cuts_is_no_error(wait: bool, tmp_path: Path) -> None:
    import _suite
    import job

    records = _suite.Records(tmp_path / "records.jsonl")
    budget = _suite.Budget(100, used=100 - 2 - _suite.ENDING_SECONDS - (2 if wait else 30))
    job.run_job("cold", write_run(tmp_path / "cold", 7, wait), tmp_path / "cold", tmp_path, records, budget)
    (line,) = records.lines
    if wait:
        assert (line["kind"], line["name"], line["steps"]) == ("cut", "cold", 7)
        assert budget.left() > 0, "it ends in time"
    else:
        assert line["kind"] == "error"
        assert "no space left" in line["error"]


def test_the_tests_of_a_long_file_are_divided_among_processes(tmp_path: Path) -> None:
    import _suite

    file = tmp_path / "test_five.py"
    file.write_text("".join(f"def test_{name}(): pass\n" for name in "abcde"))
    names = []
    for part in ("1/3", "2/3", "3/3"):
        outcomes = tmp_path / f"{part[0]}.jsonl"
        environment = {
            "FASTLOOP_TEST_RECORDS": str(outcomes),
            "FASTLOOP_TEST_PART": part,
            "PYTHONPATH": str(BENCHMARKS / "gpu"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "_report_tests", "-p", "no:cacheprovider", str(file)]
        assert _suite.run_limited(command, tmp_path / "log", 60, environment, cwd=tmp_path) == 0
        names.append([line["name"][-1] for line in read(outcomes)])
    assert names == [["a", "d"], ["b", "e"], ["c"]]


def test_a_file_that_imports_a_missing_package_is_skipped(tmp_path: Path) -> None:
    import _suite

    file = tmp_path / "test_missing.py"
    file.write_text("import no_such_package\n\ndef test_it(): pass\n")
    outcomes = tmp_path / "outcomes.jsonl"
    environment = {"FASTLOOP_TEST_RECORDS": str(outcomes), "PYTHONPATH": str(BENCHMARKS / "gpu")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "_report_tests", "-p", "no:cacheprovider", str(file)]
    assert _suite.run_limited(command, tmp_path / "log", 60, environment, cwd=tmp_path) == 2
    (line,) = read(outcomes)
    assert (line["outcome"], line["reason"]) == ("skipped", "no_such_package is not installed")


@pytest.mark.slow
def test_the_packed_folder_runs_without_a_checkout(tmp_path: Path) -> None:
    target, results = tmp_path / "packed", tmp_path / "results"
    pack = ["bash", str(BENCHMARKS / "gpu" / "pack.sh"), str(target), "--without-minilm"]
    subprocess.run(pack, check=True, capture_output=True, timeout=600)
    assert {"tree.tar.gz", "all.sh"} <= {path.name for path in target.iterdir()}
    again = subprocess.run(pack, capture_output=True, text=True, check=False, timeout=600)
    assert (again.returncode, again.stderr) == (2, f"{target} is not empty. Give an empty folder.\n")
    command = [
        "bash",
        str(target / "all.sh"),
        "plugin-tests",
        "--tiny",
        "--results",
        str(results),
        "--files",
        "test_small_speedups.py",
    ]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts, *lines = read(results / "gpu-tests.jsonl")
    assert facts["command"] == "plugin-tests"
    assert [line["outcome"] for line in lines if line["kind"] == "test"] in ([], ["skipped"])
    (file,) = [line for line in lines if line["kind"] == "file"]
    assert file["passed"] > 1
    assert "failed" not in file


@pytest.mark.slow
def test_a_worker_that_fails_is_recorded_and_the_others_continue(tmp_path: Path) -> None:
    import _reviews
    import _suite
    import _workers

    reviews = tmp_path / "reviews.npz"
    _reviews.save(reviews, train=_reviews.generate(24, 0, 64))
    common = {"arm": "fastloop", "reviews": str(reviews), "model": "tiny", "device": "cpu", "max_length": 64}
    specs = {name: ({**common, "plugins": [{name: {}}]}, {}, 1) for name in ("fused-optimizer", "fused-optimiser")}
    records = _suite.Records(tmp_path / "records.jsonl")
    budget = _suite.Budget(300)
    with _workers.workers(specs, tmp_path, records, budget, parallel=2) as ready:
        assert list(ready) == ["fused-optimizer"]
        ready["fused-optimizer"].process.kill()
        _workers.probe(ready, ["fused-optimizer"], records, budget, kept=0.0)
        _workers.measure(ready, "fused-optimizer", "measure", records, budget, round=0)
        ready["fused-optimizer"].process.kill()
        _workers.measure(ready, "fused-optimizer", "measure", records, budget, round=1)
        assert not ready
    lines = read(tmp_path / "records.jsonl")
    kinds = [line["kind"] for line in lines if line["name"] == "fused-optimizer"]
    assert kinds == ["warmup", "error", "warmup", "profile", "measure", "error"], "after a probe it is started again"
    errors = {line["name"]: line for line in lines if line["kind"] == "error"}
    assert "no plugin 'fused-optimiser' is installed" in errors["fused-optimiser"]["error"]
    assert errors["fused-optimizer"]["during"] == "measure"
    assert [line["round"] for line in lines if line["kind"] == "measure"] == [0]


def test_the_next_command_follows_a_probe_in_the_same_window() -> None:
    import torch
    from _windows import PROBED, SKIPPED, Windows

    commands = iter(["syncs", "profile", "measure"])
    replies: list[dict[str, Any]] = []
    windows = Windows("cpu", lambda: next(commands), replies.append)
    model = torch.nn.Linear(1, 1)
    steps = 2 * (SKIPPED + PROBED) + 5
    for _ in range(2):
        windows.begin()
        for _ in range(steps):
            windows.batch({"input_ids": torch.zeros(3, 7)})
            windows.step(model(torch.zeros(1)))
        windows.end(model)
    assert [reply["command"] for reply in replies] == ["syncs", "profile", "measure"]
    assert [reply["steps"] for reply in replies] == [PROBED, PROBED, steps]
    assert replies[1]["kernels_per_step"] > 0
    assert replies[2]["samples"] == 3 * steps
    assert windows.trained_steps == 2 * steps


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_window_that_is_shorter_than_a_probe_has_an_empty_result_or_a_part(steps: int) -> None:
    import torch
    from _windows import SKIPPED, Windows

    replies: list[dict[str, Any]] = []
    windows = Windows("cpu", lambda: "profile", replies.append)
    windows.begin()
    for _ in range(steps):
        windows.step(torch.zeros(1).exp())
    windows.end(torch.nn.Linear(1, 1))
    assert [reply.get("steps", 0) for reply in replies] == [max(0, steps - SKIPPED)]


@pytest.mark.slow
@long_form_only
def test_a_worker_that_is_not_warm_in_time_leaves_time_to_measure_the_others(tmp_path: Path) -> None:
    import _reviews
    import _suite
    import _workers

    reviews = tmp_path / "reviews.npz"
    _reviews.save(reviews, train=_reviews.generate(24, 0, 64))
    given = {"arm": "fastloop", "reviews": str(reviews), "model": "tiny", "device": "cpu", "max_length": 64}
    records = _suite.Records(tmp_path / "records.jsonl")
    budget = _suite.Budget(40)
    specs = {"quick": (given, {}, 1), "slow": (given, {}, 10**6)}
    with _workers.workers(specs, tmp_path, records, budget, parallel=2) as ready:
        assert list(ready) == ["quick"]
        assert budget.left() > 0.2 * budget.seconds
    assert {line["name"]: line["kind"] for line in records.lines} == {"quick": "warmup", "slow": "cut"}


def test_the_ends_of_logs_are_kept_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _suite

    monkeypatch.setattr(_suite, "LOG_BYTES", 1600)
    log = tmp_path / "worker.log"
    log.write_text("first line\n" + "x" * 300 + "last line")
    for command in ("ablation", "lm"):
        records = _suite.Records(tmp_path / f"gpu-{command}.jsonl")
        for number in range(8):
            records.error(f"arm-{number}", "measure", "failed", log)
    kept = (tmp_path / "gpu-failures.log").read_text()
    assert kept.startswith("== gpu-ablation: arm-0 (measure)\nxxx")
    assert "== gpu-lm: arm-0 (measure)" in kept
    assert "first line" not in kept
    assert len(kept) < 1600 + 200


def test_the_texts_of_generated_reviews_have_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _reviews
    import job

    monkeypatch.setattr(job, "DATA", tmp_path)  # without BERT's tokenizer
    reviews, tokenizer = _reviews.generate(20, 0, 64), job.load_tokenizer()
    characters = job.write_texts(reviews, tokenizer, tmp_path / "train.jsonl")
    rows = read(tmp_path / "train.jsonl")
    assert characters == sum(len(row["text"]) for row in rows)
    again = _reviews.tokenize([row["text"] for row in rows], [row["label"] for row in rows], tokenizer)
    assert again.ids.tolist() == reviews.ids.tolist()
    assert again.labels.tolist() == reviews.labels.tolist()


def test_arms_of_missing_plugins_and_repeated_arms_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import _blocks
    import _suite
    import lm

    monkeypatch.setattr(lm, "own_plugins", lambda: ["amp", "compile", "fused-optimizer"])
    records = _suite.Records(tmp_path / "records.jsonl")
    graphs = {"arm": "fastloop", "plugins": {"amp": {}, "compile": {"mode": "reduce-overhead"}}}
    arms = {
        "plain": {"arm": "plain"},
        "graphs": graphs,
        "auto": graphs,
        "fused-loss": {**graphs, "plugins": {"fused-loss": {}}},
    }
    assert list(lm.leave_out(arms, list(arms), records)) == ["plain", "graphs"]
    assert {line["name"]: line["why"] for line in read(tmp_path / "records.jsonl")} == {
        "auto": "it has the same plugins as graphs",
        "fused-loss": "the plugin fused-loss is not installed",
    }
    made = lm.make_arms(_blocks.SIZES["gpt2"])
    assert made["auto"]["plugins"]["amp"] == {"dtype": "bf16"}
    assert made["muon"]["optimizer"]["name"] == "Muon"
    assert "fused-optimizer" not in made["muon"]["plugins"]


def test_operations_of_a_token_are_those_of_gpt2() -> None:
    from _blocks import SIZES, token_flops

    # embeddings, blocks with biases and norms, last norm
    weights = 50_304 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    assert token_flops(SIZES["gpt2"]) == 6 * weights + 12 * 12 * 768 * 1024


def test_half_of_the_generated_tokens_follow_from_the_one_before() -> None:
    from _blocks import SIZES, generate

    tokens = generate(200, SIZES["tiny"], 0)
    again = generate(200, SIZES["tiny"], 1)
    pairs = [
        set(zip(found[:, :-1].ravel().tolist(), found[:, 1:].ravel().tolist(), strict=True))
        for found in (tokens, again)
    ]
    assert tokens.max() < 500
    assert len(pairs[0] & pairs[1]) > 400, "the rule does not depend on the seed"


def test_a_variant_with_the_plugins_of_another_is_measured_once() -> None:
    import ablation

    first, second = (
        ablation.Variant(plugins={"amp": {}, "compile": {}}),
        ablation.Variant(over="bf16", plugins={"compile": {}, "amp": {}}),
    )
    other = ablation.Variant(plugins={"amp": {}, "compile": {}}, batch_size=48)
    assert ablation.repeated({"one": first, "other": other, "two": second}) == {"two": "one"}
    assert ablation.repeated(ablation.VARIANTS) == {"auto": "packing-graphs"}, "the recipe has what auto selects"


def test_variants_that_do_not_pay_are_dropped(tmp_path: Path) -> None:
    import _suite
    import ablation

    class Stopped:
        stopped = False

        def stop(self) -> None:
            self.stopped = True

    records = _suite.Records(tmp_path / "records.jsonl")
    for name, speed in (("baseline", 10.0), ("bf16", 20.0), ("bucketing", 17.0), ("device-prefetch", 16.0)):
        records.add("measure", name=name, samples_per_second=speed)
    ready: dict[str, Any] = {name: Stopped() for name in ("baseline", "bf16", "bucketing", "device-prefetch")}
    slow = ready["bucketing"]
    ablation.drop(list(ready), ablation.VARIANTS, ready, records)
    assert list(ready) == ["baseline", "bf16", "device-prefetch"]  # 0.94 of bucketing
    assert slow.stopped


@pytest.mark.slow
def test_every_variant_resolves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import ablation
    from _arms import Work, prepare_fastloop

    from fastloop.plugins.resolve import resolve
    from fastloop.runtime.hardware import Machine

    h100 = Machine("cuda", "H100", ("fp32", "bf16", "fp16", "fp8"))
    monkeypatch.setattr("fastloop.runtime.hardware.this_machine", lambda device="auto": h100)
    for name, variant in ablation.VARIANTS.items():
        assert variant.over in ablation.VARIANTS
        plugins = [{plugin: dict(options)} for plugin, options in variant.plugins.items()]
        recipe, task = prepare_fastloop(Work(model="tiny", device="cuda", folder=Path(name), plugins=plugins), {})
        resolution = resolve(recipe, h100, objects=[task]).plugins
        assert variant.plugins.keys() <= set(resolution.names())
        resolution.hooks.check_recipe(recipe=recipe, plugins=resolution)
        settings = resolution.configure(recipe)
        if "compile" in variant.plugins or "length-bucketing" in variant.plugins:
            assert settings.pad_to_multiple_of == 64
    graphs = ablation.VARIANTS["graphs"].plugins
    assert graphs["compile"]["mode"] == "reduce-overhead"


def test_kernels_are_summed_by_name_and_overlaps_counted_once() -> None:
    from _windows import summarize_kernels

    def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 0, 400),
        event("gemm", 300, 300),  # on another stream
        event("gemm", 900, 100),
        event("gemm", 0, 1000, "gpu_user_annotation"),
        event("cudaLaunchKernel", 0, 1000, "cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    found = summarize_kernels(events, steps=2, seconds=1e-3, category="kernel")
    assert found["kernels_per_step"] == 1.5
    assert found["busy"] == pytest.approx(0.7)
    assert found["attention"] == {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 0.2}
    assert found["kernels"]["gemm"] == pytest.approx(0.2)
    without = summarize_kernels(events[3:], steps=2, seconds=1e-3, category="kernel")
    assert without["kernels_per_step"] is None
    assert without["busy"] is None


def test_each_wait_for_the_device_is_counted_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    import torch
    from _windows import Syncs

    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    probe, others = Syncs("cuda"), []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: others.append(str(message)))
    monkeypatch.setattr(warnings, "filters", [("default", None, Warning, None, 0)])
    probe.start()
    for _ in range(3):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
    warnings.warn("something else", stacklevel=1)
    probe.stop()
    found = probe.found(steps=2)
    assert modes == ["warn", "default"]
    assert others == ["something else"]
    assert found["syncs_per_step"] == 1.5
    (place,) = found["sync_places"]
    assert place.startswith("benchmarks/test_gpu_suite.py:")


def test_operations_are_those_of_the_layers_and_of_attention(tmp_path: Path) -> None:
    import numpy as np
    from _reviews import build_model
    from _windows import training_flops

    lengths = np.array([10, 20])
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 64)  # layers x (projections + feed-forward)
    assert training_flops(build_model("tiny"), lengths) == 6 * weights * 30 + 12 * 2 * 32 * (100 + 400)


def test_the_checkout_is_found_as_an_installed_package(tmp_path: Path) -> None:
    from install import write_metadata

    info = write_metadata(tmp_path)
    found = importlib.metadata.PathDistribution(info)
    ours = importlib.metadata.distribution("fastloop-train")
    assert found.version == ours.version
    assert {(point.group, point.name, point.value) for point in found.entry_points} == {
        (point.group, point.name, point.value) for point in ours.entry_points
    }


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_step_cost_of_all_arms_is_that_of_one_device(device: str, tmp_path: Path) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    target = tmp_path / "overhead.json"
    sizes = ["--rounds", "1", "--steps", "4", "--repeats", "1"]
    arms = ["raw", "accelerate", "hf-trainer", "fastloop"]
    if device == "cuda":
        arms = ["raw", "fastloop"]  # a process an arm takes up to 20 s there, and a test may take 60
    done = forked.run(
        str(BENCHMARKS / "overhead.py"), "--device", device, *sizes, "--arms", *arms, "--json", str(target)
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(target.read_text())["rounds"]
    assert found.keys() == set(arms)
    assert {row["device"].partition(":")[0] for row in found.values()} == {device}

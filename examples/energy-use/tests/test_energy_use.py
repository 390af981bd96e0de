"""Tests of energy-use: its behaviour, and fastloop's conformance tests."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from fastloop.testing import Conformance

from energy_use import EnergyUse, Gpu, Rapl, cpu_seconds


def test_the_summary_and_the_log_say_what_the_run_took(tiny_run, caplog):
    caplog.set_level(logging.INFO, logger="fastloop")
    result = tiny_run([EnergyUse(every=1)])
    found = result.summary["energy-use"]
    assert 0 < found["cpu_seconds"] <= found["seconds"] * (os.cpu_count() or 1)
    assert found["cores_busy"] == pytest.approx(found["cpu_seconds"] / found["seconds"])
    line = next(line for line in caplog.messages if line.startswith("energy-use: "))
    assert ("J by the processor" in line) == ("processor" in found["joules"])
    assert ("no energy counter can be read here" in line) == (not found["joules"])


def zone(folder, name, counter, range=1000000):
    folder.mkdir(exist_ok=True)
    for file, value in (("name", name), ("energy_uj", counter), ("max_energy_range_uj", range)):
        (folder / file).write_text(f"{value}\n")
    return folder


def test_packages_and_memory_are_added_up_and_parts_of_a_package_left_out(tmp_path):
    zones = {
        "package-0": "intel-rapl:0",
        "core": "intel-rapl:0:0",
        "dram": "intel-rapl:0:1",
        "package-1": "intel-rapl:1",
    }
    zones |= {"psys": "intel-rapl:2"}
    for name, folder in zones.items():
        zone(tmp_path / folder, name, 1000)
    rapl = Rapl(tmp_path)
    for number, (name, folder) in enumerate(zones.items()):
        zone(tmp_path / folder, name, 1000 + 10**number)
    rapl.update()
    assert rapl.joules == pytest.approx((1 + 100 + 1000) / 1e6)


def test_a_counter_that_wraps_around_goes_on(tmp_path):
    package = zone(tmp_path / "intel-rapl:0", "package-0", 999_000)
    rapl = Rapl(tmp_path)
    for counter in (999_500, 200, 700):
        zone(package, "package-0", counter)
        rapl.update()
    assert rapl.joules == pytest.approx(0.0017)


def test_a_machine_without_counters_says_so(tmp_path):
    rapl = Rapl(tmp_path)
    rapl.update()
    assert (rapl.zones, rapl.why) == ({}, f"{tmp_path} has none")


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 0)() == 0, reason="root may read everything")
def test_counters_that_may_not_be_read_are_named(tmp_path):
    package = zone(tmp_path / "intel-rapl:0", "package-0", 1)
    (package / "energy_uj").chmod(0)
    assert Rapl(tmp_path).why == f"{package / 'energy_uj'} may not be read by this user"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU of NVIDIA's here")
def test_a_gpu_at_work_uses_energy():
    pytest.importorskip("pynvml")
    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(500):
        matrix = (matrix @ matrix).sign()
    torch.cuda.synchronize()
    gpu.update()
    assert gpu.joules > 1
    assert 0 <= gpu.busy <= 1


def test_processor_time_of_started_processes_counts():
    before = cpu_seconds()
    subprocess.run(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True, timeout=600
    )
    assert cpu_seconds() - before >= 0.4


class TestConformance(Conformance):
    plugin = "energy-use"

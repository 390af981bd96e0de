"""``fastloop new job``: its files are valid, and the SLURM script saves, requeues itself and resumes.

Modules:
    plugins/fastloop_tools/new/job.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_runs import summary, write_recipe

from fastloop import __version__
from fastloop.testing import assert_problem

ALL = ("--slurm", "--kubernetes", "--skypilot")


@pytest.fixture
def new(cli):
    """``new("recipe.yaml", "--slurm")`` -> exit code, stdout, stderr, with a recipe in the current folder."""
    write_recipe()
    return partial(cli, "new", "job")


def test_new_job_writes_files_and_prints_next_steps(new):
    code, out, _ = new("recipe.yaml", *ALL, "--nnodes", "2", "--nproc", "8")
    assert code == 0
    files = ["job/job.slurm", "job/trainjob.yaml", "job/Containerfile", "job/sky.yaml"]
    assert [str(path) for path in map(Path, out.splitlines()[:4])] == files
    assert all(Path(path).is_file() for path in files)
    assert out.splitlines()[5:] == [
        "Next step:",
        "  sbatch job/job.slurm",
        "  podman build -t recipe:latest -f job/Containerfile . && kubectl apply -f job/trainjob.yaml",
        "  sky jobs launch job/sky.yaml",
    ]
    assert f"fastloop-train=={__version__}\n" in Path("job/Containerfile").read_text()


def directives(path: str) -> dict[str, str]:
    """The options of a batch script."""
    return dict(re.findall(r"(?m)^#SBATCH --([\w-]+)(?:=(\S+))?$", Path(path).read_text()))


@pytest.mark.parametrize("cpu", [False, True])
def test_slurm_script_is_valid_shell_and_requests_resources(new, cpu):
    code, _, _ = new(
        "recipe.yaml", "--slurm", "--nnodes", "2", "--nproc", "4", "--time", "2-12:00:00", *["--cpu"] * cpu
    )
    assert code == 0
    subprocess.run(["bash", "-n", "job/job.slurm"], check=True, timeout=600)
    found = directives("job/job.slurm")
    assert found.pop("gpus-per-node", None) == (None if cpu else "4")
    assert found == {
        "job-name": "recipe",
        "nodes": "2",
        "ntasks-per-node": "1",
        "time": "2-12:00:00",
        "signal": "USR1@600",
        "requeue": "",
        "open-mode": "append",
        "output": "recipe-%j.log",
    }


def trainjob() -> dict[str, Any]:
    """The manifest."""
    found: dict[str, Any] = yaml.safe_load(Path("job/trainjob.yaml").read_text())
    return found


def test_kubernetes_manifest_starts_each_node_and_mounts_the_run_folder(new):
    assert (
        new(
            "recipe.yaml",
            "--kubernetes",
            "--nnodes",
            "2",
            "--nproc",
            "4",
            "--image",
            "registry.example/me:1",
            "--name",
            "my-run",
        )[0]
        == 0
    )
    spec = trainjob()["spec"]
    assert trainjob()["metadata"] == {"name": "my-run"}
    (arguments,) = spec["trainer"].pop("args")
    assert spec["trainer"] == {
        "image": "registry.example/me:1",
        "numNodes": 2,
        "numProcPerNode": 4,
        "command": ["bash", "-c"],
        "resourcesPerNode": {"limits": {"nvidia.com/gpu": "4"}},
    }
    assert arguments == (
        "exec fastloop train recipe.yaml output=/runs/my-run --nproc 4 --nnodes 2 "
        '--node-rank "$PET_NODE_RANK" --master "$PET_MASTER_ADDR:$PET_MASTER_PORT" --resume'
    )
    (patch,) = spec["runtimePatches"]
    pod = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 600
    assert pod["volumes"][0] == {"name": "runs", "persistentVolumeClaim": {"claimName": "my-run-runs"}}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


@pytest.mark.slow
def test_kubernetes_manifest_is_a_trainjob_of_kubeflows_own_model(new):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    assert new("recipe.yaml", "--kubernetes")[0] == 0
    # it drops keys that it does not know
    assert models.TrainerV1alpha1TrainJob.from_dict(trainjob()).to_dict() == trainjob()


def test_skypilot_job_keeps_the_run_folder_in_a_bucket(new):
    assert new("recipe.yaml", "--skypilot", "--nnodes", "2", "--nproc", "4", "--gpu", "A100")[0] == 0
    task = yaml.safe_load(Path("job/sky.yaml").read_text())
    assert " ".join(task.pop("run").split()) == (
        'master=$(echo "$SKYPILOT_NODE_IPS" | head -n 1) exec fastloop train recipe.yaml output=/runs/recipe --nproc 4 '
        "--nnodes 2 \\ "
        '--node-rank "$SKYPILOT_NODE_RANK" --master "$master:29500" --resume'
    )
    assert task == {
        "name": "recipe",
        "num_nodes": 2,
        "workdir": ".",
        "resources": {"accelerators": "A100:4", "use_spot": True, "job_recovery": {"recover_on_exit_codes": [75]}},
        "file_mounts": {"/runs": {"name": "recipe-runs", "mode": "MOUNT"}},
        "setup": f"pip install fastloop-train=={__version__}\n",
    }


def test_names_of_recipes_are_quoted(new):
    Path("it's mine.yaml").write_text(Path("recipe.yaml").read_text())
    assert new("it's mine.yaml", *ALL)[0] == 0
    script = Path("job/job.slurm").read_text()
    command = f"srun() {{ printf '%s\\n' \"$6\"; }}\nscontrol() {{ :; }}\n{script}"
    environment = os.environ | {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n"}
    shown = subprocess.run(
        ["bash", "-c", command], text=True, env=environment, capture_output=True, check=True, timeout=600
    )
    assert shown.stdout == "it's mine.yaml\n"
    assert "job-name=it-s-mine\n" in script
    assert "fastloop train 'it'\"'\"'s mine.yaml' output=/runs/it-s-mine " in trainjob()["spec"]["trainer"]["args"][0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["recipe.yaml"], "missing-value --slurm --kubernetes --skypilot"),
        (
            ["recipe.yaml", "--slurm", "--name", "My Run"],
            "wrong-format --name 40",
        ),
        (
            ["recipe.yaml", "--slurm", "--time", "soon"],
            "wrong-format --time 'soon' 04:00:00",
        ),
        (["recipe.yaml", "--kubernetes", "--image", "a b"], "wrong-format --image --gpu"),
        (["other.yaml", "--slurm"], "file-missing other.yaml"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_new_job_rejects_invalid_arguments_and_writes_nothing(new, arguments, expected):
    code, _, err = new(*arguments)
    assert code == 2
    assert_problem(err, expected)
    assert not Path("job").exists()


def test_no_file_is_overwritten(new):
    assert new("recipe.yaml", "--slurm")[0] == 0
    code, _, err = new("recipe.yaml", *ALL)
    assert code == 2
    assert_problem(err, "folder-not-empty job job.slurm --folder")
    assert [path.name for path in Path("job").iterdir()] == ["job.slurm"]


SRUN = """#!/usr/bin/env bash
# One task for each node, as srun: returns the highest exit code.
for node in $(seq 0 $((NODES - 1))); do SLURM_NODEID=$node "$@" & pids[node]=$!; done
highest=0
for pid in "${pids[@]}"; do wait "$pid" || { code=$?; [ "$code" -gt "$highest" ] && highest=$code; }; done
exit "$highest"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >> requeued; else for node in $(seq "$NODES"); do echo 127.0.0.1; done; fi
"""


def cluster(nodes: int, srun: str) -> dict[str, str]:
    """The environment of a batch script, with commands in place of srun and scontrol."""
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        path = Path("bin", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return os.environ | {
        "PATH": os.pathsep.join([str(Path("bin").resolve()), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "NODES": str(nodes),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "nodes",
    }


@pytest.mark.parametrize(
    ("signal_to_script", "is_requeued"),
    [("", True), ("kill -TERM $PPID", False)],
    ids=["at-the-time-limit", "by-scancel"],
)
def test_slurm_script_requeues_a_run_that_was_saved_unless_the_job_is_cancelled(new, signal_to_script, is_requeued):
    assert new("recipe.yaml", "--slurm")[0] == 0
    environment = cluster(1, f"#!/usr/bin/env bash\n{signal_to_script}\nexit 75\n")
    script = subprocess.run(["bash", "job/job.slurm"], env=environment, check=False, timeout=600)
    assert script.returncode == 75
    assert Path("requeued").exists() == is_requeued


@pytest.mark.parametrize("processors", ["", "12"])
def test_slurm_script_gives_srun_the_processors_of_the_job(new, processors):
    assert new("recipe.yaml", "--slurm")[0] == 0
    environment = cluster(1, '#!/usr/bin/env bash\necho "${SRUN_CPUS_PER_TASK-not set}"\n')
    if processors:
        environment["SLURM_CPUS_PER_TASK"] = processors
    script = subprocess.run(
        ["bash", "job/job.slurm"], env=environment, check=True, capture_output=True, text=True, timeout=600
    )
    assert script.stdout == f"{processors or 'not set'}\n"


@pytest.mark.slow
def test_slurm_script_requeues_itself_after_a_signal_and_resumes(new):
    """The script runs as it is, on two nodes that are processes here. Only srun and scontrol are replaced."""
    write_recipe(plugins=[{"module": {"loss": "cross_entropy"}}, {"progress": False}, "ddp"], output="run")
    assert new("recipe.yaml", "--slurm", "--nnodes", "2", "--cpu")[0] == 0
    environment = cluster(2, SRUN)
    start = partial(subprocess.run, ["bash", "job/job.slurm"], capture_output=True, text=True, timeout=600, check=False)
    first = start(env=environment | {"FAULT": "step 14 1 me('SIGUSR1')"})
    assert first.returncode == 75, first.stderr
    assert Path("requeued").read_text() == f"{os.getpid()}\n"
    assert summary("run")["status"] == "stopped"
    second = start(env=environment)
    assert second.returncode == 0, second.stderr
    assert "at step 14" in second.stdout + second.stderr
    assert Path("requeued").read_text() == f"{os.getpid()}\n"
    assert {key: summary("run")[key] for key in ("status", "steps")} == {"status": "completed", "steps": 27}
    Path("recipe.yaml").write_text("train: {lr: much}\n")
    third = start(env=environment)
    assert third.returncode not in (0, 75)
    assert Path("requeued").read_text() == f"{os.getpid()}\n"

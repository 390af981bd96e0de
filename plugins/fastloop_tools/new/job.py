"""``fastloop new job``: writes files that start a recipe with SLURM, Kubernetes or SkyPilot, and resume it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from fastloop import __version__
from fastloop.cli.arguments import RecipeName
from fastloop.errors import UsageError
from fastloop_tools.new import _files

FILES = {
    "slurm": {"job.slurm": "job.slurm"},
    "kubernetes": {"trainjob.yaml": "trainjob.yaml", "Containerfile": "Containerfile"},
    "skypilot": {"sky.yaml": "sky.yaml"},
}
"""Option -> file -> its template."""
NEXT = {
    "slurm": "sbatch {folder}/job.slurm",
    "kubernetes": "podman build -t {image} -f {folder}/Containerfile . && kubectl apply -f {folder}/trainjob.yaml",
    "skypilot": "sky jobs launch {folder}/sky.yaml",
}
"""Option -> the command that starts the job, from the folder of the recipe."""
NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"
"""Name of a job: a DNS label, with room for the suffixes of Kubernetes' operators (63 characters in all)."""


def job(
    recipe: RecipeName,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a batch script that requeues itself.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Write a TrainJob of Kubeflow Trainer, and a container file.")
    ] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="Write a managed job of SkyPilot.")] = False,
    nnodes: Annotated[int, typer.Option(min=1, metavar="K", help="Machines.")] = 1,
    nproc: Annotated[int, typer.Option(min=1, metavar="N", help="Processes on each machine, one for each GPU.")] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="Request no GPUs.")] = False,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job [default: the recipe's].")] = None,
    time: Annotated[
        str, typer.Option(metavar="[D-]HH:MM:SS", help="Time limit of SLURM, after which the job is requeued.")
    ] = "24:00:00",
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image [default: NAME:latest].")] = None,
    gpu: Annotated[str, typer.Option(metavar="TYPE", help="Type of GPU for SkyPilot.")] = "H100",
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the files.")] = Path("job"),
) -> None:
    """Write the files that start a recipe on a cluster.

    The job resumes after an interruption. Existing files are not overwritten.
    """
    from fastloop.recipe import load_recipe

    load_recipe(recipe)
    wanted = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}
    chosen = [kind for kind, is_wanted in wanted.items() if is_wanted]
    if not chosen:
        raise UsageError(
            "fastloop new job: expected at least one of --slurm, --kubernetes, --skypilot.", code="missing-value"
        )
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower())[:40].strip("-0123456789")
    if not re.fullmatch(NAME, name):
        raise UsageError(
            code="wrong-format",
            place="--name",
            found=repr(name),
            expected="at most 40 lower-case letters, digits and hyphens, such as 'my-run'",
        )
    if not re.fullmatch(r"(\d+-)?\d{1,3}:[0-5]\d:[0-5]\d", time):
        raise UsageError(
            code="wrong-format",
            place="--time",
            found=repr(time),
            expected="hours, minutes and seconds, such as 04:00:00 or 2-12:00:00",
        )
    image = image or f"{name}:latest"
    if re.search(r"\s", image + gpu):
        raise UsageError("--image and --gpu: expected no spaces.", code="wrong-format")
    words = {
        "recipe": recipe,
        "nnodes": nnodes,
        "nproc": nproc,
        "cpu": cpu,
        "name": name,
        "time": time,
        "image": image,
        "gpu": gpu,
    }
    _files.write(folder, render(chosen, words))
    typer.echo("\nNext step:")
    for kind in chosen:
        typer.echo(f"  {NEXT[kind].format(folder=folder, image=image)}")


def render(kinds: list[str], words: dict[str, Any]) -> dict[str, str]:
    """Path -> text of the files of each kind in ``FILES``.

    Args:
        words: The values that the templates name.
    """
    files = {}
    for kind in kinds:
        for path, template in FILES[kind].items():
            files[path] = _files.render(f"job/{template}", {**words, "version": __version__})
    return files

"""Uploads the run folder while the run trains, to S3 or any other store that fsspec supports.

    plugins:
      - remote-output: {url: "s3://bucket/experiments"}
    output: runs/first

A thread copies ``runs/first`` to ``s3://bucket/experiments/first``: logs, the newest complete checkpoint, best
checkpoints, and the exported model. It removes from the URL what the run folder has removed. With ``--resume``, a newer
complete checkpoint at the URL is first downloaded and verified, also on a new machine. A new run refuses a URL that
holds a run. Runs of a sweep or search get ``SWEEP/RUN`` as ``folder``.

A failed upload is repeated, then logged; if the last one fails, the command fails. ``s3://`` needs ``pip install
'fastloop-train[s3]'``, other protocols the package that fsspec names; it finds the credentials.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastloop import Package, Plugin, PluginError, UsageError, When, hookimpl, option
from fastloop.errors import SaveError
from fastloop.problem import clause, typed_clause

if TYPE_CHECKING:
    from fastloop import Run
    from fastloop.recipe import Recipe
    from fastloop_plugins.checkpoints._remote_folder import RemoteFolder
    from fastloop_plugins.checkpoints._uploader import Uploader


class RemoteOutput(Plugin):
    """Uploads the run folder. Downloads the newest checkpoint."""

    name = "remote-output"
    numerics = "bitwise"
    requirements = (When(lambda plugin: plugin.url.startswith(("s3://", "s3a://")), Package("s3fs", extra="s3")),)
    publishes = True

    url: str = option("The folder for the run's folder: a URL of fsspec, or a path.", min_length=1)
    folder: str | None = option(
        "Name of the run's folder there; null: the name of the output folder.", default=None, min_length=1
    )
    every: float = option("Seconds between two searches for files to upload.", default=10.0, gt=0)
    retries: int = option("Times that a failed upload is repeated, after 1, 2, 4, ... seconds.", default=4, ge=0)

    remote: RemoteFolder  # from check_recipe on

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.uploader: Uploader | None = None
        self.resumes = False

    @hookimpl
    def check_recipe(self, recipe: Recipe) -> None:
        from fastloop_plugins.checkpoints._remote_folder import RemoteFolder

        try:
            self.remote: RemoteFolder = RemoteFolder(
                f"{self.url.rstrip('/')}/{self.folder or Path(recipe.output).absolute().name}"
            )
        except (ImportError, ValueError) as error:
            problem = f"{clause(error)}. Expected a URL such as s3://bucket/runs, and an installed package for it."
            raise PluginError(f"{self.where}.url: found {self.url!r}: {problem}", code="wrong-url") from None

    @hookimpl
    def before_resume(self, run: Run, folder: Path) -> None:
        if folder.resolve() == run.folder.resolve():
            self.resumes = True
            newer = self.try_remote(run, lambda: self.remote.get_newest(run.folder))
            if newer and run.is_main:
                self.log.info("downloaded the newest checkpoint of %s", self.remote.url)

    @hookimpl
    def check_run(self, run: Run) -> None:
        if run.resume_point is not None or self.resumes:
            return
        results = self.try_remote(run, self.remote.results)
        if results:
            raise UsageError(
                f"{self.remote.url} holds a run already, with {results[0]}.",
                code="folder-not-empty",
                place=f"{self.where}.url",
                remedy="Continue it with --resume, or set another output or url.",
            )

    @hookimpl
    def before_fit(self, run: Run) -> None:
        from fastloop_plugins.checkpoints._uploader import Uploader

        if run.is_main:
            self.uploader = Uploader(
                self.remote, run.folder, run.recipe.train.keep_checkpoints, self.every, self.retries
            )
            self.uploader.start()

    @hookimpl
    def write_summary(self, summary: dict[str, Any]) -> None:
        if self.uploader is not None:
            summary["upload"] = {"url": self.remote.url, "errors": self.uploader.errors}

    @hookimpl
    def teardown(self, run: Run) -> None:
        if self.uploader is None:
            return
        uploader = self.uploader
        self.uploader = None
        self.log.info("waiting for the last upload to %s", self.remote.url)
        uploader.finish()
        if uploader.error is not None:
            raise SaveError(
                f"{self.remote.url} is not complete: {type(uploader.error).__name__}: {uploader.error}. The run folder "
                f"{run.folder} is complete.",
                code="save-failed",
                remedy="Repeat the command with --resume to upload it.",
            )

    def try_remote(self, run: Run, function: Any) -> Any:
        """The result of ``function`` on the main process, for every process.

        Raises:
            UsageError: The URL cannot be read; raised on every process.
        """
        result: Any = None
        problem = None
        if run.is_main:
            try:
                result = function()
            except Exception as error:  # each package of fsspec raises errors of its own
                problem = f"{self.where}.url: {self.remote.url} cannot be read: {typed_clause(error)}."
        result, problem = run.processes.all_gather_object((result, problem))[0]
        if problem is not None:
            raise UsageError(
                f"{problem} Expected a URL that this machine can reach, and credentials for it.", code="unreachable-url"
            )
        return result

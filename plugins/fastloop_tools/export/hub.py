"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fastloop import Problem
from fastloop.errors import FastloopError, UsageError
from fastloop.export.card import OTHER_BASE, is_local, is_unedited, load_from_hub
from fastloop.problem import clause
from fastloop.runtime.files import read_json_object

log = logging.getLogger("fastloop")

WEIGHTS = (
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*", "adapter_model*", "model.onnx*",
)  # fmt: skip
"""Patterns of files with weights, and of their indexes. Libraries choose among them by their names: transformers reads
an old model.safetensors, and not the new shards beside it."""
KINDS = ("config.json", "adapter_config.json")
"""The files by which libraries know a whole model, and an adapter."""
TOKEN = "Log in by `hf auth login`, or set HF_TOKEN to a token that may write"


def check(repository: str) -> None:
    """Check the name, the token and the connection, before any work.

    Raises:
        UsageError: One of them is missing or wrong.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils._validators import validate_repo_id

    where = f"--push {repository}"
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UsageError(f"{clause(error)}.", code="wrong-format", place=where, expected="NAME/REPO") from None
    try:
        HfApi().whoami()
    except LocalTokenNotFoundError:
        raise UsageError(f"found no token of the hub. {TOKEN}.", code="no-token", place=where) from None
    except OfflineModeIsEnabled:
        raise UsageError(
            "HF_HUB_OFFLINE is set, so the hub is not used. Unset it, or leave out --push.",
            code="hub-offline",
            place=where,
        ) from None
    except HfHubHTTPError as error:
        raise UsageError(
            f"the hub refused the token: {clause(error)}. {TOKEN}.", code="no-token", place=where
        ) from None
    except Exception as error:  # the HTTP library's own errors
        raise UsageError(
            f"the hub ({constants.ENDPOINT}) cannot be reached: {clause(error)}.",
            code="unreachable-url",
            place=where,
            remedy="Check the network, or leave out --push.",
        ) from None


def name_repository(folder: Path, repository: str) -> None:
    """Let the code in the README of an export load the repository. A README that a user has written or edited stays.

    Warns of an adapter whose base model is a folder of this machine: others cannot load it.
    """
    base = read_json_object(folder / "adapter_config.json").get("base_model_name_or_path")
    local_base = None
    if isinstance(base, str) and is_local(base, Path(base)):
        local_base = base
        log.warning(
            Problem(
                f"the base model of the adapter is the folder {base}, which the hub does not have. The code in the "
                f"README names {OTHER_BASE} in its place.",
                code="base-model-missing",
                place=f"--push {repository}",
                remedy="Upload the base model and name it in model.name, or merge the adapter: --to safetensors.",
            )
        )
    readme = folder / "README.md"
    if is_unedited(readme):
        page = load_from_hub(readme.read_text(encoding="utf-8"), repository, local_base)
        readme.write_text(page, encoding="utf-8")


def keeps_page(api: Any, repository: str, readme: Path) -> bool:
    """Whether the README of a repository stays: it differs from the new one, and fastloop has not written it, or it was
    edited.

    Args:
        api: A client of the hub.
        readme: The new one.

    Raises:
        Exception: It cannot be read, with an error of the HTTP library.
    """
    current = Path(api.hf_hub_download(repository, "README.md"))
    return not is_unedited(current) and current.read_bytes() != readme.read_bytes()


def upload(folder: Path, repository: str) -> str:
    """Upload the files of a folder, and remove the weights of an earlier upload that it does not have. A README that
    was edited in the repository stays. A repository that does not exist is created as a private one.

    Returns:
        The address of the repository.

    Raises:
        FastloopError: The upload failed. The folder is intact.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        names = api.list_repo_files(repository)
        earlier = find_earlier_weights(names, folder)
        page_stays = "README.md" in names and keeps_page(api, repository, folder / "README.md")
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload a model exported by fastloop",
            ignore_patterns=["README.md"] if page_stays else None,
            delete_patterns=[glob.escape(name) for name in earlier],
        )
    except Exception as error:  # the HTTP library's own errors, too
        raise FastloopError(
            f"{folder} is complete, but was not uploaded: {clause(error)}.",
            code="upload-failed",
            place=f"--push {repository}",
            remedy=f"To upload it later: hf upload {repository} {folder}",
        ) from error
    for name in earlier:
        log.info("removed %s from %s: the weights of an earlier upload, which its history keeps", name, repository)
    if page_stays:
        log.warning(
            Problem(
                "the README.md of the repository stays, since fastloop has not written it, or it was edited.",
                code="page-kept",
                place=f"--push {repository}",
                remedy="Replace it:",
                command=f"hf upload {repository} {folder / 'README.md'} README.md",
            )
        )
    warn_about_other_kind(names, folder, repository)
    return address


def warn_about_other_kind(names: Iterable[str], folder: Path, repository: str) -> None:
    """Warn if a repository has kept the configuration of an adapter beside that of a whole model.

    Args:
        names: All files of the repository before the upload.
        folder: The upload.
    """
    kept = [name for name in KINDS if name in names and not (folder / name).exists()]
    if not kept or not any((folder / name).exists() for name in KINDS):
        return
    log.warning(
        Problem(
            f"the repository still has the {kept[0]} of an earlier upload. transformers takes a folder with both of "
            f"{' and '.join(KINDS)} for an adapter.",
            code="several-exports",
            place=f"--push {repository}",
            remedy="Remove it:",
            command=f"hf repos delete-files {repository} {kept[0]}",
        )
    )


def find_earlier_weights(names: Iterable[str], folder: Path) -> list[str]:
    """The files of a repository with weights of an earlier upload. They are not in subfolders.

    Args:
        names: All files of the repository.
        folder: The new upload. Its files replace those of the same names.
    """
    earlier = []
    for name in names:
        has_weights = "/" not in name and any(fnmatchcase(name, pattern) for pattern in WEIGHTS)
        if has_weights and not (folder / name).exists():
            earlier.append(name)
    return earlier

"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastloop.errors import FastloopError, UsageError
from fastloop.problem import clause

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


def upload(folder: Path, repository: str) -> str:
    """Upload the files of a folder. A repository that does not exist is created as a private one.

    Returns:
        The address of the repository.

    Raises:
        FastloopError: The upload failed. The folder is intact.
    """
    from huggingface_hub import HfApi

    api: Any = HfApi()
    try:
        address = str(api.create_repo(repository, private=True, exist_ok=True))
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a model exported by fastloop")
    except Exception as error:  # the HTTP library's own errors, too
        raise FastloopError(
            f"{folder} is complete, but was not uploaded: {clause(error)}.",
            code="upload-failed",
            place=f"--push {repository}",
            remedy=f"To upload it later: hf upload {repository} {folder}",
        ) from error
    return address

"""The repository on the Hub that a push goes to, and the Hub's refusals, each in one line.

Whether a user may write there is for the Hub to say: only the Hub knows the scope of a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions, require_token
from enjoyln_cli.errors import ModelNotFound, PushRefused, without_credentials
from enjoyln_cli.text import first_line

AGAIN = "push again to continue where it stopped"
PULLS = "refs/pr/"
"""Prefix of the revisions of pull requests."""


def require_directory(out: Path) -> None:
    """Raise ``ModelNotFound`` if there is no directory ``out`` to push."""
    if not out.is_dir():
        raise ModelNotFound(
            f"there is no directory {str(out)!r}; push a directory that `enjoyln fold`, "
            "`rotate` or `quantize` wrote"
        )


def require_repo_id(repo_id: str) -> None:
    """Raise ``PushRefused`` for what cannot be the name of a repository. Needs no network."""
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise refusal(error, repo_id) from error


def full_name(repo_id: str, opening: OpenOptions = OPENED_PLAINLY) -> str:
    """``owner/name``; the user that the token belongs to owns a name without an owner.

    Raises ``PushRefused`` if there is no token, the Hub does not know it, or cannot be reached.
    """
    from huggingface_hub import HfApi

    require_token(opening)
    require_repo_id(repo_id)
    try:
        user = HfApi(token=opening.token).whoami()["name"]
    except Exception as error:  # any error of huggingface_hub and its HTTP library
        raise refusal(error, repo_id) from error
    return repo_id if "/" in repo_id else f"{user}/{repo_id}"


def open_repository(
    api: Any, repo_id: str, private: bool | None, revision: str | None, create_pr: bool
) -> None:
    """Create the repository and the branch ``revision`` if they do not exist.

    Raises ``PushRefused`` if the repository exists and is not ``private``, or not public, as asked.
    A pull request needs a repository that exists.
    """
    if create_pr or (revision or "").startswith(PULLS):
        return
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    if private is not None and bool(api.repo_info(repo_id).private) != private:
        is_so, flag = ("public", "--private") if private else ("private", "--no-private")
        raise PushRefused(
            f"{repo_id} is {is_so}, and {flag} applies to new repositories only; drop it, name "
            f"another repository, or change this one at {without_credentials(url)}/settings first"
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def refusal(error: Exception, repo_id: str, again: str = AGAIN) -> PushRefused:
    """The error in one line, by the Hub's answer, which may be wrapped in other exceptions.

    ``again`` says how to continue; it is added if pushing again may help.
    """
    from huggingface_hub import constants, errors

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    answers = [cause for cause in causes if isinstance(cause, errors.HfHubHTTPError)]
    response = getattr(answers[0], "response", None) if answers else None
    status = getattr(response, "status_code", None)
    said = getattr(response, "headers", {}).get("X-Error-Message") or str(causes[-1])
    first = " ".join(first_line(said).split())
    if any(isinstance(cause, errors.LocalTokenNotFoundError) for cause in causes):
        return PushRefused("pushing needs a token; run `hf auth login` or pass --token")
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return PushRefused("HF_HUB_OFFLINE is set; go online to push")
    if any(isinstance(cause, errors.HFValidationError) for cause in causes):
        return PushRefused(f"{repo_id!r} is not a repository name (owner/name): {first}")
    if status == 401:
        return PushRefused("the Hub does not know the token; run `hf auth login` or pass --token")
    if status == 403:
        return PushRefused(f"the token may not write to {repo_id} ({first}); use one that may")
    if status == 404:
        return PushRefused(f"{repo_id} cannot be found by this token ({first})")
    if status is not None and (status == 429 or status >= 500):
        return PushRefused(f"the Hub rejected the upload ({status}); wait, then {again}")
    if status is not None:
        return PushRefused(f"the Hub rejected the upload ({status}: {first})")
    if any(isinstance(cause, errors.HTTPError) for cause in causes):
        kind = type(causes[-1]).__name__
        return PushRefused(f"{constants.ENDPOINT} cannot be reached ({kind}: {first}); {again}")
    return PushRefused(f"the upload failed: {type(causes[-1]).__name__}: {first}; {again}")

"""The repository on the Hub to push to: its present state, and whether this push is possible.

Decides what is refused before anything is folded or sent. Missing write access is reported only if
it is certain: a read-only token, or an owner who is neither the user nor one of the user's
organizations. Other cases are left to the Hub: only the Hub knows the scope of a fine-grained
token, and everybody may open a pull request in an existing repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from enjoyln_cli.checkpoint.access import DEFAULT_ACCESS, HubAccess, require_token
from enjoyln_cli.errors import EnjoyLNError, PushRefused, without_credentials
from enjoyln_cli.text import first_line

AGAIN = "push again to continue where it stopped"
PULLS = "refs/pr/"
"""Prefix of the revisions of pull requests."""


@dataclass(frozen=True)
class Target:
    """A repository on the Hub to push to, in its state before the push."""

    repo_id: str
    """``owner/name``."""
    url: str
    user: str
    """The user that the token belongs to; empty without a token."""
    exists: bool
    private: bool
    """Whether the repository is private, or will be."""
    revision: str | None
    create_pr: bool
    new_branch: bool = False
    """Whether the push creates the branch ``revision``, from the main branch."""
    commit: str = ""
    """The commit that files are compared with; empty if there is no repository."""
    there: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """From each path to its digest: ``("sha256", digits)``, or ``("sha1", digits)`` as in git."""
    pulls: frozenset[str] = frozenset()
    """This user's present pull requests, if the push will open another one."""

    @property
    def name(self) -> str:
        """``me/model``, or ``me/model@revision``."""
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"

    @property
    def kind(self) -> str:
        """For example ``new, private``, or ``new branch, public``."""
        new = "new branch, " if self.new_branch else ""
        new = new if self.exists else "new, "
        return new + ("private" if self.private else "public")

    @property
    def page(self) -> str:
        """The URL of the files at ``revision``, by default on the main branch."""
        return f"{self.url}/tree/{quote(self.revision or 'main', safe='')}"


def target(
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    access: HubAccess = DEFAULT_ACCESS,
    look_only: bool = False,
) -> Target:
    """The repository as it is now. Raises ``PushRefused`` if this user cannot push there.

    With ``look_only`` no token is needed. Without a token, rights are unknown, and a private
    repository seems not to exist.
    """
    if create_pr and revision is not None:
        raise PushRefused("a pull request starts from the main branch; drop --revision")
    require_token(access)
    try:
        return _target(repo_id, private, revision, create_pr, access, look_only)
    except EnjoyLNError:
        raise
    except Exception as error:  # any error of huggingface_hub and its HTTP library
        raise refusal(error, repo_id) from error


def _target(
    repo_id: str,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    access: HubAccess,
    look_only: bool,
) -> Target:
    from huggingface_hub import HfApi, constants, errors, get_token
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo_id)
    api = HfApi(token=access.token)
    anonymous = look_only and not (access.token or get_token())
    who = {"name": ""} if anonymous else api.whoami()
    if "/" not in repo_id and anonymous:
        raise PushRefused(f"{repo_id!r} has no owner; write owner/{repo_id}, or pass --token")
    repo_id = repo_id if "/" in repo_id else f"{who['name']}/{repo_id}"
    url = without_credentials(f"{constants.ENDPOINT}/{repo_id}")
    made = revision is not None
    new = Target(repo_id, url, who["name"], False, bool(private), revision, create_pr, made)
    try:
        known = api.model_info(repo_id)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        _require_rights(new, who)
        _require_no_pull(new)
        return new
    found = replace(new, exists=True, private=bool(known.private), commit=str(known.sha))
    _require_rights(found, who)
    _require_kind(found, private)
    if revision is not None:
        try:
            at = api.model_info(repo_id, revision=revision)
            found = replace(found, new_branch=False, commit=str(at.sha))
        except errors.RevisionNotFoundError:
            _require_no_pull(found)
    pulls = own_pulls(found, access) if create_pr and found.user else frozenset()
    return replace(found, there=_files(api, found), pulls=pulls)


def _files(api: Any, at: Target) -> dict[str, tuple[str, str]]:
    from huggingface_hub import RepoFile

    return {
        entry.path: ("sha256", entry.lfs.sha256) if entry.lfs else ("sha1", entry.blob_id)
        for entry in api.list_repo_tree(at.repo_id, recursive=True, revision=at.commit)
        if isinstance(entry, RepoFile)
    }


def own_pulls(to: Target, access: HubAccess) -> frozenset[str]:
    """The pull requests that the user has opened, as revisions: ``refs/pr/1``."""
    from huggingface_hub import HfApi

    found = HfApi(token=access.token).get_repo_discussions(
        to.repo_id, author=to.user, discussion_type="pull_request"
    )
    return frozenset(f"{PULLS}{pull.num}" for pull in found)


# What is refused.


def _require_rights(to: Target, who: Mapping[str, Any]) -> None:
    """Raises ``PushRefused`` if ``who`` (the Hub's ``whoami``) says that the user may not write."""
    from huggingface_hub import constants

    if to.exists and (to.create_pr or (to.revision or "").startswith(PULLS)):
        return
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise PushRefused(
            f"the token may only read; create one that may write to {to.repo_id} at "
            f"{without_credentials(constants.ENDPOINT)}/settings/tokens and pass it as --token, or "
            "run `hf auth login` with it"
        )
    owner, name = to.repo_id.split("/")
    orgs = {org["name"].lower(): org for org in who.get("orgs", ())}
    own = f"push to {to.user}/{name}"
    own += ", or open a pull request with --create-pr" if to.exists else ""
    if role == "write" and "orgs" in who and owner.lower() not in {to.user.lower(), *orgs}:
        raise PushRefused(
            f"{to.user} may not write to {to.repo_id}: {to.user} is not a member of {owner}; {own}"
        )
    org = orgs.get(owner.lower(), {})
    if not to.exists and org.get("roleInOrg") == "read" and not org.get("resourceGroups"):
        raise PushRefused(
            f"{to.user} may only read in {owner}, and cannot create {to.repo_id}; {own}, or ask "
            f"{owner} for write access"
        )


def _require_no_pull(to: Target) -> None:
    """Raises ``PushRefused`` if the push needs a pull request or repository that does not exist."""
    if (to.revision or "").startswith(PULLS):
        raise PushRefused(f"{to.repo_id} has no {to.revision}; see {to.url}/discussions")
    if to.create_pr and not to.exists:
        raise PushRefused(
            f"there is no {to.repo_id}, and a pull request needs an existing repository; push "
            "without --create-pr"
        )


def _require_kind(found: Target, private: bool | None) -> None:
    if private is None or private == found.private:
        return
    is_so, flag = ("private", "--no-private") if found.private else ("public", "--private")
    raise PushRefused(
        f"{found.repo_id} is {is_so}, and {flag} applies to new repositories only; drop it, name "
        f"another repository, or change this one at {found.url}/settings first"
    )


def refusal(error: Exception, repo_id: str, again: str = AGAIN) -> PushRefused:
    """The error in one line, by the Hub's answer, which may be wrapped in other exceptions.

    ``again`` says how to continue; it is added if pushing again may help.
    """
    from huggingface_hub import constants, errors

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    answers = [one for one in causes if isinstance(one, errors.HfHubHTTPError)]
    response = getattr(answers[0], "response", None) if answers else None
    status = getattr(response, "status_code", None)
    said = getattr(response, "headers", {}).get("X-Error-Message") or str(causes[-1])
    first = " ".join(first_line(said).split())
    if any(isinstance(one, errors.LocalTokenNotFoundError) for one in causes):
        return PushRefused("pushing needs a token; run `hf auth login` or pass --token")
    if any(isinstance(one, errors.OfflineModeIsEnabled) for one in causes):
        return PushRefused("HF_HUB_OFFLINE is set; go online to push")
    if any(isinstance(one, errors.HFValidationError) for one in causes):
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
    if any(isinstance(one, errors.HTTPError) for one in causes):
        kind = type(causes[-1]).__name__
        return PushRefused(f"{constants.ENDPOINT} cannot be reached ({kind}: {first}); {again}")
    return PushRefused(f"the upload failed: {type(causes[-1]).__name__}: {first}; {again}")

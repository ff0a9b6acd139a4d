"""Download models from the Hub: which files, and what its error responses mean.

A broken connection is resumed. If a run fails, files that are complete stay in the cache.
"""

from __future__ import annotations

import glob
from pathlib import Path

from enjoyln_cli.checkpoint.file_roles import (
    CONFIG,
    WEIGHTS,
    comes_along,
    shards_in_index,
    weights_among,
)
from enjoyln_cli.checkpoint.model_name import similar
from enjoyln_cli.checkpoint.open_options import OpenOptions, access_keywords
from enjoyln_cli.errors import EnjoyLNError, ModelNotFound, UnsupportedModel
from enjoyln_cli.text import first_line


def snapshot(model: str, opening: OpenOptions, *, weights: bool) -> Path:
    """Download a model; returns its cache directory, which is named after the commit.

    Without ``weights`` only ``config.json`` and code that it names are downloaded; with ``weights``
    all files of the checkpoint. Raises as ``open_source`` does.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    why = why_unreachable()
    fetch = {**access_keywords(opening), "local_files_only": bool(why)}
    problem = "is not in the cache"
    try:
        path = Path(hf_hub_download(model, CONFIG, revision=opening.revision, **fetch)).parent
        if b'"auto_map"' in (path / CONFIG).read_bytes():
            snapshot_download(model, revision=path.name, allow_patterns=["*.py"], **fetch)
        if not weights:
            return path
        problem = "is in the cache without its weights"
        names = _names(model, path, opening, is_reachable=not why)
        first = weights_among(names, model)
        shards: tuple[str, ...] = ()
        if first.endswith(".json"):
            index = hf_hub_download(model, first, revision=path.name, **fetch)
            shards = shards_in_index(Path(index))[0]
        along = {first, *(name for name in names if comes_along(name))}
        patterns = [glob.escape(name) for name in sorted({*along, *shards})]
        snapshot_download(model, revision=path.name, allow_patterns=patterns, **fetch)
        return path
    except EnjoyLNError:
        raise
    except errors.LocalEntryNotFoundError as error:
        if isinstance(answer := error.__cause__, errors.HfHubHTTPError):
            raise _hub_error(answer, model, opening) from answer
        cause = error.__cause__ or error
        raise _not_cached(model, problem, why or _no_answer(cause), opening) from error
    except Exception as error:  # by huggingface_hub, its HTTP library, or the cache's disk
        raise _hub_error(error, model, opening) from error


def why_unreachable() -> str:
    """Why the Hub cannot be reached, found by one request; empty if it answers.

    ``huggingface_hub`` itself would ask six times, which takes half a minute.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.HTTPError as error:
        return _no_answer(error)
    return ""


def _no_answer(error: BaseException) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {first_line(error)})"


def _names(model: str, path: Path, opening: OpenOptions, *, is_reachable: bool) -> list[str]:
    """The files of a commit; without the Hub, the files in its cache directory ``path``."""
    from huggingface_hub import HfApi, errors

    if is_reachable:
        return HfApi(token=opening.token).list_repo_files(model, revision=path.name)
    names = [entry.name for entry in path.iterdir()]
    if not set(names) & set(WEIGHTS):
        raise errors.LocalEntryNotFoundError("no weights")
    return names


def cached_models(opening: OpenOptions) -> list[str]:
    """The Hub ids of the models in the cache."""
    from huggingface_hub import constants

    folder = Path(opening.cache_dir or constants.HF_HUB_CACHE)
    names = (path.name.split("--") for path in folder.glob("models--*"))
    return ["/".join(parts) for _, *parts in names]


def _not_cached(model: str, problem: str, why: str, opening: OpenOptions) -> ModelNotFound:
    hint = similar(model, cached_models(opening)) or ": check it, or go online"
    return ModelNotFound(f"{model} {problem}, and {why}; no directory has this name either{hint}")


def _hub_error(error: Exception, model: str, opening: OpenOptions) -> EnjoyLNError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    first = first_line(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.GatedRepoError():
            return ModelNotFound(
                f"{model} is gated: accept its terms at {page}, then run `hf auth login` or pass "
                "--token"
            )
        case errors.RevisionNotFoundError():
            return ModelNotFound(
                f"{model} has no revision {opening.revision!r}; see {page}/tree/main"
            )
        case errors.DisabledRepoError():
            return ModelNotFound(f"access to {model} is disabled by the Hub; see {page}")
        case errors.RepositoryNotFoundError():
            return ModelNotFound(
                f"there is no directory {model} and no such model on the Hub; for a "
                f"private model run `hf auth login` or pass --token"
                f"{similar(model, cached_models(opening))}"
            )
        case errors.HfHubHTTPError() if status in (401, 403):
            return ModelNotFound(
                f"the Hub refuses access to {model} ({status}); run `hf auth login` or pass a "
                "--token that may read it"
            )
        case errors.HfHubHTTPError() if status is not None and (status == 429 or status >= 500):
            return ModelNotFound(f"the Hub cannot serve {model} now ({status}); try again later")
        case errors.EntryNotFoundError():
            return UnsupportedModel(f"{model} has no {CONFIG} on the Hub; see {page}/tree/main")
        case errors.HFValidationError():
            return ModelNotFound(f"there is no directory {model}, and it is no Hub id: {first}")
    return ModelNotFound(f"{model} cannot be fetched: {type(error).__name__}: {first}")

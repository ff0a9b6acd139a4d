"""Where a model comes from: a directory or a Hub id, to a local directory with its config.

What is downloaded is only what is needed: the config alone for a report, everything but other
frameworks' weights for a fold.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import AlreadyFolded, ModelNotFound, UnsupportedModel

FOREIGN_WEIGHTS = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "*.gguf",
    "*.npz", "onnx/*", "coreml/*", "openvino/*", "openvino_*",
)  # fmt: skip
CONFIG = "config.json"


@dataclass(frozen=True)
class Source:
    """A model's files on this machine."""

    model: str
    """As the user named it: a Hub id or a path."""
    path: Path
    revision: str | None
    """The commit for a Hub id, ``None`` for a directory."""


def open_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = False,
) -> Source:
    """The directory of a model; a Hub id is downloaded, or found in the cache.

    With ``weights=False`` only ``config.json`` is fetched. Raises ``ModelNotFound``.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Source(model, path, None)
    if path.exists():
        raise ModelNotFound(f"{model} is a file; name the directory that holds the model")
    if _looks_like_a_path(model):
        raise ModelNotFound(f"{model}: no such directory{_similar(path)}")
    return _download(model, revision, token, cache_dir, weights)


def _looks_like_a_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1


def _similar(path: Path) -> str:
    parent = path.parent
    names = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names)
    return f"; did you mean {parent / near[0]}?" if near else ""


def _download(
    model: str,
    revision: str | None,
    token: str | None,
    cache_dir: str | Path | None,
    weights: bool,
) -> Source:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import disable_progress_bars

    place: dict[str, Any] = {"revision": revision, "token": token, "cache_dir": cache_dir}
    try:
        config = Path(hf_hub_download(model, CONFIG, **place))
        if not weights:
            return Source(model, config.parent, config.parent.name)
        skip = list(FOREIGN_WEIGHTS)
        try:
            files = HfApi(token=token).list_repo_files(model, revision=revision)
            if any(name.endswith(".safetensors") for name in files):
                skip += ["*.bin", "*.pt", "*.pth"]
        except (hub.OfflineModeIsEnabled, OSError):
            pass  # offline: the snapshot in the cache is what there is
        disable_progress_bars()
        folder = Path(snapshot_download(model, ignore_patterns=skip, **place))
        return Source(model, folder, folder.name)
    except hub.GatedRepoError:
        _fail(model, "is gated: accept its conditions on the Hub, then run `hf auth login`")
    except hub.RepositoryNotFoundError:
        hint = _similar(Path(model))
        _fail(model, f"is neither a directory nor a Hub repository you can read{hint}")
    except hub.RevisionNotFoundError:
        _fail(model, f"has no revision {revision}")
    except hub.LocalEntryNotFoundError:
        _fail(model, "is neither a directory nor in the cache, and the Hub cannot be reached")
    except hub.EntryNotFoundError:
        _fail(model, f"has no {CONFIG}")
    except hub.HFValidationError:
        _fail(model, f"is neither a directory nor a valid Hub id{_similar(Path(model))}")
    except (hub.HfHubHTTPError, OSError) as error:
        first = str(error).strip().split("\n")[0][:200]
        _fail(model, f"could not be downloaded: {first}")
    raise AssertionError("every branch above returns or raises")


def _fail(model: str, what: str) -> None:
    raise ModelNotFound(f"{model} {what}") from None


def raw_config(source: Source) -> dict[str, Any]:
    """``config.json`` as it stands. Raises ``UnsupportedModel``."""
    path = source.path / CONFIG
    if not path.is_file():
        raise UnsupportedModel(f"{source.path} has no {CONFIG}, so it is no transformers model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path} is not JSON: {str(error)[:120]}") from None
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path} holds a {type(config).__name__}, not a JSON object")
    return config


def load_config(source: Source, trust_remote_code: bool = False) -> Any:
    """The transformers config object. Raises ``UnsupportedModel``."""
    raw = raw_config(source)
    require_supported(raw, str(source.path / CONFIG), trust_remote_code)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # a config can be wrong in as many ways as there are models
        first = str(error).strip().split("\n")[0][:200]
        raise UnsupportedModel(f"{source.path / CONFIG} cannot be used: {first}") from error


def require_supported(raw: Mapping[str, Any], where: str, trust_remote_code: bool) -> None:
    """Refuse quantised models, unknown model types, and custom code that nobody vouched for."""
    from transformers import CONFIG_MAPPING

    if raw.get("quantization_config") is not None:
        raise UnsupportedModel(f"{where}: the checkpoint is quantised; fold the original instead")
    if raw.get("auto_map"):
        if not trust_remote_code:
            raise UnsupportedModel(
                f"{where}: the model brings its own code; read it, then pass --trust-remote-code"
            )
        return
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UnsupportedModel(f"{where} has no model_type; transformers cannot tell what it is")
    if kind not in CONFIG_MAPPING:
        near = difflib.get_close_matches(kind, list(CONFIG_MAPPING.keys()))
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UnsupportedModel(f"{where}: transformers has no model type {kind!r}{hint}")


def require_unfolded(config: Any) -> None:
    """Refuse what carries an enjoyln marker; ``config`` is raw or a transformers config."""
    found = "enjoyln" in config if isinstance(config, Mapping) else hasattr(config, "enjoyln")
    if found:
        raise AlreadyFolded(
            "the checkpoint is folded already (config.json has an enjoyln entry); "
            "fold the model that it was made from"
        )

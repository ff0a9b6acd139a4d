"""Does the ``config.json`` of a result describe the original's model?

Decides which settings may differ:

* the model's origin (``ORIGIN``) and the ``enjoyln`` entry;
* settings that a fold changes: the sizes of widened MLPs, the flags of untied weights, the eps of
  norms whose input is held at another scale;
* the dtype, if the weights are stored in it;
* the class names, if the plan is proven for these classes.

All other settings can change the function (an epsilon, an activation), and 16-bit outputs may not
show it. Both files are parsed by the config class, which fills in defaults. So a setting that is
left out in one of them counts as its default.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from enjoyln_cli.analysis.untying import FLAG
from enjoyln_cli.checkpoint.config import MARKER, with_entries
from enjoyln_cli.checkpoint.marker import Marker
from enjoyln_cli.plan.plan import Plan, Setting, size_settings
from enjoyln_cli.plan.schema import ABSENT, differences
from enjoyln_cli.text import dtype_name, listed_briefly

ORIGIN = ("_name_or_path", "_commit_hash", "transformers_version")
DTYPES = ("dtype", "torch_dtype")


def differing_settings(
    config_class: Any,
    original: Mapping[str, Any],
    folded: Mapping[str, Any],
    plan: Plan,
    marker: Marker,
    dtype: str,
) -> str | None:
    """The settings that differ and must not, in one sentence; ``None`` if there are none.

    ``original`` and ``folded`` are the parsed files. ``dtype`` is the name of the dtype in which
    the result is stored.
    """
    before = _read(config_class, original)
    settings = (s for s in plan.settings if _unties(s) or _scales_eps(s, before, plan))
    allowed = {one.name: one.value for one in (*size_settings(plan.widened), *settings)}
    expected = _read(config_class, with_entries(original, allowed))
    wrong = []
    for keys, want, got in differences(expected, _read(config_class, folded)):
        path = ".".join(keys)
        if not (_same(want, got) or _may_differ(path, got, marker, dtype)):
            wrong.append(f"{path} ({_text_of(got)}, in the original {_text_of(want)})")
    if not wrong:
        return None
    return f"config.json differs from the original's in {listed_briefly(wrong)}"


def _unties(setting: Setting) -> bool:
    return setting.name.rpartition(".")[2] == FLAG and setting.value is False


def _scales_eps(setting: Setting, before: Mapping[str, Any], plan: Plan) -> bool:
    """Whether it is the eps of norms whose input the plan holds at another scale."""
    value: Any = before
    for key in setting.name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    norms = (norm for stream in plan.scaled for norm in stream.norms)
    return any((norm.eps, norm.value) == (value, setting.value) for norm in norms)


def _read(config_class: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    entries = copy.deepcopy({key: value for key, value in raw.items() if key != MARKER})
    read: dict[str, Any] = config_class.from_dict(entries).to_dict()
    return read


def _same(a: Any, b: Any) -> bool:
    if a is ABSENT or b is ABSENT:
        return a is b or None in (a, b)
    return bool(a == b) or _json(a) == _json(b)


def _may_differ(path: str, got: Any, marker: Marker, dtype: str) -> bool:
    key = path.rpartition(".")[2]
    if key in ORIGIN or path == MARKER or path.startswith(f"{MARKER}."):
        return True
    if key in DTYPES:
        return got in (None, ABSENT) or dtype_name(got) == dtype
    if path == "architectures":
        return got in (None, ABSENT) or set(got) <= {marker.plan.model_class, *marker.plan.classes}
    return False


def _json(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)


def _text_of(value: Any) -> str:
    return "not set" if value is ABSENT else f"{_json(value):.60}"

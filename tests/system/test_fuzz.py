"""Untrusted files are read, or refused in one line, within limits of time and memory.

There are about 300 cases, the same in every run. With ``ENJOYLN_FUZZ=40`` there are about 11,000,
and they differ from run to run.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_models import CHECKPOINTS
from stored_files import opened

from enjoyln_cli.checkpoint.marker import Marker, proof_of, read_marker
from enjoyln_cli.checkpoint.reader import read_tensor
from enjoyln_cli.checkpoint.result_files import PLAN_FILE
from enjoyln_cli.conversion import fold
from enjoyln_cli.conversion.open_and_analyse import open_and_analyse
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.recipe.read import parse_recipe
from enjoyln_cli.recipe.stored_plan import read_plan

TIMES = int(os.environ.get("ENJOYLN_FUZZ", "1"))
LONGEST = 30
"""Longest processor time of any case, in seconds."""
SECONDS = 5 if TIMES > 1 else LONGEST
"""Time limit of most cases; lower if no other tests run at the same time."""
MEMORY = 1 << 30

FAMILIES = sorted(path.name for path in CHECKPOINTS.iterdir() if (path / "config.json").is_file())
CONFIGS = {name: json.loads((CHECKPOINTS / name / "config.json").read_text()) for name in FAMILIES}
RECIPES = [path.read_text() for path in sorted((CHECKPOINTS.parents[1] / "recipes").glob("*.yaml"))]

"""Every prefix of layers in the recipes, with a number of layers."""


def cases(count: int) -> Callable[..., Any]:
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class Slow(BaseException):
    """Raised when a case has used up its time. The tested code does not catch it."""


def in_bounds(case: Callable[[], object], seconds: float = SECONDS) -> None:
    """Check that ``case`` succeeds or is refused in one line, within the limits.

    Other programs can slow down the machine, so a case that takes too long is tried again.
    """
    held = peak()
    if not any(ends_in_time(case, seconds) for _ in range(3)):
        pytest.fail(f"a case takes more than {seconds} s, each of three times")
    assert peak() - held < MEMORY


def ends_in_time(case: Callable[[], object], seconds: float) -> bool:
    """Whether ``case`` ends in time. ``Slow`` is raised repeatedly: some libraries swallow it."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Slow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        case()
    except EnjoyLNError as error:
        assert str(error).isprintable()
        assert len(str(error)) < 3000
    except Slow:
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return True


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Replacements for a value: of a wrong type, out of range, too long, or nested.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**12, -(10**12), 10**30]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["..", "/etc/passwd", "a\nb", "\x1b[2J", "gelu", "F32", "A" * 5000, "{i}"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in nested lists and mappings."""
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value) if isinstance(value, list) else parts
    for key, item in parts:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, whole: Any) -> Any:
    """A copy of nested values, with some of them replaced, removed, or under another key."""
    copied = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths_in(copied))
        if not places:
            break
        *outer, key = draw(st.sampled_from(places))
        holder = copied
        for step in outer:
            holder = holder[step]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"])):
            case "replace":
                holder[key] = draw(VALUES)
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=30))] = holder.pop(key)
            case _:
                del holder[key]
    return copied


@st.composite
def edited(draw: st.DrawFn, text: bytes) -> bytes:
    """A copy of the bytes, with some of them changed, removed or inserted."""
    data = bytearray(text)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([0, 1, 1, 1, 8, 100]))
        data[at : at + length] = draw(st.binary(max_size=12))
    return bytes(data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HEADER = {
    "__metadata__": {"format": "pt"},
    "h.0.ln.weight": entry("F32", [4], 0, 16),
    "h.0.mlp.weight": entry("BF16", [3, 4], 16, 40),
    "position_ids": entry("I64", [1, 1], 40, 48),
}
DATA = bytes(range(48))


def file_of(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


HEADERS = damaged(HEADER).map(lambda header: file_of(json.dumps(header).encode(), DATA))
FILES = HEADERS | edited(file_of(json.dumps(HEADER).encode(), DATA)) | st.binary(max_size=80)


@pytest.mark.slow
@cases(60)
@given(content=FILES)
def test_safetensors_files(folder_of_cases: Path, content: bytes) -> None:
    (folder_of_cases / "config.json").write_text("{}")
    (folder_of_cases / "model.safetensors").write_bytes(content)

    def case() -> None:
        found = opened(folder_of_cases)
        for name, stored in found.tensors.items():
            assert tuple(read_tensor(found, name).shape) == stored.shape

    in_bounds(case)


INDEX = {
    "metadata": {"total_size": 48},
    "weight_map": {name: "model-00001-of-00001.safetensors" for name in list(HEADER)[1:]},
}


@pytest.mark.slow
@cases(30)
@given(
    index=damaged(INDEX).map(lambda i: json.dumps(i).encode()) | edited(json.dumps(INDEX).encode())
)
def test_indices(folder_of_cases: Path, index: bytes) -> None:
    shard = file_of(json.dumps(HEADER).encode(), DATA)
    (folder_of_cases / "model-00001-of-00001.safetensors").write_bytes(shard)
    (folder_of_cases / "model.safetensors.index.json").write_bytes(index)

    def case() -> None:
        found = opened(folder_of_cases)
        assert set(found.shards) == {"model-00001-of-00001.safetensors"}

    in_bounds(case)


@pytest.mark.slow
@cases(60)
@given(text=st.sampled_from(RECIPES).flatmap(lambda text: changed_recipes(text)))
def test_recipes(text: str) -> None:
    def case() -> None:
        parse_recipe(text, where="theirs.yaml")

    in_bounds(case)


def changed_recipes(text: str) -> st.SearchStrategy[str]:
    whole = damaged(yaml.safe_load(text)).map(lambda data: yaml.safe_dump(data))
    return whole | edited(text.encode()).map(lambda data: data.decode(errors="replace"))


@pytest.mark.slow
@cases(40)
@given(config=st.sampled_from(FAMILIES).flatmap(lambda name: damaged(CONFIGS[name])))
def test_configs(folder_of_cases: Path, config: Any) -> None:
    """A config without a number of layers gets the default of up to 24, and so more time."""
    (folder_of_cases / "config.json").write_text(json.dumps(config))
    seconds = SECONDS if config.keys() & {"num_hidden_layers", "n_layer"} else LONGEST
    in_bounds(lambda: open_and_analyse(str(folder_of_cases)), seconds)


GROUP = {"start": 0, "outer": 1, "size": 8, "inner": 1}
MARKER = {
    "version": 1,
    "source": "gpt2",
    "revision": None,
    "plan": {
        "model_type": "gpt2",
        "model_class": "GPT2LMHeadModel",
        "classes": ["GPT2LMHeadModel"],
        "norms": [{"norm": "transformer.h.0.ln_1", "status": "in_weights"}],
        "centred_weights": [
            {"parameter": "transformer.wpe.weight", "axis": {"dim": 0, **GROUP}},
            {
                "parameter": "transformer.h.0.mlp.c_proj.weight",
                "axis": {"dim": 1, **GROUP},
                "scale": {"parameter": "transformer.scale"},
            },
        ],
        "subtractions": [
            {"module": "transformer.wte", "place": "output", "axis": {"dim": -1, **GROUP}}
        ],
        "widened": [
            {
                "first": {"parameter": "a", "dim": 1},
                "bias": None,
                "second": {"parameter": "b"},
                "size": 4,
                "to": 8,
                "features": 8,
                "attribute": "n_inner",
                "subtracts": True,
            }
        ],
        "fused": [{"norm": "transformer.h.0.ln_1", "bias": "transformer.h.0.ln_1.bias"}],
        "untied": [{"parameter": "lm_head.weight", "source": "transformer.wte.weight"}],
        "entry_inputs": ["inputs_embeds"],
        "covered": {
            "forms": [
                {
                    "owner": "Net",
                    "arguments": [["x", {"kind": "float", "sizes": ["a", "b", 16]}]],
                    "conditions": ["b <= 64"],
                }
            ],
            "attributes": [["Net", "flag", False]],
        },
    },
    "tool": "enjoyln 0.1.0",
}


@cases(30)
@given(entry=damaged(MARKER))
def test_markers(entry: Any) -> None:
    """A damaged marker gets the digest of its content; otherwise its digest would refuse it."""

    def case() -> None:
        signed = {**entry, "proof": proof_of(entry)} if isinstance(entry, dict) else entry
        assert isinstance(read_marker({"enjoyln": signed}), Marker)

    in_bounds(case)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import everything before the first case, so that imports do not count for its limits."""
    open_and_analyse(str(CHECKPOINTS / FAMILIES[0]))


@pytest.fixture
def folder_of_cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One directory for all cases of a test; each case overwrites the files of the last case."""
    folder = tmp_path_factory.mktemp("cases")
    yield folder
    shutil.rmtree(folder)


@cases(30)
@given(data=st.data())
def test_plans(kept: Path, data: st.DataObject) -> None:
    path = kept / PLAN_FILE
    good = path.read_text()
    try:
        path.write_text(json.dumps(data.draw(damaged(json.loads(good)))))
        in_bounds(lambda: read_plan(opened(kept), None))
    finally:
        path.write_text(good)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kept") / "out"
    fold.convert(CHECKPOINTS / "opt", out, verify=False)
    return out

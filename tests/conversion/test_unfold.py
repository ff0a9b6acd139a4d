"""A fold that keeps the means can be undone bit for bit, whatever it did; what has changed is not
restored but refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import good
from commands import refused as refused_by_command
from edit_cases import EDITS as USUAL_EDITS
from edit_cases import tensors
from fold_cases import CONFIG, EDITS, gathered, same, sharded, state, store, written
from live_models import CHECKPOINTS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_files import contents, opened

from enjoyln_cli import fold, unfold
from enjoyln_cli.checkpoint.result_files import FILE, FOLDER
from enjoyln_cli.conversion.unfold import restore
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, OutputError
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edits import Bake, Edit
from enjoyln_cli.plan.plan import NamedParameter, Options, Plan, Verdict, Writer
from enjoyln_cli.rewrite import archive, edit_pieces, tensor_parts
from enjoyln_cli.rewrite.archive import Recorder, open_archive, save_archive
from enjoyln_cli.rewrite.directory import fold_checkpoint
from enjoyln_cli.rewrite.shard_layout import plain_layout
from enjoyln_cli.rewrite.writer import write_shards

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def folded(source: Path, out: Path, scale: bool = False, **options: Any) -> Path:
    """``source`` with every edit of ``EDITS``, the means kept unless ``options`` say otherwise."""
    shapes = opened(source).tensors
    merged = NamedParameter("ln.weight", "ln.weight") if scale else None
    writers = [
        Writer(name, name, axis, shapes[name].shape, None, merged if name == "out.weight" else None)
        for name, axes in EDITS.items()
        for axis in axes
    ]
    norms = (Verdict("ln_1", "static"), Verdict("ln_f", "kept", reason="the head reads it"))
    plan = Plan("gpt2", "GPT2Model", ("GPT2Model",), norms, tuple(writers), ())
    options = {"recipe_text": "a: recipe\n", "keep_means": True, **options}
    fold_checkpoint(opened(source), plan, out, **gathered(options))
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three shards in ``model``, and its fold in ``out``."""
    folder = tmp_path_factory.mktemp("made")
    folded(sharded(folder), folder / "out")
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "model", tmp_path / "model")


@pytest.fixture
def out(made: Path, source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made / "out", tmp_path / "out")


@pytest.fixture
def back(tmp_path: Path) -> Iterator[Path]:
    """A place for the original; whatever the test did, nothing half-written lies beside it."""
    yield tmp_path / "back"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.fixture(params=[1 << 22, 200, 40], ids=["whole", "parts", "small parts"])
def divided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part, and in many."""
    monkeypatch.setattr(archive, "PART", request.param)
    monkeypatch.setattr(tensor_parts, "PART", request.param)
    monkeypatch.setattr(edit_pieces, "PIECE", min(edit_pieces.PIECE, request.param))
    monkeypatch.setattr(edit_pieces, "RUN", min(edit_pieces.RUN, request.param // 10))


# The way back


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("dtype", "kind", "scale"), [(torch.float32, "sharded", 0), (torch.bfloat16, "single", 1)]
)
def test_every_file_comes_back(
    tmp_path: Path, back: Path, dtype: torch.dtype, kind: str, scale: int
) -> None:
    held = state(dtype)
    store(tmp_path / "model", held, kind)
    (tmp_path / "model" / "vocabulary.txt").write_bytes(b"a\r\n\xff")
    out = folded(tmp_path / "model", tmp_path / "out", bool(scale))
    assert not any(same(written(out)[name], held[name]) for name in EDITS)
    result = unfold(out, back)
    assert contents(back) == contents(tmp_path / "model")
    assert (result.restored, result.tensors, result.back) == (True, len(held), back)
    assert result.bytes_written == sum(map(len, contents(back).values()))


def test_other_files_come_along(source: Path, out: Path, back: Path) -> None:
    assert (out / FOLDER / FILE).is_file()
    told: list[tuple[int, int]] = []
    unfold(out, back, jobs=2, on_progress=lambda done, total: told.append((done, total)))
    assert contents(back) == contents(source)
    size = sum(tensor.nbytes for tensor in state(torch.float32).values())
    assert (told[0], told[-1]) == ((0, size), (size, size))


def test_the_original_layout_comes_back_from_another(source: Path, tmp_path: Path) -> None:
    out = folded(source, tmp_path / "out", max_shard_size=3_000_000)
    assert set(contents(out)) != set(contents(source))
    unfold(out, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("kind", ["bin", "sharded bin"])
def test_pickles_come_back_as_safetensors(tmp_path: Path, kind: str) -> None:
    held = state(torch.float16)
    store(tmp_path / "model", held, kind)
    out = folded(tmp_path / "model", tmp_path / "out")
    unfold(out, tmp_path / "back")
    found = written(tmp_path / "back")
    assert set(found) == set(held)
    assert all(same(found[name], tensor) for name, tensor in held.items())
    weights = {name for name in contents(out) if "model" in name and "/" not in name}
    assert set(contents(tmp_path / "back")) == {*weights, "config.json"}


EVERY_EDIT = {
    **USUAL_EDITS,
    "a norm in a table": ("w", Edit(bake=Bake("w", "g", "v", 1e-5), axes=(Axis(1, 0, 1, 26, 1),))),
    "a level": ("g", Edit(level=Bake("w", "g", "v", 1e-5))),
}
IN_TURN = [(case, DTYPES[at % len(DTYPES)]) for at, case in enumerate(EVERY_EDIT)]
"""Each edit in one of the dtypes."""


@pytest.mark.usefixtures("divided")
@pytest.mark.parametrize(("case", "dtype"), IN_TURN, ids=str)
def test_every_edit_can_be_undone(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    name, edit = EVERY_EDIT[case]
    changes = {name: edit, "v": Edit(fill=1.0)}
    if edit.source:
        changes["w"] = Edit(axes=(Axis(0, 0, 1, 37, 1),))
    model, out, back = (tmp_path / name for name in ("model", "out", "back"))
    store(model, tensors(dtype), "single")
    out.mkdir(), back.mkdir(), (out / FOLDER).mkdir()  # noqa: B018
    with (tmp_path / "spool").open("w+b") as spool:
        recorder = Recorder(opened(model), changes, spool)
        write_shards(opened(model), changes, out, recorder=recorder)
        headers, index = plain_layout(opened(model))
        save_archive(recorder, out / FOLDER, {"mine": 1}, headers, index)
    (out / "config.json").write_text("{}")
    restore(opened(out), open_archive(out / FOLDER, {"mine": 1}), changes, back)
    assert contents(back) == {"model.safetensors": (model / "model.safetensors").read_bytes()}


def test_what_a_copy_holds_needs_no_corrections(tmp_path: Path) -> None:
    """An untied head is the embedding as it was."""
    store(tmp_path / "model", tensors(torch.bfloat16), "single")
    (tmp_path / "out").mkdir()
    edits = {"w": Edit(axes=(Axis(0, 0, 1, 37, 1),)), "head": Edit(source="w")}
    with (tmp_path / "spool").open("w+b") as spool:
        recorder = Recorder(opened(tmp_path / "model"), edits, spool)
        write_shards(opened(tmp_path / "model"), edits, tmp_path / "out", recorder=recorder)
        assert spool.seek(0, 2) == 0
    assert not recorder.originals
    assert set(written(tmp_path / "out")) == {*tensors(torch.bfloat16), "head"}


def test_values_that_no_arithmetic_keeps(tmp_path: Path, back: Path) -> None:
    """NaN with a payload beside what is centred, and zeros of both signs within."""
    held = state(torch.bfloat16)
    payloads = torch.tensor([0x7F81, 0x7FA5, -0x7D, 0x7F80, 0x7FFF], dtype=torch.int32)
    held["qkv.weight"].view(torch.int16)[600, :5] = payloads.to(torch.int16)
    held["out.weight"][:, 3] = torch.tensor([0.0, -0.0, 1e-40, 1.0] * 6)
    store(tmp_path / "model", held, "single")
    unfold(folded(tmp_path / "model", tmp_path / "out"), back)
    assert contents(back) == contents(tmp_path / "model")


def test_what_is_kept_does_not_depend_on_the_number_of_workers(
    source: Path, tmp_path: Path
) -> None:
    kept = [
        (folded(source, tmp_path / str(jobs), jobs=jobs) / FOLDER / FILE).read_bytes()
        for jobs in (1, 3)
    ]
    assert kept[0] == kept[1]


def test_what_is_kept_is_small_and_in_a_folder_that_nobody_loads(out: Path) -> None:
    assert set(contents(out / FOLDER)) == {FILE}
    with safe_open(out / FOLDER / FILE, "pt") as file:
        names = [name.partition("/") for name in file.offset_keys()]
    assert {name for kind, _, name in names if kind == "difference"} == set(EDITS)
    size = sum(tensor.nbytes for tensor in state(torch.float32).values())
    assert (out / FOLDER / FILE).stat().st_size < 0.12 * size


# Without kept means


def test_without_kept_means_the_marker_goes(source: Path, tmp_path: Path, back: Path) -> None:
    out = folded(source, tmp_path / "out", keep_means=False)
    assert FOLDER not in {name.partition("/")[0] for name in contents(out)}
    result = unfold(out, back)
    assert not result.restored
    assert json.loads((back / "config.json").read_text()) == CONFIG
    gone = ("config.json", "enjoyln_recipe.yaml", "enjoyln_plan.json")
    others = {name: text for name, text in contents(out).items() if name not in gone}
    assert others == {name: text for name, text in contents(back).items() if name != "config.json"}


# A whole model


def test_a_trained_checkpoint_by_command(tmp_path: Path, back: Path) -> None:
    source, out = tmp_path / "opt", tmp_path / "out"
    shutil.copytree(CHECKPOINTS / "opt", source)
    (source / "README.md").write_bytes(b"---\nlicense: mit\n---\r\n# Of the original\xff\n")
    stated = json.loads(good("fold", source, "-o", out, "--keep-means", "--json"))
    assert stated["verification"]["passed"]
    assert stated["bytes_kept"] == (out / FOLDER / FILE).stat().st_size
    assert "bit for bit" in good("unfold", out, "-o", back)
    assert contents(back) == contents(source)


def test_the_transformer_of_a_pipeline(tmp_path: Path, back: Path) -> None:
    whole = tmp_path / "pipeline"
    shutil.copytree(CHECKPOINTS / "opt", whole / "0_Transformer")
    kind = "sentence_transformers.models"
    listed = [(0, "0_Transformer", "Transformer"), (1, "1_Pooling", "Pooling")]
    modules = [{"idx": i, "name": str(i), "path": p, "type": f"{kind}.{t}"} for i, p, t in listed]
    (whole / "modules.json").write_text(json.dumps(modules))
    (whole / "1_Pooling").mkdir()
    (whole / "1_Pooling" / "config.json").write_text("{}")
    (whole / "README.md").write_text("# An encoder\n")
    fold(whole, tmp_path / "out", keep_means=True, verify=False)
    assert (tmp_path / "out" / "0_Transformer" / FOLDER / FILE).is_file()
    assert unfold(tmp_path / "out", back).restored
    assert contents(back) == contents(whole)


# Refusals: one line, and nothing left behind


def refused(words: str, out: Path, back: Path, kind: type[EnjoyLNError] = BadCheckpoint) -> None:
    with pytest.raises(kind, match=words) as caught:
        unfold(out, back)
    assert "\n" not in str(caught.value)
    assert kind is OutputError or not back.exists()


def test_what_was_not_folded(source: Path, back: Path) -> None:
    refused("was not folded: its config.json has no enjoyln entry", source, back)


def test_an_existing_place(source: Path, out: Path, back: Path) -> None:
    back.mkdir()
    (back / "mine").write_text("")
    refused("exists; .*--force", out, back, OutputError)
    assert (back / "mine").exists()
    unfold(out, back, force=True)
    assert contents(back) == contents(source)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["out.weight", "ids"])
def test_weights_that_were_changed_since(out: Path, back: Path, name: str) -> None:
    """One element, in a tensor that was centred or in one that was not."""
    (shard,) = (p for p in out.glob("*.safetensors") if name in load_file(p))
    held = load_file(shard)
    held[name].flatten()[7] += 1
    save_file(held, shard, metadata={"format": "pt"})
    refused(rf"{name} in {shard.name} is not what the fold wrote.*delete its folder", out, back)
    shutil.rmtree(out / FOLDER)
    assert not unfold(out, back).restored


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model", "options", "name"),
    [
        ("gpt2", {"merge": "affine"}, "transformer.h.1.ln_1.weight"),
        ("gpt2", {"untie": True}, "transformer.wte.weight"),
        ("bert", {"widen_mlp": True}, "bert.encoder.layer.0.output.dense.weight"),
    ],
    ids=["merged", "untied", "appended"],
)
def test_what_no_original_is_told_from_was_changed_since(
    tmp_path: Path, back: Path, model: str, options: dict[str, Any], name: str
) -> None:
    """Filled with ones or zeros, centred beside its copy, or in hidden units that were appended."""
    out = tmp_path / "out"
    fold(CHECKPOINTS / model, out, options=Options(**options), keep_means=True, verify=False)
    whole = load_file(out / "model.safetensors")
    whole[name][..., -1] += 0.5
    save_file(whole, out / "model.safetensors", metadata={"format": "pt"})
    refused(f"{name} .*is not what the fold wrote, .* changed since", out, back)


def test_weights_of_another_dtype_or_shape(out: Path, back: Path) -> None:
    shard = next(p for p in out.glob("*.safetensors") if "out.weight" in load_file(p))
    held = load_file(shard)
    weight = held["out.weight"]
    for change, words in (
        (weight.half(), "out.weight is stored as F16 .* changed since"),
        (
            weight[:, :-1].clone(),
            r"enjoyln_plan.json: .*\(out.weight: shape \[24, 95\] before the edit",
        ),
    ):
        save_file({**held, "out.weight": change}, shard)
        refused(words, out, back)


@pytest.mark.parametrize("at", [0.3, 0.999])
def test_a_kept_file_that_is_damaged(out: Path, back: Path, at: float) -> None:
    path = out / FOLDER / FILE
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)
    refused("original.safetensors is damaged: .*fold the source again", out, back)


def test_a_plan_that_was_changed_since(out: Path, back: Path) -> None:
    """A tensor is not taken for the original because the plan no longer lists its edit."""
    path = out / "enjoyln_plan.json"
    plan = json.loads(path.read_text())
    del plan["writers"][0]
    path.write_text(json.dumps(plan))
    refused("original.safetensors and the plan of this result disagree about", out, back)


def test_a_kept_file_that_is_cut_or_gone(out: Path, back: Path) -> None:
    path = out / FOLDER / FILE
    path.write_bytes(path.read_bytes()[:-9])
    refused("original.safetensors is damaged", out, back)
    path.unlink()
    refused("original.safetensors is missing", out, back)


def test_a_kept_file_of_another_fold(out: Path, tmp_path: Path, back: Path) -> None:
    store(tmp_path / "sibling", state(torch.float32, seed=1), "sharded")
    other = folded(tmp_path / "sibling", tmp_path / "other")
    shutil.copy(other / FOLDER / FILE, out / FOLDER / FILE)
    refused("belongs to the result of another fold", out, back)


def test_names_that_lead_out_of_the_directory(out: Path, back: Path, tmp_path: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    checkpoint = opened(tmp_path / "model")
    headers, index = plain_layout(checkpoint)
    (out / FOLDER / FILE).unlink()
    with (tmp_path / "spool").open("w+b") as spool:
        recorder = Recorder(checkpoint, {}, spool)
        (tmp_path / "other").mkdir()
        write_shards(checkpoint, {}, tmp_path / "other", recorder=recorder)
        save_archive(
            recorder,
            out / FOLDER,
            config["enjoyln"],
            headers,
            {"../evil.index.json": b"x", **index},
        )
    refused("not a plain file name", out, back)
    assert not (tmp_path / "evil.index.json").exists()


def test_a_kept_file_of_endless_depth(out: Path, back: Path) -> None:
    path = out / FOLDER / FILE
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"]["kept"] = "[" * 5000 + "]" * 5000
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
    refused("is damaged: RecursionError", out, back)


def test_another_dtype_is_not_kept(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be combined with --dtype"):
        folded(source, tmp_path / "out", dtype=torch.bfloat16)
    assert not (tmp_path / "out").exists()
    words = ("fold", source, "-o", "x", "--keep-means", "--dtype", "bfloat16")
    assert "--dtype" in refused_by_command(*words, status=2)

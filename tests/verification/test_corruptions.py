"""Every change of a result's files is found, whatever file it is in; untouched results pass."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from commands import enjoyln, good
from live_models import ROOT
from safetensors.torch import load_file, save_file
from stored_files import shallow

from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.publish.push import publishing_objection
from enjoyln_cli.rewrite.written_files import record_files, written_files

Corruption = Callable[[Path], object]
EMBEDDING = "transformer.wte.weight"
NUMBERS = "enjoyln_precisions.json"
TEXT = ("--text", ROOT / "LICENSE")
WRITER = "transformer.h.1.mlp.c_proj.weight"


def bytes_of(name: str, change: Callable[[bytearray], object]) -> Corruption:
    def corrupt(out: Path) -> None:
        data = bytearray(file_in(out, name).read_bytes())
        change(data)
        file_in(out, name).write_bytes(data)

    return corrupt


def file_in(out: Path, name: str) -> Path:
    """The largest file of this name, or pattern, in a result."""
    return max(out.rglob(name), key=lambda path: path.stat().st_size)


def json_of(name: str, change: Callable[[Any], object]) -> Corruption:
    def corrupt(out: Path) -> None:
        data = json.loads((out / name).read_text())
        change(data)
        (out / name).write_text(json.dumps(data, indent=2) + "\n")

    return corrupt


def tensors_of(change: Callable[[dict[str, torch.Tensor]], object]) -> Corruption:
    def corrupt(out: Path) -> None:
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})

    return corrupt


def deleted(name: str) -> Corruption:
    return lambda out: file_in(out, name).unlink()


def written(name: str, text: str) -> Corruption:
    return lambda out: (out / name).write_text(text)


def flip(at: float) -> Callable[[bytearray], object]:
    """Flips one bit at this fraction of a file."""

    def change(data: bytearray) -> None:
        data[int(at * len(data))] ^= 1

    return change


def swap_rows(tensor: torch.Tensor) -> None:
    tensor[[5, 70]] = tensor[[70, 5]]


def permute(vocabulary: dict[str, int]) -> None:
    """Exchanges the ids of two words."""
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def overwrite_weights(out: Path) -> None:
    """The first half of the program's largest weight takes the place of the second."""
    file = file_in(out, "*.onnx")
    program = onnx.load(file)
    weight = max(program.graph.initializer, key=lambda stored: len(stored.raw_data))
    weight.raw_data = 2 * weight.raw_data[: len(weight.raw_data) // 2]
    onnx.save(program, file)


ANY: dict[str, Corruption] = {
    "tokenizer permuted": json_of("tokenizer.json", lambda t: permute(t["model"]["vocab"])),
    "tokenizer without a merge": json_of("tokenizer.json", lambda t: t["model"]["merges"].pop()),
    "tokenizer normalises": json_of("tokenizer.json", lambda t: t.update(normalizer="Lowercase")),
    "tokenizer deleted": deleted("tokenizer.json"),
    "tokenizer truncated": bytes_of("tokenizer.json", lambda d: d.__delitem__(slice(9000, None))),
    "tokenizer of another class": json_of(
        "tokenizer_config.json", lambda t: t.update(tokenizer_class="BertTokenizer")
    ),
    "tokenizer config deleted": deleted("tokenizer_config.json"),
    "another vocabulary beside it": written("vocab.json", "{}"),
    "added tokens": written("added_tokens.json", '{"<x>": 3}'),
    "chat template": written("chat_template.jinja", "{{ messages }}"),
    "longest input": json_of("tokenizer_config.json", lambda t: t.update(model_max_length=8)),
    "config: epsilon": json_of("config.json", lambda c: c.update(layer_norm_epsilon=1e-3)),
    "config: activation": json_of("config.json", lambda c: c.update(activation_function="relu")),
    "config: end of text": json_of("config.json", lambda c: c.update(eos_token_id=3)),
    "config: a class": json_of("config.json", lambda c: c.update(architectures=["GPT2Model"])),
    "config: labels": json_of("config.json", lambda c: c.update(id2label={"0": "spam"})),
    "config: layout alone": bytes_of("config.json", lambda d: d.extend(b"\n")),
    "config truncated": bytes_of("config.json", lambda d: d.__delitem__(slice(50, None))),
    "config deleted": deleted("config.json"),
    "generation config: sampling": json_of(
        "generation_config.json", lambda g: g.update(do_sample=True, temperature=3.0)
    ),
    "generation config deleted": deleted("generation_config.json"),
    "code added": written("modeling_own.py", "print('hello')"),
    "file in a new folder": lambda out: shutil.copytree(out, out / "copy"),
    "record: a digest": json_of(
        "enjoyln_verify.json", lambda r: r["sha256"].update({"tokenizer.json": 64 * "0"})
    ),
    "record: an accepted file": json_of(
        "enjoyln_verify.json", lambda r: r.update(accepted={"tokenizer.json": 64 * "0"})
    ),
    "record: a number": json_of("enjoyln_verify.json", lambda r: r.update(storage_error=0.0)),
    "record: a verdict": json_of("enjoyln_verify.json", lambda r: r.update(passed=False)),
    "record without digests": json_of("enjoyln_verify.json", lambda r: r.pop("sha256")),
    "record truncated": bytes_of("enjoyln_verify.json", lambda d: d.__delitem__(slice(90, None))),
    "record deleted": deleted("enjoyln_verify.json"),
}  # fmt: skip

CONVERTED: dict[str, Corruption] = {
    "one bit of a weight": bytes_of("model.safetensors", flip(0.5)),
    "one bit of the last weight": bytes_of("model.safetensors", flip(0.99999)),
    "rows exchanged": tensors_of(lambda t: swap_rows(t[EMBEDDING])),
    "tensor scaled": tensors_of(lambda t: t[WRITER].mul_(1.001)),
    "tensor renamed": tensors_of(lambda t: t.update({f"{WRITER}s": t.pop(WRITER)})),
    "tensors exchanged": tensors_of(
        lambda t: t.update(
            {name: t[name.replace("ln_1", "ln_2")].clone() for name in t if ".ln_1." in name}
        )
    ),
    "tensor deleted": tensors_of(lambda t: t.pop("transformer.ln_f.bias")),
    "tensor added": tensors_of(lambda t: t.update(x=torch.ones(2))),
    "tensor of NaN": tensors_of(lambda t: t[EMBEDDING][3].fill_(torch.nan)),
    "weights in 16 bits": tensors_of(lambda t: t.update({n: t[n].bfloat16() for n in t})),
    "weights truncated": bytes_of("model.safetensors", lambda d: d.__delitem__(slice(-1, None))),
    "weights longer": bytes_of("model.safetensors", lambda d: d.append(0)),
    "weights deleted": deleted("model.safetensors"),
    "pickled weights beside it": written("pytorch_model.bin", "weights"),
    "recipe: garbage": written("enjoyln_recipe.yaml", "% garbage"),
    "recipe: one letter": bytes_of("enjoyln_recipe.yaml", flip(0.4)),
    "recipe deleted": deleted("enjoyln_recipe.yaml"),
    "plan: another seed": json_of("enjoyln_plan.json", lambda p: p.update(seed=99)),
    "plan: layout alone": bytes_of("enjoyln_plan.json", lambda d: d.extend(b" ")),
    "plan truncated": bytes_of("enjoyln_plan.json", lambda d: d.__delitem__(slice(100, None))),
    "plan deleted": deleted("enjoyln_plan.json"),
    "marker: a norm": json_of("config.json", lambda c: c["enjoyln"]["plan"].update(norms=[])),
    "marker: the tool": json_of("config.json", lambda c: c["enjoyln"].update(tool="by hand")),
    "marker deleted": json_of("config.json", lambda c: c.pop("enjoyln")),
}  # fmt: skip
QUANTISED: dict[str, Corruption] = {
    "one bit of the program": bytes_of("*.onnx", flip(0.3)),
    "one bit of a weight": bytes_of("*.onnx*", flip(0.5)),
    "one bit of the last weight": bytes_of("*.onnx*", flip(0.99999)),
    "rows overwritten": overwrite_weights,
    "weights truncated": bytes_of("*.onnx*", lambda d: d.__delitem__(slice(-1, None))),
    "weights deleted": deleted("*.onnx*"),
    "program truncated": bytes_of("*.onnx", lambda d: d.__delitem__(slice(500, None))),
    "program deleted": deleted("*.onnx"),
    "another program beside it": written("model_fp16.onnx", "program"),
    "numbers: a larger limit": json_of(NUMBERS, lambda r: r["w8a8"].update(max_error=9.0)),
    "numbers: a larger error": json_of(NUMBERS, lambda r: r["w8a8"]["held_out"].update(error=9.0)),
    "numbers: a smaller error": json_of(
        NUMBERS, lambda r: r["w8a8"]["held_out"].update(error=r["w8a8"]["held_out"]["error"] / 2)
    ),
    "numbers: no outputs": json_of(NUMBERS, lambda r: r["w8a8"].update(outputs=[])),
    "numbers: other halves": json_of(NUMBERS, lambda r: r["w8a8"].update(chosen_by=[])),
    "numbers: another source": json_of(NUMBERS, lambda r: r["w8a8"].update(source="gpt2")),
    "numbers truncated": bytes_of(NUMBERS, lambda d: d.__delitem__(slice(100, None))),
}  # fmt: skip
CASES = [(kind, name) for kind in ("fold", "rotate") for name in (*ANY, *CONVERTED)]
QUANTISED_CASES = [("quantize", name) for name in (*ANY, *QUANTISED)]


class Results(dict[str, Path]):
    """One result of each command, made when it is first asked for, by the command's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = shallow("gpt2", folder / "source")

    def __missing__(self, command: str) -> Path:
        data = (
            (*TEXT, "--rotations", 0, "--inputs", 4) if command == "quantize" else ("--no-verify",)
        )
        self[command] = self.folder / command
        good(command, self.source, "-o", self[command], "--quiet", *data)
        return self[command]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("results"))


def corrupted(results: Results, kind: str, name: str, folder: Path) -> Path:
    out = Path(shutil.copytree(results[kind], folder / "out"))
    (ANY | (QUANTISED if kind == "quantize" else CONVERTED))[name](out)
    return out


def options_of(kind: str) -> tuple[object, ...]:
    return TEXT if kind == "quantize" else ("--samples", 1)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_changed_file_is_found(results: Results, kind: str, name: str, tmp_path: Path) -> None:
    out = corrupted(results, kind, name, tmp_path)
    found = written_files(open_source(str(out)))
    (named, *_) = found.changes
    assert (out / named).exists() == (found.changes[named] not in ("is missing", "was deleted"))
    assert named in found.failure and "--accept" in found.failure
    objection = publishing_objection(open_source(str(out)))
    assert objection == ("its verification failed" if "verdict" in name else found.objection)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*CASES, *QUANTISED_CASES])
def test_verify_refuses_a_changed_file(
    results: Results, kind: str, name: str, tmp_path: Path
) -> None:
    out = corrupted(results, kind, name, tmp_path)
    record = out / "enjoyln_verify.json"
    before = read_object(record).get("sha256")
    result = enjoyln("verify", out, *options_of(kind), "--quiet")
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert "error: " in result.stderr
    assert read_object(record).get("sha256") == before, "verify never records a digest"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows overwritten", "numbers: a smaller error"])
def test_the_measured_error_is_compared(results: Results, name: str, tmp_path: Path) -> None:
    """Even if the digests were adapted to the change."""
    out = corrupted(results, "quantize", name, tmp_path)
    record_files(Source(str(out), out, None), {"passed": True})
    assert publishing_objection(Source(str(out), out, None)) == ""
    result = enjoyln("verify", out, *TEXT, "--quiet")
    assert result.exit_code == 1
    assert re.search(r"above the limit of \S+: error \S+ .* was measured on", result.stderr)
    assert "its verification failed" in enjoyln("push", out, "me/x", "--dry-run").stderr


@pytest.mark.parametrize(
    "kind", ["fold", "rotate", pytest.param("quantize", marks=pytest.mark.slow)]
)
def test_an_untouched_result_passes(results: Results, kind: str) -> None:
    for _ in range(2):
        good("verify", results[kind], *options_of(kind))
    assert written_files(open_source(str(results[kind]))).failure == ""
    assert "passed" in json.loads((results[kind] / "enjoyln_verify.json").read_text())


def test_a_change_is_accepted_by_its_name(results: Results, tmp_path: Path) -> None:
    out = Path(shutil.copytree(results["fold"], tmp_path / "out"))
    own, other = out / "generation_config.json", out / "tokenizer_config.json"
    own.write_text('{"max_new_tokens": 40}')
    other.unlink()
    files = written_files(open_source(str(out)), ["generation*"])
    assert files.changes == {"tokenizer_config.json": "was deleted"}
    assert "tokenizer_config.json was deleted" in enjoyln("verify", out, "--samples", 1).stdout
    good("verify", out, "--samples", 1, "--accept", f"{own.name},{other.name}")
    good("verify", out, "--samples", 1)
    own.write_text('{"max_new_tokens": 41}')
    assert written_files(open_source(str(out))).changes == {
        own.name: "has changed since it was written"
    }
    shutil.copy(results["fold"] / own.name, own)
    shutil.copy(results["fold"] / other.name, other)
    assert written_files(open_source(str(out))).changes == {}

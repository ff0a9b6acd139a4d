"""The command as a user meets it: output, exit statuses, errors of one line, nothing left over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import CHECKPOINTS, GPT2, enjoyln, good, refused, running
from tiny_models import BERT as BERT_SIZES

import enjoyln_cli
from enjoyln_cli.cli.convert_commands import naming_learned_steps
from enjoyln_cli.cli.group import explain
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.fs.staging import learning_state

BERT = str(CHECKPOINTS / "bert")


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENJOYLN_DEBUG", raising=False)


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 folded once, verified; with what the command said beside it."""
    out = tmp_path_factory.mktemp("cli") / "gpt2-folded"
    result = enjoyln("fold", GPT2, "-o", out)
    assert result.exit_code == 0, result.output
    (out.parent / "stdout").write_text(result.stdout)
    (out.parent / "stderr").write_text(result.stderr)
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    out = tmp_path_factory.mktemp("cli") / "llama"
    LlamaConfig(**{**BERT_SIZES, "hidden_size": 24}).save_pretrained(out)
    return out


# Help, usage.


def test_version() -> None:
    assert good("--version").strip() == f"enjoyln, version {enjoyln_cli.__version__}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["fodl", GPT2], "fold"),
        (["fold", GPT2, "-o", "x", "--dryrun"], "--dry-run"),
        (["report", GPT2, "--jsno"], "--json"),
        (["fold", GPT2, "-o", "x", "--dtype", "int8"], "bfloat16"),
        (["fold", GPT2, "-o", "x", "--max-shard-size", "huge"], "5GB"),
        (["fold", GPT2, "-o", "x", "--max-shard-size", "0"], "5GB"),
        (["fold", GPT2, "-o", "x", "--max-shard-size", "9" * 400], "5GB"),
        (["fold", GPT2, "-o", "x", "--max-shard-size", "9" * 20], "5GB"),
        (["verify", "x", "--max-memory", "1" + "0" * 300 + "TB"], "5GB"),
        (["fold", GPT2, "-o", "x", "--jobs", "0"], "--jobs"),
        (["fold", GPT2], "--out"),
        (["quantize", GPT2, "-o", "x", "--text", __file__, "--keep", "a,*"], "no layer to quant"),
        (["report"], "MODEL"),
        (["report", GPT2, "--model-type", "gpt2"], "--model-type"),
        (["report", GPT2, BERT, "--why", "x"], "--why"),
        (["verify"], "OUT"),
        (["push", "out"], "REPO_ID"),
        (
            ["verify", "x", "--audio", str(Path(__file__).parent), "--image", __file__],
            "--image and --audio",
        ),
        (
            ["report", GPT2, "--save", "p.svg", "--write-recipe", "r.yaml"],
            "--save and --write-recipe",
        ),
        (["report", GPT2, "--save", "p.svg", "--why", "x"], "--why and --save cannot be combined"),
        (["report", GPT2, "--why", "x", "--write-recipe", "r.yaml"], "--why and --write-recipe"),
        (["report", GPT2, "--why", "x", "--json"], "combined with --json"),
    ],
)
def test_usage_errors_exit_with_2_and_a_hint(arguments: list[str], hint: str) -> None:
    assert hint in " ".join(refused(*arguments, status=2).split())


# Report.


def test_report_as_json_has_one_object_per_model(llama: Path) -> None:
    lines = good("report", GPT2, llama, "--json", "--paper").splitlines()
    gpt2, other = (json.loads(line) for line in lines)
    assert (gpt2["model"], gpt2["plan"]["model_class"]) == (GPT2, "GPT2LMHeadModel")
    assert gpt2["layernorms"] == gpt2["become_rmsnorm"] == len(gpt2["paper"]) == 7
    assert (gpt2["in_weights"], gpt2["subtractions"]) == (0, 1)
    assert gpt2["stays_layernorm"] == 0
    assert other["layernorms"] == 0 and sum(many for _, many in other["plan"]["other_norms"]) == 5


def test_report_can_be_narrowed_to_a_class() -> None:
    """Without the head the embedding can be centred, so no operation is needed."""
    counts = json.loads(good("report", GPT2, "--model-class", "GPT2Model", "--json"))
    assert counts["layernorms"] == counts["become_rmsnorm"] == counts["in_weights"] == 7


def test_report_of_a_type_needs_no_files() -> None:
    assert "gpt2 (GPT2" in good(
        "report", "--model-type", "gpt2", "--model-class", "GPT2LMHeadModel"
    )


def test_report_suggests_a_type() -> None:
    assert "gpt2" in refused("report", "--model-type", "gtp2")


def test_report_of_an_rmsnorm_model_says_so(llama: Path) -> None:
    assert good("report", llama) == (
        f"{llama}: 5 norms are RMSNorm already, no LayerNorm to convert\n"
    )


def test_report_goes_on_after_a_model_that_fails(llama: Path, tmp_path: Path) -> None:
    result = enjoyln("report", tmp_path / "nowhere", llama)
    assert result.exit_code == 1
    assert "RMSNorm already" in result.stdout
    first, error, other = result.stderr.splitlines()
    assert (first, other) == (f"analysing {tmp_path / 'nowhere'}", f"analysing {llama}")
    assert error.startswith("error: ") and error.count("nowhere") == 1


def test_why_draws_a_tree_down_to_the_weights() -> None:
    out = good("report", GPT2, "--why", "transformer.h.0.ln_1")
    assert out.startswith("transformer.h.0.ln_1 becomes RMSNorm")
    assert "transformer.wpe.weight" in out and "transformer.wte" in out


def test_why_suggests_a_norm() -> None:
    assert "transformer.h.0.ln_1" in refused("report", GPT2, "--why", "h.0.ln_1")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    assert "No space left" in refused("report", GPT2, "--write-recipe", "/dev/full")


# Fold.


def test_fold_says_what_it_did_and_what_comes_next(folded: Path) -> None:
    out = (folded.parent / "stdout").read_text()
    assert out.startswith("converted 7 of 7 LayerNorms, using 1 added mean subtraction; ")
    assert re.search(
        r"\nwrote 1.6 MB to \S+ in \d+\.\d s, checked on 16 inputs in \d+\.\d s\n", out
    )
    same = r"same outputs up to float32 rounding \(error \d\.\d\d x the original's own\)"
    assert re.search(rf"\nverified: {same}\n", out)
    load = f'enjoyln_cli.from_pretrained("{folded}")'
    next_step = f"next: {load} loads it in RMSNorm form, transformers with LayerNorm"
    assert out.splitlines()[-1] == next_step
    news = (folded.parent / "stderr").read_text().splitlines()
    assert news[0] == f"opening {GPT2}" and "verifying" in news


def test_a_fold_that_leaves_most_norms_names_where_to_find_more(tmp_path: Path) -> None:
    bert = CHECKPOINTS / "bert"
    out = good("fold", bert, "-o", tmp_path / "out", "--model-class", "BertModel", "--no-verify")
    assert "converted 1 of 7" in out
    assert f"options that may convert more: enjoyln report {bert}\n" in out


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gpt2", "--text FILE"),
        pytest.param("vit", "--image DIR", marks=pytest.mark.slow),
    ],
)
def test_a_rotation_names_the_option_for_data_that_fit(
    name: str, data: str, tmp_path: Path
) -> None:
    out = good("rotate", CHECKPOINTS / name, "-o", tmp_path / "out", "--no-verify")
    assert f"--search 1 --scheme w8a8 {data}\n" in out


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = good("fold", GPT2, "-o", tmp_path / "out", "--dry-run", "--dtype", "bfloat16")
    assert "would convert 7 of 7" in out and "nothing was written" in out
    assert "transformer.wpe.weight" in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_no_output_and_tells_the_size() -> None:
    full = json.loads(good("fold", GPT2, "--dry-run", "--json"))
    half = json.loads(good("fold", GPT2, "--dry-run", "--json", "--dtype", "float16"))
    assert full["dry_run"] is True
    assert half["bytes_written"] * 2 == full["bytes_written"]


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    result = enjoyln("fold", GPT2, "-o", tmp_path / "out", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    found = json.loads(result.stdout)
    assert found["out"] == str(tmp_path / "out") and found["become_rmsnorm"] == 7
    assert found["bytes_written"] > 0 and found["seconds"] > 0
    assert found["verification"]["passed"] is True


@pytest.mark.slow
def test_a_fold_for_one_class_warns_about_the_saved_class(tmp_path: Path) -> None:
    narrow = good("fold", BERT, "-o", tmp_path / "out", "--model-class", "BertModel", "--json")
    (warning,) = json.loads(narrow)["warnings"]
    assert "proven for BertModel" in warning and "BertForMaskedLM" in warning


def test_quiet_says_nothing(tmp_path: Path) -> None:
    result = enjoyln("fold", GPT2, "-o", tmp_path / "out", "--quiet", "--no-verify")
    assert (result.exit_code, result.output) == (0, "")
    record = json.loads((tmp_path / "out" / "enjoyln_verify.json").read_text())
    assert "passed" not in record and "model.safetensors" in record["sha256"]


@pytest.mark.slow
def test_nothing_to_fold_gives_reasons_and_the_next_step(tmp_path: Path, llama: Path) -> None:
    line = refused("fold", BERT, "-o", tmp_path / "out", "--model-class", "BertForMaskedLM")
    assert "not zero-mean" in line and "enjoyln report" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_norms_that_are_named_stay_layernorm(tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", tmp_path / "out" / "enjoyln_recipe.yaml"
    text = good("fold", GPT2, "-o", out, "--keep-norms", "transformer.ln_f,*.ln_2")
    assert "converted 3 of 7 LayerNorms" in text and "verified: same outputs" in text
    assert "4 stay LayerNorm: --keep-norms names it" in text
    assert (
        "enjoyln fold ./gpt2 -o out --keep-norms 'transformer.ln_f,*.ln_2'"
        in (out / "README.md").read_text()
    )
    good("fold", GPT2, "-o", tmp_path / "again", "--recipe", recipe, "--no-verify")
    again = tmp_path / "again" / "model.safetensors"
    assert again.read_bytes() == (out / "model.safetensors").read_bytes()
    recipe.write_text(recipe.read_text().replace("--keep-norms names it", "no reason"))
    good("fold", GPT2, "--dry-run", "--recipe", recipe)
    less = ("--recipe", recipe, "--keep-norms", "transformer.ln_f")
    line = refused("fold", GPT2, "--dry-run", *less)
    proof = "the proof {with_subtraction: [transformer.wte]} (and "
    assert f"h.{{i}}.ln_2: the recipe has stays_layernorm, {proof}" in line


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("transformer.ln_g", "called transformer.ln_g; did you mean transformer.ln_f or "),
        ("*.LN_1", "called *.LN_1; "),
        ("transformer.h.0", "called transformer.h.0; did you mean transformer.h."),
    ],
)
def test_a_norm_to_keep_that_is_not_there(names: str, said: str) -> None:
    line = refused("fold", GPT2, "--dry-run", "--keep-norms", f"transformer.ln_f,{names}")
    assert f"no LayerNorm of the model is {said}" in line


def test_no_norm_is_left_to_convert() -> None:
    line = refused("fold", GPT2, "--dry-run", "--keep-norms", "*")
    assert "7 x --keep-norms names it" in line


def test_a_recipe_of_another_family_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    good("report", BERT, "--write-recipe", recipe, "--model-class", "BertModel")
    assert "bert" in refused("fold", GPT2, "-o", tmp_path / "out", "--recipe", recipe)
    assert not (tmp_path / "out").exists()


# Verify.


def test_verify_passes_on_what_fold_wrote(folded: Path) -> None:
    found = json.loads(good("verify", folded, "--json"))
    assert found["passed"] is True and found["identity_error"] <= 1e-12
    for key in ("storage_error", "runtime_error", "original_error", "ratio", "kl"):
        assert found[key] is not None
    assert found["top1_agreement"] == 1.0 and found["stock_error"] > 0
    assert len(found["norm_input_mean"]) == 7


def test_the_memory_for_weights_has_to_be_enough(folded: Path) -> None:
    refused("verify", folded, "--max-memory", "much", status=2)
    assert "pass --max-memory" in refused("verify", folded, "--max-memory", "1MB")


def test_a_quiet_check_tells_of_a_failure_alone(folded: Path) -> None:
    passed = enjoyln("verify", folded, "--quiet")
    assert (passed.exit_code, passed.output) == (0, "")
    failed = enjoyln("verify", folded, "--quiet", "--max-ratio", "0.01")
    assert (failed.exit_code, failed.stdout) == (1, "")
    (line,) = failed.stderr.splitlines()
    assert line.startswith("error: not verified: too far from the exact function")
    good("verify", folded)  # as the others find it


# Errors.


def test_errors_are_one_line_however_they_are_raised() -> None:
    assert explain(EnjoyLNError("what is wrong")) == "what is wrong"
    assert explain(PermissionError(13, "Permission denied", "/x")) == "Permission denied: /x"
    assert "ENJOYLN_DEBUG=1" in explain(KeyError("x"))


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENJOYLN_DEBUG", "1")
    result = enjoyln("report", tmp_path / "nowhere")
    assert isinstance(result.exception, EnjoyLNError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")],
)
def test_a_signal_is_one_line_and_leaves_nothing(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    process = running("fold", GPT2, "-o", tmp_path / "out")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("finding"):
            process.send_signal(number)
            break
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert rest == f"error: {said}; nothing half-written was left behind\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("before", ["", "1 finished file kept in .out.partial"])
def test_an_interrupt_names_the_steps_that_were_learned(before: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for is_begun in (False, True):
        if is_begun:
            learning_state(out).touch()
        with pytest.raises(KeyboardInterrupt) as interrupt, naming_learned_steps(out):
            raise KeyboardInterrupt(*[before] * bool(before))
        told = str(interrupt.value)
        assert told.startswith(before)
        assert (str(learning_state(out)) in told and "--resume" in told) is is_begun


def test_a_path_that_is_no_text_is_refused_at_both_ends(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"odd\xff")
    told = refused("fold", GPT2, "-o", odd)
    assert "is not UTF-8" in told and "rename" in told
    odd.mkdir()
    assert "is not UTF-8" in refused("report", odd)
    assert "is not UTF-8" in refused("fold", GPT2, "-o", odd / "out")
    good("fold", GPT2, "-o", tmp_path / "é", "--dry-run")


def test_a_locale_that_lacks_characters_is_named(tmp_path: Path) -> None:
    shutil.copytree(GPT2, tmp_path / "é")
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    process = running("fold", tmp_path / "é", "-o", tmp_path / "out", environment=ascii_only)
    told = process.communicate()[1]
    assert process.returncode == 1
    assert "ascii, the encoding here, lacks; set PYTHONUTF8=1" in told


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.slow
def test_a_closed_pipe_is_silent(closed_pipe: int, llama: Path) -> None:
    """``| head`` closes the pipe like this once it has its lines."""
    for arguments, said in ((["--help"], ""), (["report", llama], f"analysing {llama}\n")):
        process = running(*arguments, stdout=closed_pipe)
        assert process.communicate()[1] == said
        assert process.returncode == 1

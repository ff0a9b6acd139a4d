"""What computes the norms on a GPU is right, the fastest, stored, and the same in each process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from live_models import CHECKPOINTS, ROOT
from simulated_gpu import SPEEDS, SimulatedGpu, fused, kernel

from enjoyln_cli import fold, from_pretrained, kernels
from enjoyln_cli.cli.main import main
from enjoyln_cli.kernels import build, choices, formula, gpu, native, ops, tuning
from enjoyln_cli.kernels.choices import KERNEL, LAYER_NORM, LIGER, RMS_NORM, SEPARATE, Norms
from enjoyln_cli.kernels.tuning import Compute
from enjoyln_cli.plan.plan import Options
from enjoyln_cli.runtime.neutral import kinds_of_norms

PLAIN = Norms("float32", "float32", True, False, 24)
BIASED = replace(PLAIN, bias=True)
BFLOAT = Norms("bfloat16", "float32", True, True, 24)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and no choices before or after the test."""
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "cache"])
    yield tmp_path / "cache"
    choices.forget()
    native.forget_choices()


def taken(device: SimulatedGpu, norms: Norms = PLAIN, rows: int = 32) -> tuple[str, str]:
    """What is taken for a norm alone, and after an addition."""
    alone, added = tuning.measure(device, norms, rows)
    return alone.taken, added.taken


@pytest.mark.parametrize("norms", [PLAIN, BIASED, BFLOAT], ids=["plain", "biased", "bfloat16"])
def test_the_fastest_is_taken(norms: Norms) -> None:
    default = LAYER_NORM if norms.bias else RMS_NORM
    assert taken(SimulatedGpu(), norms) == (default, KERNEL)
    assert taken(SimulatedGpu({**SPEEDS, KERNEL: 5e-6}), norms) == (KERNEL, KERNEL)
    other = RMS_NORM if norms.bias else LAYER_NORM
    assert taken(SimulatedGpu({**SPEEDS, other: 9e-6, KERNEL: 20e-6}), norms) == (other, SEPARATE)


def test_a_margin_is_asked_for() -> None:
    for speed, name in ((9.6e-6, RMS_NORM), (9.4e-6, KERNEL)):
        assert taken(SimulatedGpu({**SPEEDS, KERNEL: speed}))[0] == name


def test_ours_needs_the_margin_over_each_other_candidate() -> None:
    given: dict[str, Compute | str] = {LIGER: gpu.rms_norm}
    for liger, own, name in (
        (9.9e-6, 8.7e-6, LAYER_NORM),
        (9.9e-6, 8.5e-6, KERNEL),
        (8.0e-6, 7.7e-6, LIGER),
        (8.0e-6, 7.5e-6, KERNEL),
    ):
        speeds = {**SPEEDS, LAYER_NORM: 9.0e-6, LIGER: liger, KERNEL: own}
        assert taken(SimulatedGpu(speeds, replaced=given))[0] == name, (liger, own)


def wrong_after_row_3(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    y = kernel(x, residual, weight, bias)
    y[3:] *= 1.001
    return y


def wrong_sum(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    y, total = fused(x, residual, weight, bias)
    return y, total + 1e-3


def raises(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    raise RuntimeError("an illegal memory access\nwas encountered")


def of_another_dtype(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
    return kernel(x, residual, weight, bias).double()


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (wrong_after_row_3, "its result is wrong"),
        (of_another_dtype, "its result is wrong"),
        (raises, "RuntimeError: an illegal memory access"),
        ("it does not compile", "it does not compile"),
    ],
)
def test_a_wrong_kernel_is_not_taken(compute: Any, reason: str) -> None:
    fast = {**SPEEDS, KERNEL: 1e-6}
    alone, added = tuning.measure(SimulatedGpu(fast, replaced={KERNEL: compute}), PLAIN, 32)
    assert alone.taken == RMS_NORM and alone.left_out[KERNEL] == reason
    assert KERNEL not in alone.microseconds
    assert added.taken == KERNEL, "the kernel that adds is right"
    alone, added = tuning.measure(SimulatedGpu(fast, adds=wrong_sum), PLAIN, 32)
    assert (alone.taken, added.taken) == (KERNEL, SEPARATE)
    assert added.left_out == {KERNEL: "its sum is wrong"}


def test_a_default_that_is_wrong_stays_the_default() -> None:
    """It is what the norm computes without a measurement, and no times are compared with it."""
    device = SimulatedGpu({**SPEEDS, KERNEL: 1e-6}, replaced={RMS_NORM: wrong_after_row_3})
    alone, _ = tuning.measure(device, PLAIN, 32)
    assert alone.taken == RMS_NORM and not alone.microseconds


def test_noise_does_not_decide() -> None:
    for seed in range(100):
        device = SimulatedGpu({**SPEEDS, SEPARATE: 10e-6}, noise=0.1, seed=seed)
        assert taken(device) == (RMS_NORM, SEPARATE), seed
        device = SimulatedGpu({**SPEEDS, KERNEL: 7e-6}, noise=0.1, seed=seed)
        assert taken(device) == (KERNEL, KERNEL), seed


@pytest.mark.parametrize("time", [0.0, -1e-6, float("nan"), float("inf")])
def test_a_clock_that_fails_decides_nothing(time: float) -> None:
    assert taken(SimulatedGpu({**SPEEDS, KERNEL: time, RMS_NORM: 1.0})) == (RMS_NORM, SEPARATE)


def test_the_time_is_bounded() -> None:
    device = SimulatedGpu(step=1.3)  # ten seconds are over after seven looks at the clock
    kinds = [replace(PLAIN, width=width) for width in (8, 16, 24, 32, 40)]
    first = tuning.choose(device, kinds)
    begun = list(dict.fromkeys(one.norms for one in first))
    assert begun == kinds[: len(begun)] and 0 < len(begun) < len(kinds)
    assert len(first) == 2 * len(begun) * len(tuning.ROWS), "and what was begun has every row"
    late = [one for one in first if not one.microseconds]
    assert [(one.rows, one.taken) for one in late] == [(8192, RMS_NORM), (8192, SEPARATE)]
    then = tuning.choose(device, kinds)
    assert len(then) > len(first) and then[: len(first)] == first, "the next process goes on"


def test_time_to_compile_is_not_expected_again() -> None:
    class Slow(SimulatedGpu):
        compiled = False

        def candidates(self, norms: Norms) -> dict[str, Compute | str]:
            self._now += 0.0 if self.compiled else 6.0
            self.compiled = True
            return super().candidates(norms)

    found = tuning.choose(Slow(step=0.1), (PLAIN,))
    assert len(found) == 2 * len(tuning.ROWS) and all(one.microseconds for one in found)


def test_where_the_memory_is_not_enough_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(norms: Norms, rows: int, place: torch.device) -> tuning.Values:
        if rows > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return before(norms, rows, place)

    before = tuning.values_for
    monkeypatch.setattr(tuning, "values_for", values)
    found = tuning.choose(SimulatedGpu({**SPEEDS, KERNEL: 5e-6}), (PLAIN,))
    by_rows = {(one.rows, one.added): one.taken for one in found}
    assert by_rows == {
        **{(rows, added): KERNEL for rows in (1, 32) for added in (False, True)},
        **{(rows, False): RMS_NORM for rows in (1024, 8192)},
        **{(rows, True): SEPARATE for rows in (1024, 8192)},
    }


def test_a_choice_is_stored(cache: Path) -> None:
    device = SimulatedGpu({**SPEEDS, KERNEL: 5e-6})
    first = tuning.choose(device, (PLAIN, BIASED))
    assert {one.rows for one in first} == set(tuning.ROWS)
    later = SimulatedGpu({**SPEEDS, KERNEL: 50e-6})
    assert tuning.choose(later, (BIASED,)) == first and not later.measured
    more = tuning.choose(later, (BIASED, BFLOAT))
    assert later.measured and more[: len(first)] == first
    assert {one.norms for one in more} == {PLAIN, BIASED, BFLOAT}
    again = tuning.choose(later, (PLAIN,), again=True)
    assert {one.taken for one in again if one.norms == PLAIN and not one.added} == {RMS_NORM}
    assert {one.norms for one in again} == {PLAIN, BIASED, BFLOAT}
    (file,) = cache.glob("choices-*.json")
    assert file.stat().st_mode & 0o022 == 0
    other = SimulatedGpu(name="another GPU")
    tuning.choose(other, (PLAIN,))
    assert other.measured and len(list(cache.glob("choices-*.json"))) == 2


def damage_json(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-20]


def other_format(content: dict[str, Any]) -> str:
    return json.dumps({**content, "format": choices.FORMAT + 1})


def other_key(content: dict[str, Any]) -> str:
    return json.dumps({**content, "key": {**content["key"], "torch": "1.0"}})


def unknown_field(content: dict[str, Any]) -> str:
    content["choices"][0]["speed"] = 1
    return json.dumps(content)


def text_for_a_number(content: dict[str, Any]) -> str:
    content["choices"][0]["norms"]["width"] = "24"
    return json.dumps(content)


def time_of_nothing(content: dict[str, Any]) -> str:
    content["choices"][0]["taken"] = "magic"
    return json.dumps(content)


def no_rows(content: dict[str, Any]) -> str:
    content["choices"][0]["rows"] = 0
    return json.dumps(content)


@pytest.mark.parametrize(
    "damage",
    [
        damage_json,
        other_format,
        other_key,
        unknown_field,
        text_for_a_number,
        time_of_nothing,
        no_rows,
    ],
)
def test_a_damaged_or_foreign_file_counts_as_none(cache: Path, damage: Any) -> None:
    tuning.choose(SimulatedGpu(), (PLAIN,))
    (file,) = cache.glob("choices-*.json")
    before = file.read_text()
    file.write_text(damage(json.loads(before)))
    device = SimulatedGpu()
    assert choices.read(file, device.key()) == ()
    tuning.choose(device, (PLAIN,))
    assert device.measured and file.read_text() == before


def test_a_full_disk_costs_a_warning(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(choices.os, "replace", full)
    with pytest.warns(UserWarning, match="measured norms are not stored: .*No space left"):
        found = tuning.choose(SimulatedGpu({**SPEEDS, KERNEL: 5e-6}), (PLAIN,))
    assert {one.taken for one in found if not one.added} == {KERNEL}
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "file" / "cache"])
    with pytest.warns(UserWarning, match="measured norms are not stored: cannot write to"):
        found = tuning.choose(SimulatedGpu(), (PLAIN,))
    assert {one.rows for one in found} == set(tuning.ROWS)


def test_a_cache_that_can_only_be_read_costs_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has choices for this GPU, and not for all norms of the model."""

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    first = tuning.choose(SimulatedGpu(), (PLAIN,))
    (lock,) = cache.glob("*.lock")
    lock.unlink()
    lock.mkdir()  # it cannot be opened
    monkeypatch.setattr(choices.tempfile, "NamedTemporaryFile", read_only)
    device = SimulatedGpu()
    assert tuning.choose(device, (PLAIN,)) == first and not device.measured
    with pytest.warns(UserWarning, match="measured norms are not stored: .*Read-only"):
        found = tuning.choose(device, (PLAIN, BIASED))
    assert {one.norms for one in found} == {PLAIN, BIASED}


@pytest.mark.slow
def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    program = ROOT / "tests" / "support" / "simulated_gpu.py"
    paths = os.pathsep.join((str(ROOT), str(program.parent)))
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": paths}
    given["ENJOYLN_KERNELS"] = "0"  # the CPU's, which would be compiled in this cache
    call = [sys.executable, str(program), "8"]
    done = subprocess.run(call, env=given, capture_output=True, text=True, check=True, timeout=240)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 8
    assert sum(one["measured"] for one in found) == 1, "one measures, the others read"
    assert all(one["taken"] == found[0]["taken"] for one in found)


def test_each_number_of_rows_uses_the_nearest_measurement() -> None:
    assert choices.bounds((1, 32, 1024, 8192)) == [5, 181, 2896, 2**31 - 1]
    device = SimulatedGpu()
    by_rows = {1: LAYER_NORM, 32: RMS_NORM, 1024: LAYER_NORM, 8192: LAYER_NORM}
    tuning.apply(device, [choices.Choice(PLAIN, n, False, t, {}, {}) for n, t in by_rows.items()])
    weight = torch.ones(24)
    for rows, name in ((1, LAYER_NORM), (5, LAYER_NORM), (6, RMS_NORM), (181, RMS_NORM)):
        assert choices.taken_for(torch.ones(1, rows, 24), weight, None) == name
    assert choices.taken_for(torch.ones(10**6, 24), weight, None) == LAYER_NORM
    others = (
        (torch.ones(6, 23), torch.ones(23), None),
        (torch.ones(6, 24), None, None),
        (torch.ones(6, 24), weight, weight),
        (torch.ones(6, 24), weight.half(), None),
        (torch.ones(6, 24, device="meta"), weight, None),
    )
    for given in others:
        assert choices.taken_for(*given) is None


def test_what_times_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> Any:
        raise build.NoLibrary("there is none")

    def not_installed(name: str) -> str:
        raise gpu.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gpu.importlib.metadata, "version", not_installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(gpu.cuda, "driver", no_driver)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    expected = {
        "gpu": "a GPU",
        "capability": "9.0",
        "driver": "6.4",
        "torch": torch.__version__,
        "liger": "",
        "sources": build.digest(),
    }
    assert gpu.Gpu(0).key() == expected
    monkeypatch.setattr(gpu.importlib.metadata, "version", lambda name: f"{name} 0.6")
    monkeypatch.setattr(gpu, "NVIDIA", tmp_path / "version")
    gpu.NVIDIA.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    library = SimpleNamespace(cuDriverGetVersion=lambda version: None)
    monkeypatch.setattr(gpu.cuda, "driver", lambda: SimpleNamespace(library=library))
    found = gpu.Gpu(0).key()
    assert (found["driver"], found["liger"]) == ("0, 580.65.06", "liger-kernel 0.6")
    assert choices.file_name(found) != choices.file_name(expected)


@pytest.mark.parametrize("norms", [PLAIN, BIASED], ids=["plain", "biased"])
@pytest.mark.parametrize("name", [LAYER_NORM, RMS_NORM, LIGER])
def test_a_norm_computes_what_was_taken(
    norms: Norms, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a mean tell LayerNorm and RMSNorm apart."""
    monkeypatch.setattr(native, "entry", native.Missing())
    monkeypatch.setattr(native, "_known", {"cpu": native.Status("cpu", False, "simulated")})
    called: list[tuple[Any, ...]] = []

    def liger(*args: Any) -> Any:
        called.append(args)
        return torch.ops.enjoyln.rms_norm(args[0], args[1], None, args[2])

    monkeypatch.setattr(ops.formula, "liger", lambda: liger)
    choices.use(torch.device("cpu"), norms, {1: name})
    x, weight = torch.randn(7, 24) + 2, torch.randn(24)
    bias = torch.randn(24) if norms.bias else None
    found = kernels.rms_norm(x, weight, bias, 1e-5)
    norm = "layer_norm" if name == LAYER_NORM else "rms_norm"
    exact = getattr(torch.ops.enjoyln, norm)(x.double(), weight.double(), None, 1e-5)
    exact = exact if bias is None else exact + bias.double()
    assert formula.is_close(found, exact)
    assert [args[2:] for args in called] == ([(1e-5, 0.0, "gemma")] if name == LIGER else [])
    trained = kernels.rms_norm(x, weight.clone().requires_grad_(), bias, 1e-5)
    plain = torch.nn.functional.layer_norm(x, (24,), weight, bias, 1e-5)
    assert torch.equal(trained, plain), "with gradients it stays LayerNorm"


def test_the_kinds_of_norms_of_a_model(tmp_path: Path) -> None:
    options = Options(merge="bias")
    out = fold(CHECKPOINTS / "phi", tmp_path / "out", verify=False, options=options).out
    model = from_pretrained(out, dtype=torch.bfloat16)
    marker = model.config.enjoyln
    width = model.config.hidden_size
    found = kinds_of_norms(model, marker.get("weightless", ()), marker["merged"]["bias"])
    assert {device for device, _ in found} == {torch.device("cpu")}
    kinds = [kind for _, kind in found]
    biasless = Norms("bfloat16", "bfloat16", True, False, width)
    assert kinds.count(biasless) == len(marker["merged"]["bias"])
    heads = replace(biasless, bias=True, width=width // model.config.num_attention_heads)
    assert set(kinds) <= {biasless, replace(biasless, bias=True), heads} and heads in kinds


def test_a_checkpoint_is_tuned_by_the_command(
    cache: Path, outs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimulatedGpu({**SPEEDS, KERNEL: 5e-6})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpu, "Gpu", lambda index: device)
    monkeypatch.setattr(
        native, "_known", {**native._known, "cuda": native.Status("cuda", False, "")}
    )
    for time in ("5.0", "6.0"):
        device.speeds = {**SPEEDS, KERNEL: float(time) * 1e-6}
        result = CliRunner().invoke(main, ["env", "--tune", str(outs["gpt2"])])
        assert result.exit_code == 0, result.output
        (line,) = (a for a in result.stdout.splitlines() if "32 rows" in a and "after" not in a)
        assert "in float32, weight and bias in float32: kernel (layer_norm 10.0" in line
        assert f"kernel {time} " in line, "it is measured again"
    assert len(list(cache.glob("choices-*.json"))) == 1


def test_nothing_is_measured_where_it_should_not(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(torch.device("cpu"), PLAIN), (torch.device("meta"), PLAIN)]
    kernels.prepare(wanted)
    wanted.append((torch.device("cuda", 0), PLAIN))
    assert gpu.why_not_tuned() == "torch sees no GPU"
    kernels.prepare(wanted)
    measured: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(gpu, "Gpu", lambda index: measured.append(index) or SimulatedGpu())
    capturing = [1]
    kernels.prepare(wanted)
    capturing.clear()
    for name in ("ENJOYLN_TUNE", "ENJOYLN_KERNELS"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, "0")
            assert gpu.why_not_tuned() == f"switched off by {name}=0"
            kernels.prepare(wanted)
    assert not measured and not cache.exists()
    kernels.prepare(wanted)
    assert measured == [0] and len(list(cache.glob("choices-*.json"))) == 1


def test_a_model_uses_the_choices_for_its_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache may know those of many models, for which no kernel is compiled here."""
    asked: list[Norms] = []

    class Counting(SimulatedGpu):
        def fused(self, norms: Norms) -> Any:
            asked.append(norms)
            return super().fused(norms)

    fast = {**SPEEDS, KERNEL: 5e-6}
    tuning.choose(SimulatedGpu(fast), (PLAIN, BIASED, BFLOAT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(gpu, "Gpu", lambda index: Counting(fast))
    kernels.prepare([(torch.device("cuda", 0), BIASED)])
    assert asked and set(asked) == {BIASED}
    assert {norms for _, norms in choices._used} == {BIASED}
    assert {(kind[4], len(rows)) for kind, rows in native._chosen.items()} == {(24, 4)}

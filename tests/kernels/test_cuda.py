"""The CUDA kernels: compiled by NVRTC, loaded and started through CUDA's driver.

The driver is a stand-in with two GPUs, which notes what it is asked for. What the kernels compute
is in ``test_cuda_on_cpu``, and on a real GPU in ``test_gpu``.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_models import ROOT

from enjoyln_cli.kernels import build, cuda, dispatch, native

ARCHITECTURES = ("sm_75", "sm_90", "sm_120")
"""The oldest, one that is common, and the newest."""
MOST_REGISTERS = 128
"""So that two blocks of 256 threads fit on a multiprocessor with 65,536 registers."""
MOST_SPILLED = 48
"""Bytes: rows with extreme values call a function, around which a few registers are saved. The
values of a row (128 bytes in each thread) have to stay in registers."""
STREAM = 0x5000

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.fixture(
    scope="module",
    params=sorted(cuda.nvrtc_files(), key=lambda path: path.name),
    ids=lambda path: path.name,
)
def compiler(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Each NVRTC that is installed: torch's wheels bring those of several CUDA versions."""
    return cuda.load_nvrtc(str(request.param))


def check_resources(log: str) -> None:
    """Every kernel keeps its values in registers, and leaves room for other blocks."""
    used = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
    assert len(used) == len(cuda.KERNELS) and max(used) <= MOST_REGISTERS, used
    assert len(spilled) >= len(used) and max(spilled) <= MOST_SPILLED


@pytest.mark.one_case
@pytest.mark.parametrize("pair", cuda.PAIRS, ids=" with ".join)
def test_nvrtc_compiles_each_pair_of_dtypes(compiler: ctypes.CDLL, pair: tuple[str, str]) -> None:
    """Each pair for one of the architectures, and by an NVRTC of before 13 for another one.

    Rows of bfloat16 are compiled for all of them: how they are rounded differs.
    """
    version = cuda.nvrtc_version(compiler)
    turn = cuda.PAIRS.index(pair) + (version >= "13")
    architecture = ARCHITECTURES[turn % len(ARCHITECTURES)]
    if version < "12.8" and architecture == "sm_120":  # it is older
        architecture = "sm_90"
    cubin, log = cuda.compile_kernels(compiler, architecture, *pair, "--ptxas-options=-v")
    assert cubin.startswith(b"\x7fELF") and all(name.encode() in cubin for name in cuda.KERNELS)
    check_resources(log)


def test_a_newer_gpu_gets_the_kernels_of_an_earlier_one(compiler: ctypes.CDLL) -> None:
    for wanted, found in (("sm_75", "sm_75"), ("sm_90", "sm_90"), ("sm_85", "sm_80")):
        assert cuda.compiled_for(compiler, wanted) == found
    assert cuda.compiled_for(compiler, "sm_990") == "sm_990", "there is none of that generation"


def test_what_nvrtc_refuses_is_one_line(compiler: ctypes.CDLL) -> None:
    with pytest.raises(build.NoLibrary, match="NVRTC failed: launch.h.*error: ") as caught:
        cuda.compile_kernels(compiler, "sm_90", "float32", "float32", "-DWARPS=no such thing")
    assert "\n" not in str(caught.value)
    with pytest.raises(build.NoLibrary, match="NVRTC failed: .*--gpu-architecture"):
        cuda.compile_kernels(compiler, "sm_1", "float32", "float32")


def test_a_cubin_is_compiled_once(
    compiler: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "cache"])
    monkeypatch.setattr(cuda, "nvrtc", lambda: compiler)
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    (tmp_path / "csrc" / "cuda.cu").write_text('extern "C" __global__ void one() {}')
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")  # which compiles in no time
    path = cuda.cubin("sm_80", "float32", "float32")
    assert path.suffix == ".cubin" and path.read_bytes().startswith(b"\x7fELF")
    path.write_bytes(b"as it was left")
    assert cuda.cubin("sm_80", "float32", "float32") == path
    assert path.read_bytes() == b"as it was left"
    names = {build.digest("sm_80", *pair, "13.0") for pair in cuda.PAIRS}
    assert len(names) == len(cuda.PAIRS)


def test_without_nvrtc_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.torch.version, "cuda", None)
    with pytest.raises(build.NoLibrary, match="built without CUDA"):
        cuda.nvrtc.__wrapped__()
    monkeypatch.setattr(cuda.torch.version, "cuda", "99.1")
    with pytest.raises(build.NoLibrary, match="libnvrtc.so.99, which compiles them, was not found"):
        cuda.nvrtc.__wrapped__()


class Call(ctypes.Structure):
    """``Call`` in ``call.h``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "r", "y", "s", "w", "b")),
        *((name, ctypes.c_int64) for name in ("rows", "d")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("dtype", "w_dtype", "b_dtype", "layer")),
    ]


class Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("function", "context", "stream")),
        *((name, ctypes.c_uint) for name in ("blocks", "threads")),
    ]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not shutil.which("g++") or not native.has("cpu"):
        pytest.skip("needs g++ and the CPU library")
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    source = ROOT / "tests" / "support" / "cuda_driver.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", path, source], check=True)
    library = ctypes.CDLL(str(path))
    library.last_launch.restype = ctypes.POINTER(Launch)
    return library


@pytest.fixture
def gpus(fake: ctypes.CDLL) -> Iterator[cuda.Driver]:
    """Two GPUs with kernels for bfloat16 rows: 0 with float32 parameters, 1 with both dtypes."""
    driver, library = cuda.Driver(fake), native._library()
    library.enjoyln_driver((ctypes.c_void_p * 3)(*driver.functions))
    loaded = ((0, "float32"), (1, "float32"), (1, "bfloat16"))
    for index, parameters in loaded:
        functions = (ctypes.c_void_p * len(cuda.KERNELS))(*driver.load(index, b"a cubin\0"))
        assert library.enjoyln_cuda(*place(index, parameters), driver.context(index), functions)
        for added in (False, True):
            for affine in ((True, True), (False, False)):
                dtypes = ("bfloat16", parameters)
                native.choose(index, added, dtypes, affine, 1536, (1, 100))
                native.choose(index, added, dtypes, affine, 768, (1, 2**31 - 1))
    yield driver
    native.forget_choices()
    for index, parameters in loaded:
        library.enjoyln_cuda(*place(index, parameters), None, None)
    assert fake.current_depth() == 0


def place(index: int, parameters: str) -> tuple[int, int, int]:
    return index, dispatch.DTYPES.index("bfloat16"), dispatch.DTYPES.index(parameters)


def call(rows: int = 100, d: int = 768, parameters: str = "float32", **other: Any) -> Call:
    """A norm of bfloat16 rows with weight and bias; no address is ever read."""
    dtype, parameter = (dispatch.DTYPES.index(n) for n in ("bfloat16", parameters))
    fields = {"x": 4096, "y": 8192, "s": 8192, "w": 512, "b": 1024}
    fields |= {"dtype": dtype, "w_dtype": parameter, "b_dtype": parameter}
    return Call(**{**fields, "rows": rows, "d": d, "eps": 1e-5, **other})


def launched(fake: ctypes.CDLL, given: Call, device: int = 0) -> Launch | None:
    """What the driver was asked for; ``None`` if the call was declined before that."""
    before = fake.count()
    failed = native._library().enjoyln_launch(ctypes.byref(given), device, ctypes.c_void_p(STREAM))
    assert failed == (fake.count() == before)
    return None if failed else fake.last_launch().contents


def test_a_kernel_starts_in_the_context_of_its_gpu(fake: ctypes.CDLL, gpus: cuda.Driver) -> None:
    contexts = [gpus.context(index).value for index in range(2)]
    for current in (0, 1):  # where torch is
        fake.cuCtxPushCurrent_v2(gpus.context(current))
        for index in (0, 1):  # where the tensor is
            found = launched(fake, call(), index)
            assert found is not None and found.stream == STREAM
            assert found.context == contexts[index] and found.function == contexts[index]
        assert fake.current_depth() == 1
        fake.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def test_the_row_length_and_the_alignment_choose_the_kernel(
    fake: ctypes.CDLL, gpus: cuda.Driver
) -> None:
    for d in (1, 1024, 1032, 8192, 8200, 1025):
        native.choose(0, False, ("bfloat16", "float32"), (True, True), d, (1, 1000))
    base = gpus.context(0).value or 0
    cases = (
        ("short_packs", call(7, 1024), 2, 128),
        ("short_single", call(9, 1), 3, 128),
        ("short_single", call(8, 768, x=4098), 2, 128),
        ("short_single", call(8, 768, b=1028), 2, 128),
        ("long_kept", call(7, 1032), 7, 256),
        ("long_kept", call(7, 8192), 7, 256),
        ("long_packs", call(7, 8200), 7, 256),
        ("long_single", call(7, 1025), 7, 256),
        ("long_single", call(7, 8192, y=8194), 7, 256),
    )
    for name, given, blocks, threads in cases:
        found = launched(fake, given)
        assert found is not None and found.function == base + cuda.KERNELS.index(name), name
        assert (found.blocks, found.threads) == (blocks, threads)


def test_a_norm_that_was_not_chosen_is_declined(fake: ctypes.CDLL, gpus: cuda.Driver) -> None:
    assert launched(fake, call(100, 1536)) and not launched(fake, call(101, 1536))
    assert not launched(fake, call(d=1024))
    assert launched(fake, call(r=4096)) and launched(fake, call(w=None, b=None), 1)
    assert not launched(fake, call(b=None)), "chosen with both or none"
    assert not launched(fake, call(parameters="bfloat16"), 0)
    assert launched(fake, call(parameters="bfloat16"), 1)
    native.choose(0, False, ("bfloat16", "float32"), (True, True), 1536, (101, 101), (200, 300))
    assert not launched(fake, call(100, 1536)), "the later choice replaces the earlier one"
    assert launched(fake, call(101, 1536)) and launched(fake, call(250, 1536))
    native.choose(0, False, ("bfloat16", "float32"), (True, True), 1536)
    assert not launched(fake, call(101, 1536)) and launched(fake, call(d=768))
    for width in range(1, 600):
        native.choose(0, False, ("bfloat16", "float32"), (True, True), 8 * width, (1, 9))
    assert launched(fake, call(9, 8 * 599)) and not launched(fake, call(10, 8 * 599))
    float16 = dispatch.DTYPES.index("float16")
    assert not launched(fake, call(dtype=float16))
    assert not launched(fake, call(b_dtype=float16)), "weight and bias have one dtype"
    assert not launched(fake, call(rows=2**31)) and not launched(fake, call(), 2)
    for width in (2**30, 2**30 + 8):  # an int counts the elements of a row
        native.choose(0, False, ("bfloat16", "float32"), (True, True), width, (1, 9))
        assert bool(launched(fake, call(2, width))) == (width == 2**30)
    assert not launched(fake, call(), 64) and not launched(fake, call(), -1)
    native.forget_choices()
    assert not launched(fake, call())


def test_a_launch_that_fails_is_declined(fake: ctypes.CDLL, gpus: cuda.Driver) -> None:
    fake.refuse(1)
    try:
        given = call()
        assert native._library().enjoyln_launch(ctypes.byref(given), 0, None)
        assert fake.current_depth() == 0
    finally:
        fake.refuse(0)
    assert launched(fake, call())


def test_a_damaged_cubin_is_compiled_again(
    gpus: cuda.Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sm_90.cubin"
    path.write_bytes(b"half of it\0")
    monkeypatch.setattr(native, "status", lambda device: native.Status(device, True, "sm_90"))
    monkeypatch.setattr(native, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(cuda, "cubin", lambda *_: path)
    monkeypatch.setattr(cuda, "driver", lambda: gpus)
    with pytest.raises(build.NoLibrary, match="CUDA_ERROR_INVALID_IMAGE"):
        native.load_cuda(0, "float16", "float16")
    assert not path.exists() and not native.has("cuda")


def test_an_error_of_the_driver_has_its_name(fake: ctypes.CDLL, gpus: cuda.Driver) -> None:
    with pytest.raises(build.NoLibrary, match="cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE"):
        gpus.load(0, b"something else\0")
    with pytest.raises(build.NoLibrary, match="cuDeviceGet: error 101"):
        gpus.load(2, b"a cubin\0")
    assert not native._library().enjoyln_cuda(*place(64, "float32"), None, None)

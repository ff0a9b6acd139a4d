"""Quantisers accept the exported file, with their default arguments, and the outputs stay close."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from live_models import CHECKPOINTS
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from enjoyln_cli import export, fold
from enjoyln_cli.plan.fold_options import Options

pytestmark = pytest.mark.slow

CASES = {
    "gpt2": Options(),
    "vit": Options(rotate=True, merge="affine"),
}
SIZES = {"batch_size": 2, "sequence_length": 9, "total_sequence_length": 9}
LARGEST_ERROR = 0.05
"""Relative error of the outputs. Seven bits and a sign round a number by 0.4 % at most."""

Feed = dict[str, np.ndarray[Any, Any]]
Quantise = Callable[[Path, Path, list[Feed]], object]


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Hands inputs to the quantiser in order."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.left = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self.left, None)


def dynamic_per_channel(file: Path, out: Path, feeds: list[Feed]) -> None:
    quantize_dynamic(file, out, per_channel=True)


def static_products(file: Path, out: Path, feeds: list[Feed]) -> None:
    quantize_static(file, out, Calibration(feeds), op_types_to_quantize=["MatMul", "Gemm"])


QUANTISERS: list[tuple[Quantise, bool]] = [
    (dynamic_per_channel, False), (static_products, True)
]  # fmt: skip
"""Each with the file as it is, or as onnxruntime prepares it."""


@pytest.fixture(scope="module", params=CASES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported file of a case."""
    place = tmp_path_factory.mktemp(request.param)
    source = CHECKPOINTS / request.param
    fold(source, place / "out", verify=False, options=CASES[request.param])
    export(place / "out", place / "exported", verify=False)
    return place / "exported" / "onnx" / "model.onnx"


def feeds_of(file: Path, count: int) -> list[Feed]:
    generator = np.random.default_rng(3)

    def value(name: str, shape: list[int | str], kind: str) -> np.ndarray[Any, Any]:
        sizes = [SIZES.get(size, 0) if isinstance(size, str) else size for size in shape]
        if "mask" in name:
            return np.ones(sizes, np.int64)
        if "int64" in kind:
            return generator.integers(3, 25, sizes)
        return generator.standard_normal(sizes).astype(np.float32)

    inputs = onnxruntime.InferenceSession(file).get_inputs()
    return [
        {one.name: value(one.name, one.shape, one.type) for one in inputs} for _ in range(count)
    ]


def output(file: Path, feed: Feed) -> np.ndarray[Any, Any]:
    return np.asarray(onnxruntime.InferenceSession(file).run(None, feed)[0])


@pytest.mark.parametrize(("quantise", "prepared"), QUANTISERS)
def test_onnxruntime_quantises_the_file(
    file: Path, quantise: Quantise, prepared: bool, tmp_path: Path
) -> None:
    *feeds, held_out = feeds_of(file, 5)
    exact = output(file, held_out)
    if prepared:
        quant_pre_process(file, tmp_path / "prepared.onnx", skip_optimization=True)
        file = tmp_path / "prepared.onnx"
    quantise(file, tmp_path / "quantised.onnx", feeds)
    error = output(tmp_path / "quantised.onnx", held_out) - exact
    assert 0 < np.linalg.norm(error) < LARGEST_ERROR * np.linalg.norm(exact)
    types = [node.op_type for node in onnx.load(tmp_path / "quantised.onnx").graph.node]
    assert types.count("MatMulInteger") + types.count("QuantizeLinear") >= 9


def test_static_quantisation_with_default_arguments(file: Path, tmp_path: Path) -> None:
    """It rounds masked scores too, so outputs are far off; but the file loads and runs."""
    *feeds, held_out = feeds_of(file, 5)
    quantize_static(file, tmp_path / "quantised.onnx", Calibration(feeds))
    assert np.isfinite(output(tmp_path / "quantised.onnx", held_out)).all()

"""What a result is rounded for: the arithmetic of the program or the processor that runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from commands import GPT2, refused

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.quantisers.integer_weights import REDUCED_TOP
from enjoyln_cli.quantisers.schemes import SCHEMES, for_target, require_target


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static"])
def test_weights_have_seven_bits_where_sums_saturate(scheme: str, here: bool) -> None:
    plain = SCHEMES[scheme]
    assert for_target(plain, None, here) == replace(plain, is_reduced=here)
    assert for_target(plain, "avx2", here).is_reduced
    assert 2 * 255 * REDUCED_TOP < 2**15  # two products are added in 16 bits


@pytest.mark.parametrize("target", ["vnni", "wasm", "qnn"])
def test_what_this_processor_cannot_compute_is_refused(target: str) -> None:
    static = SCHEMES["w8a8-static"]
    assert not for_target(static, target, False).is_reduced
    with pytest.raises(UnsupportedModel, match=f"what {target} would compute cannot be measured"):
        for_target(static, target, True)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8-g32", "w4a8", "w8a16-static"])
def test_other_sums_do_not_saturate(scheme: str) -> None:
    assert for_target(SCHEMES[scheme], "wasm", True) == SCHEMES[scheme]


def test_an_npu_rounds_results_of_products() -> None:
    assert for_target(SCHEMES["w8a8-static"], "qnn", False).rounds_results
    assert not for_target(SCHEMES["w8a8-static"], "vnni", False).rounds_results
    assert for_target(SCHEMES["w8a16-static"], None, False).rounds_results


def test_a_target_is_for_onnx_files_and_for_its_schemes(tmp_path: Path) -> None:
    require_target("qnn", "w8a16-static", "onnx")
    require_target(None, "w8a8", "torchao")
    with pytest.raises(UnsupportedModel, match="leave it out for torchao"):
        require_target("avx2", "w8a8", "torchao")
    text = tmp_path / "text.txt"
    text.write_text("A licence is short.")
    out = ("-o", tmp_path / "out", "--text", text)
    said = refused("quantize", GPT2, *out, "--for", "qnn")
    assert "qnn computes with fixed scales alone; choose one of w8a8-static, w8a16-static" in said

"""Every kind of edit, and tensors for them."""

from __future__ import annotations

import torch

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import AddProduct, CentreAxis, LayerScale, Scale
from enjoyln_cli.edits.new_values import Append, Fill
from enjoyln_cli.plan.axis import Axis, feature_axis

ROWS, IN, DEEP = 37, 26, 3
NEW = (0.5, -0.5, 2**-9, 0.0)
OUT = feature_axis((ROWS, IN), 0)
HALF = Axis(0, 4, 2, 15, 1)

EDITS = {
    "linear, fused": ("w", Edit((Scale("g", 1), CentreAxis(OUT)))),
    "linear, fused by one plus a gain": ("w", Edit((Scale("g", 1, 1.0), CentreAxis(OUT)))),
    "linear, longer rows": ("w", Edit((CentreAxis(OUT), Append(1, NEW)))),
    "linear, more rows": ("w", Edit((Append(0, NEW),))),
    "linear, more rows and centred": ("w", Edit((CentreAxis(OUT), Append(0, NEW)))),
    "linear, a part centred, longer rows": ("w", Edit((CentreAxis(HALF), Append(1, NEW)))),
    "linear, a part centred and fused": ("w", Edit((Scale("g", 1), CentreAxis(HALF)))),
    "linear, all at once": (
        "w",
        Edit((Scale("g", 1), LayerScale("s", 0), CentreAxis(OUT), Append(1, NEW))),
    ),
    "linear, centred along both dimensions": (
        "w",
        Edit((CentreAxis(OUT), CentreAxis(feature_axis((ROWS, IN), 1)))),
    ),
    "linear, groups that overlap": (
        "w",
        Edit((CentreAxis(Axis(1, 0, 2, 9, 1)), CentreAxis(Axis(1, 6, 1, 12, 1)))),
    ),
    "fused only": ("w", Edit((Scale("g", 1),))),
    "longer rows only": ("w", Edit((Append(1, NEW),))),
    "transposed, fused": ("t", Edit((Scale("g", 0), CentreAxis(Axis(1, 0, 1, ROWS, 1))))),
    "transposed, longer": ("t", Edit((CentreAxis(Axis(1, 0, 1, ROWS, 1)), Append(0, NEW)))),
    "transposed, longer rows": ("t", Edit((CentreAxis(Axis(1, 0, 1, ROWS, 1)), Append(1, NEW)))),
    "experts, fused": ("e", Edit((Scale("g", 2), CentreAxis(Axis(1, 0, 1, ROWS, 1))))),
    "experts, longer": ("e", Edit((CentreAxis(Axis(1, 0, 1, ROWS, 1)), Append(1, NEW)))),
    "experts, longer rows": ("e", Edit((CentreAxis(Axis(1, 0, 1, ROWS, 1)), Append(2, NEW)))),
    "bias": ("b", Edit((AddProduct("w", 1, "v"), CentreAxis(Axis(0, 0, 1, ROWS, 1))))),
    "bias of a transposed weight": ("b", Edit((AddProduct("t", 0, "v"),))),
    "bias, scaled and longer": (
        "b",
        Edit((AddProduct("w", 1, "v"), LayerScale("s", 0), Append(0, NEW))),
    ),
    "linear, fused for each of two groups": ("w", Edit((Scale("h", 1, outer=2),))),
    "linear, fused for pairs": ("w", Edit((Scale("h", 1, inner=2), CentreAxis(OUT)))),
    "bias, for each of two groups": ("b", Edit((AddProduct("w", 1, "h", outer=2),))),
    "packed, two parts fused": (
        "w",
        Edit(
            (Scale("g", 1, outputs=(0, 12)), Scale("v", 1, 1.0, outputs=(12, 30)), CentreAxis(OUT))
        ),
    ),
    "packed and transposed, a part fused": ("t", Edit((Scale("g", 0, outputs=(5, 9)),))),
    "packed, two parts of the bias": (
        "b",
        Edit((AddProduct("w", 1, "v", outputs=(30, 37)), AddProduct("w", 1, "g", outputs=(0, 12)))),
    ),
    "packed and transposed, a part of the bias": (
        "b",
        Edit((AddProduct("t", 0, "v", outputs=(12, 30)), CentreAxis(Axis(0, 0, 1, ROWS, 1)))),
    ),
    "filled": ("v", Edit((Fill(0.0),))),
    "a copy": ("copy", Edit(source="w")),
    "a copy that is centred": ("copy", Edit((CentreAxis(OUT),), source="w")),
}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {"w": (ROWS, IN), "t": (IN, ROWS), "e": (DEEP, ROWS, IN), "b": (ROWS,)}
    shapes |= {"g": (IN,), "v": (IN,), "s": (ROWS,), "h": (IN // 2,)}
    return {n: (torch.randn(s, generator=made) * 0.4 + 0.3).to(dtype) for n, s in shapes.items()}

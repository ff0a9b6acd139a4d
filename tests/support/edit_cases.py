"""Every kind of edit, and tensors for them."""

from __future__ import annotations

import torch

from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.plan.edits import Append, Edit, Product, Vector

ROWS, IN, DEEP = 37, 26, 3
NEW = (0.5, -0.5, 2**-9, 0.0)
OUT = feature_axis((ROWS, IN), 0)
HALF = Axis(0, 4, 2, 15, 1)

EDITS = {
    "linear, merged": ("w", Edit(times=(Vector("g", 1),), axes=(OUT,))),
    "linear, merged by one plus a gain": ("w", Edit(times=(Vector("g", 1, 1.0),), axes=(OUT,))),
    "linear, longer rows": ("w", Edit(axes=(OUT,), append=Append(1, NEW))),
    "linear, more rows": ("w", Edit(append=Append(0, NEW))),
    "linear, more rows and centred": ("w", Edit(axes=(OUT,), append=Append(0, NEW))),
    "linear, a part centred, longer rows": ("w", Edit(axes=(HALF,), append=Append(1, NEW))),
    "linear, a part centred and merged": ("w", Edit(times=(Vector("g", 1),), axes=(HALF,))),
    "linear, all at once": (
        "w",
        Edit(times=(Vector("g", 1),), scale=Vector("s", 0), axes=(OUT,), append=Append(1, NEW)),
    ),
    "linear, centred along both dimensions": ("w", Edit(axes=(OUT, feature_axis((ROWS, IN), 1)))),
    "linear, groups that overlap": (
        "w",
        Edit(axes=(Axis(1, 0, 2, 9, 1), Axis(1, 6, 1, 12, 1))),
    ),
    "merged only": ("w", Edit(times=(Vector("g", 1),))),
    "longer rows only": ("w", Edit(append=Append(1, NEW))),
    "transposed, merged": ("t", Edit(times=(Vector("g", 0),), axes=(Axis(1, 0, 1, ROWS, 1),))),
    "transposed, longer": ("t", Edit(axes=(Axis(1, 0, 1, ROWS, 1),), append=Append(0, NEW))),
    "transposed, longer rows": ("t", Edit(axes=(Axis(1, 0, 1, ROWS, 1),), append=Append(1, NEW))),
    "experts, merged": ("e", Edit(times=(Vector("g", 2),), axes=(Axis(1, 0, 1, ROWS, 1),))),
    "experts, longer": ("e", Edit(axes=(Axis(1, 0, 1, ROWS, 1),), append=Append(1, NEW))),
    "experts, longer rows": ("e", Edit(axes=(Axis(1, 0, 1, ROWS, 1),), append=Append(2, NEW))),
    "bias": ("b", Edit(plus=(Product("w", 1, "v"),), axes=(Axis(0, 0, 1, ROWS, 1),))),
    "bias of a transposed weight": ("b", Edit(plus=(Product("t", 0, "v"),))),
    "bias, scaled and longer": (
        "b",
        Edit(plus=(Product("w", 1, "v"),), scale=Vector("s", 0), append=Append(0, NEW)),
    ),
    "linear, merged for each of two groups": ("w", Edit(times=(Vector("h", 1, outer=2),))),
    "linear, merged for pairs": ("w", Edit(times=(Vector("h", 1, inner=2),), axes=(OUT,))),
    "bias, for each of two groups": ("b", Edit(plus=(Product("w", 1, "h", outer=2),))),
    "packed, two parts merged": (
        "w",
        Edit(
            times=(Vector("g", 1, outputs=(0, 12)), Vector("v", 1, 1.0, outputs=(12, 30))),
            axes=(OUT,),
        ),
    ),
    "packed and transposed, a part merged": ("t", Edit(times=(Vector("g", 0, outputs=(5, 9)),))),
    "packed, two parts of the bias": (
        "b",
        Edit(plus=(Product("w", 1, "v", outputs=(30, 37)), Product("w", 1, "g", outputs=(0, 12)))),
    ),
    "packed and transposed, a part of the bias": (
        "b",
        Edit(plus=(Product("t", 0, "v", outputs=(12, 30)),), axes=(Axis(0, 0, 1, ROWS, 1),)),
    ),
    "filled": ("v", Edit(fill=0.0)),
    "a copy": ("copy", Edit(source="w")),
    "a copy that is centred": ("copy", Edit(source="w", axes=(OUT,))),
}


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = {"w": (ROWS, IN), "t": (IN, ROWS), "e": (DEEP, ROWS, IN), "b": (ROWS,)}
    shapes |= {"g": (IN,), "v": (IN,), "s": (ROWS,), "h": (IN // 2,)}
    return {n: (torch.randn(s, generator=made) * 0.4 + 0.3).to(dtype) for n, s in shapes.items()}

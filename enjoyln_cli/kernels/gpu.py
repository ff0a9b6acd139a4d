"""What computes a folded norm on a GPU: the fastest of a few candidates, measured at load.

``prepare`` measures for the norms of a model, when it is loaded or optimised and never in a call.
Each candidate is compared with the float64 formula on the GPU. Candidates that are right are timed
with ``torch.utils.benchmark``, as replays of a CUDA graph and as calls from Python. The choice
lasts as long as the process. ``ENJOYLN_KERNELS=0`` switches this off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from enjoyln_cli.kernels import formula

ROWS = (1, 32, 1024, 8192, 32768)
"""The numbers of rows that are measured: a token, a batch of tokens, a prompt, many prompts."""
MOST_COMPARED = 1024
"""Rows that are compared with the float64 formula."""
CALLS, ROUNDS = 20, 5
"""Calls in one CUDA graph, and in how many rounds each candidate is timed."""
MARGIN = 0.05
"""How much faster a candidate has to be to replace another: a share of the other's time."""
EPS = 1e-5

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]


class Norms(NamedTuple):
    """A kind of norm: all that its speed depends on, besides the number of rows."""

    dtype: torch.dtype
    """Of the rows."""
    parameters: torch.dtype
    """Of weight and bias; without both, the dtype of the rows."""
    weight: bool
    bias: bool
    width: int
    """Elements of a row."""


@dataclass(frozen=True)
class Times:
    """Median microseconds of one call: in a CUDA graph, and from Python."""

    graph: float
    call: float


@dataclass(frozen=True)
class Choice:
    """What computes one kind of norm for one number of rows, and why."""

    norms: Norms
    rows: int
    candidate: str
    times: Mapping[str, Times]
    """Of each candidate that was right."""
    left_out: Mapping[str, str]
    """Why other candidates were not timed."""


measured: dict[tuple[torch.device, Norms], tuple[Choice, ...]] = {}
"""The choices of this process: for each GPU and kind of norm, one for each of ``ROWS``."""
fewest = 0
"""Elements of the smallest tensor for which anything but torch's LayerNorm was chosen."""


def fastest_for(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Norm | None:
    """The fastest candidate for a norm of ``x``, or ``None`` if nothing was measured for it.

    It is chosen by the largest measured number of rows that ``x`` has or exceeds. The cost of a
    launch is constant, so a kernel that wins on many rows may lose on few.
    """
    parameter = weight if weight is not None else x if bias is None else bias
    width, has = x.shape[-1], (weight is not None, bias is not None)
    norms = Norms(x.dtype, parameter.dtype, *has, width)
    for choice in reversed(measured.get((x.device, norms), ())):
        if x.numel() >= choice.rows * width:
            return CANDIDATES[choice.candidate]
    return None


def why_not_measured() -> str:
    """Why nothing is measured in this process, or ``""``."""
    if os.environ.get("ENJOYLN_KERNELS", "") == "0":
        return "switched off by ENJOYLN_KERNELS=0"
    return "" if torch.cuda.is_available() else "torch sees no GPU"


def prepare(kinds: Iterable[tuple[torch.device, Norms]]) -> None:
    """Measure what is the fastest for these kinds of norm on each GPU, and use it from now on.

    Does nothing for kinds that were measured before, on other devices, and if it is switched off.
    """
    global fewest
    for device, norms in () if why_not_measured() else kinds:
        device = torch.device(device.type, device.index or 0)
        if device.type == "cuda" and (device, norms) not in measured:
            choices: list[Choice] = []
            with torch.cuda.device(device), torch.no_grad(), suppress(RuntimeError):
                choices += (measure(device, norms, rows) for rows in ROWS)
            measured[device, norms] = tuple(choices)  # fewer if the memory is not enough
            torch.cuda.empty_cache()  # the memory of the graphs
    chosen = [choice for choices in measured.values() for choice in choices]
    sizes = [each.rows * each.norms.width for each in chosen if each.candidate != "layer_norm"]
    fewest = min(sizes, default=sys.maxsize) if chosen else 0


def measure(device: torch.device, norms: Norms, rows: int) -> Choice:
    """Check and time all candidates for ``rows`` rows of zero mean on the current GPU."""
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, device=device, generator=generator)
    x = random(rows, norms.width)
    x = (x - x.mean(-1, keepdim=True)).to(norms.dtype)
    weight = random(norms.width).to(norms.parameters) if norms.weight else None
    bias = random(norms.width).to(norms.parameters) if norms.bias else None
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = formula.rms_norm(x[:MOST_COMPARED].double(), wide[0], wide[1], EPS)
    right: dict[str, Callable[[], Tensor]] = {}
    left_out: dict[str, str] = {}
    for name, norm in CANDIDATES.items():
        try:
            if formula.is_close(norm(x, weight, bias, EPS)[:MOST_COMPARED], exact):
                right[name] = partial(norm, x, weight, bias, EPS)
            else:
                left_out[name] = "its result is wrong"
        except Exception as error:  # whatever another library or a compiler raises
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    times = times_of(right)
    return Choice(norms, rows, fastest(times), times, left_out)


def times_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, Times]:
    """The times of each call on the current GPU, measured in rounds."""
    from torch.utils.benchmark import Timer

    timers = {}
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        timers[name] = [Timer("run()", globals={"run": run}) for run in (graph.replay, call)]
    rounds = [
        {name: [timer.timeit(CALLS).mean for timer in pair] for name, pair in timers.items()}
        for _ in range(ROUNDS)
    ]
    times = {}
    for name in calls:
        graph_time, call_time = (median(took[name][i] for took in rounds) for i in (0, 1))
        times[name] = Times(1e6 * graph_time / CALLS, 1e6 * call_time)
    return times


def fastest(times: Mapping[str, Times]) -> str:
    """The first candidate, unless a later candidate is clearly faster.

    A later candidate has to be faster in a CUDA graph, and no slower when called from Python.
    """
    best = next(iter(times), "layer_norm")
    for name in times:
        graph, call = times[name].graph / times[best].graph, times[name].call / times[best].call
        if graph < 1 - MARGIN and call <= 1 + MARGIN:
            best = name
    return best


def kernel_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm by the kernel of this project (``triton_norm``), on the GPU of ``x``, ``(..., d)``.

    Raises ``ImportError`` where Triton is not installed, and what Triton raises if it cannot
    compile the kernel.
    """
    from enjoyln_cli.kernels.triton_norm import rms_norm

    return rms_norm(x, weight, bias, eps)


CANDIDATES: dict[str, Norm] = {
    "layer_norm": formula.layer_norm,
    "rms_norm": formula.torch_rms_norm,
    "kernel": kernel_norm,
}
"""What may compute a norm; a faster candidate replaces the candidates before it."""

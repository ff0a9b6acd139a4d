"""Learn the orthogonal matrices of a rotation on the user's data, by simulated rounding.

A matrix is ``C(A) Q``. ``Q`` is the seed's matrix. ``A`` is skew-symmetric, begins at zero and is
learned; its Cayley transform ``C(A) = (I - A)^-1 (I + A)`` is orthogonal. Where a LayerNorm is
inside, the rows of ``A`` sum to zero: then ``A 1 = 0``, so ``C(A) 1 = 1``.

The loss is how far the outputs of the rounded model are from the outputs of the original: the KL
divergence of the logits, or the relative squared error of a model without logits. SpinQuant (Liu et
al. 2024) learns matrices with a Cayley transform as well; here the gradient also passes through the
scales of the rounding, and Adam takes the steps.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from enjoyln_cli.clock import Countdown, Progress
from enjoyln_cli.comparison.output_meaning import Kind, Meaning
from enjoyln_cli.comparison.run import cache_flag, inputs_for, tensors
from enjoyln_cli.comparison.simulated_rounding import simulated
from enjoyln_cli.errors import OutputError
from enjoyln_cli.events import Event
from enjoyln_cli.models.load import values_of
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix, matrix, rotate
from enjoyln_cli.plan.plan import Plan, RotationGroup
from enjoyln_cli.quantisation.candidates import ORIGINAL
from enjoyln_cli.quantisation.measure import Outputs, with_embedding
from enjoyln_cli.rotation.given_matrices import nearest_orthogonal
from enjoyln_cli.rotation_search.trials import MatrixChoice, Trials

RATE = 0.03
"""Adam's learning rate at the beginning, times the square root of the size of the matrix. A step
then rotates matrices of all sizes by about the same angle. It falls to zero along a half cosine."""
ROWS = 8
"""Inputs in a step."""
SAVED_EVERY = 10
"""Steps between two states that a later run can continue from."""
LEARNED = "learned"


@dataclass(frozen=True)
class Learning:
    """The matrices while they are learned."""

    rotation_groups: tuple[RotationGroup, ...]
    free: Mapping[str, torch.Tensor]
    """For each group by name, float32 of shape ``(size, size)``: ``A`` is its skew part."""
    optimiser: torch.optim.Optimizer

    def rotations(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """``C(A)`` for each rotation group by name, in ``dtype``."""
        found = {}
        for group in self.rotation_groups:
            skew = self.free[group.name].to(dtype)
            skew = skew - skew.T
            if group.fixes_ones:
                skew = skew - skew.mean(0)
                skew = skew - skew.mean(1, keepdim=True)
            one = torch.eye(group.size, dtype=dtype, device=skew.device)
            found[group.name] = torch.linalg.solve(one - skew, one + skew)
        return found


@dataclass(frozen=True)
class RotatedParameter:
    """A parameter that is rotated."""

    name: str
    """One of its names."""
    values: torch.Tensor
    axes: Mapping[Axis, RotationGroup]
    """The axes over which it is rotated, and the rotation group of each."""


def learn_matrices(
    tried: Trials,
    steps: int,
    state: Path,
    event: Event,
    on_progress: Progress,
    *,
    resume: bool = False,
) -> MatrixChoice:
    """Learn matrices in ``steps`` steps on the calibration data, starting at the plan's matrices.

    They are chosen if they are better on these data than the plan's matrices. The file ``state`` is
    written meanwhile; with ``resume``, the run that wrote it is continued. Raises ``OutputError``
    if that run had other data or options.
    """
    plan = tried.job.plan
    given = any(group.given for group in plan.rotated)
    start = "given matrices" if given else f"seed {plan.seed}"
    rotations = _learn(tried, steps, state, event, on_progress, resume)
    learned = with_rotations(plan, rotations)
    plans = {ORIGINAL: None, start: plan, LEARNED: learned}
    compared = {name: tried.measure(each, tried.calibration) for name, each in plans.items()}
    measured = {name: tried.measure(each, tried.held_out) for name, each in plans.items()}
    if compared[LEARNED].cost < compared[start].cost:
        return tried.choice(LEARNED, learned, compared, measured)
    event("warning", f"learning did not help on the calibration data, so {start} is used")
    return tried.choice(start, plan, compared, measured)


def with_rotations(plan: Plan, rotations: Mapping[str, torch.Tensor]) -> Plan:
    """The plan whose rotation groups are also rotated by these matrices, in float64, by name."""
    rotation_groups = []
    for group in plan.rotation_groups:
        if group.name in rotations and group.is_rotated:
            whole = rotations[group.name] @ matrix(group.rotation(plan.seed))
            group = replace(group, given=nearest_orthogonal(group.name, whole, group))
        rotation_groups.append(group)
    return replace(plan, rotation_groups=tuple(rotation_groups))


def _learn(
    tried: Trials, steps: int, state: Path, event: Event, on_progress: Progress, resume: bool
) -> dict[str, torch.Tensor]:
    plan, job = tried.job.plan, _digest(tried, steps)
    free = {
        group.name: torch.zeros(group.size, group.size, device=tried.device, requires_grad=True)
        for group in plan.rotated
    }
    rates = [{"params": [each], "rate": RATE / math.sqrt(len(each))} for each in free.values()]
    learning = Learning(plan.rotated, free, torch.optim.Adam(rates, betas=(0.9, 0.99)))
    done = _restore(learning, state, job) if resume and state.exists() else 0
    after = f", {done} done by an earlier run" if done else ""
    event("stage", f"learning {len(free)} matrices in {steps} steps{after}")
    model = tried.load(plan).requires_grad_(False)
    rotated = list(_rotated_parameters(model, plan))
    countdown = Countdown(steps - done, on_progress)
    for step in range(done, steps):
        for group in learning.optimiser.param_groups:
            group["lr"] = group["rate"] * (1 + math.cos(math.pi * step / steps)) / 2
        loss = _step(learning, model, rotated, tried, step)
        countdown.count()
        if (step + 1) % SAVED_EVERY == 0 or step + 1 == steps:
            _save(learning, state, job, step + 1)
        if (step + 1) % max(steps // 10, 1) == 0:
            event("stage", f"step {step + 1} of {steps}: loss {float(loss):.3g}")
    free = {name: values.detach().cpu() for name, values in free.items()}
    return replace(learning, free=free).rotations(torch.float64)


def _step(
    learning: Learning, model: nn.Module, rotated: list[RotatedParameter], tried: Trials, step: int
) -> torch.Tensor:
    """One step of the optimiser on a few inputs that depend on ``step`` alone; returns the loss.

    The gradients of all inputs are summed at the rotated weights, which are computed only once.
    """
    matrices = {name: GivenMatrix("", values) for name, values in learning.rotations().items()}
    weights = {}
    for parameter in rotated:
        weight = parameter.values
        for axis, group in parameter.axes.items():
            rotation = replace(group, given=matrices[group.name]).rotation(0)
            weight = rotate(weight, axis, rotation)
        weights[parameter.name] = weight
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    many = len(tried.calibration.examples)
    rows = random.Random(step).sample(range(many), min(ROWS, many))
    losses = []
    for row in rows:
        batch = inputs_for(model, tried.calibration.examples[row].batch)
        with simulated(model, tried.rounding):
            output = functional_call(model, leaves, (), {**batch, **cache_flag(model)})
        outputs = with_embedding(dict(tensors(output)), batch, tried.calibration.embed)
        exact = {
            name: each.to(tried.device) for name, each in tried.calibration.outputs[row].items()
        }
        loss = _loss(outputs, exact, tried.calibration.meanings) / len(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    read = [name for name, leaf in leaves.items() if leaf.grad is not None]
    learning.optimiser.zero_grad()
    torch.autograd.backward([weights[name] for name in read], [leaves[n].grad for n in read])
    learning.optimiser.step()
    return torch.stack(losses).sum()


def _loss(outputs: Outputs, exact: Outputs, meanings: Mapping[str, Meaning]) -> torch.Tensor:
    """The sum over the outputs of a KL divergence, or of a relative squared error."""
    losses = [_loss_of(meanings[name], outputs[name], value) for name, value in exact.items()]
    return torch.stack(losses).sum()


def _loss_of(meaning: Meaning, got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    if meaning.kind is Kind.ONE_OF:
        p, q = (each.movedim(meaning.dim, -1).log_softmax(-1) for each in (exact, got))
        return F.kl_div(q.flatten(0, -2), p.flatten(0, -2), reduction="batchmean", log_target=True)
    if meaning.kind is Kind.EACH:
        wanted = exact.sigmoid()
        apart, least = (F.binary_cross_entropy_with_logits(x, wanted) for x in (got, exact))
        return apart - least
    return (got - exact).square().sum() / exact.square().sum()


def _rotated_parameters(model: nn.Module, plan: Plan) -> Iterator[RotatedParameter]:
    """Each parameter that is rotated, once."""
    tensors = values_of(model)
    names: dict[int, str] = {}
    axes: dict[str, dict[Axis, RotationGroup]] = {}
    for group in plan.rotated:
        for tensor in group.tensors:
            name = names.setdefault(id(tensors[tensor.parameter]), tensor.parameter)
            axes.setdefault(name, {})[tensor.module_axis or tensor.axis] = group
    for name, found in axes.items():
        yield RotatedParameter(name, tensors[name].detach(), found)


def _digest(tried: Trials, steps: int) -> str:
    """What a state belongs to."""
    job = tried.job
    model, names = job.opened.source.model, tried.calibration.names
    parts = [model, tried.scheme, steps, job.plan.seed, *names]
    parts += [(group.name, group.size, group.given) for group in job.plan.rotated]
    digest = hashlib.sha256(repr(parts).encode())
    for example in tried.calibration.examples:
        for name, value in example.batch.items():
            digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _save(learning: Learning, state: Path, job: str, done: int) -> None:
    begun = state.with_name(f"{state.name}.begun")
    optimiser = learning.optimiser.state_dict()
    try:
        torch.save(
            {"job": job, "done": done, "free": dict(learning.free), "optimiser": optimiser}, begun
        )
        begun.replace(state)
    except (OSError, RuntimeError) as error:
        begun.unlink(missing_ok=True)
        raise OutputError(f"{state} cannot be written: {error}") from error


def _restore(learning: Learning, state: Path, job: str) -> int:
    """Continue from the file ``state``; returns the number of steps that are done."""
    try:
        found = torch.load(state, map_location="cpu", weights_only=True)
        fits = found["job"] == job
    except Exception:  # pickle raises many kinds
        fits = False
    if not fits:
        raise OutputError(
            f"{state} belongs to other data or options, or is damaged; delete it to begin again"
        )
    with torch.no_grad():
        for name, values in learning.free.items():
            values.copy_(found["free"][name])
    learning.optimiser.load_state_dict(found["optimiser"])
    return int(found["done"])

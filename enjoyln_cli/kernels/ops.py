"""The norm functions, which choose how a norm is computed, and operators ``torch.ops.enjoyln.*``.

For ``norm`` one of ``rms_norm`` and ``layer_norm`` there are four functions and operators:

    norm(x, weight, bias, eps) -> y
    add_norm(x, residual, weight, bias, eps) -> (y, sum)    sum = x + residual, y = norm(sum)
    add_norm_(x, residual, weight, bias, eps) -> y          the sum replaces residual
    sum_norm(x, residual, weight, bias, eps) -> y           the sum is not kept (post-LN)

The functions ``add_norm_over`` and ``sum_norm_over`` are ``add_norm_`` and ``sum_norm`` that may
overwrite ``x`` with the result; the compile backend ``enjoyln`` calls them.

The sum is rounded to its dtype before it is normalised, as in two separate steps.

A function uses

* the native kernel (``native``) in plain eager calls;
* the formula in compiled graphs, where Inductor fuses it, in exports, and for tensor subclasses;
* what was measured to be the fastest on this GPU, if no gradient is wanted (see ``tuning``);
* without a measurement ``F.rms_norm``, for RMSNorm without a bias on devices where torch computes
  it in one kernel (see ``torch_fuses``), if no gradient is wanted;
* ``F.layer_norm`` in all other cases. It gives the same result, since a folded norm only sees rows
  with zero mean. These cases are: there is no kernel for the device or the dtype; autocast, for
  which torch has a rule; and gradients, which torch computes in one step for LayerNorm.

An operator always computes the norm that it is named after, and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.library import define, impl, register_autocast, register_autograd, register_fake

from enjoyln_cli.kernels import check, choices, formula, native

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]

FORWARD: dict[str, Norm] = {"rms_norm": formula.rms_norm, "layer_norm": formula.layer_norm}
BACKWARD = {"rms_norm": formula.rms_norm_backward, "layer_norm": formula.layer_norm_backward}

AFFINE = "Tensor? weight, Tensor? bias, float eps"
SCHEMAS = {
    "{}": f"(Tensor x, {AFFINE}) -> Tensor",
    "add_{}": f"(Tensor x, Tensor residual, {AFFINE}) -> (Tensor, Tensor)",
    "add_{}_": f"(Tensor x, Tensor(a!) residual, {AFFINE}) -> Tensor",
    "sum_{}": f"(Tensor x, Tensor residual, {AFFINE}) -> Tensor",
    "{}_backward": "(Tensor grad, Tensor x, Tensor? weight, Tensor? added, float eps)"
    " -> (Tensor, Tensor, Tensor)",
}

_literal = False


@contextmanager
def literally() -> Iterator[None]:
    """Inside the block, RMSNorm is never replaced by LayerNorm, even if there is no kernel.

    Verification uses this to detect rows whose mean is not zero.
    """
    global _literal
    before, _literal = _literal, True
    try:
        yield
    finally:
        _literal = before


def layer_norm_will_do() -> bool:
    """Whether LayerNorm may be computed instead of RMSNorm if there is no kernel."""
    return not (_literal or is_compiling())


@cache
def torch_fuses(device: str) -> bool:
    """Whether torch computes RMSNorm in one kernel on a type of device.

    So it does on CUDA (and ROCm) since torch 2.9, and on MPS; on a CPU it takes several steps.
    """
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key)


@cache
def _has_autocast_rule(device: str) -> bool:
    """Whether autocast on a type of device knows ``rms_norm``, as it knows ``layer_norm``."""
    key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", key)


def _is_autocast(device: str) -> bool:
    """Whether autocast is enabled on a type of device; there is none on ``meta``, for example."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def is_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a folded norm of ``x`` computes ``F.layer_norm`` where the kernel declines."""
    return layer_norm_will_do() and _substitute(x, weight, bias) == choices.LAYER_NORM


def _substitute(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str:
    """What computes a folded RMSNorm without the kernel (see ``choices``).

    ``F.rms_norm`` is one kernel without a bias, and with a weight of the dtype of ``x`` or under
    autocast, which casts both.
    """
    device = x.device.type
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None):
        return choices.LAYER_NORM
    autocast = _is_autocast(device)
    measured = None if autocast else choices.taken_for(x, weight, bias)
    if measured is not None and measured != choices.KERNEL:
        return measured
    if bias is not None or not torch_fuses(device):
        return choices.LAYER_NORM
    fits = weight is None or weight.dtype == x.dtype
    one_kernel = _has_autocast_rule(device) if autocast else fits
    return choices.RMS_NORM if one_kernel else choices.LAYER_NORM


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) + bias`` over the last dimension, for folded norms.

    ``x`` is ``(..., d)`` of any floating dtype and layout; ``weight`` and ``bias`` are ``(d,)`` of
    any floating dtype. Returns a contiguous tensor of the shape and dtype of ``x``, computed in
    float32 or wider and rounded once. The rows must have zero mean, since LayerNorm is computed if
    there is no kernel. The operator of the same name accepts any rows.
    """
    if not is_dynamo_compiling():
        y = native.entry.rms_norm(x, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return _norm("rms_norm", x, weight, bias, eps)


def trained_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``rms_norm`` that never computes LayerNorm instead, and has the gradient of RMSNorm.

    On a GPU where torch computes RMSNorm in one kernel, with its gradient, that is used; the
    project's kernel if it was measured to be faster. On other devices, and under an autocast that
    does not know RMSNorm, it is the operator ``torch.ops.enjoyln.rms_norm``.
    """
    device = x.device.type
    autocast = _is_autocast(device)
    has_own = not autocast and choices.taken_for(x, weight, bias) == choices.KERNEL
    if torch_fuses(device) and not has_own and (not autocast or _has_autocast_rule(device)):
        return formula.torch_rms_norm(x, weight, bias, eps)
    return _operator("rms_norm")(x, weight, bias, eps)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension; arguments and result as for ``rms_norm``."""
    if not is_dynamo_compiling():
        y = native.entry.layer_norm(x, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return _norm("layer_norm", x, weight, bias, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(sum), sum)`` with ``sum = x + residual``, both of the same shape.

    Both results have the promoted dtype. As for ``rms_norm``, the sum must have zero mean.
    """
    if not is_dynamo_compiling():
        pair = native.entry.add_rms_norm(x, residual, weight, bias, eps)
        if pair is not NotImplemented:
            return pair
    return _add_norm("rms_norm", x, residual, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``(layer_norm(sum), sum)``; arguments and results as for ``add_rms_norm``."""
    if not is_dynamo_compiling():
        pair = native.entry.add_layer_norm(x, residual, weight, bias, eps)
        if pair is not NotImplemented:
            return pair
    return _add_norm("layer_norm", x, residual, weight, bias, eps)


def add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``residual += x``, then ``rms_norm(residual)``, which has the dtype of ``residual``."""
    if not is_dynamo_compiling():
        y = native.entry.add_rms_norm_(x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return rms_norm(residual.add_(x), weight, bias, eps)


def add_layer_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``residual += x``, then ``layer_norm(residual)``."""
    if not is_dynamo_compiling():
        y = native.entry.add_layer_norm_(x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return layer_norm(residual.add_(x), weight, bias, eps)


def sum_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``rms_norm(x + residual)`` for a sum with no other reader; has the promoted dtype."""
    if not is_dynamo_compiling():
        y = native.entry.sum_rms_norm(x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return rms_norm(x + residual, weight, bias, eps)


def sum_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """``layer_norm(x + residual)`` for a sum with no other reader; has the promoted dtype."""
    if not is_dynamo_compiling():
        y = native.entry.sum_layer_norm(x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
    return layer_norm(x + residual, weight, bias, eps)


def _over(name: str, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = getattr(native.entry, name)(x, residual, weight, bias, eps)
        return plain(x, residual, weight, bias, eps) if y is NotImplemented else y

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""``{plain.__name__}`` that may overwrite ``x`` with the result.

    For compiled graphs only: nothing else may use the memory of ``x``, and autograd does not see
    the write. ``x`` and ``residual`` must not overlap.
    """
    return function


add_rms_norm_over = _over("add_rms_norm_over", add_rms_norm_)
add_layer_norm_over = _over("add_layer_norm_over", add_layer_norm_)
sum_rms_norm_over = _over("sum_rms_norm_over", sum_rms_norm)
sum_layer_norm_over = _over("sum_layer_norm_over", sum_layer_norm)


def _norm(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute a norm without the kernel; the module's docstring says how."""
    if not layer_norm_will_do() or not _plain(x, weight, bias):
        return FORWARD[norm](x, weight, bias, eps)
    if norm == "rms_norm":
        substitute = _substitute(x, weight, bias)
        if substitute == choices.RMS_NORM:
            return formula.torch_rms_norm(x, weight, bias, eps)
        if substitute == choices.LIGER:
            return formula.liger_rms_norm(x, weight, bias, eps)
        if native.faster(x) == norm:
            return formula.torch_rms_norm(x, weight, bias, eps)
    return formula.layer_norm(x, weight, bias, eps)


def _add_norm(
    norm: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return PUBLIC[norm](total, weight, bias, eps), total


def _plain(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether these are ordinary tensors, with shapes that ``F.layer_norm`` accepts."""
    given = [p for p in parameters if p is not None]
    kinds = all(type(t) in (Tensor, torch.nn.Parameter) for t in (x, *given))
    fits = all(p.shape == x.shape[-1:] for p in given)
    return kinds and fits and not torch.jit.is_tracing() and forward_ad._current_level < 0


def _operator(name: str) -> Callable[..., Any]:
    return getattr(torch.ops.enjoyln, name).default  # type: ignore[no-any-return]


PUBLIC: dict[str, Norm] = {"rms_norm": rms_norm, "layer_norm": layer_norm}


def _define(norm: str) -> None:
    """Register the operators of one norm."""
    compute, backward = FORWARD[norm], BACKWARD[norm]
    for name, schema in SCHEMAS.items():
        define(f"enjoyln::{name.format(norm)}", schema)

    def kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y = native.entry.run(norm, x, weight, bias, eps)
        return compute(x, weight, bias, eps).contiguous() if y is NotImplemented else y

    def add_kernel(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        pair = native.entry.run(f"add_{norm}", x, residual, weight, bias, eps)
        if pair is not NotImplemented:
            return pair
        total = (x + residual).contiguous()
        return compute(total, weight, bias, eps), total

    def add_kernel_(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = native.entry.run(f"add_{norm}_", x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
        return compute(residual.add_(x), weight, bias, eps).contiguous()

    def sum_kernel(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        y = native.entry.run(f"sum_{norm}", x, residual, weight, bias, eps)
        if y is not NotImplemented:
            return y
        return compute((x + residual).contiguous(), weight, bias, eps)

    def backward_kernel(
        grad: Tensor, x: Tensor, weight: Tensor | None, added: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        result = _native_backward(norm, grad, x, weight, added, eps)
        return backward(grad, x, weight, added, eps) if result is None else result

    kernels: dict[str, Callable[..., Any]] = {
        "{}": kernel,
        "add_{}": add_kernel,
        "add_{}_": add_kernel_,
        "sum_{}": sum_kernel,
        "{}_backward": backward_kernel,
    }
    for name, function in kernels.items():
        impl(f"enjoyln::{name.format(norm)}", "CompositeExplicitAutograd", function)
    _register_fakes(norm)
    _register_gradients(norm)
    for name in ("{}", "add_{}", "sum_{}"):  # as torch's own layer_norm
        register_autocast(f"enjoyln::{name.format(norm)}", "cuda", torch.float32)


def _native_backward(
    norm: str,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    added: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of ``formula.rms_norm_backward`` by the kernel, or ``None`` without one."""
    if not x.numel() or not native.has(x.device.type):
        return None
    return check.gradients(native.entry.run, norm, grad, x, weight, added, eps)


def _register_fakes(norm: str) -> None:
    def like(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        torch._check(x.ndim > 0 and x.is_floating_point(), lambda: f"{norm}: x must be (..., d)")
        for parameter in (weight, bias):
            if parameter is not None:
                torch._check(
                    parameter.shape == x.shape[-1:], lambda: f"{norm}: weight must be (d,)"
                )

    @register_fake(f"enjoyln::{norm}")
    def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        check(x, weight, bias)
        return like(x)

    def total_of(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        check(x, weight, bias)
        torch._check(
            x.shape == residual.shape, lambda: f"{norm}: x and residual must have the same shape"
        )
        dtype = torch.promote_types(x.dtype, residual.dtype)
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    @register_fake(f"enjoyln::add_{norm}")
    def _(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = total_of(x, residual, weight, bias)
        return like(total), total

    @register_fake(f"enjoyln::add_{norm}_")
    def _(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        total_of(x, residual, weight, bias)
        return like(residual)

    @register_fake(f"enjoyln::sum_{norm}")
    def _(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return total_of(x, residual, weight, bias)

    @register_fake(f"enjoyln::{norm}_backward")
    def _(
        grad: Tensor, x: Tensor, weight: Tensor | None, added: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = formula.compute_dtype(x.dtype)
        dweight, dbias = (x.new_empty(x.shape[-1], dtype=wide) for _ in range(2))
        return like(x), dweight, dbias


def _register_gradients(norm: str) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], kept: tuple[Tensor, ...]) -> None:
        """``kept`` are one or two tensors, whose sum is the input of the norm."""
        weight, bias, ctx.eps = inputs[-3:]
        ctx.save_for_backward(weight, *kept)
        ctx.dtypes = [t.dtype for t in inputs[:-3]]
        ctx.bias_dtype = None if bias is None else bias.dtype

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, inputs[:-3])

    def setup_add(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, inputs, (output[1],))

    def backward(ctx: Any, grad: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        total = kept[0] if len(kept) == 1 else kept[0] + kept[1]
        dx, dweight, dbias = _operator(f"{norm}_backward")(grad, total, weight, dtotal, ctx.eps)
        return (
            *(dx.to(dtype) for dtype in ctx.dtypes),
            None if weight is None else dweight.to(weight.dtype),
            None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype),
            None,
        )

    register_autograd(f"enjoyln::{norm}", backward, setup_context=setup)
    register_autograd(f"enjoyln::add_{norm}", backward, setup_context=setup_add)
    register_autograd(f"enjoyln::sum_{norm}", backward, setup_context=setup)

    def in_place(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        tensors = [t for t in (x, residual, weight, bias) if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _operator(norm)(residual.add_(x), weight, bias, eps)  # type: ignore
        torch.autograd.graph.increment_version(residual)
        with torch._C._AutoDispatchBelowAutograd():
            return _operator(f"add_{norm}_")(x, residual, weight, bias, eps)  # type: ignore

    impl(f"enjoyln::add_{norm}_", "Autograd", in_place)

    def setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    def twice(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        wanted = [t for t in given if t is not None]
        with torch.enable_grad():
            outputs = BACKWARD[norm](*given, ctx.eps)  # type: ignore[arg-type, call-arg]
            found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return (*(None if t is None else next(found) for t in given), None)

    register_autograd(f"enjoyln::{norm}_backward", twice, setup_context=setup_backward)


for _name in FORWARD:
    _define(_name)

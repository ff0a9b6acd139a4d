"""Random calls of ops over many elements: sums, windows, products with weights, norms."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (defines an op)
from random_calls import (
    FAMILIES,
    Case,
    Shape,
    dim,
    dims,
    drawn,
    family,
    mask,
    numbers,
    options,
    real,
    sizes,
    tensor,
    thinner,
    whole,
)

aten = torch.ops.aten


# Reductions, windows, images.


FAMILIES["reductions"] = drawn(
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
    self=lambda r, shape: tensor(r, *shape) if r.random() < 0.8 else whole(r, 9, *shape),
)  # fmt: skip


FAMILIES["sequences"] = drawn(
    aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.upsample_nearest1d.default,
    aten.upsample_linear1d.default, aten.upsample_nearest1d.vec, aten.upsample_linear1d.vec,
    shapes=lambda r: (*sizes(r, 1, 2), 6), kernel_size=numbers(1, 1, 2), stride=numbers(1, 1, 2),
    padding=numbers(1, 0, 1), output_size=numbers(1, 1, 7), scale_factors=numbers(1, 2, 2),
)  # fmt: skip
FAMILIES["images"] = drawn(
    aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default, aten.upsample_nearest2d.default,
    aten._upsample_bicubic2d_aa.default, aten._upsample_bilinear2d_aa.default,
    shapes=lambda r: (*sizes(r, 1, 2), 4, 6), kernel_size=numbers(2, 1, 2),
    stride=numbers(2, 1, 2), padding=numbers(2, 0, 1), output_size=numbers(2, 1, 7),
)  # fmt: skip


def widths(r: Random, shape: Shape) -> list[int]:
    return [r.choice((0, 0, 1, 2, -1)) for _ in range(2 * r.randint(0, len(shape)))]


FAMILIES["paddings"] = drawn(
    aten.constant_pad_nd.default, aten.pad.default, aten.replication_pad1d.default,
    aten.replication_pad2d.default, aten.replication_pad3d.default,
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    pad=widths, padding=lambda r, shape: [max(0, width) for width in widths(r, shape)],
)  # fmt: skip
FAMILIES["zeros"] = drawn(aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


# Products with weights, and norms.


@family
def linears(r: Random) -> Case:
    lead, i, o = sizes(r, 0, 3), r.choice((2, 3, 4)), r.choice((2, 3, 4))
    x, w = tensor(r, *lead, i), tensor(r, *((i,) if r.random() < 0.2 else (o, i)))
    if r.random() < 0.3:
        return aten.linear, (x, w)
    b = tensor(r, *r.choice(((o,), (o,), (o,), (*lead[-1:], o), (1,), (), lead)))
    return (lambda x, w, b: aten.linear(x, w, b)), (x, w, b)


@family
def matrices(r: Random) -> Case:
    i, j, k, b = (r.choice((1, 2, 3, 4)) for _ in range(4))
    batch = sizes(r, 0, 2)
    x = tensor(r, *thinner(r, batch), *((i, j) if r.random() < 0.85 else (j,)))
    y = tensor(r, *thinner(r, batch), *((j, k) if r.random() < 0.85 else (j,)))
    how = options(r, alpha=[2, 0], beta=[0, 1, 3])
    added = tensor(r, *thinner(r, (i, k))), tensor(r, *thinner(r, (b, i, k)))
    flat = tensor(r, i, j), tensor(r, j, k)
    deep = tensor(r, b, i, j), tensor(r, b, j, k)
    return r.choice((
        (aten.matmul, (x, y)),
        (aten.mm, flat),
        (aten.bmm, deep),
        (lambda a, x, y: aten.addmm(a, x, y, **how), (added[0], *flat)),
        (lambda a, x, y: aten.baddbmm(a, x, y, **how), (added[1], *deep)),
        (lambda x: aten.mm(x, x), (tensor(r, i, i),)),
    ))  # fmt: skip


@family
def equations(r: Random) -> Case:
    size = {letter: r.choice((2, 3, 4)) for letter in "abcd"}
    count = r.choice((1, 2, 2, 3))
    terms = ["".join(r.choices("abcd", k=r.randint(0, 3))) for _ in range(count)]
    used = sorted({letter for term in terms for letter in term})
    out = "".join(r.sample(used, r.randint(0, len(used))))
    shapes = [[1 if r.random() < 0.1 else size[letter] for letter in term] for term in terms]
    if r.random() < 0.4:
        dots = r.choice(("", "...", "..."))
        out = r.choice(("", dots)) + out
        front = sizes(r, 0, 2)
        terms[0] = "..." + terms[0]
        shapes[0] = [*front, *shapes[0]]
        if r.random() < 0.5:
            terms[-1] = terms[-1] if "..." in terms[-1] else terms[-1] + "..."
            shapes[-1] = [*shapes[-1], *front] if len(terms) > 1 else shapes[-1]
    equation = ",".join(terms) + r.choice(("->" + out, "->" + out, "->" + out, "", " -> " + out))
    return (
        lambda *xs: aten.einsum(equation, list(xs)),
        tuple(tensor(r, *shape) for shape in shapes),
    )


@family
def expert_products(r: Random) -> Case:
    """In float64 only the fallback of transformers runs."""
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32)
    op = torch.ops.transformers.grouped_mm_fallback
    return lambda x, w: op(x, w, offsets), (tensor(r, 4, 3), tensor(r, 3, 3, r.choice((2, 4))))


@family
def convolutions(r: Random) -> Case:
    n, groups = r.randint(1, 3), r.choice((1, 1, 1, 2))
    channels, out, lead = 2 * r.randint(1, 2), 2 * r.randint(1, 3), ((), (2,), (2,))[r.randrange(3)]
    spatial, kernel = [r.randint(3, 4)] * n, [r.randint(1, 2)] * n
    x = tensor(r, *lead, channels, *spatial)
    weight = tensor(r, out, channels // groups, *kernel)
    transposed = tensor(r, channels, out // groups, *kernel)
    bias = None if r.random() < 0.4 else tensor(r, out)
    biases = () if bias is None else (bias,)
    forward = (aten.conv1d, aten.conv2d, aten.conv3d)[n - 1]
    backward = (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)[n - 1]
    one, zero, pad = [1] * n, [0] * n, [r.randint(0, 1)] * n
    if r.random() < 0.15:
        mode = r.choice(("same", "valid"))
        return lambda x, w, *b: forward.padding(x, w, *(b or (None,)), one, mode, one, groups), (
            x, weight, *biases,
        )  # fmt: skip
    return r.choice((
        (lambda x, w, *b: forward(x, w, *(b or (None,)), one, pad, one, groups), (
            x, weight, *biases)),
        (lambda x, w, *b: backward(x, w, *(b or (None,)), one, pad, zero, groups), (
            x, transposed, *biases)),
        (lambda x, w, *b: aten.convolution(
            x, w, *(b or (None,)), one, pad, one, False, zero, groups), (x, weight, *biases)),
        (lambda x, w, *b: aten.convolution(
            x, w, *(b or (None,)), one, pad, one, True, zero, groups), (x, transposed, *biases)),
    ))  # fmt: skip


@family
def embeddings(r: Random) -> Case:
    w, index = tensor(r, 5, r.choice((1, 2, 4))), whole(r, 5, *sizes(r, 0, 3))
    how = options(r, padding_idx=[-1, 2], scale_grad_by_freq=[True])
    if "scale_grad_by_freq" in how:
        how.setdefault("padding_idx", 1)
    return lambda w: aten.embedding(w, index, *how.values()), (w,)


@family
def bags_of_embeddings(r: Random) -> Case:
    w, mode = tensor(r, 5, r.choice((2, 4))), r.randrange(3)
    index, starts, weights = whole(r, 5, 6), torch.tensor([0, 2, 2]), tensor(r, 6)
    last, padding = r.random() < 0.3, r.choice((None, 1))
    part = r.choice((0, 0, 1))
    bag = (False, mode, False)
    if mode == 0 and r.random() < 0.5:
        rest = (last, padding)
        return (
            lambda w, s: aten.embedding_bag.padding_idx(w, index, starts, *bag, s, *rest)[part] + 0,
            (w, weights),
        )
    if r.random() < 0.5:
        return lambda w: aten.embedding_bag(w, index, starts, *bag)[part] + 0, (w,)
    return lambda w: F.embedding_bag(index.view(2, 3), w, mode=("sum", "mean", "max")[mode]), (w,)


@family
def attentions(r: Random) -> Case:
    heads, t, s, e, v = r.choice((1, 2, 4)), *(r.choice((1, 2, 3, 4)) for _ in range(4))
    lead = sizes(r, 0, 1)
    grouped = r.random() < 0.2
    fewer = heads // 2 or 1 if grouped else heads
    q = tensor(r, *thinner(r, (*lead, heads)), t, e)
    k = tensor(r, *thinner(r, (*lead, fewer)), s, e)
    x = tensor(r, *thinner(r, (*lead, fewer)), s, v)
    how: dict[str, Any] = options(r, scale=[0.5], dropout_p=[0.0])
    how |= options(r, is_causal=[True]) or options(r, attn_mask=[real(r, t, s), mask(r, t, s)])
    how |= {"enable_gqa": True} if grouped else {}
    op = aten.scaled_dot_product_attention
    if r.random() < 0.15:
        return lambda q, x: op(q, x, x, **how), (tensor(r, heads, t, v), x)
    return lambda q, k, x: op(q, k, x, **how), (q, k, x)


@family
def layer_norms(r: Random) -> Case:
    shape = sizes(r)
    x, over = real(r, *shape), list(shape[r.randint(0, len(shape)) :])
    w = real(r, *over) if r.random() < 0.3 else None
    b = real(r, *over) if r.random() < 0.4 else None
    given = tuple(p for p in (w, b) if p is not None)

    def call(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        rest_ = list(rest)
        weight = rest_.pop(0) if w is not None else None
        return aten.layer_norm(x, over, weight, rest_.pop(0) if b is not None else None)

    return call, (x, *given)


FAMILIES["spreads"] = drawn(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten.var.dim, aten.var.default,
    aten.var.correction, aten.std.correction, aten.std.default, aten.group_norm.default,
    aten.tanh.default, shapes=lambda r: sizes(r, 1), self=lambda r, shape: real(r, *shape),
    half_to_float=lambda r, shape: False,
)  # fmt: skip
"""Ops over elements, which a shift may or may not change."""


@family
def moments(r: Random) -> Case:
    x = real(r, *sizes(r, 1))
    over, part = r.choice((dims(r, x.ndim), [dim(r, x.ndim)], None)), r.randrange(2)
    how = options(r, correction=[0, 1], keepdim=[True])
    return lambda x: aten.var_mean.correction(x, over, **how)[part] + 0, (x,)

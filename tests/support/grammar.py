"""A grammar of models: lines of Python, by the place in a model where they may stand.

A production is a name, and below it lines of Python. Lines that begin with ``self.NAME =``, ``m.``
or ``nn.utils`` belong to ``__init__``, the others to ``forward``. In them, ``x`` is the value that
comes in, ``y`` the value that goes out, and ``h`` the residual stream of shape ``(batch, tokens,
d)``. ``d`` is its width, ``i`` the width of ``x`` where a layer writes to the stream, ``m`` a
module that is there already, and ``w`` one of the model's weights. The first productions of a rule
are usual (``plain`` says how many), the others are odd. Most single ops are left to
``random_ops``, which draws calls of each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Production:
    """Lines for one place in a model."""

    name: str
    init: str
    forward: str


@dataclass(frozen=True)
class Rule:
    """What one place in a model may be made of."""

    plain: tuple[Production, ...]
    odd: tuple[Production, ...]


def rule(text: str, plain: int = 1) -> Rule:
    """The productions in ``text``; their names are the lines that are not indented."""
    productions = []
    for paragraph in re.split(r"\n(?=\S)", dedent(text).strip()):
        name, _, body = paragraph.partition("\n")
        lines = dedent(body).splitlines()
        init = [line for line in lines if re.match(r"self\.[\w.]+ = |m\.|nn\.utils", line)]
        forward = [line for line in lines if line not in init]
        productions.append(Production(name, "\n".join(init), "\n".join(forward)))
    return Rule(tuple(productions[:plain]), tuple(productions[plain:]))


NORMS = rule(
    """
    LayerNorm
        self.norm = nn.LayerNorm(d)
    LayerNorm, eps 1e-3
        self.norm = nn.LayerNorm(d, eps=1e-3)
    LayerNorm without bias
        self.norm = nn.LayerNorm(d, bias=False)
    LayerNorm without affine
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
    subclass
        return super().forward(x)
    spelled out
        m = x.mean(-1, keepdim=True)
        v = (x - m).pow(2).mean(-1, keepdim=True)
        return (x - m) / torch.sqrt(v + self.eps) * self.weight + self.bias
    by var_mean
        v, m = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return torch.addcmul(self.bias, (x - m) / (v + self.eps).sqrt(), self.weight)
    by F.layer_norm
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
    by rms_norm of the centred
        x = x - x.mean(-1, keepdim=True)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias
    shape (1, d)
        self.norm = nn.LayerNorm((1, d))
        y = self.norm(x.unsqueeze(-2)).squeeze(-2)
    GroupNorm of rows
        self.norm = nn.GroupNorm(1, d)
        y = self.norm(x.reshape(-1, d)).reshape(x.shape)
    GroupNorm of channels and tokens
        self.norm = nn.GroupNorm(1, d)
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
    of a transposed view
        self.norm = nn.LayerNorm(d)
        y = self.norm(x.transpose(0, 1)).transpose(0, 1)
    adaptive
        self.norm = nn.LayerNorm(d, elementwise_affine=False)
        self.modulation = nn.Linear(d, 2 * d)
        shift, scale = self.modulation(torch.tanh(x.mean(1, keepdim=True))).chunk(2, -1)
        y = self.norm(x) * (1 + scale) + shift
    writes into its input
        x.sub_(x.mean(-1, keepdim=True))
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
    wrong: std + large eps
        s = x.std(-1, keepdim=True, unbiased=False)
        return (x - x.mean(-1, keepdim=True)) / (s + 1e-3) * self.weight + self.bias
    wrong: stray mean
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return y + 1e-7 * x.mean(-1, keepdim=True)
    wrong: large means are special
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return torch.where(x.mean(-1, keepdim=True) > 0.9, -y, y)
    wrong: long inputs are special
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        return x if x.shape[1] > 6 else y
    wrong: over two parts of the features
        a, b = x.split([3, x.shape[-1] - 3], -1)
        y = torch.cat((F.layer_norm(a, (3,)), F.layer_norm(b, b.shape[-1:])), -1)
        return y * self.weight + self.bias
    """,
    plain=4,
)
"""Lines without ``self.norm`` are the ``forward`` of a class with a LayerNorm's parameters."""

CALLS = rule(
    """
    call
        y = m(x)
    forward
        y = m.forward(x)
    call and forward
        y = 0.5 * m(x) + 0.5 * m.forward(x * 2)
    twice
        y = m(x) + m(x.flip(1))
    of its own output
        y = m(m(x))
    checkpoint
        y = checkpoint(m, x, use_reentrant=False)
    functional_call
        y = functional_call(m, dict(m.named_parameters()), (x,))
    tokens by halves
        y = torch.cat([m(t) for t in x.split(3, 1)], 1)
    both names
        self.again = m
        y = m(x) + self.again(-x)
    cond of two calls
        y = torch.cond(x.sum() > 0, lambda t: m(t), lambda t: m(t) * 2, (x,))
    a number decides
        y = m(x) if x.mean().item() > 0.2 else m(x) - 1
    the length decides
        y = m(x) if x.shape[1] < 7 else m(torch.tanh(x))
    the batch decides
        y = m(x) if x.shape[0] > 1 else m(x * x)
    in float32
        y = copy.deepcopy(m).float()(x.float()).double()
    vmap
        y = torch.vmap(m)(x)
    of chosen tokens
        chosen = x[..., 0] > 0
        y = x.tanh().masked_scatter(chosen[..., None], m(x[chosen]))
    """,
)
"""How a norm ``m`` is called."""

EDITS = rule(
    """
    none
    pre-hook that changes
        m.register_forward_pre_hook(lambda _, a: (torch.tanh(a[0]),))
    pre-hook that adds
        m.register_forward_pre_hook(lambda _, a: (a[0] + 0.5,))
    hook that changes
        m.register_forward_hook(lambda _, a, r: r * 1.5 + 0.1)
    hook that adds the input
        m.register_forward_hook(lambda _, a, r: r + a[0])
    hook that writes
        m.register_forward_hook(lambda _, a, r: r.mul_(0.5).tanh_())
    forward replaced
        m.forward = types.MethodType(lambda self, t: t.tanh() * 2, m)
    frozen
        m.requires_grad_(False)
    """,
)
"""What is done to a norm ``m`` after it was made."""

WEIGHT_EDITS = rule(
    """
    none
    parametrisation
        nn.utils.parametrize.register_parametrization(m, "weight", nn.Tanh())
    weight_norm
        nn.utils.parametrizations.weight_norm(m)
    spectral_norm
        nn.utils.parametrizations.spectral_norm(m)
    pruning
        nn.utils.prune.random_unstructured(m, "weight", 0.3)
    view of the transposed
        m.weight = nn.Parameter(m.weight.detach().t().contiguous().t())
    """,
)
"""What is done to a linear layer ``m``."""

STEMS = rule(
    """
    Embedding
        self.embed = nn.Embedding(20, d)
        y = self.embed(x)
    Linear of floats
        self.embed = nn.Linear(5, d)
        y = self.embed(x)
    max_norm
        self.embed = nn.Embedding(20, d, max_norm=1.0)
        y = self.embed(x)
    rows by index
        self.embed = weight(20, d)
        y = self.embed[x]
    product of two tables
        self.embed = nn.Embedding(20, 4)
        self.mix = weight(4, d)
        y = (self.embed.weight @ self.mix)[x]
    one table twice
        self.embed = nn.Embedding(20, d)
        y = self.embed(x) + self.embed((x + 1) % 20)
    bins of floats
        self.embed = nn.Embedding(4, d)
        y = self.embed(torch.bucketize(x.sum(-1), torch.tensor([-1.0, 0.5, 1.0]).double()))
    stored buffer
        self.embed = nn.Buffer(floats(20, d, seed=3))
        y = F.embedding(x, self.embed)
    buffer over a parameter
        self.table = nn.Embedding(20, d)
        self.embed = nn.Buffer(self.table.weight.detach())
        y = F.embedding(x, self.embed)
    """,
    plain=2,
)

POSITIONS = rule(
    """
    none
        y = x
    table
        self.position = weight(16, d)
        y = x + self.position[: x.shape[1]]
    Embedding
        self.position = nn.Embedding(16, d)
        y = x + self.position(torch.arange(x.shape[1]))
    stored sines
        self.position = nn.Buffer(torch.outer(torch.arange(16.0), torch.linspace(0.1, 1, d)).sin())
        y = x + self.position[: x.shape[1]]
    number of the token
        y = x + torch.arange(x.shape[1]).to(x)[:, None]
    class token
        self.cls = weight(1, 1, d)
        y = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), 1)
    token of ones
        y = torch.cat((x.new_ones(x.shape[0], 1, d), x), 1)
    not for long inputs
        self.position = weight(16, d)
        y = x + self.position[: x.shape[1]] if x.shape[1] < 7 else x
    row by the length
        self.position = weight(32, d)
        y = x + self.position[x.shape[1]]
    """,
    plain=3,
)

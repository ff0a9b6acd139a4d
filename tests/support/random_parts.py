"""Ingredients of random modules: lines of Python, by the place in a model where they may stand.

Each table has parts that a usual model has (``plain``) and parts that few have (``odd``). In the
lines ``$x`` is the value that comes in, ``$y`` the one that goes out, ``$n`` a number of their own,
``$d`` the width of the stream, ``$i`` the width of the input of a layer. ``init`` goes into
``__init__``, ``forward`` into ``forward``, ``top`` in front of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Part:
    """Lines for one place in a model."""

    forward: str = "$y = $x"
    init: str = ""
    top: str = ""


@dataclass(frozen=True)
class Table:
    plain: Mapping[str, Part]
    odd: Mapping[str, Part]


def part(forward: str = "$y = $x", init: str = "", top: str = "") -> Part:
    return Part(*(dedent(text).strip("\n") for text in (forward, init, top)))


def norm_class(forward: str, base: str = "Affine") -> Part:
    """A norm with a class of its own. ``self.weight``, ``self.bias``, ``self.eps`` are there."""
    body = indent(dedent(forward).strip("\n"), "        ")
    top = f"class Norm$n({base}):\n    def forward(self, x):\n{body}"
    return Part("", "self.norm$n = Norm$n($d)", top)


PRELUDE = '''
import collections, contextlib, copy, dataclasses, functools, math, types, typing
import torch, torch.nn.functional as F, torch.nn.utils.prune
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Affine(nn.Module):
    """The parameters of a LayerNorm."""

    def __init__(self, d, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.eps = eps


def matrix(module, rows, number):
    """One of the matrices with so many rows (or columns, if there are none)."""
    found = [p for p in module.parameters() if p.ndim == 2]
    fitting = [p for p in found if p.shape[0] == rows] or found or list(module.parameters())
    return fitting[number % len(fitting)]


def vector(module, size, number):
    fitting = [p for p in module.parameters() if p.shape == (size,)] or list(module.parameters())
    return fitting[number % len(fitting)]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def floats(*shape, seed=0, scale=1.0):
    return (random(*shape, seed=seed) + 0.3) * scale


def ids(*shape, seed=0, value=None):
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, 20, shape, generator=generator)
    return found if value is None else torch.full_like(found, value)


def bools(*shape, seed=0):
    return random(*shape, seed=seed) > -0.5


def randomise(model, seed):
    """Nothing passes by luck: no gain of 1, no bias of 0, no mean of 0."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            noise = random(*p.shape, seed=seed + number).to(p.dtype)
            p.copy_(0.6 + 0.7 * noise if p.ndim == 1 else 0.15 + 0.4 * noise)
'''

NORMS = Table(
    plain={
        "LayerNorm": part("", "self.norm$n = nn.LayerNorm($d)"),
        "LayerNorm, eps 1e-3": part("", "self.norm$n = nn.LayerNorm($d, eps=1e-3)"),
        "LayerNorm, eps 1e-12": part("", "self.norm$n = nn.LayerNorm($d, 1e-12)"),
        "LayerNorm without bias": part("", "self.norm$n = nn.LayerNorm($d, bias=False)"),
        "LayerNorm without affine": part(
            "", "self.norm$n = nn.LayerNorm($d, elementwise_affine=False)"
        ),
    },
    odd={
        # Right ones.
        "subclass without changes": part(
            "", "self.norm$n = Norm$n($d)", "class Norm$n(nn.LayerNorm):\n    pass"
        ),
        "super().forward": norm_class("return super().forward(x)", "nn.LayerNorm"),
        "super().forward with other names": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, hidden, *args, **kwargs):
                    return super().forward(hidden)
            """,
        ),
        "in float64 inside": norm_class("return super().forward(x.double())", "nn.LayerNorm"),
        "spelled out": norm_class(
            """
            m = x.mean(-1, keepdim=True)
            v = (x - m).pow(2).mean(-1, keepdim=True)
            return (x - m) / torch.sqrt(v + self.eps) * self.weight + self.bias
            """
        ),
        "var unbiased=False": norm_class(
            """
            v = x.var(-1, keepdim=True, unbiased=False)
            return self.weight * (x - x.mean(-1, keepdim=True)) * (v + self.eps).rsqrt() + self.bias
            """
        ),
        "var_mean": norm_class(
            """
            v, m = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
            return torch.addcmul(self.bias, (x - m) / (v + self.eps).sqrt(), self.weight)
            """
        ),
        "mean of squares": norm_class(
            """
            m = x.mean(-1, keepdim=True)
            v = (x * x).mean(-1, keepdim=True) - m * m
            return (x - m) * torch.rsqrt(v.clamp_min(0) + self.eps) * self.weight + self.bias
            """
        ),
        "F.layer_norm inside": norm_class(
            "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)"
        ),
        "native_layer_norm": norm_class(
            """
            shape = [x.shape[-1]]
            return torch.native_layer_norm(x, shape, self.weight, self.bias, self.eps)[0]
            """
        ),
        "rms_norm of the centred": norm_class(
            """
            x = x - x.mean(-1, keepdim=True)
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias
            """
        ),
        "1 + weight": norm_class(
            "return F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + self.weight) + self.bias"
        ),
        "gamma and beta": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.Module):
                def __init__(self, d):
                    super().__init__()
                    self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
                def forward(self, x):
                    return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)
            """,
        ),
        "bias in a buffer": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def __init__(self, d):
                    super().__init__(d, bias=False)
                    self.register_buffer("beta", torch.linspace(-1, 2, d).double())
                def forward(self, x):
                    return super().forward(x) + self.beta
            """,
        ),
        "shape (1, d)": part(
            "$y = self.norm$n($x.unsqueeze(-2)).squeeze(-2)",
            "self.norm$n = nn.LayerNorm((1, $d))",
        ),
        "GroupNorm of rows": part(
            "$y = self.norm$n($x.reshape(-1, $d)).reshape($x.shape)",
            "self.norm$n = nn.GroupNorm(1, $d)",
        ),
        "GroupNorm of channels": part(
            "$y = self.norm$n($x.transpose(1, 2)).transpose(1, 2)",
            "self.norm$n = nn.GroupNorm(1, $d)",
        ),
        "LayerNorm of a transposed view": part(
            "$y = self.norm$n($x.transpose(0, 1)).transpose(0, 1)",
            "self.norm$n = nn.LayerNorm($d)",
        ),
        "writes in place inside": norm_class(
            """
            x = x.clone()
            x -= x.mean(-1, keepdim=True)
            x /= (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
            return x.mul_(self.weight).add_(self.bias)
            """
        ),
        "writes into its input": norm_class(
            """
            x.sub_(x.mean(-1, keepdim=True))
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
            """
        ),
        "loop over rows": norm_class(
            """
            rows = [F.layer_norm(r, r.shape[-1:], self.weight, self.bias) for r in x.unbind(1)]
            return torch.stack(rows, 1)
            """
        ),
        "weight is a property": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.Module):
                def __init__(self, d):
                    super().__init__()
                    self.log = nn.Parameter(torch.ones(d))
                @property
                def weight(self):
                    return self.log.exp()
                def forward(self, x):
                    return F.layer_norm(x, x.shape[-1:], self.weight)
            """,
        ),
        "two tensors in, two out": part(
            "$y, left$n = self.norm$n($x * 0.5, $x * 0.5)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, x, residual):
                    x = x + residual
                    return super().forward(x), x
            """,
        ),
        "returns a tuple": part(
            "$y, mean$n = self.norm$n($x)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, x):
                    return super().forward(x), None
            """,
        ),
        "extra keyword": part(
            "$y = self.norm$n($x, scale=2.0)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, x, scale=1.0):
                    return super().forward(x) * scale
            """,
        ),
        "extra keyword, default": part(
            "$y = self.norm$n($x, scale=1.0)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, x, scale=1.0):
                    return super().forward(x) * scale
            """,
        ),
        "adaptive": part(
            "$y = self.norm$n($x, $x.mean(1, keepdim=True))",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.Module):
                def __init__(self, d):
                    super().__init__()
                    self.inner = nn.LayerNorm(d, elementwise_affine=False)
                    self.modulation = nn.Linear(d, 2 * d)
                def forward(self, x, condition):
                    shift, scale = self.modulation(torch.tanh(condition)).chunk(2, -1)
                    return self.inner(x) * (1 + scale) + shift
            """,
        ),
        "holds a LayerNorm": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.Module):
                def __init__(self, d):
                    super().__init__()
                    self.inner = nn.LayerNorm(d)
                def forward(self, x):
                    return self.inner(x)
            """,
        ),
        "own __call__": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def __call__(self, x):
                    return super().__call__(x) * 2 + x.mean()
            """,
        ),
        "own __call__ that adds nothing": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def __call__(self, *args, **kwargs):
                    return super().__call__(*args, **kwargs)
            """,
        ),
        # Wrong ones, each LayerNorm on most inputs or weights.
        "weight clamped": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight.clamp(min=0.1), self.bias)"
        ),
        "weight clamped far out": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight.clamp(-1.5, 1.5), self.bias)"
        ),
        "absolute weight": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight.abs(), self.bias)"
        ),
        "std + eps": norm_class(
            """
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-8) * self.weight + self.bias
            """
        ),
        "std + large eps": norm_class(
            """
            s = x.std(-1, keepdim=True, unbiased=False)
            return (x - x.mean(-1, keepdim=True)) / (s + 1e-3) * self.weight + self.bias
            """
        ),
        "max(std, eps)": norm_class(
            """
            s = x.std(-1, keepdim=True, unbiased=False).clamp_min(1e-6)
            return (x - x.mean(-1, keepdim=True)) / s * self.weight + self.bias
            """
        ),
        "unbiased": norm_class(
            """
            v, m = torch.var_mean(x, -1, keepdim=True)
            return (x - m) / (v + self.eps).sqrt() * self.weight + self.bias
            """
        ),
        "stray constant": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight, self.bias) + 1e-6"
        ),
        "stray factor": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight, self.bias) * 1.000001"
        ),
        "stray mean": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return y + 1e-7 * x.mean(-1, keepdim=True)
            """
        ),
        "rows of zeros stay": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return torch.where((x == 0).all(-1, keepdim=True), x, y)
            """
        ),
        "rows of one value are special": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return torch.where((x == x[..., :1]).all(-1, keepdim=True), torch.ones_like(y), y)
            """
        ),
        "input clamped": norm_class(
            "return F.layer_norm(x.clamp(-4, 4), x.shape[-1:], self.weight, self.bias)"
        ),
        "input clamped far out": norm_class(
            "return F.layer_norm(x.clamp(-1e6, 1e6), x.shape[-1:], self.weight, self.bias)"
        ),
        "nan_to_num": norm_class(
            "return F.layer_norm(torch.nan_to_num(x), x.shape[-1:], self.weight, self.bias)"
        ),
        "output clamped": norm_class(
            "return F.layer_norm(x, x.shape[-1:], self.weight, self.bias).clamp(-9, 9)"
        ),
        "large mean is special": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return torch.where(x.mean(-1, keepdim=True) > 0.9, -y, y)
            """
        ),
        "few tokens are special": norm_class(
            """
            if x.shape[1] > 6:
                return x
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            """
        ),
        "one token is special": norm_class(
            """
            y = super().forward(x)
            return y if x.shape[-2] > 1 else y + x
            """,
            "nn.LayerNorm",
        ),
        "first row is special": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return torch.cat((x[:1], y[1:]))
            """
        ),
        "large batches are special": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return y if x.numel() < 200 else y + x
            """
        ),
        "counts its calls": part(
            "",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                calls = 0
                def forward(self, x):
                    self.calls += 1
                    return super().forward(x) if self.calls < 4 else x
            """,
        ),
        "switched by an attribute": part(
            "self.norm$n.enabled = bool($x.shape[1] < 7)\n$y = self.norm$n($x)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                enabled = True
                def forward(self, x):
                    return super().forward(x) if self.enabled else x
            """,
        ),
        "keeps its input": part(
            "$y = self.norm$n($x)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def forward(self, x):
                    self.last = x
                    return super().forward(x)
            """,
        ),
        "keeps the mean in a buffer": part(
            "$y = self.norm$n($x)",
            "self.norm$n = Norm$n($d)",
            """
            class Norm$n(nn.LayerNorm):
                def __init__(self, d):
                    super().__init__(d)
                    self.register_buffer("seen", torch.zeros(()).double())
                def forward(self, x):
                    self.seen.copy_(x.mean())
                    return super().forward(x)
            """,
        ),
        "rank decides": norm_class(
            """
            y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias)
            return y if x.ndim == 3 else y + x
            """
        ),
        "over half of the features": norm_class(
            """
            a, b = x.split([3, x.shape[-1] - 3], -1)
            y = torch.cat((F.layer_norm(a, (3,)), F.layer_norm(b, b.shape[-1:])), -1)
            return y * self.weight + self.bias
            """
        ),
        "mean of all but one": norm_class(
            """
            x = x - x[..., 1:].mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight
            """
        ),
        "trimmed eps": norm_class(
            """
            v, m = torch.var_mean(x, -1, keepdim=True, correction=0)
            return (x - m) / (v + self.eps * (v > 1e-3)).sqrt() * self.weight + self.bias
            """
        ),
    },
)
"""Each makes ``self.norm$n``; one with lines of its own in ``forward`` calls it as well."""

CALLS = Table(
    plain={"call": part("$y = $m($x)")},
    odd={
        ".forward": part("$y = $m.forward($x)"),
        "both call and .forward": part("$y = 0.5 * $m($x) + 0.5 * $m.forward($x * 2)"),
        "__call__ of the class": part("$y = type($m).__call__($m, $x)"),
        "forward of the class": part("$y = type($m).forward($m, $x)"),
        "twice": part("$y = $m($x) + $m($x.flip(1))"),
        "of its own output": part("$y = $m($m($x))"),
        "checkpoint": part("$y = checkpoint($m, $x, use_reentrant=False)"),
        "reentrant checkpoint": part("$y = checkpoint($m, $x, use_reentrant=True)"),
        "functional_call": part("$y = functional_call($m, dict($m.named_parameters()), ($x,))"),
        "functional_call with other weights": part(
            "$y = functional_call($m, {k: 2 * p for k, p in $m.named_parameters()}, ($x,))"
        ),
        "two halves of the tokens": part(
            "$y = torch.cat([$m(t) for t in $x.split(3, 1)], 1)",
        ),
        "no_grad": part("with torch.no_grad():\n    $y = $m($x)"),
        "enable_grad": part("with torch.enable_grad():\n    $y = $m($x)"),
        "autocast off": part('with torch.autocast("cpu", enabled=False):\n    $y = $m($x)'),
        "lambda": part("$y = self.call$n($x)", "self.call$n = lambda t: $m(t)"),
        "bound forward": part("$y = self.call$n($x)", "self.call$n = $m.forward"),
        "in a list": part("$y = self.held$n[0]($x)", "self.held$n = [$m]"),
        "in a dict": part('$y = self.held$n["a"]($x)', 'self.held$n = {"a": $m}'),
        "second name": part("$y = self.again$n($x)", "self.again$n = $m"),
        "both names": part("$y = $m($x) + self.again$n(-$x)", "self.again$n = $m"),
        "partial": part("$y = self.call$n($x)", "self.call$n = functools.partial($m)"),
        "cond": part(
            "$y = torch.cond($x.sum() > -1e9, lambda t: $m(t), lambda t: t.clone(), ($x,))"
        ),
        "cond of two": part(
            "$y = torch.cond($x.sum() > 0, lambda t: $m(t), lambda t: $m(t) * 2, ($x,))"
        ),
        "item decides": part(
            "$y = $m($x) if $x.mean().item() > 0.2 else $m($x) - 1",
        ),
        "length decides": part("$y = $m($x) if $x.shape[1] < 7 else $m(torch.tanh($x))"),
        "batch decides": part("$y = $m($x) if $x.shape[0] > 1 else $m($x * $x)"),
        "autograd.Function": part(
            "$y = Through$n.apply($m, $x)",
            "",
            """
            class Through$n(torch.autograd.Function):
                @staticmethod
                def forward(ctx, module, x):
                    return module(x)
                @staticmethod
                def backward(ctx, grad):
                    return None, grad
            """,
        ),
        "jit fork": part("$y = torch.jit.wait(torch.jit.fork($m, $x))"),
        "zero padded": part("$y = $m(F.pad($x, (0, 0, 0, 2)))[:, :-2]"),
        "of some tokens": part("$y = torch.cat(($m($x[:, :1]), $x[:, 1:].tanh()), 1)"),
        "inside of try": part(
            """
            try:
                $y = $m($x)
            except RuntimeError:
                $y = $x
            """
        ),
        "deepcopy": part("$y = copy.deepcopy($m)($x)"),
        "float32": part("$y = copy.deepcopy($m).float()($x.float()).double()"),
        "from a global": part("$y = GLOBAL$n[0]($x)", "GLOBAL$n.append($m)", "GLOBAL$n = []"),
        "getattr": part('$y = getattr(self, "_mod" + "ules")["$a"]($x)'),
        "attribute switched": part(
            "$m.training = True\n$y = $m($x)\n$m.training = False",
        ),
    },
)
"""How a module ``$m`` (a norm, a mixer, an MLP) is called. ``$a`` is its name in ``self``."""

ROW_CALLS = Table(
    plain={},
    odd={
        "jacobian-vector": part("$y = torch.func.jvp($m, ($x,), ($x + 1,))[1]"),
        "vmap": part("$y = torch.vmap($m)($x)"),
        "vmap over tokens": part("$y = torch.vmap($m, 1, 1)($x)"),
        "map over rows": part("$y = torch.stack([*map($m, $x.unbind(0))])"),
        "of chosen tokens": part(
            "$y = $x.tanh()\nchosen$n = $x[..., 0] > 0\n$y[chosen$n] = $m($x[chosen$n])"
        ),
        "flattened": part("$y = $m($x.flatten(0, 1)).unflatten(0, $x.shape[:2])"),
    },
)
"""How a norm may be called besides, on values of other numbers of dimensions."""

LAYER_NORM_CALLS = Table(
    plain={},
    odd={
        "F.layer_norm with its weights": part(
            "$y = F.layer_norm($x, ($d,), $m.weight, $m.bias, $m.eps)"
        ),
        "F.layer_norm beside the call": part(
            "$y = $m($x) + F.layer_norm($x * 2, ($d,), $m.weight, $m.bias, $m.eps)"
        ),
        "F.layer_norm of something else beside": part(
            "$y = $m($x) + F.layer_norm(torch.tanh($x), ($d,), $m.weight)"
        ),
        "keyword": part("$y = $m(input=$x)"),
        "LayerNorm.forward": part("$y = nn.LayerNorm.forward($m, $x)"),
        "weight read beside": part("$y = $m($x) + sum(p.mean() for p in $m.parameters())"),
        "bias removed after": part("$y = $m($x) - (0 if $m.bias is None else $m.bias)"),
        "eps set": part("$m.eps = 0.1 if $x.shape[1] > 6 else 1e-5\n$y = $m($x)"),
        "weight set to None": part("$y = $m($x)", "$m.bias = None"),
        "weight is a buffer": part(
            "$y = $m($x)",
            "del $m.weight\n$m.register_buffer('weight', torch.linspace(-1, 2, $d).double())",
        ),
        "weight is a plain tensor": part(
            "$y = $m($x)",
            "del $m.weight\n$m.weight = torch.linspace(-1, 2, $d).double()",
        ),
        "shape changed": part("$y = $m($x)", "$m.normalized_shape = [$d]"),
    },
)
"""How a ``nn.LayerNorm`` may be called besides."""

EDITS = Table(
    plain={"none": part("")},
    odd={
        "pre-hook that changes": part(
            "", "$m.register_forward_pre_hook(lambda m, a: (torch.tanh(a[0]),))"
        ),
        "pre-hook that adds": part("", "$m.register_forward_pre_hook(lambda m, a: (a[0] + 0.5,))"),
        "pre-hook that adds to features": part(
            "",
            "$m.register_forward_pre_hook(lambda m, a: "
            "(a[0] + torch.arange(1.0, a[0].shape[-1] + 1).to(a[0]),))",
        ),
        "pre-hook that scales features": part(
            "",
            "$m.register_forward_pre_hook(lambda m, a: "
            "(a[0] * torch.arange(1.0, a[0].shape[-1] + 1).to(a[0]),))",
        ),
        "pre-hook that looks": part(
            "",
            "$m.seen$n = seen$n = []\n"
            "$m.register_forward_pre_hook(lambda m, a: seen$n.append(a[0].mean()))",
        ),
        "pre-hook that does nothing": part("", "$m.register_forward_pre_hook(lambda m, a: None)"),
        "pre-hook with keywords": part(
            "",
            "$m.register_forward_pre_hook("
            "lambda m, a, k: ((a[0].abs(), *a[1:]), k), with_kwargs=True)",
        ),
        "hook that changes": part("", "$m.register_forward_hook(lambda m, a, y: y * 1.5 + 0.1)"),
        "hook that adds the input": part("", "$m.register_forward_hook(lambda m, a, y: y + a[0])"),
        "hook that looks": part(
            "",
            "$m.seen$n = seen$n = []\n$m.register_forward_hook(lambda m, a, y: seen$n.append(y))",
        ),
        "hook that writes": part(
            "", "$m.register_forward_hook(lambda m, a, y: y.mul_(0.5).tanh_())"
        ),
        "hook that does nothing": part("", "$m.register_forward_hook(lambda m, a, y: None)"),
        "forward replaced": part(
            "", "$m.forward = types.MethodType(lambda self, x: x.tanh() * 2, $m)"
        ),
        "forward wrapped": part(
            "",
            "$m.forward = functools.partial(lambda f, x: f(x + 0.25) * 2, $m.forward)",
        ),
        "forward wrapped, the same": part("", "$m.forward = functools.partial($m.forward)"),
        "class replaced": part(
            "",
            "own$n = type($m)\n$m.__class__ = type('Own', (own$n,), "
            "{'forward': lambda self, x: own$n.forward(self, x) + x})",
        ),
        "class replaced, the same": part("", "$m.__class__ = type('Own', (type($m),), {})"),
        "frozen": part("", "$m.requires_grad_(False)"),
        "backward hook": part("", "$m.register_full_backward_hook(lambda m, i, o: None)"),
        "training": part("", "$m.train()\n$m.train = lambda mode=True: $m"),
    },
)
"""What is done to a module ``$m`` after it was made."""

WEIGHT_EDITS = Table(
    plain={"none": part("")},
    odd={
        "parametrisation": part(
            "",
            "parametrize.register_parametrization($m, 'weight', Tanh())",
            """
            class Tanh(nn.Module):
                def forward(self, w):
                    return torch.tanh(w)
            """,
        ),
        "parametrisation, identity": part(
            "", "parametrize.register_parametrization($m, 'weight', nn.Identity())"
        ),
        "parametrised bias": part("", "parametrize.register_parametrization($m, 'bias', nn.ELU())"),
        "weight_norm": part("", "parametrizations.weight_norm($m)"),
        "weight_norm of another dimension": part("", "parametrizations.weight_norm($m, dim=1)"),
        "old weight_norm": part("", "nn.utils.weight_norm($m)"),
        "spectral_norm": part("", "parametrizations.spectral_norm($m)"),
        "orthogonal": part("", "parametrizations.orthogonal($m)"),
        "pruning": part(
            "",
            "torch.nn.utils.prune.custom_from_mask("
            "$m, 'weight', (torch.arange($m.weight.numel()) % 3 > 0).view_as($m.weight))",
        ),
        "weight is a view of its transposed": part(
            "", "$m.weight = nn.Parameter($m.weight.detach().t().contiguous().t())"
        ),
        "weight frozen": part("", "$m.weight.requires_grad_(False)"),
        "weight is a buffer": part(
            "",
            "w$n = $m.weight.detach()\ndel $m.weight\n$m.register_buffer('weight', w$n)",
        ),
        "weight is a plain tensor": part(
            "", "w$n = $m.weight.detach()\ndel $m.weight\n$m.weight = w$n"
        ),
        "weight is made at each call": part(
            "",
            "w$n = $m.weight\ndel $m.weight\n$m.raw = w$n\n"
            "$m.register_forward_pre_hook(lambda m, a: setattr(m, 'weight', m.raw * 0.5))",
        ),
    },
)
"""What is done to a linear layer ``$m``."""

WRITERS = Table(
    plain={
        "Linear": part("$y = self.out$n($x)", "self.out$n = nn.Linear($i, $d)"),
        "Linear without bias": part(
            "$y = self.out$n($x)", "self.out$n = nn.Linear($i, $d, bias=False)"
        ),
        "matmul": part("$y = $x @ self.w$n", "self.w$n = nn.Parameter(torch.ones($i, $d))"),
    },
    odd={
        "F.linear": part(
            "$y = F.linear($x, self.w$n, self.b$n)",
            "self.w$n = nn.Parameter(torch.ones($d, $i))\nself.b$n = nn.Parameter(torch.ones($d))",
        ),
        "F.linear, bias of 2 dimensions": part(
            "$y = F.linear($x, self.w$n, self.b$n)",
            "self.w$n = nn.Parameter(torch.ones($d, $i))\n"
            "self.b$n = nn.Parameter(torch.ones(1, $d))",
        ),
        "F.linear, weight of 1 dimension": part(
            "$y = F.linear($x, self.w$n).unsqueeze(-1) * self.v$n",
            "self.w$n = nn.Parameter(torch.ones($i))\nself.v$n = nn.Parameter(torch.ones($d))",
        ),
        "F.linear with weights of a module": part(
            "$y = F.linear($x, self.out$n.weight, self.out$n.bias)",
            "self.out$n = nn.Linear($i, $d)",
        ),
        "F.linear beside the module": part(
            "$y = self.out$n($x) + F.linear($x.tanh(), self.out$n.weight)",
            "self.out$n = nn.Linear($i, $d)",
        ),
        "einsum": part(
            "$y = torch.einsum('bti,id->btd', $x, self.w$n)",
            "self.w$n = nn.Parameter(torch.ones($i, $d))",
        ),
        "einsum, transposed": part(
            "$y = torch.einsum('...i,oi->...o', $x, self.w$n) + self.b$n",
            "self.w$n = nn.Parameter(torch.ones($d, $i))\nself.b$n = nn.Parameter(torch.ones($d))",
        ),
        "addmm": part(
            "$y = torch.addmm(self.b$n, $x.reshape(-1, $i), self.w$n).view(*$x.shape[:-1], $d)",
            "self.w$n = nn.Parameter(torch.ones($i, $d))\nself.b$n = nn.Parameter(torch.ones($d))",
        ),
        "addmm with factors": part(
            "$y = torch.addmm(self.b$n, $x.reshape(-1, $i), self.w$n, beta=0.5, alpha=2)"
            ".view(*$x.shape[:-1], $d)",
            "self.w$n = nn.Parameter(torch.ones($i, $d))\nself.b$n = nn.Parameter(torch.ones($d))",
        ),
        "tensordot": part(
            "$y = torch.tensordot($x, self.w$n, dims=([-1], [0]))",
            "self.w$n = nn.Parameter(torch.ones($i, $d))",
        ),
        "Conv1d": part(
            "$y = self.out$n($x.transpose(1, 2)).transpose(1, 2)",
            "self.out$n = nn.Conv1d($i, $d, 1)",
        ),
        "Conv1d of three": part(
            "$y = self.out$n($x.mT).mT", "self.out$n = nn.Conv1d($i, $d, 3, padding=1)"
        ),
        "circular Conv1d": part(
            "$y = self.out$n(F.pad($x.mT, (0, 0))).mT",
            "self.out$n = nn.Conv1d($i, $d, 1, padding=0, padding_mode='circular')",
        ),
        "grouped Conv1d": part(
            "$y = self.out$n($x.mT).mT",
            "self.out$n = nn.Conv1d($i, $d, 3, padding=1, groups=math.gcd($i, $d))",
        ),
        "depthwise then Linear": part(
            "$y = self.out$n(self.deep$n($x.mT).mT)",
            "self.deep$n = nn.Conv1d($i, $i, 3, padding=1, groups=$i)\n"
            "self.out$n = nn.Linear($i, $d)",
        ),
        "ConvTranspose1d": part(
            "$y = self.out$n($x.mT).mT", "self.out$n = nn.ConvTranspose1d($i, $d, 1)"
        ),
        "Bilinear": part("$y = self.out$n($x, $x.tanh())", "self.out$n = nn.Bilinear($i, $i, $d)"),
        "low rank": part(
            "$y = self.out$n($x) + self.up$n(self.down$n($x)) * 0.5",
            "self.out$n = nn.Linear($i, $d)\nself.down$n = nn.Linear($i, 2, bias=False)\n"
            "self.up$n = nn.Linear(2, $d, bias=False)",
        ),
        "low rank inside of the weight": part(
            "$y = F.linear($x, self.out$n.weight + self.up$n.weight @ self.down$n.weight)",
            "self.out$n = nn.Linear($i, $d)\nself.down$n = nn.Linear($i, 2, bias=False)\n"
            "self.up$n = nn.Linear(2, $d, bias=False)",
        ),
        "subclass that changes its output": part(
            "$y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return super().forward(x).relu()
            """,
        ),
        "subclass that looks at its weight": part(
            "$y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return super().forward(x) * self.weight.mean()
            """,
        ),
        "subclass that centres": part(
            "$y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    y = super().forward(x)
                    return y - y.mean(-1, keepdim=True)
            """,
        ),
        "returns a tuple": part(
            "$y, none$n = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return super().forward(x), None
            """,
        ),
        "returns a tuple, second": part(
            "none$n, $y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return None, super().forward(x)
            """,
        ),
        "returns input and output": part(
            "was$n, $y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return x.sum(-1), super().forward(x)
            """,
        ),
        "returns a dict": part(
            "$y = self.out$n($x)['y']",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return {'size': x.shape, 'y': super().forward(x)}
            """,
        ),
        "skips the bias": part(
            "$y = self.out$n($x)",
            "self.out$n = Own$n($i, $d)",
            """
            class Own$n(nn.Linear):
                def forward(self, x):
                    return F.linear(x, self.weight), self.bias
            """.replace(", self.bias", " + 2 * self.bias"),
        ),
        "weight of a list": part(
            "$y = F.linear($x, self.held$n[0])",
            "self.held$n = [nn.Parameter(floats($d, $i, seed=$n))]",
        ),
        "weight of a global": part(
            "$y = F.linear($x, HELD$n)", "", "HELD$n = floats($d, $i, seed=$n)"
        ),
        "weight of a partial": part(
            "$y = self.call$n($x)",
            "self.w$n = nn.Parameter(torch.ones($d, $i))\n"
            "self.call$n = functools.partial(F.linear, weight=self.w$n)",
        ),
        "weight of a closure": part(
            "$y = self.call$n($x)",
            "w$n = nn.Parameter(floats($d, $i, seed=$n))\nself.call$n = lambda t: t @ w$n.t()",
        ),
        "weight in a ParameterList": part(
            "$y = F.linear($x, self.list$n[1])",
            "self.list$n = nn.ParameterList([torch.ones(1), torch.ones($d, $i)])",
        ),
        "weight in a ParameterDict": part(
            "$y = F.linear($x, self.dict$n['w'], self.dict$n['b'])",
            "self.dict$n = nn.ParameterDict({'w': torch.ones($d, $i), 'b': torch.ones($d)})",
        ),
        "slice of a larger weight": part(
            "$y = F.linear($x, self.big$n[1:-1])",
            "self.big$n = nn.Parameter(torch.ones($d + 2, $i))",
        ),
        "two slices of a weight": part(
            "$y = F.linear($x, self.big$n[:$d]) + F.linear($x.tanh(), self.big$n[$d:])",
            "self.big$n = nn.Parameter(torch.ones(2 * $d, $i))",
        ),
        "overlapping slices of a weight": part(
            "$y = F.linear($x, self.big$n[:$d]) + F.linear($x.tanh(), self.big$n[1:])",
            "self.big$n = nn.Parameter(torch.ones($d + 1, $i))",
        ),
        "weight of a stack": part(
            "$y = F.linear($x, self.big$n[1])",
            "self.big$n = nn.Parameter(torch.ones(3, $d, $i))",
        ),
        "weights of a stack, chosen": part(
            "$y = F.linear($x, self.big$n[$x.shape[1] % 3])",
            "self.big$n = nn.Parameter(torch.ones(3, $d, $i))",
        ),
        "weights of a stack, by value": part(
            "$y = F.linear($x, self.big$n[int($x.sum().item() > 0)])",
            "self.big$n = nn.Parameter(torch.ones(3, $d, $i))",
        ),
        "weight made of two": part(
            "$y = F.linear($x, self.a$n * self.b$n)",
            "self.a$n = nn.Parameter(torch.ones($d, $i))\n"
            "self.b$n = nn.Parameter(torch.ones($d, 1))",
        ),
        "weight with a factor": part(
            "$y = F.linear($x, self.a$n * 0.3)", "self.a$n = nn.Parameter(torch.ones($d, $i))"
        ),
        "weight written at the first call": part(
            """
            if self.made$n is None:
                self.made$n = self.out$n.weight.detach().clone().tanh()
            $y = F.linear($x, self.made$n) + self.out$n($x)
            """,
            "self.made$n = None\nself.out$n = nn.Linear($i, $d)",
        ),
        "weight kept as it is": part(
            """
            if self.made$n is None:
                self.made$n = self.out$n.weight.detach().t()
            $y = $x @ self.made$n
            """,
            "self.made$n = None\nself.out$n = nn.Linear($i, $d)",
        ),
        "bias by index": part(
            "$y = self.out$n($x) + self.b$n[torch.arange($d - 1, -1, -1)]",
            "self.out$n = nn.Linear($i, $d)\nself.b$n = nn.Parameter(torch.ones($d))",
        ),
        "bias expanded": part(
            "$y = self.out$n($x) + self.b$n.expand($d)",
            "self.out$n = nn.Linear($i, $d)\nself.b$n = nn.Parameter(torch.ones(1))",
        ),
        "bias of a buffer": part(
            "$y = self.out$n($x) + self.b$n",
            "self.out$n = nn.Linear($i, $d)\nself.register_buffer('b$n', floats($d, seed=$n))",
        ),
        "bias of the norm": part(
            "$y = self.out$n($x)",
            "self.out$n = nn.Linear($i, $d)\nself.out$n.bias = vector(self, $d, $n)",
        ),
        "bias that others read": part(
            "$y = self.out$n($x) * (1 + self.out$n.bias.mean())",
            "self.out$n = nn.Linear($i, $d)",
        ),
        "expanded weight": part(
            "$y = F.linear($x, self.w$n.expand($d, $i) * self.v$n)",
            "self.w$n = nn.Parameter(torch.ones(1, $i))\n"
            "self.v$n = nn.Parameter(torch.ones($d, 1))",
        ),
        "LayerScale": part(
            "$y = self.out$n($x) * self.scale$n",
            "self.out$n = nn.Linear($i, $d)\nself.scale$n = nn.Parameter(torch.ones($d))",
        ),
        "LayerScale that is read elsewhere": part(
            "$y = self.out$n($x) * self.scale$n + self.scale$n.mean()",
            "self.out$n = nn.Linear($i, $d)\nself.scale$n = nn.Parameter(torch.ones($d))",
        ),
        "LayerScale in a list": part(
            "$y = self.out$n($x) * self.scale$n * self.kept$n[0].sum()",
            "self.out$n = nn.Linear($i, $d)\nself.scale$n = nn.Parameter(torch.ones($d))\n"
            "self.kept$n = [self.scale$n.data]",
        ),
        "gate per token": part(
            "$y = self.out$n($x) * torch.sigmoid(self.gate$n($x))",
            "self.out$n = nn.Linear($i, $d)\nself.gate$n = nn.Linear($i, 1)",
        ),
        "gate per feature": part(
            "$y = self.out$n($x) * torch.sigmoid(self.gate$n($x))",
            "self.out$n = nn.Linear($i, $d)\nself.gate$n = nn.Linear($i, $d)",
        ),
        "scalar gate": part(
            "$y = self.out$n($x) * self.gate$n.tanh()",
            "self.out$n = nn.Linear($i, $d)\nself.gate$n = nn.Parameter(torch.ones(1))",
        ),
        "dropout": part(
            "$y = F.dropout(self.out$n($x), 0.3, self.training)",
            "self.out$n = nn.Linear($i, $d)",
        ),
        "Sequential": part(
            "$y = self.out$n($x)",
            "self.out$n = nn.Sequential(nn.Linear($i, 3), nn.Linear(3, $d), nn.Dropout(0.1))",
        ),
        "Sequential with Unflatten": part(
            "$y = self.out$n($x.flatten(0, 1)).unflatten(0, $x.shape[:2])",
            "self.out$n = nn.Sequential(nn.Linear($i, $d), nn.Unflatten(1, (1, $d)), "
            "nn.Flatten(1))",
        ),
        "ends in an activation": part(
            "$y = F.gelu(self.out$n($x))", "self.out$n = nn.Linear($i, $d)"
        ),
        "experts by mask": part(
            """
            $y = $x.new_zeros(*$x.shape[:-1], $d)
            chosen$n = self.route$n($x).argmax(-1)
            for number, expert in enumerate(self.experts$n):
                $y[chosen$n == number] = expert($x[chosen$n == number])
            """,
            "self.route$n = nn.Linear($i, 2)\n"
            "self.experts$n = nn.ModuleList(nn.Linear($i, $d) for _ in range(2))",
        ),
        "experts, dense": part(
            "$y = sum(p.unsqueeze(-1) * expert($x) for p, expert in "
            "zip(self.route$n($x).softmax(-1).unbind(-1), self.experts$n))",
            "self.route$n = nn.Linear($i, 2)\n"
            "self.experts$n = nn.ModuleList(nn.Linear($i, $d) for _ in range(2))",
        ),
        "written into zeros": part(
            "$y = $x.new_zeros(*$x.shape[:-1], $d)\n$y[:, :] = self.out$n($x)",
            "self.out$n = nn.Linear($i, $d)",
        ),
        "out=": part(
            "$y = torch.matmul($x, self.w$n.detach(), out=$x.new_empty(*$x.shape[:-1], $d))",
            "self.w$n = nn.Parameter(torch.ones($i, $d))",
        ),
        "halves of the features": part(
            "$y = torch.cat((self.left$n($x), self.right$n($x)), -1)",
            "self.left$n = nn.Linear($i, 3)\nself.right$n = nn.Linear($i, $d - 3)",
        ),
        "empty parameter": part(
            "$y = self.out$n($x) + self.none$n.sum()",
            "self.out$n = nn.Linear($i, $d)\nself.none$n = nn.Parameter(torch.ones(0, $d))",
        ),
        "no input features": part("$y = self.out$n($x[..., :0])", "self.out$n = nn.Linear(0, $d)"),
        "LazyLinear": part(
            "$y = self.out$n($x)",
            "self.out$n = nn.LazyLinear($d)\nself.out$n(torch.zeros(1, $i))",
        ),
        "float32 inside": part(
            "$y = self.out$n($x.float()).double()",
            "self.out$n = nn.Linear($i, $d, dtype=torch.float32)",
        ),
    },
)
"""From ``$i`` features to the ``$d`` of the stream."""

LINEARS = Table(
    plain={"Linear": part("$y = self.in$n($x)", "self.in$n = nn.Linear($d, $o)")},
    odd={
        "without bias": part("$y = self.in$n($x)", "self.in$n = nn.Linear($d, $o, bias=False)"),
        "matmul": part(
            "$y = $x @ self.in$n + self.bin$n",
            "self.in$n = nn.Parameter(torch.ones($d, $o))\n"
            "self.bin$n = nn.Parameter(torch.ones($o))",
        ),
        "Conv1d": part("$y = self.in$n($x.mT).mT", "self.in$n = nn.Conv1d($d, $o, 3, padding=1)"),
        "centred input": part(
            "$y = self.in$n($x - $x.mean(-1, keepdim=True))", "self.in$n = nn.Linear($d, $o)"
        ),
        "unfold": part(
            "$y = self.in$n($x.unfold(-1, $d, 1).squeeze(-2))", "self.in$n = nn.Linear($d, $o)"
        ),
    },
)
"""From the ``$d`` features of a norm to ``$o``."""

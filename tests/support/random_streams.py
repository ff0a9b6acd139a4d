"""More ingredients of random modules: what happens to the residual stream, and to whole models.

``random_parts`` says how the lines are to be read. ``$h`` is the stream of ``(batch, tokens, d)``.
"""

from __future__ import annotations

from random_parts import Table, part

STEMS = Table(
    plain={
        "Embedding": part("$y = self.embed($x)", "self.embed = nn.Embedding(20, $d)"),
        "Linear": part("$y = self.embed($x)", "self.embed = nn.Linear(5, $d)"),
    },
    odd={
        "padding_idx": part("$y = self.embed($x)", "self.embed = nn.Embedding(20, $d, 0)"),
        "max_norm": part("$y = self.embed($x)", "self.embed = nn.Embedding(20, $d, max_norm=1.0)"),
        "scaled by frequency": part(
            "$y = self.embed($x)", "self.embed = nn.Embedding(20, $d, scale_grad_by_freq=True)"
        ),
        "scaled": part("$y = self.embed($x) * math.sqrt($d)", "self.embed = nn.Embedding(20, $d)"),
        "table by index": part(
            "$y = self.embed[$x]", "self.embed = nn.Parameter(torch.ones(20, $d))"
        ),
        "index_select": part(
            "$y = self.embed.index_select(0, $x.flatten()).view(*$x.shape, $d)",
            "self.embed = nn.Parameter(torch.ones(20, $d))",
        ),
        "gather": part(
            "$y = self.embed.gather(0, $x.reshape(-1, 1).expand(-1, $d)).view(*$x.shape, $d)",
            "self.embed = nn.Parameter(torch.ones(20, $d))",
        ),
        "F.embedding": part(
            "$y = F.embedding($x, self.embed)", "self.embed = nn.Parameter(torch.ones(20, $d))"
        ),
        "one_hot": part(
            "$y = F.one_hot($x, 20).to(self.embed.dtype) @ self.embed",
            "self.embed = nn.Parameter(torch.ones(20, $d))",
        ),
        "EmbeddingBag": part(
            "$y = self.embed($x.reshape(-1, 1)).view(*$x.shape, $d)",
            "self.embed = nn.EmbeddingBag(20, $d, mode='sum')",
        ),
        "EmbeddingBag of pairs": part(
            "$y = self.embed(torch.stack(($x, $x.flip(-1)), -1).flatten(0, 1)).view(*$x.shape, $d)",
            "self.embed = nn.EmbeddingBag(20, $d, mode='mean')",
        ),
        "EmbeddingBag, max": part(
            "$y = self.embed(torch.stack(($x, $x.flip(-1)), -1).flatten(0, 1)).view(*$x.shape, $d)",
            "self.embed = nn.EmbeddingBag(20, $d, mode='max')",
        ),
        "returns ids too": part(
            "ids0, $y = self.embed($x)",
            "self.embed = OwnEmbedding(20, $d)",
            """
            class OwnEmbedding(nn.Embedding):
                def forward(self, i):
                    return i, super().forward(i)
            """,
        ),
        "returns None too": part(
            "none0, $y = self.embed($x)",
            "self.embed = OwnEmbedding(20, $d)",
            """
            class OwnEmbedding(nn.Embedding):
                def forward(self, i):
                    return None, super().forward(i)
            """,
        ),
        "returns a dict": part(
            "$y = self.embed($x)['h']",
            "self.embed = OwnEmbedding(20, $d)",
            """
            class OwnEmbedding(nn.Embedding):
                def forward(self, i):
                    return {'ids': i, 'h': super().forward(i)}
            """,
        ),
        "returns a tuple": part(
            "$y, other0 = self.embed($x)",
            "self.embed = OwnEmbedding(20, $d)",
            """
            class OwnEmbedding(nn.Embedding):
                def forward(self, i):
                    found = super().forward(i)
                    return found, found.tanh()
            """,
        ),
        "table times table": part(
            "$y = (self.embed.weight @ self.mix)[$x]",
            "self.embed = nn.Embedding(20, 4)\nself.mix = nn.Parameter(torch.ones(4, $d))",
        ),
        "two tables": part(
            "$y = self.embed($x) + self.second($x.flip(-1))",
            "self.embed = nn.Embedding(20, $d)\nself.second = nn.Embedding(20, $d)",
        ),
        "one table twice": part(
            "$y = self.embed($x) + self.embed(($x + 1) % 20)", "self.embed = nn.Embedding(20, $d)"
        ),
        "rows of two tables": part(
            "$y = torch.where(($x > 9).unsqueeze(-1), self.embed($x), self.second($x))",
            "self.embed = nn.Embedding(20, $d)\nself.second = nn.Embedding(20, $d)",
        ),
        "small values": part("$y = self.embed($x)", "self.embed = nn.Linear(5, $d, bias=False)"),
        "raw stream": part("$y = $x @ self.embed", "self.embed = nn.Parameter(torch.ones(5, $d))"),
        "patches": part(
            "$y = self.embed($x.mT).mT[:, : $x.shape[1]]",
            "self.embed = nn.Conv1d(5, $d, 2, padding=1)",
        ),
        "from a buffer": part(
            "$y = F.embedding($x, self.embed)",
            "self.register_buffer('embed', floats(20, $d, seed=3))",
        ),
        "from a buffer over a parameter": part(
            "$y = F.embedding($x, self.embed)",
            "self.table = nn.Embedding(20, $d)\n"
            "self.register_buffer('embed', self.table.weight.detach())",
        ),
        "weights per bin": part(
            "$y = self.embed(torch.bucketize($x.sum(-1), self.bins))",
            "self.embed = nn.Embedding(4, $d)\n"
            "self.register_buffer('bins', torch.tensor([-1.0, 0.5, 1.0]).double())",
        ),
    },
)
FLOAT_STEMS = {"Linear", "small values", "raw stream", "patches", "weights per bin"}
"""Those that read floats, of 5 features."""

POSITIONS = Table(
    plain={
        "none": part(),
        "table": part(
            "$y = $x + self.position[: $x.shape[1]]",
            "self.position = nn.Parameter(torch.ones(16, $d))",
        ),
        "embedding": part(
            "$y = $x + self.position(torch.arange($x.shape[1]))",
            "self.position = nn.Embedding(16, $d)",
        ),
    },
    odd={
        "buffer of numbers": part(
            "$y = $x + self.position(self.numbers[:, : $x.shape[1]])",
            "self.position = nn.Embedding(16, $d)\n"
            "self.register_buffer('numbers', torch.arange(16).unsqueeze(0), persistent=False)",
        ),
        "sines": part(
            "$y = $x + self.position[: $x.shape[1]]",
            "self.register_buffer('position', torch.outer(torch.arange(16.0), "
            "torch.linspace(0.1, 1, $d)).sin().double())",
        ),
        "computed": part(
            "$y = $x + torch.arange($x.shape[1]).to($x)[:, None] * torch.linspace(0, 1, $d).to($x)"
        ),
        "number of the token": part("$y = $x + torch.arange($x.shape[1]).to($x)[:, None]"),
        "class token": part(
            "$y = torch.cat((self.cls.expand($x.shape[0], -1, -1), $x), 1)",
            "self.cls = nn.Parameter(torch.ones(1, 1, $d))",
        ),
        "class token of zeros": part(
            "$y = torch.cat(($x.new_zeros($x.shape[0], 1, $d), $x), 1)",
        ),
        "class token of ones": part(
            "$y = torch.cat(($x.new_ones($x.shape[0], 1, $d), $x), 1)",
        ),
        "interpolated": part(
            "$y = $x + F.interpolate(self.position[None].mT, $x.shape[1], mode='linear').mT",
            "self.position = nn.Parameter(torch.ones(7, $d))",
        ),
        "interpolated over features": part(
            "$y = $x + F.interpolate(self.position[None], $d, mode='linear')[:, : $x.shape[1]]",
            "self.position = nn.Parameter(torch.ones(16, 3))",
        ),
        "repeated": part(
            "$y = $x + self.position.repeat(6, 1)[: $x.shape[1]]",
            "self.position = nn.Parameter(torch.ones(3, $d))",
        ),
        "repeat_interleave": part(
            "$y = $x + self.position.repeat_interleave(4, 0)[: $x.shape[1]]",
            "self.position = nn.Parameter(torch.ones(4, $d))",
        ),
        "outer product": part(
            "$y = $x + self.a[: $x.shape[1], None] * self.b",
            "self.a = nn.Parameter(torch.ones(16))\nself.b = nn.Parameter(torch.ones($d))",
        ),
        "one number": part("$y = $x + self.shift", "self.shift = nn.Parameter(torch.ones(()))"),
        "flipped features": part(
            "$y = $x + self.position[: $x.shape[1]].flip(-1)",
            "self.position = nn.Parameter(torch.ones(16, $d))",
        ),
        "rolled features": part(
            "$y = $x + self.position[: $x.shape[1]].roll(1, -1)",
            "self.position = nn.Parameter(torch.ones(16, $d))",
        ),
        "half table": part(
            "$y = $x + torch.cat((self.rows[: $x.shape[1]], self.cols[: $x.shape[1]]), -1)",
            "self.rows = nn.Parameter(torch.ones(16, 3))\n"
            "self.cols = nn.Parameter(torch.ones(16, $d - 3))",
        ),
        "token types": part(
            "$y = $x + self.types(torch.zeros($x.shape[:2], dtype=torch.long))",
            "self.types = nn.Embedding(2, $d)",
        ),
        "dropped at length": part(
            "$y = $x + self.position[: $x.shape[1]] if $x.shape[1] < 7 else $x",
            "self.position = nn.Parameter(torch.ones(16, $d))",
        ),
        "row by length": part(
            "$y = $x + self.position[$x.shape[1]]",
            "self.position = nn.Parameter(torch.ones(32, $d))",
        ),
    },
)

ATTENTIONS = Table(
    plain={
        "fused": part(
            """
            q, k, v = self.qkv($x).chunk(3, -1)
            q, k, v = (t.unflatten(-1, ($heads, -1)).transpose(1, 2) for t in (q, k, v))
            $y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)",
        ),
        "three projections": part(
            """
            q, k, v = self.q($x), self.k($x), self.v($x)
            weights = (q @ k.mT / math.sqrt($d)).softmax(-1)
            $y = weights @ v
            """,
            "self.q, self.k, self.v = (nn.Linear($d, $d) for _ in range(3))",
        ),
        "mean of tokens": part(
            "$y = $x + $x.mean(1, keepdim=True)",
        ),
    },
    odd={
        "unbind": part(
            """
            qkv = self.qkv($x).view(*$x.shape[:2], 3, $heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            $y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape($x.shape)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)",
        ),
        "unbind with norms": part(
            """
            q, k, v = self.qkv($x).view(*$x.shape[:2], 3, $heads, -1).unbind(2)
            q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            $y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)\n"
            "self.q_norm, self.k_norm = nn.LayerNorm($d // $heads), nn.LayerNorm($d // $heads)",
        ),
        "interleaved with norms": part(
            """
            q, k, v = self.qkv($x).view(*$x.shape[:2], $heads, 3, -1).unbind(3)
            q, k = self.q_norm(q), self.k_norm(k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            $y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)\n"
            "self.q_norm, self.k_norm = nn.LayerNorm($d // $heads), nn.LayerNorm($d // $heads)",
        ),
        "norms per projection": part(
            """
            q, k, v = self.q($x), self.k($x), self.v($x)
            $y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            """,
            "self.q, self.k, self.v = (nn.Linear($d, $d) for _ in range(3))\n"
            "self.q_norm, self.k_norm = nn.LayerNorm($d), nn.LayerNorm($d)",
        ),
        "one norm for queries and keys": part(
            """
            q, k, v = self.qkv($x).chunk(3, -1)
            q, k = self.qk_norm(q), self.qk_norm(k)
            $y = F.scaled_dot_product_attention(q, k, v)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)\nself.qk_norm = nn.LayerNorm($d)",
        ),
        "values are the keys": part(
            "q, k = self.q($x), self.k($x)\n$y = F.scaled_dot_product_attention(q, k, k)",
            "self.q, self.k = nn.Linear($d, $d), nn.Linear($d, $d)",
        ),
        "values of lower rank": part(
            """
            q, k, v = self.q($x), self.k($x), self.v($x)
            $y = F.scaled_dot_product_attention(q, k, v[0])
            """,
            "self.q, self.k, self.v = (nn.Linear($d, $d) for _ in range(3))",
        ),
        "causal": part(
            """
            q, k, v = self.qkv($x).split($d, -1)
            $y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
            """,
            "self.qkv = nn.Linear($d, 3 * $d)",
        ),
        "mask by triu": part(
            """
            q, k, v = self.qkv($x).split($d, -1)
            scores = q @ k.mT * $d ** -0.5
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
            $y = scores.softmax(-1) @ v
            """,
            "self.qkv = nn.Linear($d, 3 * $d)",
        ),
        "scores without softmax": part(
            "q, k, v = self.qkv($x).split($d, -1)\n$y = (q @ k.mT).tanh() @ v",
            "self.qkv = nn.Linear($d, 3 * $d)",
        ),
        "MultiheadAttention": part(
            "$y = self.attention($x, $x, $x, need_weights=False)[0]",
            "self.attention = nn.MultiheadAttention($d, $heads, batch_first=True)",
        ),
        "MultiheadAttention with bias_kv": part(
            "$y = self.attention($x, $x, $x)[0]",
            "self.attention = nn.MultiheadAttention($d, $heads, batch_first=True, "
            "add_bias_kv=True, add_zero_attn=True)",
        ),
        "scores with a distance": part(
            """
            q, k, v = self.qkv($x).split($d, -1)
            at = torch.arange($x.shape[1])
            bias = self.near((at[:, None] - at).abs().clamp(max=3)).squeeze(-1)
            $y = (q @ k.mT + bias).softmax(-1) @ v
            """,
            "self.qkv = nn.Linear($d, 3 * $d)\nself.near = nn.Embedding(4, 1)",
        ),
        "cumsum": part("$y = $x.cumsum(1) / torch.arange(1, $x.shape[1] + 1).to($x)[:, None]"),
        "shift": part("$y = F.pad($x, (0, 0, 1, 0))[:, :-1]"),
        "roll": part("$y = $x.roll(1, 1)"),
        "half shift": part(
            "a, b = $x.split([3, $d - 3], -1)\n$y = torch.cat((a.roll(1, 1), b), -1)",
        ),
        "conv over tokens": part(
            "$y = self.conv($x.mT).mT", "self.conv = nn.Conv1d($d, $d, 3, padding=1)"
        ),
        "Fourier": part("$y = torch.fft.fft($x, dim=1).real"),
        "GRU": part("$y = self.gru($x)[0]", "self.gru = nn.GRU($d, $d, batch_first=True)"),
        "token mixing": part(
            "$y = (self.mix[: $x.shape[1], : $x.shape[1]] @ $x)",
            "self.mix = nn.Parameter(torch.ones(16, 16))",
        ),
        "recurrence": part(
            """
            state, states = $x[:, 0], []
            for t in $x.unbind(1):
                state = 0.5 * state + t
                states.append(state)
            $y = torch.stack(states, 1)
            """
        ),
    },
)
"""What mixes tokens, before the layer that writes."""

ACTIVATIONS = Table(
    plain={
        "gelu": part("$y = F.gelu($x)"),
        "relu": part("$y = F.relu($x)"),
        "silu": part("$y = F.silu($x)"),
    },
    odd={
        "tanh": part("$y = torch.tanh($x)"),
        "gated": part("$y = F.silu($x) * $x.flip(-1)"),
        "softmax": part("$y = $x.softmax(-1)"),
        "in place": part("$y = $x\n$y.relu_()"),
        "none": part(),
        "PReLU": part("$y = self.act$n($x)", "self.act$n = nn.PReLU()"),
        "relu squared": part("$y = F.relu($x).square()"),
        "normalised": part("$y = F.layer_norm(F.gelu($x), $x.shape[-1:])"),
    },
)

RESIDUALS = Table(
    plain={
        "+": part("$y = $h + $x"),
        "+ reversed": part("$y = $x + $h"),
    },
    odd={
        "+=": part("$y = $h.clone()\n$y += $x"),
        "+= into the stream": part("$h += $x\n$y = $h"),
        "add_ to the branch": part("$y = $x.clone().add_($h)"),
        "add_ without clone": part("$y = $x.add_($h)"),
        "alpha": part("$y = torch.add($h, $x, alpha=0.5)"),
        "sum of a list": part("$y = sum([$h, $x])"),
        "stack and sum": part("$y = torch.stack(($h, $x)).sum(0)"),
        "stack and mean": part("$y = torch.stack(($h, $x)).mean(0) * 2"),
        "scaled stream": part("$y = $h * 0.5 + $x"),
        "lerp": part("$y = torch.lerp($h, $x, 0.5)"),
        "lerp by feature": part(
            "$y = torch.lerp($h, $x, self.mix$n)", "self.mix$n = nn.Parameter(torch.ones($d))"
        ),
        "LayerScale": part(
            "$y = $h + self.gamma$n * $x", "self.gamma$n = nn.Parameter(torch.ones($d))"
        ),
        "LayerScale of one number": part(
            "$y = $h + self.gamma$n * $x", "self.gamma$n = nn.Parameter(torch.ones(1))"
        ),
        "LayerScale, negative power": part(
            "$y = $h + $x / self.gamma$n", "self.gamma$n = nn.Parameter(torch.ones($d))"
        ),
        "stream scaled by feature": part(
            "$y = $h * self.gamma$n + $x", "self.gamma$n = nn.Parameter(torch.ones($d))"
        ),
        "addcmul": part(
            "$y = torch.addcmul($h, $x, self.gamma$n)",
            "self.gamma$n = nn.Parameter(torch.ones($d))",
        ),
        "learned mix": part(
            "$y = $h * self.mix$n[0] + $x * self.mix$n[1]",
            "self.mix$n = nn.Parameter(torch.ones(2))",
        ),
        "gate of the stream": part(
            "$y = $h + $x * torch.sigmoid($h.mean(-1, keepdim=True))",
        ),
        "gate of the branch": part("$y = $h + $x * $x.norm(dim=-1, keepdim=True).tanh()"),
        "gate of both, centred": part(
            "$y = $h + $x * torch.sigmoid(($h - $h.mean(-1, keepdim=True)).std(-1, keepdim=True))"
        ),
        "some tokens": part("$y = torch.cat(($h[:, :1], $h[:, 1:] + $x[:, 1:]), 1)"),
        "some tokens in place": part("$y = $h.clone()\n$y[:, ::2] += $x[:, ::2]"),
        "where": part("$y = torch.where($h[..., :1] > 0, $h + $x, $h)"),
        "where of tokens": part(
            "keep$n = (torch.arange($h.shape[1]) % 2 == 0)[:, None]\n"
            "$y = torch.where(keep$n, $h + $x, $h)"
        ),
        "index_add": part("$y = $h.index_add(1, torch.arange($h.shape[1]), $x)"),
        "index_put": part(
            "rows$n = torch.arange($h.shape[1])\n"
            "$y = $h.index_put((slice(None), rows$n) and (torch.tensor([0]),), $x[:1], True)"
        ),
        "scatter_add": part("$y = $h.scatter_add(1, torch.zeros_like($x, dtype=torch.long), $x)"),
        "scatter_add by feature": part(
            "$y = $h.scatter_add(2, torch.zeros_like($x, dtype=torch.long), $x)"
        ),
        "baddbmm": part(
            "$y = torch.baddbmm($h, torch.eye($h.shape[1]).to($h).expand($h.shape[0], -1, -1), $x)"
        ),
        "dropout": part("$y = $h + F.dropout($x, 0.2, self.training)"),
        "dropout always": part("$y = $h + F.dropout($x, 0.0, True)"),
        "stochastic depth": part(
            "$y = $h + $x if not self.training or torch.rand(()) > 0.5 else $h"
        ),
        "no residual": part("$y = $x"),
        "hypot": part("$y = torch.hypot($h, $x)"),
        "maximum": part("$y = torch.maximum($h, $x)"),
        "product": part("$y = $h * (1 + $x)"),
        "addcdiv": part("$y = torch.addcdiv($h, $x, torch.ones_like($x) * 2)"),
        "matmul with ones": part(
            "$y = (torch.stack(($h, $x), -1) @ torch.ones(2, 1).to($h)).squeeze(-1)"
        ),
        "einsum": part(
            "$y = torch.einsum('kbtd,k->btd', torch.stack(($h, $x)), "
            "torch.tensor([1.0, 0.5]).to($h))"
        ),
    },
)
"""How a branch ``$x`` joins the stream ``$h``."""

STREAM = Table(
    plain={"nothing": part()},
    odd={
        # What leaves the mean of each token alone.
        "Dropout": part("$y = self.drop$n($x)", "self.drop$n = nn.Dropout(0.3)"),
        "Identity": part("$y = self.same$n($x)", "self.same$n = nn.Identity()"),
        "clone": part("$y = $x.clone()"),
        "contiguous": part("$y = $x.mT.contiguous().mT"),
        "reshaped": part("$y = $x.reshape(-1, $d).view($x.shape)"),
        "cast": part("$y = $x.to(torch.float64)"),
        "cast and back": part("$y = $x.float().to($x.dtype)"),
        "times a number": part("$y = $x * 1.5"),
        "divided": part("$y = $x / math.sqrt(2)"),
        "tokens flipped": part("$y = $x.flip(1)"),
        "tokens gathered": part(
            "order$n = $x.detach()[..., 0].argsort(1)\n"
            "$y = $x.gather(1, order$n[..., None].expand($x.shape))"
        ),
        "tokens by index": part("$y = $x[:, torch.arange($x.shape[1] - 1, -1, -1)]"),
        "last token again": part("$y = torch.cat(($x, $x[:, -1:]), 1)"),
        "every other token": part("$y = $x[:, ::2]"),
        "pooled tokens": part("$y = F.avg_pool1d($x.mT, 2, 1, 1).mT"),
        "largest of the tokens": part("$y = F.max_pool1d($x.mT, 2, 1, 1).mT"),
        "upsampled tokens": part("$y = F.interpolate($x.mT, scale_factor=2, mode='nearest').mT"),
        "tokens padded": part("$y = F.pad($x, (0, 0, 1, 0))"),
        "tokens padded with ones": part("$y = F.pad($x, (0, 0, 1, 0), value=1.0)"),
        "tokens padded, replicated": part("$y = F.pad($x.mT, (1, 1), mode='replicate').mT"),
        "tokens masked": part(
            "$y = $x.masked_fill((torch.arange($x.shape[1]) % 3 == 0)[:, None], 0.0)"
        ),
        "tokens masked with ones": part(
            "$y = $x.masked_fill((torch.arange($x.shape[1]) % 3 == 0)[:, None], 1.0)"
        ),
        "tokens masked in place": part(
            "$y = $x.clone()\n$y[torch.arange($x.shape[0]) % 2 == 0] = 0"
        ),
        "tokens weighted": part("$y = $x * torch.linspace(1, 2, $x.shape[1]).to($x)[:, None]"),
        "detached": part("$y = $x.detach()"),
        "expanded": part("$y = $x.unsqueeze(0).expand(2, -1, -1, -1).mean(0)"),
        "over the batch": part("$y = $x - $x.mean(0, keepdim=True)"),
        "summed over heads": part("$y = $x.unflatten(1, (1, -1)).sum(1)"),
        "split and joined": part("$y = torch.cat($x.split(2, 1), 1)"),
        "centred": part("$y = $x - $x.mean(-1, keepdim=True)"),
        "mean added to all": part("$y = $x + $x.mean(-1, keepdim=True)"),
        "a number of the token added": part("$y = $x + $x[..., :1]"),
        "as_strided": part("$y = $x.contiguous().as_strided($x.shape, $x.contiguous().stride())"),
        "autograd.Function": part(
            "$y = Double$n.apply($x)",
            "",
            """
            class Double$n(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * 2
                @staticmethod
                def backward(ctx, g):
                    return g * 2
            """,
        ),
        "autograd.Function of the mean": part(
            "$y = Own$n.apply($x)",
            "",
            """
            class Own$n(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return x * x.mean(-1, keepdim=True).tanh()
                @staticmethod
                def backward(ctx, g):
                    return g
            """,
        ),
        "custom op": part(
            "$y = torch.ops.random_modules.halve($x)",
        ),
        "checkpoint of a lambda": part(
            "$y = checkpoint(lambda t: t + t.tanh(), $x, use_reentrant=False)"
        ),
        "cond": part("$y = torch.cond($x.sum() > 0, lambda t: t * 2, lambda t: t + 1, ($x,))"),
        "cond that looks": part(
            "$y = torch.cond($x.mean() > 0.3, lambda t: t * 2, lambda t: t * 3, ($x,))"
        ),
        "while_loop": part(
            """
            from torch._higher_order_ops.while_loop import while_loop
            zero$n = torch.zeros((), dtype=torch.long)
            $y = while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, t * 1.5), (zero$n, $x))[1]
            """
        ),
        # What sees it.
        "tanh": part("$y = torch.tanh($x)"),
        "relu": part("$y = F.relu($x)"),
        "one feature written": part("$y = $x.clone()\n$y[..., 0] = 0"),
        "one feature written by a view": part(
            "$y = $x.clone()\nview$n = $y.view(-1, $d)\nview$n[:, 1].mul_(3)"
        ),
        "written after the mean": part(
            """
            $y = $x.clone()
            mean$n = $y.mean(-1, keepdim=True)
            $y[..., 0] += 1
            $y = $y - mean$n
            """
        ),
        "rows written after the mean": part(
            """
            $y = $x.clone()
            mean$n = $y.mean(-1, keepdim=True)
            $y.mul_(2)
            $y = $y - mean$n
            """
        ),
        "mask written after use": part(
            """
            mask$n = torch.ones($x.shape[1], 1).to($x)
            first$n = $x * mask$n
            mask$n[0] = 0
            $y = first$n + $x * mask$n
            """
        ),
        "mask written by feature": part(
            """
            mask$n = torch.ones_like($x)
            mask$n[..., 0] = 0
            $y = $x * mask$n
            """
        ),
        "index written after use": part(
            """
            index$n = torch.zeros($x.shape[-1], dtype=torch.long)
            index$n[1:] = torch.arange(1, $x.shape[-1])
            $y = $x[..., index$n]
            """
        ),
        "features rolled": part("$y = $x.roll(1, -1)"),
        "features flipped": part("$y = $x.flip(-1)"),
        "features chosen": part("$y = $x[..., [1, 0, *range(2, $d)]]"),
        "features doubled": part("$y = $x[..., [0, 0, *range(2, $d)]]"),
        "features padded": part("$y = F.pad($x[..., 1:], (1, 0))"),
        "features sorted": part("$y = $x.sort(-1).values"),
        "features scaled": part("$y = $x * torch.linspace(1, 2, $d).to($x)"),
        "features masked": part("$y = $x.masked_fill(torch.arange($d) == 2, 0.0)"),
        "feature cumsum": part("$y = $x.cumsum(-1)"),
        "clamped": part("$y = $x.clamp(-3, 3)"),
        "clamped far out": part("$y = $x.clamp(-1e3, 1e3)"),
        "nan_to_num": part("$y = torch.nan_to_num($x)"),
        "normalised": part("$y = F.normalize($x, dim=-1) * 3"),
        "softmax over features": part("$y = $x.softmax(-1)"),
        "softmax added": part("$y = $x + $x.softmax(-1)"),
        "log_softmax": part("$y = $x.log_softmax(-1)"),
        "variance added": part("$y = $x + $x.var(-1, keepdim=True)"),
        "std as a factor": part("$y = $x / ($x.std(-1, keepdim=True) + 1)"),
        "norm as a factor": part("$y = $x / ($x.norm(dim=-1, keepdim=True) + 1)"),
        "mean of the batch": part("$y = $x + $x.mean()"),
        "max of features": part("$y = $x - $x.amax(-1, keepdim=True)"),
        "a constant": part("$y = $x + 0.5"),
        "a constant of one feature": part("$y = $x + torch.eye($d)[0].to($x)"),
        "a buffer": part(
            "$y = $x + self.buffer$n", "self.register_buffer('buffer$n', floats($d, seed=$n))"
        ),
        "a buffer without mean": part(
            "$y = $x + self.buffer$n",
            "self.register_buffer('buffer$n', F.layer_norm(floats($d, seed=$n), ($d,)))",
        ),
        "a buffer over a parameter": part(
            "$y = $x + self.vector$n + 0 * self.buffer$n.sum() + self.buffer$n.tanh()",
            "self.vector$n = nn.Parameter(torch.ones($d))\n"
            "self.register_buffer('buffer$n', self.vector$n.detach())",
        ),
        "a plain tensor": part("$y = $x + self.plain$n", "self.plain$n = floats($d, seed=$n)"),
        "a parameter": part(
            "$y = $x + self.vector$n", "self.vector$n = nn.Parameter(torch.ones($d))"
        ),
        "a parameter by value": part(
            "$y = $x + self.vector$n if self.vector$n.sum().item() > 0 else $x",
            "self.vector$n = nn.Parameter(torch.ones($d))",
        ),
        "a parameter of a list": part(
            "$y = $x + self.vectors$n[0]", "self.vectors$n = [nn.Parameter(floats($d, seed=$n))]"
        ),
        "absolute": part("$y = $x.abs()"),
        "sign of the mean": part("$y = $x * torch.sign($x.mean(-1, keepdim=True))"),
        "item decides": part("$y = $x if $x.mean().item() > 0 else -$x"),
        "any decides": part("$y = $x * 2 if bool(($x > 3).any()) else $x"),
        "number of positives": part("$y = $x * (1 + ($x > 0).double().mean())"),
        "length decides": part("$y = $x if $x.shape[1] < 7 else $x.tanh()"),
        "length decides a norm": part(
            "$y = $x if $x.shape[1] < 7 else $x * $x.mean(-1, keepdim=True)"
        ),
        "one token decides": part("$y = $x if $x.shape[1] > 1 else $x + $x.mean()"),
        "batch decides": part("$y = $x if $x.shape[0] > 1 else $x.tanh()"),
        "numel decides": part("$y = $x if $x.numel() < 300 else $x.relu()"),
        "dtype decides": part("$y = $x if $x.dtype == torch.float64 else $x.tanh()"),
        "contiguity decides": part("$y = $x if $x.is_contiguous() else $x.tanh()"),
        "first call decides": part(
            "$y = $x if self.calls$n < 2 else $x.tanh()\nself.calls$n += 1", "self.calls$n = 0"
        ),
        "clock": part("$y = $x if self.time$n() > 0 else $x.tanh()", "self.time$n = lambda: 1"),
        "try": part(
            """
            try:
                $y = $x + self.missing$n
            except AttributeError:
                $y = $x
            """
        ),
        "numpy": part("$y = $x + torch.from_numpy($x.detach().numpy().mean(-1, keepdims=True))"),
        "numpy of a parameter": part(
            "$y = $x + float(self.vector$n.detach().numpy().mean())",
            "self.vector$n = nn.Parameter(torch.ones($d))",
        ),
        "tolist": part("$y = $x * (1 + 0.1 * len([v for v in $x.flatten().tolist() if v > 0]))"),
        "float(mean)": part("$y = $x + float($x.mean())"),
        "unique": part("$y = $x + $x.round().unique().numel()"),
        "topk": part("$y = $x.scatter(-1, $x.topk(2, -1).indices, 0.0)"),
        "quantile": part("$y = $x - $x.median(-1, keepdim=True).values"),
        "data": part("$y = $x.data * 2"),
        "data written": part("$y = $x.clone()\n$y.data[..., 0] = 1.0"),
        "set_": part(
            "$y, whole$n = torch.empty(0).to($x), $x.contiguous()\n"
            "$y.set_(whole$n.untyped_storage(), 0, whole$n.shape, whole$n.stride())"
        ),
        "resized": part("$y = $x.contiguous().clone().resize_($x.shape)"),
        "complex": part("$y = torch.view_as_real(torch.complex($x, $x.tanh()))[..., 0]"),
        "nested tensor": part(
            "$y = torch.nested.nested_tensor(list($x.unbind(0))).to_padded_tensor(0.0)"
        ),
        "sparse": part("$y = $x.to_sparse().to_dense()"),
        "half": part("$y = $x + ($x.half() * 0).to($x)"),
    },
)
"""What happens to the stream between blocks."""

KEEPS = Table(
    plain={"nothing": part("")},
    odd={
        "on self": part("self.kept$n = $x"),
        "mean on self": part("self.kept$n = $x.mean()"),
        "number on self": part("self.kept$n = float($x.detach().mean())", "self.kept$n = 0.0"),
        "in a list": part("self.kept$n.append($x)", "self.kept$n = []"),
        "in a dict": part("self.kept$n['x'] = $x[:, 0]", "self.kept$n = {}"),
        "in a deque": part("self.kept$n.append($x)", "self.kept$n = collections.deque(maxlen=2)"),
        "in a buffer": part(
            "self.kept$n.copy_($x.mean((0, 1)))",
            "self.register_buffer('kept$n', torch.zeros($d).double())",
        ),
        "in a buffer, mean": part(
            "self.kept$n.mul_(0.9).add_($x.mean())",
            "self.register_buffer('kept$n', torch.zeros(()).double())",
        ),
        "buffer replaced": part(
            "self.kept$n = $x.mean((0, 1))",
            "self.register_buffer('kept$n', torch.zeros($d).double())",
        ),
        "in the input": part("x.mul_(2) if x.is_floating_point() else x.clamp_(max=9)"),
        "read by the next call": part(
            """
            if self.kept$n is not None and self.kept$n.shape == $x.shape:
                $x = $x + self.kept$n.tanh()
            self.kept$n = $x
            """,
            "self.kept$n = None",
        ),
        "mean read by the next call": part(
            """
            before$n, self.kept$n = self.kept$n, $x.detach().mean()
            $x = $x * (1 + before$n)
            """,
            "self.kept$n = 0.0",
        ),
        "read by a later layer": part(
            "self.kept$n = $x\n$x = torch.cat((self.kept$n[:, :1].tanh(), $x[:, 1:]), 1)"
        ),
        "cache written in place": part(
            """
            if $x.shape[0] <= 8 and $x.shape[1] <= 32:
                self.kept$n[: $x.shape[0], : $x.shape[1]] = $x
                $x = $x + self.kept$n[: $x.shape[0], : $x.shape[1]].sin()
            """,
            "self.register_buffer('kept$n', torch.zeros(8, 32, $d).double(), persistent=False)",
        ),
        "cache of values": part(
            """
            if $x.shape[0] <= 8 and $x.shape[1] <= 32:
                self.kept$n[: $x.shape[0], : $x.shape[1]] = $x
            """,
            "self.register_buffer('kept$n', torch.zeros(8, 32, $d).double())",
        ),
        "on a child": part("self.child$n.value = $x", "self.child$n = nn.Identity()"),
        "in a slot": part(
            "self.kept$n.value = $x",
            "self.kept$n = Slot$n()",
            "class Slot$n:\n    __slots__ = ('value',)",
        ),
        "as the input of a hook": part(
            "$x = self.spot$n($x)",
            "self.spot$n, self.kept$n = nn.Identity(), []\nkept$n = self.kept$n\n"
            "self.spot$n.register_forward_hook(lambda m, a, y: kept$n.append(a[0]))",
        ),
        "printed": part("self.kept$n = str($x.shape)"),
        "repr of the values": part("self.kept$n = repr(round(float($x.detach().mean()), 6))"),
        "setattr by name": part("setattr(self, 'kept' + '$n', $x)"),
        "object.__setattr__": part("object.__setattr__(self, 'kept$n', $x)"),
    },
)
"""Where the stream ``$x`` is kept for somebody who reads it later. May change ``$x``."""

LOOPS = Table(
    plain={
        "ModuleList": part(
            "for block in self.blocks:\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "Sequential": part(
            "$h = self.blocks($h)",
            "self.blocks = nn.Sequential(*($B() for _ in range($layers)))",
        ),
    },
    odd={
        "one block again and again": part(
            "for _ in range($layers + 1):\n    $h = self.block($h)", "self.block = $B()"
        ),
        "as often as there are tokens": part(
            "for _ in range($h.shape[1] % 4):\n    $h = self.block($h)", "self.block = $B()"
        ),
        "ModuleDict": part(
            "for name in self.blocks:\n    $h = self.blocks[name]($h)",
            "self.blocks = nn.ModuleDict({k: $B() for k in ['a-b', 'model', '0'][:$layers]})",
        ),
        "attributes": part(
            "for k in range($layers):\n    $h = getattr(self, f'block{k}')($h)",
            "for k in range($layers):\n    setattr(self, f'block{k}', $B())",
        ),
        "blocks by slice": part(
            "for block in self.blocks[: $h.shape[1]]:\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers + 1))",
        ),
        "skipped by length": part(
            "for k, block in enumerate(self.blocks):\n"
            "    $h = block($h) if k == 0 or $h.shape[1] > 4 else $h",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "early exit": part(
            "for block in self.blocks:\n    $h = block($h)\n"
            "    if $h.mean().item() > 0.5:\n        break",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "reversed": part(
            "for block in reversed(self.blocks):\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "reduce": part(
            "$h = functools.reduce(lambda t, block: block(t), self.blocks, $h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "one block twice in the list": part(
            "for block in self.blocks:\n    $h = block($h)",
            "shared = $B()\nself.blocks = nn.ModuleList([shared, $B(), shared])",
        ),
        "a plain list": part(
            "for block in self.blocks:\n    $h = block($h)",
            "self.blocks = [$B() for _ in range($layers)]\n"
            "for k, block in enumerate(self.blocks):\n    self.add_module(f'layer_{k}', block)",
        ),
        "a list that nobody registered": part(
            "for block in self.hidden + list(self.blocks):\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))\nself.hidden = [$B()]\n"
            "randomise(self.hidden[0].eval(), 7)",
        ),
        "keyword": part(
            "for block in self.blocks:\n    $h = block(x=$h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "forward of each": part(
            "for block in self.blocks:\n    $h = block.forward($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "checkpoint": part(
            "for block in self.blocks:\n    $h = checkpoint(block, $h, use_reentrant=False)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "states of all": part(
            "states = [$h]\nfor block in self.blocks:\n    states.append(block(states[-1]))\n"
            "$h = states[-1]",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "states of all, summed": part(
            "states = [$h]\nfor block in self.blocks:\n    states.append(block(states[-1]))\n"
            "$h = torch.stack(states).mean(0)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))",
        ),
        "states of all, weighted": part(
            "states = [$h]\nfor block in self.blocks:\n    states.append(block(states[-1]))\n"
            "$h = (torch.stack(states, -1) @ self.depth.softmax(0))",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))\n"
            "self.depth = nn.Parameter(torch.ones($layers + 1))",
        ),
        "U-Net": part(
            "skip = $h\nfor block in self.blocks:\n    $h = block($h)\n"
            "$h = self.join(torch.cat((skip, $h), -1))",
            "self.blocks = nn.ModuleList($B() for _ in range($layers))\n"
            "self.join = nn.Linear(2 * $d, $d)",
        ),
        "tied blocks": part(
            "for block in self.blocks:\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers + 1))\n"
            "for a, b in zip(self.blocks[0].parameters(), self.blocks[1].parameters()):\n"
            "    b.data = a.data",
        ),
        "blocks that share a norm": part(
            "for block in self.blocks:\n    $h = block($h)",
            "self.blocks = nn.ModuleList($B() for _ in range($layers + 1))\n"
            "norms = [[(m, n) for m in b.modules() for n, c in m.named_children() "
            "if isinstance(c, nn.LayerNorm)] for b in self.blocks]\n"
            "for (m, n), (o, k) in zip(*norms[:2]):\n    setattr(o, k, getattr(m, n))",
        ),
        "copies of one block": part(
            "for block in self.blocks:\n    $h = block($h)",
            "one = $B()\nself.blocks = nn.ModuleList(copy.deepcopy(one) for _ in range($layers))",
        ),
        "TransformerEncoderLayer": part(
            "for block in self.blocks:\n    $h = block($h)",
            "self.blocks = nn.ModuleList(nn.TransformerEncoderLayer($d, $heads, 2 * $d, "
            "batch_first=True, norm_first=True, activation='gelu') for _ in range($layers))",
        ),
        "TransformerEncoder": part(
            "$h = self.blocks($h)",
            "self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer($d, $heads, 2 * $d, "
            "batch_first=True, norm_first=True), $layers, enable_nested_tensor=False)",
        ),
        "post-LN TransformerEncoder": part(
            "$h = self.blocks($h)",
            "self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer($d, $heads, 2 * $d, "
            "batch_first=True), $layers)",
        ),
        "TransformerDecoderLayer": part(
            "$h = self.blocks($h, $h.detach().tanh())",
            "self.blocks = nn.TransformerDecoderLayer($d, $heads, 2 * $d, batch_first=True, "
            "norm_first=True)",
        ),
    },
)
"""How the ``$layers`` blocks ``$B`` stand in the model, and how they are called."""

HEADS = Table(
    plain={
        "Linear": part("$y = self.head($x)", "self.head = nn.Linear($d, 20)"),
        "none": part(),
    },
    odd={
        "tied": part(
            "$y = self.head($x)",
            "self.head = nn.Linear($d, 20, bias=False)\nself.head.weight = matrix(self, 20, 0)\n"
            "assert self.head.weight.shape == (20, $d)",
        ),
        "first token": part("$y = self.head($x[:, 0])", "self.head = nn.Linear($d, 20)"),
        "mean of tokens": part("$y = self.head($x.mean(1))", "self.head = nn.Linear($d, 20)"),
        "two heads": part(
            "$y = self.head($x) + self.second($x).sum(-1, keepdim=True)",
            "self.head, self.second = nn.Linear($d, 20), nn.Linear($d, 3)",
        ),
    },
)
TIED = Table(
    plain={},
    odd={
        "tied": part(
            "$y = self.head($x)",
            "self.head = nn.Linear($d, 20, bias=False)\nself.head.weight = self.embed.weight",
        ),
        "tied by .data": part(
            "$y = self.head($x)",
            "self.head = nn.Linear($d, 20, bias=False)\n"
            "self.head.weight.data = self.embed.weight.data",
        ),
        "tied by a new parameter": part(
            "$y = self.head($x)",
            "self.head = nn.Linear($d, 20, bias=False)\n"
            "self.head.weight = nn.Parameter(self.embed.weight.data)",
        ),
        "tied by a transposed view": part(
            "$y = $x @ self.head",
            "self.head = nn.Parameter(self.embed.weight.data.t())",
        ),
        "tied by a buffer": part(
            "$y = F.linear($x, self.head)",
            "self.register_buffer('head', self.embed.weight.detach())",
        ),
        "tied by a list": part(
            "$y = F.linear($x, self.head[0])", "self.head = [self.embed.weight]"
        ),
        "tied by a dict of .data": part(
            "$y = F.linear($x, self.head['w'])", "self.head = {'w': self.embed.weight.data}"
        ),
        "tied by a closure": part(
            "$y = self.head($x)",
            "table = self.embed.weight\nself.head = lambda t: t @ table.t()",
        ),
        "tied by a closure over .data": part(
            "$y = self.head($x)",
            "table = self.embed.weight.data\nself.head = lambda t: t @ table.t()",
        ),
        "tied by a partial": part(
            "$y = self.head($x)",
            "self.head = functools.partial(F.linear, weight=self.embed.weight)",
        ),
        "tied by a global": part(
            "$y = F.linear($x, TABLES[0])",
            "TABLES.append(self.embed.weight.detach())",
            "TABLES = []",
        ),
        "tied in forward": part("$y = F.linear($x, self.embed.weight)"),
        "tied in forward, slice": part("$y = $x @ self.embed.weight[3:].T"),
        "tied by a property": part(
            "$y = F.linear($x, self.table)",
            "type(self).table = property(lambda self: self.embed.weight)",
        ),
        "rows read beside": part("$y = $x + self.embed.weight[3].mean()"),
        "tied to centred rows": part(
            "$y = F.linear($x, self.embed.weight - self.embed.weight.mean(-1, keepdim=True))"
        ),
    },
)
"""Heads that share the ``(20, $d)`` weight of ``self.embed``."""

LEAKS = Table(
    plain={"nothing": part()},
    odd={
        "in a list": part("$y = $x + self.held$n[0].mean()", "self.held$n = [$w]"),
        "in a list, .data": part("$y = $x + self.held$n[0].mean()", "self.held$n = [$w.data]"),
        "in a dict": part("$y = $x * (1 + self.held$n['w'].mean())", "self.held$n = {'w': $w}"),
        "in a global": part(
            "$y = $x + HELD$n['w'].mean()", "HELD$n['w'] = $w.detach()", "HELD$n = {}"
        ),
        "in a closure": part(
            "$y = $x + self.read$n()", "w$n = $w\nself.read$n = lambda: w$n.mean()"
        ),
        "in a closure, .data": part(
            "$y = $x + self.read$n()", "w$n = $w.data\nself.read$n = lambda: w$n.sum() / 100"
        ),
        "in a partial": part(
            "$y = $x + self.read$n()", "self.read$n = functools.partial(torch.mean, $w)"
        ),
        "in a buffer": part(
            "$y = $x + self.held$n.mean()", "self.register_buffer('held$n', $w.detach())"
        ),
        "in a buffer, a part": part(
            "$y = $x + self.held$n.mean()",
            "self.register_buffer('held$n', $w.detach().flatten()[::2])",
        ),
        "in a buffer that is a copy": part(
            "$y = $x + self.held$n.mean()",
            "self.register_buffer('held$n', torch.zeros_like($w))",
        ),
        "in a parameter of its own": part(
            "$y = $x + self.held$n.mean()", "self.held$n = nn.Parameter($w.data)"
        ),
        "in a parameter of its own, transposed": part(
            "$y = $x + self.held$n.mean()", "self.held$n = nn.Parameter($w.data.t())"
        ),
        "under a second name": part("$y = $x + self.held$n.mean()", "self.held$n = $w"),
        "in another module": part(
            "$y = $x + self.other$n.weight.mean()",
            "self.other$n = nn.Identity()\nself.other$n.weight = $w",
        ),
        "by name": part(
            "$y = $x + dict(self.named_parameters())[self.name$n].mean()",
            "w$n = $w\nself.name$n = next(n for n, p in self.named_parameters() if p is w$n)",
        ),
        "by all parameters": part("$y = $x + sum(p.mean() for p in self.parameters())"),
        "by state_dict": part("$y = $x + next(iter(self.state_dict().values())).mean()"),
        "by item": part("$y = $x + self.held$n[0].mean().item()", "self.held$n = [$w]"),
        "by item of a property": part(
            "$y = $x * (1 + self.size$n)",
            "w$n = $w\ntype(self).size$n = property(lambda self: w$n.mean().item())",
        ),
        "by a default": part("$y = $x + self.read$n()", "self.read$n = lambda w=$w: w.mean()"),
        "by a weak reference": part(
            "$y = $x + self.held$n().mean()", "import weakref\nself.held$n = weakref.ref($w)"
        ),
        "by as_strided": part(
            "$y = $x + self.held$n.mean()", "self.held$n = $w.detach().as_strided((2, 3), (3, 1))"
        ),
        "in a slot": part(
            "$y = $x + self.held$n.w.mean()",
            "self.held$n = Slot$n()\nself.held$n.w = $w.detach()",
            "class Slot$n:\n    __slots__ = ('w',)",
        ),
        "on the class": part("$y = $x + self.held$n.mean()", "type(self).held$n = $w.data"),
        "by __getattr__": part(
            "$y = $x + self.weightless$n.mean()",
            "self.proxy$n = Proxy$n($w)\nself.weightless$n = self.proxy$n.anything",
            """
            class Proxy$n:
                def __init__(self, w):
                    self.__dict__['_w'] = w.detach()
                def __getattr__(self, name):
                    return self._w
            """,
        ),
        "by a hook": part(
            "$y = self.spot$n($x)",
            "w$n = $w\nself.spot$n = nn.Identity()\n"
            "self.spot$n.register_forward_hook(lambda m, a, y: y + w$n.mean())",
        ),
        "normalised": part(
            "$y = $x + F.layer_norm(self.held$n[0], self.held$n[0].shape).mean()",
            "self.held$n = [$w]",
        ),
        "only its shape": part("$y = $x + self.held$n[0].shape[0]", "self.held$n = [$w]"),
        "only its dtype": part("$y = $x.to(self.held$n[0].dtype)", "self.held$n = [$w]"),
        "for long inputs": part(
            "$y = $x + (self.held$n[0].mean() if $x.shape[1] > 6 else 0)", "self.held$n = [$w]"
        ),
        "later": part("$y = $x", "self.held$n = [$w]"),
    },
)
"""How one of the model's weights, ``$w`` in ``__init__``, is read beside the layer that has it."""

OUTPUTS = Table(
    plain={
        "tensor": part("return $y"),
        "tuple": part("return ($y,)"),
        "dict": part("return {'logits': $y}"),
    },
    odd={
        "with the stream": part("return $y, $h"),
        "with one token of the stream": part("return $y, $h[:, -1]"),
        "with the mean of the stream": part("return {'logits': $y, 'mean': $h.mean(-1)}"),
        "with the centred stream": part("return $y, $h - $h.mean(-1, keepdim=True)"),
        "with the variance": part("return $y, $h.var(-1)"),
        "with a softmax of the stream": part("return $y, $h.softmax(-1)"),
        "with a number": part("return $y, float($h.detach().mean())"),
        "with an unused number": part("return $y, $h.shape[1]"),
        "with its argmax": part("return $y, $h.argmax(-1)"),
        "dataclass": part(
            "return Output($y)",
            "",
            "@dataclasses.dataclass\nclass Output:\n    logits: torch.Tensor",
        ),
        "dataclass with the stream": part(
            "return Output($y, $h)",
            "",
            "@dataclasses.dataclass\nclass Output:\n"
            "    logits: torch.Tensor\n    hidden: torch.Tensor",
        ),
        "slots": part(
            "return Output($y)",
            "",
            "@dataclasses.dataclass(slots=True)\nclass Output:\n    logits: torch.Tensor",
        ),
        "slots with the stream": part(
            "return Output($y, $h)",
            "",
            "@dataclasses.dataclass(slots=True)\nclass Output:\n"
            "    logits: torch.Tensor\n    hidden: torch.Tensor",
        ),
        "slots beside a tensor": part(
            "return $y, Output($h)",
            "",
            "@dataclasses.dataclass(slots=True)\nclass Output:\n    hidden: torch.Tensor",
        ),
        "own class with the stream": part(
            "return Output($y, $h)",
            "",
            """
            class Output:
                def __init__(self, logits, hidden):
                    self.logits, self._hidden = logits, [hidden]
            """,
        ),
        "own class, hidden": part(
            "return Output($y, $h)",
            "",
            """
            class Output:
                def __init__(self, logits, hidden):
                    self.logits, self.hidden = logits, lambda: hidden
            """,
        ),
        "namedtuple with the stream": part(
            "return Output($y, $h)",
            "",
            "Output = collections.namedtuple('Output', 'logits hidden')",
        ),
        "SimpleNamespace": part("return types.SimpleNamespace(logits=$y, extra=[$h])"),
        "nested": part("return {'a': [($y, {'b': ($h,)})]}"),
        "a set": part("return {'found': {$y, $h}}"),
        "a list of rows": part("return [*$y.unbind(0), $h[0]]"),
        "a generator": part("return (t for t in ($y, $h))"),
        "mappingproxy": part("return types.MappingProxyType({'y': $y, 'h': $h})"),
        "OrderedDict": part("return collections.OrderedDict(y=$y, h=$h.sum())"),
        "deque": part("return collections.deque([$y, $h])"),
        "attribute of the tensor": part("$y = $y + 0\n$y.hidden = $h\nreturn $y"),
        "subclass of a tensor": part(
            "return $y.as_subclass(Own)", "", "class Own(torch.Tensor):\n    pass"
        ),
        "exception": part(
            """
            try:
                raise Carrier($h)
            except Carrier as carried:
                return $y + carried.args[0].mean()
            """,
            "",
            "class Carrier(Exception):\n    pass",
        ),
        "ModelOutput": part(
            "return Output(logits=$y, hidden=$h)",
            "",
            """
            from transformers.utils import ModelOutput
            @dataclasses.dataclass
            class Output(ModelOutput):
                logits: torch.Tensor = None
                hidden: torch.Tensor = None
            """,
        ),
        "loss": part("return {'loss': $y.square().mean(), 'logits': $y}"),
        "shared memory": part("return $y, $y[0], $h[:, :0]"),
        "text": part("return $y, f'{$h.mean().item():.9f}'"),
        "None too": part("return $y, None, 3, 'text'"),
    },
)
"""What leaves: ``$y`` behind the last norm and head, ``$h`` the stream before it."""

OPTIONS = Table(
    plain={},
    odd={
        "attention_mask=None|bools($B, $T)": part(
            "if $o is not None:\n    $h = $h * $o[:, : $h.shape[1], None]"
        ),
        "mask=None|floats($T, 1)": part(
            "if $o is not None and len($o) == $h.shape[1]:\n    $h = $h + $h * $o"
        ),
        "prompt=None|floats(1, 2, $d)": part(
            "if $o is not None:\n    $h = torch.cat(($o.expand($h.shape[0], -1, -1), $h), 1)"
        ),
        "bias=None|floats($d)": part("if $o is not None:\n    $h = $h + $o"),
        "output_shift=None|floats($d, seed=5)": part("if $o is not None:\n    $h = $h + $o"),
        "class_labels=None|ids($B)": part(
            "if $o is not None:\n    $h = $h + self.labels($o)[:, None].tanh()",
            "self.labels = nn.Embedding(20, $d)",
        ),
        "style_labels=None|ids($B)": part(
            "if $o is not None:\n    $h = $h + self.styles($o)[:, None]",
            "self.styles = nn.Embedding(20, $d)",
        ),
        "labels=None|ids($B)": part("if $o is not None:\n    $h = $h * $h.mean(-1, keepdim=True)"),
        "return_mean=False|True": part("if $o:\n    $h = $h + $h.mean()"),
        "output_hidden_states=False|True": part("if $o:\n    self.states = $h"),
        "return_dict=True|False": part("if not $o:\n    return $h"),
        "use_cache=False|True": part("if $o:\n    $h = $h.tanh()"),
        "flag=False|True": part("if $o:\n    $h = torch.relu($h)"),
        "flag=True|False": part("if not $o:\n    $h = $h.flip(-1) * 2"),
        "activate=False|True": part("$h = $h.sin() if $o else $h"),
        "mode='plain'|'other'": part("if $o == 'other':\n    $h = $h.abs()"),
        "mode='plain'|'plain '": part("$h = {'plain': lambda t: t}.get($o, torch.tanh)($h)"),
        "scale=1.0|2.0": part("$h = $h * $o"),
        "power=1|2": part("$h = $h ** $o"),
        "power=1.0|2.0": part("$h = $h.pow($o) if $o != 1 else $h"),
        "layer=0|1": part("if $o:\n    return $h"),
        "shift=0.0|0.5": part("$h = $h + $o * torch.linspace(0, 1, $d).to($h)"),
        "temperature=None|floats()": part("if $o is not None:\n    $h = $h * $o"),
        "temperature=None|0.5": part("$h = $h if $o is None else torch.tanh($h * $o)"),
        "embeds=None|floats($B, $T, $d)": part(
            "if $o is not None:\n    $h = $o * 1.0 if $h.shape == $o.shape else $h"
        ),
        "inputs_embeds=None|floats($B, $T, $d)": part("if $o is not None:\n    $h = $o + 0"),
        "extra=None|{'add': floats($d)}": part("if $o is not None:\n    $h = $h + $o['add']"),
        "extra=None|{'other': 1}": part("if $o:\n    $h = $h.tanh()"),
        "callback=None|torch.tanh": part("if $o is not None:\n    $h = $o($h)"),
        "context=None|[floats($B, 1, $d)]": part("for c in $o or ():\n    $h = $h + c"),
        "*rest|floats($d)": part("for value in rest:\n    $h = $h + value"),
        "*rest|'other'": part("if rest:\n    $h = $h.tanh()"),
        "**kwargs|move=floats($d)": part("if 'move' in kwargs:\n    $h = $h + kwargs['move']"),
        "**kwargs|twist=True": part("if kwargs.get('twist'):\n    $h = $h.tanh()"),
        "*, only=None|floats($d)": part("if only is not None:\n    $h = $h + only"),
        "positions=None|ids($B, $T).clamp(max=15)": part(
            "if $o is not None:\n"
            "    $h = $h + self.places($o)[:, : $h.shape[1]] if $h.shape[1] == $o.shape[1] else $h",
            "self.places = nn.Embedding(20, $d)",
        ),
        "cache=None|[]": part("if $o is not None:\n    $o.append($h)"),
        "cache=None|{}": part("if $o is not None:\n    $o['h'] = $h.mean(-1)"),
        "out=None|torch.zeros($B, $d).double()": part("if $o is not None:\n    $o.copy_($h[:, 0])"),
    },
)
"""Optional inputs ``$o`` of the model: how they are declared, and another value to call with."""

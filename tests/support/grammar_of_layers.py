"""The grammar of layers: what mixes tokens, and what writes to the residual stream."""

from __future__ import annotations

from grammar import rule

MIXERS = rule(
    """
    fused attention
        self.qkv = nn.Linear(d, 3 * d)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    three projections
        self.q = nn.Linear(d, d)
        self.k = nn.Linear(d, d)
        self.v = nn.Linear(d, d)
        y = (self.q(x) @ self.k(x).mT / math.sqrt(d)).softmax(-1) @ self.v(x)
    mean of tokens
        y = x + x.mean(1, keepdim=True)
    norms of queries and keys
        self.qkv = nn.Linear(d, 3 * d)
        self.q_norm = nn.LayerNorm(d // heads)
        self.k_norm = nn.LayerNorm(d // heads)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, heads, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    interleaved projections with norms
        self.qkv = nn.Linear(d, 3 * d)
        self.q_norm = nn.LayerNorm(d // heads)
        self.k_norm = nn.LayerNorm(d // heads)
        q, k, v = self.qkv(x).view(*x.shape[:2], heads, 3, -1).unbind(3)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    one norm for queries and keys
        self.qkv = nn.Linear(d, 3 * d)
        self.qk_norm = nn.LayerNorm(d)
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(self.qk_norm(q), self.qk_norm(k), v)
    MultiheadAttention
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        y = self.attention(x, x, x, need_weights=False)[0]
    running mean
        y = x.cumsum(1) / torch.arange(1, x.shape[1] + 1).to(x)[:, None]
    shifted tokens
        y = F.pad(x, (0, 0, 1, 0))[:, :-1]
    GRU
        self.gru = nn.GRU(d, d, batch_first=True)
        y = self.gru(x)[0]
    """,
    plain=3,
)
"""What mixes tokens, before the layer that writes to the stream."""

ACTIVATIONS = rule(
    """
    gelu
        y = F.gelu(x)
    relu
        y = F.relu(x)
    silu
        y = F.silu(x)
    gated
        y = F.silu(x) * x.flip(-1)
    in place
        y = x
        y.relu_()
    none
        y = x
    normalised
        y = F.layer_norm(F.gelu(x), x.shape[-1:])
    """,
    plain=3,
)

WRITERS = rule(
    """
    Linear
        self.out = nn.Linear(i, d)
        y = self.out(x)
    Linear without bias
        self.out = nn.Linear(i, d, bias=False)
        y = self.out(x)
    matmul
        self.w = weight(i, d)
        y = x @ self.w
    F.linear beside the module
        self.out = nn.Linear(i, d)
        y = self.out(x) + F.linear(x.tanh(), self.out.weight)
    einsum with dots
        self.w = weight(d, i)
        self.b = weight(d)
        y = torch.einsum("...i,oi->...o", x, self.w) + self.b
    grouped Conv1d
        self.out = nn.Conv1d(i, d, 3, padding=1, groups=math.gcd(i, d))
        y = self.out(x.mT).mT
    low rank in the weight
        self.out = nn.Linear(i, d)
        self.down = nn.Linear(i, 2, bias=False)
        self.up = nn.Linear(2, d, bias=False)
        y = F.linear(x, self.out.weight + self.up.weight @ self.down.weight)
    weight looked at
        self.out = nn.Linear(i, d)
        y = self.out(x) * self.out.weight.mean()
    bias looked at
        self.out = nn.Linear(i, d)
        y = self.out(x) * (1 + self.out.bias.mean())
    centred already
        self.out = nn.Linear(i, d)
        y = self.out(x)
        y = y - y.mean(-1, keepdim=True)
    slice of a larger weight
        self.w = weight(d + 2, i)
        y = F.linear(x, self.w[1:-1])
    overlapping slices of a weight
        self.w = weight(d + 1, i)
        y = F.linear(x, self.w[:d]) + F.linear(x.tanh(), self.w[1:])
    weight by the length
        self.w = weight(3, d, i)
        y = F.linear(x, self.w[x.shape[1] % 3])
    weight by a value
        self.w = weight(3, d, i)
        y = F.linear(x, self.w[int(x.sum().item() > 0)])
    product of two weights
        self.w = weight(d, i)
        self.v = weight(d, 1)
        y = F.linear(x, self.w * self.v)
    bias by index
        self.out = nn.Linear(i, d)
        self.b = weight(d)
        y = self.out(x) + self.b[torch.arange(d - 1, -1, -1)]
    LayerScale
        self.out = nn.Linear(i, d)
        self.scale = weight(d)
        y = self.out(x) * self.scale
    LayerScale that is read elsewhere
        self.out = nn.Linear(i, d)
        self.scale = weight(d)
        y = self.out(x) * self.scale + self.scale.mean()
    gate of each token
        self.out = nn.Linear(i, d)
        self.gate = nn.Linear(i, 1)
        y = self.out(x) * torch.sigmoid(self.gate(x))
    gate of each feature
        self.out = nn.Linear(i, d)
        self.gate = nn.Linear(i, d)
        y = self.out(x) * torch.sigmoid(self.gate(x))
    activation behind
        self.out = nn.Linear(i, d)
        y = F.gelu(self.out(x))
    values of attention
        self.q = nn.Linear(i, i)
        self.v = nn.Linear(i, d)
        y = F.scaled_dot_product_attention(self.q(x), x, self.v(x))
    experts by mask
        self.route = nn.Linear(i, 2)
        self.experts = nn.ModuleList(nn.Linear(i, d) for _ in range(2))
        y, chosen = x.new_zeros(*x.shape[:-1], d), self.route(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            y[chosen == number] = expert(x[chosen == number])
    experts, grouped
        self.experts = weight(2, i, d)
        ends = torch.tensor([1, x.shape[0] * x.shape[1]], dtype=torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback
        y = product(x.reshape(-1, i), self.experts, ends).view(*x.shape[:-1], d)
    written into zeros
        self.out = nn.Linear(i, d)
        y = x.new_zeros(*x.shape[:-1], d)
        y[:, :] = self.out(x)
    two parts of the features
        self.left = nn.Linear(i, 3)
        self.right = nn.Linear(i, d - 3)
        y = torch.cat((self.left(x), self.right(x)), -1)
    float32 inside
        self.out = nn.Linear(i, d, dtype=torch.float32)
        y = self.out(x.float()).double()
    """,
    plain=3,
)
"""From ``i`` features to the ``d`` of the stream."""

"""The grammar of the residual stream, and of what a whole model reads and returns."""

from __future__ import annotations

from grammar import rule

RESIDUALS = rule(
    """
    sum
        y = h + x
    in place
        h += x
        y = h
    LayerScale
        self.gamma = weight(d)
        y = h + self.gamma * x
    divided by a LayerScale
        self.gamma = weight(d)
        y = h + x / self.gamma
    stream scaled by feature
        self.gamma = weight(d)
        y = h * self.gamma + x
    gate that sees the mean
        y = h + x * torch.sigmoid(h.mean(-1, keepdim=True))
    gate that sees the spread
        y = h + x * torch.sigmoid((h - h.mean(-1, keepdim=True)).std(-1, keepdim=True))
    dropout
        y = h + F.dropout(x, 0.2, self.training)
    dropout that always runs
        y = h + F.dropout(x, 0.0, True)
    product
        y = h * (1 + x)
    """,
)
"""How a branch ``x`` joins the stream ``h``."""

STREAMS = rule(
    """
    nothing
        y = x
    Dropout
        self.drop = nn.Dropout(0.3)
        y = self.drop(x)
    reshaped
        y = x.mT.contiguous().mT.reshape(-1, d).view(x.shape)
    cast and back
        y = x.float().to(x.dtype)
    tokens masked in place
        y = x.clone()
        y[torch.arange(x.shape[0]) % 2 == 0] = 0
    centred
        y = x - x.mean(-1, keepdim=True)
    mean added
        y = x + x.mean(-1, keepdim=True)
    strided view
        y = x.contiguous().as_strided(x.shape, x.contiguous().stride())
    op without a rule
        y = torch.ops.random_models.halve(x)
    cond
        y = torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t + 1, (x,))
    tanh
        y = torch.tanh(x)
    one feature written through a view
        y = x.clone()
        view = y.view(-1, d)
        view[:, 1].mul_(3)
    written after the mean
        y = x.clone()
        mean = y.mean(-1, keepdim=True)
        y[..., 0] += 1
        y = y - mean
    mask written after use
        mask = torch.ones(x.shape[1], 1).to(x)
        first = x * mask
        mask[0] = 0
        y = first + x * mask
    features summed up
        y = x.cumsum(-1)
    normalised
        y = F.normalize(x, dim=-1) * 3
    constant added
        y = x + 0.5
    stored buffer added
        self.stored = nn.Buffer(floats(d, seed=4))
        y = x + self.stored
    stored buffer of zero mean added
        self.stored = nn.Buffer(F.layer_norm(floats(d, seed=4), (d,)))
        y = x + self.stored
    parameter added
        self.vector = weight(d)
        y = x + self.vector
    buffer written
        self.kept = nn.Buffer(torch.zeros(d))
        self.kept.copy_(x.mean((0, 1)))
        y = x
    mean in a buffer
        self.kept = nn.Buffer(torch.zeros(()))
        self.kept.mul_(0.9).add_(x.mean())
        y = x
    cache in a buffer
        self.kept = nn.Buffer(torch.zeros(8, 32, d))
        self.kept[: x.shape[0], : x.shape[1]] = x
        y = x + self.kept[: x.shape[0], : x.shape[1]].sin()
    a number decides
        y = x if x.mean().item() > 0 else -x
    the length decides
        y = x if x.shape[1] < 7 else x * x.mean(-1, keepdim=True)
    the batch decides
        y = x if x.shape[0] > 1 else x.tanh()
    numpy
        y = x + torch.from_numpy(x.detach().numpy().mean(-1, keepdims=True))
    data written
        y = x.clone()
        y.data[..., 0] = 1.0
    half precision
        y = x + (x.half() * 0).to(x)
    """,
)
"""What happens to the stream between blocks."""

LOOPS = rule(
    """
    ModuleList
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        for block in self.blocks:
            h = block(h)
    Sequential
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        h = self.blocks(h)
    one block again and again
        self.block = Block()
        for _ in range(layers + 1):
            h = self.block(h)
    skipped by length
        self.blocks = nn.ModuleList(Block() for _ in range(layers + 1))
        for block in self.blocks[: h.shape[1]]:
            h = block(h)
    early exit
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        for block in self.blocks:
            h = block(h)
            if h.mean().item() > 0.5:
                break
    states weighted
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.depth = weight(layers + 1)
        states = [h]
        for block in self.blocks:
            states.append(block(states[-1]))
        h = torch.stack(states, -1) @ self.depth.softmax(0)
    U-Net
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.join = nn.Linear(2 * d, d)
        skip = h
        for block in self.blocks:
            h = block(h)
        h = self.join(torch.cat((skip, h), -1))
    tied blocks
        self.first = Block()
        self.second = tied(Block(), self.first)
        h = self.second(self.first(h))
    TransformerEncoder
        self.layer = nn.TransformerEncoderLayer(d, heads, 2 * d, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(self.layer, layers, enable_nested_tensor=False)
        h = self.blocks(h)
    post-LN TransformerEncoder
        self.layer = nn.TransformerEncoderLayer(d, heads, 2 * d, batch_first=True)
        self.blocks = nn.TransformerEncoder(self.layer, layers)
        h = self.blocks(h)
    """,
    plain=2,
)
"""How the blocks stand in the model, and how they are called."""

HEADS = rule(
    """
    Linear
        self.head = nn.Linear(d, 20)
        y = self.head(x)
    none
        y = x
    first token
        self.head = nn.Linear(d, 20)
        y = self.head(x[:, 0])
    mean of tokens
        self.head = nn.Linear(d, 20)
        y = self.head(x.mean(1))
    two heads
        self.head = nn.Linear(d, 20)
        self.second = nn.Linear(d, 3)
        y = self.head(x) + self.second(x).sum(-1, keepdim=True)
    """,
    plain=2,
)

TIED_HEADS = rule(
    """
    tied
        self.head = nn.Linear(d, 20, bias=False)
        self.head.weight = self.embed.weight
        y = self.head(x)
    tied by memory
        self.head = nn.Linear(d, 20, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.data)
        y = self.head(x)
    tied by a transposed view
        self.head = nn.Parameter(self.embed.weight.data.t())
        y = x @ self.head
    tied by a buffer
        self.head = nn.Buffer(self.embed.weight.detach())
        y = F.linear(x, self.head)
    tied in forward
        y = F.linear(x, self.embed.weight)
    some rows
        y = x @ self.embed.weight[3:].T
    one row
        y = x + self.embed.weight[3].mean()
    centred rows
        y = F.linear(x, self.embed.weight - self.embed.weight.mean(-1, keepdim=True))
    """,
)
"""Heads that share the weight of ``self.embed``, of shape ``(20, d)``."""

LEAKS = rule(
    """
    nothing
        y = x
    in a buffer
        self.held = nn.Buffer(w.detach())
        y = x + self.held.mean()
    in a parameter of its own
        self.held = nn.Parameter(w.data)
        y = x + self.held.mean()
    transposed
        self.held = nn.Parameter(w.data.t())
        y = x + self.held.mean()
    under a second name
        self.held = w
        y = x + self.held.mean()
    in another module
        self.other = nn.Identity()
        self.other.weight = w
        y = x + self.other.weight.mean()
    for long inputs
        self.held = w
        y = x + (self.held.mean() if x.shape[1] > 6 else 0)
    """,
)
"""How one of the model's weights ``w`` is read beside the layer that has it."""

OUTPUTS = rule(
    """
    tensor
        return y
    tuple
        return (y,)
    dict
        return {"logits": y}
    with the stream
        return y, h
    with the mean of the stream
        return {"logits": y, "mean": h.mean(-1)}
    with the centred stream
        return y, h - h.mean(-1, keepdim=True)
    with a softmax of the stream
        return y, h.softmax(-1)
    with a number
        return y, float(h.detach().mean())
    model output
        return Output(logits=y, hidden=h)
    own class
        return types.SimpleNamespace(logits=y, extra=[h])
    loss
        return {"loss": y.square().mean(), "logits": y}
    """,
    plain=3,
)
"""What leaves: ``y`` behind the last norm and head, ``h`` the stream before it."""

OPTIONS = rule(
    """
    mask=None: bools(B, T)
        h = h if mask is None else h * mask[:, : h.shape[1], None]
    prompt=None: floats(1, 2, d)
        h = h if prompt is None else torch.cat((prompt.expand(h.shape[0], -1, -1), h), 1)
    bias=None: floats(d)
        h = h if bias is None else h + bias
    labels=None: ids(B)
        self.table = nn.Embedding(20, d)
        h = h if labels is None else h + self.table(labels)[:, None]
    return_mean=False: True
        h = h + h.mean() if return_mean else h
    mode="plain": "other"
        h = h.abs() if mode == "other" else h
    scale=1.0: 2.0
        h = h * scale
    power=1: 2
        h = h**power
    embeds=None: floats(B, T, d)
        h = h if embeds is None else embeds + 0
    extra=None: {"add": floats(d)}
        h = h if extra is None else h + extra["add"]
    context=None: [floats(B, 1, d)]
        h = h + sum(context or [0])
    out=None: floats(B, d)
        h = h if out is None or out.shape != h[:, 0].shape else h + out.copy_(h[:, 0]).sum() * 0
    """,
    plain=0,
)
"""Optional inputs of the model: the name, the default, and another value to call with."""

"""A state-space vision model after VMamba, from outside of transformers."""

from __future__ import annotations

import torch
from torch import nn


class Scan(nn.Module):
    """A state-space mixer: gate, depthwise convolution, a scan over positions, a norm inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 2 * width
        self.enter, self.leave = nn.Linear(width, 2 * inner), nn.Linear(inner, width, bias=False)
        self.local = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.decay, self.skip = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.ones(inner))
        self.norm = nn.LayerNorm(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(x).chunk(2, -1)
        u = nn.functional.silu(self.local(u.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        flat = u.flatten(1, 2)
        steps = torch.arange(flat.shape[1], dtype=x.dtype)[:, None]
        kept = torch.exp(-nn.functional.softplus(self.decay) * steps / flat.shape[1])
        y = torch.cumsum(flat / kept, 1) * kept + self.skip * flat
        return self.leave(self.norm(y.view_as(u)) * nn.functional.silu(gate))


class Mixer(nn.Module):
    """Two pre-LN branches on a residual stream of ``(batch, height, width, channels)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.scan = nn.LayerNorm(width), Scan(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scan(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class StateSpaceVision(nn.Module):
    """After VMamba: patches, two stages of mixers, a convolution with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.patch_norm = nn.Conv2d(3, 13, 4, stride=4), nn.LayerNorm(13)
        self.first = nn.ModuleList(Mixer(13) for _ in range(2))
        self.down, self.down_norm = nn.Conv2d(13, 18, 3, stride=2, padding=1), nn.LayerNorm(18)
        self.second = nn.ModuleList(Mixer(18) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(18), nn.Linear(18, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch_norm(self.patches(images).permute(0, 2, 3, 1))
        for block in self.first:
            x = block(x)
        x = self.down_norm(self.down(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        for block in self.second:
            x = block(x)
        return self.head(self.norm(x).mean((1, 2)))

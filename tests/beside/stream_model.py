"""A transformer like Wan's over a rolling cache of keys and values, in plain torch.

    in each layer:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + modulation(time)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1), over all that is cached
        x += cross_attention(norm(x), text), whose keys and values are kept
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)

Axes: B batch (1), T tokens of a block, S tokens of the cache, N heads, H channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-6
Rotary = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a block; the defaults are Wan 2.1 1.3B's at 832x480.

    Args:
        heads, head_dim: N and H.
        layers, inner: how many, and the width inside their feed-forward part.
        rows, columns: tokens of a latent frame.
        channels: of a token's latents.
        text: tokens of the text.
        times: sinusoids of the time.
        own: frames of a block.
        slots: frames of the cache.
        sink: first frames that stay in it.
        first: the block sees itself alone, as the first of a video does.
    """

    heads: int = 12
    head_dim: int = 128
    layers: int = 30
    inner: int = 8960
    rows: int = 30
    columns: int = 52
    channels: int = 64
    text: int = 512
    times: int = 256
    own: int = 3
    slots: int = 21
    sink: int = 0
    first: bool = False

    @property
    def width(self) -> int:
        """Channels of a token inside the model."""
        return self.heads * self.head_dim

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """T."""
        return self.own * self.frame


class Layer(nn.Module):
    """One layer with its part of the cache.

    Args:
        sizes: of the model.
        attend: q, k, v [B, N, *, H] to the output.
    """

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes, self.attend, width = sizes, attend, sizes.width
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.text_q, self.text_out = (nn.Linear(width, width) for _ in range(2))
        self.norm_q, self.norm_k, self.norm_text_q = (nn.RMSNorm(width, EPS) for _ in range(3))
        self.norm = nn.LayerNorm(width, EPS)
        self.up, self.down = nn.Linear(width, sizes.inner), nn.Linear(sizes.inner, width)
        self.table = nn.Parameter(torch.randn(6, width, dtype=torch.float32) / width**0.5)
        shape = (1, -1, sizes.heads, sizes.head_dim)
        for name, tokens in (("cache", sizes.slots * sizes.frame), ("text", sizes.text)):
            for kind in "kv":
                self.register_buffer(f"{name}_{kind}", torch.randn(1, tokens, width).view(shape))

    def forward(self, x: Tensor, modulation: Tensor, rotary: Rotary, slots: Tensor) -> Tensor:
        """Run the layer, and write the block's keys and values.

        Args:
            x: [B, T, D].
            modulation: of the frames' times, [F, 6, D] in float32.
            rotary: cosines and sines of the tokens' positions, [T, 1, H / 2] each.
            slots: tokens of the cache that are the block's, [T].
        """
        parts = (self.table + modulation).unbind(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = (self._spread(part) for part in parts)
        y = self._self_attention(modulated(x, shift1, scale1), rotary, slots)
        x = (x.float() + y * gate1).to(x.dtype)
        q = self._heads(self.norm_text_q(self.text_q(self._normed(x))))
        x = x + self.text_out(self._attention(q, self.text_k, self.text_v))
        y = self.down(functional.gelu(self.up(modulated(x, shift2, scale2)), approximate="tanh"))
        return (x.float() + y * gate2).to(x.dtype)

    def _self_attention(self, x: Tensor, rotary: Rotary, slots: Tensor) -> Tensor:
        q = turned(self._heads(self.norm_q(self.to_q(x))), rotary)
        k = turned(self._heads(self.norm_k(self.to_k(x))), rotary)
        v = self._heads(self.to_v(x))
        self.cache_k[:, slots] = k
        self.cache_v[:, slots] = v
        if self.sizes.first:
            return self.to_out(self._attention(q, k, v))
        return self.to_out(self._attention(q, self.cache_k, self.cache_v))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.sizes.heads, self.sizes.head_dim))

    def _normed(self, x: Tensor) -> Tensor:
        weight, bias = self.norm.weight.float(), self.norm.bias.float()
        return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, EPS).to(x.dtype)

    def _spread(self, part: Tensor) -> Tensor:
        """Give the tokens of a frame its row, [F, D] to [1, T, D]."""
        return part[:, None].expand(-1, self.sizes.frame, -1).reshape(1, -1, part.shape[-1])


class Transformer(nn.Module):
    """Predict the velocity of a block."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        self.patches = nn.Linear(sizes.channels, width)
        exact = {"dtype": torch.float32}
        self.time1 = nn.Linear(sizes.times, width, **exact)
        self.time2 = nn.Linear(width, width, **exact)
        self.modulation = nn.Linear(width, 6 * width)
        self.layers = nn.ModuleList(Layer(sizes, attend) for _ in range(sizes.layers))
        self.table = nn.Parameter(torch.randn(2, width, dtype=torch.float32) / width**0.5)
        self.head = nn.Linear(width, sizes.channels)

    def forward(self, x: Tensor, time: Tensor, rotary: Rotary, slots: Tensor) -> Tensor:
        """Run all layers.

        Args:
            x: tokens of noisy latents, [B, T, C] in float32.
            time: of each frame, [F].
            rotary, slots: as in `Layer`.
        """
        e = self.time2(functional.silu(self.time1(sinusoids(time, self.sizes.times))))
        e = e.to(self.head.weight.dtype)
        modulation = self.modulation(functional.silu(e)).float().unflatten(1, (6, -1))
        x = self.patches(x.to(e.dtype))
        for layer in self.layers:
            x = layer(x, modulation, rotary, slots)
        shift, scale = (self.table + e.float()[:, None]).unbind(1)
        frames = x.unflatten(1, (self.sizes.own, -1))
        x = modulated(frames, shift[None, :, None], scale[None, :, None]).flatten(1, 2)
        return self.head(x).float()


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Norm tokens in float32, scale and shift them."""
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=EPS)
    return (normed * (1 + scale) + shift).to(x.dtype)


# ---- times, rotary positions, and the slots of a block in the cache ------------------------------


def turned(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn pairs of channels, [B, T, N, H], by the angles of their tokens."""
    cos, sin = rotary
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def sinusoids(time: Tensor, count: int) -> Tensor:
    """Embed times, [F] to [F, count] in float32."""
    steps = torch.arange(count // 2, device=time.device, dtype=torch.float64) / (count // 2)
    angles = time.double()[:, None] * 1e4**-steps
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def rotary_of(sizes: Sizes, frame: Tensor) -> Rotary:
    """Compute cosines and sines of the positions of a block whose first frame is `frame`."""
    pairs = sizes.head_dim // 2
    side = pairs // 3
    ranges = (sizes.own, pairs - 2 * side), (sizes.rows, side), (sizes.columns, side)
    where: dict[str, Any] = {"device": frame.device, "dtype": torch.float64}
    parts = []
    for axis, (length, count) in enumerate(ranges):
        at = torch.arange(length, **where) + (frame if axis == 0 else 0)
        angles = at[:, None] * 1e4 ** -(torch.arange(count, **where) / count)
        shape = [1, 1, 1, count]
        shape[axis] = length
        parts.append(angles.view(shape).expand(sizes.own, sizes.rows, sizes.columns, count))
    angles = torch.cat(parts, dim=-1).reshape(sizes.tokens, 1, pairs)
    return angles.cos().float(), angles.sin().float()


def slots_of(sizes: Sizes, frame: Tensor) -> Tensor:
    """Number the cache's tokens that a block overwrites: of the oldest frames beside the sink."""
    frames = frame + torch.arange(sizes.own, device=frame.device)
    turn = sizes.sink + (frames - sizes.sink) % (sizes.slots - sizes.sink)
    slots = torch.where(frames < sizes.sink, frames, turn)
    tokens = torch.arange(sizes.frame, device=frame.device)
    return (slots[:, None] * sizes.frame + tokens).flatten()

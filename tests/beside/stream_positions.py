"""Times, rotary positions, and the slots of a block in a rolling cache: all on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.beside.stream_sizes import Sizes

Rotary = tuple[Tensor, Tensor]


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
    """Compute cosines and sines of a block's positions.

    Args:
        sizes: of the block.
        frame: the number of its first frame.
    """
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
    """Number the tokens of the cache that a block takes: those of the oldest frames but the sink.

    Args:
        sizes: of the block.
        frame: the number of its first frame.
    """
    frames = frame + torch.arange(sizes.own, device=frame.device)
    turn = sizes.sink + (frames - sizes.sink) % (sizes.slots - sizes.sink)
    slots = torch.where(frames < sizes.sink, frames, turn)
    tokens = torch.arange(sizes.frame, device=frame.device)
    return (slots[:, None] * sizes.frame + tokens).flatten()

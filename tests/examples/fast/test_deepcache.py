"""SDXL with an interval is DeepCache, stated once more with the UNet's blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.layers import sinusoids
from maxattn_examples.fast.cache_settings import CacheSettings
from maxattn_examples.fast.settings import FastSettings
from maxattn_examples.samplers import flow_euler, start
from maxattn_examples.samplers import step as take_step
from maxattn_examples.sdxl.layers import activated
from maxattn_examples.sdxl.sizes import Sizes
from maxattn_examples.sdxl.unet import UNet

from .walks import Run

SIZES = Sizes(
    block_out_channels=(4, 8),
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    transformer_layers_per_block=(1, 1),
    attention_head_dim=(1, 2),
    cross_attention_dim=6,
    addition_time_embed_dim=4,
    projection_class_embeddings_input_dim=29,
    norm_num_groups=2,
)
STEPS, SCALE, B = 9, 3.0, 2
SCHEDULE = flow_euler.schedule(STEPS, 1.0)
KEYS = jax.random.split(jax.random.key(0), 4)
TEXTS = tuple(jax.random.normal(key, (B, 3, 6)) for key in KEYS[:2])
POOLED = jax.random.normal(KEYS[2], (B, 5))
PICTURE = jnp.tile(jnp.asarray([[8.0, 8, 0, 0, 8, 8]]), (B, 1))
NOISE = jax.random.normal(KEYS[3], (B, 4, 4, 4))


def unet() -> UNet:
    return UNet(SIZES, scan_layers=False, rngs=nnx.Rngs(0))


def predicted(net: UNet, x: Any, t: Any, text: Any, cached: Any = None) -> tuple[Any, Any]:
    """Predict as U-Nets do, with a stack of skips; return what is reused, too.

    With `cached`, run the first residual block on the way down and the two on the way up that take
    its output and that of the first convolution, as DeepCache's SDXL pipeline for branch 0.
    """
    e = net.time_embedding(sinusoids(t, 4))
    numbers = sinusoids(PICTURE.reshape(-1), 4).reshape(B, -1)
    e = e + net.add_embedding(jnp.concatenate([POOLED, numbers], -1))
    first = net.conv_in(x)
    skips = [first, net.down_blocks[0].resnets[0](first, e)]
    h = skips[-1]
    if cached is None:
        h = net.down_blocks[0].resnets[1](h, e)
        skips.append(h)
        h = net.down_blocks[0].downsamplers[0](h)
        skips.append(h)
        for resnet, attention in zip(
            net.down_blocks[1].resnets, net.down_blocks[1].attentions, strict=True
        ):
            h = attention(resnet(h, e), text)
            skips.append(h)
        middle = net.mid_block
        h = middle.resnets[1](middle.attentions[0](middle.resnets[0](h, e), text), e)
        for resnet, attention in zip(
            net.up_blocks[0].resnets, net.up_blocks[0].attentions, strict=True
        ):
            h = attention(resnet(jnp.concatenate([h, skips.pop()], -1), e), text)
        h = net.up_blocks[0].upsamplers[0](h)
        cached = net.up_blocks[1].resnets[0](jnp.concatenate([h, skips.pop()], -1), e)
    h = cached
    for resnet in list(net.up_blocks[1].resnets)[1:]:
        h = resnet(jnp.concatenate([h, skips.pop()], -1), e)
    return net.conv_out(activated(net.conv_norm_out, h)), cached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "letters"),
    [({"interval": 3}, "X..X..X.."), ({"schedule": "XX.X...XX"}, "XX.X...XX")],
)
def test_an_interval_is_deepcache(cache: Any, letters: str) -> None:
    net, kept = unet(), {}
    predict = jax.jit(lambda *args: predicted(net, *args))
    state = start(SCHEDULE, NOISE)
    for i in range(STEPS):

        def guided(x: Any, t: Any, i: int = i) -> Any:
            found, times = [], jnp.broadcast_to(t, (B,))
            for number, text in enumerate(TEXTS):
                if letters[i] == "X":
                    y, kept[number] = predict(x, times, text)
                else:
                    y, _ = predict(x, times, text, kept[number])
                found.append(y)
            return found[0] + SCALE * (found[1] - found[0])

        state = take_step(SCHEDULE, i, state, guided)

    def model(x: Any, t: Any, text: Any, around: Any) -> Any:
        return net(x, t, text, POOLED, PICTURE, around=around)

    fast = FastSettings(cache=CacheSettings(**cache))
    *_, got = Run(model, 1, TEXTS).samples(fast, SCHEDULE, NOISE, SCALE)
    np.testing.assert_allclose(got, state.x, atol=1e-4 * float(jnp.abs(state.x).max()))

"""`sample` with steps, compared with a plain loop; SDXL with an interval equals DeepCache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.layers import sinusoids
from maxattn_examples.samplers import sample, start, unipc
from maxattn_examples.samplers import step as take_step
from maxattn_examples.sdxl.blocks import activated
from maxattn_examples.sdxl.settings import Sizes
from maxattn_examples.sdxl.unet import UNet

import maxattn as ma
from maxattn.errors import InputError
from maxattn.steps import StepSettings, forward, guided, resolve, step_needs

W = jax.random.normal(jax.random.key(1), (3, 6, 6)) / 3
TEXTS = {"with": 0.3, "third": 0.3, "without": -0.4}
NOISE = jax.random.normal(jax.random.key(0), (2, 6))


def model(x: Any, t: Any, what: Any) -> Any:
    layers = [lambda x, w=w: x + jnp.tanh(x @ w + what + t / 1000) for w in W]
    return jnp.cos(t / 500) * ma.blocks(layers, jnp.sin(x))


def predict(x: Any, t: Any, which: str) -> Any:
    if which == "both":
        both = jnp.repeat(jnp.asarray([-0.4, 0.3]), len(x))[:, None]
        return model(jnp.concatenate([x, x]), t, both)
    return model(x, t, TEXTS[which])


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "order_1": {"cache": {"schedule": "XX.X..X.X.", "order": 1}},
    "range": {"cache": {"interval": 2, "layers": (1, 3)}, "guidance": {"stop": 0.7}},
    "decides": {"cache": {"first_block": {"threshold": 0.2, "first": 2}, "order": 1}},
    "mix": {"guidance": {"zero_star": True, "zero_steps": 1, "rescale": 0.5, "start": 0.2}},
    "stops": {
        "cache": {"schedule": "XX.XX.X.X.", "order": 1},
        "guidance": {"start": 0.2, "stop": 0.5},
    },
    "negative": {
        "cache": {"first_block": {"threshold": 0.9}, "order": 1},
        "guidance": {"skip": {"layers": [1], "prediction": "negative", "start": 0.2, "stop": 0.5}},
    },
    "skips": {"cache": {"shape": {}}, "guidance": {"skip": {"layers": [1], "stop": 0.6}}},
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_compiled_walk_is_a_loop_over_its_steps(name: str, batched: bool) -> None:
    steps = resolve(StepSettings.model_validate(CASES[name]), 10, 3, True)
    schedule = unipc(10, 3.0)
    got = jax.jit(lambda x: sample(predict, x, schedule, None, steps, 4.0, batched))(NOISE)
    state, kept = start(schedule, NOISE), {}
    for i, step in enumerate(steps):
        left: list[Any] = []

        before = step_needs(step, kept)

        def once(x: Any, t: Any, step: Any = step, left: Any = left, before: Any = before) -> Any:
            if not step.predictions:
                return jnp.zeros_like(x)
            v, new = guided(step, before, lambda n: predict(x, t, n), 4.0, batched=batched)
            left.append(new)
            return v

        state = take_step(schedule, i, state, once)
        kept = left[0] if left else {}
    np.testing.assert_allclose(got, state.x, rtol=2e-4, atol=2e-5)


def test_steps_of_another_number_are_refused() -> None:
    with pytest.raises(InputError, match="the schedule has 10 steps"):
        sample(predict, NOISE, unipc(10, 3.0), steps=resolve(None, 9, 3))
    for steps in (None, resolve(None, 10, 3)):
        with pytest.raises(InputError, match=r"scale: given\n.*no step is guided"):
            sample(predict, NOISE, unipc(10, 3.0), steps=steps, scale=5.0)


# ---- DeepCache -----------------------------------------------------------------------------------

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
B = 2
KEYS = jax.random.split(jax.random.key(0), 4)
TEXT, POOLED = jax.random.normal(KEYS[0], (B, 3, 6)), jax.random.normal(KEYS[2], (B, 5))
PICTURE = jnp.tile(jnp.asarray([[8.0, 8, 0, 0, 8, 8]]), (B, 1))


def deepcache(net: UNet, x: Any, t: Any, cached: Any = None) -> tuple[Any, Any]:
    """Predict as U-Nets do, with a stack of skips; return also the reused activations.

    With `cached`, run only the first residual block on the way down and the two on the way up that
    take its output and the first convolution's, as DeepCache's SDXL pipeline does for branch 0.
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
        down, middle, up = net.down_blocks[1], net.mid_block, net.up_blocks[0]
        for resnet, attention in zip(down.resnets, down.attentions, strict=True):
            h = attention(resnet(h, e), TEXT)
            skips.append(h)
        h = middle.resnets[1](middle.attentions[0](middle.resnets[0](h, e), TEXT), e)
        for resnet, attention in zip(up.resnets, up.attentions, strict=True):
            h = attention(resnet(jnp.concatenate([h, skips.pop()], -1), e), TEXT)
        h = up.upsamplers[0](h)
        cached = net.up_blocks[1].resnets[0](jnp.concatenate([h, skips.pop()], -1), e)
    h = cached
    for resnet in list(net.up_blocks[1].resnets)[1:]:
        h = resnet(jnp.concatenate([h, skips.pop()], -1), e)
    return net.conv_out(activated(net.conv_norm_out, h)), cached


@pytest.mark.slow
def test_an_interval_is_deepcache() -> None:
    net, kept = UNet(SIZES, scan_layers=False, rngs=nnx.Rngs(0)), {}
    steps, cached = resolve(StepSettings.model_validate({"cache": {"interval": 3}}), 7, 1), None
    for i, step in enumerate(steps):
        x, t = jax.random.normal(jax.random.key(i), (B, 4, 4, 4)), jnp.full(B, 900.0 - 100 * i)
        want, new = deepcache(net, x, t, None if i % 3 == 0 else cached)
        cached = new if i % 3 == 0 else cached
        got, kept = forward(step, kept, net, x, t, TEXT, POOLED, PICTURE)
        np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))

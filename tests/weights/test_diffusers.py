"""Our attention with diffusers' weights gives diffusers' numbers: outputs and every gradient.

From committed fixtures everywhere; against diffusers itself where torch and diffusers are
installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import maxattn as ma
from tests.closeness import hold
from tests.fixtures import make_diffusers as made

FOLDER = Path(made.__file__).parent
CASES = ("wan_self", "wan_cross", "wan_i2v", "sdxl_self", "sdxl_cross")
CONFIGS = {
    "dense": ma.AttentionConfig(attention="dot_product", cross_attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=8, key_chunk_size=8
    ),
}


def ours(case: str, config: ma.AttentionConfig) -> nnx.Module:
    """Build the module that a case's weights are for."""
    how: dict[str, Any] = {"heads": made.HEADS, "dim_head": made.DIM_HEAD, "config": config}
    how["rngs"] = nnx.Rngs(0)
    if case.startswith("wan"):
        how |= {"qk_norm": "rms_norm_across_heads", "bias": True, "eps": 1e-6}
    if case.endswith("self"):
        return ma.FlaxAttention(made.WIDTH, **how)
    text = made.TEXT if case == "sdxl_cross" else made.WIDTH
    image = made.WIDTH if case == "wan_i2v" else None
    return ma.CrossAttention(made.WIDTH, text, added_kv_proj_dim=image, **how)


def call(module: Any, case: str, given: dict[str, Any]) -> jax.Array:
    if case == "wan_self":
        table = ma.rope_3d(made.DIM_HEAD, made.FRAMES, made.HEIGHT, made.ROWS)
        return module(given["x"], rotary_emb=table)
    if case == "sdxl_self":
        return module(given["x"])
    return module(given["x"], given["text"], encoder_hidden_states_image=given.get("image"))


def compare(case: str, config: ma.AttentionConfig, theirs: dict[str, np.ndarray]) -> None:
    """Compare output and gradients against theirs: 2e-5 of the output's scale, 1e-4 of each
    gradient's.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for key, value in theirs.items():
        part, _, name = key.partition(".")
        parts.setdefault(part, {})[name] = value
    module = ours(case, config)
    assert ma.weights.load_diffusers(module, parts["weights"]) == ma.weights.Loaded()
    given = {key: jnp.asarray(value) for key, value in parts["in"].items()}
    out, back = nnx.jit(lambda m, g: (call(m, case, g), 0))(module, given)[0], theirs["out"]
    hold(f"{case}, output", {"": out}, {"": back}, 2e-5)

    def loss(m: nnx.Module, x: jax.Array) -> jax.Array:
        return jnp.sum(call(m, case, given | {"x": x}) * theirs["dout"])

    by_weights, by_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, given["x"])
    nnx.update(module, by_weights)  # so that gradients come out under diffusers' names, too
    got = ma.weights.to_diffusers(module) | {"in.x": np.asarray(by_x)}
    hold(f"{case}, gradients", got, parts["grad"], 1e-4, least=1e-3)


def live(case: str) -> dict[str, np.ndarray]:
    """Run a case in diffusers, here and now."""
    for package in ("torch", "diffusers"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return {key: value.numpy() for key, value in made.run(case).items()}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_diffusers(case: str, config: str) -> None:
    compare(case, CONFIGS[config], load_file(FOLDER / f"diffusers_{case}.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_diffusers_live(case: str) -> None:
    compare(case, CONFIGS["dense"], live(case))

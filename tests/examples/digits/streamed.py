"""A small model of digits that streams, and clips for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.digits import text
from maxattn_examples.digits.model import WanTransformer
from maxattn_examples.digits.settings import Settings

from tests.moved import moved

MODEL = {"dim": 16, "layers": 2, "heads": 2, "dim_head": 8, "ffn_dim": 16, "time_dim": 8}
ROLLOUT = {
    "frames_per_block": 2, "window": 2, "sink": 0, "denoising_steps": [1000, 500],
    "blocks": 3, "long_blocks": 0, "switch_block": 0,
}  # fmt: skip
PROMPTS = ["a seven moving left", "an eight moving up"]


def streaming(**sections: Any) -> Settings:
    """Describe a small model that is trained by teacher forcing; sections add to the default."""
    base: dict[str, dict[str, Any]] = {
        "model": MODEL,
        "data": {"frames": 8, "torus": True},
        "training": {"forcing": "teacher", "context_noise": 100.0},
        "rollout": ROLLOUT,
        "sampling": {"per_prompt": 1},
    }
    values = {name: value | sections.get(name, {}) for name, value in base.items()}
    return Settings.model_validate(values)


@cache
def model(settings: Settings) -> WanTransformer:
    """Build a model whose parameters are all random, so that each of them says something."""
    built = WanTransformer(settings, rngs=nnx.Rngs(0))
    nnx.update(built, moved(nnx.state(built, nnx.Param)))
    return built


def words() -> jax.Array:
    """Encode both prompts."""
    return jnp.asarray(text.encode(PROMPTS))


def clips(settings: Settings, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Draw a clean clip and a noisy one for each prompt."""
    shape = (2, len(PROMPTS), *settings.video_shape)
    clean, noisy = jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
    return clean, noisy


@nnx.jit
def run(
    model: WanTransformer, x: Any, t: Any, forcing: Forcing, positions: Any = None
) -> jax.Array:
    """Run a clip under a stream's mask."""
    return model(x, t, words(), forcing=forcing, positions=positions)

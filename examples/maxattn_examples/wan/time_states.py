"""What Wan's transformer makes of a time alone, from a file of weights: for TeaCache."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxattn import weights
from maxattn_examples.common.layers import Embedding, sinusoids

from .sizes import Sizes

# Parts of the names of its parameters, diffusers' or those of Wan's own code.
PARTS = ("time_embed", "time_proj")


class _Times(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.time_embedder = Embedding(sizes.freq_dim, sizes.dim, gelu=False, rngs=rngs)
        self.time_proj = nnx.Linear(sizes.dim, 6 * sizes.dim, rngs=rngs)


class _Model(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        self.condition_embedder = _Times(sizes, rngs)


def time_states(
    path: Path,
    sizes: Sizes,
    times: Float[Array, " n"] | Float[np.ndarray, " n"],
    which: Literal["embedding", "modulation"],
) -> Float[np.ndarray, "n d"]:
    """Return the embedding of each time, or the six modulations made of it, in float32.

    Args:
        path: a folder or file of the transformer's weights, of which the rest is not read.
        sizes: of the transformer.
        times: of the steps.
        which: state.

    Raises:
        WeightsError: the file does not have them.
    """
    model = nnx.eval_shape(lambda: _Model(sizes, nnx.Rngs(0)))
    found: dict[str, Any] = dict(weights.SafeTensors(path))
    found = {name: x for name, x in found.items() if any(part in name for part in PARTS)}
    weights.load_diffusers(model, found)
    own = model.condition_embedder
    e = own.time_embedder(sinusoids(jnp.asarray(times), sizes.freq_dim))
    return np.asarray(e if which == "embedding" else own.time_proj(nnx.silu(e)), np.float64)

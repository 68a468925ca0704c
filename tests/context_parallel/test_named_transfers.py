"""A sharded training step of the demo's model sends what its plans name, and what moves parameters;
nothing else.

Inside attention (`shard_map`) each kind of transfer is held against the plans of the step's two
attentions. Outside of it the compiler moves parameters, their gradients and the edges of the model,
each named here with its reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import Transfer, axes_of, transfers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.flow import loss_of
from digits.model import WanTransformer
from digits.settings import Settings
from digits.text import encode

BATCH, LAYERS = 8, 1
BATCH_AND_SEQUENCE = {"data", "fsdp", "context"}

# The size in bytes of what one device may receive outside of attention, as a multiple of the
# largest parameter: so no activation of a real size can hide among them.
GRADIENTS = (
    "psum of the gradients of parameters, over the axes that split batch and sequence (and of the"
    " loss)"
)
PARAMETERS = "all_gather of a parameter before it is used, or of its gradient's parts: FSDP"
MOVED = "ppermute or all_to_all of a parameter's or a gradient's shard to the device that owns it"
ROWS = (
    "psum over tensor of a product whose columns are split: to_out, ffn.down, and backward to_q,"
    " to_k, to_v, ffn.up"
)
EDGES = (
    "all_gather over context where tokens become frames, rows and columns: patchify, unpatchify;"
    " jax 0.12 permutes too"
)

CASES: dict[str, dict[str, Any]] = {
    "ring": {"attention": "ring", "ici_fsdp_parallelism": 2, "ici_context_parallelism": 2},
    "ulysses_ring": {
        "attention": "ulysses_ring",
        "ulysses_shards": 2,
        "ici_data_parallelism": 2,
        "ici_context_parallelism": 4,
    },
    "all_gather": {
        "context_parallel": "all_gather",
        "ici_fsdp_parallelism": 2,
        "ici_context_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
}


def step_of(settings: Settings, mesh: jax.sharding.Mesh) -> tuple[str, int]:
    """Compile a step that updates parameters where they lie; return its HLO and the bytes of the
    largest parameter.
    """
    model = WanTransformer(settings, mesh, rngs=nnx.Rngs(0))
    place(model, mesh)
    video, words = (
        jnp.ones((BATCH, *settings.video_shape)),
        jnp.asarray(encode(["a seven moving left"] * BATCH)),
    )
    video, words = (jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in (video, words))
    graph, state = nnx.split(model)

    def step(state, video, words):
        def loss(state):
            return loss_of(
                nnx.merge(graph, state), video, words, jax.random.key(2), settings.training
            )

        value, grads = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    homes = jax.tree.map(lambda x: x.sharding, state)
    text = jax.jit(step, out_shardings=(None, homes)).lower(state, video, words).compile().as_text()
    return str(text), max(x.nbytes for x in jax.tree.leaves(state))


def plans(settings: Settings, mesh: jax.sharding.Mesh) -> list[ma.Plan]:
    frames, rows, columns = settings.grid
    sizes = settings.model
    q = jax.ShapeDtypeStruct(
        (BATCH, frames * rows * columns, sizes.heads, sizes.dim_head), "float32"
    )
    words = encode(["a seven moving left"])
    text = jax.ShapeDtypeStruct(
        (BATCH, jnp.asarray(words).shape[1], sizes.heads, sizes.dim_head), "float32"
    )
    pairs = ((q, q, "self"), (q, text, "cross"))
    return [ma.plan(ma.Call.of(a, b, role=role), settings, mesh) for a, b, role in pairs]


def reason(t: Transfer, axes: set[str], largest: int) -> str | None:
    """Say what a transfer outside of attention is, or None."""
    if t.kind == "psum" and axes == {"tensor"}:
        return ROWS
    if t.kind == "psum" and axes & BATCH_AND_SEQUENCE:
        return GRADIENTS
    if t.bytes > largest:
        return None
    if "reshape" in t.op_name:
        return EDGES if t.kind in ("all_gather", "ppermute") else None
    if t.kind == "all_gather":
        return PARAMETERS
    return MOVED if t.kind in ("ppermute", "all_to_all") else None


# Its exchanges and hops are counted in test_ulysses.py, and what is outside of attention here.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n != "ring" else n for n in CASES]
)
def test_every_transfer_is_named(name: str) -> None:
    settings = Settings(**({"ici_data_parallelism": 1} | CASES[name]), model={"layers": LAYERS})
    devices = prod(size for size, _ in settings.axis_parallelism().values())
    mesh = settings.make_mesh(jax.devices()[:devices])
    text, largest = step_of(settings, mesh)
    sizes = dict(mesh.shape)
    named: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for plan in plans(settings, mesh):
        for c in plan.collectives:
            named[c.kind, c.axes] += LAYERS * c.hops * c.arrays
    inside: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for t in transfers(text):
        axes = axes_of(t, sizes)
        if "shard_map" in t.op_name and t.kind != "psum":
            inside[t.kind, axes] += t.times
        else:  # the compiler joins the psum of dK, dV with those of parameters' gradients
            assert reason(t, set(axes), largest), (
                f"{t.kind} over {axes}, {t.bytes} bytes: {t.op_name}"
            )
    # Fewer than named where the backward's hops of K and V are the forward's: without remat the
    # compiler keeps them.
    expected = {key for key in named if key[0] != "psum"}
    assert set(inside) == expected
    assert all(named[key] // 2 <= inside[key] <= named[key] for key in expected), (inside, named)
    assert ("psum", ("context",)) in named, "dK and dV of cross-attention's replicated keys"

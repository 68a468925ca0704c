"""The demo's whole model on meshes: output, loss and gradients as on one device, and every transfer
has a name.

With one of its blocks; in `make test-all` with two.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import Transfer, axes_of, transfers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits.flow import loss_of
from digits.model import WanTransformer
from digits.settings import ModelSettings, Settings
from digits.text import encode

MESHES = {
    "fsdp 8": {"fsdp": 8},
    "context 8": {"context": 8},
    "tensor 2, context 2, fsdp 2": {"tensor": 2, "context": 2, "fsdp": 2},
    "data 2, ulysses_ring 4": {"data": 2, "context": 4},
}
ATTENTION = {"data 2, ulysses_ring 4": {"attention": "ulysses_ring", "ulysses_shards": 2}}
PROMPTS = ["a seven moving left", "an eight moving up"] * 4


def settings(
    sizes: dict[str, int], layers: int, attention: dict[str, Any] | None = None
) -> Settings:
    axes: dict[str, Any] = {
        f"ici_{axis}_parallelism": n for axis, n in ({"data": 1} | sizes).items()
    }
    return Settings(**axes, **attention or {}, model=ModelSettings(layers=layers))


def results(config: Settings, mesh: jax.sharding.Mesh | None):
    """Return the output, the loss and the gradients of one training step's loss, in float32."""
    model = WanTransformer(config, mesh, rngs=nnx.Rngs(0))
    # The head starts at zero, and would hide everything below it.
    kernel = model.head.proj_out.kernel
    kernel[...] = 0.02 * jax.random.normal(jax.random.key(5), kernel.shape)
    place(model, mesh)
    video = jax.random.normal(jax.random.key(1), (8, *config.video_shape))
    words = jnp.asarray(encode(PROMPTS))
    if mesh is not None:
        video, words = (jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in (video, words))
    out = nnx.jit(lambda m, v, w: m(v, jnp.full(8, 0.3), w))(model, video, words)
    step = nnx.jit(
        nnx.value_and_grad(lambda m: loss_of(m, video, words, jax.random.key(2), config.training))
    )
    loss, grads = step(model)
    return out, loss, nnx.to_pure_dict(grads), model


@cache
def one_device(layers: int):
    return results(settings({}, layers), None)


# One axis alone is what the others are made of; test_meshes.py holds ulysses_ring to float64.
FEW = {("tensor 2, context 2, fsdp 2", 1)}


@pytest.mark.parametrize(
    ("name", "layers"),
    [pytest.param(*x, marks=[] if x in FEW else pytest.mark.slow) for x in product(MESHES, (1, 2))],
)
def test_output_loss_and_gradients_are_those_of_one_device(name: str, layers: int) -> None:
    config = settings(MESHES[name], layers, ATTENTION.get(name))
    out, loss, grads, model = results(config, config.make_mesh())
    want_out, want_loss, want_grads, _ = one_device(layers)
    np.testing.assert_allclose(out, want_out, atol=2e-5 * float(jnp.abs(want_out).max()))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True
    ):
        scale = max(float(jnp.abs(want).max()), 1e-3)
        np.testing.assert_allclose(got, want, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))
    if "fsdp" in MESHES[name]:
        kernel = model.blocks[0].attn1.to_q.kernel.get_value()
        assert (
            kernel.sharding.shard_shape(kernel.shape)[0] == kernel.shape[0] // MESHES[name]["fsdp"]
        )


# ---- transfers -----------------------------------------------------------------------------------
# Inside attention (`shard_map`) each kind of transfer is held against the plans of the step's two
# attentions. Outside of it the compiler moves parameters, their gradients and the edges of the
# model, each named here with its reason.

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


def step_of(config: Settings, mesh: jax.sharding.Mesh) -> tuple[str, int]:
    """Compile a step that updates parameters where they lie; return its HLO and the bytes of the
    largest parameter.
    """
    model = WanTransformer(config, mesh, rngs=nnx.Rngs(0))
    place(model, mesh)
    video, words = (
        jnp.ones((BATCH, *config.video_shape)),
        jnp.asarray(encode(["a seven moving left"] * BATCH)),
    )
    video, words = (jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in (video, words))
    graph, state = nnx.split(model)

    def step(state, video, words):
        def loss(state):
            return loss_of(
                nnx.merge(graph, state), video, words, jax.random.key(2), config.training
            )

        value, grads = jax.value_and_grad(loss)(state)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)

    homes = jax.tree.map(lambda x: x.sharding, state)
    text = jax.jit(step, out_shardings=(None, homes)).lower(state, video, words).compile().as_text()
    return str(text), max(x.nbytes for x in jax.tree.leaves(state))


def plans(config: Settings, mesh: jax.sharding.Mesh) -> list[ma.Plan]:
    frames, rows, columns = config.grid
    sizes = config.model
    q = jax.ShapeDtypeStruct(
        (BATCH, frames * rows * columns, sizes.heads, sizes.dim_head), "float32"
    )
    words = encode(["a seven moving left"])
    text = jax.ShapeDtypeStruct(
        (BATCH, jnp.asarray(words).shape[1], sizes.heads, sizes.dim_head), "float32"
    )
    pairs = ((q, q, "self"), (q, text, "cross"))
    return [ma.plan(ma.Call.of(a, b, role=role), config, mesh) for a, b, role in pairs]


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
    config = Settings(**({"ici_data_parallelism": 1} | CASES[name]), model={"layers": LAYERS})
    devices = prod(size for size, _ in config.axis_parallelism().values())
    mesh = config.make_mesh(jax.devices()[:devices])
    text, largest = step_of(config, mesh)
    sizes = dict(mesh.shape)
    named: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for plan in plans(config, mesh):
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

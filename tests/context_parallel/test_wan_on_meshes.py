"""The demo's model on meshes: loss and gradients equal one device's; each transfer is explained."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.sharding import batch_sharding, place
from maxattn.tools.compile.hlo import Transfer, axes_of, transfers

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Settings, Transformer, encode, flow_loss

BATCH, LAYERS = 8, 1
PROMPTS = ["a seven moving left", "an eight moving up"] * 4
MODEL = {"layers": LAYERS, "heads": 8, "dim_head": 12}


class Program(NamedTuple):
    """A compiled pass over the model, its operands, and the bytes of its largest parameter."""

    run: jax.stages.Compiled
    given: tuple[Any, ...]
    largest: int


def program_of(config: Settings, mesh: jax.sharding.Mesh | None, backward: bool = True) -> Program:
    model = Transformer(config, mesh, rngs=nnx.Rngs(0))
    # The head starts at zero, and would hide everything below it.
    kernel = model.out.kernel
    kernel[...] = 0.02 * jax.random.normal(jax.random.key(5), kernel.shape)
    place(model, mesh)
    video = jax.random.normal(jax.random.key(1), (BATCH, 5, *2 * (config.data.canvas,)))
    words = jnp.asarray(encode(PROMPTS))
    if mesh is not None:
        video, words = (jax.device_put(x, batch_sharding(mesh, x.ndim)) for x in (video, words))
    graph, state = nnx.split(model)

    def loss(state: Any, video: jax.Array, words: jax.Array) -> jax.Array:
        model = nnx.merge(graph, state)
        return flow_loss(model, video, words, jax.random.key(2), config.training)

    homes = None if mesh is None else (None, jax.tree.map(lambda x: x.sharding, state))
    both = jax.jit(jax.value_and_grad(loss), out_shardings=homes)
    program = (both if backward else jax.jit(loss)).lower(state, video, words).compile()
    largest = max(x.nbytes for x in jax.tree.leaves(state))
    return Program(program, (state, video, words), largest)


def settings_of(**sizes: Any) -> Settings:
    usual = {"ici_data_parallelism": 1, "attention": "dot_product"}
    return Settings(**usual | sizes, model=MODEL, data={"canvas": 24})


@cache
def one_device() -> Any:
    program = program_of(settings_of(), None)
    return program.run(*program.given)


# The strategy, and the sizes of fsdp, context, tensor and data.
CASES = [
    ("none", 8, 1, 1, 1), ("all_gather", 2, 2, 2, 1), ("ulysses_ring", 1, 4, 1, 2),
    *((name, 4, 2, 1, 1) for name in ("ring", "ulysses")),
    *((name, 8 // n, n, 1, 1) for n in (4, 8) for name in ("ring", "ulysses", "ulysses_ring")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False], ids=["both", "forward"])
@pytest.mark.parametrize(("strategy", "fsdp", "context", "tensor", "data"), CASES)
def test_every_transfer_over_eight_devices_is_named(
    strategy: str, fsdp: int, context: int, tensor: int, data: int, backward: bool
) -> None:
    """The loss and its gradients are those of one device."""
    sizes = {"fsdp": fsdp, "context": context, "tensor": tensor, "data": data}
    more: dict[str, Any] = {f"ici_{axis}_parallelism": size for axis, size in sizes.items()}
    more |= {} if strategy == "none" else {"context_parallel": strategy}
    more |= {"ulysses_shards": 2} if strategy == "ulysses_ring" else {}
    config = settings_of(**more)
    mesh = config.make_mesh()
    assert plans(config, mesh)[0].strategy.name == strategy
    program = program_of(config, mesh, backward)
    check_transfers(str(program.run.as_text()), program.largest, config, mesh, backward)
    if not backward:
        return
    (loss, grads), (want, wanted) = program.run(*program.given), one_device()
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    leaves = zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(wanted), strict=True)
    for (path, got), true in leaves:
        scale = max(float(jnp.abs(true).max()), 1e-3)
        np.testing.assert_allclose(got, true, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))


# ---- transfers -----------------------------------------------------------------------------------
# Inside attention (`shard_map`) each kind of transfer is compared with the plans of the step's two
# attentions. Outside of it the compiler moves parameters, their gradients and the edges of the
# model, each named here with its reason. None is larger than the largest parameter: so no
# activation of a real size can hide among them.

BATCH_AND_SEQUENCE = {"data", "fsdp", "context"}
GRADIENTS = "psum of parameters' gradients and of the loss, over the axes of batch and sequence"
PARAMETERS = "all_gather of a parameter before it is used, or of its gradient's parts: FSDP"
MOVED = "ppermute or all_to_all of a parameter's or a gradient's shard to the device that owns it"
ROWS = "psum over tensor of a product whose columns are split: to_out, ffn.down, and backward"
EDGES = "all_gather over context where tokens become frames; jax 0.12 permutes too"


def plans(config: Settings, mesh: jax.sharding.Mesh) -> list[ma.Plan]:
    sizes, side = config.model, config.data.canvas // config.model.patch[1]
    q = jax.ShapeDtypeStruct((BATCH, 5 * side * side, sizes.heads, sizes.dim_head), "float32")
    words = encode(["a seven moving left"])
    text = jax.ShapeDtypeStruct(
        (BATCH, jnp.asarray(words).shape[1], sizes.heads, sizes.dim_head), "float32"
    )
    pairs = ((q, q, "self"), (q, text, "cross"))
    return [ma.plan(ma.Call.of(a, b, role=role), config, mesh) for a, b, role in pairs]


def reason(t: Transfer, axes: set[str], largest: int) -> str | None:
    """Return the purpose of a transfer outside of attention, or None."""
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


def check_transfers(
    text: str, largest: int, config: Settings, mesh: jax.sharding.Mesh, backward: bool = True
) -> None:
    sizes = dict(mesh.shape)
    named: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for plan in plans(config, mesh):
        for c in (c for c in plan.collectives if backward or c.when == "forward"):
            named[c.kind, c.axes] += LAYERS * c.hops * c.arrays
    inside: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for t in transfers(text):
        axes = axes_of(t, sizes)
        if "shard_map" in t.op_name and t.kind != "psum":
            inside[t.kind, axes] += t.times
        else:  # the compiler joins the psum of dK, dV with those of parameters' gradients
            found = f"{t.kind} over {axes}, {t.bytes} bytes: {t.op_name}"
            assert reason(t, set(axes), largest), found
    # Fewer than named if the backward's hops of K and V are the forward's: without remat the
    # compiler keeps them.
    expected = {key for key in named if key[0] != "psum"}
    assert set(inside) == expected
    assert all(named[key] // 2 <= inside[key] <= named[key] for key in expected), (inside, named)
    if backward and sizes.get("context", 1) > 1:
        assert ("psum", ("context",)) in named, "dK and dV of cross-attention's replicated keys"

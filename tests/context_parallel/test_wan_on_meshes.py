"""The demo's model on meshes: loss and gradients equal one device's; each transfer is explained."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from math import prod
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
from tests.waiting import but

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from digits import Model, Settings, Transformer, encode, flow_loss

BATCH, LAYERS = 8, 1
PROMPTS = ["a seven moving left", "an eight moving up"] * 4
CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"ici_fsdp_parallelism": 8},
    "ring": {"attention": "ring", "ici_fsdp_parallelism": 2, "ici_context_parallelism": 2},
    "ulysses_ring": {
        "attention": "ulysses_ring", "ulysses_shards": 2,
        "ici_data_parallelism": 2, "ici_context_parallelism": 4,
    },
    "all_gather": {
        "context_parallel": "all_gather", "ici_fsdp_parallelism": 2,
        "ici_context_parallelism": 2, "ici_tensor_parallelism": 2,
    },
}  # fmt: skip


class Step(NamedTuple):
    """A training step's loss and gradients, its program, and the bytes of its largest parameter."""

    loss: jax.Array
    grads: Any
    text: str
    largest: int


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


def step_of(config: Settings, mesh: jax.sharding.Mesh | None) -> Step:
    program, given, largest = program_of(config, mesh)
    return Step(*program(*given), str(program.as_text()), largest)


@cache
def one_device() -> Step:
    return step_of(Settings(ici_data_parallelism=1, model=Model(layers=LAYERS)), None)


# The axes and the transfers of the others are tested without a model.
@pytest.mark.slow
@pytest.mark.parametrize("name", but(CASES, ["all_gather"]))
def test_loss_and_gradients_are_those_of_one_device_and_every_transfer_is_named(name: str) -> None:
    config = Settings(**{"ici_data_parallelism": 1} | CASES[name], model={"layers": LAYERS})
    devices = prod(size for size, _ in config.axis_parallelism().values())
    mesh = config.make_mesh(jax.devices()[:devices])
    step, want = step_of(config, mesh), one_device()
    np.testing.assert_allclose(step.loss, want.loss, rtol=1e-5)
    leaves = zip(jax.tree.leaves_with_path(step.grads), jax.tree.leaves(want.grads), strict=True)
    for (path, got), true in leaves:
        scale = max(float(jnp.abs(true).max()), 1e-3)
        np.testing.assert_allclose(got, true, atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path))
    check_transfers(step.text, step.largest, config, mesh)


# The size of fsdp, that of context, and the strategy.
EIGHT = [
    (8, 1, "none"),
    *((4, 2, name) for name in ("ring", "ulysses")),
    *((8 // n, n, name) for n in (4, 8) for name in ("ring", "ulysses", "ulysses_ring")),
]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False], ids=["both", "forward"])
@pytest.mark.parametrize(("fsdp", "context", "strategy"), EIGHT)
def test_every_transfer_over_eight_devices_is_named(
    fsdp: int, context: int, strategy: str, backward: bool
) -> None:
    sizes = {"ici_fsdp_parallelism": fsdp, "ici_context_parallelism": context}
    named = {} if strategy == "none" else {"context_parallel": strategy}
    named |= {"ulysses_shards": 2} if strategy == "ulysses_ring" else {}
    model = {"layers": LAYERS, "heads": 8, "dim_head": 12}
    config = Settings(
        **{"ici_data_parallelism": 1, "attention": "dot_product"} | sizes | named,
        model=model, data={"canvas": 24},
    )  # fmt: skip
    mesh = config.make_mesh()
    assert plans(config, mesh)[0].strategy.name == strategy
    program = program_of(config, mesh, backward)
    check_transfers(str(program.run.as_text()), program.largest, config, mesh, backward)


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

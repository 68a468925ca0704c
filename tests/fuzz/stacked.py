"""Layers stacked by `nnx.vmap` and run by `nnx.scan`, placed over drawn meshes, against float64."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.float64 import EPS
from tests.fuzz.masks import Sizes, draw_tree
from tests.fuzz.modules import NORMS, Built, compare_layer, reference
from tests.fuzz.settings import config_text, draw_axes, draw_settings

SETUP = """\
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from maxattn.sharding import parameter_shardings, place
mesh = jax.make_mesh({sizes}, {axes}, devices=jax.devices()[:{count}],
                     axis_types=(AxisType.{kind},) * {rank})
rng = np.random.default_rng({seed})
def make(rngs):
    return ma.FlaxAttention({words}, config=config, dtype={dtype!r}, rngs=rngs{mesh})
for layers in reversed({stack}):
    make = nnx.split_rngs(splits=layers)(
        nnx.vmap(make, in_axes=(0,), out_axes={axis}{metadata}))
x, mask, bias = rng.standard_normal({x}).astype({dtype!r}), {mask}, None
text = image = None
rotary = {rotary}
def step(x, layer):
    return x + 0.25 * layer(x, rotary_emb=rotary, mask=mask)
def run(stack, x):
    way = step
    for _ in {stack}:
        way = nnx.scan({remat}, in_axes=(nnx.Carry, {axis}), out_axes=nnx.Carry{metadata})
    return way(x, stack)
def moved(stack):
    nnx.update(stack, jax.tree.map(
        lambda x: x + 0.2 * jnp.asarray(np.random.default_rng(x.size).standard_normal(x.shape),
                                        x.dtype),
        nnx.state(stack, nnx.Param)))
    return stack
"""
# How a stacked model comes to lie over a mesh.
PLACED = {
    "place": "layer = moved(make(nnx.Rngs({seed})))\nplace(layer, mesh)\n",
    "shardings": """\
layer = moved(make(nnx.Rngs({seed})))
state = nnx.state(layer, nnx.Param)
nnx.update(layer, jax.device_put(state, parameter_shardings(state, mesh)))
""",
    "jit": """\
layer = make(nnx.Rngs({seed}))
shapes = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs({seed}))), nnx.Param)
made = jax.jit(lambda: nnx.state(moved(make(nnx.Rngs({seed}))), nnx.Param),
               out_shardings=parameter_shardings(shapes, mesh))
nnx.update(layer, made())
""",
}
RUN = """\
with jax.set_mesh(mesh):
    batch = [a for a in ('data', 'fsdp') if a in mesh.axis_names]
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(tuple(batch) if batch else None)))
    way = jnp.asarray(rng.standard_normal(x.shape), {dtype!r})
    loss = lambda stack, x: (run(stack, x).astype('float32') * way.astype('float32')).sum()
    out = nnx.jit(run)(layer, x)
    grads, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
specs = jax.tree.map(lambda x: x.sharding.spec, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
"""
NAMED = (
    "", "", ", transform_metadata={nnx.PARTITION_NAME: None}",
    ", transform_metadata={nnx.PARTITION_NAME: 'layers'}",
)  # fmt: skip
KERNELS = {"to_q": ("fsdp", "tensor"), "to_out": ("tensor", "fsdp")}


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a layer, the sizes and axes of its stack, a mesh, and how parameters are placed."""
    axes = draw_axes(rng, machine.devices)
    axes |= {"fsdp": 2} if "fsdp" not in axes and 2 * np.prod([*axes.values()]) <= 8 else {}
    settings = draw_settings(rng, machine, axes)
    built, stack = _draw_built(rng, machine, axes), rng.choice([(2,), (3,), (4,), (8,), (2, 2)])
    axis, metadata = rng.choice([0, 0, 0, -1]), rng.choice(NAMED)
    metadata = metadata if axis == 0 else ""  # flax names no layers along the last axis
    seed, s = rng.randrange(10**6), built.sizes
    words = {
        "query_dim": built.width, "heads": s.n, "kv_heads": s.k, "dim_head": s.h,
        "qk_norm": built.norm, "eps": built.eps, "bias": rng.random() < 0.5,
        "out_bias": rng.random() < 0.5,
    }  # fmt: skip
    names = tuple(axes)
    step = rng.choice(["way", "nnx.remat(way)"])
    source = SETUP.format(
        sizes=tuple(axes.values()), axes=names, count=int(np.prod([*axes.values()])),
        rank=len(axes), kind=rng.choice(["Auto", "Auto", "Explicit"]), seed=seed,
        words=", ".join(f"{k}={v!r}" for k, v in words.items()), dtype=built.dtype, stack=stack,
        mesh=", mesh=mesh" if rng.random() < 0.5 else "", axis=axis, metadata=metadata,
        x=(s.b, s.t, built.width), mask=built.tree.text() if built.tree else "None", remat=step,
        rotary=f"ma.rope_1d({s.h}, {s.t}, {built.theta})" if built.theta else "None",
    )  # fmt: skip
    placed = PLACED[rng.choice(list(PLACED))].format(seed=seed)
    source = f"{config_text(settings)}{source}{placed}{RUN.format(dtype=built.dtype)}"
    return Case(source, _check_of(built, stack, axis, axes), seconds=120)


def _draw_built(rng: Random, machine: Machine, axes: dict[str, int]) -> Built:
    tensor, batch = axes.get("tensor", 1), axes.get("data", 1) * axes.get("fsdp", 1)
    heads, kv = rng.choice([(2, 2), (4, 2), (2, 1), (3, 3)])
    t = rng.choice([8, 7, 16])
    sizes = Sizes(batch, t, t, heads * tensor, kv * tensor, rng.choice([4, 8]))
    tree = draw_tree(rng, sizes, 1) if rng.random() < 0.4 else None
    fsdp = axes.get("fsdp", 1)
    width = rng.choice([8 * fsdp, 8 * fsdp, 12, 7])
    dtype = "bfloat16" if machine.platform == "gpu" else "float32"
    norm, theta = rng.choice(NORMS), rng.choice([None, 1e4])
    return Built(
        "FlaxAttention", sizes, width, 0, None, norm, 1e-5, None, theta, "interleaved", tree,
        False, dtype,
    )  # fmt: skip


def _check_of(built: Built, stack: tuple[int, ...], axis: int, axes: dict[str, int]) -> Check:
    """Return the check of shardings, output, and gradients along random directions."""
    count = int(np.prod(stack))
    loose = (200 if built.dtype == "float32" else 12) * (1 + count) * EPS[built.dtype]

    given: Names = {"text": None, "image": None, "bias": None}

    def loop(values: dict[str, np.ndarray]) -> np.ndarray:
        """Run the layers in a loop, the first axis of the stack outermost."""
        x = values["x"]
        for i in range(count):
            at = np.unravel_index(i, stack)
            one = {n: _taken(v, at, axis) for n, v in values.items() if n != "x"}
            x = x + 0.25 * reference(built, one | {"x": x}, given)
        return x

    def check(names: Names) -> None:
        _check_specs(names["specs"], len(stack), axis, axes)
        compare_layer(names, loop, built.dtype, loose)

    return check


def _taken(value: np.ndarray, at: tuple[np.intp, ...], axis: int) -> np.ndarray:
    for i in at:
        value = np.take(value, i, axis)
    return value


def _check_specs(specs: Names, rank: int, axis: int, axes: dict[str, int]) -> None:
    """Check that stack axes are not split, and that layer axes are split as without a stack."""
    for name, want in KERNELS.items():
        spec = [*specs[name]["kernel"]]
        spec += [None] * (rank + 2 - len(spec))
        own, layers = (spec[:2], spec[2:]) if axis else (spec[rank:], spec[:rank])
        allowed = [(None, mesh_axis) for mesh_axis in want]
        if any(layers) or any(x not in y for x, y in zip(own, allowed, strict=True)):
            raise Wrong(f"{name} is split by {spec}, expected {want}", "print(specs)")

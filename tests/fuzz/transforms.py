"""Attention inside JAX's transformations, on one device and on meshes."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.fuzz.calls import BOTH, RESULTS, Call, check_of, compare_one, draw_small, given_of
from tests.fuzz.case import Case, Check, Machine, Names
from tests.fuzz.float64 import Bounded, attend, compare
from tests.fuzz.masks import Sizes, draw_tree
from tests.fuzz.operands import Operands, draw_operands
from tests.fuzz.settings import POLICIES, draw_settings

DOTS = "jax.checkpoint_policies.dots_saveable"
WRAPPERS = (
    "call = jax.jit(call)",
    "call = jax.checkpoint(call, policy={policy})",
    "call = jax.jit(jax.checkpoint(call, policy={policy}))",
    "from flax import nnx\ncall = nnx.jit(call)",
    "from flax import nnx\ninner = call\ncall = lambda q, *x: inner(nnx.Param(q), *x)",
    "from flax import nnx\ncall = nnx.remat(call, policy={policy})",
    "call_of = jax.jit(lambda mask, *x: ma.attention(*x[:3], mask=mask, bias=x[3], {words}))\n"
    "call = lambda *x: call_of(mask, *x)",
)
DONATED = """\
kept = [x if x is None else np.asarray(x) for x in (q, k, v, bias)]
def step(*x):
    y, pull = jax.vjp(call, *x)
    return y, pull((dout, dlse))
step = jax.jit(step, donate_argnums=(0, 1, 2))
(out, lse), (dq, dk, dv, dbias) = step(q, k, v, bias)
q, k, v, bias = kept
"""
WITH_VALUE = """\
def loss(q, k, v, bias):
    out, lse = call(q, k, v, bias)
    seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
    return (out.astype('float32') * dout.astype('float32')).sum() + (seen * dlse).sum(), (out, lse)
(_, (out, lse)), (dq, dk, dv) = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v, bias)
"""
SHARD_MAP = """\
from jax.sharding import PartitionSpec as P
mesh2 = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
split = P('data')
call = jax.jit(jax.shard_map(call, mesh=mesh2, in_specs=(split, split, split, P()),
                             out_specs=(split, split), check_vma={check}))
"""
MAPS = (
    "call = jax.vmap(call, in_axes={axes})",
    "call = jax.jit(jax.vmap(call, in_axes={axes}))",
    "call = jax.vmap(jax.checkpoint(call), in_axes={axes})",
    "call = jax.vmap(jax.jit(call), in_axes={axes})",
    "one = call\ncall = lambda *x: jax.lax.map(lambda y: one(*y), x)",
    "one = call\ncall = lambda *x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x)[1]",
    "one = jax.checkpoint(call)\n"
    "call = lambda *x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x)[1]",
)
TWO_WAYS = "dout, dlse = jnp.stack([dout, draw(dout.shape, 1.0)]), jnp.stack([dlse, dlse * 2])\n"
LOSS = "loss = lambda q: (call(q, k, v, bias)[0] * dout).sum()\nway = draw(q.shape, 1.0)\n"
SECOND = {
    "grad of grad": "got = jax.grad(lambda q: (jax.grad(loss)(q) * way).sum())(q)\n",
    "jvp": "got = jax.jvp(lambda q: call(q, k, v, bias)[0], (q,), (way,))[1]\n",
    "jvp of grad": "got = jax.jvp(jax.grad(loss), (q,), (way,))[1]\n",
}
STEP = 1e-4


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a call and a transformation of it."""
    kinds = [draw_wrapped] * 4 + [draw_mapped] * 5
    kinds += [draw_step, draw_step, draw_in_shard_map, draw_second]
    return rng.choice(kinds)(rng, machine)


def draw_wrapped(rng: Random, machine: Machine) -> Case:
    """Draw jit, remat and NNX's forms of both, some inside a mesh that is set."""
    call, wrapper = draw_small(rng, machine), rng.choice(WRAPPERS)
    policy = rng.choice([*(f"ma.remat_policy({name!r})" for name in POLICIES), DOTS])
    wrapper = wrapper.replace("{policy}", policy).replace("{words}", call.words())
    run = BOTH
    if call.axes is not None and rng.random() < 0.3:
        run = "with jax.set_mesh(mesh):\n" + "".join(f"    {x}\n" for x in BOTH.splitlines())
    return _case_of(call, f"{wrapper}\n{run}")


def draw_step(rng: Random, machine: Machine) -> Case:
    """Draw a step that donates its operands, or a loss with auxiliary outputs."""
    return _case_of(draw_small(rng, machine), rng.choice([DONATED, WITH_VALUE]))


def draw_in_shard_map(rng: Random, machine: Machine) -> Case:
    """Split the batch with the user's own shard_map; the mask depends on positions only."""
    if machine.devices < 2:
        return draw_wrapped(rng, machine)
    operands = draw_operands(rng, machine, Sizes(2, 16, 16, 2, 2, 8))
    tree = draw_tree(rng, operands.sizes, 2, data=False)
    operands = operands._replace(tree=tree, bias=None, hidden="")
    call = Call(operands, draw_settings(rng, machine))
    return _case_of(call, SHARD_MAP.format(check=rng.random() < 0.5) + BOTH)


def _case_of(call: Call, source: str, check: Check | None = None) -> Case:
    """Make a case; without `check`, its results must equal those of the call alone."""
    return Case(call.text() + source, check or check_of(call.operands), seconds=120)


# ---- vmap, map and scan --------------------------------------------------------------------------

MappedAxes = tuple[int | None, ...]


def draw_mapped(rng: Random, machine: Machine) -> Case:
    """Draw a vmap over two versions of the operands, some of which are shared."""
    call, how = draw_small(rng, machine), rng.choice(MAPS)
    has_bias = call.operands.bias is not None
    axes: MappedAxes = (0, 0, 0, 0 if has_bias else None)
    if "in_axes" in how:
        bias = rng.choice([0, None]) if has_bias else None
        drawn = tuple(rng.choice([0, 0, None, 1, 4]) for _ in "qkv")
        axes = (*(drawn if any(x is not None for x in drawn) else (0, None, None)), bias)
    lines = [
        f"{n} = jnp.stack([{n}, draw({n}.shape)], axis={axis})\n"
        for n, axis in zip("qkv", axes, strict=False)
        if axis is not None
    ]
    lines += ["bias = jnp.stack([bias, bias * 0.5])\n"] if axes[3] is not None else []
    source = f"{''.join(lines)}{how.format(axes=axes)}\n{TWO_WAYS}{BOTH}"
    return _case_of(call, source, _check_of_mapped(call.operands, axes))


def _check_of_mapped(operands: Operands, axes: MappedAxes) -> Check:
    along = dict(zip(("q", "k", "v", "bias"), axes, strict=True)) | {"dout": 0, "dlse": 0}

    def version(names: Names, i: int) -> Names:
        """Return the operands of one of the mapped calls."""
        return {
            n: names[n] if axis is None else np.take(np.asarray(names[n]), i, axis)
            for n, axis in along.items()
        }

    def check(names: Names) -> None:
        each = [attend(given_of(operands, version(names, i))) for i in range(2)]
        for name in RESULTS:
            if names.get(name) is None:
                continue
            got, wants = np.asarray(names[name], np.float64), [want[name] for want in each]
            axis = along[name[1:]] if name.startswith("d") else 0
            if axis is None:  # a shared operand's gradient is the sum of the versions'
                total = Bounded(*(sum(parts) for parts in zip(*wants, strict=True)))
                compare_one(operands, name, got.reshape(total.want.shape), total)
                continue
            for i, want in enumerate(wants):
                one = np.take(got, i, axis).reshape(want.want.shape)
                compare_one(operands, name, one, want)

    return check


# ---- beyond the first gradient -------------------------------------------------------------------


def draw_second(rng: Random, machine: Machine) -> Case:
    """Draw a second derivative or forward mode in float32, which is right or refused by maxattn."""
    operands = draw_operands(rng, machine, Sizes(1, 7, 8, 2, rng.choice([1, 2]), 8))
    operands = operands._replace(dtype="float32", values="normal", hidden="", bias_dtype="float32")
    call, how = Call(operands, draw_settings(rng, machine)), rng.choice(list(SECOND))
    result = "out" if how == "jvp" else "dq"

    def check(names: Names) -> None:
        """Compare the directional derivative with differences of float64."""
        given, way = given_of(operands, names), np.asarray(names["way"], np.float64)
        ahead, back = (
            attend(given._replace(q=given.q + step * way, dlse=given.dlse * 0))[result].want
            for step in (STEP, -STEP)
        )
        slope = (ahead - back) / (2 * STEP)
        bound = np.full(slope.shape, 2e-3 * max(float(abs(slope).max()), 1e-2))
        compare("got", names["got"], Bounded(slope, bound), "float32", 1.0)

    return _case_of(call, LOSS + SECOND[how], check)

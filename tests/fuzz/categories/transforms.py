"""Attention inside of JAX's transformations, on one device and on meshes."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.calls import BOTH, call_text, check_of, config_text, facts_of
from tests.fuzz.case import Case, Machine
from tests.fuzz.categories.meshes import draw_axes, draw_sizes, mesh_settings, mesh_text
from tests.fuzz.kernels import draw_settings
from tests.fuzz.mapped import draw_mapped
from tests.fuzz.mask_trees import Sizes, draw_tree
from tests.fuzz.operands import HEADS, Operands, draw_operands
from tests.fuzz.second import draw_second

POLICIES = ("NONE", "FULL", "SAVE_ATTENTION", "SAVE_ATTENTION_AND_MATMUL", "MATMUL_WITHOUT_BATCH")
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


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a call and a transformation of it."""
    kinds = [_wrapped] * 4 + [draw_mapped] * 5 + [_donated, _with_value, _in_shard_map, draw_second]
    return rng.choice(kinds)(rng, seed, machine)


def small(rng: Random, machine: Machine) -> tuple[Operands, dict[str, Any], str, bool]:
    """Draw a small call, in a third of the draws on a mesh: operands, settings, their text."""
    on_mesh = machine.devices > 1 and rng.random() < 0.35
    axes = draw_axes(rng, machine.devices) if on_mesh else {}
    lengths = rng.choice([(8, 8), (16, 16), (7, 7), (17, 31), (32, 32), (3, 40)])
    alone = Sizes(rng.choice([1, 2]), *lengths, *rng.choice(HEADS), rng.choice([4, 8, 16, 33]))
    operands = draw_operands(rng, machine, draw_sizes(rng, axes) if on_mesh else alone)
    operands = operands._replace(hidden="")
    settings = mesh_settings(rng, machine, axes) if on_mesh else draw_settings(rng, machine)
    text = operands.text() + config_text(settings) + (mesh_text(axes) if on_mesh else "")
    return operands, settings, text, on_mesh


def case_of(seed: int, operands: Operands, settings: dict[str, Any], source: str, how: str) -> Case:
    """Make a case whose results are those of the call without the transformation."""
    facts = facts_of(operands, kernel=settings["attention"], how=how)
    facts["strategy"] = settings.get("context_parallel")
    return Case("transforms", seed, source, check_of(operands), facts=facts, seconds=120)


def _wrapped(rng: Random, seed: int, machine: Machine) -> Case:
    operands, settings, text, on_mesh = small(rng, machine)
    wrapper = rng.choice(WRAPPERS)
    policy = rng.choice([*(f"ma.remat_policy({name!r})" for name in POLICIES), DOTS])
    scale = "" if operands.scale is None else f", scale={operands.scale}"
    words = f"config=config, return_lse=True{scale}" + (", mesh=mesh" if on_mesh else "")
    wrapper = wrapper.replace("{policy}", policy).replace("{words}", words)
    source = text + call_text(operands, on_mesh) + wrapper + "\n"
    if on_mesh and rng.random() < 0.3:
        source += "with jax.set_mesh(mesh):\n" + "".join(
            f"    {line}\n" for line in BOTH.splitlines()
        )
    else:
        source += BOTH
    return case_of(seed, operands, settings, source, wrapper)


def _donated(rng: Random, seed: int, machine: Machine) -> Case:
    operands, settings, text, on_mesh = small(rng, machine)
    source = text + call_text(operands, on_mesh) + DONATED
    return case_of(seed, operands, settings, source, "donated")


def _with_value(rng: Random, seed: int, machine: Machine) -> Case:
    operands, settings, text, on_mesh = small(rng, machine)
    source = text + call_text(operands, on_mesh) + WITH_VALUE
    return case_of(seed, operands, settings, source, "value_and_grad")


def _in_shard_map(rng: Random, seed: int, machine: Machine) -> Case:
    """Split the batch by the caller's own shard_map; the mask is of positions alone."""
    if machine.devices < 2:
        return _wrapped(rng, seed, machine)
    operands = draw_operands(rng, machine, Sizes(2, 16, 16, 2, 2, 8))
    tree = draw_tree(rng, operands.sizes, 2, data=False)
    operands = operands._replace(tree=tree, bias=None, hidden="")
    settings = draw_settings(rng, machine)
    text = operands.text() + config_text(settings) + call_text(operands)
    source = text + SHARD_MAP.format(check=rng.random() < 0.5) + BOTH
    return case_of(seed, operands, settings, source, "shard_map")

"""Programs to compile: attention alone, a module or a block, with abstract operands on a mesh.

The mesh consists of the devices of a TPU topology, which libtpu describes without a TPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxattn._attention import attention
from maxattn._plan import Plan
from maxattn._remat import remat
from maxattn.call import Call
from maxattn.config.errors import plain
from maxattn.decide import plan
from maxattn.errors import ConfigError, MeshError, Unsupported
from maxattn.masks import Full
from maxattn.measuring.passes import with_gradient
from maxattn.modules import CrossAttention, FlaxAttention
from maxattn.rope import Rotary, rope_1d
from maxattn.sharding import constrain, mesh_shape, on_axes, parameter_shardings, spec_of, ways
from maxattn.tools.compile.job import CompileJob
from maxattn.tools.compile.process import PYTHON_VARIABLE

CHIPS_OF_A_HOST = 4


class Program(NamedTuple):
    """A function and its abstract operands."""

    function: Callable[..., Any]
    operands: Sequence[Any]


def program_of(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    """Return the program that a job compiles."""
    made = _block if job.block else _module if job.module else _attention
    function, operands = made(job, plan, mesh)
    return Program(with_gradient(function) if job.training else function, operands)


def _attention(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    call, mask = job.shape.call(), job.shape.mask
    kv = f"B{plan.strategy.kv_letter()}KH"
    q = operand((call.batch, call.q_len, call.heads, call.head_dim), "BTNH", call.dtype, mesh)
    k = operand((call.batch, call.kv_len, call.kv_heads, call.head_dim), kv, call.dtype, mesh)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask, config=job.config, mesh=mesh, role=call.role)

    return Program(function, (q, k, k, q) if job.training else (q, k, k))


def operand(dims: tuple[int, ...], letters: str, dtype: Any, mesh: Mesh) -> Any:
    """Return an abstract array sharded as in attention; dims that do not divide are replicated."""
    shape = mesh_shape(mesh)
    spec = zip(dims, letters, spec_of(letters, shape), strict=True)
    axes = (a if a and n % ways(c, shape) == 0 else None for n, c, a in spec)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def _block(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    call, width = plan.call, plan.call.heads * plan.call.head_dim
    graph, state = nnx.split(nnx.eval_shape(lambda: TransformerBlock(job, mesh)))
    x = operand((call.batch, call.q_len, width), "BT.", call.dtype, mesh)
    text = operand((call.batch, TEXT, width), "B..", call.dtype, mesh)
    modulation = operand((PARTS, width), "..", "float32", mesh)

    def run(state: Any, *inputs: Any) -> Any:
        return run_block(nnx.merge(graph, state), job, *inputs, _no_rotation(call))

    operands = _sharded(state, mesh), x, text, modulation
    return Program(run, (*operands, x) if job.training else operands)


def _module(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    call, width = plan.call, plan.call.heads * plan.call.head_dim
    is_cross = job.shape.call().role == "cross"
    kind: Any = CrossAttention if is_cross else FlaxAttention
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(width, **attention_settings(job, mesh))))
    x = operand((call.batch, call.q_len, width), "BT.", call.dtype, mesh)
    text = operand((call.batch, call.kv_len, width), "B..", call.dtype, mesh)
    inputs = (_sharded(state, mesh), x, text) if is_cross else (_sharded(state, mesh), x)

    def run(state: Any, *inputs: Any) -> Any:
        rotary = {} if is_cross else {"rotary_emb": _no_rotation(call)}
        return nnx.merge(graph, state)(*inputs, **rotary, mask=job.shape.mask)

    return Program(run, (*inputs, x) if job.training else inputs)


def _no_rotation(call: Call) -> Any:
    """Return rotary tables of the right shapes; their values do not matter."""
    rotary = jax.eval_shape(lambda: rope_1d(call.head_dim, call.q_len))
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), rotary)


def _sharded(state: Any, mesh: Mesh) -> Any:
    def put(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(put, state, parameter_shardings(state, mesh))


def devices_of(topology: str, slices: int = 1, count: int | None = None) -> list[Any]:
    """Return the first `count` devices of `slices` topologies, such as "v5p:2x2x1"."""
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        rule = f"the TPU's compiler comes with libtpu, and {plain(sys.executable)} has none"
        remedy = f'pip install "maxattn[tpu]" there, or name another python in {PYTHON_VARIABLE}'
        raise Unsupported("compile", "libtpu is not installed", rule, remedy)
    # For v4, and for fewer than 4 chips, libtpu needs options besides the name.
    generation, _, layout = topology.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    sides = [int(n) for n in layout.split("x") if n.isdecimal()]
    if sides and prod(sides) < CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = (*sides, 1, 1)[:3]
    if slices > 1:
        options["num_slices"] = slices
    try:
        devices = list(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or ["no message"])[0]
        rule = f"libtpu knows no such topology ({first[:160]})"
        remedy = (
            "write a generation and its chips along each side: v4:2x2x1, v5e:2x2, v5e:4x4,"
            " v5p:2x2x1, v5p:2x2x2, v6e:2x2, v6e:2x4, tpu7x:2x2x1"
        )
        raise ConfigError("target", topology, rule, remedy) from None
    if count is not None and not 1 <= count <= len(devices):
        rule = f"{topology} has {len(devices)} devices"
        remedy = f"write --devices {len(devices)}, or a larger topology"
        raise MeshError("devices", count, rule, remedy)
    return devices[:count]


# ---- a transformer block -------------------------------------------------------------------------

TEXT = 512  # tokens of the text
PARTS = 6  # vectors of the modulation: shift, scale and gate of two layers
Tokens = Float[Array, "B T D"]


class TransformerBlock(nnx.Module):
    """Self-attention, cross-attention to a text, and feed-forward, with modulation as in Wan."""

    def __init__(self, job: CompileJob, mesh: Any) -> None:
        call = job.shape.call()
        width = call.heads * call.head_dim
        how: dict[str, Any] = {"dtype": call.dtype, "rngs": nnx.Rngs(0)}
        attention = attention_settings(job, mesh)
        self.mesh = mesh
        self.attention = FlaxAttention(width, **attention)
        self.cross = CrossAttention(width, **attention)
        up, down = on_axes("fsdp", "tensor"), on_axes("tensor", "fsdp")
        self.up = nnx.Linear(width, job.block, kernel_metadata=up, **how)
        self.down = nnx.Linear(job.block, width, kernel_metadata=down, **how)
        plain = {"use_bias": False, "use_scale": False, "dtype": jnp.float32}
        self.norms = nnx.List([nnx.LayerNorm(width, **plain, rngs=nnx.Rngs(0)) for _ in range(3)])

    def __call__(
        self, x: Tokens, text: Tokens, modulation: Float[Array, "6 D"], rotary: Rotary
    ) -> Tokens:
        """Run the three layers."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        first, second, third = self.norms
        h = self.attention(_modulated(first, x, scale1, shift1), rotary_emb=rotary)
        x = x + (gate1 * h).astype(x.dtype)
        x = x + self.cross(second(x).astype(x.dtype), text)
        h = self.down(jax.nn.gelu(self.up(_modulated(third, x, scale2, shift2))))
        return constrain(x + (gate2 * h).astype(x.dtype), self.mesh, "BT.")


def attention_settings(job: CompileJob, mesh: Any) -> dict[str, Any]:
    """Return the settings of Wan's attention modules, except their width."""
    call = job.shape.call()
    heads = {"heads": call.heads, "kv_heads": call.kv_heads, "dim_head": call.head_dim}
    norm = {"bias": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6}
    where = {"config": job.config, "mesh": mesh, "dtype": call.dtype}
    return heads | norm | where | {"rngs": nnx.Rngs(0)}


def cross_plan(job: CompileJob, of_self: Plan, mesh: Any) -> Plan:
    """Return the plan of the block's cross-attention."""
    call = replace(of_self.call, kv_len=TEXT, mask=Full(), role="cross")
    return plan(call, job.config, mesh, of_self.target)


def run_block(block: TransformerBlock, job: CompileJob, *operands: Any) -> Any:
    """Run a block; the config's `remat_policy` decides what is saved for its backward."""
    return remat(TransformerBlock.__call__, job.config)(block, *operands)


def _modulated(norm: nnx.LayerNorm, x: Tokens, scale: Array, shift: Array) -> Tokens:
    return (norm(x) * (1 + scale) + shift).astype(x.dtype)

"""What is compiled: attention alone or a whole module, with abstract operands on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxattn.attention import attention
from maxattn.call import Call
from maxattn.modules import CrossAttention, FlaxAttention
from maxattn.plan import Plan
from maxattn.rope import rope_1d
from maxattn.sharding import mesh_shape, parameter_shardings, spec_of, ways
from maxattn.tools.compile.block import PARTS, TEXT, TransformerBlock, attention_settings, run_block
from maxattn.tools.compile.job import CompileJob


class Program(NamedTuple):
    """Hold a function and its abstract operands."""

    function: Callable[..., Any]
    operands: Sequence[Any]


def program_of(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    """Return what a job compiles."""
    made = _block if job.block else _module if job.module else _attention
    function, operands = made(job, plan, mesh)
    return Program(step_of(function) if job.training else function, operands)


def step_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return forward and backward: the last operand is the cotangent of the result."""

    def step(*operands: Any) -> Any:
        *inputs, cotangent = operands
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(cotangent)

    return step


def _attention(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    """Return attention alone, its q, k and v, and in training the cotangent of its output."""
    call, mask = job.shape.call(), job.shape.mask
    kv = f"B{plan.strategy.kv_letter()}KH"
    q = operand((call.batch, call.q_len, call.heads, call.head_dim), "BTNH", call.dtype, mesh)
    k = operand((call.batch, call.kv_len, call.kv_heads, call.head_dim), kv, call.dtype, mesh)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask, config=job.config, mesh=mesh, role=call.role)

    return Program(function, (q, k, k, q) if job.training else (q, k, k))


def operand(dims: tuple[int, ...], letters: str, dtype: Any, mesh: Mesh) -> Any:
    """Split an array as attention will; a length that does not divide is whole on every device."""
    shape = mesh_shape(mesh)
    spec = zip(dims, letters, spec_of(letters, shape), strict=True)
    axes = (a if a and n % ways(c, shape) == 0 else None for n, c, a in spec)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)


def _block(job: CompileJob, plan: Plan, mesh: Mesh) -> Program:
    """Return a transformer block, its parameters and its inputs."""
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
    """Return an attention module as Wan has it, its parameters and its inputs."""
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
    """Return tables of the right shapes, since what stands in them takes no time."""
    rotary = jax.eval_shape(lambda: rope_1d(call.head_dim, call.q_len))
    return jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), rotary)


def _sharded(state: Any, mesh: Mesh) -> Any:
    """Give every abstract parameter its sharding."""

    def put(x: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(put, state, parameter_shardings(state, mesh))

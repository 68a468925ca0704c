"""What is compiled: attention alone, a module or a block, with abstract operands on a mesh.

The mesh is of the devices of a TPU topology, which libtpu describes without a TPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxattn.attention import attention
from maxattn.call import Call
from maxattn.config.errors import plain
from maxattn.errors import ConfigError, MeshError, Unsupported
from maxattn.modules import CrossAttention, FlaxAttention
from maxattn.plan import Plan
from maxattn.rope import rope_1d
from maxattn.sharding import mesh_shape, parameter_shardings, spec_of, ways
from maxattn.tools.compile.block import PARTS, TEXT, TransformerBlock, attention_settings, run_block
from maxattn.tools.compile.job import CompileJob
from maxattn.tools.compile.process import PYTHON_VARIABLE

CHIPS_OF_A_HOST = 4


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


# ---- devices -------------------------------------------------------------------------------------


def devices_of(topology: str, slices: int = 1, count: int | None = None) -> list[Any]:
    """Return the devices of a topology.

    Args:
        topology: libtpu's name, such as "v5p:2x2x1".
        slices: how many such topologies.
        count: how many of the devices, from the first; None for all.

    Raises:
        Unsupported: libtpu is not installed.
        ConfigError: libtpu knows no such topology.
        MeshError: it has fewer devices.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        rule = f"the TPU's compiler comes with libtpu, and {plain(sys.executable)} has none"
        remedy = f'pip install "maxattn[tpu]" there, or name another python in {PYTHON_VARIABLE}'
        raise Unsupported("compile", "libtpu is not installed", rule, remedy)
    # Beside the name libtpu must be told: one device a chip of v4, and hosts of fewer than 4 chips.
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

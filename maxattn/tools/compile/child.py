"""Compile attention for a TPU topology, with libtpu and without a TPU, in a child process that
`compile_job.py` starts.

`python -m maxattn.tools.compile.child FILE` reads a pickled `Job` from stdin and writes an
`Outcome` as JSON to FILE.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxattn.tools.compile.job import ENVIRONMENT, Job, Outcome

CHIPS_OF_A_HOST = 4

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from maxattn.plan import Plan
    from maxattn.target import Target


def outcome_of(job: Job) -> Outcome:
    """Plan and compile one job; what goes wrong stands in the outcome."""
    from maxattn.errors import MaxattnError

    try:
        devices = _devices(job)
        mesh = job.config.make_mesh(devices)
        target = _target(str(devices[0].device_kind))
        with target.assumed():
            return _compiled(job, mesh, target)
    except MaxattnError as error:
        return Outcome("refused", message=str(error))


def _devices(job: Job) -> list[Any]:
    """Return the devices of the topology, the first `job.devices` of them."""
    from jax.experimental import topologies

    from maxattn.errors import MeshError

    options = _topology_options(job.topology) | (
        {"num_slices": job.slices} if job.slices > 1 else {}
    )
    try:
        described = topologies.get_topology_desc(job.topology, "tpu", **options)
        devices = list(described.devices)
    except (RuntimeError, ValueError) as error:
        raise _unknown_topology(job.topology, str(error)) from None
    if job.devices is not None and not 1 <= job.devices <= len(devices):
        rule = f"{job.topology} has {len(devices)} devices"
        raise MeshError(
            "devices", job.devices, rule, f"write --devices {len(devices)}, or a larger topology"
        )
    return devices[: job.devices]


def _topology_options(name: str) -> dict[str, Any]:
    """Return what libtpu must be told beside the name: v4 as one device a chip, hosts of fewer than
    four chips.
    """
    generation, _, layout = name.partition(":")
    options: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    sides = [int(n) for n in layout.split("x") if n.isdecimal()]
    if sides and prod(sides) < CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = (*sides, 1, 1)[:3]
    return options


def _unknown_topology(name: str, message: str) -> Exception:
    from maxattn.errors import ConfigError

    first = message.splitlines()[0] if message else "no message"
    return ConfigError(
        "target",
        name,
        f"libtpu knows no such topology ({first[:160]})",
        "write a generation and its chips along each side: v4:2x2x1, v5e:2x2, v5e:4x4, v5p:2x2x1,"
        " v5p:2x2x2, v6e:2x2, v6e:2x4, tpu7x:2x2x1",
    )


def _target(kind: str) -> Target:
    from maxattn.devices import device_kind
    from maxattn.target import Target, installed

    return Target("tpu", device_kind(kind), installed())


def _compiled(job: Job, mesh: Mesh, target: Target) -> Outcome:
    import jax

    from maxattn.plan import plan

    decided = plan(job.shape.call(), job.config, mesh, target)
    function, operands = (_module if job.module else _attention)(job, decided, mesh)
    traced = jax.jit(_step(function) if job.training else function).trace(*operands)
    started = time.perf_counter()
    facts: dict[str, Any] = {
        "device_kind": target.device_kind, "plan": decided.explain(), "mesh": dict(mesh.shape),
        "named": [asdict(c) for c in decided.collectives if job.training or c.when == "forward"],
    }  # fmt: skip
    try:
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except (
        Exception
    ) as error:  # the compiler's own: not enough memory, or a kernel that it cannot make
        seconds = time.perf_counter() - started
        return Outcome(
            "failed", seconds=seconds, message=f"{type(error).__name__}: {error}", **facts
        )
    seconds = time.perf_counter() - started
    return Outcome(
        "compiled", seconds=seconds, memory=_memory(compiled), found=_found(compiled, mesh), **facts
    )


def _memory(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    names = ("argument", "temp", "output", "alias", "generated_code")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def _found(compiled: Any, mesh: Mesh) -> list[dict[str, Any]]:
    from maxattn.tools.compile.hlo import axes_of, transfers

    sizes = dict(mesh.shape)
    return [
        {
            "kind": t.kind,
            "axes": list(axes_of(t, sizes)),
            "bytes": t.bytes,
            "times": t.times,
            "is_async": t.is_async,
            "is_overlapped": t.is_overlapped,
            "kernels": list(t.kernels),
            "line": t.start,
        }
        for t in transfers(compiled.as_text())
    ]


# ---- what is compiled ----------------------------------------------------------------------------


def _step(function: Any) -> Any:
    """Return forward and backward: the results and the gradients of all operands but the last, the
    cotangent.
    """
    import jax

    def step(*operands: Any) -> Any:
        *inputs, cotangent = operands
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(cotangent)

    return step


def _attention(job: Job, plan: Plan, mesh: Mesh) -> tuple[Any, Sequence[Any]]:
    """Return attention alone and its operands q, k, v (and in training the cotangent of the
    output).
    """
    from maxattn.attention import attention

    call, mask = job.shape.call(), job.shape.mask
    kv = f"B{plan.context.kv_letter()}KH"
    q = _operand((call.batch, call.q_len, call.heads, call.head_dim), "BTNH", call.dtype, mesh)
    k = _operand((call.batch, call.kv_len, call.kv_heads, call.head_dim), kv, call.dtype, mesh)

    def function(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask, config=job.config, mesh=mesh, role=call.role)

    return function, (q, k, k, q) if job.training else (q, k, k)


def _operand(dims: tuple[int, ...], letters: str, dtype: Any, mesh: Mesh) -> Any:
    import jax

    return jax.ShapeDtypeStruct(dims, dtype, sharding=_sharding(dims, letters, mesh))


def _sharding(dims: tuple[int, ...], letters: str, mesh: Mesh) -> NamedSharding:
    """Split an array as attention will; a length that does not divide is whole on every device."""
    from jax.sharding import NamedSharding, PartitionSpec

    from maxattn.sharding import mesh_shape, spec_of, ways

    shape = mesh_shape(mesh)
    spec = zip(dims, letters, spec_of(letters, shape), strict=True)
    return NamedSharding(
        mesh, PartitionSpec(*(a if a and n % ways(c, shape) == 0 else None for n, c, a in spec))
    )


def _module(job: Job, plan: Plan, mesh: Mesh) -> tuple[Any, Sequence[Any]]:
    """Return a whole attention module as Wan has it: projections with bias, norms across heads,
    RoPE, output.
    """
    import jax
    from flax import nnx

    call = plan.call
    module = nnx.eval_shape(lambda: _make_module(job, mesh))
    graph, state = nnx.split(module)
    state = _placed(state, mesh)
    x = _operand((call.batch, call.q_len, call.heads * call.head_dim), "BT.", call.dtype, mesh)
    text = _operand((call.batch, call.kv_len, call.heads * call.head_dim), "B..", call.dtype, mesh)
    rotary = jax.eval_shape(lambda: _rotary(call.head_dim, call.q_len))

    def self_attention(state: Any, x: Any) -> Any:
        made: Any = nnx.merge(graph, state)
        return made(
            x,
            rotary_emb=jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), rotary),
            mask=job.shape.mask,
        )

    def cross_attention(state: Any, x: Any, text: Any) -> Any:
        made: Any = nnx.merge(graph, state)
        return made(x, text, mask=job.shape.mask)

    cotangent = (x,) if job.training else ()
    if call.role == "cross":
        return cross_attention, (state, x, text, *cotangent)
    return self_attention, (state, x, *cotangent)


def _make_module(job: Job, mesh: Mesh) -> Any:
    from flax import nnx

    from maxattn.modules import CrossAttention, FlaxAttention

    call = job.shape.call()
    kind: Any = CrossAttention if call.role == "cross" else FlaxAttention
    return kind(
        call.heads * call.head_dim,
        heads=call.heads,
        kv_heads=call.kv_heads,
        dim_head=call.head_dim,
        bias=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        config=job.config,
        mesh=mesh,
        dtype=call.dtype,
        rngs=nnx.Rngs(0),
    )


def _rotary(head_dim: int, length: int) -> Any:
    from maxattn.rope import rope_1d

    return rope_1d(head_dim, length)


def _placed(state: Any, mesh: Mesh) -> Any:
    """Give every abstract parameter its place on the mesh."""
    import jax

    from maxattn.sharding import parameter_shardings

    shardings = parameter_shardings(state, mesh)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )


def main() -> None:
    """Read a job, compile it, write the outcome."""
    os.environ.update(ENVIRONMENT)
    job = pickle.loads(sys.stdin.buffer.read())
    Path(sys.argv[1]).write_text(json.dumps(asdict(outcome_of(job))), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Compile attention for an absent TPU in a child process: JSON lines in and out.

Needs jax[tpu]; tokamax for its kernel. Usage: tpu_child.py STORE SECONDS. STORE is a file of JSON
lines with results: a case in it is not compiled again. A case that takes more than SECONDS of
processor time ends the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxattn import masks
from maxattn._attention import run
from maxattn._plan import Plan
from maxattn.block_sizes import BlockSizes
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.decide import plan
from maxattn.target import Target

PACKAGES = ("jax", "libtpu", "tokamax")
TAIL = 600  # a kernel that needs too much VMEM says how much at the end, after its whole signature


def installed(package: str) -> str:
    """Return the version of a package, or "none"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


# answers of earlier days
MEASURED = Path(__file__).parents[2] / "docs" / "measured" / "tpu_compiles.jsonl"
VERSIONS = {package: installed(package) for package in PACKAGES}
VERSIONS["flags"] = os.environ.get("LIBTPU_INIT_ARGS", "")


def main(store: Path, seconds: int) -> None:
    """Answer every case from standard input, and store new results."""
    known = {}
    for kept in (MEASURED, store):
        for line in kept.read_text().splitlines() if kept.exists() else ():
            found = json.loads(line)
            known[found["key"]] = found
    for line in sys.stdin:
        spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        most = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + 1 + seconds, most))
        result = answer(json.loads(line), known, store)
        print(json.dumps(result), flush=True)


def answer(case: dict, known: dict[str, dict], store: Path) -> dict:
    """Lower one case, and compile it unless its result is stored."""
    try:
        lowered = lower(case)
    except Exception as e:  # the kernels refuse some sizes before the compiler sees them
        refused = {"message": message_of(e), "key": "refused before the compiler"}
        return {"ok": False, "seconds": 0.0, **refused}
    text = json.dumps([VERSIONS, case["topology"]]) + lowered.as_text()
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    if key not in known:
        known[key] = {**compile_lowered(lowered), "key": key, "versions": VERSIONS, "case": case}
        with store.open("a") as file:
            file.write(json.dumps(known[key]) + "\n")
    return known[key]


def message_of(e: Exception) -> str:
    """Cut a message to its beginning and its end."""
    text = f"{type(e).__name__}: {e}"
    return text if len(text) <= 2 * TAIL else f"{text[:TAIL]} ... {text[-TAIL:]}"


def compile_lowered(lowered: jax.stages.Lowered) -> dict:
    """Compile, and return ok, seconds, message, and bytes of HBM per chip."""
    started = time.time()
    try:
        memory = lowered.compile().memory_analysis()
    except Exception as e:
        return {"ok": False, "seconds": time.time() - started, "message": message_of(e), "hbm": {}}
    names = ("argument", "output", "temp")
    hbm = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in names}
    return {"ok": True, "seconds": time.time() - started, "message": "", "hbm": hbm}


def lower(case: dict) -> jax.stages.Lowered:
    """Lower a case through maxattn's own plan and kernels, as users do."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case["topology"]).devices
    sizes = case.get("mesh") or {"data": 1}
    count = int(np.prod(list(sizes.values())))
    mesh = Mesh(np.array(devices[:count]).reshape(*sizes.values()), tuple(sizes))

    def spec(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.ShapeDtypeStruct:
        named = PartitionSpec(*(axis if axis in sizes else None for axis in axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, named))

    function, operands = problem(case, spec, mesh)
    # tokamax asks which chip it is traced for, and without a surrounding mesh that is this
    # machine's CPU.
    asks = case["kernel"] == "tokamax_flash"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if asks else nullcontext():
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("tpu",))


def problem(
    case: dict, spec: Callable[..., Any], mesh: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function to compile, and its operands.

    Args:
        case: kind, kernel, batch, q_len, kv_len, heads, head_dim, dtype, role, mask, training; and
            sizes (as `BlockSizes.given()`, used unchanged), or config (overrides for a plan).
        spec: makes an operand from shape, dtype and axes.
        mesh: the mesh of the case.
    """
    b, t, s, n, h = (case[key] for key in ("batch", "q_len", "kv_len", "heads", "head_dim"))
    q = spec((b, t, n, h), case["dtype"], "data", "context", "tensor", None)
    sharded = "context" if case["role"] == "self" else None
    k = spec((b, s, n, h), case["dtype"], "data", sharded, "tensor", None)
    lengths = spec((b,), "int32", "data")
    decided = decide(case, b, t, s, n, h)

    def forward(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return run(decided, q, k, v, None, mask_of(case["mask"], lengths).bind(t, s, b, n), mesh)[0]

    def gradients(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        def loss(*x: Any) -> Any:
            return forward(*x, lengths).astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return gradients if case["training"] else forward, (q, k, k, lengths)


def decide(case: dict, b: int, t: int, s: int, n: int, h: int) -> Plan:
    """Plan the call for a TPU, with the sizes of the case if it has any."""
    lengths = jax.ShapeDtypeStruct((b,), "int32")
    mask = mask_of(case["mask"], lengths).bind(t, s, b, n).form()
    call = Call(b, t, s, n, n, h, case["dtype"], mask, role=case["role"])
    both = [f"attention={case['kernel']}", f"cross_attention={case['kernel']}"]
    config = AttentionConfig.from_overrides(case.get("config") or both)
    target = Target.named(case["kind"], (("tokamax", "0.0.17"),))
    decided = plan(call, config, case.get("mesh"), target)
    if "sizes" not in case:
        return decided
    kernel: Any = decided.kernel
    sizes = BlockSizes(**case["sizes"])
    inference = None if case["training"] else sizes
    return replace(decided, kernel=replace(kernel, blocks=sizes, inference=inference))


def mask_of(name: str, lengths: Any) -> masks.Mask:
    """Return a mask by name; in the kernel it uses segment ids, positions, both, or neither."""
    ids, window = masks.KeyPadding(lengths), masks.LocalWindow(700, 300, offset=0)
    return {
        "full": masks.Full(),
        "padding": ids,
        "window": window,
        "both": ids & window,
        "blocks": masks.BlockSlidingWindow(1560, 7),
    }[name]


if __name__ == "__main__":
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    main(Path(sys.argv[1]), int(sys.argv[2]))

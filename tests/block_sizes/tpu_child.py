"""Compile attention for a TPU that is not there, in a child process: JSON lines in and out.

Needs jax[tpu]; tokamax for its kernel. Usage: tpu_child.py STORE, where STORE is a file of JSON
lines: what is in it is not compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.block_sizes import tpu_bare, tpu_ours

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


def main(store: Path) -> None:
    """Answer every case that arrives, and keep what was compiled."""
    known = {}
    for kept in (MEASURED, store):
        for line in kept.read_text().splitlines() if kept.exists() else ():
            found = json.loads(line)
            known[found["key"]] = found
    for line in sys.stdin:
        result = answer(json.loads(line), known, store)
        print(json.dumps(result), flush=True)


def answer(case: dict, known: dict[str, dict], store: Path) -> dict:
    """Lower one case, and compile what the compiler has not yet seen."""
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
    """Keep the beginning and the end of a message."""
    text = f"{type(e).__name__}: {e}"
    return text if len(text) <= 2 * TAIL else f"{text[:TAIL]} ... {text[-TAIL:]}"


def compile_lowered(lowered: jax.stages.Lowered) -> dict:
    """Compile, and return ok, seconds, message, and bytes of HBM a chip."""
    started = time.time()
    try:
        memory = lowered.compile().memory_analysis()
    except Exception as e:
        return {"ok": False, "seconds": time.time() - started, "message": message_of(e), "hbm": {}}
    names = ("argument", "output", "temp")
    hbm = {name: int(getattr(memory, f"{name}_size_in_bytes")) for name in names}
    return {"ok": True, "seconds": time.time() - started, "message": "", "hbm": hbm}


def lower(case: dict) -> jax.stages.Lowered:
    """Lower a case: `bare` through a library's own public kernel, else through maxattn."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=case["topology"]).devices
    sizes = case.get("mesh") or {"data": 1}
    count = int(np.prod(list(sizes.values())))
    mesh = Mesh(np.array(devices[:count]).reshape(*sizes.values()), tuple(sizes))

    def spec(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.ShapeDtypeStruct:
        named = PartitionSpec(*(axis if axis in sizes else None for axis in axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, named))

    function, operands = (tpu_bare if case.get("bare") else tpu_ours).problem(case, spec, mesh)
    # tokamax asks which chip it is traced for, and without a surrounding mesh that is this
    # machine's CPU.
    asks = case["kernel"] == "tokamax_flash"
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if asks else nullcontext():
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("tpu",))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

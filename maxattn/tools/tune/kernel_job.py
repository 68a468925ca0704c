"""Compile one TPU kernel alone, over a few tiles, and read the cost of a step of its grid."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, Tile
from maxattn.block_sizes.few_keys import FEW_KEYS, FewKeysTile
from maxattn.block_sizes.sizes import ITEMSIZE, LANES, KernelKind
from maxattn.devices import DEVICES
from maxattn.errors import MaxattnError

ROWS, COLUMNS = 2, 4  # tile rows and columns of a head: more give the same schedule
# The largest VMEM of a TPU. The compiler would keep a smaller operand in VMEM, and the kernel
# would have no transfers.
OPERAND = 2**27
PADDED = 8  # padded keys of the last key tile, if keys are padded
TOPOLOGIES = {
    "TPU v4": "v4:1x1x1",
    "TPU v5e": "v5e:1x1",
    "TPU v5p": "v5p:1x1x1",
    "TPU v6e": "v6e:1x1",
    "TPU v7x": "tpu7x:1x1x1",
}
NICE = 10  # process priority below the user's own work
LONGEST_MESSAGE = 600  # most characters of a compiler's error


@dataclass(frozen=True)
class KernelJob:
    """A kernel to compile."""

    device_kind: str  # such as "TPU v6e"
    kernel: KernelKind | Literal["tpu_few_keys"]  # name of the attention kernel
    kind: Kind  # its Pallas kernel: "fwd", "dkv", "fused" or "dq"
    # queries, keys, and keys computed at once (not for "dq"); of `tpu_few_keys` queries, keys, and
    # heads
    tile: Tile
    # head_dim, dtype: H, and the dtype of q, k and v
    head_dim: int
    dtype: str
    masked: Evaluates  # the test of the mask that the kernel evaluates

    @property
    def lengths(self) -> tuple[int, int]:
        """Numbers of queries and keys of the compiled call."""
        if self.has_few_keys:
            return COLUMNS * self.tile[0], self.tile[1] - self._padding
        rows, columns = (COLUMNS, ROWS) if self.by_key else (ROWS, COLUMNS)
        return rows * self.tile[0], columns * self.tile[1] - self._padding

    @property
    def has_few_keys(self) -> bool:
        return self.kernel == FEW_KEYS

    @property
    def _padding(self) -> int:
        return PADDED if self.masked == Evaluates.PADDING else 0

    @property
    def window(self) -> tuple[int, int, int]:
        """Arguments of a `LocalWindow`: the last tile row visits all columns, the first fewer."""
        q, kv = self.tile[:2]
        longest = sum(self.lengths)
        if self.by_key:
            before = (COLUMNS - 1) * q - kv
            return max(0, before), longest, max(0, -before)
        after = (COLUMNS - 1) * kv - q
        return longest, max(0, after), min(0, after)

    @property
    def by_key(self) -> bool:
        """Whether the grid iterates over the queries of each key tile."""
        return self.kind in ("dkv", "fused")

    @property
    def batch(self) -> int:
        """Number of batch rows: two in the backward, whose cores share them."""
        return 1 if self.kind == "fwd" else 2

    @property
    def heads(self) -> int:
        """Heads of a batch row: an even number, large enough that every operand stays in HBM."""
        lengths, unit = (self.lengths[:1], self.tile[2]) if self.has_few_keys else (self.lengths, 1)
        shortest = min(lengths) * self.head_dim * ITEMSIZE[self.dtype] * self.batch * unit
        return 2 * unit * -(-OPERAND // (2 * shortest))

    @property
    def steps(self) -> int:
        """Number of steps of the grid."""
        if self.has_few_keys:
            return self.batch * self.heads // self.tile[2] * COLUMNS
        return self.batch * self.heads * ROWS * COLUMNS

    def values(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"tile": list(self.tile)}

    @staticmethod
    def of(values: dict[str, Any]) -> KernelJob:
        """Make a job from the result of `values`."""
        fields = values | {"tile": tuple(values["tile"]), "masked": Evaluates(values["masked"])}
        return KernelJob(**fields)


# ---- compiling, in the compiler's process --------------------------------------------------------


def answer_of(job: KernelJob, folder: Path) -> dict[str, Any]:
    """Compile a kernel; return its "cost", and "online" of a second form, or why it "failed"."""
    _step_back()
    try:
        return _costs(job, folder)
    # Errors of the compiler, such as too little VMEM, and dumps of an unknown format.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        kept = lines if isinstance(error, MaxattnError) else lines[:1]
        text = "; ".join(line.strip() for line in kept)[:LONGEST_MESSAGE]
        return {"failed": f"{type(error).__name__}: {text}"}
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@cache
def _step_back() -> None:
    os.nice(NICE)


def _costs(job: KernelJob, folder: Path) -> dict[str, Any]:
    from maxattn.tools.compile.hlo import HloProgram
    from maxattn.tools.estimate.kernel import KernelDump, online_cost_of, step_cost_of
    from maxattn.tools.estimate.program import Dumps, pallas_calls

    compiled, version = _compiled(job), metadata.version("libtpu")
    (call,) = pallas_calls(HloProgram.read(compiled.as_text()))
    texts = Dumps.of(folder, version).texts(call.twins)
    dump = KernelDump.read(call.name, *texts, DEVICES[job.device_kind], version)
    cost = step_cost_of(dump, 1 if job.has_few_keys else COLUMNS, job.steps)
    online = online_cost_of(dump, cost)
    return {"cost": list(cost)} | ({"online": list(online)} if online else {})


def _compiled(job: KernelJob) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh([_device(job.device_kind)], ("x",))
    whole = PartitionSpec()
    function, shapes = _function(job)
    operands = (
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, whole)) for shape in shapes
    )
    # Kernel libraries look up the TPU in the mesh of a shard_map.
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": whole, "out_specs": whole}
    sharded = jax.jit(jax.shard_map(function, **specs, check_vma=False))
    return sharded.trace(*operands).lower(lowering_platforms=("tpu",)).compile()


@cache
def _device(kind: str) -> Any:
    from maxattn.tools.compile.programs import devices_of

    return devices_of(TOPOLOGIES[kind])[0]


def _few_keys_function(job: KernelJob) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from maxattn.kernels.transposed import few_keys

    def run(q: Any, k: Any, v: Any, *given: Any) -> Any:
        tile = FewKeysTile(job.tile[0], job.tile[2])
        call = few_keys.FewKeysCall.of(q, k, v, None, 1.0, tile)
        if job.kind == "fwd":
            return few_keys.forward(call, False)
        lse, dout, delta = given
        return few_keys.backward(call, lse, delta, dout, False)

    return run, _shapes(job, *((job.batch, n, job.heads, job.head_dim) for n in job.lengths))


def _function(job: KernelJob) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if job.has_few_keys:
        return _few_keys_function(job)
    from maxattn.kernels.splash.calls import SplashProblem, Stats
    from maxattn.masks import Full, LocalWindow
    from maxattn.masks.terms import supported_split

    (q_len, kv_len), heads = job.lengths, (job.batch, job.heads)
    mask = LocalWindow(*job.window) if job.masked == Evaluates.INTERVAL else Full()
    parts = supported_split(mask.bind(q_len, kv_len, *heads).form())

    def run(*operands: Any) -> Any:
        q, k, v, *stats = operands
        problem = SplashProblem(
            q, k, v, parts, 0, 0, _library(job), rows_at_once=job.kernel == "tpu_flash"
        )
        if job.kind == "fwd":
            return problem.forward_of(job.tile)
        if job.kind == "dq":
            return problem.dq(job.tile, Stats(*stats))
        return problem.dkv(job.tile, Stats(*stats), job.kind == "fused")

    return run, _shapes(job, *((*heads, n, job.head_dim) for n in (q_len, kv_len)))


def _shapes(job: KernelJob, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Any, ...]:
    rows = (job.batch, job.heads, job.lengths[0]), "float32"
    shapes = (q, job.dtype), (k, job.dtype), (k, job.dtype), rows, (q, job.dtype), rows
    return shapes[:3] if job.kind == "fwd" else shapes


def _library(job: KernelJob) -> Any:
    from maxattn.kernels.splash.jax_splash import JaxSplash
    from maxattn.kernels.splash.tokamax import TokamaxSplash
    from maxattn.kernels.tpu_flash import Transposed

    if job.kernel == "tpu_flash":
        core = DEVICES[job.device_kind].core
        return Transposed(False, v_is_turned=core is not None and core.side == LANES)
    return JaxSplash(False) if job.kernel == "flash" else TokamaxSplash(False, False, False)

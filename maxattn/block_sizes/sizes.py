"""Types for block sizes: the sizes, a change of a size, and the facts that the rules read."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from maxattn.call import Call
from maxattn.config import FlashBlockSizes, numbers
from maxattn.devices import DEVICES, memory_of
from maxattn.target import Target

KernelKind = Literal["flash", "tokamax_flash", "tpu_flash"]
LANES = 128  # a TPU's register has 8 sublanes x 128 lanes
SUBLANES = 8
FLOAT = 4  # bytes
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FORWARD = ("block_q", "block_kv", "block_kv_compute")
DKV = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
DQ = ("block_q_dq", "block_kv_dq")
Q_KEYS = ("block_q", "block_q_dkv", "block_q_dq")
KV_KEYS = ("block_kv", "block_kv_compute", "block_kv_dkv", "block_kv_dkv_compute", "block_kv_dq")


@dataclass(frozen=True)
class BlockSizes:
    """The block sizes that a kernel runs with, in tokens; None for a size that it does not read."""

    # block_q, block_kv, block_kv_compute: tiles of the forward kernel
    block_q: int
    block_kv: int
    block_kv_compute: int
    # block_q_dkv, block_kv_dkv, block_kv_dkv_compute: tiles of the backward kernel of dK and dV,
    # which computes dQ too if it is fused
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    # block_q_dq, block_kv_dq: tiles of the separate backward kernel of dQ
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    # whether one kernel computes dQ, dK and dV; None without a backward
    use_fused_bwd_kernel: bool | None = None

    def part(self, keys: tuple[str, ...]) -> tuple[int, ...] | None:
        """Return the sizes of one kernel (`FORWARD`, `DKV` or `DQ`), or None if it does not run."""
        found = tuple(getattr(self, key) for key in keys)
        return None if None in found else found

    def given(self) -> dict[str, int | bool]:
        """Return the sizes that are not None, by their keys in `flash_block_sizes`."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    def asked(self) -> FlashBlockSizes:
        """Return the sizes as the config's section `flash_block_sizes`."""
        values: dict[str, Any] = dict(self.given())
        return FlashBlockSizes(**values)

    def __str__(self) -> str:
        q, kv, compute = self.block_q, self.block_kv, self.block_kv_compute
        text = f"q {q}, kv {kv} by {compute}"
        if (dkv := self.part(DKV)) is not None:
            kind = "fused" if self.use_fused_bwd_kernel else "dkv"
            text += f"; backward {kind} q {dkv[0]}, kv {dkv[1]} by {dkv[2]}"
        if (dq := self.part(DQ)) is not None:
            text += f"; dq q {dq[0]}, kv {dq[1]}"
        return text


@dataclass(frozen=True)
class Change:
    """A changed size: its key, the size asked for, the size used (None: not used), the reason."""

    key: str
    asked: int | bool | None
    used: int | bool | None
    reason: str

    def __str__(self) -> str:
        used = "not used" if self.used is None else self.used
        return f"{self.key}: {self.asked} → {used}"


# ---- the TPUs whose VMEM is known ---------------------------------------------------------------

Family = Literal["v4", "v5p", "v6e", "v7x"]


class Chip(NamedTuple):
    """The facts of a TPU that limit block sizes."""

    name: str  # jax's name of the device kind
    limit: int  # bytes of VMEM that the compiler gives one kernel; LIBTPU_INIT_ARGS may set it
    # the family whose constants `vmem.py` uses: on v5e, v6e and v7x the compiler keeps more of the
    # scores in registers than on v4 and v5p
    family: Family


# For v5e the compiler keeps as much of the scores in registers as for v6e.
_FAMILIES: dict[str, Family] = {
    "tpu-v4": "v4",
    "tpu-v5e": "v6e",
    "tpu-v5p": "v5p",
    "tpu-v6e": "v6e",
    "tpu-v7x": "v7x",
}
CHIPS = {
    kind: Chip(kind, device.vmem, _FAMILIES[device.family.name])
    for kind, device in DEVICES.items()
    if device.platform == "tpu"
}
LIMIT_FLAG = re.compile(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)")


def chip_of(target: Target) -> Chip | None:
    """Return the target's TPU with the VMEM limit of LIBTPU_INIT_ARGS, else the default limit.

    An unknown TPU gets the least VMEM of all known TPUs. Return None if the target is no TPU.
    """
    if target.platform != "tpu":
        return None
    chip = CHIPS.get(target.device_kind) or min(CHIPS.values(), key=lambda chip: chip.limit)
    asked = LIMIT_FLAG.findall(dict(target.env).get("LIBTPU_INIT_ARGS", ""))
    return chip._replace(limit=int(asked[-1]) * 1024) if asked else chip


# ---- the facts that rules read ------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The facts of a call that the rules read besides the sizes."""

    # q_len, kv_len: numbers of local queries T and keys S, before padding
    q_len: int
    kv_len: int
    head_dim: int  # H
    itemsize: int  # bytes of an element of q, k and v as the kernel takes them
    cross: bool  # whether the call is cross-attention, to a text for example
    kernel: KernelKind
    training: bool  # whether the backward kernels run too
    chip: Chip | None  # the TPU, or None if no VMEM limits the sizes (interpret mode on a CPU)
    divides: bool = False  # whether the mask test divides positions, as for block masks

    @property
    def q_step(self) -> int:
        """The number of tokens that every Q block is a multiple of."""
        return LANES if self.training else SUBLANES

    @property
    def q_most(self) -> int:
        """The longest Q block: the number of queries, padded to `q_step`."""
        return round_up(self.q_len, self.q_step)

    @property
    def kv_most(self) -> int:
        """The longest KV block: the number of keys, padded to 128 lanes."""
        return round_up(self.kv_len, LANES)


def facts_of(call: Call, kernel: KernelKind, target: Target, training: bool) -> Facts:
    """Collect the `Facts` of a call for a kernel on a target."""
    return Facts(
        call.q_len,
        call.kv_len,
        call.head_dim,
        ITEMSIZE[call.dtype],
        call.role == "cross",
        kernel,
        training,
        chip_of(target),
        call.mask.divides_positions,
    )


def round_up(length: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not less than `length`."""
    return -(-length // step) * step


def round_near(length: int, step: int) -> int:
    """Return the multiple of `step` nearest to `length`, at least `step`; rounds half up."""
    return max(step, (length + step // 2) // step * step)


def divisors(length: int, step: int) -> list[int]:
    """Return the multiples of `step` that divide `length`, itself a multiple, in rising order."""
    return [n * step for n in numbers.divisors(length // step, most=length)]


# ---- memory outside the kernel ------------------------------------------------------------------

MOST_PARTS = 0.1
"""The share of HBM that partial dQ may take unless the user asks for the fused backward."""
FEW_PARTS = 4  # tokamax keeps more than four partial dQ in float32, fewer in the dtype of Q


def fused_partials_bytes(call: Call, sizes: BlockSizes, kernel: KernelKind = "flash") -> int:
    """Count the bytes of HBM of the partial dQ that the fused backward writes.

    The fused backward writes a partial dQ per KV block and then sums the partial dQ, so a longer
    `block_kv_dkv` needs less memory. There are ceil(S / block_kv_dkv) * B * N * T * H elements in
    the dtype of Q (in tokamax, float32 above four partial dQ). The separate backward has none, nor
    has `tpu_flash`, which adds to one array. `call` is the local call.
    """
    if kernel == "tpu_flash" or not sizes.use_fused_bwd_kernel:
        return 0
    if sizes.block_kv_dkv is None or sizes.block_q_dkv is None:
        return 0
    parts = -(-call.kv_len // sizes.block_kv_dkv)
    elements = call.batch * call.heads * round_up(call.q_len, sizes.block_q_dkv) * call.head_dim
    is_wide = kernel == "tokamax_flash" and parts > FEW_PARTS
    return parts * elements * ITEMSIZE["float32" if is_wide else call.dtype]


def are_parts_small(call: Call, sizes: BlockSizes, kernel: KernelKind, device_kind: str) -> bool:
    """Check whether partial dQ take at most a tenth of a device's memory."""
    most = MOST_PARTS * (memory_of(device_kind) or float("inf"))
    return fused_partials_bytes(call, sizes, kernel) <= most

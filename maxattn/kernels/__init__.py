"""The kernels: attention over what one device holds. `table.py` has one row a kernel.

Importing this package imports no kernel: `KERNELS["flash"]` and `maxattn.kernels.Flash` do, when
they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maxattn.call import Call, Reason
from maxattn.kernels.requirements import missing
from maxattn.kernels.table import TABLE, Classes
from maxattn.target import Target

if TYPE_CHECKING:
    from maxattn.config import AttentionConfig
    from maxattn.kernels.base import Kernel
    from maxattn.kernels.cudnn import Cudnn
    from maxattn.kernels.cudnn_flash_te import CudnnFlashTe
    from maxattn.kernels.dot_product import DotProduct
    from maxattn.kernels.flash import Flash
    from maxattn.kernels.memory_efficient import MemoryEfficient
    from maxattn.kernels.tokamax_flash import TokamaxFlash
    from maxattn.kernels.tpu_flash import TpuFlash

KERNELS: Mapping[str, type[Kernel]] = Classes(TABLE)

__all__ = [
    "KERNELS",
    "Cudnn",
    "CudnnFlashTe",
    "DotProduct",
    "Flash",
    "Kernel",
    "MemoryEfficient",
    "TokamaxFlash",
    "TpuFlash",
    "build",
    "computed_call",
    "refusal",
]


def refusal(name: str, local: Call, target: Target, deterministic: bool = False) -> Reason | None:
    """Return why a kernel cannot compute a local call on the target, or None.

    Args:
        name: of a kernel; "a/b" is the forward of a and the backward of b.
        local: the call that one device computes.
        target: the machine.
        deterministic: refuse one whose backward does not repeat bit for bit, too.
    """
    for part in name.split("/"):
        call = computed_call(part, local)
        reason = missing(part, target) or KERNELS[part].supports(call, target)
        if reason is None and deterministic:
            reason = KERNELS[part].repeats(call, target)
        if reason is not None:
            return reason if call is local else _of_padding(reason, local)
    return None


def computed_call(name: str, local: Call) -> Call:
    """Return the call that a kernel computes: its heads padded to one size, if it takes no other.

    Args:
        name: of a kernel; of a pair "a/b" one that pads answers for both.
        local: the call that one device computes.
    """
    if not local.value_head_dim:
        return local
    if all(KERNELS[part].takes_value_dim for part in name.split("/")):
        return local
    from maxattn.kernels.composed.padded_heads import with_one_head_dim

    return with_one_head_dim(local)


def _of_padding(reason: Reason, local: Call) -> Reason:
    from maxattn.kernels.composed.padded_heads import padded_reason

    return padded_reason(reason, local)


def build(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    """Decide everything about a kernel, or about a pair "a/b", for a local call."""
    first, *second = (_build_one(part, local, config, target) for part in name.split("/"))
    if not second:
        return first
    from maxattn.kernels.composed.pair import Pair

    return Pair.of(first, *second)


def _build_one(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    call = computed_call(name, local)
    kernel = KERNELS[name].build(call, config, target)
    if call is local:
        return kernel
    from maxattn.kernels.composed.padded_heads import PaddedHeads

    return PaddedHeads(kernel, local.head_dim, local.value_dim)


def __getattr__(name: str) -> Any:
    if name == "Kernel":
        from maxattn.kernels.base import Kernel

        return Kernel
    found = [row.name for row in TABLE.values() if row.where.endswith(f":{name}")]
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KERNELS[found[0]]

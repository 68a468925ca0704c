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
        reason = missing(part, target) or _refused_values(part, local)
        reason = reason or KERNELS[part].supports(local, target)
        if reason is None and deterministic:
            reason = KERNELS[part].repeats(local, target)
        if reason is not None:
            return reason
    return None


def _refused_values(name: str, call: Call) -> Reason | None:
    """Return why a kernel cannot take the head dim of the values."""
    if not call.value_head_dim or KERNELS[name].takes_value_dim:
        return None
    rule = f"it takes values of the keys' head dim {call.head_dim}, and these have {call.value_dim}"
    return Reason(name, "value head dim", rule, "set attention: auto")


def build(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    """Decide everything about a kernel, or about a pair "a/b", for a local call."""
    first, *second = (KERNELS[part].build(local, config, target) for part in name.split("/"))
    if not second:
        return first
    from maxattn.kernels.pair import Pair

    return Pair(first, *second)


def __getattr__(name: str) -> Any:
    if name == "Kernel":
        from maxattn.kernels.base import Kernel

        return Kernel
    found = [row.name for row in TABLE.values() if row.where.endswith(f":{name}")]
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KERNELS[found[0]]

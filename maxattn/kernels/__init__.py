"""The kernels: attention over the arrays of one device. `table.py` has one row per kernel.

A kernel is imported when it is looked up, as `KERNELS["flash"]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from maxattn.errors import Reason
from maxattn.kernels.table import TABLE, Classes, KernelRow

if TYPE_CHECKING:
    from maxattn.call import Call
    from maxattn.config import AttentionConfig
    from maxattn.devices import Platform
    from maxattn.kernels.base import Kernel
    from maxattn.target import Target

KERNELS: Mapping[str, type[Kernel]] = Classes(TABLE)


def refusal(name: str, local: Call, target: Target, deterministic: bool = False) -> Reason | None:
    """Return why a kernel cannot compute a local call on the target, or None.

    Args:
        name: the kernel's name, or "a/b" for the forward of kernel a and the backward of kernel b.
        local: the call that one device computes.
        target: the machine.
        deterministic: whether to refuse a backward that is not bit for bit repeatable.
    """
    for part in name.split("/"):
        if (lacks := _missing(part, target)) is not None:
            return lacks
        call = computed_call(part, local, target.platform)
        reason = KERNELS[part].supports(call, target)
        if reason is None and deterministic:
            reason = KERNELS[part].repeats(call, target)
        if reason is not None:
            return _of_computed(reason, local, call)
    return None


def _missing(kernel: str, target: Target) -> Reason | None:
    """Refuse a kernel whose platform or package is missing, or that the environment forbids."""
    row, vendor = TABLE[kernel], target.device.vendor
    if target.platform not in row.platforms or (
        target.platform == "gpu" and vendor not in row.gpus
    ):
        rule = f"it needs {_devices(row)}, and this is {target.device_kind}"
        return Reason(row.name, "platform", rule, "use attention: auto")
    if row.switch and dict(target.env).get(row.switch) == "0":
        rule = f"{row.switch}=0 in the environment forbids it"
        return Reason(row.name, row.switch, rule, f"unset {row.switch}")
    if row.package and target.version(row.package) is None:
        named = f"is not among the packages given for {target.device_kind}"
        lacks = "is not installed" if target.is_this_machine else named
        rule = f"{row.package} {lacks}"
        return Reason(row.name, "package", rule, target.remedy_for(row.package))
    return None


def _devices(row: KernelRow) -> str:
    """Return a kernel's devices as text, for example "a CPU, an NVIDIA GPU or a TPU"."""
    names = {"cpu": "a CPU", "gpu": f"an {' or '.join(row.gpus)} GPU", "tpu": "a TPU"}
    *others, last = [names[platform] for platform in row.platforms]
    return f"{', '.join(others)} or {last}" if others else last


def computed_call(name: str, local: Call, platform: Platform) -> Call:
    """Return a local call in the form that a kernel, or both kernels of a pair, compute.

    Blocks become batch rows if that is faster, and unequal head dims are padded if not supported.
    """
    if local.mask.is_full and not local.value_head_dim:
        return local
    parts = [KERNELS[part] for part in name.split("/")]
    rows = as_batch_rows(local, lambda tokens: all(x.rows_pay(platform, tokens) for x in parts))
    if not rows.value_head_dim or all(part.takes_value_dim for part in parts):
        return rows
    from maxattn.kernels.composed.padded_heads import with_one_head_dim

    return with_one_head_dim(rows)


def as_batch_rows(local: Call, pays: Callable[[int], bool] | None = None) -> Call:
    """Return a local call in which each block that sees only itself is a batch row.

    `pays(tokens)` checks whether blocks of that length are faster as batch rows; default always.
    """
    if local.mask.is_full:
        return local
    from maxattn.kernels.composed import batch_rows

    return batch_rows.as_batch_rows(local, pays)


def scores_of(local: Call) -> int:
    """Count the scores (B N T S) of dense attention, in which separate blocks are batch rows."""
    rows = as_batch_rows(local)
    return rows.batch * rows.heads * rows.q_len * rows.kv_len


def _of_computed(reason: Reason, local: Call, computed: Call) -> Reason:
    """Add to a refusal the call that the kernel would compute, if it differs from `local`."""
    from maxattn.kernels.composed import batch_rows, padded_heads

    if local.value_head_dim and not computed.value_head_dim:
        reason = padded_heads.padded_reason(reason, local)
    if computed.batch == local.batch:
        return reason
    return replace(reason, rule=f"{reason.rule} ({batch_rows.rows_text(local, computed)})")


def build(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    """Build a kernel, or a pair "a/b", with the sizes, scale and flags for a local call."""
    first, *second = (_build_one(part, local, config, target) for part in name.split("/"))
    if not second:
        return first
    from maxattn.kernels.composed.pair import Pair

    return Pair.of(first, *second)


def _build_one(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    call = computed_call(name, local, target.platform)
    kernel = KERNELS[name].build(call, config, target)
    if local.value_head_dim and not call.value_head_dim:
        from maxattn.kernels.composed.padded_heads import PaddedHeads

        kernel = PaddedHeads(kernel, local.head_dim, local.value_dim)
    if call.batch != local.batch:
        from maxattn.kernels.composed.batch_rows import BatchRows

        kernel = BatchRows(kernel, call.batch // local.batch, call.mask)
    return kernel

"""Change the block sizes that the user asked for, by the rules, until the kernel can run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from math import lcm
from typing import Any

from maxattn.block_sizes import transposed
from maxattn.block_sizes.rules import RULES, fused_is_forced
from maxattn.block_sizes.sizes import BlockSizes, Change, Facts, KernelKind, facts_of, round_up
from maxattn.call import Call, Role
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

DEFAULT = 512  # tokens: fits VMEM on every chip, in float32 and at head dim 256
LONGEST_COMMON = 4096  # tokens: a longer common multiple of two sizes is not used as a block
ROUNDS = 100  # far more than needed; ends the loop if two rules undo each other


def adjust(
    asked: FlashBlockSizes, call: Call, kernel: KernelKind, target: Target, training: bool
) -> tuple[BlockSizes, tuple[Change, ...]]:
    """Return block sizes that the kernel compiles with, and the changes from the requested ones.

    Legal sizes are never changed. Sizes that the config omits are filled in, from its other sizes
    or with 512. Inference drops the backward sizes. Neither step is reported as a change. `call` is
    the call that one device computes.
    """
    if kernel == "tpu_flash":
        if training:
            return transposed.sizes_of(asked, call, target)
        tile, of_forward = transposed.forward_tile(asked, call, target)
        return BlockSizes(*tile), of_forward
    facts = facts_of(call, kernel, target, training)
    sizes = fill(asked, facts)
    reasons: dict[str, list[str]] = {}
    for _ in range(ROUNDS):
        if (mend := _first_mend(sizes, facts)) is None:
            break
        values, reason = mend
        for key in values:
            reasons[key] = [*dict.fromkeys([*reasons.get(key, []), reason])]
        sizes = replace(sizes, **values)
    changes: list[Change] = []
    for f in fields(sizes):
        before, after = getattr(asked, f.name), getattr(sizes, f.name)
        # Inference does not read a size of the backward.
        dropped = after is None and not facts.training
        if before is not None and before != after and not dropped:
            changes.append(Change(f.name, before, after, "; ".join(reasons.get(f.name, []))))
    return sizes, tuple(changes)


def _first_mend(sizes: BlockSizes, facts: Facts) -> tuple[dict[str, Any], str] | None:
    for rule in RULES:
        if rule.applies(facts) and (values := rule.mend(sizes, facts)):
            return values, rule.reason(facts)
    return None


def fill(asked: FlashBlockSizes, facts: Facts) -> BlockSizes:
    """Fill in the sizes that the config omits, from its other sizes or with 512."""
    kv_of_backward = _common(asked.block_kv_dkv, asked.block_kv_dq)
    q = asked.block_q or _common(asked.block_q_dkv, asked.block_q_dq) or min(DEFAULT, facts.q_most)
    kv = asked.block_kv or kv_of_backward or min(DEFAULT, facts.kv_most)
    if asked.block_kv is None and asked.block_kv_compute:
        kv = round_up(kv, asked.block_kv_compute)
    compute = asked.block_kv_compute or min(kv, DEFAULT if kv % DEFAULT == 0 else kv)
    q_dkv, kv_dkv = asked.block_q_dkv or q, asked.block_kv_dkv or kv
    compute_dkv = asked.block_kv_dkv_compute or (compute if kv_dkv % compute == 0 else kv_dkv)
    fused = bool(asked.use_fused_bwd_kernel) or fused_is_forced(facts)
    q_dq = asked.block_q_dq or (None if fused else q)
    kv_dq = asked.block_kv_dq or (None if fused else kv)
    fused = fused if asked.use_fused_bwd_kernel is None else asked.use_fused_bwd_kernel
    return BlockSizes(q, kv, compute, q_dkv, kv_dkv, compute_dkv, q_dq, kv_dq, fused)


def _common(a: int | None, b: int | None) -> int | None:
    """Return the common multiple of two sizes, or the longer size if the multiple is too long."""
    if a is None or b is None:
        return a or b
    return both if (both := lcm(a, b)) <= max(LONGEST_COMMON, a, b) else max(a, b)


def log_lines(role: Role, changes: Iterable[Change]) -> str:
    """Return the changes as one log record, with a line per change and each reason once."""
    lines, last = [f"Modified block sizes for {role}-attention:"], ""
    for change in changes:
        lines.append(f"  {change}" + (f" ({change.reason})" if change.reason != last else ""))
        last = change.reason
    return "\n".join(lines) if len(lines) > 1 else ""

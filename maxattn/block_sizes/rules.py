"""The rules of block sizes as data: the condition, the reason, and how sizes are changed.

`adjust` applies the rules in order until all are satisfied. The documentation prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxattn.block_sizes import vmem
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FORWARD,
    KV_KEYS,
    LANES,
    Q_KEYS,
    BlockSizes,
    Facts,
    divisors,
    round_near,
)

Mend = Callable[[BlockSizes, Facts], dict[str, Any]]


@dataclass(frozen=True)
class Rule:
    """One rule."""

    name: str  # a few words that name the rule
    keys: tuple[str, ...]  # the sizes that the rule is about
    when: str  # the calls it applies to; "inference ..." and "training ..." exclude the other pass
    needs: str  # the condition, in words
    why: str  # the reason, in one sentence
    # returns the keys to change and their values; an empty dict if the rule is satisfied
    mend: Mend
    reason: Callable[[Facts], str]  # returns the reason of a change, for a log line

    def applies(self, facts: Facts) -> bool:
        """Check whether the rule applies to this pass; `mend` tests other conditions."""
        return not self.when.startswith("inference" if facts.training else "training")


def fused_is_forced(facts: Facts) -> bool:
    """Check whether the call trains with a kernel whose only backward is fused."""
    return facts.training and facts.kernel == "tokamax_flash"


def _set(sizes: BlockSizes, keys: tuple[str, ...], value: Callable[[int], Any]) -> dict[str, Any]:
    found = {key: (old, value(old)) for key in keys if (old := getattr(sizes, key)) is not None}
    return {key: new for key, (old, new) in found.items() if new != old}


def _force_fused(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    needed = fused_is_forced(facts) and not sizes.use_fused_bwd_kernel
    return {"use_fused_bwd_kernel": True} if needed else {}


def _one_q(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    needed = sizes.use_fused_bwd_kernel and sizes.block_q_dkv != sizes.block_q
    return {"block_q_dkv": sizes.block_q} if needed else {}


def _divides(part: str, whole: str, when: str, why: str) -> Rule:
    """Return the rule that `part` divides `whole`, which changes `part` to the nearest divisor."""

    def mend(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
        small, large = getattr(sizes, part), getattr(sizes, whole)
        if small is None or large is None or large % small == 0:
            return {}
        return {part: min(divisors(large, LANES), key=lambda size: (abs(size - small), -size))}

    name = f"{part} divides {whole}"
    return Rule(name, (part, whole), when, name, why, mend, lambda f: f"must divide {whole}")


def _fits(name: str, keys: tuple[str, ...], when: str, mend: Mend) -> Rule:
    return Rule(
        f"{name} fits VMEM",
        keys,
        when,
        f"the {name} kernel's tiles (two buffers each) and scores fit the chip's limit",
        "the compiler gives a kernel a fixed share of VMEM, and fails if it needs more",
        mend,
        lambda f: f"{f.chip.limit // 2**20} MiB of VMEM on {f.chip.name}" if f.chip else "",
    )


_EQUAL_PARTS = "a fetched tile is computed in equal parts"
_BOTH_BLOCKS = "the padded length must be a multiple of both blocks"
_SEPARATE = "training with the separate backward"

RULES: tuple[Rule, ...] = (
    Rule(
        "forward alone",
        (*DKV, *DQ, "use_fused_bwd_kernel"),
        "inference",
        "only the three forward sizes are kept",
        "no backward kernel runs",
        lambda s, f: _set(s, (*DKV, *DQ, "use_fused_bwd_kernel"), lambda _: None),
        lambda f: "no backward in inference",
    ),
    Rule(
        "fused backward",
        ("use_fused_bwd_kernel",),
        "training with tokamax_flash",
        "use_fused_bwd_kernel is true",
        "tokamax's only backward is fused",
        _force_fused,
        lambda f: "tokamax's only backward is fused",
    ),
    Rule(
        "no dq blocks",
        DQ,
        "training with the fused backward",
        "block_q_dq and block_kv_dq are not used",
        "the fused kernel computes dQ beside dK and dV",
        lambda s, f: _set(s, DQ, lambda _: None) if s.use_fused_bwd_kernel else {},
        lambda f: "the fused backward computes dQ too",
    ),
    Rule(
        "Q blocks within the queries",
        Q_KEYS,
        "always",
        "no Q block is longer than the padded queries",
        "the remaining tokens of the block would be padding",
        lambda s, f: _set(s, Q_KEYS, lambda size: min(size, f.q_most)),
        lambda f: f"query length {f.q_len}",
    ),
    Rule(
        "KV blocks within the keys",
        KV_KEYS,
        "always",
        f"no KV block is longer than the keys rounded up to {LANES}",
        "a text has fewer tokens than most blocks, which would be padded",
        lambda s, f: _set(s, KV_KEYS, lambda size: min(size, f.kv_most)),
        lambda f: f"{'text sequence' if f.cross else 'key'} length {f.kv_len}",
    ),
    Rule(
        "Q blocks in steps",
        Q_KEYS,
        "always",
        f"Q blocks are multiples of {LANES} in training, of 8 in inference",
        "the backward lays queries, LSE and segment ids along the lanes; "
        "the forward lays them along the sublanes",
        lambda s, f: _set(s, Q_KEYS, lambda size: round_near(size, f.q_step)),
        lambda f: f"must be a multiple of {f.q_step}",
    ),
    Rule(
        "KV blocks in steps",
        KV_KEYS,
        "always",
        f"KV blocks are multiples of {LANES}",
        f"keys lie along the {LANES} lanes of a register when K is transposed for the product",
        lambda s, f: _set(s, KV_KEYS, lambda size: round_near(size, LANES)),
        lambda f: f"must be a multiple of {LANES}",
    ),
    Rule(
        "one Q block",
        ("block_q", "block_q_dkv"),
        "training with the fused backward",
        "block_q_dkv equals block_q",
        "block_q decides, since dQ must have the tiles to which Q was padded",
        _one_q,
        lambda f: "the fused backward needs block_q",
    ),
    _divides("block_kv_compute", "block_kv", "always", _EQUAL_PARTS),
    _divides("block_q_dkv", "block_q", "training", _BOTH_BLOCKS),
    _divides("block_kv_dkv", "block_kv", "training", _BOTH_BLOCKS),
    _divides("block_kv_dkv_compute", "block_kv_dkv", "training", _EQUAL_PARTS),
    _divides("block_q_dq", "block_q", _SEPARATE, _BOTH_BLOCKS),
    _divides("block_kv_dq", "block_kv", _SEPARATE, _BOTH_BLOCKS),
    _fits("forward", FORWARD, "on a TPU", vmem.fit_forward),
    _fits("dkv", DKV, "training on a TPU", vmem.fit_dkv),
    _fits("dq", DQ, "training on a TPU with the separate backward", vmem.fit_dq),
)

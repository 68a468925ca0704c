"""The rules of block sizes, as data: what must hold, what mends it, and why.

`adjust` applies them from the top until all hold, and the flowchart of the documentation is printed
from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from maxattn.block_sizes import fit
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

Values = dict[str, Any]  # keys and the values that mend them


@dataclass(frozen=True)
class Rule:
    """State one rule.

    Args:
        name: a few words that name it.
        keys: the sizes it governs.
        when: in words, the calls it governs.
        needs: in words, what must hold.
        why: the reason, in one sentence.
        applies: whether it governs a call.
        mend: from sizes to the keys to change, and their values; empty where the rule holds.
        reason: what a log line gives as the reason of a change.
    """

    name: str
    keys: tuple[str, ...]
    when: str
    needs: str
    why: str
    applies: Callable[[Facts], bool]
    mend: Callable[[BlockSizes, Facts], Values]
    reason: Callable[[Facts], str]


def fused_is_forced(facts: Facts) -> bool:
    """Whether the kernel has no backward but the fused one."""
    return facts.training and facts.kernel == "tokamax_flash"


def _always(facts: Facts) -> bool:
    return True


def _training(facts: Facts) -> bool:
    return facts.training


def _inference(facts: Facts) -> bool:
    return not facts.training


def _set(sizes: BlockSizes, keys: tuple[str, ...], value: Callable[[int], Any]) -> Values:
    """Apply `value` to the keys that are set, and keep what differs."""
    found = {key: (old, value(old)) for key in keys if (old := getattr(sizes, key)) is not None}
    return {key: new for key, (old, new) in found.items() if new != old}


def _forward_only(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, (*DKV, *DQ, "use_fused_bwd_kernel"), lambda _: None)


def _force_fused(sizes: BlockSizes, facts: Facts) -> Values:
    return {} if sizes.use_fused_bwd_kernel else {"use_fused_bwd_kernel": True}


def _drop_dq(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, DQ, lambda _: None) if sizes.use_fused_bwd_kernel else {}


def _clip_q(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, Q_KEYS, lambda size: min(size, facts.q_most))


def _clip_kv(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, KV_KEYS, lambda size: min(size, facts.kv_most))


def _step_q(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, Q_KEYS, lambda size: round_near(size, facts.q_step))


def _step_kv(sizes: BlockSizes, facts: Facts) -> Values:
    return _set(sizes, KV_KEYS, lambda size: round_near(size, LANES))


def _one_q(sizes: BlockSizes, facts: Facts) -> Values:
    if not sizes.use_fused_bwd_kernel or sizes.block_q_dkv == sizes.block_q:
        return {}
    return {"block_q_dkv": sizes.block_q}


def _divide(part: str, whole: str) -> Callable[[BlockSizes, Facts], Values]:
    """Mend `part` divides `whole` by the nearest size that does; of two as near, the longer."""

    def mend(sizes: BlockSizes, facts: Facts) -> Values:
        small, large = getattr(sizes, part), getattr(sizes, whole)
        if small is None or large is None or large % small == 0:
            return {}
        return {part: min(divisors(large, LANES), key=lambda size: (abs(size - small), -size))}

    return mend


def _divides(part: str, whole: str, when: str, applies: Callable[[Facts], bool], why: str) -> Rule:
    name = f"{part} divides {whole}"
    return Rule(
        name,
        (part, whole),
        when,
        name,
        why,
        applies,
        _divide(part, whole),
        lambda f: f"must divide {whole}",
    )


def _fits(
    name: str, keys: tuple[str, ...], when: str, applies: Callable[[Facts], bool], mend: Any
) -> Rule:
    return Rule(
        f"{name} fits VMEM",
        keys,
        when,
        f"the {name} kernel's tiles, both buffers and scores, fit the chip's limit",
        "the compiler gives a kernel a fixed share of VMEM and stops where it needs more",
        applies,
        mend,
        lambda f: f"{f.chip.limit // 2**20} MiB of VMEM on {f.chip.name}" if f.chip else "",
    )


_LANES_WHY = f"keys lie along the {LANES} lanes of a register when K is transposed for the product"
_DIVIDES_WHY = "one padded length must be a whole number of both blocks"

RULES: tuple[Rule, ...] = (
    Rule(
        "forward alone",
        (*DKV, *DQ, "use_fused_bwd_kernel"),
        "inference",
        "the three forward sizes alone are kept",
        "no backward kernel runs",
        _inference,
        _forward_only,
        lambda f: "no backward in inference",
    ),
    Rule(
        "fused backward",
        ("use_fused_bwd_kernel",),
        "training with tokamax_flash",
        "use_fused_bwd_kernel is true",
        "tokamax has no other backward",
        fused_is_forced,
        _force_fused,
        lambda f: "tokamax has the fused backward alone",
    ),
    Rule(
        "no dq blocks",
        DQ,
        "training with the fused backward",
        "block_q_dq and block_kv_dq are not used",
        "the fused kernel computes dQ beside dK and dV",
        _training,
        _drop_dq,
        lambda f: "the fused backward computes dQ too",
    ),
    Rule(
        "Q blocks within the queries",
        Q_KEYS,
        "always",
        "no Q block is longer than the padded queries",
        "the rest of the block would be padding",
        _always,
        _clip_q,
        lambda f: f"query length {f.q_len}",
    ),
    Rule(
        "KV blocks within the keys",
        KV_KEYS,
        "always",
        f"no KV block is longer than the keys rounded up to {LANES}",
        "text keys are fewer than most blocks, and the rest would be padding",
        _always,
        _clip_kv,
        lambda f: f"{'text sequence' if f.cross else 'key'} length {f.kv_len}",
    ),
    Rule(
        "Q blocks in steps",
        Q_KEYS,
        "always",
        f"Q blocks are multiples of {LANES} in training, of 8 in inference",
        "the backward lays queries, LSE and segment ids along the lanes; "
        "the forward lays them along the sublanes",
        _always,
        _step_q,
        lambda f: f"must be a multiple of {f.q_step}",
    ),
    Rule(
        "KV blocks in steps",
        KV_KEYS,
        "always",
        f"KV blocks are multiples of {LANES}",
        _LANES_WHY,
        _always,
        _step_kv,
        lambda f: f"must be a multiple of {LANES}",
    ),
    Rule(
        "one Q block",
        ("block_q", "block_q_dkv"),
        "training with the fused backward",
        "block_q_dkv equals block_q",
        "block_q wins, so that dQ comes back in the tiles that Q was padded to",
        _training,
        _one_q,
        lambda f: "the fused backward needs block_q",
    ),
    _divides(
        "block_kv_compute",
        "block_kv",
        "always",
        _always,
        "a fetched tile is computed in equal parts",
    ),
    _divides("block_q_dkv", "block_q", "training", _training, _DIVIDES_WHY),
    _divides("block_kv_dkv", "block_kv", "training", _training, _DIVIDES_WHY),
    _divides(
        "block_kv_dkv_compute",
        "block_kv_dkv",
        "training",
        _training,
        "a fetched tile is computed in equal parts",
    ),
    _divides(
        "block_q_dq", "block_q", "training with the separate backward", _training, _DIVIDES_WHY
    ),
    _divides(
        "block_kv_dq", "block_kv", "training with the separate backward", _training, _DIVIDES_WHY
    ),
    _fits("forward", FORWARD, "on a TPU", _always, fit.forward),
    _fits("dkv", DKV, "training on a TPU", _training, fit.dkv),
    _fits("dq", DQ, "training on a TPU with the separate backward", _training, fit.dq),
)


def rules_table() -> str:
    """Write the rules as a Markdown table, in the order in which they are applied."""
    rows = ["| when | what must hold | why |", "|---|---|---|"]
    rows += [f"| {rule.when} | {rule.needs} | {rule.why} |" for rule in RULES]
    return "\n".join(rows)

"""Which kernels `auto` tries on an NVIDIA GPU: rules, each with its reason.

The rules for Hopper come from 1,520 calls, forward and backward, on H100s and H200s
(docs/results.md). `flash` alone takes 1.0082 times as long as the fastest kernel of each pass; with
the other two rules it is 1.0010. Measurements of `maxattn tune` on the machine precede all rules.
"""

from __future__ import annotations

from collections.abc import Iterator

from maxattn.call import Call
from maxattn.devices import device_of
from maxattn.jax_private.versions import numbers
from maxattn.kernels import as_batch_rows, refusal, scores_of
from maxattn.kernels.auto.tuned_order import Candidates
from maxattn.kernels.flash import has_fa4, install
from maxattn.kernels.fused import limits
from maxattn.target import Target

MEASURED = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")  # jax's names of the device kinds
FLASH = "flash is the fastest on Hopper in 2,861 of 3,040 measured passes (docs/results.md)"
OTHERS = (
    "the first of TransformerEngine, cuDNN and tokamax that can run; on Hopper flash is faster in"
    " most measured passes (docs/results.md)"
)
WIDE_HEADS, LONG = 192, 1024
WIDE = (
    "flash forward; at head dims above 192 and 1,024 or more tokens the backward of {} takes {} of"
    " flash's time (median of 25 measured calls)"
)
# With few scores, making flash's lists of tiles takes longer than computing the scores.
SHORT, FEW_SCORES = 192, 4e5
DENSE = (
    "dense forward: with segments, up to 192 tokens and up to 400,000 scores it takes 0.64 of"
    " flash's time (median of 6 measured calls)"
)
RULE = (
    "a rule, not measured on this GPU: cuDNN first, then FlashAttention-4, then TransformerEngine"
)
PUBLISHED = (
    "cuDNN is 1.24 to 1.98 times as fast as FlashAttention-4 in the forward of video and image"
    " models (B200, cuDNN 9.19): published by SGLang, pull request 33655, not measured by maxattn"
    " here"
)
BIAS = (
    "a rule, not measured on this GPU: among the kernels that take this bias, cuDNN first, then"
    " TransformerEngine, then FlashAttention-4"
)


def candidates(call: Call, target: Target) -> Iterator[tuple[str, str]]:
    """Yield the kernels that take a call, in order; the first even if not: a plan prints why."""
    names = _on_hopper(call) if target.device.is_a("hopper") else _elsewhere(call, target)
    if call.bias is not None:
        names = tuple((name, BIAS) for name in ("cudnn", "cudnn_flash_te", "flash"))
    elif target.device.is_a("hopper"):
        where = "" if is_measured_on(target) else f"; not measured on {target.device_kind}"
        if not has_fa4(target):  # then flash would run cuDNN
            names = tuple(each for each in names if "flash" not in each[0].split("/"))
            where += f"; flash would be faster: {install(target)}"
        names = tuple((name, f"{why}{where}") for name, why in names)
    yield names[0]
    yield from (each for each in names[1:] if refusal(each[0], call, target) is None)


def is_measured_on(target: Target) -> bool:
    """Check whether the rules were measured on this device kind, by jax's or maxattn's name."""
    return any(target.device_kind in (kind, device_of(kind).kind) for kind in MEASURED)


def _on_hopper(call: Call) -> Candidates:
    others = ("cudnn_flash_te", OTHERS), ("cudnn", OTHERS), ("tokamax_flash", OTHERS)
    usual = ("flash", FLASH), *others
    rows, scores = as_batch_rows(call), scores_of(call)
    is_wide = max(rows.head_dim, rows.value_dim) > WIDE_HEADS and rows.heads == rows.kv_heads
    # With more than a band and lengths, flash reads lists of tiles.
    of_pairs = [term for term in rows.mask.terms() if not (term.is_full or term.is_of_keys)]
    has_lists = len(of_pairs) > 1 or any(x.has_data or x.band() is None for x in of_pairs)
    if is_wide and min(rows.q_len, rows.kv_len) >= LONG and not has_lists:
        te = "flash/cudnn_flash_te", WIDE.format("TransformerEngine", "0.86")
        return te, ("flash/cudnn", WIDE.format("cuDNN", "0.88")), *usual
    is_short = max(rows.q_len, rows.kv_len) <= SHORT and scores <= FEW_SCORES
    if is_short and call.mask.has_ids:
        return ("dot_product/flash", DENSE), *usual
    return usual


def _elsewhere(call: Call, target: Target) -> Candidates:
    """Order the kernels for GPUs that were not measured; cuDNN's times on a B200 are published."""
    version = numbers(limits.version(target) or "")
    is_new = not version or version >= (9, 19)  # an unknown version counts as the newest
    sizes = call.head_dim == call.value_dim == 128 and min(call.q_len, call.kv_len) >= 4096
    is_plain = call.dtype == "bfloat16" and call.mask.is_full
    is_published = target.device.capability == (10, 0) and is_new and sizes and is_plain
    why = PUBLISHED if is_published else RULE
    return ("cudnn", why), ("flash", RULE), ("cudnn_flash_te", RULE)

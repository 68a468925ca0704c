"""Rules that find unsafe layers and heads in an audit, each with a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxattn.auditing.report import Finding, LayerAudit

OFFSET = 3.0  # standard deviations
LOSS, LITTLE = 0.05, 0.02  # of the output that 8 bits may lose; beside an offset
OUTLIER = 20.0  # 8 bits leave the median channel of K 127 / 20 = 6 steps
DOMINANT, LARGE = 8.0, 20.0  # times the median head's score; exp(-20) is below bfloat16's rounding
NORMS = 8.0  # times the median layer's
ERRORS = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}  # of a kernel against float32
Values = Mapping[str, Any]


class HeadRule(NamedTuple):
    """A rule about heads: its kind, which heads break it by the measures of all, and the reason.

    The reason is about the head whose measure `by` is the largest, with its measures in braces.
    """

    kind: str
    by: str
    breaks: Callable[[Values], Any]
    why: str


_OFFSET = "channel {k_channel:.0f} of K has an offset of {k_offset:.3g} sigma{rotary}"
RULES = (
    HeadRule("offset", "k_offset", lambda x: (x["k_offset"] >= OFFSET) & (x["int8"] >= LITTLE),
        _OFFSET + ": per-tensor 8 bits would lose {int8:.1%} of the output, {int8_centred:.1%} if"
        " K is centred"),
    HeadRule("offset", "k_offset", lambda x: (x["k_offset"] >= OFFSET) & np.isnan(x["int8"]),
        _OFFSET + ": centre K before 8 bits"),
    HeadRule("outlier", "k_outlier", lambda x: x["k_outlier"] >= OUTLIER,
        "a channel of K is {k_outlier:.3g} times as large as the median channel"),
    HeadRule("8 bits", "int8_centred", lambda x: x["int8_centred"] >= LOSS,
        "per-tensor 8 bits would lose {int8_centred:.1%} of the output, even if K is centred"),
    HeadRule("bound", "outside", lambda x: x["outside"] > 0,
        "scores up to {score:.3g}, at most {bound:.3g}, leave the bound of tpu_flash, {limit:.3g}:"
        " {outside:.1%} of the queries take its running maximum on a TPU"),
    HeadRule("dominant", "score", lambda x: x["score"] >= np.maximum(LARGE, DOMINANT * x["usual"]),
        "it dominates with scores up to {score:.3g}, the median head's {usual:.3g}; its entropy is"
        " {entropy:.3g} nats"),
)  # fmt: skip


def findings(layers: Sequence[LayerAudit]) -> tuple[Finding, ...]:
    """Return the findings, layer by layer."""
    return tuple(found for layer in layers for found in _of_layer(layer, layers))


def _of_layer(layer: LayerAudit, layers: Sequence[LayerAudit]) -> Iterator[Finding]:
    values: dict[str, Any] = {name: np.array(x) for name, x in layer.measures.items()}
    none = np.full(len(layer.heads), np.nan)
    values = {"int8": none, "int8_centred": none} | values
    bad = {n: values[f"bad_{n}"] for n in "qkv"}
    is_bad = np.sum([*bad.values()], axis=0) > 0
    if is_bad.any():
        counts = ", ".join(f"{int(x.sum())} in {n}" for n, x in bad.items() if x.any())
        why = f"entries that are not finite: {counts}; its other numbers mean nothing"
        yield _found("non-finite", layer, is_bad, why)
    sound = np.where(is_bad, np.nan, values["score"])
    values["usual"] = np.full(len(sound), np.nan if is_bad.all() else np.nanmedian(sound))
    for rule in (*RULES, *_of_kernels(layer)):
        broken = rule.breaks(values) & ~is_bad
        if broken.any():
            worst = int(np.argmax(np.where(broken, values[rule.by], -np.inf)))
            facts = {name: float(x[worst]) for name, x in values.items()}
            rotary = f", with {layer.rotary} rotary embedding" if layer.rotary else ""
            why = rule.why.format(**facts, rotary=rotary)
            which = f" (head {layer.heads[worst]})" if broken.sum() > 1 else ""
            yield _found(rule.kind, layer, broken, why + which)
    peers = [other for other in layers if other.role == layer.role]
    for n in "qk":
        own, usual = layer.over_heads(f"{n}_norm"), [x.over_heads(f"{n}_norm") for x in peers]
        if len(peers) > 2 and np.isfinite(own) and own >= NORMS * np.nanmedian(usual):
            times = f"{own / np.nanmedian(usual):.3g} times the median layer's"
            yield Finding("norms", layer.name, (), f"norms of {n} up to {own:.3g}, {times}")


def _of_kernels(layer: LayerAudit) -> Iterator[HeadRule]:
    most = ERRORS[layer.dtype]
    for name in (x for x in layer.measures if x.startswith("error ")):
        why = f"{name[6:]} has an error of {{{name}:.2g}} against float32, more than {most:.2g}"
        yield HeadRule("kernel error", name, lambda x, name=name: ~(x[name] <= most), why)


def _found(kind: str, layer: LayerAudit, which: Any, why: str) -> Finding:
    heads = tuple(h for h, is_one in zip(layer.heads, which, strict=True) if is_one)
    return Finding(kind, layer.name, heads, why)

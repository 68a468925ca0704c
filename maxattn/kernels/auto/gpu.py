"""What `auto` tries on an NVIDIA GPU: the winners of `table.json`, which `maxattn bench
--write-table` measured.

A call takes the entry of the measured shape nearest to it: of its own kind of mask, then of the
nearest head dim, then of the least distance in doublings of T, S and B x N. Forward and backward
are chosen apart. GPUs without a table of their own take that of the H200 where they are Hopper too,
and cuDNN elsewhere, which the plan calls a rule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import log2

from maxattn.call import Call, Reason
from maxattn.kernels import KERNELS
from maxattn.kernels.fa4.kernel import launches_parts
from maxattn.kernels.flash import has_fa4, install
from maxattn.kernels.fused import masks
from maxattn.kernels.requirements import missing
from maxattn.target import Target

PLAIN = ("memory_efficient", "dot_product")
FULL, BAND, TILES = "full", "band", "tiles"
WHOLE_ROWS = "flash backward in whole rows"
BY_RULE = ("cudnn", "flash", "cudnn_flash_te")


@dataclass(frozen=True)
class Entry:
    """Hold one measured shape: milliseconds by kernel, forward and backward.

    Args:
        shape: B, T, S, N, H.
        mask: "full" (lengths included), "band" (causal, windows of tokens) or "tiles" (every other
            mask).
        forward, backward: (kernel, ms), fastest first.
        whole_rows: ms of flash's backward where it is not launched in parts (split_queries.py); 0
            where that is no news.
    """

    shape: tuple[int, int, int, int, int]
    mask: str
    forward: tuple[tuple[str, float], ...]
    backward: tuple[tuple[str, float], ...]
    whole_rows: float = 0.0

    @property
    def text(self) -> str:
        """Spell the shape."""
        b, t, s, n, h = self.shape
        return f"B={b} T={t} S={s} N={n} H={h}"


def order(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return what to try, in order, and why. "a/b" is the forward of a and the backward of b.

    Kernels that were faster than the first that can run come first too, so that the plan says why
    they do not.
    """
    tables = read_tables()
    device = target.device_kind if target.device_kind in tables else "NVIDIA H200"
    if device not in tables or (device != target.device_kind and not target.device.is_a("hopper")):
        usable = tuple(n for n in BY_RULE if n == "cudnn" or _refusal(n, call, target) is None)
        return (*usable, *PLAIN), "a rule, not measured on this GPU: cuDNN first"
    entry = _as_launched(nearest(call, tables[device]), call, target)
    forward, backward = (
        tuple(name for name, _ in pairs) for pairs in (entry.forward, entry.backward)
    )
    best = [
        next((n for n in names if _usable(n, call, target)), None) for names in (forward, backward)
    ]
    if best[0] is None or best[1] is None:
        return (
            *forward[:1],
            *PLAIN,
        ), f"plain JAX, since no kernel that was measured on an {device} takes this call"
    first = best[0] if best[0] == best[1] else f"{best[0]}/{best[1]}"
    faster = (*forward[: forward.index(best[0])], *backward[: backward.index(best[1])])
    there = [n for n in (*faster, *_by_total(entry)) if n != "flash" or has_fa4(target)]
    refused = [n for n in there if n in faster and n not in best]
    lost = (
        ""
        if "flash" in there or "flash" not in faster
        else f"; flash would be faster: {install(target)}"
    )
    return tuple(dict.fromkeys((*refused, first, *there, *PLAIN))), _because(
        entry, device, target
    ) + lost


def nearest(call: Call, entries: tuple[Entry, ...]) -> Entry:
    """Return the measured shape nearest to a call."""
    kind = mask_kind(call)
    same = [e for e in entries if e.mask == kind] or [e for e in entries if e.mask == FULL]
    size = (call.head_dim, call.q_len, call.kv_len, call.batch * call.heads)

    def distance(entry: Entry) -> tuple[float, float]:
        b, t, s, n, h = entry.shape
        apart = [
            abs(log2(mine / theirs)) for mine, theirs in zip(size, (h, t, s, b * n), strict=True)
        ]
        return apart[0], sum(apart[1:])

    return min(same, key=distance)


def _as_launched(entry: Entry, call: Call, target: Target) -> Entry:
    """Take the time of flash's backward as this call gets it: in parts of the queries, or in whole
    rows.
    """
    if not entry.whole_rows or launches_parts(call, target):
        return entry
    times = dict(entry.backward) | {"flash": entry.whole_rows}
    return replace(entry, backward=_fastest_first(times))


def mask_kind(call: Call) -> str:
    """Sort a mask into the kinds that were measured."""
    parts = masks.split(call.mask)
    if parts.rest or parts.band is None:
        return TILES
    return FULL if parts.band.is_full else BAND


@cache
def read_tables() -> dict[str, tuple[Entry, ...]]:
    """Read the committed tables, by device kind."""
    text = resources.files("maxattn.kernels.auto").joinpath("table.json").read_text()
    return {
        device: tuple(_entry(row) for row in rows["entries"])
        for device, rows in json.loads(text).items()
    }


def _entry(row: dict) -> Entry:
    b, t, s, n, h = row["shape"]
    times = _fastest_first(row["forward"]), _fastest_first(row["backward"])
    return Entry((b, t, s, n, h), row["mask"], *times, row.get(WHOLE_ROWS, 0.0))


def _fastest_first(times: dict[str, float]) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(times.items(), key=lambda pair: pair[1]))


def _by_total(entry: Entry) -> tuple[str, ...]:
    backward = dict(entry.backward)
    both = {name: ms + backward[name] for name, ms in entry.forward if name in backward}
    return tuple(sorted(both, key=lambda name: both[name]))


def _refusal(name: str, call: Call, target: Target) -> Reason | None:
    return missing(name, target) or KERNELS[name].supports(call, target)


def _usable(name: str, call: Call, target: Target) -> bool:
    """Tell whether what was measured under a name is what would run: flash without fa4-jax is
    cuDNN.
    """
    return _refusal(name, call, target) is None and (name != "flash" or has_fa4(target))


def _because(entry: Entry, device: str, target: Target) -> str:
    here = "" if device == target.device_kind else f", and this is {target.device_kind}"
    mask = "" if entry.mask == FULL else f" mask {entry.mask}"
    return f"fastest at {entry.text}{mask}, the nearest shape measured on an {device}{here}"

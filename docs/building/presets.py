"""Block sizes that ship, by chip and model: the fastest by estimates that all TPU kernels take.

They pad little. Where no estimates ship, they are the largest.

`python -m docs.building.presets FOLDER` writes them as configs; those in
`configs/block_sizes` are its output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

from maxattn.block_sizes.adjust import DEFAULT, adjust
from maxattn.block_sizes.chips import CHIPS
from maxattn.block_sizes.estimated.choose import TIE, seconds_of
from maxattn.block_sizes.estimated.defaults import how_estimated
from maxattn.block_sizes.estimated.table import shipped_costs
from maxattn.block_sizes.padding import padding
from maxattn.block_sizes.sizes import LANES, BlockSizes, KernelKind, divisors
from maxattn.call import Call
from maxattn.target import Target

UNSHARDED, SHARDED = 0.01, 0.03  # most padding, as a share of the tokens
LONGEST, LONGEST_COMPUTE = 2048, 1024  # tokens
PARTS = "fwd", "dkv"
KERNELS: tuple[tuple[KernelKind, bool], ...] = (
    ("flash", False),
    ("flash", True),
    ("tokamax_flash", True),
)


class Model(NamedTuple):
    """Hold the shapes that a preset is for.

    Args:
        name: of the preset.
        title: what the shapes are, in words.
        head_dim: H.
        lengths: tokens of self-attention on one device, and the share that may be padded.
        example: batch, tokens and heads of the call in the file's command.
        mesh: the mesh of that call.
        strategy: the config's `context_parallel`, with the reason behind it; "" leaves it to
            `auto`.
    """

    name: str
    title: str
    head_dim: int
    lengths: tuple[tuple[int, float], ...]
    example: tuple[int, int, int]
    mesh: str
    strategy: str = ""


def _shards(length: int, *ways: int) -> tuple[tuple[int, float], ...]:
    return tuple((-(-length // n), UNSHARDED if n == 1 else SHARDED) for n in ways)


MODELS = (
    Model(
        "wan_480p",
        "a Wan-shaped model, 81 frames at 832x480: 32,760 tokens, also over context 2, 4 or 8",
        128,
        _shards(32_760, 1, 2, 4, 8),
        (1, 32_760, 12),
        "{}",
    ),
    Model(
        "wan_720p",
        "a Wan-shaped model, 81 frames at 1280x720: 75,600 tokens, also over context 2 or 4",
        128,
        _shards(75_600, 1, 2, 4),
        (1, 75_600, 40),
        "{'context': 4}",
    ),
    Model(
        "wan_720p_context_8",
        "a Wan-shaped model, 81 frames at 1280x720, over context 8: 9,450 tokens a device",
        128,
        _shards(75_600, 2, 4, 8),
        (1, 75_600, 40),
        "{'context': 8}",
    ),
    Model(
        "flux",
        "a Flux-shaped model at 1024x1024: 4,608 tokens, text among them, also over context 2 or 4",
        128,
        _shards(4608, 1, 2, 4),
        (1, 4608, 24),
        "{}",
    ),
    Model(
        "flux_context_8",
        "a Flux-shaped model at 1024x1024, over context 8: 4,608 tokens of 3 heads a device",
        128,
        _shards(4608, 1, 2, 4),
        (1, 4608, 24),
        "{'context': 8}",
        "ulysses         # shards of 576 tokens are no multiple of 128: a ring pads them by 11%",
    ),
    Model(
        "sdxl",
        "an SDXL-shaped UNet at 1024x1024: 4,096 and 1,024 tokens",
        64,
        ((4096, UNSHARDED), (1024, UNSHARDED)),
        (1, 4096, 10),
        "{}",
    ),
)


class Preset(NamedTuple):
    """Hold the sizes of a preset.

    Args:
        sizes: what ships.
        gains: how many times as fast the forward is as with the largest tiles, and the forward and
            backward together, by the slow ends of estimates; None where no estimates ship.
    """

    sizes: BlockSizes
    gains: tuple[float, float] | None = None


@cache
def preset(model: Model, target: Target) -> Preset:
    """Choose tiles that flash and tokamax_flash take as they are, in training.

    Flash takes them with either backward.

    The blocks pad each of the model's lengths by no more than its share. The fastest by estimates
    are taken where the estimates know the largest tiles too, and are no tie with them. The largest
    have fewest steps of the kernel, then the longer Q block. No time is measured: that is what
    `maxattn tune` is for.

    Args:
        model: one of `MODELS`.
        target: a TPU.
    """
    largest = _largest(model, target)
    lengths = _cut_lengths(model, largest)
    known = _times(largest, model, lengths, target)
    if known is None:
        return Preset(largest)
    every = ((_times(sizes, model, lengths, target), sizes) for sizes in _estimated(model, target))
    gains = [(_gains(known, times), sizes) for times, sizes in every if times is not None]
    best, sizes = max(gains, key=lambda pair: (sum(pair[0]), str(pair[1])))
    return Preset(sizes, best) if sum(best) > 2 * (1 + TIE) else Preset(largest, (1.0, 1.0))


def _gains(known: tuple[float, float], times: tuple[float, float]) -> tuple[float, float]:
    return known[0] / times[0], known[1] / times[1]


def _largest(model: Model, target: Target) -> BlockSizes:
    found = [
        sizes
        for q, kv in _candidates(model)
        if _is_taken(sizes := _sizes(q, kv, compute_of(kv)), model, target)
    ]
    return max(found, key=lambda sizes: (sizes.block_q * sizes.block_kv, sizes.block_q))


def _candidates(model: Model) -> Iterator[tuple[int, int]]:
    most = min(LONGEST, *(length + LANES - 1 for length, _ in model.lengths))
    fine = [n for n in range(LANES, most + 1, LANES) if _pads_little(n, model)]
    yield from ((q, kv) for q in fine for kv in fine)


def _pads_little(block: int, model: Model) -> bool:
    return all(padding(length, block).share <= most for length, most in model.lengths)


def _sizes(q: int, kv: int, compute: int) -> BlockSizes:
    return BlockSizes(q, kv, compute, q, kv, compute)


def _is_taken(sizes: BlockSizes, model: Model, target: Target) -> bool:
    """Tell whether no kernel needs a change of the sizes."""
    call = _call(model, model.lengths[0][0])
    asked = {fused: replace(sizes, use_fused_bwd_kernel=fused).asked() for fused in (False, True)}
    changes = (adjust(asked[fused], call, kernel, target, True)[1] for kernel, fused in KERNELS)
    return not any(changes)


def _call(model: Model, length: int) -> Call:
    return Call(1, length, length, 1, 1, model.head_dim, "bfloat16")


# ---- by estimates --------------------------------------------------------------------------------


def _estimated(model: Model, target: Target) -> Iterator[BlockSizes]:
    """Yield sizes whose kernels have estimates, and that every kernel takes."""
    costs = shipped_costs(target.device_kind, "flash", model.head_dim, "bfloat16")
    tiles = {kind: {t for (k, _), c in costs.items() if k == kind for t in c} for kind in PARTS}
    for (q, kv, compute), dkv in product(sorted(tiles["fwd"]), sorted(tiles["dkv"])):
        pads_little = _pads_little(q, model) and _pads_little(kv, model)
        if pads_little and dkv[0] == q and kv % dkv[1] == 0:
            sizes = BlockSizes(q, kv, compute, dkv[0], dkv[1], dkv[2])
            if _is_taken(sizes, model, target):
                yield sizes


def _cut_lengths(model: Model, largest: BlockSizes) -> list[int]:
    """Return the lengths that the largest tiles cut in two or more: a single tile has no estimate,
    and none is faster.
    """
    longest = max(largest.block_q, largest.block_kv)
    return [length for length, _ in model.lengths if length > longest]


def _times(
    sizes: BlockSizes, model: Model, lengths: Sequence[int], target: Target
) -> tuple[float, float] | None:
    """Return the times of a pair of tokens in both passes, added up over some lengths."""
    forward, training = (_time(sizes, model, lengths, target, t) for t in (False, True))
    return None if not forward or not training else (forward, training)


def _time(
    sizes: BlockSizes, model: Model, lengths: Sequence[int], target: Target, training: bool
) -> float | None:
    costs = shipped_costs(target.device_kind, "flash", model.head_dim, "bfloat16")
    total = 0.0
    for length in lengths:
        call = _call(model, length)
        filled, _ = adjust(sizes.asked(), call, "flash", target, training)
        seconds = seconds_of(costs, filled, call, "flash", target)
        if seconds is None:
            return None
        total += seconds.slow / length**2
    return total


def compute_of(kv: int) -> int:
    """Choose how many keys to compute at once: 512 where it divides the block, else up to 1,024."""
    if kv % DEFAULT == 0:
        return DEFAULT
    return max(n for n in divisors(kv, LANES) if n <= LONGEST_COMPUTE)


# ---- the files -----------------------------------------------------------------------------------


def files() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every preset."""
    for kind in CHIPS:
        chip = kind.removeprefix("TPU ")
        for model in MODELS:
            yield f"{chip}_{model.name}.yml", text_of(model, kind, f"{chip}_{model.name}.yml")


def text_of(model: Model, kind: str, name: str) -> str:
    """Write one preset as a config, opening with what it needs and its command."""
    sizes, gains = preset(model, Target.named(kind))
    batch, tokens, heads = model.example
    pads = ", ".join(_pads(length, sizes) for length, _ in model.lengths)
    strategy = f"context_parallel: {model.strategy}\n" if model.strategy else ""
    keys = "".join(f"  {key}: {value}\n" for key, value in sizes.given().items())
    call = f"ma.Call({batch}, {tokens}, {tokens}, {heads}, {heads}, {model.head_dim}, 'bfloat16')"
    config = f"ma.AttentionConfig.from_yaml('configs/block_sizes/{name}')"
    planned = f"{call}, {config}, {model.mesh}, ma.Target.named('{kind}')"
    return f"""# yaml-language-server: $schema=../../maxattn/maxattn.schema.json
#
# Block sizes for {model.title}; {kind}, bfloat16.
#
# Needs    nothing to plan it; to run it, {kind}. Each of flash (either backward) and
#          tokamax_flash takes these sizes.
# Run      python -c "import maxattn as ma; print(ma.plan({planned}).explain())"
# Pads     Q and KV of {pads}
# Made by  python -m docs.building.presets configs/block_sizes
#          ({_how(gains)}; not timed on a {kind})

attention: flash                   # or tokamax_flash
{strategy}flash_block_sizes:
{keys}  use_fused_bwd_kernel: null       # true: one kernel for dQ, dK, dV, where dQ fits
"""


def _how(gains: tuple[float, float] | None) -> str:
    """Say how sizes were chosen."""
    if gains is None:
        return "the largest tiles that fit, without estimates"
    if gains == (1.0, 1.0):
        return f"the largest tiles that fit, which none beats by 3%;\n#          {how_estimated()}"
    forward, training = gains
    times = (
        f"{forward:.2f} times as fast forward as the largest that fit, {training:.2f} in training"
    )
    return f"{times};\n#          {how_estimated()}"


def _pads(length: int, sizes: BlockSizes) -> str:
    """Say how much of a length the blocks of Q and of KV pad, as `32,760: 0.05% and 1.56%`."""
    q, kv = (100 * padding(length, block).share for block in (sizes.block_q, sizes.block_kv))
    return f"{length:,}: {q:.2f}% and {kv:.2f}%"


def table() -> str:
    """Write every preset as a row of a Markdown table: tiles, and the most that they pad."""
    heads = "preset", "block_q", "block_kv", "compute", "backward kv", "pads at most", "moved"
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for kind in CHIPS:
        for model in MODELS:
            sizes, gains = preset(model, Target.named(kind))
            most = max(
                padding(n, b).share
                for n, _ in model.lengths
                for b in (sizes.block_q, sizes.block_kv)
            )
            name = f"{kind.removeprefix('TPU ')}_{model.name}"
            tiles = f"{sizes.block_q:,} | {sizes.block_kv:,} | {sizes.block_kv_compute:,}"
            backward = f"{sizes.block_kv_dkv:,} by {sizes.block_kv_dkv_compute:,}"
            moved = "not estimated" if gains is None else "{:.2f}, {:.2f}".format(*gains)
            rows.append(f"| {name} | {tiles} | {backward} | {100 * most:.2f}% | {moved} |")
    return "\n".join(rows)


def main() -> None:
    """Write every preset into the folder that is named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()

"""Block sizes that MaxDiffusion publishes, for the compiler to judge with the bare kernels.

Source: its configs and README at commit 7cfb8801 (2026-08-21). Facts only: names, sizes, files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from tests.block_sizes.asks import KEYS
from tests.block_sizes.compiler import TOPOLOGIES, Compiler
from tests.block_sizes.random_requests import Request

SHARD = 18_900  # tokens: 720p over four chips
HEAD_DIM = 128  # what shorter heads are padded to there
LIMIT = "--xla_tpu_scoped_vmem_limit_kib=65536"  # set in the README's commands for training Wan


class Preset(NamedTuple):
    """Hold one published preset.

    Args:
        where: the file that has it.
        kernel: "flash" or "tokamax_flash".
        chips: the chips it is said to be for; both where nothing is said.
        sizes: q, kv, kv_compute; q_dkv, kv_dkv, kv_dkv_compute; q_dq, kv_dq (none where fused).
        fused: whether dQ, dK and dV come from one kernel.
    """

    where: str
    kernel: str
    chips: tuple[str, ...]
    sizes: tuple[int, ...]
    fused: bool


V5P, V6E = ("TPU v5p",), ("TPU v6e",)
BOTH = V5P + V6E
THREE = 3024, 2048, 1024
PRESETS = {
    "Wan 14B": Preset("base_wan_14b.yml", "flash", BOTH, (512,) * 8, False),
    "Wan 14B, v6e": Preset("base_wan_14b.yml", "flash", V6E, (*THREE, *THREE, 3024, 2048), False),
    "Wan 720p, v6e": Preset(
        "README.md", "flash", V6E, (*THREE, 3024, 2048, 2048, 3024, 2048), False
    ),
    "Wan 14B, v5p": Preset(
        "base_wan_14b.yml", "flash", V5P, (*THREE, 1024, 3072, 256, 1024, 3072), False
    ),
    "Wan I2V 14B": Preset("base_wan_i2v_14b.yml", "flash", BOTH, (2048, 2048, 512) * 2, True),
    "Wan I2V 27B": Preset(
        "base_wan_i2v_27b.yml", "flash", BOTH, (*(1024, 1024, 256) * 2, 1024, 1024), False
    ),
    "Wan Animate": Preset(
        "base_wan_animate.yml", "flash", BOTH, (2048, 4096, 1024, *(512,) * 5), False
    ),
    "Flux dev": Preset("base_flux_dev.yml", "flash", V6E, (1536,) * 8, False),
    "Flux schnell, v6e": Preset("base_flux_schnell.yml", "flash", V6E, (2176,) * 8, False),
    "Flux 2 Klein": Preset("base_flux2klein.yml", "flash", BOTH, (4608, 1024, 1024), False),
    "LTX-2": Preset("ltx2_video.yml", "flash", BOTH, (2048, 2048, 1024, *(2048,) * 3), True),
    "SD 1.5": Preset("base15.yml", "tokamax_flash", BOTH, (2048, 2048, 1024) * 2, True),
    "Z-Image": Preset("base_zimage.yml", "tokamax_flash", BOTH, (1024, 1024, 512) * 2, True),
    "SD 2": Preset("base_2_base.yml", "flash", BOTH, (64,) * 8, False),
}

# What the messages say, cut out of them.
MESSAGES = (
    r"Scoped allocation with size \S+ and limit \S+",
    r"Used \S+ of \S+ vmem",
    r"block_q must be a multiple of \d+",
    r"\w+=\d+ should divide \w+=\d+",
    r"\w+=\d+ must be a multiple of [\w=]*\d+",
    r"divisible by 8 and 128 respectively",
    r"Only the fused bwd kernel[^.]*",
)


def rows(compilers: dict[str, Compiler], name: str) -> Iterator[str]:
    """Compile one preset on its chips, forward and training, and write a row of the page for each.

    Args:
        compilers: one at the compiler's own limit of VMEM, "", and one at the README's, `LIMIT`.
        name: of the preset.
    """
    preset = PRESETS[name]
    for kind in preset.chips:
        for training in (False, True) if len(preset.sizes) > 3 else (False,):
            case = case_of(preset, kind, training)
            says = [said(compilers[flags].compile(case, 600)) for flags in ("", LIMIT)]
            how = f"{kind.removeprefix('TPU ')} | {'training' if training else 'forward'}"
            cells = name, preset.where, preset.kernel, how, *says, changes_of(name, kind, training)
            yield f"| {' | '.join(cells)} |"


def request_of(name: str, kind: str, training: bool = True) -> Request:
    """Ask maxattn for a preset on a shard, with segment ids and a computed mask."""
    preset = PRESETS[name]
    sizes = dict(zip(KEYS, preset.sizes, strict=False))
    asked = FlashBlockSizes(**sizes, use_fused_bwd_kernel=preset.fused)
    call = Call(1, SHARD, SHARD, 2, 2, HEAD_DIM, "bfloat16")
    kernel: KernelKind = "tokamax_flash" if preset.kernel == "tokamax_flash" else "flash"
    return Request(asked, call, kernel, kind, training, "both")


def changes_of(name: str, kind: str, training: bool) -> str:
    """Say what maxattn's rules make of a preset, at the compiler's own limit of VMEM."""
    _, changes = request_of(name, kind, training).adjusted()
    return ", ".join(str(change) for change in changes) or "none"


def said(result: dict[str, Any]) -> str:
    """Say in a few words what the compiler said."""
    if result["ok"]:
        return "compiles"
    found = (re.search(pattern, result["message"]) for pattern in MESSAGES)
    return next((match.group() for match in found if match), result["message"][-200:])


def case_of(preset: Preset, kind: str, training: bool) -> dict[str, Any]:
    """Describe the compile: a shard padded to the longest block of Q and of KV, and masked."""
    sizes = dict(zip(KEYS, preset.sizes, strict=False))
    q = max(size for key, size in sizes.items() if key.startswith("block_q"))
    kv = max(size for key, size in sizes.items() if key.startswith("block_kv"))
    return {
        "topology": TOPOLOGIES[kind], "kernel": preset.kernel, "bare": True,
        "q_len": -(-SHARD // q) * q, "kv_len": -(-SHARD // kv) * kv, "heads": 2,
        "head_dim": HEAD_DIM, "dtype": "bfloat16", "mask": "padding", "training": training,
        "sizes": {**sizes, "use_fused_bwd_kernel": preset.fused},
    }  # fmt: skip

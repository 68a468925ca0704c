"""Block sizes that MaxDiffusion publishes, and maxattn's adjustments of them.

Source: its configs and README at commit 7cfb8801 (2026-08-21). Facts only: names, sizes, files.
docs/measured/tpu-published-tiles-2026-11-21.txt has the TPU compiler's verdicts on them with the
libraries' own kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from tests.block_sizes.asks import KEYS
from tests.block_sizes.random_requests import Request

SHARD = 18_900  # tokens: 720p over four chips
HEAD_DIM = 128  # what shorter heads are padded to there
LIMIT = "--xla_tpu_scoped_vmem_limit_kib=65536"  # set in the README's commands for training Wan


class Preset(NamedTuple):
    """A published preset.

    Args:
        where: the file that has it.
        kernel: "flash" or "tokamax_flash".
        chips: the chips that it is for; both if the file names none.
        sizes: q, kv, kv_compute; q_dkv, kv_dkv, kv_dkv_compute; q_dq, kv_dq (none if fused).
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


def request_of(name: str, kind: str, training: bool = True) -> Request:
    """Request a preset for a shard, with segment ids and a computed mask."""
    preset = PRESETS[name]
    sizes = dict(zip(KEYS, preset.sizes, strict=False))
    asked = FlashBlockSizes(**sizes, use_fused_bwd_kernel=preset.fused)
    call = Call(1, SHARD, SHARD, 2, 2, HEAD_DIM, "bfloat16")
    kernel: KernelKind = "tokamax_flash" if preset.kernel == "tokamax_flash" else "flash"
    return Request(asked, call, kernel, kind, training, "both")


def changes_of(name: str, kind: str, training: bool) -> str:
    """Format maxattn's changes of a preset, at the compiler's own limit of VMEM."""
    _, changes = request_of(name, kind, training).adjusted()
    return ", ".join(str(change) for change in changes) or "none"

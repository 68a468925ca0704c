"""Random requests for the compiler: any sizes, lengths, head dims, kernels and chips, by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxattn.block_sizes import BlockSizes, Change, adjust
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call, Role
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from tests.block_sizes.asks import KEYS
from tests.block_sizes.compiler import TOPOLOGIES

HEAD_DIMS = (40, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256)
LENGTHS = (1024, 4096, 4608, 8190, 18_900, 32_760, 75_600)
TEXTS = (1, 77, 226, 257, 300, 333, 512, 600, 769, 1000, 1300)
PRESETS = (128, 256, 512, 512, 1000, 1024, 1024, 1536, 2048, 2048, 3024, 4096)


@dataclass(frozen=True)
class Request:
    """One request, and the mask that the compiler gets beside it."""

    asked: FlashBlockSizes
    call: Call
    kernel: KernelKind
    kind: str
    training: bool
    mask: str

    def adjusted(self) -> tuple[BlockSizes, tuple[Change, ...]]:
        """Return the sizes after maxattn's rules, and the changes."""
        return adjust(self.asked, self.call, self.kernel, Target.named(self.kind), self.training)

    def case(self, sizes: BlockSizes | None = None) -> dict[str, Any]:
        """Describe a compile of these sizes, by default the adjusted ones.

        The call has two blocks of each kind, the last one ragged, if its lengths allow that. From
        five KV
        blocks on, as in all long sequences, tokamax stores the parts of dQ in float32.
        """
        sizes = sizes or self.adjusted()[0]
        kv_blocks = 5 if self.kernel == "tokamax_flash" and self.training else 2
        t = min(self.call.q_len, 2 * sizes.block_q - 8)
        most = max(kv_blocks * (sizes.block_kv_dkv or 0), 2 * sizes.block_kv) - 8
        call, s = self.call, min(self.call.kv_len, most)
        return {
            "topology": TOPOLOGIES[self.kind], "kind": self.kind, "kernel": self.kernel, "batch": 1,
            "q_len": t, "kv_len": s, "heads": 2, "head_dim": call.head_dim, "dtype": call.dtype,
            "role": call.role, "mask": self.mask, "training": self.training,
            "sizes": sizes.given(),
        }  # fmt: skip


def requests(seed: str, count: int) -> Iterator[Request]:
    """Draw requests; chips, flash fused, flash separate and tokamax_flash take turns."""
    draw = random.Random(seed)
    for i in range(count):
        kind = tuple(TOPOLOGIES)[(i // 3) % len(TOPOLOGIES)]
        yield _request(draw, ("fused", "separate", "tokamax")[i % 3], kind)


def _request(draw: random.Random, how: str, kind: str) -> Request:
    cross = draw.random() < 0.3
    q_len = draw.choice(LENGTHS)
    kv_len = draw.choice(TEXTS) if cross else q_len
    role: Role = "cross" if cross else "self"
    dtype = draw.choice(("bfloat16", "bfloat16", "bfloat16", "float32"))
    call = Call(1, q_len, kv_len, 2, 2, draw.choice(HEAD_DIMS), dtype, role=role)
    kernel: KernelKind = "tokamax_flash" if how == "tokamax" else "flash"
    mask = draw.choice(("full", "padding", "both"))
    return Request(_sizes(draw, how), call, kernel, kind, draw.random() < 0.6, mask)


def _sizes(draw: random.Random, how: str) -> FlashBlockSizes:
    """Draw one size for all, the sizes of a preset, or any sizes."""
    fused = {"fused": True, "separate": False, "tokamax": draw.choice((None, True, False))}[how]
    style = draw.random()
    if style < 0.2:
        sizes = dict.fromkeys(KEYS, draw.choice(PRESETS))
    elif style < 0.7:
        sizes = {key: draw.choice((None, *PRESETS)) for key in KEYS}
    else:
        sizes = {
            key: draw.choice((None, draw.randint(1, 5000), 128 * draw.randint(1, 40)))
            for key in KEYS
        }
    return FlashBlockSizes(**sizes, use_fused_bwd_kernel=fused)

"""The compile matrix: every chip, kernel and model at full length, for configs without sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from tests.block_sizes.compiler import TOPOLOGIES, Compiler

# The overrides that name each kernel.
KERNELS = {
    "flash fused": ("flash", ["flash_block_sizes.use_fused_bwd_kernel=true"]),
    "flash separate": ("flash", ["flash_block_sizes.use_fused_bwd_kernel=false"]),
    "tokamax_flash": ("tokamax_flash", []),
    "tpu_flash": ("tpu_flash", []),
}
FOUR_CHIPS = {"context": 4}


class Shape(NamedTuple):
    """The lengths, heads and mask of a call."""

    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    mask: str = "full"


# Texts are padded to their longest prompt, so cross-attention hides padding; 257 + 512 are image
# and text tokens.
SHAPES = {
    "Wan 1.3B 480p": Shape(32_760, 32_760, 12, 128),
    "Wan 1.3B 720p": Shape(75_600, 75_600, 12, 128),
    "Wan 14B 480p": Shape(32_760, 32_760, 40, 128),
    "Wan 14B 720p": Shape(75_600, 75_600, 40, 128),
    "Wan 14B 720p, an eighth of it": Shape(9450, 9450, 40, 128),
    "Wan cross 512, 480p": Shape(32_760, 512, 12, 128, "padding"),
    "Wan cross 512, 720p": Shape(75_600, 512, 40, 128, "padding"),
    "Wan cross 257+512, 480p": Shape(32_760, 769, 40, 128, "padding"),
    "Wan cross 257+512, 720p": Shape(75_600, 769, 40, 128, "padding"),
    "SDXL 64x64": Shape(4096, 4096, 10, 64),
    "SDXL 32x32": Shape(1024, 1024, 20, 64),
    "SDXL cross 77": Shape(4096, 77, 10, 64, "padding"),
    "Flux 1024x1024": Shape(4608, 4608, 24, 128),
    "block window 1560 x 7": Shape(32_760, 32_760, 12, 128, "blocks"),
}


def cases(only: Any = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, case) for every chip, kernel, shape and pass; `only` filters names."""
    for kind, topology in TOPOLOGIES.items():
        for kernel, (name, settings) in KERNELS.items():
            for title, shape in SHAPES.items():
                for training in (False, True):
                    full = f"{kind}, {kernel}, {title}, {'training' if training else 'forward'}"
                    if only is None or only(full):
                        yield full, _case(kind, topology, name, settings, shape, training)


def cross_cases(
    kind: str, kernel: str, lengths: tuple[int, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, case) for both passes with 4,096 queries and texts of many lengths."""
    name, settings = KERNELS[kernel]
    for length, training in product(lengths, (False, True)):
        shape = Shape(4096, length, 10, 64, "padding")
        case = _case(kind, TOPOLOGIES[kind], name, settings, shape, training)
        yield f"{kind}, {kernel}, {length} keys, {'training' if training else 'forward'}", case


def _case(
    kind: str, topology: str, kernel: str, settings: list[str], shape: Shape, training: bool
) -> dict[str, Any]:
    overrides = [f"attention={kernel}", f"cross_attention={kernel}", *settings]
    role = "self" if shape.q_len == shape.kv_len else "cross"
    return {
        "topology": topology, "kind": kind, "kernel": kernel, "batch": 1, "dtype": "bfloat16",
        **shape._asdict(), "role": role, "training": training, "config": overrides,
    }  # fmt: skip


def judge(compiler: Compiler, case: dict[str, Any]) -> dict[str, Any]:
    """Compile a case on one chip; if it does not fit into HBM, compile it in a ring of four.

    If that does not fit either, use the longer block of keys that `maxattn check` suggests.
    """
    result = compiler.compile(case)
    if result["ok"] or not out_of_hbm(result["message"]):
        return {**result, "chips": 1}
    four = {**case, "mesh": FOUR_CHIPS, "config": [*case["config"], "context_parallel=ring"]}
    if case["role"] == "cross":  # its keys are whole on every chip: no ring
        four["config"] = case["config"]
    found = {**compiler.compile(four), "chips": 4, "one_chip": result["message"]}
    if found["ok"] or not out_of_hbm(found["message"]) or case["kernel"] != "tokamax_flash":
        return found
    longer = {**four, "config": [*four["config"], "flash_block_sizes.block_kv_dkv=2048"]}
    return {**found, **compiler.compile(longer)}


def out_of_hbm(message: str) -> bool:
    """Check whether the compiler failed for lack of HBM, and not of a kernel's memory."""
    return "memory space hbm" in message or "out of memory on HBM" in message

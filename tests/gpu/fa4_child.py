"""Compile FlashAttention-4's kernels for an absent GPU, as maxattn calls them.

Needs fa4-jax, and no GPU or driver. Usage: `CUTE_DSL_ARCH=sm_103a python -m tests.gpu.fa4_child
[CASE ...]`. Prints one JSON line per case: its name, the compiler's error message ("" on success)
and the seconds, or the rule by which maxattn refuses it. A case compiles forward and backward.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from typing import Any, NamedTuple

import cutlass.utils
import fa4_jax.kernels
import jax
import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.flash import Flash
from maxattn.kernels.kv_block import KeyRange, pack

ARCH = int(re.sub(r"\D", "", os.environ["CUTE_DSL_ARCH"]))
CAPABILITY = f"{ARCH // 10}.{ARCH % 10}"
LENGTH = 512
KIND = "NVIDIA H200" if ARCH == 90 else "NVIDIA X"
TARGET = ma.Target("gpu", KIND, (("fa4-jax", "0.1.0"),), capability=CAPABILITY)
LONG = np.zeros((2, 3000), np.int32)
IDS, FULL = np.zeros((2, LENGTH), np.int32), M.Full()


class Hardware:
    """A stand-in for the driver, which the kernels ask how many thread blocks run at once."""

    def __init__(self, *_: Any) -> None: ...

    def get_device_multiprocessor_count(self) -> int:
        return 148

    def get_max_active_clusters(self, cluster: int) -> int:
        return 148 // cluster


class CompileCase(NamedTuple):
    """One call to compile, with two batch rows and four query heads."""

    mask: M.Mask = FULL
    head_dim: int = 64
    kv_heads: int = 4
    keys: int = LENGTH
    bias: tuple[str, tuple[int, int, int, int]] | None = None
    queries: int = LENGTH

    @property
    def call(self) -> ma.Call:
        """Return the structure of the call."""
        sizes = 2, self.queries, self.keys, 4, self.kv_heads, self.head_dim
        dtype, shape = self.bias or ("", None)
        return ma.Call(*sizes, "bfloat16", self.bound, shape, bias_dtype=dtype)

    @property
    def bound(self) -> M.Mask:
        """Return the mask with its arrays."""
        return self.mask.bind(self.queries, self.keys)


CASES = {
    "full": CompileCase(),
    "causal": CompileCase(M.Causal(), 128),
    "window": CompileCase(M.LocalWindow(64, 32)),
    "lengths": CompileCase(M.KeyPadding(np.array([200, 500])), 128),
    "lengths, shared heads": CompileCase(M.KeyPadding(np.array([200, 500])), 128, 2),
    "lengths, head dim 256": CompileCase(M.KeyPadding(np.array([200, 500])), 256),
    "segments": CompileCase(M.Segments(IDS, IDS)),
    "shared segments": CompileCase(M.Segments(IDS[:1], IDS[:1]), 128),
    "causal & segments, shared heads": CompileCase(M.Causal() & M.Segments(IDS, IDS), 128, 2),
    "causal & lengths": CompileCase(M.Causal() & M.KeyPadding(np.array([200, 500])), 128),
    "window & flags": CompileCase(M.LocalWindow(64, 32) & M.KeyPadding(IDS == 0)),
    "segments, head dim 256": CompileCase(M.Segments(IDS, IDS), 256),
    "block window": CompileCase(M.BlockSlidingWindow(64, 2), 128),
    "teacher forcing": CompileCase(M.TeacherForcing(8, 32, 2, 3, 1), 128),
    "shared heads": CompileCase(head_dim=128, kv_heads=2),
    "head dim 40": CompileCase(head_dim=40),
    "head dim 72, block causal": CompileCase(M.BlockCausal(64), 72),
    "head dim 80": CompileCase(head_dim=80),
    "head dim 96": CompileCase(head_dim=96),
    "head dim 144, window": CompileCase(M.LocalWindow(64, 32), 144),
    "head dim 160": CompileCase(head_dim=160),
    "head dim 160, causal, shared heads": CompileCase(M.Causal(), 160, 2),
    "head dim 160, segments": CompileCase(M.Segments(IDS, IDS), 160),
    "head dim 192": CompileCase(head_dim=192),
    "head dim 224, lengths": CompileCase(M.KeyPadding(np.array([200, 500])), 224),
    "head dim 256": CompileCase(head_dim=256),
    "known segments": CompileCase(M.Segments.of_lengths((100, 37, 250, 125)), 128),
    "many segments": CompileCase(M.Segments(LONG, LONG), 128, 4, 3000, queries=3000),
    "uneven known segments": CompileCase(
        M.Segments.of_lengths((1000, 1000, 1000, 900, 100)), 160, 4, 4000, queries=4000
    ),
    "uneven block window": CompileCase(M.BlockSlidingWindow(500, 2), 128, 4, 4000, queries=4000),
    "one tile of keys": CompileCase(head_dim=128, keys=77, queries=3000),
    "one tile of keys, head dim 40": CompileCase(head_dim=40, keys=128),
    "one tile of keys, head dim 72, lengths": CompileCase(
        M.KeyPadding(np.array([20, 0])), 72, keys=100, queries=3000
    ),
    "one tile of keys, head dim 160": CompileCase(head_dim=160, keys=77, queries=3000),
    "one tile of keys, few queries": CompileCase(head_dim=64, keys=77, queries=60),
    "few keys": CompileCase(head_dim=128, keys=300, queries=3000),
    "few keys, head dim 72": CompileCase(head_dim=72, keys=700, queries=5000),
    "few keys, head dim 160": CompileCase(head_dim=160, keys=300, queries=3000),
    "few keys, head dim 224": CompileCase(head_dim=224, keys=300, queries=3000),
    "few keys, the last split": CompileCase(head_dim=64, keys=3000, queries=5000),
    "long segments": CompileCase(M.Segments(LONG, LONG), 96, 4, 3000, queries=3000),
    "long lengths": CompileCase(M.KeyPadding(np.array([200, 0])), 128, queries=3000),
    "few queries, head dim 128": CompileCase(head_dim=128, queries=128),
    "short rows, window": CompileCase(M.LocalWindow(60, 0), 128, 2, 3000, queries=3000),
    "head dim 256, block window": CompileCase(M.BlockSlidingWindow(64, 2), 256),
    "ring": CompileCase(head_dim=128),
    "long keys": CompileCase(kv_heads=2, keys=9000),
    "long keys, lengths": CompileCase(M.KeyPadding(np.array([200, 9000])), 128, keys=9000),
    "few queries, window": CompileCase(M.LocalWindow(6000, 9), 128, 2, 9000),
    "few queries, block window": CompileCase(M.BlockSlidingWindow(512, 12), 64, keys=9000),
    "few queries, head dim 256": CompileCase(M.LocalWindow(6000, 9), 256, keys=9000),
    "few keys, causal": CompileCase(M.Causal(0), 128, keys=77),
    "few keys, causal, shared heads": CompileCase(M.Causal(0), 128, 2, 77),
    "few keys, window": CompileCase(M.LocalWindow(2000, 9, offset=0), 64, keys=200, queries=3000),
    "few keys, block causal": CompileCase(
        M.BlockCausal(390, offset=0), 128, keys=300, queries=3000
    ),
    "few keys, segments": CompileCase(M.Segments(LONG, LONG[:, :300]), 128, 4, 300, queries=3000),
    "few keys, shared segments": CompileCase(
        M.Segments(LONG[:1], LONG[:1, :300]), 128, 2, 300, queries=3000
    ),
    "few keys, head dim 256": CompileCase(M.Causal(0), 256, keys=77, queries=3000),
    "bias": CompileCase(bias=("float32", (2, 4, LENGTH, LENGTH))),
    "bias, causal": CompileCase(M.Causal(), 128, 2, bias=("bfloat16", (1, 4, LENGTH, LENGTH))),
    "bias of keys": CompileCase(head_dim=80, bias=("float32", (2, 1, 1, LENGTH))),
}


def both_passes(asked: CompileCase, is_ring: bool) -> Any:
    """Return a function of (q, k, v, out, lse, dout) that launches all kernels of a call."""
    kernel = Flash.build(asked.call, ma.AttentionConfig(), TARGET).without_dbias()
    dtype, shape = asked.bias or ("", None)
    bias = None if shape is None else jnp.zeros(shape, dtype)

    def run(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        inputs, rows = Inputs(q, k, v, bias, asked.bound), Rows(out, lse, dout, jnp.zeros_like(lse))
        forward = kernel.forward(inputs)
        if not is_ring:
            return forward, kernel.backward(inputs, rows)
        sums = kernel.accumulator(inputs, rows)
        keys = pack(k, v)
        grads = sums.add(keys, KeyRange(0, LENGTH // 2))
        return forward, sums.add(keys, KeyRange(LENGTH // 2), grads), sums.dq()

    return run


def compiled(name: str) -> dict[str, Any]:
    """Compile a case, or return why maxattn refuses it."""
    asked, start = CASES[name], time.time()
    q = jax.ShapeDtypeStruct((2, asked.queries, 4, asked.head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, asked.keys, asked.kv_heads, asked.head_dim), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((2, 4, asked.queries), jnp.float32)
    try:
        traced = jax.jit(both_passes(asked, name == "ring")).trace(q, k, k, q, lse, q)
        traced.lower(lowering_platforms=("cuda",))
        message = ""
    except Exception as error:  # any, of a compiler
        message = f"{type(error).__name__}: {error}"[-600:]
    return {"case": name, "message": message, "seconds": round(time.time() - start, 1)}


def main(names: list[str]) -> None:
    """Compile the named cases, by default all that maxattn does not refuse."""
    cutlass.utils.HardwareInfo = Hardware  # type: ignore
    fa4_jax.kernels._device_arch = lambda: ARCH
    for name in names or CASES:
        reason = Flash.supports(CASES[name].call, TARGET)
        result = compiled(name) if reason is None else {"case": name, "refused": reason.rule}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

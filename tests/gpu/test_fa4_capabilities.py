"""The limits of `flash` on each GPU equal those that fa4-jax itself checks; no GPU is needed.

fa4-jax answers for any compute capability. It needs Python 3.12; without it these tests are
skipped, and `capabilities.py` is the only source of the limits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4.tiles import kernel_width
from maxattn.kernels.flash import fa4_of

HEAD_DIMS = (8, 16, 40, 48, 64, 72, 80, 96, 100, 128, 136, 160, 192, 224, 256, 264, 512)
CAPABILITIES = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
LENGTH = 512
PLAIN = ma.Call(1, LENGTH, LENGTH, 8, 8, 64, "bfloat16")
MASKS = {"full": M.Full(), "causal": M.Causal(), "window": M.LocalWindow(64, 32)}


@cache
def library() -> Any:
    return pytest.importorskip("fa4_jax.kernels", reason="fa4-jax is not installed")


def target_of(capability: str) -> ma.Target:
    return ma.Target("gpu", "NVIDIA X", (("fa4-jax", "0.1.0"),), capability=capability)


def config_of(mask: str) -> Any:
    window = {"full": (None, None), "causal": (None, 0), "window": (64, 32)}[mask]
    kind = library().AttnConfig
    return kind(mask == "causal", mask == "window", window, 1.0, None, "cute", False, False)


def asks(capability: str, call: ma.Call, mask: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ask fa4-jax about both passes in the shapes that maxattn passes; "" if it accepts both."""
    kernels, major_minor = library(), capability.split(".")
    monkeypatch.setattr(
        kernels, "_device_arch", lambda: 10 * int(major_minor[0]) + int(major_minor[1])
    )
    width = -(-call.head_dim // 8) * 8
    shape = jax.ShapeDtypeStruct
    q = shape((1, LENGTH, call.heads, width), call.dtype)
    k = shape((1, LENGTH, call.kv_heads, width), call.dtype)
    try:
        kernels._validate(config_of(mask), "fwd", q, k, k)
        q, k = (shape((*x.shape[:3], kernel_width(x.shape[3])), x.dtype) for x in (q, k))
        kernels._validate(config_of(mask), "bwd", q, k, k)
    except (ValueError, NotImplementedError) as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_head_dims_masks_and_shared_heads(capability: str, dtype: str, monkeypatch) -> None:
    target, wrong = target_of(capability), []
    for head_dim, kv_heads, mask in product(HEAD_DIMS, (8, 2), MASKS):
        sizes: dict[str, Any] = {"head_dim": head_dim, "kv_heads": kv_heads, "dtype": dtype}
        call = replace(PLAIN, **sizes, scale=0.0, mask=MASKS[mask].bind(LENGTH, LENGTH))
        theirs = asks(capability, call, mask, monkeypatch)
        ours = fa4_of(target).supports(call, target)
        # The largest head dim that its own page promises is 256, also where a tile would fit.
        if bool(theirs or head_dim > 256) != (ours is not None):
            wrong.append((head_dim, kv_heads, mask, theirs, ours))
    assert not wrong


@pytest.mark.parametrize("capability", [c for c in CAPABILITIES if c not in ("7.5", "9.0", "11.0")])
def test_the_kernels_of_what_is_taken_can_be_made(capability: str, monkeypatch: pytest.MonkeyPatch):
    """The kernels' own assertions pass too; those of the Hopper forward need a GPU."""
    kernels, target = library(), target_of(capability)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    arch = kernels._device_arch()
    for head_dim, group, mask in product(HEAD_DIMS, (1, 4), MASKS):
        call = replace(PLAIN, head_dim=head_dim, scale=0.0)
        if fa4_of(target).supports(call, target) is None:
            width = -(-head_dim // 8) * 8
            for kind, size in (("fwd", width), ("bwd", kernel_width(width))):
                dtype = kernels._DTYPES[jnp.dtype("bfloat16")]
                kernels._get_static(config_of(mask), dtype, size, size, group, arch, kind)


# ---- what fa4-jax does not check, and maxattn refuses or computes alike on every GPU -------------

IDS = np.zeros((1, LENGTH), np.int32)
FEATURES = {
    "lengths": replace(PLAIN, mask=M.KeyPadding(np.array([300]))),
    "segments": replace(PLAIN, mask=M.Segments(IDS, IDS)),
    "block window": replace(PLAIN, mask=M.BlockSlidingWindow(64, 2).bind(LENGTH, LENGTH)),
    "bias": replace(PLAIN, bias=(1, 8, LENGTH, LENGTH)),
    "table of pairs": replace(PLAIN, mask=M.Dense(np.ones((LENGTH, LENGTH), bool))),
}
REFUSED, ON_HOPPER = {"table of pairs"}, {"bias"}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_features(capability: str, feature: str) -> None:
    has_kernels = capability not in ("7.5", "11.0")
    target = target_of(capability)
    reason = fa4_of(target).supports(FEATURES[feature], target)
    hopper = capability == "9.0" or feature not in ON_HOPPER
    assert (reason is None) == (has_kernels and feature not in REFUSED and hopper)

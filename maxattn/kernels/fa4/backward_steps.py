"""FlashAttention-4's backward, launch by launch.

    first    delta = rowsum(dout * out), the LSE in base 2, dQ = 0 in float32
    block    dQ += dS K in place, dK, dV
    last     dQ, scaled, in q's dtype

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import KeyRange
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.kernel_calls import (
    BackwardOperands,
    BlockOperands,
    run_block,
    run_splits,
)
from maxattn.kernels.fa4.launch import split_launch
from maxattn.kernels.fa4.tile_sizes import Dims, kernel_width, sums_width

LAUNCHES = (
    "_fa4_bwd_pre",
    "_fa4_bwd",
    "_fa4_bwd_gqa",
    "_fa4_bwd_post",
    "_fa4_bwd_post_dk",
    "_fa4_bwd_post_dv",
    "_get_bwd_pre",
    "_get_static",
    "_aux_static",
    "_bwd_plan",
    "_validate",
)
HEAD_LIMIT = 128  # beyond it heads are padded where the GPU is none of Hopper: primitives.py
HOPPER_LIMIT = 256


def of_shape(queries: Dims, keys: Dims, head_limit: int = HEAD_LIMIT) -> bool:
    """Tell whether these launches fit: one key head for each query head, 8 | H up to a limit."""
    return queries[2] == keys[2] and queries[3] % 8 == 0 and queries[3] <= head_limit


def library_has_launches() -> bool:
    """Tell whether fa4-jax has the functions that make each launch by itself."""
    return all(hasattr(library(), name) for name in LAUNCHES)


class Launches:
    """Make the launches.

    Args:
        scale: multiplies the scores.
        q, k: what they are for, whose shapes and dtypes alone count.
        config: fa4-jax's, of the window and the test of pairs; None for all pairs.
    """

    def __init__(self, scale: float, q: Array, k: Array, config: Any = None) -> None:
        fa4 = library()
        self._scale = float(scale)
        self._call = import_module("cutejax").call
        config = _config(self._scale) if config is None else config
        dtype, head_dim, _, group, arch = fa4._validate(config, "bwd", q, k, k)
        width = kernel_width(head_dim)
        window = config.causal, config.local
        plan = fa4._bwd_plan(dtype, width, width, group, *window, arch)
        tile = plan.tile_m
        self._made: Any = fa4._get_static(config, dtype, width, width, group, arch, "bwd")
        before = fa4._get_bwd_pre(dtype, width, head_dim, tile)
        self._before = fa4._aux_static("pre", before, self._made["scale"])
        b, t, n, _ = q.shape
        rows = -(-t // tile) * tile
        self._keys = plan.tile_n
        self._stats = jax.ShapeDtypeStruct((b, n, rows), jnp.float32)
        self._dq = jax.ShapeDtypeStruct((b, n, rows * sums_width(head_dim)), jnp.float32)

    def first(self, out: Array, dout: Array, lse: Array) -> Any:
        """Return delta, the LSE in base 2, and zeros to add dQ to."""
        fa4 = library()
        return self._call(
            fa4._fa4_bwd_pre,
            [self._stats, self._stats, self._dq],
            self._before,
            *(out, dout, lse),
            in_specs=[fa4._QKV_SPEC, fa4._QKV_SPEC, fa4._LSE_SPEC],
            out_specs=fa4._F32_SPEC,
            name="fa4_bwd_pre",
        )

    def block(self, given: BlockOperands, key_range: KeyRange) -> Any:
        """Return dQ with the share of a part of a block, and the block's gradients."""
        heads, floats = library()._QKV_SPEC, library()._F32_SPEC
        packed = import_module("cutejax").ArraySpec(static_dims=(3, 4))
        keys = given.keys
        return self._call(
            run_block,
            [self._dq, jax.ShapeDtypeStruct(keys.shape, keys.dtype)],
            self._made,
            key_range,
            given,
            in_specs=[heads, packed, heads] + [floats] * 3 + [packed] * len(given.before),
            out_specs=[floats, packed],
            input_output_aliases={5: 0} | ({6: 1} if given.before else {}),
            name="maxattn_backward_block",
        )

    def split(self, given: BackwardOperands, start: int, splits: int) -> list[Array]:
        """Split the backward of the keys from `start` on over the queries.

        Returns:
            dQ; dK and dV before key `start`, if any; and those from there on, a batch for each
            split.
        """
        heads, floats, q = library()._QKV_SPEC, library()._F32_SPEC, given.q
        grads = grads_of(given.k, start, splits)
        launch = split_launch(str(q.dtype), q.shape[3], self._scale, q.shape[0], splits)
        return self._call(
            run_splits,
            [self._dq, *grads],
            self._made,
            launch,
            given,
            in_specs=[heads] * 4 + [floats] * 3,
            out_specs=[floats] + [heads] * len(grads),
            input_output_aliases={6: 0},
            name="maxattn_backward_splits",
        )

    def last(self, dq: Array, q: Array) -> Array:
        """Return dQ, scaled, in q's dtype."""
        made = library()._aux_static("post", self._made["post"], self._made["scale"])
        return of_sums(library()._fa4_bwd_post, made, dq, q)


def of_sums(run: Callable[..., None], made: Any, sums: Array, like: Array) -> Array:
    """Return float32 sums in the shape and dtype of `like`.

    Args:
        run: the library's function of such a launch.
        made: what it launches.
        sums: of a backward.
        like: the array whose gradient they are.
    """
    lib, name = library(), run.__name__.strip("_")
    out = jax.ShapeDtypeStruct(like.shape, like.dtype)
    specs = {"in_specs": [lib._F32_SPEC], "out_specs": lib._QKV_SPEC, "vmap_method": "sequential"}
    return import_module("cutejax").call(run, out, made, sums, **specs, name=name)


def zeros_of_keys(k: Array, tile_keys: int) -> Array:
    """Return float32 zeros to add dK or dV to, in whole tiles of so many keys."""
    b, s, heads, h = k.shape
    padded = -(-s // tile_keys) * tile_keys
    return jnp.zeros((b, heads, padded * sums_width(h)), jnp.float32)


def summed_splits(splits: Array, batch: int) -> Array:
    """Sum over splits, which stand before the batch."""
    each = splits.reshape(-1, batch, *splits.shape[1:])
    return each.astype(jnp.float32).sum(0).astype(splits.dtype)


def _config(scale: float) -> Any:
    """Return fa4-jax's configuration of a call over all pairs."""
    settings = import_module("fa4_jax.attention").AttnConfig
    return settings(False, False, (None, None), scale, None, "cute", False, False)


def grads_of(k: Array, start: int, splits: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of dK and dV before key `start`, if any, and of those of the splits."""
    batch, length, *rest = k.shape
    whole = [jax.ShapeDtypeStruct(k.shape, k.dtype)] * (2 if start else 0)
    split = jax.ShapeDtypeStruct((splits * batch, length - start, *rest), k.dtype)
    return [*whole, split, split]

"""FlashAttention-4's backward launch by launch, as fa4-jax makes them one after the other.

    first    delta = rowsum(dout * out), the LSE in base 2, dQ = 0 in float32
    block    dQ += dS K in place, dK, dV
    last     dQ, scaled, in q's dtype

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.0.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.fa4.launch import library, parts_launch, run_block, run_rounds
from maxattn.kernels.kv_block import Cut, Packed

LAUNCHES = (
    "_fa4_bwd_pre",
    "_fa4_bwd",
    "_fa4_bwd_post",
    "_get_static",
    "_aux_static",
    "_bwd_plan",
    "_validate",
)
HEAD_LIMIT = 128  # beyond it heads are padded: primitives.py


def of_shape(queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
    """Tell whether the launches are these three: one key head for each query head, 8 | H up to
    128.
    """
    return queries[2] == keys[2] and queries[3] % 8 == 0 and queries[3] <= HEAD_LIMIT


def made_apart() -> bool:
    """Tell whether the launches are where they are looked for."""
    return all(hasattr(library(), name) for name in LAUNCHES)


class Launches:
    """Make the launches.

    Args:
        scale: multiplies the scores.
        q, k: what they are for, whose shapes and dtypes alone count.
    """

    def __init__(self, scale: float, q: Array, k: Array) -> None:
        fa4 = library()
        self._scale = float(scale)
        self._call = import_module("cutejax").call
        config = import_module("fa4_jax.attention").AttnConfig(
            False, False, (None, None), float(scale), None, "cute", False, False
        )
        dtype, head_dim, _, ratio, arch = fa4._validate(config, "bwd", q, k, k)
        tile = fa4._bwd_plan(dtype, head_dim, head_dim, ratio, False, False, arch).tile_m
        self._made: Any = fa4._get_static(config, dtype, head_dim, head_dim, ratio, arch, "bwd")
        b, t, n, _ = q.shape
        rows, width = -(-t // tile) * tile, -(-head_dim // 32) * 32
        self._stats = jax.ShapeDtypeStruct((b, n, rows), jnp.float32)
        self._dq = jax.ShapeDtypeStruct((b, n, rows * width), jnp.float32)

    def first(self, out: Array, dout: Array, lse: Array) -> Any:
        fa4 = library()
        return self._call(
            fa4._fa4_bwd_pre,
            [self._stats, self._stats, self._dq],
            fa4._aux_static("pre", self._made["pre"], self._made["scale"]),
            out,
            dout,
            lse,
            in_specs=[fa4._QKV_SPEC, fa4._QKV_SPEC, fa4._LSE_SPEC],
            out_specs=fa4._F32_SPEC,
            name="fa4_bwd_pre",
        )

    def block(
        self,
        q: Array,
        keys: Packed,
        dout: Array,
        lse: Array,
        delta: Array,
        dq: Array,
        cut: Cut,
        grads: Packed | None,
    ) -> Any:
        fa4 = library()
        heads, floats, packed = (
            fa4._QKV_SPEC,
            fa4._F32_SPEC,
            import_module("cutejax").ArraySpec(static_dims=(3, 4)),
        )
        before = () if grads is None else (grads,)
        return self._call(
            run_block,
            [self._dq, jax.ShapeDtypeStruct(keys.shape, keys.dtype)],
            self._made,
            cut,
            q,
            keys,
            dout,
            lse,
            delta,
            dq,
            before,
            in_specs=[heads, packed, heads] + [floats] * 3 + [packed] * len(before),
            out_specs=[floats, packed],
            input_output_aliases={5: 0} | ({6: 1} if before else {}),
            name="maxattn_backward_block",
        )

    def rounds(
        self,
        q: Array,
        k: Array,
        v: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        dq: Array,
        start: int,
        parts: int,
    ) -> list[Array]:
        """Return dQ; dK and dV before key `start`, if any; and those from there on, a batch for
        each part.
        """
        fa4 = library()
        heads, floats = fa4._QKV_SPEC, fa4._F32_SPEC
        batch, length, *rest = k.shape
        whole = [k, v] if start else []
        shapes = [(x.shape, x.dtype) for x in whole] + [
            ((parts * batch, length - start, *rest), k.dtype)
        ] * 2
        results = [self._dq, *(jax.ShapeDtypeStruct(*each) for each in shapes)]
        in_parts = parts_launch(str(q.dtype), q.shape[3], self._scale, batch, parts)
        return self._call(
            run_rounds,
            results,
            self._made,
            in_parts,
            q,
            k,
            v,
            dout,
            lse,
            delta,
            dq,
            in_specs=[heads] * 4 + [floats] * 3,
            out_specs=[floats] + [heads] * len(shapes),
            input_output_aliases={6: 0},
            name="maxattn_backward_rounds",
        )

    def last(self, dq: Array, q: Array) -> Array:
        fa4 = library()
        made = fa4._aux_static("post", self._made["post"], self._made["scale"])
        return self._call(
            fa4._fa4_bwd_post,
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            made,
            dq,
            in_specs=[fa4._F32_SPEC],
            out_specs=fa4._QKV_SPEC,
            name="fa4_bwd_post",
        )

"""Several projections in one go.

`norm_rotary_joint` writes queries or keys of sequences that attend together where the joint one
has them; `norm_rotary_pair` takes queries and keys in one launch.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.modules.norm_rope import cute
from maxattn.modules.norm_rope.fused import Tables, Vectors, Work, on_shard, table_of, vectors_of
from maxattn.modules.norm_rope.path import NormRopePath
from maxattn.modules.norm_rope.row import NormRopeRow
from maxattn.modules.qk_norm import QKNorm
from maxattn.rope import Rotary

Both = tuple[Float[Array, "B T N H"], Float[Array, "B T N H"]]
Operands = tuple[Float[Array, "B T N H"], Vectors, Tables]


class Sequence(NamedTuple):
    """Hold a sequence's projection, and what is done to it; as for `norm_rotary`."""

    row: NormRopeRow
    x: Float[Array, "B T NH"]
    bias: Float[Array, " NH"] | None
    norm: QKNorm | None
    rotary: Rotary | None

    @property
    def operands(self) -> Operands:
        """Return the heads, bias and scale, and the angles."""
        b, t, _ = self.x.shape
        vectors = vectors_of(self.row, self.bias, self.norm, summed=False)
        angles = () if self.rotary is None else (self.rotary.cos, self.rotary.sin)
        heads = jnp.reshape(self.x, (b, t, self.row.heads, self.row.head_dim))
        return heads, vectors, tuple(table_of(a, t) for a in angles)


def can_join(paths: list[NormRopePath], mesh: Any) -> bool:
    """Tell whether sequences are written where they belong: by CuTe's kernels, on one device.

    Args:
        paths: of the sequences.
        mesh: the module's.
    """
    alone = all(n == 1 for _, n in sharding.mesh_shape(mesh))
    return alone and all(path.name == "cute" for path in paths)


def norm_rotary_joint(sequences: list[Sequence]) -> Float[Array, "B L N H"]:
    """Add biases, norm and rotate sequences, one behind the other.

    Args:
        sequences: in order.
    """
    rows = tuple(each.row for each in sequences)
    return _joint(rows, tuple(each.operands for each in sequences))


def norm_rotary_pair(queries: Sequence, keys: Sequence) -> Both | None:
    """Add biases, norm and rotate queries and keys, in one launch.

    Args:
        queries, keys: of the same tokens.

    Returns:
        Both; None where they are rows of other kinds, or turned by other angles.
    """
    (q, vectors, tables), (k, of_keys, _) = queries.operands, keys.operands
    if _kind_of(queries, q, vectors) != _kind_of(keys, k, of_keys):
        return None
    return _pair(queries.row, (q, k), (vectors, of_keys), tables)


def _kind_of(sequence: Sequence, x: Array, vectors: Vectors) -> Any:
    angles = None if sequence.rotary is None else (id(sequence.rotary.cos), id(sequence.rotary.sin))
    shapes = {name: (v.shape, v.dtype) for name, v in vectors.items()}
    return sequence.row, x.shape, x.dtype, shapes, angles


# ---- a pair --------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pair(row: NormRopeRow, both: Both, vectors: tuple[Vectors, Vectors], tables: Tables) -> Both:
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    q, k = (x.reshape(-1, *x.shape[2:]) for x in both)
    q, k = cute.forward_pair(row, (q, k), vectors, flat)
    return q.reshape(both[0].shape), k.reshape(both[1].shape)


def _pair_fwd(
    row: NormRopeRow, both: Both, vectors: tuple[Vectors, Vectors], tables: Tables
) -> Any:
    return jax.vjp(partial(_apart, row), both, vectors, tables)


def _pair_bwd(_: Any, pull: Any, dy: Both) -> Any:
    return pull(dy)


_pair.defvjp(_pair_fwd, _pair_bwd)


def _apart(row: NormRopeRow, both: Both, vectors: tuple[Vectors, Vectors], tables: Tables) -> Both:
    work = Work(row, "cute")
    q, k = (on_shard(work, x, v, tables) for x, v in zip(both, vectors, strict=True))
    return q, k


# ---- a joint sequence ----------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joint(rows: tuple[NormRopeRow, ...], each: tuple[Operands, ...]) -> Float[Array, "B L N H"]:
    lengths = [x.shape[1] for x, _, _ in each]
    (b, _, *head), dtype = each[0][0].shape, each[0][0].dtype
    out: Any = jax.ShapeDtypeStruct((b, sum(lengths), *head), dtype)
    firsts = [0, *accumulate(lengths)]
    for row, (x, vectors, tables), first in zip(rows, each, firsts, strict=False):
        flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
        out = cute.forward_into(row, x, vectors, flat, first, out)
    return out


def _joint_fwd(rows: tuple[NormRopeRow, ...], each: tuple[Operands, ...]) -> Any:
    return jax.vjp(partial(_concatenated, rows), each)


def _joint_bwd(_: Any, pull: Any, dy: Array) -> Any:
    return pull(dy)


_joint.defvjp(_joint_fwd, _joint_bwd)


def _concatenated(
    rows: tuple[NormRopeRow, ...], each: tuple[Operands, ...]
) -> Float[Array, "B L N H"]:
    parts = [on_shard(Work(row, "cute"), *of) for row, of in zip(rows, each, strict=True)]
    return jnp.concatenate(parts, axis=1)

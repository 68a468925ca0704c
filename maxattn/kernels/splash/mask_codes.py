"""Encode a mask for a splash kernel: one int32 per query, the query's code.

Splash calls a mask function with a query's code and a key's index among the local keys. Three
kinds of code cover every mask of positions:

- `OneInterval`: the query sees one interval of local keys, whose two ends are packed into the code.
  The kernel compares twice and does not divide; both offsets may be traced.
- `Positions`: the code is the query's position, and the kernel evaluates the mask. The key offset
  is a Python int.
- `Shards`: like `Positions`, with a traced key offset; the code's upper bits are the key shard.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from maxattn.errors import Unsupported
from maxattn.kernels.base import Offset
from maxattn.masks import Mask
from maxattn.masks.terms import WORD, packed_interval

POSITION_BITS = 20  # in `Shards`: positions up to a million; the other bits number 2,048 shards
MOST_STEPS = 64  # most segments that a kernel compares: each one makes the kernel longer
MOST_POSITIONS, MOST_SHARDS = 2**POSITION_BITS, 2 ** (WORD - 1 - POSITION_BITS)
RowCode = Callable[[Any, Any], Any]
"""A mask function: of query codes and local key indexes, elementwise; True for allowed pairs."""
REMEDY = (
    "set context_parallel: ulysses or all_gather, or attention: dot_product with"
    " use_memory_efficient_attention: true"
)


class Codes(NamedTuple):
    """A mask function, the queries' codes, and whether the offsets fit (None: known to fit)."""

    code: RowCode
    values: Int[Array, " T"]
    valid: Bool[Array, ""] | None = None

    def padded(self, length: int) -> Int[Array, " T"]:
        """Return the queries' codes, padded with 0 to `length`."""
        return jnp.pad(self.values, (0, length - self.values.shape[0]))


@dataclass(frozen=True)
class OneInterval:
    """Test `lo <= key < hi` with both ends in one int32."""

    kv_len: int  # number of local keys without padding; padded keys are never allowed
    # lower, upper: whether the interval has a lower and an upper end
    lower: bool
    upper: bool
    # if both ends exist, number of low bits for `lo`; the bits above are `hi - lo`
    lo_bits: int = 0

    def __call__(self, rows: Any, kv_idx: Any) -> Any:
        if not self.lower:
            return kv_idx < (rows if self.upper else self.kv_len)
        if not self.upper:
            return (kv_idx >= rows) & (kv_idx < self.kv_len)
        lo = rows & (2**self.lo_bits - 1)
        width = jax.lax.shift_right_logical(rows, jnp.full(rows.shape, self.lo_bits, rows.dtype))
        return (kv_idx >= lo) & (kv_idx < lo + width)

    def pack(self, lo: Array, hi: Array) -> Array:
        """Pack both ends, already clipped to the local keys, into one int32."""
        if not self.lower:
            return hi
        return lo if not self.upper else lo | (jnp.maximum(hi - lo, 0) << self.lo_bits)


@dataclass(frozen=True)
class Positions:
    """Evaluate the mask at the query's position and the key's position, `kv_idx + kv_offset`."""

    mask: Mask
    kv_len: int
    kv_offset: int

    def __call__(self, rows: Any, kv_idx: Any) -> Any:
        return _inside(self.mask, rows, kv_idx + self.kv_offset) & (kv_idx < self.kv_len)


@dataclass(frozen=True)
class Shards:
    """Evaluate the mask at a traced key offset, a multiple of the shard length `kv_len`."""

    mask: Mask
    kv_len: int

    def __call__(self, rows: Any, kv_idx: Any) -> Any:
        q_pos, shard = rows & (2**POSITION_BITS - 1), rows >> POSITION_BITS
        return _inside(self.mask, q_pos, kv_idx + shard * self.kv_len) & (kv_idx < self.kv_len)


def _inside(mask: Mask, q_pos: Any, kv_pos: Any) -> Any:
    found: Any = None
    for span in mask.spans(KernelInts(q_pos), KernelNumpy, True):
        lo, hi = (unwrap(end) for end in span)
        hit = True if lo is None else kv_pos >= lo
        hit = hit if hi is None else hit & (kv_pos < hi)
        found = hit if found is None else found | hit
    return jnp.broadcast_to(jnp.asarray(False if found is None else found), kv_pos.shape)


def encode(mask: Mask, q_len: int, kv_len: int, q_offset: Offset, kv_offset: Offset) -> Codes:
    """Choose the kind of code for a bound mask without arrays, and compute the queries' codes.

    Args:
        q_len, kv_len: numbers of local queries and keys, without padding.
        q_offset, kv_offset: positions of the first local query and key; ints or traced.

    Raises:
        Unsupported: the mask needs `Shards`, and a known position does not fit the bits.
    """
    q_pos = jnp.arange(q_len, dtype=jnp.int32) + q_offset
    code = one_interval(mask, kv_len)
    if code is not None:
        (ends,) = mask.intervals(q_pos, jnp)
        return Codes(code, code.pack(*(jnp.clip(end - kv_offset, 0, kv_len) for end in ends)))
    if not isinstance(kv_offset, jax.Array):
        return Codes(Positions(mask, kv_len, int(kv_offset)), q_pos)
    end = q_len if isinstance(q_offset, jax.Array) else q_offset + q_len
    if (rule := too_long(mask, kv_len, end, kv_len)) is not None:
        raise Unsupported("mask", mask, rule, REMEDY)
    shard = kv_offset // kv_len
    fits = (kv_offset % kv_len == 0) & (shard >= 0) & (shard < MOST_SHARDS)
    fits &= jnp.all((q_pos >= 0) & (q_pos < MOST_POSITIONS))
    values = q_pos | (shard.astype(jnp.int32) << POSITION_BITS)
    return Codes(Shards(mask, kv_len), values, fits)


def too_long(mask: Mask, shard: int, queries: int, keys: int) -> str | None:
    """Return why a sequence does not fit `Shards`, the code for a traced key offset, or None."""
    if one_interval(mask, shard) is not None:
        return None
    why = "(a position and a shard's number share an int32)"
    if queries > MOST_POSITIONS:
        most = f"with sharded keys, {mask} takes at most {MOST_POSITIONS} queries"
        return f"{most}, and the sequence has {queries} {why}"
    if keys > MOST_SHARDS * shard:
        most = f"{mask} takes at most {MOST_SHARDS} shards of keys"
        return f"{most}, and the keys have {-(-keys // shard)} {why}"
    return None


def too_many_steps(mask: Mask, shard: int) -> str | None:
    """Return why a kernel cannot evaluate a mask on a shard of `shard` keys, or None."""
    if mask.looked_up <= MOST_STEPS or one_interval(mask, shard) is not None:
        return None
    return (
        f"it compares at most {MOST_STEPS} segments or bands of queries if both ends of a query's"
        f" keys do not fit one int32, and {mask} has {mask.looked_up}"
    )


def one_interval(mask: Mask, kv_len: int) -> OneInterval | None:
    """Return the code if each query sees one interval whose ends fit an int32, else None."""
    ends = packed_interval(mask, kv_len)
    return OneInterval(kv_len, *ends, kv_len.bit_length() * all(ends)) if ends else None


# ---- integers inside a Pallas TPU kernel ---------------------------------------------------------


class KernelInts:
    """Wrap an int32 or bool array of a kernel, so that masks can compute with it.

    jax lowers int32 `//` through `sign`, which looks up this machine's TPU: lowering for another
    TPU fails. This class implements `//` by a truncating division and a correction. Masks get
    `KernelNumpy` as their argument `xp`.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    def __floordiv__(self, n: int) -> KernelInts:
        divisor = jnp.full(self.array.shape, n, self.array.dtype)
        below = jax.lax.rem(self.array, divisor) < 0
        return KernelInts(jax.lax.div(self.array, divisor) - below.astype(self.array.dtype))


def _operation(f: Callable[..., Any]) -> Any:
    return lambda *args: KernelInts(f(*(unwrap(x) for x in args)))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge"):
    setattr(KernelInts, f"__{_name}__", _operation(getattr(operator, _name)))
for _name in ("add", "sub", "mul"):
    _swapped = (lambda op: lambda mine, other: op(other, mine))(getattr(operator, _name))
    setattr(KernelInts, f"__r{_name}__", _operation(_swapped))


class KernelNumpy:
    """The three numpy functions that masks of positions call, for `KernelInts`."""

    where = staticmethod(_operation(jnp.where))
    minimum = staticmethod(_operation(jnp.minimum))
    maximum = staticmethod(_operation(jnp.maximum))


def unwrap(x: Any) -> Any:
    return x.array if isinstance(x, KernelInts) else x

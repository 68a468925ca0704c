"""`Kernel`: attention over the arrays of one device, forward and backward, without a mesh.

A kernel is a frozen dataclass, so that a plan can contain, hash and print it. The fields are what
was decided for one call (scale, chunk sizes, flags), and the methods compute with these fields.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxattn.block_sizes import BlockSizes, Change
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.devices import Platform
from maxattn.kernels.bias_level import Level
from maxattn.kernels.fold_batch import with_batch_folded
from maxattn.kernels.kv_block import (
    TWO_TILES,
    WHOLE,
    DqAccumulator,
    KeyRange,
    Packed,
    SumOfParts,
    widened,
)
from maxattn.kernels.refusals import USE_AUTO, refuse_call, refuse_mask, refuse_repeats
from maxattn.kernels.softmax import NEG_INF, cleared, column, finite
from maxattn.masks import Full, Mask
from maxattn.masks.terms import Offset, sort_terms
from maxattn.target import Target

# Names of other files that kernels import from here.
__all__ = ["TWO_TILES", "USE_AUTO", "WHOLE", "DqAccumulator", "KeyRange", "Offset", "Packed"]
__all__ += ["refuse_call", "refuse_mask", "refuse_repeats", "widened", "with_batch_folded"]

Bias = Float[Array, "#B #N #T #S"] | None
Pass = Literal["forward", "backward"]
Out = TypeVar("Out")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The arrays of one device's call, and the positions of their tokens.

    Args:
        q: queries; N is a multiple of K, and N / K neighbouring query heads share a key head.
        k, v: keys and values; V equals H, except for kernels with `takes_value_dim`.
        bias: added to the scores, or None.
        mask: the bound mask, a function of the tokens' positions in the sequence.
        q_offset, kv_offset: positions of the first query and of the first key.
        bias_level: [B|1, N|1, T|1, 1], which kernels subtract from each query's bias and do not add
            to the LSE (bias_level.py); None without a bias.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    bias: Bias = None
    mask: Mask = Full()  # noqa: RUF009
    q_offset: Offset = 0
    kv_offset: Offset = 0
    bias_level: Level | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        offsets = self.q_offset, self.kv_offset
        return self.q, self.k, self.v, self.bias, self.mask, *offsets, self.bias_level

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)


class Result(NamedTuple):
    """A forward's output and LSE, a natural log that is -inf if a query sees no key."""

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]

    def where(self, seen: Bool[Array, "#B #N #T"]) -> Result:
        """Return out 0 and LSE -inf for queries that see no key."""
        out = jnp.where(column(seen), self.out, 0).astype(self.out.dtype)
        return Result(out, jnp.where(seen, self.lse, NEG_INF))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A backward's inputs for each query, final over all keys."""

    # out, lse: the forward's result, merged if the keys were computed in several calls
    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    # dout, dlse: the gradients of out and lse
    dout: Float[Array, "B T N V"]
    dlse: Float[Array, "B N T"]

    @property
    def operands(self) -> tuple[Array, Array, Array, Array]:
        return self.out, self.lse, self.dout, self.dlse

    def without_unseen(self, seen: Bool[Array, "#B #N #T"] | None = None) -> Rows:
        """Return LSE 1e30, with which P is 0, and dout and dlse 0 for queries that see no key.

        These are the queries that are not `seen`, and those with LSE -inf, which see no key at all.
        """
        lse = self.lse if seen is None else jnp.where(seen, self.lse, NEG_INF)
        dlse = jnp.where(lse == NEG_INF, 0.0, self.dlse)
        return Rows(self.out, finite(lse), cleared(self.dout, lse), dlse)


class Grads(NamedTuple):
    """The gradients: dq in `gradient_dtype(q)`, the others in float32, to be summed over calls."""

    dq: Float[Array, "B T N H"]
    dk: Float[Array, "B S K H"]
    dv: Float[Array, "B S K V"]
    dbias: Bias = None

    def in_order(self, order: Int[Array, "B S"] | None) -> Grads:
        """Return dk and dv of keys that `real_keys_first` moved, in their places before that."""
        if order is None:
            return self
        back = jnp.argsort(order, axis=1)
        return self._replace(dk=gathered(self.dk, back), dv=gathered(self.dv, back))


class Tangents(NamedTuple):
    """The tangents of a call's operands in forward mode; None for an operand without one."""

    q: Float[Array, "B T N H"] | None = None
    k: Float[Array, "B S K H"] | None = None
    v: Float[Array, "B S K V"] | None = None
    bias: Bias = None

    def whole(self, inputs: Inputs) -> Tangents:
        """Return the tangents with zeros in the place of None; without a bias, that stays None."""
        given = inputs.q, inputs.k, inputs.v, inputs.bias
        return Tangents(
            *(
                jnp.zeros_like(x) if t is None and x is not None else t
                for x, t in zip(given, self, strict=True)
            )
        )


def gathered(x: Float[Array, "B S K H"], order: Int[Array, "B S"]) -> Float[Array, "B S K H"]:
    """Reorder the tokens of each batch row by that row's indices in `order`."""
    return jnp.take_along_axis(x, order[:, :, None, None], axis=1)


def real_keys_first(inputs: Inputs) -> tuple[Inputs, Int[Array, "B S"] | None]:
    """Move the keys that flags mark as real to the front, if the mask depends on keys alone.

    Return the inputs, with an unchanged mask, and the order of the keys; None if unmoved.
    """
    terms, (batch, s) = sort_terms(inputs.mask), inputs.k.shape[:2]
    if not terms.has_flags or terms.positions or terms.rest:
        return inputs, None
    order = terms.real_keys_first(batch, s, inputs.kv_offset)
    return inputs.replace(k=gathered(inputs.k, order), v=gathered(inputs.v, order)), order


def with_lse_gradient(
    grads: Grads, inputs: Any, rows: Rows, scale: float, forward: Any, backward: Any
) -> Grads:
    """Add the gradient of the LSE, which GPU libraries drop, to dq and dk, in float32.

        dq += scale * dlse * (P k)        dk += P^T (scale * dlse * q)

    With k as v, a library's `forward(inputs)` computes P k, and its `backward(inputs, rows)`
    computes P^T (..) as dv.
    """
    with_k, dlse, q = replace(inputs, v=inputs.k), rows.dlse, inputs.q.astype(jnp.float32)
    pk, here = forward(with_k)
    weight = jnp.where(dlse == 0.0, 0.0, scale * dlse * jnp.exp(here - rows.lse))
    dq = jnp.where(column(dlse) == 0.0, 0.0, column(weight) * pk.astype(jnp.float32))
    dout = (column(scale * dlse) * q).astype(inputs.q.dtype)
    of_k = backward(with_k, Rows(pk, rows.lse, dout, dlse)).dv.astype(jnp.float32)
    first, second = (x.astype(jnp.float32) for x in (grads.dq, grads.dk))
    return grads._replace(dq=first + dq, dk=second + of_k)


def padded_heads(inputs: Inputs) -> Inputs:
    """Pad the head dims of q, k and v with zeros to a multiple of 8, which GPU libraries need."""
    q, k, v = (widened(x, -(-x.shape[3] // 8) * 8) for x in (inputs.q, inputs.k, inputs.v))
    return inputs.replace(q=q, k=k, v=v)


def padded_rows(rows: Rows, q: Array) -> Rows:
    """Pad the head dims of out and dout to q's head dim, and cast both arrays to q's dtype."""
    out, dout = (widened(x, q.shape[3]).astype(q.dtype) for x in (rows.out, rows.dout))
    return Rows(out, rows.lse, dout, rows.dlse)


def in_default_modes(kernel: Callable[..., Out]) -> Callable[..., Out]:
    """Wrap a library's kernel to run without x64 and strict promotion, which break its indices."""

    def run(*operands: Any) -> Out:
        promotes = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
        with jax.enable_x64(False), promotes[0], promotes[1]:
            return kernel(*operands)

    return run


def exact_products(dtype: Any) -> Any:
    """Return a context for exact float32 matmuls; a TPU would round operands to bfloat16."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


class Lines(NamedTuple):
    """The texts of `explain` about a kernel; `backward` is "" if both passes have equal tiles."""

    runs: str
    blocks: str
    backward: str = ""


class Kernel:
    """The base class of kernels, which compute attention over one device's arrays.

    A query that sees no key has output 0, LSE -inf and gradients 0. The statistics of the softmax
    are float32.
    """

    name: ClassVar[str]
    is_pallas: ClassVar[bool] = False
    """Whether the kernel is in Pallas, which jax refuses in a `shard_map` with `check_vma`."""
    differentiates_twice: ClassVar[bool] = False
    """Whether jax can differentiate the backward; else attention refuses second derivatives."""
    takes_value_dim: ClassVar[bool] = False
    """Whether v may have another head dim than q and k; else both are padded to the larger."""
    needs_an_example: ClassVar[bool] = False
    """Whether the kernel refuses a `vmap` over an axis of size 0."""
    blocks: ClassVar[BlockSizes | None] = None
    """The tile sizes, if the user can set them."""
    changes: ClassVar[tuple[Change, ...]] = ()
    """How the tile sizes differ from the sizes that the user asked for."""
    reaches: ClassVar[float] = 1.0
    """The share of `Machine.flops` that the kernel's matmuls reach, for estimates."""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Return why the kernel cannot compute the call exactly on the target, or None."""
        return None

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Return why the backward may give different bits in two runs, or None."""
        return None

    @staticmethod
    def rows_pay(platform: Platform, tokens: int) -> bool:
        """Check whether blocks of `tokens` tokens run faster as batch rows (batch_rows.py)."""
        return True

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Build the kernel for a local call: decide its scale, tile sizes and flags."""
        raise NotImplementedError

    def for_inference(self) -> Kernel:
        """Return the variant of this kernel for a forward that is not differentiated."""
        return self

    def for_forward_alone(self) -> Kernel:
        """Return the variant of this kernel for the forward of a pair with another kernel."""
        return self

    def without_dbias(self) -> Kernel:
        """Return the variant of this kernel for a backward whose dbias is not read."""
        return self

    def forward(self, inputs: Inputs) -> Result:
        """Return the output and the LSE."""
        raise NotImplementedError

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return the gradients from these queries and keys, given the LSE over all keys."""
        raise NotImplementedError

    tangent: Any = None
    """(inputs, result, tangents) -> tangents of out and LSE, for kernels with forward mode."""

    # ---- texts for plans, and times for `auto` ---------------------------------------------------

    @property
    def computes(self) -> Kernel:
        """The inner kernel, if this kernel only prepares operands for it; else this kernel."""
        return self

    def lines(self, call: Call) -> Lines:
        """Return what `explain` prints of the kernel for a local call."""
        raise NotImplementedError

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Return the plan's notes about this kernel, from the arguments that `build` got."""
        return ()

    def notes_of(
        self, what: Pass, call: Call, config: AttentionConfig, target: Target
    ) -> tuple[str, ...]:
        """Return the notes about the pass `what`, if another kernel computes the other pass."""
        return self.notes(call, config, target)

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        """Estimate the forward and the backward of a local call; None if unknown.

        The default estimate, on a GPU, is the longer of two times: the matmuls at the rate of
        `Machine.flops`, or the transfer of operands and results from and to memory.
        """
        machine = target.device.machine
        if target.platform != "gpu" or machine is None:
            return None
        pairs = call.mask.allowed_pairs(call.q_len, call.kv_len)
        channels = call.head_dim + call.value_dim
        products = 2.0 * call.batch * call.heads * channels * pairs / machine.flops / self.reaches
        entries = call.q_len * call.heads + call.kv_len * call.kv_heads
        moved = jnp.dtype(call.dtype).itemsize * call.batch * channels * entries / machine.hbm
        return 1e6 * max(products, moved), 1e6 * max(2.5 * products, 2 * moved)

    # ---- the backward over several blocks of keys, without a mask --------------------------------

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Check whether `accumulator` may keep dQ in one float32 array between blocks of keys."""
        return False

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Begin a backward over several blocks of keys, each with the shape of `inputs.k`."""
        return SumOfParts(self.backward, inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Return the text of `explain` about the accumulator; "" if it is a `SumOfParts`."""
        return ""

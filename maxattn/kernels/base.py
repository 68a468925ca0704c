"""`Kernel`: attention over the arrays of one device, forward and backward. It knows no mesh.

A kernel is a frozen dataclass, so that a plan can contain, hash and print it. Its fields are all
that was decided about it (scale, chunk sizes, flags); its methods compute with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
from maxattn.kernels.refusals import USE_AUTO, refuse_call, refuse_mask
from maxattn.masks import Full, Mask
from maxattn.masks.terms import Offset
from maxattn.target import Target

__all__ = [
    "TWO_TILES",
    "USE_AUTO",
    "WHOLE",
    "Bias",
    "DqAccumulator",
    "Grads",
    "Inputs",
    "Kernel",
    "KeyRange",
    "Lines",
    "Offset",
    "Packed",
    "Result",
    "Rows",
    "padded_heads",
    "padded_rows",
    "refuse_call",
    "refuse_mask",
    "widened",
    "with_batch_folded",
]

Bias = Float[Array, "#B #N #T #S"] | None
Pass = Literal["forward", "backward"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The local arrays and their positions.

    Args:
        q: queries; K divides N, and N / K neighbouring query heads share a key head.
        k, v: keys and values; V equals H, except for kernels with `takes_value_dim`.
        bias: added to the scores, or None.
        mask: a bound mask, of the positions that the offsets give.
        q_offset, kv_offset: positions of the first query and key.
        bias_level: subtracted from each query's bias, and not part of the LSE (bias_level.py); None
            without a bias.
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
    """The result of a forward; `lse` is a natural logarithm, -inf if nothing is seen."""

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What a backward needs of each query, over all its keys.

    Args:
        out, lse: a forward's result, merged if the keys were computed in several calls.
        dout, dlse: the gradients of both.
    """

    out: Float[Array, "B T N V"]
    lse: Float[Array, "B N T"]
    dout: Float[Array, "B T N V"]
    dlse: Float[Array, "B N T"]

    @property
    def operands(self) -> tuple[Array, Array, Array, Array]:
        return self.out, self.lse, self.dout, self.dlse


class Grads(NamedTuple):
    """The gradients; dk, dv and dbias are float32, maybe before they are summed over calls."""

    dq: Float[Array, "B T N H"]
    dk: Float[Array, "B S K H"]
    dv: Float[Array, "B S K V"]
    dbias: Bias = None


def padded_heads(inputs: Inputs) -> Inputs:
    """Fill the heads of q, k and v with zeros to a multiple of 8, as GPU libraries take them."""
    q, k, v = (widened(x, -(-x.shape[3] // 8) * 8) for x in (inputs.q, inputs.k, inputs.v))
    return inputs.replace(q=q, k=k, v=v)


def padded_rows(rows: Rows, q: Array) -> Rows:
    """Fill the heads of the rows as those of q were, and cast them to its dtype."""
    out, dout = (widened(x, q.shape[3]).astype(q.dtype) for x in (rows.out, rows.dout))
    return Rows(out, rows.lse, dout, rows.dlse)


class Lines(NamedTuple):
    """What `explain` prints of a kernel: what runs, its tiles, those of its backward if others."""

    runs: str
    blocks: str
    backward: str = ""


class Kernel:
    """Compute attention over local arrays; every kernel is a frozen dataclass.

    A query with nothing to attend to has output 0, LSE -inf and gradients 0. Statistics of the
    softmax are float32.
    """

    name: ClassVar[str]
    is_pallas: ClassVar[bool] = False
    """jax refuses a Pallas kernel inside a `shard_map` that checks what varies over its axes."""
    differentiates_twice: ClassVar[bool] = False
    """Whether jax can differentiate the backward; else attention refuses second derivatives."""
    takes_value_dim: ClassVar[bool] = False
    """Whether values may have another head dim than keys; else both are padded to the larger."""
    needs_an_example: ClassVar[bool] = False
    """Whether `vmap` over no example is refused."""
    blocks: ClassVar[BlockSizes | None] = None
    """The tile sizes of a kernel that takes the user's."""
    changes: ClassVar[tuple[Change, ...]] = ()
    """How the sizes differ from those that were asked for."""
    reaches: ClassVar[float] = 1.0
    """The share of `Machine.flops` that its products reach, for estimates."""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Return None if the kernel computes the call exactly on the target, else why not."""
        return None

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Return None if the backward gives the same bits every time, else why not."""
        return None

    @staticmethod
    def rows_pay(platform: Platform, tokens: int) -> bool:
        """Check whether blocks of so many tokens are computed as batch rows (batch_rows.py)."""
        return True

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Decide everything about the kernel for one (local) call."""
        raise NotImplementedError

    def for_inference(self) -> Kernel:
        """Return the kernel of a forward that is not differentiated."""
        return self

    def for_forward_alone(self) -> Kernel:
        """Return the kernel of a forward whose backward another kernel computes."""
        return self

    def without_dbias(self) -> Kernel:
        """Return the kernel of a backward whose gradient of the bias is not read."""
        return self

    def forward(self, inputs: Inputs) -> Result:
        """Return the output and the LSE."""
        raise NotImplementedError

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return these inputs' share of the gradients, from given rows."""
        raise NotImplementedError

    # ---- what a plan says of it, and what `auto` asks --------------------------------------------

    @property
    def computes(self) -> Kernel:
        """The inner kernel, if this one only prepares its operands; else itself."""
        return self

    def lines(self, call: Call) -> Lines:
        """Return what `explain` prints of the kernel for a local call."""
        raise NotImplementedError

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Return further lines of a plan about the kernel that `build` made of these arguments."""
        return ()

    def notes_of(
        self, what: Pass, call: Call, config: AttentionConfig, target: Target
    ) -> tuple[str, ...]:
        """Return the notes of one pass, if another kernel computes the other."""
        return self.notes(call, config, target)

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        """Estimate the forward and the backward of a local call; None if unknown.

        By default, on a GPU: its products at the rate of `Machine.flops`, or its operands and
        results through memory if that takes longer.
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

    # ---- the backward over several blocks of keys, every pair allowed ----------------------------

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Check whether the accumulator could sum dQ in one float32 array."""
        return False

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Begin a backward over several blocks of keys with the shape of those in `inputs`."""
        return SumOfParts(self.backward, inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Return how `explain` describes the accumulator's launches; "" if by `backward`."""
        return ""

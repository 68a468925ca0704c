"""What a kernel is: attention over what one device holds, forward and backward. It knows no mesh.

A kernel is a frozen dataclass, so that a plan can hold it, hash it and print it: its fields are
everything that was decided about it (scale, chunk sizes, flags), and its methods compute with them.
"""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from maxattn.block_sizes import Change
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.masks import Mask
from maxattn.target import Target

Offset = int | jax.Array  # position of the first local token; traced inside shard_map
Bias = Float[Array, "#B #N #T #S"] | None


@runtime_checkable
class Kernel(Protocol):
    """Compute attention over local arrays.

    q [B,T,N,H], k and v [B,S,K,H] with K dividing N, out [B,T,N,H], lse [B,N,T] float32, natural
    logarithm. A query with nothing to attend to gives output 0, LSE -inf and gradients 0. A kernel
    may say `is_pallas = True`: jax then refuses it inside of a `shard_map` that checks what varies
    over its axes.
    """

    name: ClassVar[str]

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Return None when the call can be computed exactly on the target, else the reason why
        not.
        """
        ...

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Return None when the backward gives the same bits every time, else the reason: for
        `deterministic: true`.
        """
        ...

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Decide everything about the kernel for one (local) call."""
        ...

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Bias,
        mask: Mask,
        q_offset: Offset,
        kv_offset: Offset,
    ) -> tuple[Array, Array]:
        """Return (out, lse) of the local arrays; the offsets are the positions of the first query
        and key.
        """
        ...

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Bias,
        mask: Mask,
        q_offset: Offset,
        kv_offset: Offset,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array,
    ) -> tuple[Array, Array, Array, Bias]:
        """Return (dq, dk, dv, dbias) of these local arrays' part, in float32 for all but dq: they
        are yet to be summed.

        `out` and `lse` may be global ones, merged over many calls: the gradients are then this
        call's share.
        """
        ...

    def lines(self, call: Call) -> dict[str, str]:
        """Return what `explain` prints about the kernel: "runs", "blocks", and "backward", where
        its blocks differ.
        """
        ...


@runtime_checkable
class OtherForInference(Protocol):
    """A kernel that computes a forward otherwise where no backward will follow, and what was
    changed for it.
    """

    changes: tuple[Change, ...]

    def for_inference(self) -> Kernel:
        """Return the kernel of a forward that is not differentiated."""
        ...


def inference_kernel(kernel: Kernel) -> Kernel:
    """Return the kernel of a forward that is not differentiated: the same for most."""
    return kernel.for_inference() if isinstance(kernel, OtherForInference) else kernel


def changes_of(kernel: Kernel) -> tuple[Change, ...]:
    """Return how the sizes that a kernel runs with differ from those that were asked for."""
    return kernel.changes if isinstance(kernel, OtherForInference) else ()

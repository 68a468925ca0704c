"""FlashAttention-4 on NVIDIA GPUs, through fa4-jax: the kernel `flash`.

On Hopper GPUs maxattn launches fa4-jax's kernels itself. The launch is a value that is made once
from the problem (problem.py, launch.py); the plan prints it, and both passes run it (run.py).
On other GPUs fa4-jax launches its kernels (elsewhere.py).

Source: Dao-AILab, flash-attention (CuTe kernels); fa4-jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.errors import Reason
from maxattn.jax_private.versions import CUTLASS, TESTED
from maxattn.kernels.base import (
    TWO_TILES,
    USE_AUTO,
    DqAccumulator,
    Grads,
    Inputs,
    Kernel,
    Lines,
    Result,
    Rows,
    padded_heads,
    padded_rows,
    real_keys_first,
    refuse_mask,
    refuse_repeats,
    with_batch_folded,
)
from maxattn.kernels.fa4 import elsewhere, library, run
from maxattn.kernels.fa4.launch import backward_launch, forward_launch
from maxattn.kernels.fa4.lists import masked_inputs
from maxattn.kernels.fa4.problem import (
    Problem,
    has_kernels,
    lack,
    of_call,
    of_inputs,
    refuse_length,
    refuse_lists,
    refuse_operands,
)
from maxattn.masks.band_pieces import fits_shards, over_shifts
from maxattn.masks.terms import sort_note, sort_terms, split_mask
from maxattn.target import Target

__all__ = ["Fa4", "HopperFa4", "LibraryFa4", "has_kernels", "lack"]
OWN = "the library's own"
Out = TypeVar("Out", Result, Grads)


@dataclass(frozen=True)
class Fa4(Kernel):
    """Compute out = softmax(scale * q k^T) v with FlashAttention-4."""

    name: ClassVar[str] = "flash"
    needs_an_example: ClassVar[bool] = True
    scale: float  # multiplies the scores, in float32
    # whether the LSE is part of the result, so that it can have a gradient
    lse_gradient: bool = False
    version: str = ""  # the version of fa4-jax
    sms: int = 0  # number of streaming multiprocessors (SMs) of the GPU
    # whether tokens are sharded, so that positions are known only on the device
    sharded: bool = False

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        return refuse_repeats("flash")

    @classmethod
    def build(cls, call: Call, config: AttentionConfig, target: Target) -> Self:
        version, sms = target.version("fa4-jax") or "", target.device.sms
        return cls(call.scale, call.return_lse, version, sms, call.sharded)

    @property
    def runs(self) -> str:
        return f"flash (FlashAttention-4, fa4-jax {self.version})"

    def problem(self, call: Call) -> Problem:
        """Return a call's problem; a sharded band is `known`: `_over_shifts` computes its cases."""
        terms, lengths = sort_terms(call.mask), (call.q_len, call.kv_len)
        is_case = not terms.rest and terms.band is not None and fits_shards(terms, *lengths)
        return of_call(call, self.sms, self.sharded and not is_case)

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        if inputs.bias is not None:
            return self._forward(inputs)
        return _over_shifts(partial(_folded, self._forward), inputs)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv) from the LSE and output in `rows`; a bias gets no gradient."""
        if inputs.bias is not None:
            return self._backward(inputs, rows)
        return _over_shifts(partial(_folded, self._backward), inputs, rows)

    def _forward(self, inputs: Inputs) -> Result:
        width, (given, _) = inputs.q.shape[3], real_keys_first(padded_heads(inputs))
        found = self.launch_forward(given)
        return Result(found.out[..., :width], found.lse)

    def _backward(self, inputs: Inputs, rows: Rows) -> Grads:
        width, (given, order) = inputs.q.shape[3], real_keys_first(padded_heads(inputs))
        found = self.launch_backward(given, padded_rows(rows, given.q)).in_order(order)
        dq, dk, dv = (x[..., :width] for x in found[:3])
        return Grads(dq.astype(inputs.q.dtype), dk.astype(jnp.float32), dv.astype(jnp.float32))

    # What both passes launch, for padded heads, with the keys that flags mark as real at the front.
    launch_forward: ClassVar[Callable[..., Result]]
    launch_backward: ClassVar[Callable[..., Grads]]


@dataclass(frozen=True)
class HopperFa4(Fa4):
    """Launch fa4-jax's kernels as `launch.py` decides; a bias is added to the scores."""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        reason = _refuse_untested(target) or _refuse_source(target) or _refuse(call, target)
        if reason is not None or call.bias is not None:
            return reason
        return refuse_lists(of_call(call, target.device.sms, call.sharded))

    def lines(self, call: Call) -> Lines:
        problem = self.problem(call)
        return Lines(self.runs, forward_launch(problem).line, backward_launch(problem).line)

    def microseconds(self, call: Call, target: Target) -> tuple[float, float]:
        problem = self.problem(call)
        return forward_launch(problem).microseconds, backward_launch(problem).microseconds

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return (sort_note("tiles"),) if self.problem(call).kind == "ids" else ()

    def launch_forward(self, inputs: Inputs) -> Result:
        problem = of_inputs(inputs, self.sms)
        launch = forward_launch(problem)
        masked = masked_inputs(problem, launch.tile, inputs, "queries")
        return run.forward(problem, launch, (inputs.q, inputs.k, inputs.v), masked, self.scale)

    def launch_backward(self, inputs: Inputs, rows: Rows) -> Grads:
        group = inputs.q.shape[2] // inputs.k.shape[2]
        if inputs.bias is not None:
            # If query heads share keys, fa4-jax 0.1.0's Hopper backward passes a wrong head and
            # query to `score_mod`, as if the heads were packed.
            k, v = (jnp.repeat(x, group, axis=2) for x in (inputs.k, inputs.v))
            inputs = inputs.replace(k=k, v=v)
        problem = of_inputs(inputs, self.sms)
        launch = backward_launch(problem)
        masked = masked_inputs(problem, launch.tile, inputs, "keys")
        rows = rows if masked.all_see and not self.lse_gradient else rows.without_unseen()
        qkv, dlse = (inputs.q, inputs.k, inputs.v), rows.dlse if self.lse_gradient else None
        found = run.backward(problem, launch, qkv, rows, masked, self.scale, dlse)
        if inputs.bias is None:
            return found
        dk, dv = (_sum_shared(x, group) for x in (found.dk, found.dv))
        return found._replace(dk=dk, dv=dv)

    # ---- a backward over several blocks of keys --------------------------------------------------

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Return whether the accumulator can keep dQ in one float32 array."""
        return run.can_add_up(call.heads, call.kv_heads, call.head_dim)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Return an accumulator with one float32 array of dQ, if the kernels take the shapes."""
        if not self._keeps_dq(inputs):
            return super().accumulator(inputs, rows)
        alone = Inputs(inputs.q, inputs.k, inputs.v)  # all pairs are allowed
        problem = of_inputs(alone, self.sms)
        launch = backward_launch(problem)
        return run.Fa4DqAccumulator(problem, launch, inputs, rows, self.scale)

    def accumulator_line(self, inputs: Inputs) -> str:
        return "dQ in one float32 array, block by block" if self._keeps_dq(inputs) else ""

    def _keeps_dq(self, inputs: Inputs) -> bool:
        (heads, width), (keys, kv_heads) = inputs.q.shape[2:], inputs.k.shape[1:3]
        fits = run.can_add_up(heads, kv_heads, width) and keys >= TWO_TILES
        return not self.lse_gradient and fits


def _sum_shared(grad: Float[Array, "B S N H"], group: int) -> Float[Array, "B S K H"]:
    """Sum dK or dV over the query heads that share a key head, in float32."""
    b, s, n, h = grad.shape
    return grad.astype(jnp.float32).reshape(b, s, n // group, group, h).sum(3)


@dataclass(frozen=True)
class LibraryFa4(Fa4):
    """Let fa4-jax launch its kernels, on GPUs other than Hopper."""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        reason = _refuse_untested(target) or _refuse(call, target)
        if reason is not None or call.bias is None:
            return reason
        rule = f"it adds a bias only on Hopper GPUs, and this is {target.device_kind}"
        return Reason("flash", "bias", rule, USE_AUTO)

    def lines(self, call: Call) -> Lines:
        tested = sort_terms(call.mask).positions and not call.mask.is_full
        return Lines(self.runs, f"{OWN}; a window around the mask" if tested else OWN)

    def microseconds(self, call: Call, target: Target) -> None:
        """Return None: fa4-jax's own launches have no estimate."""

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Return the share of pairs that is computed, if it is not the share that is allowed."""
        problem = self.problem(call)
        split, band = split_mask(call.mask), sort_terms(call.mask).band
        is_window = problem.kind == "known" and band is not None
        if not problem.has_lists or is_window or isinstance(split, Reason):
            return ()
        lengths = call.sequence or (call.q_len, call.kv_len)
        allowed = split.positions.allowed_pairs(*lengths) / (lengths[0] * lengths[1])
        computed = 1.0 if self.sharded else elsewhere.share_of_window(problem)
        if computed == allowed:
            return ()
        return (
            "FlashAttention-4 skips a mask's empty tiles only on Hopper GPUs: on this GPU it tests"
            f" {100 * computed:.3g}% of all pairs, and the mask allows {100 * allowed:.3g}%",
        )

    def launch_forward(self, inputs: Inputs) -> Result:
        return elsewhere.forward(of_inputs(inputs, self.sms), inputs, self.scale)

    def launch_backward(self, inputs: Inputs, rows: Rows) -> Grads:
        problem, rows = of_inputs(inputs, self.sms), rows.without_unseen()
        return elsewhere.backward(problem, inputs, rows, self.scale, self.lse_gradient)


# ---- refusals ------------------------------------------------------------------------------------


def _refuse_untested(target: Target) -> Reason | None:
    return target.refuse_untested("flash", "fa4-jax") or target.refuse_untested("flash", CUTLASS)


def _refuse_source(target: Target) -> Reason | None:
    """Refuse an installed fa4-jax that lacks what maxattn uses of its source."""
    lacking = library.mismatch()
    if lacking is None:
        return None
    rule = f"fa4-jax {target.version('fa4-jax')} differs from the tested version: {lacking}"
    remedy = f'pip install "fa4-jax{TESTED["fa4-jax"]}"; or {USE_AUTO}'
    return Reason("flash", "version", rule, remedy)


def _refuse(call: Call, target: Target) -> Reason | None:
    terms = sort_terms(call.mask)
    reason = refuse_operands(call, target.device) or refuse_length(call, terms)
    if reason is not None or call.bias is not None or refuse_mask("flash", terms) is None:
        return reason
    found = split_mask(call.mask)
    return found if isinstance(found, Reason) else None


# ---- around a pass -------------------------------------------------------------------------------


def _over_shifts(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Run `compute`; if a band's offsets are traced, run it as one case of a `lax.switch`.

    In each case positions are known when tracing. Every strategy has offsets that are multiples of
    the shards' lengths; with other offsets, which only the device sees, the result is NaN.
    """
    terms, (t, s) = sort_terms(inputs.mask), (inputs.q.shape[1], inputs.k.shape[1])
    is_traced = any(isinstance(x, jax.Array) for x in (inputs.q_offset, inputs.kv_offset))
    band = terms.band
    is_band = terms.positions and not (terms.rest or terms.keys or terms.limits)
    if not is_traced or not is_band or band is None or not fits_shards(terms, t, s):
        return compute(inputs, *rows)

    def case(at: int) -> Callable[..., Out]:
        move = at - band.offset
        moved = inputs.replace(q_offset=max(0, move), kv_offset=max(0, -move))
        return lambda q, k, v, *rows: compute(moved.replace(q=q, k=k, v=v), *rows)

    shift, operands = inputs.q_offset - inputs.kv_offset, (inputs.q, inputs.k, inputs.v, *rows)
    return over_shifts(band, shift, (t, s), case, *operands)


def _folded(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Run `compute`; under `vmap`, fold the mapped axis into the batch of one call.

    If `vmap` maps a mask array that all batch rows share, the calls run one after another.
    """
    leaves, tree = jax.tree.flatten((inputs.mask, inputs.q_offset, inputs.kv_offset))
    batch, at = inputs.q.shape[0], range(len(leaves))
    own = [i for i in at if jnp.ndim(leaves[i]) > 0 and leaves[i].shape[0] == batch]
    shared = [i for i in at if isinstance(leaves[i], jax.Array) and i not in own]

    def run_on(q: Any, k: Any, v: Any, mine: Any, given: Any, others: Any = ()) -> Out:
        arrays = zip((*own, *shared), (*mine, *others), strict=True)
        found = dict(zip(at, leaves, strict=True)) | dict(arrays)
        mask, first, of_keys = jax.tree.unflatten(tree, found.values())
        moved = inputs.replace(q=q, k=k, v=v, mask=mask, q_offset=first, kv_offset=of_keys)
        return compute(moved, *given)

    mine, others = [leaves[i] for i in own], [leaves[i] for i in shared] or None
    return with_batch_folded(run_on, inputs.q, inputs.k, inputs.v, mine, rows, shared=others)

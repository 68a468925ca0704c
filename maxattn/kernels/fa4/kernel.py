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
from typing import Any, ClassVar, TypeVar

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
    gathered,
    padded_heads,
    padded_rows,
    refuse_mask,
    with_batch_folded,
)
from maxattn.kernels.fa4 import elsewhere, library, run
from maxattn.kernels.fa4.launch import backward_launch, forward_launch
from maxattn.kernels.fa4.mask_test import masked_inputs, real_keys_first
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
from maxattn.kernels.softmax import BIG_LSE, NEG_INF, cleared
from maxattn.masks.band_pieces import fits_shards, over_shifts
from maxattn.masks.terms import sort_note, sort_terms, split_mask
from maxattn.target import Target

__all__ = ["Fa4", "has_kernels", "lack"]
OWN = "the library's own"
Out = TypeVar("Out", Result, Grads)


@dataclass(frozen=True)
class Fa4(Kernel):
    """Compute out = softmax(scale * q k^T) v with FlashAttention-4.

    Args:
        scale: multiplies the scores, in float32.
        lse_gradient: whether the LSE is part of the result, so that it can have a gradient.
        version: the version of fa4-jax.
        launched: whether maxattn launches fa4-jax's kernels itself, as on Hopper GPUs.
        sms: number of streaming multiprocessors (SMs) of the GPU.
        sharded: whether tokens are sharded, so that positions are known only on the device.
    """

    name: ClassVar[str] = "flash"
    needs_an_example: ClassVar[bool] = True
    scale: float
    lse_gradient: bool = False
    version: str = ""
    launched: bool = False
    sms: int = 0
    sharded: bool = False

    # ---- what is refused, and what a plan prints -------------------------------------------------

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, large head dims, masks that are arrays of pairs, and untested versions.

        On Hopper GPUs a bias is added to the scores; `kernels/flash.py` writes masks into the bias.
        """
        reason = _refuse_versions(target) or refuse_operands(call, target.device)
        terms = sort_terms(call.mask)
        reason = reason or refuse_length(call, terms)
        if reason is None and call.bias is not None:
            rule = f"it adds a bias only on Hopper GPUs, and this is {target.device_kind}"
            return None if _launches(target) else Reason("flash", "bias", rule, USE_AUTO)
        if reason is None and refuse_mask("flash", terms) is not None:
            found = split_mask(call.mask)
            reason = found if isinstance(found, Reason) else None
        if reason is not None or not _launches(target):
            return reason
        return refuse_lists(of_call(call, target.device.sms, call.sharded))

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse every call, since gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("flash", "deterministic", rule, USE_AUTO)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Fa4:
        version, sms = target.version("fa4-jax") or "", target.device.sms
        return Fa4(call.scale, call.return_lse, version, _launches(target), sms, call.sharded)

    def lines(self, call: Call) -> Lines:
        runs = f"flash (FlashAttention-4, fa4-jax {self.version})"
        if not self.launched:
            tested = not sort_terms(call.mask).positions or call.mask.is_full
            return Lines(runs, OWN if tested else f"{OWN}; a window around the mask")
        problem = self._problem(call)
        return Lines(runs, forward_launch(problem).line, backward_launch(problem).line)

    def _problem(self, call: Call) -> Problem:
        """Return the problem of a call.

        A sharded band is of kind `known`, since `_over_shifts` computes it in cases.
        """
        terms, lengths = sort_terms(call.mask), (call.q_len, call.kv_len)
        is_case = not terms.rest and terms.band is not None and fits_shards(terms, *lengths)
        return of_call(call, self.sms, self.sharded and not is_case)

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        """Estimate a forward and a backward; None if fa4-jax launches its kernels."""
        if not self.launched:
            return None
        problem = self._problem(call)
        return forward_launch(problem).microseconds, backward_launch(problem).microseconds

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Return advice on the order of segment ids, or the share of pairs that is computed."""
        problem = self._problem(call)
        if self.launched:
            return (sort_note("tiles"),) if problem.kind == "ids" else ()
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

    # ---- both passes -----------------------------------------------------------------------------

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
        problem = of_inputs(given, self.sms)
        if self.launched:
            launch = forward_launch(problem)
            masked = masked_inputs(problem, launch.tile, given, "queries")
            qkv = given.q, given.k, given.v
            found = run.forward(problem, launch, qkv, masked, self.scale)
        else:
            found = elsewhere.forward(problem, given, self.scale)
        return Result(found.out[..., :width], found.lse)

    def _backward(self, inputs: Inputs, rows: Rows) -> Grads:
        width, (given, order) = inputs.q.shape[3], real_keys_first(padded_heads(inputs))
        rows, group = padded_rows(rows, given.q), given.q.shape[2] // given.k.shape[2]
        if given.bias is not None:
            # If query heads share keys, fa4-jax 0.1.0's Hopper backward passes a wrong head and
            # query to `score_mod`, as if the heads were packed.
            k, v = (jnp.repeat(x, group, axis=2) for x in (given.k, given.v))
            given = given.replace(k=k, v=v)
        problem = of_inputs(given, self.sms)
        if self.launched:
            launch = backward_launch(problem)
            masked = masked_inputs(problem, launch.tile, given, "keys")
            rows = rows if masked.all_see and not self.lse_gradient else _without_unseen(rows)
            qkv, dlse = (given.q, given.k, given.v), rows.dlse if self.lse_gradient else None
            found = run.backward(problem, launch, qkv, rows, masked, self.scale, dlse)
        else:
            rows = _without_unseen(rows)
            found = elsewhere.backward(problem, given, rows, self.scale, self.lse_gradient)
        if order is not None:
            back = jnp.argsort(order, axis=1)
            dk, dv = (gathered(x, back) for x in (found.dk, found.dv))
            found = Grads(found.dq, dk, dv)
        dq, dk, dv = (x[..., :width] for x in found[:3])
        if given.bias is not None:
            dk, dv = (_sum_shared(x, group) for x in (dk, dv))
        return Grads(dq.astype(inputs.q.dtype), dk.astype(jnp.float32), dv.astype(jnp.float32))

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
        return self.launched and not self.lse_gradient and fits


def _launches(target: Target) -> bool:
    return target.device.is_a("hopper")


def _refuse_versions(target: Target) -> Reason | None:
    """Refuse untested versions, and an installed fa4-jax that lacks what maxattn uses."""
    for package in ("fa4-jax", CUTLASS):
        if (reason := target.refuse_untested("flash", package)) is not None:
            return reason
    found = library.mismatch() if _launches(target) else None
    if found is None:
        return None
    rule = f"fa4-jax {target.version('fa4-jax')} differs from the tested version: {found}"
    return Reason(
        "flash", "version", rule, f'pip install "fa4-jax{TESTED["fa4-jax"]}"; or {USE_AUTO}'
    )


# ---- around a pass -------------------------------------------------------------------------------


def _over_shifts(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Run `compute`; if a band's offsets are traced, run it as one case of a `lax.switch`.

    In each case positions are known when tracing. Every strategy has offsets that are multiples of
    the shards' lengths; with other offsets, which only the device sees, the result is NaN.
    """
    terms, (t, s) = sort_terms(inputs.mask), (inputs.q.shape[1], inputs.k.shape[1])
    is_traced = any(isinstance(x, jax.Array) for x in (inputs.q_offset, inputs.kv_offset))
    band = terms.band
    if not is_traced or not terms.positions or band is None or terms.rest:
        return compute(inputs, *rows)
    if terms.keys or terms.limits or not fits_shards(terms, t, s):
        return compute(inputs, *rows)

    def case(at: int, q: Array, k: Array, v: Array, *rows: Rows) -> Out:
        move = at - band.offset
        moved = max(0, move), max(0, -move)
        given = inputs.replace(q=q, k=k, v=v, q_offset=moved[0], kv_offset=moved[1])
        return compute(given, *rows)

    shift, operands = inputs.q_offset - inputs.kv_offset, (inputs.q, inputs.k, inputs.v, *rows)
    return over_shifts(band, shift, (t, s), partial(partial, case), *operands)


def _folded(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Run `compute`; under `vmap`, fold the mapped axis into the batch of one call.

    If `vmap` maps a mask array that all batch rows share, the calls run one after another.
    """
    leaves, tree = jax.tree.flatten((inputs.mask, inputs.q_offset, inputs.kv_offset))
    own = [jnp.ndim(x) > 0 and x.shape[0] == inputs.q.shape[0] for x in leaves]
    traced = [isinstance(x, jax.Array) for x in leaves]

    def run_on(q: Any, k: Any, v: Any, mine: Any, given: Any, shared: Any = ()) -> Out:
        left, others = iter(mine), iter(shared)
        found = [
            next(left) if is_own else next(others) if is_traced else x
            for x, is_own, is_traced in zip(leaves, own, traced, strict=True)
        ]
        mask, first, of_keys = jax.tree.unflatten(tree, found)
        moved = inputs.replace(q=q, k=k, v=v, mask=mask, q_offset=first, kv_offset=of_keys)
        return compute(moved, *given)

    mine = [x for x, is_own in zip(leaves, own, strict=True) if is_own]
    shared = [x for x, a, b in zip(leaves, own, traced, strict=True) if b and not a] or None
    return with_batch_folded(run_on, inputs.q, inputs.k, inputs.v, mine, rows, shared=shared)


def _without_unseen(rows: Rows) -> Rows:
    """For queries that see no key, set the LSE to 1e30, so that P is 0, and dout and dlse to 0."""
    empty = rows.lse == NEG_INF
    dout, dlse = cleared(rows.dout, rows.lse), jnp.where(empty, 0.0, rows.dlse)
    return Rows(rows.out, jnp.where(empty, BIG_LSE, rows.lse), dout, dlse)


def _sum_shared(grad: Float[Array, "B S N H"], group: int) -> Float[Array, "B S K H"]:
    """Sum dK or dV over the query heads that share a key head, in float32."""
    b, s, n, h = grad.shape
    return grad.astype(jnp.float32).reshape(b, s, n // group, group, h).sum(3)

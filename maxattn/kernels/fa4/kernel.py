"""FlashAttention-4 on NVIDIA GPUs, through fa4-jax: what `flash` is there.

On Hopper GPUs maxattn launches the library's kernels itself: the launch is a value that is made
once from the problem (problem.py, launch.py), which the plan prints and a pass runs (run.py).
Elsewhere the library launches (elsewhere.py).

Source: Dao-AILab, flash-attention (CuTe kernels); fa4-jax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.errors import Reason
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
    refuse_mask,
    with_batch_folded,
)
from maxattn.kernels.fa4 import elsewhere, library, run
from maxattn.kernels.fa4.launch import backward_launch, forward_launch
from maxattn.kernels.fa4.mask_test import Masked, gathered, masked_inputs, real_keys_first
from maxattn.kernels.fa4.problem import (
    Problem,
    has_kernels,
    lack,
    launches,
    of_call,
    of_inputs,
    refuse_length,
    refuse_lists,
    refuse_operands,
)
from maxattn.kernels.fused import biased
from maxattn.kernels.fused.limits import refuse_head_dim, refuse_size, written_text
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.kernels.memory_efficient import MemoryEfficient
from maxattn.kernels.softmax import BIG_LSE, NEG_INF, column
from maxattn.masks.band_pieces import fits_shards, shifts
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
        version: of fa4-jax.
        launched: whether maxattn launches the library's kernels itself, as it can on Hopper GPUs.
        sms: streaming multiprocessors (SMs) of the GPU.
        sharded: whether positions are known on the device alone.
        plain: computes the backward of a bias that has a gradient; None without a bias.
    """

    name: ClassVar[str] = "flash"
    needs_an_example: ClassVar[bool] = True
    hides_beside_bias: ClassVar[bool] = False
    takes_any_bias: ClassVar[bool] = True
    scale: float
    lse_gradient: bool = False
    version: str = ""
    launched: bool = False
    sms: int = 132
    sharded: bool = False
    plain: Kernel | None = None

    # ---- what is refused, and what a plan says ---------------------------------------------------

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, long heads, tables of pairs, and versions with other operands.

        A bias goes in on Hopper GPUs, with every mask written into it.
        """
        reason = _refuse_versions(target) or refuse_operands(call, target.device)
        terms = sort_terms(call.mask)
        reason = reason or refuse_length(call, terms)
        if reason is None and call.bias is not None:
            return _refuse_bias(call, target)
        if reason is None and refuse_mask("flash", terms) is not None:
            found = split_mask(call.mask)
            reason = found if isinstance(found, Reason) else None
        if reason is not None or not _launches(target):
            return reason
        return refuse_lists(of_call(call, target.device.sms))

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("flash", "deterministic", rule, USE_AUTO)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Fa4:
        """Take the scale, whether the LSE is asked for, and who launches."""
        version, sms = target.version("fa4-jax") or "", target.device.sms
        plain = None if call.bias is None else MemoryEfficient.build(call, config, target)
        return Fa4(
            *(call.scale, call.return_lse, version, _launches(target), sms, call.sharded, plain)
        )

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        runs = f"flash (FlashAttention-4, fa4-jax {self.version})"
        if self.plain is not None:
            plain = "memory_efficient where the bias has a gradient"
            added = f"{self._forward_line(call)}; a bias is added pair by pair"
            return Lines(runs, added, f"{self._backward_line(call)}; {plain}")
        if not self.launched:
            tested = not sort_terms(call.mask).positions or call.mask.is_full
            return Lines(runs, OWN if tested else f"{OWN}; a window around the mask")
        return Lines(runs, self._forward_line(call), self._backward_line(call))

    def _forward_line(self, call: Call) -> str:
        return forward_launch(self._problem(call)).line

    def _backward_line(self, call: Call) -> str:
        return backward_launch(self._problem(call)).line

    def _problem(self, call: Call) -> Problem:
        """Describe a call; a band between shards is one of few cases, which run as known ones."""
        terms, lengths = sort_terms(call.mask), (call.q_len, call.kv_len)
        is_case = not terms.rest and terms.band is not None and fits_shards(terms, *lengths)
        return of_call(replace(call, sharded=self.sharded and not is_case), self.sms)

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        """Estimate a forward and a backward; None if the library launches."""
        if not self.launched:
            return None
        problem = self._problem(call)
        return forward_launch(problem).microseconds, backward_launch(problem).microseconds

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say what a bias takes, which order of ids skips most, what is computed of a mask."""
        if call.bias is not None:
            return (
                f"{written_text(call)}; FlashAttention-4 has no gradient of it: where it has one,"
                " memory_efficient computes the backward",
            )
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
            "FlashAttention-4 skips a mask's empty tiles on Hopper GPUs alone: here it computes and"
            f" tests {100 * computed:.3g}% of all pairs, and the mask allows {100 * allowed:.3g}%",
        )

    # ---- both passes -----------------------------------------------------------------------------

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        if inputs.bias is not None:
            return biased.forward(self, inputs)  # pyright: ignore[reportArgumentType]
        return _over_shifts(partial(_folded, self._forward), inputs)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv) from a given LSE and output, and dbias where a bias has one."""
        if self.plain is not None:
            return self.plain.backward(inputs, rows)
        if inputs.bias is not None:
            return biased.backward(self, inputs, rows)  # pyright: ignore[reportArgumentType]
        return _over_shifts(partial(_folded, self._backward), inputs, rows)

    def without_dbias(self) -> Fa4:
        """Return the kernel whose backward is FlashAttention-4's beside a bias too."""
        return replace(self, plain=None)

    def _forward(self, inputs: Inputs) -> Result:
        width, (given, _) = inputs.q.shape[3], real_keys_first(_padded_heads(inputs))
        problem = of_inputs(given, self.sms)
        if self.launched:
            launch = forward_launch(problem)
            masked = masked_inputs(problem, launch.tile, given, "queries")
            qkv = given.q, given.k, given.v
            found = run.forward(problem, launch, qkv, masked, self.scale, None)
        else:
            found = elsewhere.forward(problem, given, self.scale)
        return Result(found.out[..., :width], found.lse)

    def _backward(self, inputs: Inputs, rows: Rows) -> Grads:
        width, (given, order) = inputs.q.shape[3], real_keys_first(_padded_heads(inputs))
        out, dout = (_pad_heads(x).astype(given.q.dtype) for x in (rows.out, rows.dout))
        rows = Rows(out, rows.lse, dout, rows.dlse)
        problem = of_inputs(given, self.sms)
        if self.launched:
            launch = backward_launch(problem)
            masked = masked_inputs(problem, launch.tile, given, "keys")
            rows = rows if masked.all_see and not self.lse_gradient else _without_unseen(rows)
            qkv, dlse = (given.q, given.k, given.v), rows.dlse if self.lse_gradient else None
            found = run.backward(problem, launch, qkv, rows, masked, self.scale, None, dlse)
        else:
            rows = _without_unseen(rows)
            found = elsewhere.backward(problem, given, rows, self.scale, self.lse_gradient)
        if order is not None:
            back = jnp.argsort(order, axis=1)
            dk, dv = (gathered(x, back) for x in (found.dk, found.dv))
            found = Grads(found.dq, dk, dv)
        dq, dk, dv = (x[..., :width] for x in found[:3])
        return Grads(dq.astype(inputs.q.dtype), dk.astype(jnp.float32), dv.astype(jnp.float32))

    # ---- beside a bias, in which every mask is written -------------------------------------------

    def rectangle_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of a rectangle with a bias."""
        problem, qkv = self._of_bias(inputs), (inputs.q, inputs.k, inputs.v)
        launch = forward_launch(problem)
        return run.forward(problem, launch, qkv, Masked(), self.scale, inputs.bias)

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv) of a rectangle with a bias, from a given output and LSE.

        Each query head gets a key head of its own: if they share one, fa4-jax 0.1.0 hands another
        head and another query to `score_mod` in its backward for Hopper GPUs, as if they were
        packed.
        """
        group = inputs.q.shape[2] // inputs.k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) if group > 1 else x for x in (inputs.k, inputs.v))
        given = replace(inputs, k=k, v=v)
        problem, qkv = self._of_bias(given), (inputs.q, k, v)
        launch = backward_launch(problem)
        found = run.backward(problem, launch, qkv, rows, Masked(), self.scale, inputs.bias)
        dk, dv = (_sum_shared(x, group) for x in (found.dk, found.dv))
        return Grads(found.dq, dk, dv)

    def _of_bias(self, inputs: PieceInputs) -> Problem:
        assert inputs.bias is not None
        own = inputs.bias.shape[0] > 1, inputs.bias.shape[1] > 1
        return of_inputs(Inputs(inputs.q, inputs.k, inputs.v), self.sms)._replace(bias=own)

    # ---- a backward over several blocks of keys --------------------------------------------------

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Tell whether its accumulator could keep dQ in one float32 array."""
        return run.can_add_up((0, 0, call.heads, call.head_dim), (0, 0, call.kv_heads))

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Keep dQ in one float32 array over all blocks, if the launches fit the shapes."""
        if not self._keeps_dq(inputs):
            return super().accumulator(inputs, rows)
        alone = Inputs(inputs.q, inputs.k, inputs.v)  # every pair of it is allowed
        problem = of_inputs(alone, self.sms)
        launch = backward_launch(problem)
        return run.Fa4DqAccumulator(problem, launch, inputs, rows, self.scale)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Say how the accumulator launches."""
        return "dQ in one float32 array, block by block" if self._keeps_dq(inputs) else ""

    def _keeps_dq(self, inputs: Inputs) -> bool:
        fits = run.can_add_up(inputs.q.shape, inputs.k.shape) and inputs.k.shape[1] >= TWO_TILES
        return self.launched and not self.lse_gradient and fits


def _launches(target: Target) -> bool:
    return launches(target.version("fa4-jax") or "", target.device)


def _refuse_versions(target: Target) -> Reason | None:
    """Refuse versions that were not tested, and an installed package with other operands."""
    for package in ("fa4-jax", "nvidia-cutlass-dsl"):
        if (reason := target.refuse_untested("flash", package)) is not None:
            return reason
    found = library.mismatch() if _launches(target) else None
    if found is None:
        return None
    rule = f"fa4-jax {target.version('fa4-jax')} is not as tested: {found}"
    return Reason("flash", "version", rule, f'pip install "fa4-jax>=0.1,<0.2"; or {USE_AUTO}')


def _refuse_bias(call: Call, target: Target) -> Reason | None:
    if not _launches(target):
        rule = f"it adds a bias on Hopper GPUs alone, and this is {target.device_kind}"
        return Reason("flash", "bias", rule, USE_AUTO)
    return refuse_head_dim("flash", call) or refuse_size("flash", call)


# ---- around a pass -------------------------------------------------------------------------------


def _over_shifts(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Compute a band between shards as one of few cases of known positions, under `lax.switch`.

    Whether the offsets are multiples of the shards' lengths, as every strategy has them, is known
    on the device alone: if they are not, the result is NaN.
    """
    terms, (t, s) = sort_terms(inputs.mask), (inputs.q.shape[1], inputs.k.shape[1])
    is_traced = any(isinstance(x, jax.Array) for x in (inputs.q_offset, inputs.kv_offset))
    band = terms.band
    if not is_traced or not terms.positions or band is None or terms.rest:
        return compute(inputs, *rows)
    if terms.keys or terms.limits or not fits_shards(terms, t, s):
        return compute(inputs, *rows)
    cases = shifts(band, t, s)
    step, shift = cases[1] - cases[0], inputs.q_offset - inputs.kv_offset + band.offset
    bounded = jnp.clip(shift, cases[0], cases[-1])

    def case(at: int, q: Array, k: Array, v: Array, *rows: Rows) -> Out:
        move = at - band.offset
        moved = max(0, move), max(0, -move)
        given = inputs.replace(q=q, k=k, v=v, q_offset=moved[0], kv_offset=moved[1])
        return compute(given, *rows)

    branches = [partial(case, at) for at in cases]
    operands = inputs.q, inputs.k, inputs.v, *rows
    found = jax.lax.switch((bounded - cases[0]) // step, branches, *operands)
    is_case = (bounded - cases[0]) % step == 0
    return jax.tree.map(lambda x: jnp.where(is_case, x, jnp.nan), found)


def _folded(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Compute a call; under `vmap`, one batch that holds the mapped axis too.

    Arrays of the mask that all batch rows share are not mapped; if they are, the calls follow each
    other.
    """
    arrays, tree = jax.tree.flatten(inputs.mask)
    own = [x.shape[0] == inputs.q.shape[0] for x in arrays]
    offsets = inputs.q_offset, inputs.kv_offset
    traced = [isinstance(x, jax.Array) for x in offsets]

    def run_on(q: Any, k: Any, v: Any, mine: Any, given: Any, shared: Any = ((), ())) -> Out:
        left, (others, places) = iter(mine), (iter(x) for x in shared)
        mask = jax.tree.unflatten(tree, [next(left if is_own else others) for is_own in own])
        first, of_keys = (
            next(places) if here else x for x, here in zip(offsets, traced, strict=True)
        )
        found = inputs.replace(q=q, k=k, v=v, mask=mask, q_offset=first, kv_offset=of_keys)
        return compute(found, *given)

    mine = [x for x, is_own in zip(arrays, own, strict=True) if is_own]
    others = [x for x, is_own in zip(arrays, own, strict=True) if not is_own]
    places = [x for x, here in zip(offsets, traced, strict=True) if here]
    shared = (others, places) if others or places else None
    return with_batch_folded(run_on, inputs.q, inputs.k, inputs.v, mine, rows, shared=shared)


def _padded_heads(inputs: Inputs) -> Inputs:
    q, k, v = (_pad_heads(x) for x in (inputs.q, inputs.k, inputs.v))
    return inputs.replace(q=q, k=k, v=v)


def _pad_heads(x: Array) -> Array:
    """Pad the head dim to a multiple of 8 with zeros, which change no score."""
    extra = -x.shape[3] % 8
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else x


def _without_unseen(rows: Rows) -> Rows:
    """Give queries that see nothing a large LSE and no gradient: their P is exp(s - 1e30) = 0."""
    empty = rows.lse == NEG_INF
    dout = jnp.where(column(empty), 0, rows.dout).astype(rows.dout.dtype)
    dlse = jnp.where(empty, 0.0, rows.dlse)
    return Rows(rows.out, jnp.where(empty, BIG_LSE, rows.lse), dout, dlse)


def _sum_shared(grad: Float[Array, "B S N H"], group: int) -> Float[Array, "B S K H"]:
    """Sum the gradients of the heads that share a key head, in float32."""
    b, s, n, h = grad.shape
    return grad.astype(jnp.float32).reshape(b, s, n // group, group, h).sum(3)

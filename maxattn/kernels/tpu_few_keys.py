"""`tpu_few_keys`: attention to at most 1,024 keys on TPUs, such as cross-attention to a text.

One tile has all keys. The kernels read q and write the output as projections leave them, so no pass
over the queries stands around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from maxattn.block_sizes.estimated.choose import how_estimated
from maxattn.block_sizes.estimated.few_keys import few_keys_seconds
from maxattn.block_sizes.few_keys import MOST_KEYS, FewKeysTile, tile_of
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.errors import Unsupported
from maxattn.kernels.base import (
    Grads,
    Inputs,
    Kernel,
    Lines,
    Result,
    Rows,
    exact_products,
    real_keys_first,
)
from maxattn.kernels.refusals import refuse_bias, refuse_float16
from maxattn.kernels.softmax import BIG_LSE, NEG_INF, gradient_dtype
from maxattn.kernels.transposed import few_keys
from maxattn.masks.terms import sort_terms
from maxattn.target import Target

USE_OTHER = "set attention: tpu_flash or auto"


@dataclass(frozen=True)
class TpuFewKeys(Kernel):
    """Compute out = softmax(scale * q k^T) v with one tile of all keys.

    The backward is bitwise repeatable. K is multiplied by the scale in float32, and then rounded to
    its dtype.
    """

    name: ClassVar[str] = "tpu_few_keys"
    is_pallas: ClassVar[bool] = True
    needs_an_example: ClassVar[bool] = True
    scale: float  # factor of the scores
    # of_forward, of_backward: the tiles
    of_forward: FewKeysTile
    of_backward: FewKeysTile
    interpret: bool = False  # whether the kernels run in Pallas' interpreter, on a CPU
    float32_qk_product: bool = False  # whether to cast q, k and v to float32 before the kernels

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        name = "tpu_few_keys"
        reason = target.refuse_untested(name, "jax") or refuse_bias(name, call)
        if reason := reason or refuse_float16(name, call, target):
            return reason
        if call.kv_len > MOST_KEYS:
            rule = f"it takes at most {MOST_KEYS:,} keys, and this call has {call.kv_len:,}"
            return Reason("tpu_few_keys", "keys", rule, USE_OTHER)
        terms = sort_terms(call.mask)
        if terms.positions or terms.rest:
            rule = "it takes masks that depend on keys alone, such as KeyPadding"
            return Reason("tpu_few_keys", f"mask {call.mask}", rule, USE_OTHER)
        if tile_of(call, target, backward=True) is None:
            rule = f"a step has all heads that share registers, here too many: {call.heads} query"
            rule += f" and {call.kv_heads} key heads of dim {call.head_dim}"
            return Reason("tpu_few_keys", "heads", rule, USE_OTHER)
        return None

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> TpuFewKeys:
        local = _as_computed(call, config)
        if (reason := TpuFewKeys.supports(local, target)) is not None:
            key = "attention" if call.role == "self" else "cross_attention"
            remedy = f"set {key}: tpu_flash or auto, or float32_qk_product: false"
            raise Unsupported("float32_qk_product", "true", f"{reason.rule}, in float32", remedy)
        forward, backward = (tile_of(local, target, backward=each) for each in (False, True))
        assert forward and backward, local  # `supports` refuses the call otherwise
        interpret, float32 = target.platform == "cpu", config.float32_qk_product
        return TpuFewKeys(call.scale, forward, backward, interpret, float32)

    def lines(self, call: Call) -> Lines:
        how = "interpret mode: for tests" if self.interpret else "Pallas"
        return Lines(f"tpu_few_keys ({how})", str(self.of_forward), str(self.of_backward))

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        found = few_keys_seconds(_as_computed(call, config), target)
        if found is None:
            return ()
        return (f"a device's call takes {found}, {how_estimated(target.device_kind)}",)

    def forward(self, inputs: Inputs) -> Result:
        call, _ = self._call(inputs, self.of_forward)
        with exact_products(call.q.dtype):
            out, lse = few_keys.forward(call, self.interpret)
        return Result(out.astype(inputs.q.dtype), lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        call, order = self._call(inputs, self.of_backward)
        # Not `row_gradient`, which reads heads first: XLA then lays out the kernels' operands anew.
        empty = rows.lse == NEG_INF
        products = rows.dout.astype(jnp.float32) * rows.out.astype(jnp.float32)
        delta = products.sum(axis=3).swapaxes(1, 2) - rows.dlse
        lse, delta = jnp.where(empty, BIG_LSE, rows.lse), jnp.where(empty, 0.0, delta)
        with exact_products(call.q.dtype):
            given = lse, delta, rows.dout.astype(call.q.dtype)
            dq, dk, dv = few_keys.backward(call, *given, self.interpret)
        found = Grads(dq.astype(gradient_dtype(inputs.q)), dk * self.scale, dv)
        return found.in_order(order)

    def _call(
        self, inputs: Inputs, tile: FewKeysTile
    ) -> tuple[few_keys.FewKeysCall, Int[Array, "B S"] | None]:
        """Return the kernels' call, and the order that puts real keys first if flags mark them."""
        inputs, order = real_keys_first(inputs)
        q, k, v = inputs.q, inputs.k, inputs.v
        lengths = sort_terms(inputs.mask).lengths(k.shape[0], k.shape[1], inputs.kv_offset)
        # Only CPUs run it in float16, which has no digits for small keys times the scale.
        if self.float32_qk_product or q.dtype == jnp.float16:
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return few_keys.FewKeysCall.of(q, k, v, lengths, self.scale, tile), order


def _as_computed(call: Call, config: AttentionConfig) -> Call:
    return call.derived(dtype="float32") if config.float32_qk_product else call

"""`Splash`: the base class of the TPU kernels `flash`, `tokamax_flash` and `tpu_flash`.

`Splash` calls a library's forward and backward kernels instead of its public function. So a
backward can take an output and LSE merged over many calls, and dlse, the gradient of the LSE:

    delta = sum(dout * out) - dlse        dS = P * (dP - delta)

`Splash` also pads lengths to tiles, turns masks into tile lists and segment ids, applies the scale,
and handles queries that see no key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, cast

import jax.numpy as jnp

from maxattn.block_sizes import FORWARD, BlockSizes, Change, adjust, padding_notes
from maxattn.block_sizes.estimated.choose import estimate_note, estimated_sizes
from maxattn.block_sizes.estimated.measured import beside_measured
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.devices import Platform
from maxattn.kernels.base import Grads, Inputs, Kernel, Pass, Result, Rows, exact_products
from maxattn.kernels.refusals import refuse_bias, refuse_float16
from maxattn.kernels.softmax import NEG_INF, gradient_dtype, row_gradient
from maxattn.kernels.splash import mask_codes
from maxattn.kernels.splash.calls import Library, SplashProblem, Stats
from maxattn.masks.terms import USE_BLOCKWISE, split_mask, supported_split
from maxattn.target import Target
from maxattn.tuned import leaves_open, tuned_config, tuned_for, tuned_note

NOTHING_SEEN = -1e37  # a query without keys has LSE -2.4e38, or -inf if no tile was visited
SHORTEST_ROW = 48  # tokens of a batch row: blocks of 16 tokens took up to 3.4 times as long
SEGMENTS_REMEDY = "give ids to masks.Segments, or " + USE_BLOCKWISE


@dataclass(frozen=True)
class Splash(Kernel):
    """Compute out = softmax(scale * q k^T) v with the kernels of a library.

    The backward is bitwise repeatable: a grid's steps and sums of partial dQ have a fixed order.
    """

    name: ClassVar[str]
    rows_at_once: ClassVar[bool] = False  # whether the backward is one launch for all batch rows
    is_pallas: ClassVar[bool] = True
    needs_an_example: ClassVar[bool] = True
    scale: float  # factor of the queries, in float32, before they are rounded to their dtype
    blocks: BlockSizes  # tile sizes of the forward and backward kernels
    interpret: bool = False  # whether the kernels run in Pallas' interpreter, on a CPU
    float32_qk_product: bool = False  # whether to cast q, k and v to float32 before the kernel
    changes: tuple[Change, ...] = ()  # how `blocks` differs from the sizes that the user asked for
    # tile sizes of a forward that is not differentiated; None means `blocks`
    inference: BlockSizes | None = None
    # how `inference` differs from the sizes that the user asked for
    inference_changes: tuple[Change, ...] = ()
    # number of a device's cores; if they do not divide the batch, they share the heads
    cores: int = 1

    @staticmethod
    def rows_pay(platform: Platform, tokens: int) -> bool:
        """Return whether blocks of `tokens` tokens are faster as batch rows. A TPU's tiles skip the
        pairs between blocks anyway, and each batch row would be padded to whole tiles.
        """
        return platform != "tpu" and tokens >= SHORTEST_ROW

    @classmethod
    def of(cls, call: Call, config: AttentionConfig, target: Target, **settings: Any) -> Self:
        """Build a kernel with block sizes for training and for inference; a CPU interprets it."""
        config = tuned_config(config, cls.name, call, target)
        float32 = config.float32_qk_product
        local = call.derived(dtype="float32") if float32 else call
        kind = cast(KernelKind, cls.name)
        training, inference = (
            adjust(asked_sizes(config, local, kind, target, t), local, kind, target, t)
            for t in (True, False)
        )
        interpret = target.platform == "cpu"
        blocks, changes = training
        core = target.device.core
        settings["cores"] = core.cores if core else 1
        return cls(call.scale, blocks, interpret, float32, changes, *inference, **settings)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return self.notes_of(None, call, config, target)

    def notes_of(
        self, what: Pass | None, call: Call, config: AttentionConfig, target: Target
    ) -> tuple[str, ...]:
        """Return a plan's notes on padding, and on the source of sizes that the config omits."""
        source = tuned_note(config, self.name, call, target)
        kind, fused = cast(KernelKind, self.name), config.flash_block_sizes.use_fused_bwd_kernel
        if not source and not self.float32_qk_product and _leaves_tiles_open(config, kind):
            source = estimate_note(kind, call, target, what, fused)
        elif (tuned := tuned_for(config, self.name, call, target)) and tuned.estimated:
            source = *source, beside_measured(target.device_kind)
        return (*padding_notes(call, self.blocks), *source)

    def for_inference(self) -> Self:
        if self.inference is None:
            return self
        own = {"blocks": self.inference, "changes": self.inference_changes}
        return replace(self, **own, inference=None, inference_changes=())

    def for_forward_alone(self) -> Self:
        return self.for_inference()

    @property
    def library(self) -> Library:
        raise NotImplementedError

    @property
    def how(self) -> str:
        """The way in which the kernels run, as text for `explain`."""
        return "interpret mode: for tests" if self.interpret else "Pallas"

    def block_lines(self) -> str:
        """Return the sizes and their changes; two lines if inference and training differ."""
        training = f"{self.blocks}{_changed(self.changes)}"
        if self.inference is None or self.inference.part(FORWARD) == self.blocks.part(FORWARD):
            return training
        return f"inference {self.inference}{_changed(self.inference_changes)}\ntraining {training}"

    def forward(self, inputs: Inputs) -> Result:
        dtype = self._compute_dtype(inputs)
        with exact_products(dtype):
            problem = self._problem(inputs, self.library.query_factor(dtype))
            out, lse = problem.forward(self.blocks)
        empty = lse < NOTHING_SEEN
        out = jnp.where(empty[..., None], 0, out).astype(inputs.q.dtype)
        return Result(problem.checked(out.swapaxes(1, 2)), jnp.where(empty, NEG_INF, lse))

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, None); JAX's and tokamax's kernels round dk and dv to k's dtype."""
        out, dout = rows.out.swapaxes(1, 2), rows.dout.swapaxes(1, 2)
        # Queries that see no key get a finite LSE and no gradient: splash never gets -inf.
        lse, delta, dout = row_gradient(out, dout, rows.lse, rows.dlse)
        dtype = self._compute_dtype(inputs)
        with exact_products(dtype):
            problem = self._problem(inputs, self.library.query_factor(dtype))
            stats = Stats(lse, dout.astype(problem.q.dtype), delta)
            dq, dk, dv = problem.backward(self.blocks, stats)
        dq = (dq.astype(jnp.float32) * self.scale).astype(gradient_dtype(inputs.q))
        dk, dv = (x.swapaxes(1, 2).astype(jnp.float32) for x in (dk, dv))
        dk = dk / self.library.query_factor(problem.q.dtype)
        return Grads(problem.checked(dq.swapaxes(1, 2)), dk, dv)

    def _compute_dtype(self, inputs: Inputs) -> Any:
        # Only CPUs run it in float16, which has no digits for small queries times the scale.
        wide = self.float32_qk_product or inputs.q.dtype == jnp.float16
        return jnp.dtype(jnp.float32) if wide else inputs.q.dtype

    def _problem(self, inputs: Inputs, factor: float) -> SplashProblem:
        dtype = self._compute_dtype(inputs)
        # Splash has no scale: the queries are multiplied by the scale in float32, then rounded to
        # their dtype. A power of two (head dims 64 and 256) is exact. At head dim 128 in bfloat16,
        # with scores of standard deviation 1 and 9, the RMS error of the output is 2.3e-3 and
        # 5.2e-3; exact scores, as with float32_qk_product, give 1.7e-3 and 1.6e-3.
        q = (inputs.q.astype(jnp.float32) * (self.scale * factor)).astype(dtype).swapaxes(1, 2)
        k, v = (x.astype(dtype).swapaxes(1, 2) for x in (inputs.k, inputs.v))
        parts, offsets = supported_split(inputs.mask), (inputs.q_offset, inputs.kv_offset)
        return SplashProblem(q, k, v, parts, *offsets, self.library, self.cores, self.rows_at_once)


def asked_sizes(
    config: AttentionConfig, local: Call, kind: KernelKind, target: Target, training: bool
) -> FlashBlockSizes:
    """Return the block sizes that a config sets; if none are set, the fastest by estimates."""
    asked = config.flash_block_sizes
    if not _leaves_tiles_open(config, kind):
        return asked
    found = estimated_sizes(kind, local, target, training, asked.use_fused_bwd_kernel)
    return found.sizes.asked() if found else asked


def _leaves_tiles_open(config: AttentionConfig, kind: KernelKind) -> bool:
    """Check whether a config sets no tile size; `flash` may set use_fused_bwd_kernel."""
    asked = config.flash_block_sizes
    names_backward = asked == FlashBlockSizes(use_fused_bwd_kernel=asked.use_fused_bwd_kernel)
    return leaves_open(config, kind) or (kind == "flash" and names_backward)


def refusal(name: str, call: Call, target: Target) -> Reason | None:
    """Refuse a bias, float16 on a TPU, too long shards, and masks that splash cannot evaluate."""
    if reason := refuse_float16(name, call, target) or refuse_bias(name, call):
        return reason
    parts = split_mask(call.mask)
    if isinstance(parts, Reason):
        return replace(parts, who=name)
    rule = mask_codes.too_many_steps(parts.positions, call.kv_len)
    if rule is not None:
        return Reason(name, "mask SegmentLengths", rule, SEGMENTS_REMEDY)
    queries, keys = call.sequence or (call.q_len, call.kv_len)
    if keys != call.kv_len:  # keys are sharded, so their offset is traced
        rule = mask_codes.too_long(parts.positions, call.kv_len, queries, keys)
    return None if rule is None else Reason(name, "length", rule, mask_codes.REMEDY)


def _changed(changes: tuple[Change, ...]) -> str:
    return "".join(f"; changed {change} ({change.reason})" for change in changes)

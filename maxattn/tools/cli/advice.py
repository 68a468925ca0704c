"""What `check` advises about a plan; every line names the setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxattn.block_sizes import BlockSizes, nearest_with_less_padding, padding, padding_text
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import readable
from maxattn.decide import kernel_call
from maxattn.kernels import as_batch_rows, scores_of
from maxattn.plan import Plan
from maxattn.tools.memory import Part, estimate, limit, total

LONG = 4096  # tokens beyond which dense attention is not for use
MUCH_PADDING = 0.10  # of the keys
PADDED_BY_BLOCKS = 0.01  # of a length
MANY_DEVICES = 128  # tokens a device below which a ring sends more than it computes


class Case(NamedTuple):
    """Hold what a rule looks at.

    Args:
        plan: for one shape.
        config: the settings that it was made from.
        training: whether the backward runs too.
        lengths: real keys of each example in place of S, where they are known.
    """

    plan: Plan
    config: AttentionConfig
    training: bool
    lengths: Sequence[int] = ()

    @property
    def local(self) -> Call:
        """What one device computes."""
        return self.plan.strategy.local_call(self.plan.padded_call)

    @property
    def key(self) -> str:
        """The setting that names the kernel."""
        return "cross_attention" if self.plan.call.role == "cross" else "attention"


def advice(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int] = ()
) -> tuple[str, ...]:
    """List what a user should look at, most costly first.

    Args:
        plan: for one shape.
        config: the settings that it was made from.
        training: whether the backward runs too.
        lengths: real keys of each example in place of S, where they are known.
    """
    case = Case(plan, config, training, lengths)
    return tuple(line for rule in RULES for line in rule(case))


def memory_line(plan: Plan, training: bool) -> str:
    """Write the estimate with its sum, beside what the device has."""
    parts, most = estimate(plan, training), limit(plan)
    largest = " + ".join(map(str, sorted(parts, key=lambda part: -part.bytes)))
    has = f" of {readable(most)}" if most else ""
    how = "training" if training else "inference"
    return f"an estimate, attention alone, {how}: {largest} = {readable(total(parts))}{has}"


# ---- the rules -----------------------------------------------------------------------------------


def _memory(case: Case) -> Iterator[str]:
    plan = case.plan
    parts, most = estimate(plan, case.training), limit(plan)
    if most is None or total(parts) <= most:
        return
    needed = f"about {readable(total(parts))} of {readable(most)} on {plan.target.device_kind}"
    yield f"memory does not suffice: {needed}. What helps: {'; '.join(_remedies(case, parts))}"


def _remedies(case: Case, parts: tuple[Part, ...]) -> Iterator[str]:
    """Yield what lowers the memory: settings of the kernel, of the mesh, of training."""
    plan, tpu = case.plan, case.plan.target.platform == "tpu"
    if plan.kernel.name == "dot_product":
        yield f"{case.key}: flash" if tpu else "use_memory_efficient_attention: true"
    if plan.call.batch > 1:
        yield "a smaller batch a device: fewer examples, or more ici_data_parallelism"
    yield from _remedy_by_ring(case)
    if any(part.what.startswith("dq in parts") for part in parts):
        yield "flash_block_sizes.use_fused_bwd_kernel: false, or a longer block_kv_dkv"
    if tpu and case.training and plan.kernel.name == "flash":
        yield "attention: tokamax_flash"
    if case.training and case.config.remat_policy == "NONE":
        yield "remat_policy: FULL, for the layers around attention"
    yield "a larger ici_tensor_parallelism, which splits the heads"


def _remedy_by_ring(case: Case) -> Iterator[str]:
    if case.plan.call.role != "self":
        return
    if case.plan.strategy.name == "ring":
        yield "a larger ici_context_parallelism"
    else:
        yield "attention: ring, with ici_context_parallelism above 1"


def _dense(case: Case) -> Iterator[str]:
    plan = case.plan
    local = as_batch_rows(kernel_call(plan.padded_call, plan.strategy))
    is_long = max(local.q_len, local.kv_len) > LONG and local.kv_len > LONG // 4
    if plan.kernel.name != "dot_product" or not is_long:
        return
    tpu = plan.target.platform == "tpu"
    better = "flash" if tpu else "auto, or use_memory_efficient_attention: true"
    scores = readable(4 * scores_of(local))
    yield (
        f"dot_product above {LONG} tokens holds all scores, {scores} in float32, and its"
        f" time and memory grow with the square of the length: set {case.key}: {better}"
    )


def _nothing_to_shard(case: Case) -> Iterator[str]:
    asked = case.config.strategy_for(case.plan.call.role)
    if asked not in ("auto", "none") and _ways(case.plan) == 1:
        yield (
            f"{asked} was asked for, and the context axis has one device: there is nothing to"
            " shard. Set ici_context_parallelism above 1, or name a kernel alone"
        )


def _ways(plan: Plan) -> int:
    """Return the size of the context axis."""
    return dict(plan.mesh).get("context", 1)


def _short_shards(case: Case) -> Iterator[str]:
    plan, ways = case.plan, _ways(case.plan)
    if plan.call.role == "self" and ways > 1 and plan.q_len // ways < MANY_DEVICES:
        yield (
            f"{plan.q_len // ways} tokens a device: the transfers cost more than the split saves."
            " Lower ici_context_parallelism"
        )


def _padding_attended(case: Case) -> Iterator[str]:
    if case.config.mask_padding_tokens or not case.lengths:
        return
    kv_len = case.plan.call.kv_len
    share = 1 - sum(min(n, kv_len) for n in case.lengths) / (kv_len * len(case.lengths))
    if share > MUCH_PADDING:
        yield (
            f"mask_padding_tokens: false, and {share:.1%} of the keys are padding, which is"
            f" attended to: above {MUCH_PADDING:.0%} it shows in the result. Set"
            " mask_padding_tokens: true"
        )


def _block_padding(case: Case) -> Iterator[str]:
    kernel = case.plan.kernel
    blocks = (kernel if case.training else kernel.for_inference()).blocks
    if not isinstance(blocks, BlockSizes):
        return
    lengths = {"block_q": case.local.q_len, "block_kv": case.local.kv_len}
    for key, length in lengths.items():
        size, notes = getattr(blocks, key), case.plan.notes
        said = any(note.startswith(f"{key}:") for note in notes)  # the plan itself tells of much
        better = nearest_with_less_padding(length, size)
        if padding(length, size).share > PADDED_BY_BLOCKS and better and not said:
            yield f"{key}: {padding_text(length, size)}"


RULES = (_memory, _dense, _nothing_to_shard, _short_shards, _padding_attended, _block_padding)

"""What `check` advises about a plan. It changes nothing, and every line names the setting to
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maxattn.block_sizes import BlockSizes, nearest_with_less_padding, padding
from maxattn.block_sizes.report import padding_text
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import readable
from maxattn.plan import Plan
from maxattn.tools.memory import Part, estimate, limit, total

LONG = 4096  # tokens beyond which dense attention is not for use
MUCH_PADDING = 0.10  # of the keys
PADDED_BY_BLOCKS = 0.01  # of a length
MANY_DEVICES = 128  # tokens a device below which a ring sends more than it computes


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
    return tuple(
        line
        for rule in (
            _memory,
            _dense,
            _nothing_to_shard,
            _short_shards,
            _padding_attended,
            _block_padding,
        )
        for line in rule(plan, config, training, lengths)
    )


def memory_line(plan: Plan, training: bool) -> str:
    """Write the estimate with its sum, beside what the device has."""
    parts, most = estimate(plan, training), limit(plan)
    largest = sorted(parts, key=lambda part: -part.bytes)
    has = f" of {readable(most)}" if most else ""
    how = "training" if training else "inference"
    return (
        f"an estimate, attention alone, {how}: {' + '.join(map(str, largest))} ="
        f" {readable(total(parts))}{has}"
    )


# ---- the rules -----------------------------------------------------------------------------------


def _memory(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    parts, most = estimate(plan, training), limit(plan)
    if most is None or total(parts) <= most:
        return
    yield (
        f"memory does not suffice: about {readable(total(parts))} of {readable(most)} on"
        f" {plan.target.device_kind}. What helps:"
        f" {'; '.join(_remedies(plan, config, training, parts))}"
    )


def _remedies(
    plan: Plan, config: AttentionConfig, training: bool, parts: tuple[Part, ...]
) -> Iterator[str]:
    tpu, role = (
        plan.target.platform == "tpu",
        "cross_attention" if plan.call.role == "cross" else "attention",
    )
    if plan.kernel.name == "dot_product":
        yield f"{role}: flash" if tpu else "use_memory_efficient_attention: true"
    if plan.call.batch > 1:
        yield "a smaller batch a device: fewer examples, or more ici_data_parallelism"
    if plan.call.role == "self" and plan.context.name != "ring":
        yield "attention: ring, with ici_context_parallelism above 1"
    elif plan.call.role == "self":
        yield "a larger ici_context_parallelism"
    if any(part.what.startswith("dq in parts") for part in parts):
        yield "flash_block_sizes.use_fused_bwd_kernel: false, or a longer block_kv_dkv"
    if tpu and training and plan.kernel.name == "flash":
        yield "attention: tokamax_flash"
    if training and config.remat_policy == "NONE":
        yield "remat_policy: FULL, for the layers around attention"
    yield "a larger ici_tensor_parallelism, which splits the heads"


def _dense(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    local = plan.context.local_call(plan.padded_call)
    if (
        plan.kernel.name != "dot_product"
        or max(local.q_len, local.kv_len) <= LONG
        or local.kv_len <= LONG // 4
    ):
        return
    better = (
        "flash"
        if plan.target.platform == "tpu"
        else "auto, or use_memory_efficient_attention: true"
    )
    scores = local.batch * local.heads * local.q_len * local.kv_len * 4
    role = "cross_attention" if plan.call.role == "cross" else "attention"
    yield (
        f"dot_product above {LONG} tokens holds all scores, {readable(scores)} in float32, and its"
        f" time and memory grow with the square of the length: set {role}: {better}"
    )


def _nothing_to_shard(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    asked = config.strategy_for(plan.call.role)
    if asked not in ("auto", "none") and dict(plan.mesh).get("context", 1) == 1:
        yield (
            f"{asked} was asked for, and the context axis has one device: there is nothing to"
            " shard. Set ici_context_parallelism above 1, or name a kernel alone"
        )


def _short_shards(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    ways = dict(plan.mesh).get("context", 1)
    if plan.call.role == "self" and ways > 1 and plan.q_len // ways < MANY_DEVICES:
        yield (
            f"{plan.q_len // ways} tokens a device: the transfers cost more than the split saves."
            " Lower ici_context_parallelism"
        )


def _padding_attended(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    if config.mask_padding_tokens or not lengths:
        return
    keys = plan.call.kv_len * len(lengths)
    share = 1 - sum(min(n, plan.call.kv_len) for n in lengths) / keys
    if share > MUCH_PADDING:
        yield (
            f"mask_padding_tokens: false, and {share:.1%} of the keys are padding, which is"
            f" attended to: above {MUCH_PADDING:.0%} it shows in the result. Set"
            " mask_padding_tokens: true"
        )


def _block_padding(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int]
) -> Iterator[str]:
    blocks = None if training else getattr(plan.kernel, "inference", None)
    blocks = blocks or plan.kernel.blocks
    if not isinstance(blocks, BlockSizes):
        return
    local = plan.context.local_call(plan.padded_call)
    for key, length in (("block_q", local.q_len), ("block_kv", local.kv_len)):
        size = getattr(blocks, key)
        said = any(
            note.startswith(f"{key}:") for note in plan.notes
        )  # the plan itself tells of much
        better = nearest_with_less_padding(length, size)
        if padding(length, size).share > PADDED_BY_BLOCKS and better and not said:
            yield f"{key}: {padding_text(length, size)}"

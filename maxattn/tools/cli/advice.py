"""The advice of `check` about a plan; every line names the setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maxattn.block_sizes import BlockSizes, nearest_with_less_padding, padding, padding_text
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import readable
from maxattn.decide import kernel_call
from maxattn.kernels import as_batch_rows, scores_of
from maxattn.plan import Plan
from maxattn.tools.memory import estimate, limit, total

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
    return (
        *_memory(plan, config, training),
        *_dense(plan),
        *_shards(plan, config),
        *_padding_attended(plan, config, lengths),
        *_block_padding(plan, training),
    )


def memory_line(plan: Plan, training: bool) -> str:
    """Write the estimate with its sum, beside what the device has."""
    parts, most = estimate(plan, training), limit(plan)
    largest = " + ".join(map(str, sorted(parts, key=lambda part: -part.bytes)))
    has = f" of {readable(most)}" if most else ""
    how = "training" if training else "inference"
    return f"an estimate, attention alone, {how}: {largest} = {readable(total(parts))}{has}"


# ---- the rules -----------------------------------------------------------------------------------


def _memory(plan: Plan, config: AttentionConfig, training: bool) -> Iterator[str]:
    parts, most = estimate(plan, training), limit(plan)
    if most is None or total(parts) <= most:
        return
    is_tpu, kernel, helps = plan.target.platform == "tpu", plan.kernel.name, list[str]()
    if kernel == "dot_product":
        dense = "use_memory_efficient_attention: true"
        helps.append(f"{_key(plan)}: flash" if is_tpu else dense)
    if plan.call.batch > 1:
        helps.append("a smaller batch a device: fewer examples, or more ici_data_parallelism")
    if plan.call.role == "self" and plan.strategy.name == "ring":
        helps.append("a larger ici_context_parallelism")
    elif plan.call.role == "self":
        helps.append("attention: ring, with ici_context_parallelism above 1")
    if any(part.what.startswith("dq in parts") for part in parts):
        helps.append("flash_block_sizes.use_fused_bwd_kernel: false, or a longer block_kv_dkv")
    if is_tpu and training and kernel == "flash":
        helps.append("attention: tokamax_flash")
    if training and config.remat_policy == "NONE":
        helps.append("remat_policy: FULL, for the layers around attention")
    helps.append("a larger ici_tensor_parallelism, which splits the heads")
    needed = f"about {readable(total(parts))} of {readable(most)} on {plan.target.device_kind}"
    yield f"memory does not suffice: {needed}. What helps: {'; '.join(helps)}"


def _key(plan: Plan) -> str:
    """Return the setting that names the kernel."""
    return "cross_attention" if plan.call.role == "cross" else "attention"


def _dense(plan: Plan) -> Iterator[str]:
    local = as_batch_rows(kernel_call(plan.padded_call, plan.strategy))
    is_long = max(local.q_len, local.kv_len) > LONG and local.kv_len > LONG // 4
    if plan.kernel.name == "dot_product" and is_long:
        on_gpus = "auto, or use_memory_efficient_attention: true"
        better = "flash" if plan.target.platform == "tpu" else on_gpus
        scores = readable(4 * scores_of(local))
        yield (
            f"dot_product above {LONG} tokens holds all scores, {scores} in float32, and its time"
            f" and memory grow with the square of the length: set {_key(plan)}: {better}"
        )


def _shards(plan: Plan, config: AttentionConfig) -> Iterator[str]:
    """Advise about a context axis with one device, and about short shards."""
    ways, asked = dict(plan.mesh).get("context", 1), config.strategy_for(plan.call.role)
    if asked not in ("auto", "none") and ways == 1:
        yield (
            f"{asked} was asked for, and the context axis has one device: there is nothing to"
            " shard. Set ici_context_parallelism above 1, or name a kernel alone"
        )
    if plan.call.role == "self" and ways > 1 and plan.q_len // ways < MANY_DEVICES:
        yield (
            f"{plan.q_len // ways} tokens a device: the transfers cost more than the split saves."
            " Lower ici_context_parallelism"
        )


def _padding_attended(plan: Plan, config: AttentionConfig, lengths: Sequence[int]) -> Iterator[str]:
    if config.mask_padding_tokens or not lengths:
        return
    kv_len = plan.call.kv_len
    share = 1 - sum(min(n, kv_len) for n in lengths) / (kv_len * len(lengths))
    if share > MUCH_PADDING:
        yield (
            f"mask_padding_tokens: false, and {share:.1%} of the keys are padding, which is"
            f" attended to: above {MUCH_PADDING:.0%} it shows in the result. Set"
            " mask_padding_tokens: true"
        )


def _block_padding(plan: Plan, training: bool) -> Iterator[str]:
    blocks = (plan.kernel if training else plan.kernel.for_inference()).blocks
    if not isinstance(blocks, BlockSizes):
        return
    local = plan.strategy.local_call(plan.padded_call)
    for key, length in {"block_q": local.q_len, "block_kv": local.kv_len}.items():
        size = getattr(blocks, key)
        is_noted = any(note.startswith(f"{key}:") for note in plan.notes)
        better = nearest_with_less_padding(length, size)
        if padding(length, size).share > PADDED_BY_BLOCKS and better and not is_noted:
            yield f"{key}: {padding_text(length, size)}"

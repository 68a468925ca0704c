"""`maxattn check`: print what a config sets, then the plan, memory and advice for each shape.

Every line of advice names the setting to change.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from maxattn._plan import Plan
from maxattn.block_sizes import BlockSizes, nearest_with_less_padding, padding, padding_text
from maxattn.config import AttentionConfig
from maxattn.config.errors import defaults, plain
from maxattn.config.numbers import whole_in
from maxattn.context_parallel.base import readable
from maxattn.decide import kernel_call, plan
from maxattn.devices import memory_of
from maxattn.errors import InputError, MaxattnError, MeshError
from maxattn.explain import explain
from maxattn.kernels import as_batch_rows, scores_of
from maxattn.tools.cli.inputs import Source, mesh_of, packages_of, read_source, shapes_of, target_of
from maxattn.tools.memory import estimate, total
from maxattn.tools.model_shapes import Shape, of_sections

_NO_SHAPE = "no --shape, and the file's `model` section describes none: add --shape to see plans"


def run(args: argparse.Namespace) -> int:
    """Print the resolved config, then each shape."""
    source = read_source(args)
    lengths = _lengths(args.lengths)
    packages_of(args)  # a wrong mesh or target is refused without a shape too
    if args.target:
        target_of(args, source.config)
    shapes = shapes_of(args, source) if args.shape or of_sections(source.sections) else ()
    print(f"{source.path or 'the settings'}: valid\n{resolved(source.config, args.all)}")
    for note in source.notes:
        print(f"  note    {note}")
    for line in _of_this_machine(args, source.config):
        print(f"  advice  {line}")
    if not shapes:
        print(f"\n{_NO_SHAPE}")
        return 0
    return _plans(args, source, shapes, lengths)


def _plans(
    args: argparse.Namespace, source: Source, shapes: tuple[Shape, ...], lengths: tuple[int, ...]
) -> int:
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    # --lengths apply to cross-attention if there is one, else to self-attention.
    padded = "cross" if any(shape.role == "cross" for shape in shapes) else "self"
    for shape in shapes:
        if lengths and shape.role == padded:
            _check_lengths(lengths, shape)
    training, status = not args.inference, 0
    for shape in shapes:
        try:
            made = plan(shape.call(), source.config, mesh, target)
        except MaxattnError as error:
            print(f"\n{shape.name}\n{error}")
            status = 1
            continue
        real = lengths if shape.role == padded else ()
        lines = [explain(made, training), f"  memory  {memory_line(made, training)}"]
        lines += [f"  advice  {line}" for line in advice(made, source.config, training, real)]
        print(f"\n{shape.name}\n" + "\n".join(lines))
        most = memory_of(made.target.device_kind)
        if most is not None and total(estimate(made, training)) > most:
            status = 1
    return status


def _of_this_machine(args: argparse.Namespace, config: AttentionConfig) -> Iterator[str]:
    is_one = all(n in (1, -1) for pair in config.axis_parallelism().values() for n in pair)
    if is_one or args.target or args.mesh or args.devices or config.hardware:
        return
    try:
        config.make_mesh()
    except MeshError as error:
        misfit = f"this machine does not fit the config's mesh, {error.value}: {error.rule}"
        yield f"{misfit}. For another machine add --target KIND"
    except RuntimeError:  # another process uses the devices
        return


def resolved(config: AttentionConfig, every: bool) -> str:
    """Write the keys that differ from their default, or all keys, one on each line."""
    standard = defaults(type(config))
    values = {key: getattr(config, key) for key in type(config).model_fields}
    shown = {key: value for key, value in values.items() if every or value != standard[key]}
    lines = [f"  {key}: {_text(value)}" for key, value in shown.items()]
    return "\n".join(lines) or "  every key is at its default"


def _text(value: Any) -> str:
    if hasattr(value, "model_dump"):
        given = {key: size for key, size in value.model_dump().items() if size is not None}
        return "{" + ", ".join(f"{key}: {_text(size)}" for key, size in given.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def _lengths(text: str | None) -> tuple[int, ...]:
    numbers = [whole_in(word, least=0) for word in text.split(",")] if text else []
    if None in numbers:
        rule = "they must be whole numbers of keys, one for each batch row"
        raise InputError("lengths", plain(text), rule, "write --lengths 300,512")
    return tuple(number for number in numbers if number is not None)


def _check_lengths(lengths: tuple[int, ...], shape: Shape) -> None:
    given, batch = plain(",".join(map(str, lengths))), shape.batch
    if len(lengths) not in (1, batch):
        many = "one length" if batch == 1 else f"{batch} lengths, or one for all"
        rule = f"{shape.name} has B={batch}, so it takes {many}, and {len(lengths)} are given"
        remedy = f"write {many}, or add --batch {len(lengths)}"
        raise InputError("lengths", given, rule, remedy)
    if max(lengths) > shape.kv_len:
        rule = f"{shape.name} has S={shape.kv_len} keys, and {max(lengths)} is more"
        only = "or with --shape name only the shape of these lengths"
        raise InputError("lengths", given, rule, f"write at most {shape.kv_len}, {only}")


# ---- memory and advice ---------------------------------------------------------------------------

LONG = 4096  # tokens beyond which dense attention is impractical
MUCH_PADDING = 0.10  # share of the keys
PADDED_BY_BLOCKS = 0.01  # share of a length
MANY_DEVICES = 128  # tokens per device below which a ring's transfers take longer than its kernels


def advice(
    plan: Plan, config: AttentionConfig, training: bool, lengths: Sequence[int] = ()
) -> tuple[str, ...]:
    """List advice, most costly problem first; `lengths` are each batch row's real keys."""
    return (
        *_memory(plan, config, training),
        *_dense(plan),
        *_shards(plan, config),
        *_padding_attended(plan, config, lengths),
        *_block_padding(plan, training),
    )


def memory_line(plan: Plan, training: bool) -> str:
    """Write the memory estimate, its sum, and the device's memory."""
    parts, most = estimate(plan, training), memory_of(plan.target.device_kind)
    largest = " + ".join(map(str, sorted(parts, key=lambda part: -part.bytes)))
    has = f" of {readable(most)}" if most else ""
    how = "training" if training else "inference"
    return f"an estimate, attention alone, {how}: {largest} = {readable(total(parts))}{has}"


# ---- the rules -----------------------------------------------------------------------------------


def _memory(plan: Plan, config: AttentionConfig, training: bool) -> Iterator[str]:
    parts, most = estimate(plan, training), memory_of(plan.target.device_kind)
    if most is None or total(parts) <= most:
        return
    is_tpu, kernel, helps = plan.target.platform == "tpu", plan.kernel.name, list[str]()
    if kernel == "dot_product":
        dense = "use_memory_efficient_attention: true"
        helps.append(f"{_key(plan)}: flash" if is_tpu else dense)
    if plan.call.batch > 1:
        helps.append("a smaller batch per device: fewer examples, or more ici_data_parallelism")
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
    needed = f"it takes about {readable(total(parts))}, and {plan.target.device_kind} has"
    yield f"memory does not suffice: {needed} {readable(most)}. What helps: {'; '.join(helps)}"


def _key(plan: Plan) -> str:
    return "cross_attention" if plan.call.role == "cross" else "attention"


def _dense(plan: Plan) -> Iterator[str]:
    local = as_batch_rows(kernel_call(plan.padded_call, plan.strategy))
    is_long = max(local.q_len, local.kv_len) > LONG and local.kv_len > LONG // 4
    if plan.kernel.name == "dot_product" and is_long:
        on_gpus = "auto, or use_memory_efficient_attention: true"
        better = "flash" if plan.target.platform == "tpu" else on_gpus
        scores = readable(4 * scores_of(local))
        yield (
            f"dot_product keeps all scores, {scores} in float32, and its time and memory grow with"
            f" the square of the length. Above {LONG} tokens set {_key(plan)}: {better}"
        )


def _shards(plan: Plan, config: AttentionConfig) -> Iterator[str]:
    ways, asked = dict(plan.mesh).get("context", 1), config.strategy_for(plan.call.role)
    if asked not in ("auto", "none") and ways == 1:
        yield (
            f"{asked} is set, and the context axis has one device, so nothing is sharded."
            " Set ici_context_parallelism above 1, or name only a kernel"
        )
    if plan.call.role == "self" and ways > 1 and plan.q_len // ways < MANY_DEVICES:
        yield (
            f"{plan.q_len // ways} tokens per device: the transfers cost more than the split saves."
            " Lower ici_context_parallelism"
        )


def _padding_attended(plan: Plan, config: AttentionConfig, lengths: Sequence[int]) -> Iterator[str]:
    if config.mask_padding_tokens or not lengths:
        return
    kv_len = plan.call.kv_len
    share = 1 - sum(min(n, kv_len) for n in lengths) / (kv_len * len(lengths))
    if share > MUCH_PADDING:
        yield (
            f"mask_padding_tokens is false, and {share:.1%} of the keys are padding. Above"
            f" {MUCH_PADDING:.0%} this changes the result visibly: set mask_padding_tokens: true"
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

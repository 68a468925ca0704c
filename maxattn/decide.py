"""Choose the kernel, the strategy and the layout of a call, each with a reason.

`plan(call, config, mesh, target)` is a pure function from values to a `Plan`. `attention()`
executes that plan and chooses nothing itself, so `explain` prints what runs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from maxattn._plan import Plan
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.config.asked import Asked, checked_config
from maxattn.context_parallel import STRATEGIES
from maxattn.context_parallel import table as strategy_table
from maxattn.context_parallel.base import Strategy
from maxattn.context_parallel.choose import StrategyChoice, choose_strategy
from maxattn.errors import ConfigError, InputError, MeshError, Unsupported
from maxattn.kernels import build
from maxattn.kernels import table as kernel_table
from maxattn.kernels.auto.choose import run_or_choose
from maxattn.masks.operands import without_padding
from maxattn.masks.tree import MOST
from maxattn.sharding import BATCH_AXES, MeshShape, check_names, mesh_shape, ways
from maxattn.target import Target


def plan(
    call: Call,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    target: Target | None = None,
) -> Plan:
    """Choose how a call runs, on this machine or on another one, without running it.

    Args:
        call: the call, e.g. `Call.of(q, k, mask=mask)`.
        config: default `AttentionConfig()`.
        mesh: a `jax.sharding.Mesh`, a mapping such as {"context": 4} (which needs no devices), or
            None, the default, for one device.
        target: the machine; default the config's `hardware`, else this machine.

    Returns:
        The plan; `print(plan)` explains it.

    Raises:
        InputError: `call` is no `Call`, or its sequence is too long.
        MeshError: batch or heads cannot be divided evenly over the mesh.
        Unsupported: the kernel or strategy that the config names cannot compute this call, and
            `fallback` is "error".
        ConfigError: `hardware` is not the target's platform, or `config` or `target` has a wrong
            type.

    >>> x = jax.ShapeDtypeStruct((1, 8192, 8, 64), "bfloat16")
    >>> config = ma.AttentionConfig(attention="ring")
    >>> plan = ma.plan(ma.Call.of(x, x), config, {"context": 4}, ma.Target.named("TPU v5p"))
    >>> plan.kernel.name, plan.strategy.name
    ('tpu_flash', 'ring')
    """
    config = checked_config(config)
    if not isinstance(call, Call):
        rule, remedy = "it must be a Call", "write plan(Call.of(q, k), ...)"
        raise InputError("call", type(call).__name__, rule, remedy)
    if not isinstance(target, Target | None):
        remedy = "write Target.named(name), for example Target.named('TPU v5p')"
        raise ConfigError("target", repr(target), "it must be a Target", remedy)
    if not config.mask_padding_tokens:
        call = call.derived(mask=without_padding(call.mask))
    check_names(mesh)
    return decide(call, config, mesh_shape(mesh), target or default_target(config))


def default_target(config: AttentionConfig) -> Target:
    """Return this machine, or the usual device of another platform if `hardware` names one."""
    here = Target.here()
    named = config.hardware or here.platform
    return here if named == here.platform else Target.named(named)


def check_hardware(config: AttentionConfig, target: Target) -> None:
    """Refuse a config whose `hardware` names another platform than the target's."""
    named = config.hardware
    if named not in (None, target.platform):
        rule = f"hardware must be the target's platform, {target.platform}"
        remedy = f"set hardware={target.platform}, remove hardware, or run on a {named}"
        raise ConfigError("hardware", named, rule, remedy)


class _Question(NamedTuple):
    """The checked arguments of `plan`, and the settings that name the kernel and the strategy."""

    call: Call
    config: AttentionConfig
    mesh: MeshShape
    target: Target
    asked: Asked


@lru_cache(maxsize=4096)
def decide(call: Call, config: AttentionConfig, shape: MeshShape, target: Target) -> Plan:
    """Choose how a checked call runs on a mesh of (axis, size) pairs; errors are those of `plan`.

    If `mask_padding_tokens` is false, the call's mask must already lack its `KeyPadding` terms.
    """
    check_hardware(config, target)
    for key, length in (("q_len", call.q_len), ("kv_len", call.kv_len)):
        if length > MOST:
            rule = f"positions are int32, so a sequence must have at most {MOST} tokens"
            raise InputError(key, length, rule, "split the sequence into several calls")
    _check_divides(call, shape)
    question = _Question(call, config, shape, target, Asked.of(config, call.role))
    over = _choose_strategy(question)
    padded, strategy = over.strategy.padded_call(call), over.strategy
    local, kv_repeat = kernel_call(padded, strategy), padded.kv_heads // call.kv_heads
    name, because = named_kernel(call, config)
    runs = run_or_choose(name, because, local, target, config)
    if runs.fell_back and question.asked.kernel != "auto":
        _refuse_if_asked(question, question.asked.kernel_key, runs.refused[0])
    kernel = build(runs.name, local, config, target)
    names = {kernel.name, strategy.name, *(reason.who for reason in over.refused)}
    notes = _notes(question, kv_repeat, names, strategy.unit())
    return Plan(
        call=call,
        padded_call=padded,
        target=target,
        mesh=shape,
        asked=question.asked.text,
        kernel=kernel,
        strategy=strategy,
        kv_repeat=kv_repeat,
        q_len=padded.q_len,
        kv_len=padded.kv_len,
        because=runs.because,
        notes=(*strategy.notes(), *notes, *kernel.notes(local, config, target), *runs.notes),
        refused=(*over.refused, *runs.refused),
        fell_back=runs.fell_back or bool(over.refused),
        fallback=question.asked.fallback,
        arithmetic=over.arithmetic,
        sums=over.sums,
        warns=runs.warns,
    )


def _check_divides(call: Call, shape: MeshShape) -> None:
    sizes, batch, tensor = dict(shape), ways("B", shape), ways("N", shape)
    if call.batch % batch:
        axes = " x ".join(f"{a}={sizes[a]}" for a in BATCH_AXES if a in sizes)
        rule = f"the batch must be a multiple of {batch}, the product of the mesh axes {axes}"
        fits = -(-call.batch // batch) * batch
        fewer = "fewer devices on data and fsdp, or in Python mesh=False"
        remedy = f"use a batch of {fits}, or {fewer}"
        raise MeshError("batch", call.batch, rule, remedy)
    if call.heads % tensor:
        least = min(call.heads, 4096)
        fits = ", ".join(str(n) for n in range(1, least + 1) if call.heads % n == 0)
        rule = f"heads must be a multiple of the mesh axis tensor={tensor}"
        remedy = f"set the axis tensor (ici_tensor_parallelism) to one of {fits}"
        raise MeshError("heads", call.heads, rule, remedy)


def kernel_call(padded: Call, strategy: Strategy) -> Call:
    """Return the part of a padded call that one kernel computes, with the bias, for refusals."""
    share = strategy.local_call(padded)
    sharded = share.q_len < padded.q_len
    sequence = (padded.q_len, padded.kv_len) if sharded else None
    return share.derived(bias=padded.bias, sharded=sharded, sequence=sequence)


# ---- the strategy --------------------------------------------------------------------------------


def _choose_strategy(question: _Question) -> StrategyChoice:
    call, config, shape, target, asked = question
    if "context" not in dict(shape) or call.role == "cross":
        return StrategyChoice(STRATEGIES["none"].build(shape, config, call, target))
    name, key = asked.strategy, asked.strategy_key
    if name == "auto" and not config.attention_sharding_uniform:
        name, key = "ulysses", "attention_sharding_uniform"
    refused: tuple[Reason, ...] = ()
    if name != "auto":
        named = STRATEGIES[name].build(shape, config, call, target)
        if (reason := named.supports(call)) is None:
            return StrategyChoice(named)
        _refuse_if_asked(question, key, reason)
        refused = (reason,)
    return choose_strategy(call, config, shape, target)._replace(refused=refused)


def _refuse_if_asked(question: _Question, key: str, reason: Reason) -> None:
    """Raise `Unsupported` for a reason if `fallback` is "error"; the error names setting `key`."""
    if question.asked.fallback != "error":
        return
    first = reason.remedy.replace("attention: auto", f"{key}: auto")
    if key == "cross_attention":  # kernels name the setting of self-attention
        first = re.sub(r"(?<!cross_)attention: ", "cross_attention: ", first)
    instead = "set fallback: warn to run another kernel or strategy"
    remedy = f"{first}; or {instead}" if first else instead
    raise Unsupported(key, getattr(question.config, key), reason.rule, remedy)


# ---- the kernel ----------------------------------------------------------------------------------


def named_kernel(call: Call, config: AttentionConfig) -> tuple[str, str]:
    """Return the kernel that a config names for a call, or "auto", and the reason."""
    asked = Asked.of(config, call.role)
    in_chunks, least = config.use_memory_efficient_attention, config.flash_min_seq_length
    if call.q_len < least:
        because = f"T={call.q_len} < flash_min_seq_length={least}"
        return "memory_efficient" if in_chunks else "dot_product", because
    if in_chunks and asked.kernel in ("auto", "dot_product"):
        return "memory_efficient", "use_memory_efficient_attention: true"
    return asked.kernel, "named in the config"


# ---- notes ---------------------------------------------------------------------------------------


def _unread(config: AttentionConfig, runs: set[str]) -> list[str]:
    """Return a note for each changed setting that neither kernel nor strategy reads."""
    if not config.changed:
        return []
    notes = []
    for table in (kernel_table.TABLE, strategy_table.TABLE):
        readers = table.readers()
        # Settings with the fewest readers come first.
        for key in sorted(readers, key=lambda key: len(readers[key])):
            names = [row.title or row.name for row in readers[key]]
            if key in config.changed and not runs & {row.name for row in readers[key]}:
                first = f"{', '.join(names[:-1])} and " if names[1:] else ""
                said = f"only read by {first}{names[-1]}"
                if key == "attention_sharding_uniform":
                    said = "it selects ulysses for self-attention only if no strategy is named"
                notes.append(f"{key} has no effect: {said}")
    return notes


def _notes(question: _Question, repeat: int, runs: set[str], unit: int) -> tuple[str, ...]:
    call, config, shape, _, asked = question
    notes = _unread(config, runs)
    if call.q_len % ways("T", shape):
        notes.append(
            f"T={call.q_len} is no multiple of {ways('T', shape)}: attention pads the sequence, and"
            " outside of attention the compiler chooses how to split it"
        )
    elif call.q_len % unit:
        notes.append(
            f"T={call.q_len} is no multiple of {unit}: to pad the sequence, the compiler moves"
            " tokens between devices"
        )
    if repeat > 1:
        notes.append(
            f"each of the {call.kv_heads} key heads is repeated {repeat} times, so that key heads"
            " divide over the devices"
        )
    named = asked.strategy
    if named not in ("auto", "none") and "context" not in dict(shape):
        notes.append(f"the config names {named}, but the context axis has one device: no transfers")
    if not config.mask_padding_tokens:
        notes.append("mask_padding_tokens: false, so queries attend to padded keys")
    notes += [note for note in (config.spelling_note(), config.axis_mapping_note()) if note]
    return tuple(notes)

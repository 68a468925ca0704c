"""The one place where a choice is made: which kernel, which strategy, which layout, and why.

`plan(call, config, mesh, target)` is a pure function from values to a `Plan`. `attention()`
executes a plan and decides nothing itself, so what is explained is what runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple, cast

from maxattn.block_sizes import padding_notes
from maxattn.call import Call, Reason, without_padding
from maxattn.config import AttentionConfig
from maxattn.config.asked import Asked, checked_config
from maxattn.context_parallel import STRATEGIES, Strategy
from maxattn.context_parallel import table as strategy_table
from maxattn.context_parallel.auto.choose import choose
from maxattn.errors import ConfigError, InputError, MeshError, Unsupported
from maxattn.kernels import KERNELS, Kernel
from maxattn.kernels import table as kernel_table
from maxattn.kernels.auto.order import order
from maxattn.kernels.pair import Pair
from maxattn.kernels.requirements import missing
from maxattn.plan import Plan, pad_call
from maxattn.sharding import BATCH_AXES, MeshShape, mesh_shape, ways
from maxattn.target import Target
from maxattn.tuned import tuned_for, with_sizes


def plan(
    call: Call,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    target: Target | None = None,
) -> Plan:
    """Decide how a call runs.

    Args:
        call: what is computed, e.g. `Call.of(q, k, mask=mask)`.
        config: default `AttentionConfig()`.
        mesh: a `jax.sharding.Mesh`, a mapping such as {"context": 4} (no device needed), or None.
        target: default the config's `hardware` where set, else this machine.

    Raises:
        MeshError: a batch or heads that do not divide over the mesh.
        Unsupported: the kernel or strategy that the user named cannot compute this call, under
            `fallback: error`.
        ConfigError: `hardware` names another platform than the target's, or what is no config or
            target.

    >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), "bfloat16")
    >>> config = ma.AttentionConfig(attention="ring")
    >>> plan = ma.plan(ma.Call.of(x, x), config, {"context": 4}, ma.Target.named("TPU v5p"))
    >>> plan.kernel.name, plan.context.name
    ('flash', 'ring')
    """
    config = checked_config(config)
    if not isinstance(call, Call):
        rule, remedy = "a plan is made for a Call", "write plan(Call.of(q, k), ...)"
        raise InputError("call", type(call).__name__, rule, remedy)
    if not isinstance(target, Target | None):
        remedy = f"write Target.named({target!r})"
        raise ConfigError("target", repr(target), "it must be a Target", remedy)
    if not config.mask_padding_tokens:
        call = replace(call, mask=without_padding(call.mask))
    return _plan(call, cast(Any, config), mesh_shape(mesh), target or default_target(config))


def default_target(config: AttentionConfig) -> Target:
    """Return this machine, or the usual one of another platform that `hardware` names."""
    here = Target.here()
    named = config.hardware or here.platform
    return here if named == here.platform else Target.named(named)


def check_hardware(config: AttentionConfig, target: Target) -> None:
    """Refuse to run where `hardware` names another platform.

    Raises:
        ConfigError: naming both.
    """
    named = config.hardware
    if named not in (None, target.platform):
        rule = f"it must be the platform that runs, and this is {target.platform}"
        remedy = f"set hardware={target.platform}, leave it out, or run where there is a {named}"
        raise ConfigError("hardware", named, rule, remedy)


class _Question(NamedTuple):
    """Hold what a plan is asked for: the arguments of `plan`, checked, and `Asked` of them."""

    call: Call
    config: AttentionConfig
    mesh: MeshShape
    target: Target
    asked: Asked


@lru_cache(maxsize=4096)
def _plan(call: Call, config: AttentionConfig, shape: MeshShape, target: Target) -> Plan:
    check_hardware(config, target)
    _check_divides(call, shape)
    question = _Question(call, config, shape, target, Asked.of(config, call.role))
    over = _choose_strategy(question)
    sizes = _padded_sizes(call, over.strategy)
    local = _local_call(call, over.strategy, sizes)
    runs = _choose_kernel(question, local)
    context = over.strategy.with_kernel(runs.kernel, local)
    return Plan(
        call=call,
        target=target,
        mesh=shape,
        asked=question.asked.text,
        kernel=runs.kernel,
        context=context,
        kv_repeat=sizes.kv_repeat,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        because=runs.because,
        notes=_all_notes(question, context, runs.kernel, over.refused, sizes, local),
        refused=(*over.refused, *runs.refused),
        fell_back=runs.fell_back or bool(over.refused),
        fallback=question.asked.fallback,
        arithmetic=over.arithmetic,
        sums=over.sums,
    )


def _all_notes(
    question: _Question,
    context: Strategy,
    kernel: Kernel,
    refused: tuple[Reason, ...],
    sizes: _Padded,
    local: Call,
) -> tuple[str, ...]:
    call, config, shape, target, _ = question
    runs = {kernel.name, context.name, *(reason.who for reason in refused)}
    notes = _notes(config, call, shape, sizes.kv_repeat, runs, context.unit())
    notes = (*context.notes(), *notes, *padding_notes(local, kernel.blocks))
    if tuned := tuned_for(config, kernel.name, local, target.tuned):
        notes += (f"sizes measured on this machine, {tuned}; from {tuned.source}",)
    return notes


# ---- what must divide ----------------------------------------------------------------------------


def _check_divides(call: Call, shape: MeshShape) -> None:
    """Refuse a batch or heads that cannot be split over the mesh."""
    sizes, batch, tensor = dict(shape), ways("B", shape), ways("N", shape)
    if call.batch % batch:
        axes = " x ".join(f"{a}={sizes[a]}" for a in BATCH_AXES if a in sizes)
        rule = f"it must be a multiple of {batch}, the shards of the mesh axes {axes}"
        fits = -(-call.batch // batch) * batch
        remedy = f"use a batch of {fits}, or fewer devices on data and fsdp"
        raise MeshError("batch", call.batch, rule, remedy)
    if call.heads % tensor:
        divisors = ", ".join(str(d) for d in range(1, call.heads + 1) if call.heads % d == 0)
        rule = f"they must be a multiple of the mesh axis tensor={tensor}"
        remedy = f"set ici_tensor_parallelism to one of {divisors}"
        raise MeshError("heads", call.heads, rule, remedy)


class _Padded(NamedTuple):
    """Hold the lengths after padding to whole shards, and how often key heads are repeated."""

    q_len: int
    kv_len: int
    kv_repeat: int


def _padded_sizes(call: Call, context: Strategy) -> _Padded:
    unit, repeat = context.unit(), lcm(call.kv_heads, context.head_ways()) // call.kv_heads
    q_len, kv_len = (-(-n // unit) * unit for n in (call.q_len, call.kv_len))
    return _Padded(q_len, kv_len if context.kv_letter() == "S" else call.kv_len, repeat)


def _local_call(call: Call, context: Strategy, sizes: _Padded) -> Call:
    """Return the call that one device's kernel gets."""
    padded = pad_call(call, *sizes)
    share = context.local_call(padded)
    # A strategy's local call says nothing of a bias; that there is one decides which kernels can
    # run.
    sharded = share.q_len < padded.q_len
    sequence = (padded.q_len, padded.kv_len) if sharded else None
    return replace(share, bias=padded.bias, sharded=sharded, sequence=sequence)


# ---- the strategy --------------------------------------------------------------------------------


class _Over(NamedTuple):
    """Hold the strategy, what `auto` added up, and who was asked for and refused."""

    strategy: Strategy
    arithmetic: str = ""
    sums: tuple[str, ...] = ()
    refused: tuple[Reason, ...] = ()


def _choose_strategy(question: _Question) -> _Over:
    call, config, shape, target, asked = question
    if "context" not in dict(shape) or call.role == "cross":
        return _Over(_strategy("none", question))
    name, key = asked.strategy, asked.strategy_key
    if name == "auto" and not config.attention_sharding_uniform:
        name, key = "ulysses", "attention_sharding_uniform"
    refused: tuple[Reason, ...] = ()
    if name != "auto":
        named = _strategy(name, question)
        if (reason := named.supports(call)) is None:
            return _Over(named)
        _refuse_if_asked(question, key, reason)
        refused = (reason,)
    choice = choose(call, config, shape, target)
    return _Over(choice.strategy, choice.arithmetic, choice.sums, refused)


def _strategy(name: str, question: _Question) -> Strategy:
    call, config, shape, target, _ = question
    return STRATEGIES[name].build(shape, config, call, target)


def _refuse_if_asked(question: _Question, key: str, reason: Reason) -> None:
    """Raise under `fallback: error`, naming the setting that asked; else the plan keeps the reason.

    Raises:
        Unsupported: with the rule and the remedy of the reason.
    """
    if question.asked.fallback != "error":
        return
    first = reason.remedy.replace("attention: auto", f"{key}: auto")
    remedy = (f"{first}; or " if first else "") + "set fallback: warn to let another one run"
    raise Unsupported(key, getattr(question.config, key), reason.rule, remedy)


# ---- the kernel ----------------------------------------------------------------------------------


class _Runs(NamedTuple):
    """Hold the kernel, why it is this one, who was refused, and whether it is not the named one."""

    kernel: Kernel
    because: str
    refused: tuple[Reason, ...]
    fell_back: bool


def _choose_kernel(question: _Question, local: Call) -> _Runs:
    call, config, _, target, asked = question
    names, because = _candidates(asked.kernel, local, config, call, target)
    refused: list[Reason] = []
    for name in names:
        reason = refusal(name, local, target, config.deterministic)
        if reason is None:
            return _Runs(_build(name, local, config, target), because, tuple(refused), False)
        refused.append(reason)
        if asked.kernel != "auto":
            _refuse_if_asked(question, asked.kernel_key, reason)
    names, because = order(local, target)
    usable = next(n for n in names if refusal(n, local, target, config.deterministic) is None)
    return _Runs(_build(usable, local, config, target), because, tuple(refused), True)


def _build(name: str, local: Call, config: AttentionConfig, target: Target) -> Kernel:
    """Decide everything about a kernel; "a/b" is the forward of a and the backward of b.

    The sizes that the config leaves open are those that were measured on the target, where there
    are any.
    """
    first, _, second = name.partition("/")
    if tuned := tuned_for(config, name, local, target.tuned):
        config = with_sizes(config, name, tuned.sizes)
    kernel = KERNELS[first].build(local, config, target)
    # A pair is made by plan alone, so that it has no `supports` and `build` of its own.
    return (
        cast(Kernel, Pair(kernel, KERNELS[second].build(local, config, target)))
        if second
        else kernel
    )


def _candidates(
    named: str, local: Call, config: AttentionConfig, call: Call, target: Target
) -> tuple[tuple[str, ...], str]:
    """Return the kernels to try, in order, and why the first comes first."""
    if call.q_len < config.flash_min_seq_length:
        dot_product = "memory_efficient" if config.use_memory_efficient_attention else "dot_product"
        return (
            dot_product,
        ), f"T={call.q_len} < flash_min_seq_length={config.flash_min_seq_length}"
    if config.use_memory_efficient_attention and named in ("auto", "dot_product"):
        return ("memory_efficient",), "use_memory_efficient_attention: true"
    if named == "auto":
        return order(local, target)
    return (named,), "named in the config"


def refusal(name: str, local: Call, target: Target, deterministic: bool = False) -> Reason | None:
    """Return why a kernel cannot compute a local call on the target, or None.

    With `deterministic`, one whose backward does not repeat bit for bit is refused too.
    """
    if "/" in name:
        found = (refusal(part, local, target, deterministic) for part in name.split("/"))
        return next((reason for reason in found if reason is not None), None)
    reason = missing(name, target) or KERNELS[name].supports(local, target)
    return KERNELS[name].repeats(local, target) if reason is None and deterministic else reason


# ---- notes ---------------------------------------------------------------------------------------

# What is said of a setting beside who reads it.
_SAID = {
    "attention_sharding_uniform": (
        "it gives self-attention ulysses on a context axis, where no strategy is named"
    ),
}


def _unread(config: AttentionConfig, runs: set[str]) -> list[str]:
    """Say which settings that were changed nothing reads that runs."""
    if not config.changed:
        return []
    notes = []
    for table in (kernel_table.TABLE, strategy_table.TABLE):
        readers = table.readers()
        # Those that one kernel alone reads come first.
        for key in sorted(readers, key=lambda key: len(readers[key])):
            names = [row.title or row.name for row in readers[key]]
            if key in config.changed and not runs & {row.name for row in readers[key]}:
                said = _SAID.get(key, f"read by {' and '.join(names)} alone")
                notes.append(f"{key} has no effect: {said}")
    return notes


def _notes(
    config: AttentionConfig, call: Call, shape: MeshShape, repeat: int, runs: set[str], unit: int
) -> tuple[str, ...]:
    notes = _unread(config, runs)
    if call.q_len % ways("T", shape):
        notes.append(
            f"T={call.q_len} is no multiple of {ways('T', shape)}: attention pads it, and outside"
            " of attention the compiler splits the sequence as it sees fit"
        )
    elif call.q_len % unit:
        notes.append(
            f"T={call.q_len} is no multiple of {unit}: the compiler moves tokens between devices to"
            " pad it"
        )
    if repeat > 1:
        notes.append(
            f"each of the {call.kv_heads} key heads is repeated {repeat} times, to divide over the"
            " devices"
        )
    asked = Asked.of(config, call.role).strategy
    if asked not in ("auto", "none") and "context" not in dict(shape):
        notes.append(f"{asked} was asked for, and the context axis has one device: nothing to send")
    if not config.mask_padding_tokens:
        notes.append("mask_padding_tokens: false, so padding that the caller marks is attended to")
    notes += [note for note in (config.spelling_note(), config.axis_mapping_note()) if note]
    return tuple(notes)

"""The one place where a choice is made: which kernel, which context strategy, which layout, and
why.

`plan(call, config, mesh, target)` is a pure function from values to a `Plan`. `attention()`
executes a plan and decides nothing itself, so what is explained is what runs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import lcm
from typing import Any, cast

from maxattn.block_sizes import padding_notes
from maxattn.call import Call, Reason, Role, without_padding
from maxattn.config import AttentionConfig
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


def checked_config(config: AttentionConfig | None) -> AttentionConfig:
    """Return the config, the default one for None.

    Raises:
        ConfigError: for anything else.
    """
    if config is None:
        return AttentionConfig()
    if isinstance(config, AttentionConfig):
        return config
    raise ConfigError(
        "config",
        type(config).__name__,
        "it must be an AttentionConfig",
        "make one with AttentionConfig(...), AttentionConfig.from_yaml or"
        " AttentionConfig.from_overrides",
    )


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
        `fallback: error`. ConfigError: `hardware` names another platform than the target's, or what
        is no config or target.
    """
    config = checked_config(config)
    if not isinstance(call, Call):
        raise InputError(
            "call",
            type(call).__name__,
            "a plan is made for a Call",
            "write plan(Call.of(q, k), ...)",
        )
    if not isinstance(target, Target | None):
        raise ConfigError(
            "target", repr(target), "it must be a Target", f"write Target.named({target!r})"
        )
    if not config.mask_padding_tokens:
        call = replace(call, mask=without_padding(call.mask))
    return _plan(call, cast(Any, config), mesh_shape(mesh), target or default_target(config))


def default_target(config: AttentionConfig) -> Target:
    """Return this machine, or the usual one of the platform that `hardware` names when this is
    another.
    """
    here = Target.here()
    return (
        here
        if not config.hardware or config.hardware == here.platform
        else Target.named(config.hardware)
    )


def check_hardware(config: AttentionConfig, target: Target) -> None:
    """Refuse to run where `hardware` names another platform.

    Raises:
        ConfigError: naming both.
    """
    if config.hardware not in (None, target.platform):
        raise ConfigError(
            "hardware",
            config.hardware,
            f"it must be the platform that runs, and this is {target.platform}",
            f"set hardware={target.platform}, leave it out, or run where there is a"
            f" {config.hardware}",
        )


@lru_cache(maxsize=4096)
def _plan(call: Call, config: AttentionConfig, shape: MeshShape, target: Target) -> Plan:
    check_hardware(config, target)
    _check_divides(call, shape)
    context, sums, unmet = _choose_strategy(call, config, shape, target)
    repeat = lcm(call.kv_heads, context.head_ways()) // call.kv_heads
    n = context.unit()
    q_len = -(-call.q_len // n) * n
    kv_len = -(-call.kv_len // n) * n if context.kv_letter() == "S" else call.kv_len
    padded = pad_call(call, q_len, kv_len, repeat)
    # A strategy's local call says nothing of a bias; that there is one decides which kernels can
    # run.
    share = context.local_call(padded)
    local = replace(share, bias=padded.bias, sharded=share.q_len < padded.q_len)
    kernel, because, refused, fell = _choose_kernel(local, config, call, target)
    context = context.over(kernel, local)
    role = call.role
    runs = {kernel.name, context.name, *(reason.who for reason in unmet)}
    notes = (*sums, *context.notes(), *_notes(config, call, shape, repeat, runs, n))
    notes += padding_notes(local, kernel.blocks)
    if tuned := tuned_for(config, kernel.name, local, target.tuned):
        notes += (f"sizes measured on this machine, {tuned}; from {tuned.source}",)
    return Plan(
        call,
        target,
        shape,
        _asked(config, role),
        kernel,
        context,
        repeat,
        q_len,
        kv_len,
        because,
        notes,
        (*unmet, *refused),
        fell or bool(unmet),
        config.fallback_for(role),
    )


def _asked(config: AttentionConfig, role: Role) -> str:
    if role == "cross":
        return f"cross_attention: {config.cross_attention}"
    extra = f", attention_kernel: {config.attention_kernel}" if config.attention_kernel else ""
    parallel = (
        f", context_parallel: {config.context_parallel}"
        if config.context_parallel != "auto"
        else ""
    )
    heads = ", attention_sharding_uniform: false" if not config.attention_sharding_uniform else ""
    return f"attention: {config.attention}{extra}{parallel}{heads}"


# ---- what must divide ----------------------------------------------------------------------------


def _check_divides(call: Call, shape: MeshShape) -> None:
    """Refuse a batch or heads that cannot be split over the mesh."""
    sizes, batch, tensor = dict(shape), ways("B", shape), ways("N", shape)
    if call.batch % batch:
        axes = " x ".join(f"{a}={sizes[a]}" for a in BATCH_AXES if a in sizes)
        raise MeshError(
            "batch",
            call.batch,
            f"it must be a multiple of {batch}, the shards of the mesh axes {axes}",
            f"use a batch of {-(-call.batch // batch) * batch}, or fewer devices on data and fsdp",
        )
    if call.heads % tensor:
        divisors = ", ".join(str(d) for d in range(1, call.heads + 1) if call.heads % d == 0)
        raise MeshError(
            "heads",
            call.heads,
            f"they must be a multiple of the mesh axis tensor={tensor}",
            f"set ici_tensor_parallelism to one of {divisors}",
        )


# ---- the strategy --------------------------------------------------------------------------------


def _choose_strategy(
    call: Call, config: AttentionConfig, shape: MeshShape, target: Target
) -> tuple[Strategy, tuple[str, ...], tuple[Reason, ...]]:
    """Return the strategy, the sums of `auto`, and who was asked for and refused."""
    asked = config.strategy_for(call.role)
    if "context" not in dict(shape):
        return STRATEGIES["none"].build(shape, config, call, target), (), ()
    if call.role == "cross":
        return STRATEGIES["none"].build(shape, config, call, target), (), ()
    key = "context_parallel"
    if asked == "auto" and not config.attention_sharding_uniform:
        key, asked = "attention_sharding_uniform", "ulysses"
    reasons: tuple[Reason, ...] = ()
    if asked != "auto":
        named = STRATEGIES[asked].build(shape, config, call, target)
        reason = named.supports(call)
        if reason is None:
            return named, (), ()
        _refuse_if_asked(config, call.role, key, reason)
        reasons = (reason,)
    choice = choose(call, config, shape, target)
    return choice.strategy, choice.sums, reasons


# ---- the kernel ----------------------------------------------------------------------------------


def _choose_kernel(
    local: Call, config: AttentionConfig, call: Call, target: Target
) -> tuple[Kernel, str, tuple[Reason, ...], bool]:
    """Return (kernel, why, who was refused, whether it is not the one the user named)."""
    named = config.kernel_for(call.role)
    names, because = _candidates(named, local, config, call, target)
    refused: list[Reason] = []
    for name in names:
        reason = refusal(name, local, target, config.deterministic)
        if reason is None:
            return _build(name, local, config, target), because, tuple(refused), False
        refused.append(reason)
        if name == named or named != "auto":
            _refuse_if_asked(config, call.role, "attention_kernel", reason)
    names, because = order(local, target)
    usable = next(n for n in names if refusal(n, local, target, config.deterministic) is None)
    return _build(usable, local, config, target), because, tuple(refused), True


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
    """Return why a kernel cannot compute a local call on the target, or not with the same bits
    every time, or None.
    """
    if "/" in name:
        found = (refusal(part, local, target, deterministic) for part in name.split("/"))
        return next((reason for reason in found if reason is not None), None)
    reason = missing(name, target) or KERNELS[name].supports(local, target)
    return KERNELS[name].repeats(local, target) if reason is None and deterministic else reason


def _refuse_if_asked(config: AttentionConfig, role: Role, key: str, reason: Reason) -> None:
    """Raise under `fallback: error`, naming the setting that asked; else the plan keeps the
    reason.
    """
    if config.fallback_for(role) != "error":
        return
    if role == "cross":
        key = "cross_attention"
    elif key != "attention_sharding_uniform" and getattr(config, key) != reason.who:
        key = "attention"
    remedy = (
        reason.remedy.replace("attention: auto", f"{key}: auto") + "; or " if reason.remedy else ""
    )
    raise Unsupported(
        key, getattr(config, key), reason.rule, f"{remedy}set fallback: warn to let another one run"
    )


# ---- notes ---------------------------------------------------------------------------------------

# What is said of a setting beside who reads it.
_SAID = {
    "attention_sharding_uniform": (
        "it gives self-attention ulysses on a context axis, where no strategy is named"
    ),
}


def _unread(config: AttentionConfig, runs: set[str]) -> list[str]:
    """Say which settings that were changed nothing reads that runs."""
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
    asked = config.strategy_for(call.role)
    if asked not in ("auto", "none") and "context" not in dict(shape):
        notes.append(f"{asked} was asked for, and the context axis has one device: nothing to send")
    if not config.mask_padding_tokens:
        notes.append("mask_padding_tokens: false, so padding that the caller marks is attended to")
    notes += [note for note in (config.spelling_note(), config.axis_mapping_note()) if note]
    return tuple(notes)

"""What holds of every plan, whatever it decides."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from maxattn.errors import MaxattnError, Unsupported
from tests.fuzz.case import Names, Wrong

NAMED = ("flash", "tokamax_flash", "tpu_flash", "cudnn", "cudnn_flash_te", "dot_product")


def check_of(words: Mapping[str, Any]) -> Callable[[Names], None]:
    """Return the checks of a plan that was made."""

    def check(names: Names) -> None:
        plan, call = names["plan"], names["call"]
        _hold(
            plan == names["again"] and hash(plan) == hash(names["again"]),
            "two plans of one call differ",
        )
        _hold(plan.diff(names["again"]) == (), "a plan differs from itself")
        _check_texts(names)
        _check_padding(plan, call)
        _check_transfers(plan, words["mesh"])
        _check_kernel(plan, names)
        _check_named(names, words)

    return check


def _hold(fact: bool, otherwise: str) -> None:
    if not fact:
        raise Wrong(otherwise, "print(plan)")


def _check_texts(names: Names) -> None:
    plan = names["plan"]
    _hold(
        plan.kernel.name.split("/")[0] in names["text"] or bool(names["text"]),
        "explain says nothing",
    )
    _hold("nan" not in names["text"].lower().split(), "explain says nan")
    _hold(" -" not in _numbers(names["text"]), f"explain has a negative number: {names['text']}")
    json.dumps(names["facts"])


def _numbers(text: str) -> str:
    """Keep the words that are sizes: `-3 KiB` is wrong, `offset=-3` is a mask's."""
    words = text.split()
    pairs = itertools.pairwise(words)
    return " ".join(
        f" {a}" for a, b in pairs if b.rstrip(",.;") in ("B", "KiB", "MiB", "GiB", "ms", "s")
    )


def _check_padding(plan: Any, call: Any) -> None:
    _hold(plan.q_len >= call.q_len and plan.kv_len >= call.kv_len, "padding makes a length shorter")
    _hold(
        plan.q_len - call.q_len < 2 * plan.context.unit(), "padding of queries is more than a unit"
    )
    padded = plan.padded_call
    _hold(padded.heads % padded.kv_heads == 0, "key heads do not divide query heads")
    local = plan.context.local_call(padded)
    sizes = (local.batch, local.q_len, local.kv_len, local.heads, local.kv_heads)
    _hold(
        all(isinstance(n, int) and n >= 1 for n in sizes),
        f"a local size is no positive int: {sizes}",
    )
    _hold(local.heads % local.kv_heads == 0, "local key heads do not divide local query heads")


def _check_transfers(plan: Any, mesh: Mapping[str, int] | None) -> None:
    for transfer in plan.collectives:
        size = getattr(transfer, "bytes", getattr(transfer, "size", 0))
        _hold(math.isfinite(size) and size >= 0, f"a transfer of {size} bytes: {transfer}")
        axes = getattr(transfer, "axes", ())
        _hold(
            all((mesh or {}).get(a, 1) > 1 for a in axes),
            f"a transfer over an axis of one: {transfer}",
        )


def _check_kernel(plan: Any, names: Names) -> None:
    """Hold that the kernel of the plan supports the call that one device computes."""
    from maxattn.kernels import refusal

    share = plan.strategy.local_call(plan.padded_call)
    sharded = share.q_len < plan.q_len
    sequence = (plan.q_len, plan.kv_len) if sharded else None
    local = share.derived(bias=plan.padded_call.bias, sharded=sharded, sequence=sequence)
    reason = refusal(plan.kernel.name, local, names["target"], names["config"].deterministic)
    _hold(reason is None, f"the plan runs {plan.kernel.name}, which refuses: {reason}")


def _check_named(names: Names, words: Mapping[str, Any]) -> None:
    """Without a mesh, naming a kernel is refused exactly where the kernel refuses the call."""
    import maxattn as ma
    from maxattn.kernels import refusal

    if words["mesh"]:
        return
    call, target = names["call"], names["target"]
    for kernel in NAMED:
        key = "attention" if call.role == "self" else "cross_attention"
        config = ma.AttentionConfig(**{key: kernel})
        reason, refused = refusal(kernel, call, target), _refused(ma, call, config, target)
        _hold(
            (reason is not None) == refused,
            f"{kernel}: supports says {reason}, a plan is refused: {refused}",
        )
        _check_shorter(ma, names, config, refused, words)


def _check_shorter(
    ma: Any, names: Names, config: Any, refused: bool, words: Mapping[str, Any]
) -> None:
    """What a kernel takes at a length, it takes at half of it where no mask names lengths."""
    if (
        refused
        or words["mask"] != "None"
        or words["bias"] != "None"
        or min(words["t"], words["s"]) < 512
    ):
        return
    half = names["call_of"](words["t"] // 256 * 128, words["s"] // 256 * 128)
    _hold(
        not _refused(ma, half, config, names["target"]), f"{config.changed}: takes T, refuses T / 2"
    )


def _refused(ma: Any, call: Any, config: Any, target: Any) -> bool:
    try:
        ma.plan(call, config, None, target)
    except Unsupported:
        return True
    except MaxattnError as error:
        raise Wrong(f"a kernel that is named is refused by another error: {error!r}") from error
    return False

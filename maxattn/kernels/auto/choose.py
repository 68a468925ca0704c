"""Which kernel `auto` chooses: by measurements of `maxattn tune`, else by rules.

Rules for NVIDIA GPUs are in gpu.py, estimates for TPUs in tpu.py. On a CPU, on an AMD GPU, for
float32 on a GPU, and for calls that no fused kernel takes, the number of scores decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.versions import AITER
from maxattn.kernels import computed_call, refusal, scores_of
from maxattn.kernels.auto.tuned_order import PLAIN, Candidates, tuned_order
from maxattn.target import Target

DEFAULTS = AttentionConfig()
UNMEASURED = "a rule, not measured on this machine"
# The most scores (B N T S of one device) with which dense attention is at least as fast as chunks,
# and where that was measured. On a GPU memory sets the limit: float32 scores take 4 GB there.
DENSE_SCORES: dict[str, tuple[float, str]] = {
    "cpu": (4e6, "measured on 2 CPU cores"),
    "gpu": (1e9, "measured on an H200"),
    "tpu": (4e6, UNMEASURED),
}


class KernelChoice(NamedTuple):
    """The kernel that runs, and what the plan prints about the choice."""

    # name, because: the kernel's name, and the reason for it
    name: str
    because: str
    # why kernels that come earlier in the order, or that the user named, cannot run
    refused: tuple[Reason, ...] = ()
    fell_back: bool = False  # whether the user named another kernel, which cannot run
    warns: bool = False  # whether the kernel is slow for a reason that the caller can remove
    notes: tuple[str, ...] = ()  # further lines of the plan


def run_or_choose(
    name: str, because: str, local: Call, target: Target, config: AttentionConfig = DEFAULTS
) -> KernelChoice:
    """Return the named kernel if it can compute a local call, else the kernel that `auto` chooses.

    Args:
        name: the kernel's name, or "auto".
        because: why the config names this kernel.
        local, target, config: as for `choose_kernel`.
    """
    reason = None if name == "auto" else refusal(name, local, target, config.deterministic)
    if reason is None and name != "auto":
        return KernelChoice(name, because)
    chosen = choose_kernel(local, target, config)
    return chosen if reason is None else chosen._replace(refused=(reason,), fell_back=True)


def choose_kernel(local: Call, target: Target, config: AttentionConfig = DEFAULTS) -> KernelChoice:
    """Return the first kernel that can compute a local call on the target.

    Args:
        local: the call that one device computes.
        target: the machine.
        config: `deterministic` excludes kernels; only measurements with equal settings count.
    """
    usual = order(_as_computed(local, config, target), target)
    tuned = tuned_order(local, target, config, usual)
    refused: list[Reason] = []
    for name, because in tuned.candidates if tuned else usual:
        reason = refusal(name, local, target, config.deterministic)
        if reason is None:
            # Plain JAX runs because of a bias or of float32, which the caller can change. If the
            # call was measured, the plan gives the measurement as the reason, and not float32.
            is_avoidable = local.bias is not None or (local.dtype == "float32" and not tuned)
            lost = target.device.vendor == "NVIDIA" and is_avoidable and name in PLAIN
            is_untested = any(reason.feature == "version" for reason in refused)
            warns = is_untested or (lost and not config.deterministic)
            failed, notes = (tuned.failed, tuned.notes) if tuned else ((), ())
            return KernelChoice(name, because, (*refused, *failed), warns=warns, notes=notes)
        refused.append(reason)
    raise AssertionError("plain JAX computes every call")


def _as_computed(local: Call, config: AttentionConfig, target: Target) -> Call:
    """Return the call with the dtype in which a TPU's tiled kernels compute it."""
    is_wide = config.float32_qk_product and target.platform == "tpu"
    return local.derived(dtype="float32") if is_wide else local


def order(call: Call, target: Target) -> Iterator[tuple[str, str]]:
    """Yield the kernels to try in order, each with the reason that the plan prints.

    >>> v5p = Target.named("TPU v5p")
    >>> [name for name, _ in order(Call(1, 4096, 4096, 8, 8, 64, "bfloat16"), v5p)]
    ['tpu_flash', 'flash', 'memory_efficient', 'dot_product']
    """
    if not _has_fused(call, target):
        yield from _plain(call, target, _no_fused(target))
        return
    from maxattn.kernels.auto import gpu

    lost = "this bias" if call.bias is not None else "this call"
    yield from gpu.candidates(call, target)
    yield from _plain(call, target, f"plain JAX, since no fused kernel takes {lost}; ")


def _has_fused(call: Call, target: Target) -> bool:
    """Check whether the target is an NVIDIA GPU and its libraries take the call's dtype."""
    return target.device.vendor == "NVIDIA" and call.dtype != "float32"


def _no_fused(target: Target) -> str:
    """Return why plain JAX runs on a GPU; on AMD's, mention AITER's attention if jax has it."""
    if target.device.vendor == "NVIDIA":
        remedy = "cast q, k and v to bfloat16, or give modules dtype=jnp.bfloat16"
        return f"plain JAX, since no fused kernel takes float32: {remedy}; "
    if target.device.vendor != "AMD":
        return ""
    why = "plain JAX, since maxattn's fused kernels are for NVIDIA GPUs"
    has_aiter = target.version(AITER) is not None
    own = "; this jax has AITER's attention (jax._src.aiter), which maxattn does not call"
    return f"{why}{own if has_aiter else ''}; "


def _plain(call: Call, target: Target, why: str) -> Candidates:
    """Order plain JAX's kernels by the number of scores; if many, a TPU tries tiled ones first."""
    scores = scores_of(call)
    most, measured = DENSE_SCORES[target.platform]
    where = UNMEASURED if target.device.vendor == "AMD" else measured
    size, limit = f"{_millions(scores)} scores", f"{_millions(most)} a device"
    if scores <= most:
        because = f"{why}dense, since {size} <= {limit} ({where})"
        return ("dot_product", because), ("memory_efficient", because)
    because, tiled = f"{why}not dense, since {size} > {limit} ({where})", ()
    if target.platform == "tpu":
        from maxattn.kernels.auto import tpu

        tiled, estimates = tpu.tiled_kernels(computed_call("flash", call, "tpu"), target)
        because += f"; {estimates}"
    return tuple((name, because) for name in (*tiled, *PLAIN))


def _millions(n: float) -> str:
    return f"{n / 1e6:,.0f} million" if n >= 1e9 else f"{n / 1e6:.3g} million"

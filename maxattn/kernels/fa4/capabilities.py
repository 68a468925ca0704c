"""The GPUs that fa4-jax has kernels for, and their largest head dim.

Source: fa4-jax 0.1.0, fa4_jax/kernels.py. Compute capability 9.x runs its Hopper kernels and 10.x
those of Blackwell; the others, and backwards that these two do not take, run its kernels for
Ampere, in tiles that fit their shared memory. tests/gpu/test_fa4_capabilities.py compares the table
with the library's own checks.
"""

from __future__ import annotations

from maxattn.call import Call, Reason
from maxattn.devices import Device
from maxattn.kernels.base import USE_AUTO, refuse_call

# By the first number of the compute capability: forward and backward, every dtype, mask and
# grouping of heads that the library takes.
HEAD_LIMITS = {8: 256, 9: 256, 10: 128, 12: 256}
LEAST, MOST = min(HEAD_LIMITS.values()), max(HEAD_LIMITS.values())


def has_kernels(device: Device) -> bool:
    """Tell whether fa4-jax has kernels for a GPU; one that is not known is taken to have them."""
    return device.capability is None or device.capability[0] in HEAD_LIMITS


def head_limit(device: Device) -> int:
    """Return the largest head dim on a GPU, the least of all where it is not known."""
    return HEAD_LIMITS.get(device.capability[0], LEAST) if device.capability else LEAST


def lack(device: Device) -> str:
    """Say which GPUs fa4-jax has no kernels for."""
    return f"fa4-jax has no kernels for compute capability {device.capability_text}"


def refuse(call: Call, device: Device) -> Reason | None:
    """Return why fa4-jax cannot compute a call on a GPU, but for its mask."""
    if not has_kernels(device):
        takes = ", ".join(f"{major}.x" for major in HEAD_LIMITS)
        rule = f"{lack(device)}, but for {takes}"
        return Reason("flash", "device", rule, USE_AUTO)
    most, text = head_limit(device), device.capability_text
    named = f"compute capability {text}" if text else device.kind
    return refuse_call("flash", call, most, named if most < MOST else "")

"""What cuDNN's attention takes, by compute capability.

Source: NVIDIA cudnn-frontend 1.23, the checks of its forward and of its backward; jax 0.12 for
compute capability 10.3.
"""

from __future__ import annotations

from maxattn.call import Call, Reason
from maxattn.devices import Device
from maxattn.jax_private.versions import CUDNN, numbers
from maxattn.kernels.base import USE_AUTO, refuse_call
from maxattn.target import Target

LEAST_CAPABILITY = (8, 0)
# Forwards take longer heads on some GPUs, backwards on compute capability 9.x alone.
HOPPER, HEAD_LIMIT, HOPPER_HEAD_LIMIT = 9, 128, 256
LEAST_CUDNN = {(10, 3): "9.11"}  # by compute capability


def version(target: Target) -> str | None:
    """Return the version of pip's cuDNN on a target, None where it is not known."""
    return next((v for v in map(target.version, CUDNN) if v is not None), None)


def head_limit(device: Device) -> int:
    """Return the largest head dim that forward and backward take on a GPU."""
    capability = device.capability
    return HOPPER_HEAD_LIMIT if capability and capability[0] == HOPPER else HEAD_LIMIT


def refuse(who: str, call: Call, target: Target) -> Reason | None:
    """Return why cuDNN cannot compute a call on a target, but for its mask."""
    most = head_limit(target.device)
    where = "" if most == HOPPER_HEAD_LIMIT else _named(target)
    return _refuse_device(who, target) or refuse_call(who, call, most, where)


def _refuse_device(who: str, target: Target) -> Reason | None:
    capability = target.device.capability
    if capability is None:
        return None
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = target.device.capability_text
        rule = f"it needs compute capability {least} or newer, and {target.device_kind} has {has}"
        return Reason(who, "device", rule, USE_AUTO)
    least, there = LEAST_CUDNN.get(capability), version(target)
    if least is None or there is None or not numbers(there) or numbers(there) >= numbers(least):
        return None
    rule = f"on {_named(target)} it needs cuDNN {least} or newer, and this is {there}"
    return Reason(who, "version", rule, f"install a newer cuDNN, or {USE_AUTO}")


def _named(target: Target) -> str:
    """Name the GPUs that a limit is of: by compute capability where that is known."""
    text = target.device.capability_text
    return f"compute capability {text}" if text else target.device_kind

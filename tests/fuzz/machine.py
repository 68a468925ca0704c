"""Which machine this is, and jax set up for it as the tests do."""

from __future__ import annotations

import os

from tests.fuzz.case import Machine

# Most of a case's time is compiling small programs: these leave out what makes them fast.
ON_CPU = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def set_up() -> Machine:
    """Choose the devices before jax starts, and say what there is."""
    flags = os.environ.get("XLA_FLAGS", "")
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or not _sees_gpu():
        added = [f for f in ON_CPU if f.partition("=")[0] not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["MAXATTN_CACHE"] = os.devnull
    return describe()


def _sees_gpu() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")


def describe() -> Machine:
    """Read the devices off jax."""
    import jax

    from maxattn.target import installed

    packages = tuple(name for name, _ in installed())
    return Machine(jax.default_backend(), jax.device_count(), packages)

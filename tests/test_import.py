"""`import maxattn` is light, touches no backend, and exports what it says."""

from __future__ import annotations

import subprocess
import sys

import maxattn as ma

PROBE = """
import time
start = time.process_time()
import jax, flax.nnx
base = time.process_time()
import maxattn
done = time.process_time()
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was initialised"
import sys
heavy = {"matplotlib", "rich", "optax", "orbax", "sklearn", "grain", "safetensors"}
heavy = (heavy | {"transformer_engine", "tokamax"}) & set(sys.modules)
assert not heavy - set(before), heavy
print(done - base)
""".replace(
    "import maxattn\ndone", "before = list(__import__('sys').modules)\nimport maxattn\ndone"
)


def test_importing_costs_under_a_second_and_starts_no_backend() -> None:
    # CPU seconds, the best of at most three: other tests run beside this one.
    assert any(import_seconds() < 1.0 for _ in range(3))


def import_seconds() -> float:
    command = [sys.executable, "-c", PROBE]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_nothing_warns() -> None:
    """Warnings of this Python, jax and flax are errors; maxattn has none at its import, and its
    command line none.
    """
    command = [sys.executable, "-W", "error", "-m", "maxattn", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and not run.stderr, run.stderr


def test_every_public_name_is_there_and_documented() -> None:
    for name in ma.__all__:
        assert getattr(ma, name).__doc__, name

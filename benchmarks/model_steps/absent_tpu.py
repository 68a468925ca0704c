"""Compile for a TPU that this machine does not have: libtpu needs only shapes."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import jax

import maxattn as ma
from maxattn.config import read_target
from maxattn.errors import ConfigError
from maxattn.tools.compile.process import ENVIRONMENT
from maxattn.tools.compile.programs import devices_of

OPTION = "--target"


class AbsentTpu(NamedTuple):
    """The target of plans, and the device of arrays."""

    target: ma.Target
    place: jax.sharding.Sharding

    @classmethod
    def named(cls, name: str) -> AbsentTpu:
        """Describe the first device of a host of TPUs, such as "v6e".

        Raises:
            ConfigError: the name is not a TPU's, or libtpu is not installed.
        """
        kind = read_target(name)
        target = ma.Target.named(kind.kind, ma.Target.here().packages)
        if target.platform != "tpu":
            rule = "it must be a TPU, since libtpu compiles for TPUs alone"
            raise ConfigError(OPTION, name, rule, "write for example v6e")
        if importlib.util.find_spec("libtpu") is None:
            rule = "the TPU's compiler comes with libtpu, which is not installed; no TPU is needed"
            raise ConfigError(OPTION, name, rule, 'pip install "maxattn[tpu]"')
        os.environ.update(ENVIRONMENT)
        return cls(target, jax.sharding.SingleDeviceSharding(devices_of(kind.topology)[0]))

    def put(self, shapes: Any) -> Any:
        """Give shapes the sharding of arrays on the TPU."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place)

        return jax.tree.map(one, shapes)

    def compiled(self, lowered: Any) -> Any:
        """Compile a lowered program whose shapes `put` placed.

        Raises:
            ConfigError: the compiler fails, for example because the memory is too small.
        """
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            kind, first = self.target.device_kind, str(error).partition("\n")[0]
            rule, remedy = f"its compiler failed: {first}", "take fewer frames, or a larger TPU"
            raise ConfigError(OPTION, kind, rule, remedy) from None

"""A TPU that is not here, for which libtpu compiles a step from shapes alone."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

import maxattn as ma
from maxattn.config import read_target
from maxattn.errors import ConfigError

OPTION = "--target"
# Where there is no TPU, libtpu would ask a metadata server for minutes; others may have loaded it.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
OPTIONS = {"TPU v4": {"chip_config_name": "megacore"}}  # one device a chip, as programs see it


class Absent(NamedTuple):
    """A TPU that this machine does not have.

    Args:
        target: what plans are made for.
        place: where its arrays would be.
    """

    target: ma.Target
    place: jax.sharding.Sharding

    @classmethod
    def named(cls, name: str) -> Absent:
        """Describe the first device of a host of TPUs.

        Args:
            name: of the TPU: v5e, v5p, v6e.

        Raises:
            ConfigError: it is no TPU, or libtpu is not installed.
        """
        kind = read_target(name)
        target = ma.Target.named(kind.kind, ma.Target.here().packages)
        if target.platform != "tpu":
            rule = "libtpu compiles for TPUs that are not here, and for nothing else"
            raise ConfigError(OPTION, name, rule, "write for example v6e")
        if importlib.util.find_spec("libtpu") is None:
            rule = "the TPU's compiler comes with libtpu, which is not installed; no TPU is needed"
            raise ConfigError(OPTION, name, rule, 'pip install "maxattn[tpu]"')
        os.environ.update(ENVIRONMENT)
        options: dict[str, Any] = OPTIONS.get(kind.kind, {})
        found = topologies.get_topology_desc(kind.topology, "tpu", **options)
        return cls(target, jax.sharding.SingleDeviceSharding(found.devices[0]))

    def put(self, shapes: Any) -> Any:
        """Say of shapes that their arrays would be there."""

        def one(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.place)

        return jax.tree.map(one, shapes)

    def compiled(self, lowered: Any) -> Any:
        """Compile a program of shapes that were put there.

        Raises:
            ConfigError: the compiler refuses it, as where memory does not suffice.
        """
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            kind, first = self.target.device_kind, str(error).partition("\n")[0]
            rule, remedy = f"its compiler failed: {first}", "take fewer frames, or a larger TPU"
            raise ConfigError(OPTION, kind, rule, remedy) from None

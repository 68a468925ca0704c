"""Whether tensors fit a module: names, shapes and numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.access import dtype_name, variable_at
from maxattn.weights.checks import LISTED
from maxattn.weights.names import Entry

log = logging.getLogger("maxattn")


@dataclass(frozen=True)
class Loaded:
    """Say what a load left out.

    Args:
        missing: tensors that the module needs and the file lacks; their parameters are as they
            were.
        unexpected: tensors of the file that the module has no parameter for.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """List both, a line each."""
        return _listed("missing", self.missing) + _listed("unexpected", self.unexpected)


def check_names(
    wanted: tuple[Entry, ...], held: Mapping[str, Any], result: Loaded, strict: bool, prefix: str
) -> None:
    """Refuse tensors of other shapes, and those that are missing or unexpected where it is strict.

    Raises:
        WeightsError: naming all of them.
    """
    shapes = ((e, tuple(held[e.name].shape)) for e in wanted if e.name in held)
    wrong = [
        f"{e.name} is {got}, and the module has {e.shape}" for e, got in shapes if got != e.shape
    ]
    named = result if strict else Loaded()
    if not strict and result.lines():
        log.warning("weights: %s", "; ".join(result.lines()))
    lines = [*_listed("misshapen", tuple(wrong)), *named.lines()]
    if lines:
        sizes = {"misshapen": wrong, "missing": named.missing, "unexpected": named.unexpected}
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in sizes.items() if names)
        rule = "\n          ".join(["names and shapes must be the module's", *lines])
        raise WeightsError("weights", counts, rule, _remedy(result, prefix))


def check_numbers(
    module: nnx.Module, parameters: Mapping[Any, list[Entry]], held: Mapping[str, Any]
) -> None:
    """Refuse tensors of dtypes that the parameters cannot take.

    A parameter of integers takes its own dtype alone. How large numbers are is seen as they are
    read.

    Raises:
        WeightsError: naming them.
    """
    dtypes = {path: variable_at(module, path).get_value().dtype for path in parameters}
    pairs = [(e, dtypes[path]) for path, parts in parameters.items() for e in parts]
    cast = [(e, d) for e, d in pairs if dtype_name(d) != dtype_name(held[e.name].dtype)]
    checks.dtypes((e.name for e, _ in cast), held)


def _listed(kind: str, names: tuple[str, ...]) -> list[str]:
    more = [f"{kind}: and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"{kind}: {name}" for name in names[:LISTED]] + more


def _remedy(result: Loaded, prefix: str) -> str:
    """Say what would help: where every name lacks the same beginning, that beginning."""
    for name in result.missing[:1]:
        bare = name.removeprefix(prefix)
        for other in result.unexpected:
            if other.endswith(f".{bare}"):
                begin = repr(other.removesuffix(bare))
                return f"the names begin with {begin}: pass prefix={begin}"
    return "build the module with the sizes of the weights; strict=False loads what fits by name"

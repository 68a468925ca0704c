"""Weights under the names of a model's own code, as those who train with that code save them.

Their programs wrap the model, so the names begin with the wrappers': "generator_ema.model." are the
averaged parameters of Self-Forcing and its kin, "generator.model." those of the last step, and
FSDP leaves a word of its own within.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from maxattn.errors import WeightsError
from maxattn.weights.fused import Shown
from maxattn.weights.names import Entry
from maxattn.weights.naming import wan

log = logging.getLogger("maxattn")

Family = Callable[[Iterable[str]], dict[str, str]]
FAMILIES: Final[tuple[Family, ...]] = (wan.originals,)
# Averaged parameters first: they draw better than those of the last step.
PREFIXES: Final = (
    "generator_ema.model.", "generator_ema.", "generator.model.", "generator.", "model.", "",
    "model.diffusion_model.", "diffusion_model.",
)  # fmt: skip
FSDP: Final = "_fsdp_wrapped_module."
_ENDS: Final = (".weight", ".bias")


def in_our_names(
    held: Mapping[str, Any], wanted: tuple[Entry, ...], prefix: str
) -> Mapping[str, Any]:
    """Return tensors under diffusers' names, if they have those of the model's own code.

    Args:
        held: the tensors.
        wanted: those of the module, each name with the prefix.
        prefix: of the tensors that are meant; "" looks for one of `PREFIXES`.

    Returns:
        The tensors behind the prefix, in diffusers' names where the module has one; all of them as
        they are if none has a name of the model's own code.

    Raises:
        WeightsError: two tensors come to one name.
    """
    bare = [entry.name.removeprefix(prefix) for entry in wanted]
    clean = _without_fsdp(held)
    for family in FAMILIES:
        ours = _diffusers_names(family, bare)
        begins = (prefix,) if prefix else PREFIXES
        there = [begin for begin in begins if any(begin + name in clean for name in ours)]
        if len(there) > 1:
            others = " and ".join(f'"{begin}"' for begin in there[1:])
            told = 'weights: those that begin with "%s" are taken, and %s left out'
            log.warning(told + "; prefix= names others", there[0], others)
        if there:
            behind = [(n.removeprefix(there[0]), n) for n in clean if n.startswith(there[0])]
            # A tensor that no rule names keeps its name.
            where = {prefix + ours.get(rest, rest): (clean[n], None) for rest, n in behind}
            return Shown(held, where)
    return held


def _without_fsdp(held: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each tensor in the file, by its name without FSDP's word."""
    clean: dict[str, str] = {}
    for name in held:
        if (other := clean.setdefault(name.replace(FSDP, ""), name)) != name:
            rule = f"{other} is the same parameter, but for FSDP's word"
            raise WeightsError("weights", name, rule, "leave one of them out of the file")
    return clean


def _diffusers_names(family: Family, bare: Iterable[str]) -> dict[str, str]:
    """Return diffusers' name of each tensor that the model's own code names otherwise."""
    ends = {name: next((end for end in _ENDS if name.endswith(end)), "") for name in bare}
    theirs = family({name.removesuffix(end) for name, end in ends.items()})
    split = [(name, name.removesuffix(end), end) for name, end in ends.items()]
    return {theirs[layer] + end: name for name, layer, end in split if layer in theirs}

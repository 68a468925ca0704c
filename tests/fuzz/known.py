"""Faults that are known and not yet mended: counted apart, never hidden.

Empty this list as they are mended; what comes back is then a failure again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.fuzz.case import Case


class Known(NamedTuple):
    """Name a fault.

    Args:
        letter: of the list of faults.
        category: a pattern of the categories where it shows.
        what: a pattern of what the case did.
        facts: what the case was about: names and patterns of their values.
        reason: the fault, in a sentence.
    """

    letter: str
    category: str
    what: str
    facts: dict[str, str]
    reason: str


_NUMBERS = r"(are wrong|along a way)"
KNOWN: tuple[Known, ...] = (
    Known("B", "commands", r"^foreign TypeError at decide.py|it prints", {},
          "sizes of a file's sections are not checked: booleans, negative numbers, text"),
    Known("E", "yaml|commands", "takes more than", {"data|yaml": r"a1: &a1|<<|\*m"},
          "aliases of aliases are walked each time that they are named"),
    Known("E", "lora", "takes more than", {"metadata": "alpha_pattern"},
          "a pattern of a header can take exponential time"),
    Known("E", "attention|meshes|transforms", "takes more than|MemoryError|process died",
          {"mask": r"(KeyLimit.*){12}"}, "every hidden range of keys doubles the intervals"),
    Known("E", "plans", "takes more than|MemoryError", {"mesh": r"\d{6}"},
          "a mesh of a billion devices is walked"),
    Known("S", "plans|commands", "takes more than", {},
          "maps of blocks of long sequences are walked on the host, even of a full mask"),
    Known("F", "meshes|transforms|modules", "NotImplementedError.*feature request", {},
          "all_to_all over groups of an axis has no batching rule"),
    Known("G", "tuned", "", {}, "a damaged file of tuned sizes ends every call"),
    Known("H", "transforms", "^foreign", {"how": r"nnx\.Param"}, "an nnx.Param as q, k or v"),
    Known("I", "weights", "is_fully_addressable", {}, "parameters that are numpy arrays"),
    Known("J", "yaml|commands|weights|lora", "^foreign (RecursionError|OverflowError|OSError)", {},
          "deep nesting, numbers beyond float, names that are too long"),
    Known("J", "yaml|commands|lora", "^foreign ValueError.*(4300 digits|integer string)", {},
          "whole numbers of thousands of digits"),
    Known("J", "yaml|commands", "^foreign ValueError.*null", {}, "a path with a null byte"),
    Known("J", "transforms", "^foreign", {"how": "^(jvp|grad of grad|jvp of grad)$"},
          "derivatives that a kernel does not have are jax's errors"),
    Known("K", "weights", "became infinite", {},
          "a float32 number between bfloat16's end and its own"),
    Known("L", "attention|meshes|transforms", _NUMBERS, {"bias": "^(keys|rows)$"},
          "the level of a bias is taken over hidden keys too"),
    Known("M", "attention|meshes", " is nan", {"hidden": "nan|inf"},
          "NaN or inf in keys that nobody sees reach the output"),
    Known("N", "attention|meshes|transforms|modules", "are wrong|along a way|out",
          {"mask": r"jnp\.asarray\([^M]*uint32"}, "unsigned numbers on the device beyond int32"),
    Known("P", "weights", "no file of the folder holds it", {},
          "an index may name files outside of its folder"),
    Known("P", "lora", "merged as plain LoRA", {},
          "variants of LoRA that are merged as plain ones"),
    Known("T", "checkpoints", "^foreign", {}, "a damaged checkpoint ends in orbax's own errors"),
    Known("Q", "transforms", "^d(q|k|bias)", {"axes": r"^\(None, None, "},
          "vmap over v alone: jax adds the gradient of the shared lse once for every example"),
    Known("R", "transforms", "^got.* is nan", {"how": "^(grad of grad|jvp of grad)$", "bias": "."},
          "second derivatives of dot_product with a bias, unoptimised by XLA"),
)  # fmt: skip


def letter_of(case: Case, what: str) -> str:
    """Return the letter of the known fault that a failure is, or nothing."""
    return next((known.letter for known in KNOWN if _is(known, case, what)), "")


def _is(known: Known, case: Case, what: str) -> bool:
    facts = all(re.search(value, _fact(case, names)) for names, value in known.facts.items())
    return bool(
        facts and re.fullmatch(known.category, case.category) and re.search(known.what, what)
    )


def _fact(case: Case, names: str) -> str:
    """Return a fact of a case; of `a|b`, the one that there is."""
    return next((str(case.facts[name]) for name in names.split("|") if name in case.facts), "")

"""Names and types of a config's values, and rules between two keys.

The rules yield errors instead of raising them, so that one report can list them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from maxattn.config.numbers import LARGEST, MOST_DEVICES, divisors, whole
from maxattn.context_parallel import table as strategy_table
from maxattn.errors import ConfigError
from maxattn.kernels import table as kernel_table

Role = Literal["self", "cross"]
Hardware = Literal["cpu", "gpu", "tpu"]
Fallback = Literal["error", "warn", "allow"]
RingDirection = Literal["auto", "one_way", "both_ways"]
RematPolicy = Literal[
    "NONE", "FULL", "SAVE_ATTENTION", "SAVE_ATTENTION_AND_MATMUL", "MATMUL_WITHOUT_BATCH",
    "OFFLOAD_MATMUL_WITHOUT_BATCH",
]  # fmt: skip
Axis = Literal["data", "fsdp", "context", "tensor"]
AXES: Final[tuple[Axis, ...]] = ("data", "fsdp", "context", "tensor")
BATCH_KEY: Final = "ici_fsdp_batch_parallelism"
PROGRAM_SECTIONS: Final = ("model", "data", "training", "sampling", "rollout")

# Values of `attention` in other projects -> (kernel, strategy).
FOREIGN: Final[Mapping[str, tuple[str, str]]] = {
    "tokamax_ring": ("tokamax_flash", "ring"),
    "tokamax_ring_custom": ("tpu_flash", "ring"),
    "ulysses_custom": ("tpu_flash", "ulysses"),
    "ulysses_custom_fixed_m": ("tpu_flash", "ulysses"),
    "ulysses_ring_custom": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_bidir": ("tpu_flash", "ulysses_ring"),
    "ulysses_ring_custom_fixed_m": ("tpu_flash", "ulysses_ring"),
}


# Functions, since a user may add a kernel or a strategy to the tables.
def kernels() -> tuple[str, ...]:
    """Return the names of kernels."""
    return "auto", *kernel_table.spellings()


def strategies() -> tuple[str, ...]:
    """Return the names of context strategies."""
    return "auto", *strategy_table.TABLE


def attentions() -> tuple[str, ...]:
    """Return the allowed values of `attention`: a kernel, a strategy, or both in one word."""
    return *kernels(), *strategy_table.in_attention(), *FOREIGN


def kernel_and_strategy(attention: str) -> tuple[str, str]:
    """Split a value of `attention` into (kernel, strategy); "auto" leaves a choice open."""
    if attention in strategy_table.in_attention():
        return "auto", attention
    return FOREIGN.get(attention, (attention, "auto"))


def contradictions(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each pair of keys of an `AttentionConfig` that contradict each other."""
    named = kernel_and_strategy(values["attention"])
    others = (("attention_kernel", "kernel"), ("context_parallel", "strategy"))
    for (key, word), theirs in zip(others, named, strict=True):
        if theirs != "auto" and values[key] not in (None, "auto", theirs):
            rule = f"`attention: {values['attention']}` already names the {word} {theirs}"
            remedy = f"remove {key}, or set attention to auto"
            yield ConfigError(key, values[key], rule, remedy)
    key = "ici_context_parallelism"
    if values[BATCH_KEY] is not None and values[key] != 1:
        rule = f"if {BATCH_KEY} is set, ici_fsdp_parallelism sets the context axis"
        other = f"or remove {BATCH_KEY} and set ici_fsdp_parallelism for the fsdp axis"
        yield ConfigError(key, values[key], rule, f"remove {key}, {other}")
    for kind in ("ici", "dcn"):
        rest = [key for key in _parallelism_keys(kind) if values[key] == -1]
        if len(rest) > 1:
            one = f"only one {kind}_*_parallelism may be -1, which takes the remaining devices"
            rule = f"{one}, and {', '.join(rest)} are -1"
            yield ConfigError(rest[-1], -1, rule, "set all but one of them to a positive size")
        present = values["mesh_axes"]
        for axis, size, key in _axis_settings(values, kind):
            if axis not in present and size != 1:
                rule = f"mesh_axes has no axis '{axis}', only {', '.join(present)}"
                yield ConfigError(key, size, rule, f"add {axis} to mesh_axes, or set {key} to 1")
    yield from _ulysses_shards(values)


def _ulysses_shards(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    shards, strategy = values["ulysses_shards"], values["context_parallel"]
    sizes = [axis_sizes(values, kind)["context"] for kind in ("ici", "dcn")]
    ways = sizes[0] * sizes[1]
    split = "ulysses_ring" in (strategy, kernel_and_strategy(values["attention"])[1])
    # If these settings do not split the context axis, the user's mesh may; the plan checks it.
    if split and shards > 0 and min(sizes) > 0 and ways > 1 and ways % shards:
        rule = f"it must divide the context axis, which has {ways} devices"
        choices = ", ".join(map(str, divisors(ways)))
        yield ConfigError("ulysses_shards", shards, rule, f"set it to one of {choices}, or -1")


def data_defaults(values: Mapping[str, Any], given: Set[str]) -> dict[str, int]:
    """Return 1 for each unset data axis if mesh_axes lacks it or another axis is -1."""
    found = {}
    for kind in ("ici", "dcn"):
        key, *others = _parallelism_keys(kind)
        is_taken = "data" not in values["mesh_axes"] or any(values[k] == -1 for k in others)
        if is_taken and key not in given:
            found[key] = 1
    return found


def axis_sizes(values: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Return each axis's size of `kind` "ici" or "dcn"; `BATCH_KEY`, if set, gives fsdp's size."""
    return {axis: size for axis, size, _ in _axis_settings(values, kind)}


def _axis_settings(values: Mapping[str, Any], kind: str) -> Iterator[tuple[str, int, str]]:
    """Yield (axis, size, the key that set it) for the four axes."""
    gpu = kind == "ici" and values[BATCH_KEY] is not None
    renamed = {"fsdp": BATCH_KEY, "context": "ici_fsdp_parallelism"} if gpu else {}
    for axis in AXES:
        key = renamed.get(axis, f"{kind}_{axis}_parallelism")
        yield axis, values[key], key


def _parallelism_keys(kind: str) -> tuple[str, ...]:
    keys = tuple(f"{kind}_{axis}_parallelism" for axis in AXES)
    return (*keys, BATCH_KEY) if kind == "ici" else keys


# ---- types of values -----------------------------------------------------------------------------


def _broken(rule: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("maxattn", "{rule}", {"rule": rule, "remedy": remedy})


def _positive_or_rest(value: int) -> int:
    if value == -1 or whole(value, most=MOST_DEVICES):
        return value
    if value > 0:
        raise _broken(f"it must be at most {MOST_DEVICES} devices", "write fewer, or -1")
    raise _broken("it must be a positive whole number, or -1", "write 1 or more, or -1")


def _some_and_each_once(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    if not axes:
        raise _broken("it must name an axis", f"write [{', '.join(AXES)}], or some of them")
    twice = [axis for i, axis in enumerate(axes) if axis in axes[:i]]
    if twice:
        raise _broken(f"each axis must occur once, and '{twice[0]}' is repeated", "remove one")
    return axes


def _not_a_strategy(value: Any) -> Any:
    if isinstance(value, str) and kernel_and_strategy(value)[1] != "auto":
        rule = f"it must be one of {', '.join(kernels())}; {value} is only for self-attention"
        raise _broken(rule, f"write `attention: {value}`")
    return value


class _OneOf:
    """A field type for names in a table, which is read at each check: users may extend it."""

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        self.names = names

    def check(self, value: Any) -> str:
        names = self.names()
        if isinstance(value, str) and value in names:
            return value
        raise PydanticKnownError("literal_error", {"expected": ", ".join(map(repr, names))})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names()), "type": "string"}


_POSITIVE_OR_REST = {
    "type": "integer",
    "anyOf": [{"const": -1}, {"minimum": 1, "maximum": MOST_DEVICES}],
}
_AXES = {"type": "array", "items": {"enum": list(AXES)}, "uniqueItems": True, "minItems": 1}

Positive = Annotated[int, Ge(1), Le(LARGEST)]
NotNegative = Annotated[int, Ge(0), Le(LARGEST)]
PositiveOrRest = Annotated[
    int, AfterValidator(_positive_or_rest), WithJsonSchema(_POSITIVE_OR_REST)
]
Attention = Annotated[str, _OneOf(attentions)]
Strategy = Annotated[str, _OneOf(strategies)]
KernelName = Annotated[str, _OneOf(kernels), BeforeValidator(_not_a_strategy)]
Axes = Annotated[tuple[Axis, ...], AfterValidator(_some_and_each_once), WithJsonSchema(_AXES)]

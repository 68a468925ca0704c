"""Reads LoRA alphas from metadata: diffusers' header, or peft's adapter_config.json.

    W' = W + alpha / rank * B A, or alpha / sqrt(rank) with use_rslora

Sources: Hu et al., https://arxiv.org/abs/2106.09685; Kalajdzievski,
https://arxiv.org/abs/2312.03732 (rsLoRA).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

from maxattn.config.document import parse_json, read_json
from maxattn.config.errors import printable, show
from maxattn.config.numbers import finite
from maxattn.errors import WeightsError
from maxattn.weights.files import SafeTensors

HEADER, CONFIG, PEFT_FILE = "lora_adapter_metadata", "adapter_config.json", "adapter_model"
MOST_BYTES = 4 * 2**20  # most bytes of metadata, which name at most some thousand layers
MOST_PATTERNS = 10_000
# Literal names and `.*` only: Python's `re` may run forever on a pattern of an untrusted file.
_PATTERN = re.compile(r"\^?(?:[\w-]|\.\*|\\?\.)+\$?")
_PLAIN_FIRST = ("gaussian", "eva", "orthogonal")  # initializers that do not change the kernels
_OTHER_KINDS = ("layer_replication", "alora_invocation_tokens", "arrow_config")
_AGAIN = "save the LoRA again, or pass its tensors with <layer>.alpha as a state dict"
_MERGE = "merge it with peft, and load the merged model"


@dataclass(frozen=True)
class Strength:
    """A layer's alpha is that of a pattern, else `alpha`, else the rank; `rooted` means rsLoRA.

    `rank` and `ranks` are those of the metadata, which must be those of the tensors.
    """

    alpha: float | None = None
    patterns: tuple[tuple[str, float], ...] = ()
    rooted: bool = False
    rank: float | None = None
    ranks: tuple[tuple[str, float], ...] = ()
    where: str = ""

    def of(self, layer: str, rank: int) -> float:
        """Return the factor alpha / rank (or / sqrt(rank)) of a layer."""
        said = next((r for key, r in self.ranks if names_layer(key, layer)), self.rank)
        if said not in (None, rank):
            rule = f"the metadata give it rank {said:g}, in {self.where}"
            raise WeightsError("LoRA", f"{layer} of rank {rank}", rule, _AGAIN)
        alpha = next((a for key, a in self.patterns if names_layer(key, layer)), self.alpha)
        if alpha is None:
            return 1.0
        return alpha / (sqrt(rank) if self.rooted else rank)


def names_layer(key: str, layer: str) -> bool:
    """Check whether a key of peft's alpha_pattern matches a layer's name.

    peft writes the name or its end, diffusers `^` and the whole name. As in peft's
    `(.*\\.)?(key)$`, `.` matches any character and `.*` any text; the search does not backtrack.

    >>> keys = ("to_q", "0.to_q", "^to_q", "^blocks.*_q", "to_.")
    >>> [names_layer(key, "blocks.10.to_q") for key in keys]
    [True, False, False, True, True]
    """
    begin = "^\0" if key.startswith("^") else "\0"  # \0 is a dot that matches only a dot
    *parts, end = (begin + key.strip("^$").replace("\\.", "\0")).split(".*")
    rest = f"^.{layer}"
    for part in filter(None, parts):
        starts = (i for i in range(len(rest)) if _fits(part, rest[i : i + len(part)]))
        if (start := next(starts, None)) is None:
            return False
        rest = rest[start + len(part) :]
    return not end or _fits(end, rest[-len(end) :])


def _fits(part: str, text: str) -> bool:
    def same(a: str, b: str) -> bool:
        return a in (".", b) or (a == "\0" and b == ".")

    return len(part) == len(text) and all(map(same, part, text))


def read_strength(held: Mapping[str, Any], prefix: str) -> Strength:
    """Read the metadata of LoRA weights for a prefix; without metadata, alpha is the rank."""
    where, values = _metadata(held) if isinstance(held, SafeTensors) else ("", {})
    if not where:
        return Strength()
    settings = _part(where, values, prefix)
    settings.check_method()
    alpha = settings.number("lora_alpha", settings.values.get("lora_alpha"))
    rank = settings.values.get("r")
    rank = None if rank is None else settings.number("r", rank)
    alphas, ranks = settings.patterns("alpha_pattern"), settings.patterns("rank_pattern")
    return Strength(alpha, alphas, settings.flag("use_rslora"), rank, ranks, where)


def _metadata(held: SafeTensors) -> tuple[str, dict[str, Any]]:
    """Return the source and the values of the metadata, ("", {}) if there are none.

    The header overrides an adapter_config.json beside it, which may be older. Without a header,
    adapter_config.json is read for a folder, or for a file with peft's name.
    """
    texts = {header[HEADER] for header in held.headers() if HEADER in header}
    if len(texts) > 1:
        rule = f"the files of one LoRA must have the same {HEADER}"
        found = f"{held.path}: {len(texts)} sets of metadata"
        raise WeightsError("LoRA", found, rule, "download the folder again")
    path = held.path
    config = (path if path.is_dir() else path.parent) / CONFIG
    if texts:
        where, read = f"{HEADER} of {path}", partial(parse_json, texts.pop())
    elif (path.is_dir() or path.name.startswith(PEFT_FILE)) and config.is_file():
        where, read = str(config), partial(read_json, config, MOST_BYTES)
    else:
        return "", {}
    try:
        values = read()
    except (OSError, ValueError) as error:
        rule = f"LoRA's metadata must be complete JSON, and {error}"
        raise WeightsError("LoRA", where, rule, _AGAIN) from error
    if not isinstance(values, dict):
        rule = f"LoRA's metadata must be a mapping, and this is a {type(values).__name__}"
        raise WeightsError("LoRA", where, rule, _AGAIN)
    is_empty_header = not values and where != str(config)
    return ("", {}) if is_empty_header else (where, values)


def _part(where: str, values: dict[str, Any], prefix: str) -> _Settings:
    """Return the settings of the prefix's part; keys are `<part>.<name>`, or only the name."""
    parts: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        part, _, name = key.rpartition(".")
        parts.setdefault(part, {})[name] = value
    named = sorted(part for part in parts if part)
    wanted = prefix.removesuffix(".")
    if not named or (not wanted and "" in parts):
        return _Settings(where, "", parts.get("", {}))
    if not wanted and len(named) == 1:
        wanted = named[0]
    if wanted not in named:
        rule = f"the prefix must select {' or '.join(named)}, and it is {prefix!r}"
        remedy = f'pass prefix="{named[0]}.", or a state dict, where alpha is the rank'
        raise WeightsError("LoRA", where, rule, remedy)
    return _Settings(where, f"{wanted}.", parts[wanted])


@dataclass(frozen=True)
class _Settings:
    """peft's settings of one part of a pipeline, read from `where`; keys begin with `part`."""

    where: str
    part: str
    values: Mapping[str, Any]

    def check_method(self) -> None:
        """Refuse a method that does more than add `B A` to unchanged kernels."""
        if (method := self.values.get("peft_type")) not in (None, "LORA"):
            rule = "it must be LORA, since other methods are no product of two matrices"
            raise self._wrong("peft_type", method, rule, _MERGE)
        if self.flag("use_dora"):
            rule = "only LoRA can be merged, and DoRA also scales the columns of a kernel"
            raise self._wrong("use_dora", True, rule, _MERGE)
        first = self.values.get("init_lora_weights")
        if not (first is None or isinstance(first, bool) or first in _PLAIN_FIRST):
            rule = "the kernels must be unchanged, and this initializer changes them"
            remedy = "save it with peft's path_initial_model_for_weight_conversion"
            raise self._wrong("init_lora_weights", first, rule, f"{remedy}, or merge it with peft")
        uses = [name for name in self.values if name.startswith("use_") and name != "use_rslora"]
        for name in (*uses, *_OTHER_KINDS):
            if self.values.get(name):
                rule = "LoRA must only add B A to each kernel, and this setting does more"
                raise self._wrong(name, self.values[name], rule, _MERGE)

    def flag(self, name: str) -> bool:
        """Return a boolean setting; a missing one is false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, value, "it must be true or false", _AGAIN)
        return bool(value)

    def number(self, name: str, value: Any) -> float:
        """Return a setting that is a finite number."""
        if (number := finite(value)) is None:
            raise self._wrong(name, value, "it must be a finite number", _AGAIN)
        return number

    def patterns(self, name: str) -> tuple[tuple[str, float], ...]:
        """Return the alphas or ranks of single layers, by their names or the names' ends."""
        held = self.values.get(name) or {}
        if not isinstance(held, dict):
            raise self._wrong(name, held, "it must map layers to numbers", _AGAIN)
        if len(held) > MOST_PATTERNS:
            rule = f"it must have at most {MOST_PATTERNS:,} layers"
            raise self._wrong(name, f"{len(held):,} layers", rule, _AGAIN)
        wrong = next((key for key in held if not _PATTERN.fullmatch(key)), None)
        if wrong is not None:
            rule = "a key must be a layer's name or the end of one, and may contain .* for any text"
            remedy = "write full names of layers, or save the LoRA with an alpha for each layer"
            raise self._wrong(name, wrong, rule, remedy)
        return tuple((key, self.number(f"{name}[{key}]", a)) for key, a in held.items())

    def _wrong(self, name: str, value: Any, rule: str, remedy: str) -> WeightsError:
        shown = "not set" if value is None else show(value)[:60]
        setting = printable(f"{self.part}{name} is {shown}", 400)
        return WeightsError("LoRA", f"{setting} in {self.where}", rule, remedy)

"""Valid and mutated configs in YAML: either all settings are read as written, or none is."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import yaml

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.odd import mutated_bytes, mutated_text

SOURCE = """\
import pathlib, tempfile
path = pathlib.Path(tempfile.mkdtemp()) / 'a.yml'
path.write_bytes({data!r})
config = ma.AttentionConfig.{read}(path)
"""
VALID: dict[str, tuple[str, ...]] = {
    "attention": ("auto", "flash", "ring", "dot_product", "ulysses", "tokamax_ring", "'auto'"),
    "attention_kernel": ("flash", "null", "dot_product"),
    "cross_attention": ("auto", "flash", "dot_product"),
    "context_parallel": ("auto", "ring", "ulysses_ring", "none", "all_gather"),
    "flash_block_sizes": ("{block_q: 512, block_kv: 1024}", "\n  block_q: 256", "null", "{}"),
    "flash_min_seq_length": ("0", "4096"),
    "mask_padding_tokens": ("true", "false"),
    "float32_qk_product": ("true", "false"),
    "use_memory_efficient_attention": ("true", "false"),
    "query_chunk_size": ("128", "null", "1"),
    "key_chunk_size": ("1024", "16384"),
    "hardware": ("tpu", "gpu", "cpu", "null"),
    "mesh_axes": ("[data, fsdp, context, tensor]", "[data, context]"),
    "ici_context_parallelism": ("1", "2", "4", "-1"),
    "ici_fsdp_parallelism": ("1", "2"),
    "ici_data_parallelism": ("1", "-1"),
    "ulysses_shards": ("-1", "2"),
    "ring_direction": ("auto", "one_way", "both_ways"),
    "ulysses_attention_chunks": ("1", "2"),
    "deterministic": ("true", "false"),
    "remat_policy": ("NONE", "FULL", "SAVE_ATTENTION"),
    "fallback": ("error", "warn", "null"),
    "enable_profiler": ("false",),
    "profiler_steps": ("3",),
}
WRONG = (
    "0", "-1", "1.5", "1e3", "nan", ".inf", "-.inf", "true", "yes", "null", "~", "''",
    "' '", "[]", "{}", "[1, 2]", "{a: 1}", "abc", "0x10", "0o17", "1_000", "2024-01-01",
    "!!python/object:os.system x", "!!binary aGk=", "!!set {a}", "9" * 40, "9" * 5000, "*a", "&a 1",
    "'flash '", "Flash", "FLASH", "\"\\u0000\"", "|\n  text", "1:30", "[" * 40, "[" * 1200,
    "{a: " * 60, "- 1", "\t1", "@x", "%x", "? x", ": x", "<<", "0.0", "1.0", "+1", "007",
)  # fmt: skip
MODEL = (
    "heads: 2", "dim_head: 8", "tokens: 5", "text_tokens: 3", "cross_attention_dim: 16",
    "kv_heads: 1",
)  # fmt: skip
MODEL_WRONG = ("-1", "true", "0", "1.5", "abc", "null", "[1]", "9" * 30, "1e3", "nan")
BATCH = ("2", "1", "-3", "abc", "0", "true", "1.5", "null", "9" * 30, "[2]")
ODD_KEYS = ("atention", "Attention", "block_q", "1", "null", "[a]", "<<")
SELF = ("model: &m {a: *m}", "model: &m [*m]", "data: *nothing", "--- {}", "...")
SECTIONS = ("model", "data", "training", "sampling")


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a file, unchanged or with changes in its text or its bytes."""
    changes = rng.choice([0, 1, 1, 1, 2, 3])
    data = draw_yaml(rng, changes, model=rng.random() < 0.4).encode("utf-8", "surrogatepass")
    if changes and rng.random() < 0.2:
        data = mutated_bytes(rng, data)
    read = rng.choice(["from_yaml"] * 4 + ["from_maxdiffusion"])
    source = SOURCE.format(data=data, read=read)
    return Case(source, check_of(data, read == "from_yaml"), seconds=5)


def draw_yaml(rng: Random, changes: int, model: bool = False) -> str:
    """Draw a config; `changes` makes some of it wrong, `model` adds sections."""
    keys = rng.sample(list(VALID), rng.choice([0, 1, 2, 3, 5]))
    lines = [f"{key}: {rng.choice(VALID[key])}" for key in keys]
    if model:
        part = ["model:", *(f"  {line}" for line in MODEL[: rng.choice([3, 4, 6])])]
        if changes and rng.random() < 0.5:
            at = rng.randrange(1, len(part))
            part[at] = f"{part[at].partition(':')[0]}: {rng.choice(MODEL_WRONG)}"
        batch = rng.choice(BATCH if changes else BATCH[:2])
        lines += [*part, "training:", f"  batch_size: {batch}"]
    for _ in range(changes):
        lines = _changed(rng, lines)
    return "\n".join(lines) + "\n"


def _changed(rng: Random, lines: list[str]) -> list[str]:
    kinds = ["value"] * 3 + ["key"] * 2 + ["twice"] + ["text"] * 2 + ["deep", "bomb", "self"]
    kind = rng.choice(kinds)
    if kind == "value":  # that is wrong for most keys
        return [*lines, f"{rng.choice(list(VALID))}: {rng.choice(WRONG)}"]
    if kind == "key":  # misspelled, or of no setting
        key = mutated_text(rng, rng.choice(list(VALID)))
        return [*lines, f"{rng.choice([key, *ODD_KEYS])}: flash"]
    if kind == "twice":
        return [*lines, *lines[:1]]
    if kind == "text":
        return mutated_text(rng, "\n".join(lines)).split("\n")
    if kind == "deep":  # brackets, or a section inside of sections
        n = rng.choice([5, 30, 1000, 5000])
        nests = [f"model: {'[' * n}{']' * n}", f"model: {'{a: ' * n}1{'}' * n}"]
        return [*lines, rng.choice(nests)]
    if kind == "self":
        return [*lines, rng.choice(SELF)]
    # Aliases of aliases: a few lines that unfold to 9 ** levels values.
    levels, many = rng.choice([2, 4, 9]), rng.choice([3, 9])
    bomb = [f"  a0: &a0 [{', '.join('x' * many)}]"]
    bomb += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * many)}]" for i in range(1, levels)]
    last = ", ".join([f"*a{levels - 1}"] * 2)
    bomb += [f"  a{levels}: {{<<: [{last}]}}"] if rng.random() < 0.2 else []
    return [*lines, "data:", *bomb]


# ---- the config against the events of plain YAML -------------------------------------------------


def check_of(data: bytes, is_ours: bool) -> Check:
    """Return the check of an accepted config; another project's only has to be YAML."""

    def check(names: Names) -> None:
        try:
            node = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            raise Wrong(f"accepted, and it is no YAML: {error}") from None
        if not isinstance(node, yaml.MappingNode):
            raise Wrong(f"accepted, and it is no mapping but {type(node).__name__}")
        if is_ours:
            _check_keys([(key.value, value) for key, value in node.value], names["config"])

    return check


def _check_keys(pairs: list[tuple[Any, Any]], config: Any) -> None:
    names = [key for key, _ in pairs]
    if repeated := {str(name) for name in names if names.count(name) > 1}:
        raise Wrong(f"accepted, and these keys stand twice: {repeated}")
    for key, node in pairs:
        if key in SECTIONS:
            continue
        if key not in type(config).model_fields:
            raise Wrong(f"accepted, and there is no key {key!r}", "print(config)")
        try:
            written = yaml.SafeLoader("").construct_document(node)
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise Wrong(f"accepted, and a value is none: {str(error)[:100]}") from None
        read = getattr(config, key)
        if key != "flash_block_sizes":
            _check_value(key, written, read)
            continue
        for name, size in (written or {}).items():
            _check_value(f"{key}.{name}", size, getattr(read, name))


def _check_value(key: str, written: Any, read: Any) -> None:
    """Compare one setting with the written one: the same type, and no NaN."""
    if isinstance(written, list):
        written, read = tuple(written), tuple(read)
    same = written == read and type(written) is type(read)
    if not same or (isinstance(read, float) and math.isnan(read)):
        what = f"{key} is written {str(written)[:60]!r} and read {read!r}"
        raise Wrong(what, f"print(config.{key})")

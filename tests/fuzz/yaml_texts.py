"""Drawn configs as YAML: valid ones, and the same with keys, types, numbers and nesting changed."""

from __future__ import annotations

from random import Random

from tests.fuzz.mutate import mutated_text

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
}  # fmt: skip
WRONG = (
    "0", "-1", "1.5", "1e3", "nan", ".inf", "-.inf", "true", "yes", "null", "~", "''",
    "' '", "[]", "{}", "[1, 2]", "{a: 1}", "abc", "0x10", "0o17", "1_000", "2024-01-01",
    "!!python/object:os.system x", "!!binary aGk=", "!!set {a}", "9" * 40, "9" * 5000, "*a", "&a 1",
    "'flash '", "Flash", "FLASH", "\"\\u0000\"", "|\n  text", "1:30", "[" * 40, "[" * 1200,
    "{a: " * 60, "- 1", "\t1", "@x", "%x", "? x", ": x", "<<", "0.0", "1.0", "+1", "007",
)  # fmt: skip
MODEL = (
    "heads: 2",
    "dim_head: 8",
    "tokens: 5",
    "text_tokens: 3",
    "cross_attention_dim: 16",
    "kv_heads: 1",
)
MODEL_WRONG = ("-1", "true", "0", "1.5", "abc", "null", "[1]", "9" * 30, "1e3", "nan")
BATCH = ("2", "1", "-3", "abc", "0", "true", "1.5", "null", "9" * 30, "[2]")


def draw_yaml(rng: Random, changes: int, model: bool = False) -> str:
    """Draw a config; with changes, things in it are wrong, and with `model` it has sections."""
    keys = rng.sample(list(VALID), rng.choice([0, 1, 2, 3, 5]))
    lines = [f"{key}: {rng.choice(VALID[key])}" for key in keys]
    if model:
        lines += _sections(rng, changes)
    for _ in range(changes):
        lines = rng.choice(CHANGES)(rng, lines)
    return "\n".join(lines) + "\n"


def _sections(rng: Random, changes: int) -> list[str]:
    lines = ["model:", *(f"  {line}" for line in MODEL[: rng.choice([3, 4, 6])])]
    if changes and rng.random() < 0.5:
        at = rng.randrange(1, len(lines))
        lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(MODEL_WRONG)}"
    batch = rng.choice(BATCH if changes else BATCH[:2])
    return [*lines, "training:", f"  batch_size: {batch}"]


def _value(rng: Random, lines: list[str]) -> list[str]:
    """Give a key a value that is wrong for most."""
    return [*lines, f"{rng.choice(list(VALID))}: {rng.choice(WRONG)}"]


def _key(rng: Random, lines: list[str]) -> list[str]:
    """Misspell a key, or add one that there is not."""
    key = mutated_text(rng, rng.choice(list(VALID)))
    return [
        *lines,
        f"{rng.choice([key, 'atention', 'Attention', 'block_q', '1', 'null', '[a]', '<<'])}: flash",
    ]


def _twice(rng: Random, lines: list[str]) -> list[str]:
    return [*lines, *lines[:1]]


def _text(rng: Random, lines: list[str]) -> list[str]:
    return mutated_text(rng, "\n".join(lines)).split("\n")


def _deep(rng: Random, lines: list[str]) -> list[str]:
    """Nest brackets, or a section inside of sections."""
    depth = rng.choice([5, 30, 1000, 5000])
    return [
        *lines,
        rng.choice(
            [f"model: {'[' * depth}{']' * depth}", f"model: {'{a: ' * depth}1{'}' * depth}"]
        ),
    ]


def _bomb(rng: Random, lines: list[str]) -> list[str]:
    """Name aliases of aliases: a few lines that unfold to 9 ** levels values."""
    levels, many = rng.choice([2, 4, 9]), rng.choice([3, 9])
    first = [f"  a0: &a0 [{', '.join('x' * many)}]"]
    more = [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * many)}]" for i in range(1, levels)]
    merge = (
        [f"  a{levels}: {{<<: [{', '.join([f'*a{levels - 1}'] * 2)}]}}"]
        if rng.random() < 0.2
        else []
    )
    return [*lines, "data:", *first, *more, *merge]


def _self(rng: Random, lines: list[str]) -> list[str]:
    return [
        *lines,
        rng.choice(["model: &m {a: *m}", "model: &m [*m]", "data: *nothing", "--- {}", "..."]),
    ]


CHANGES = (_value, _value, _value, _key, _key, _twice, _text, _text, _deep, _bomb, _self)

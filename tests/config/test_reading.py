"""Valid YAML files and overrides: the values read, and their origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.config.document import parse
from maxattn.config.errors import ConfigErrors
from tests.config.settings import Settings


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "run.yml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


VALUES = [
    ("512", 512), ("-1", -1), ("+3", 3), ("1_000", 1000), ("0", 0), ("0.5", 0.5), ("1e-3", 1e-3),
    ("1.0e+3", 1000.0), ("5.", 5.0), (".5", 0.5), ("1E6", 1e6), (".inf", float("inf")),
    ("true", True), ("No", False), ("on", True), ("y", "y"), ("null", None), ("~", None),
    ("", None), ("010", "010"), ("0x10", "0x10"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"),
    ("1e", "1e"), ("-", [None]), ("'512'", "512"), ("flash", "flash"), ("[1, a]", [1, "a"]),
    ('{"a": {b: 1.5}}', {"a": {"b": 1.5}}), ("{on: 1, 2: 3}", {"on": 1, "2": 3}), ("=", "="),
    ("1.2.3", "1.2.3"), ("٣", "٣"),
]  # fmt: skip


def test_values():
    for text, value in VALUES:
        found = parse(text, str).data
        assert found == value and type(found) is type(value), text


def test_values_of_a_file(write):
    path = write(
        "attention: ring\nici_context_parallelism: 4  # four\nmesh_axes: [data, context]\n"
        'flash_block_sizes: {\n  "block_q": 512,\n  "use_fused_bwd_kernel": True\n}\n'
    )
    want = AttentionConfig(
        attention="ring",
        ici_context_parallelism=4,
        mesh_axes=("data", "context"),
        flash_block_sizes=FlashBlockSizes(block_q=512, use_fused_bwd_kernel=True),
    )
    assert AttentionConfig.from_yaml(path) == AttentionConfig.from_yaml(str(path)) == want


def test_anchors_and_merges(write):
    path = write(
        "training: &run {steps: 3, seed: 1}\nmodel:\n  <<: {dim: 8, seed: 5}\n  seed: 6\n"
        "flash_block_sizes: &a {block_q: 256}\n"
    )
    settings = Settings.from_yaml(path, ["flash_block_sizes.block_kv=128"])
    assert (settings.model.dim, settings.model.seed, settings.training.seed) == (8, 6, 1)
    assert settings.flash_block_sizes == FlashBlockSizes(block_q=256, block_kv=128)


def test_an_override_does_not_leak_through_an_alias(write):
    path = write("model: &m {seed: 1}\ntraining: {<<: *m, steps: 2}\n")
    settings = Settings.from_yaml(path, ["model.seed=9"])
    assert (settings.model.seed, settings.training.seed) == (9, 1)


def test_a_byte_order_mark_and_commented_out_sections(write, tmp_path):
    path = tmp_path / "bom.yml"
    path.write_bytes(b"\xef\xbb\xbfattention: flash\r\ndeterministic: true\r\n")
    assert AttentionConfig.from_yaml(path) == AttentionConfig(attention="flash", deterministic=True)
    path = write(
        "flash_block_sizes:\n#  block_q: 512\ntraining:\n#  steps: 3\ndata:\nattention: flash\n"
    )
    assert AttentionConfig.from_yaml(path) == AttentionConfig(attention="flash")


def test_program_sections_are_left_alone(write):
    path = write(
        "attention: flash\ntraining: {steps: 3, anything: [1, {a: b}]}\nsampling: {}\n"
        "model: {x: 1}\ndata: {y: 2}\n"
    )
    for overrides in ([], ["training.steps=9", "x=4"]):
        assert AttentionConfig.from_yaml(path, overrides) == AttentionConfig(attention="flash")


def test_a_declared_section_is_read(write):
    path = write(
        "training: {steps: 3, learning_rate: 1e-4}\nmodel: {patch: [1, 2, 2]}\n"
        "sampling: {free: 1}\n"
    )
    want = Settings(training={"steps": 3, "learning_rate": 1e-4}, model={"patch": (1, 2, 2)})
    assert Settings.from_yaml(path) == want


def test_overrides_in_every_form(write):
    path = write(
        "attention: flash\nflash_block_sizes: {block_q: 256, block_kv: 256}\ntraining: {steps: 3}\n"
    )
    overrides = [
        "attention=ring", "flash_block_sizes.block_q=1024", "steps=20", "model.dim=8",
        "patch=[1,2,2]", "mesh_axes=[data, context]", "hardware=null", "fallback=",
        "learning_rate=1e-2", "training.seed=1", "training.seed=2", " schedule = constant ",
    ]  # fmt: skip
    assert Settings.from_yaml(path, overrides) == Settings(
        attention="ring",
        flash_block_sizes={"block_q": 1024, "block_kv": 256},
        mesh_axes=("data", "context"),
        model={"dim": 8, "patch": (1, 2, 2)},
        training={"steps": 20, "learning_rate": 1e-2, "seed": 2, "schedule": "constant"},
    )


def test_a_mapping_override_replaces_and_a_dotted_one_adds():
    name = "flash_block_sizes"
    overrides = [f"{name}.block_q=1", f'{name}={{"block_kv": 128}}', f"{name}.block_q_dq=64"]
    sizes = AttentionConfig.from_overrides(overrides).flash_block_sizes
    assert sizes == FlashBlockSizes(block_kv=128, block_q_dq=64)


def test_overrides_alone_and_by_key():
    assert AttentionConfig.from_overrides([]) == AttentionConfig()
    config = AttentionConfig.from_overrides(["attention=ring", "ici_context_parallelism=4"])
    assert config == AttentionConfig(attention="ring", ici_context_parallelism=4)
    # A value may have an equals sign.
    assert Settings.from_overrides(["steps=3", "name=a=b"]).model.name == "a=b"
    sizes = {"flash_block_sizes": {"block_q": 512}, "flash_block_sizes.block_kv": 256}
    asked = {"attention": "ring", "deterministic": True, "query_chunk_size": None} | sizes
    listed = ["attention=ring", "deterministic=true"]
    listed += ["flash_block_sizes={block_q: 512, block_kv: 256}"]
    assert AttentionConfig.from_overrides(asked) == AttentionConfig.from_overrides(listed)
    training = Settings.from_overrides({"steps": 3, "model.dim": 3, "learning_rate": 1e-5}).training
    assert training.learning_rate == 1e-5


def test_the_line_of_a_mistake_in_a_merged_mapping(write):
    path = write("training: &run\n  steps: 3\n  sead: 1\nmodel:\n  <<: {dim: 0}\n")
    with pytest.raises(ConfigErrors) as caught:
        Settings.from_yaml(path)
    assert [p.where for p in caught.value.problems] == [f"{path}:3", f"{path}:5"]


def test_a_tag_is_refused_and_not_run(write):
    with pytest.raises(ConfigErrors, match="only plain values"):
        AttentionConfig.from_yaml(write("attention: !!python/object/apply:os.getcwd []\n"))
    with pytest.raises(ConfigErrors, match="remove the tag"):
        AttentionConfig.from_yaml(write("profiler_steps: !!int abc\n"))

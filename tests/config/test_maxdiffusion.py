"""MaxDiffusion files: kernel names, imported and skipped keys, and mistakes with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from maxattn.config import AttentionConfig
from maxattn.config.errors import ConfigErrors
from maxattn.config.load import yaml_of
from maxattn.config.maxdiffusion import KERNELS, LENGTHS_MATTER, OF_ONE_ATTENTION
from tests.config.settings import FOREIGN
from tests.golden_text import check_golden
from tests.tools.cli.command import run

FILES = Path(__file__).parent / "maxdiffusion"
# name -> kernel of self- and cross-attention, strategy: the thirteen of its registry, and ring,
# which its files name
MEANS = FOREIGN | {
    **{x: (x, "auto") for x in ("dot_product", "flash", "tokamax_flash", "cudnn_flash_te")},
    "ring": ("auto", "ring"),
    "ulysses": ("flash", "ulysses"),
    "ulysses_ring": ("tokamax_flash", "ulysses_ring"),
}


@pytest.fixture(autouse=True)
def beside_the_files(monkeypatch):
    monkeypatch.chdir(FILES)


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_kernel_names(in_a_folder):
    assert set(MEANS) == set(KERNELS) and len(MEANS) == 13 + 1
    for name, (kernel, strategy) in MEANS.items():
        Path("x.yml").write_text(f"attention: '{name}'\nici_context_parallelism: 4\nrun_name: x\n")
        config, left_out, notes = AttentionConfig.from_maxdiffusion("x.yml")
        found = config.kernel_for("self"), config.strategy_for("self"), config.kernel_for("cross")
        assert found == (kernel, strategy, kernel)
        assert left_out == ("run_name",)
        read_as = [note for note in notes if note.startswith(f"attention: {name} is read as")]
        assert bool(read_as) == (strategy != "auto")


def test_a_video_file():
    config, left_out, notes = AttentionConfig.from_maxdiffusion("video.yml")
    assert config.attention == config.cross_attention == "tokamax_flash"
    sizes = config.flash_block_sizes
    assert sizes.block_kv_compute == 256 and sizes.use_fused_bwd_kernel
    assert (config.use_base2_exp, config.flash_min_seq_length) == (True, 4096)
    assert (config.hardware, config.profiler_steps) == ("tpu", 10)
    want = {"data": (2, 1), "fsdp": (1, -1), "context": (-1, 1), "tensor": (1, 1)}
    assert config.axis_parallelism() == want
    not_ours = {"run_name", "learning_rate", "logical_axis_rules", "remat_policy", "dropout"}
    assert not_ours <= set(left_out)
    ours = {"attention", "flash_block_sizes", "ici_data_parallelism", "mesh_axes"}
    assert not ours & set(left_out)
    said = ["attention", "remat_policy", "flash_min_seq_length"]
    assert [note.split(":")[0] for note in notes] == said


def test_sizes_that_are_not_ours_are_told():
    config, left_out, notes = AttentionConfig.from_maxdiffusion("sizes.yml")
    assert config.flash_block_sizes.model_dump(exclude_none=True) == {"block_q": 2048}
    names = ("block_kv_compute_in", "heads_per_tile", "vmem_limit_bytes", "blok_kv")
    assert [k for k in left_out if "." in k] == [f"flash_block_sizes.{name}" for name in names]
    assert "did you mean 'block_kv'?" in notes[-1]


def test_overrides_are_in_our_names():
    overrides = ["attention=ring", "flash_block_sizes.block_q=512"]
    config = AttentionConfig.from_maxdiffusion("video.yml", overrides).config
    assert (config.attention, config.flash_block_sizes.block_q) == ("ring", 512)
    with pytest.raises(ConfigErrors, match="override 1: learning_rate"):
        AttentionConfig.from_maxdiffusion("video.yml", ["learning_rate=3"])


def test_mistakes():
    with pytest.raises(ConfigErrors) as caught:
        AttentionConfig.from_maxdiffusion("wrong.yml")
    assert len(caught.value.problems) == 6
    check_golden("maxdiffusion/wrong", str(caught.value))


@pytest.mark.parametrize("name", ["video", "image", "sizes"])
def test_convert_prints_what_reads_back(capsys, tmp_path, name):
    ran = run(capsys, "convert", f"{name}.yml")
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"maxdiffusion/{name}", ran.out)
    (tmp_path / "ours.yml").write_text(ran.out)
    config, left_out, _ = AttentionConfig.from_maxdiffusion(f"{name}.yml")
    assert AttentionConfig.from_yaml(tmp_path / "ours.yml") == config
    keys = set(yaml.safe_load((FILES / f"{name}.yml").read_text()))
    assert keys - set(left_out) <= set(AttentionConfig.model_fields)


def test_a_file_read_as_ours_is_recognised_first(capsys):
    """There is one error for the file instead of one for each key; other mistakes are added."""
    for name in ("video", "image", "sizes"):
        with pytest.raises(ConfigErrors) as caught:
            AttentionConfig.from_yaml(f"{name}.yml", ["atention=flash"])
        first, *others = caught.value.problems
        assert first.value == "a MaxDiffusion file"
        assert not any("remove it" in problem.remedy for problem in others)
        assert others[-1].where == "override 1"
    for command in ("check", "explain"):
        ran = run(capsys, command, "sizes.yml", "--target", "cpu", "--shape", "sdxl-64")
        assert ran.status == 1 and "maxattn convert sizes.yml" in ran.err
        assert "--maxdiffusion" in ran.err


def test_a_file_of_ours_with_a_key_too_many_is_not_recognised(tmp_path):
    (tmp_path / "ours.yml").write_text("attention: flash\nlearning_rate: 1.0e-5\nseed: 0\n")
    with pytest.raises(ConfigErrors) as caught:
        AttentionConfig.from_yaml(tmp_path / "ours.yml")
    assert [problem.setting for problem in caught.value.problems] == ["learning_rate", "seed"]


def test_check_reads_them(capsys):
    words = ["check", "--maxdiffusion", "sizes.yml", "--shape", "wan-14b-480p"]
    ran = run(capsys, *words, "--target", "TPU v6e", "fallback=warn", "ulysses_shards=8")
    assert ran.status == 0 and "ulysses_ring over 8" in ran.out
    check_golden("maxdiffusion/check", ran.out.split("\n\n")[0])


def test_what_is_written_reads_back(tmp_path):
    ring = AttentionConfig(attention="ring", mesh_axes=("context",), key_chunk_size=7)
    for config in (AttentionConfig(), ring):
        (tmp_path / "ours.yml").write_text(yaml_of(config))
        assert AttentionConfig.from_yaml(tmp_path / "ours.yml") == config


# ---- what a file leaves to its code, or says of one attention alone, is a note -------------------

# As its files stand at 7cfb8801, with the keys that matter here.
UNSAID = {
    "base_xl_lightning": "attention: 'flash'\nici_context_parallelism: 1\n",
    "base_xl": "attention: 'dot_product'\nici_context_parallelism: 1\n",
    "base_wan_1_3b": "attention: 'flash'\nflash_min_seq_length: 0\nici_context_parallelism: -1\n",
    "ltx2_video": (
        "attention: 'flash'\na2v_attention_kernel: 'dot_product'\n"
        "v2a_attention_kernel: 'flash'\nflash_min_seq_length: 4096\nici_context_parallelism: -1\n"
    ),
    "base_flux2klein": (
        "attention: 'tokamax_flash'\ntext_encoder_attention: 'flash'\n"
        "text_encoder_flash_block_sizes: {}\nici_context_parallelism: 1\n"
    ),
}


def notes_of(name: str, text: str) -> tuple[str, ...]:
    Path(f"{name}.yml").write_text(f"run_name: ''\n{text}")
    return AttentionConfig.from_maxdiffusion(f"{name}.yml").notes


@pytest.mark.parametrize("name", UNSAID)
def test_what_its_files_leave_unsaid(capsys, in_a_folder, name: str) -> None:
    notes = notes_of(name, UNSAID[name])
    ran = run(capsys, "convert", f"{name}.yml")
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"maxdiffusion/unsaid_{name}", "\n".join((*notes, "", ran.out)))


def test_a_length_that_is_not_set_is_told_of_the_kernels_that_look_at_it(in_a_folder) -> None:
    for name in KERNELS:
        for more, count in (("", int(name in LENGTHS_MATTER)), ("flash_min_seq_length: 0\n", 0)):
            notes = notes_of(name, f"attention: {name}\n{more}")
            assert sum("min_seq_length" in note for note in notes) == count


def test_gathered_keys_are_told_where_a_sequence_is_spread(in_a_folder) -> None:
    for axis, size, count in (("ici", 1, 0), ("ici", 4, 1), ("ici", -1, 1), ("dcn", 2, 1)):
        notes = notes_of("x", f"attention: flash\n{axis}_context_parallelism: {size}\n")
        assert sum("gathers keys" in note for note in notes) == count


def test_kernels_of_one_attention_are_left_out_and_told(in_a_folder) -> None:
    text = "attention: 3\n" + "".join(f"{key}: [1, {{}}]\n" for key in OF_ONE_ATTENTION)
    Path("x.yml").write_text(f"run_name: ''\n{text.replace('attention: 3', '')}")
    _, left_out, notes = AttentionConfig.from_maxdiffusion("x.yml")
    assert set(OF_ONE_ATTENTION) <= set(left_out)
    assert [note.split(":")[0] for note in notes] == [*OF_ONE_ATTENTION]

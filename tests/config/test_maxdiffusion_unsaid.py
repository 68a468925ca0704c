"""What a MaxDiffusion file leaves to its code, or says of one attention alone, is a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxattn.config import AttentionConfig
from maxattn.config.maxdiffusion import KERNELS, LENGTHS_MATTER, OF_ONE_ATTENTION
from tests.golden_text import check_golden
from tests.tools.cli.command import run

# As its files stand at 7cfb8801, with the keys that matter here.
FILES = {
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


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notes_of(name: str, text: str) -> tuple[str, ...]:
    Path(f"{name}.yml").write_text(f"run_name: ''\n{text}")
    return AttentionConfig.from_maxdiffusion(f"{name}.yml").notes


@pytest.mark.parametrize("name", FILES)
def test_what_its_files_leave_unsaid(capsys, name: str) -> None:
    notes = notes_of(name, FILES[name])
    ran = run(capsys, "convert", f"{name}.yml")
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"maxdiffusion/unsaid_{name}", "\n".join((*notes, "", ran.out)))


@pytest.mark.parametrize("name", KERNELS)
def test_a_length_that_is_not_set_is_told_of_the_kernels_that_look_at_it(name: str) -> None:
    unset, zero = (
        [note for note in notes_of(name, f"attention: {name}\n{more}") if "min_seq_length" in note]
        for more in ("", "flash_min_seq_length: 0\n")
    )
    assert (len(unset), zero) == (int(name in LENGTHS_MATTER), [])


@pytest.mark.parametrize("axis", ["ici", "dcn"])
def test_gathered_keys_are_told_where_a_sequence_is_spread(axis: str) -> None:
    for size, count in ((1, 0), (4, 1), (-1, 1)):
        notes = notes_of("x", f"attention: flash\n{axis}_context_parallelism: {size}\n")
        assert sum("gathers keys" in note for note in notes) == count


def test_kernels_of_one_attention_are_left_out_and_told() -> None:
    text = "attention: 3\n" + "".join(f"{key}: [1, {{}}]\n" for key in OF_ONE_ATTENTION)
    Path("x.yml").write_text(f"run_name: ''\n{text.replace('attention: 3', '')}")
    _, left_out, notes = AttentionConfig.from_maxdiffusion("x.yml")
    assert set(OF_ONE_ATTENTION) <= set(left_out)
    assert [note.split(":")[0] for note in notes] == [*OF_ONE_ATTENTION]

"""Model folders with a broken `config.json`, or with another model than the settings name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generate
import pytest
from maxattn_examples.common.pipeline_folder import frames_per_block
from maxattn_examples.flux import settings as flux
from maxattn_examples.sdxl import settings as sdxl
from maxattn_examples.wan import settings as wan

from maxattn.errors import ConfigError, WeightsError
from tests.golden_text import check_golden, check_refused

from .conftest import ROOT

FAMILIES = {"wan": wan.Sizes, "sdxl": sdxl.Sizes, "flux": flux.Sizes}
PARTS = {"wan": "transformer", "sdxl": "unet", "flux": "transformer"}
KINDS = {"wan": "WanPipeline", "sdxl": "StableDiffusionXLPipeline", "flux": "FluxPipeline"}
BROKEN: tuple[Any, ...] = (
    *("7", "x", {}, [], ["a"], [1, [2]], [0, 2, 4], [2.0, 2, 4]),
    *(-3, 0, True, 2.5, float("nan"), float("inf"), 10**19),
)
# Of these, what is a value of that size all the same.
ANY = (2.5, 10**19, True)
MAY_BE: dict[str, tuple[Any, ...]] = {"norm_eps": ANY, "eps": ANY, "guidance_embeds": (True,)}


def write(path: Path, said: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_each_size_of_a_wrong_type_is_named(family: str, tmp_path: Path) -> None:
    kind = FAMILIES[family]
    whole = kind().config()
    for key in whole.keys() - {"rope_max_seq_len"}:  # of no meaning where positions are computed
        may = (*MAY_BE.get(key, ()), whole[key])
        for value in BROKEN:
            if value in may:
                continue
            with pytest.raises(WeightsError) as error:
                kind.of_folder(write(tmp_path, whole | {key: value}))
            assert error.value.setting == key, (key, value, error.value)
    assert kind.of_folder(write(tmp_path, whole)) == kind()


NEEDED_OF_SDXL = (
    *("addition_embed_type", "use_linear_projection", "block_out_channels", "down_block_types"),
    *("transformer_layers_per_block", "attention_head_dim", "cross_attention_dim"),
    *("addition_time_embed_dim", "projection_class_embeddings_input_dim"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_size_that_is_left_out_is_diffusers_default_or_refused(family: str, tmp_path: Path):
    kind = FAMILIES[family]
    usual = {"wan": wan.SIZES["wan-2.1-t2v-14b"], "flux": flux.SIZES["flux.1-schnell"]}
    for key, value in kind().config().items():
        rest = {name: held for name, held in kind().config().items() if name != key}
        folder = write(tmp_path, rest)
        if family == "sdxl" and key in NEEDED_OF_SDXL:
            with pytest.raises(WeightsError, match=key):
                kind.of_folder(folder)
            continue
        held = usual.get(family, kind()).config()[key]
        assert kind.of_folder(folder).config() == rest | {key: held}, value


MISFITS: dict[str, tuple[str, dict[str, Any]]] = {
    "types_text_for_a_number": ("flux", {"num_layers": "19"}),
    "types_null_for_a_list": ("flux", {"axes_dims_rope": None}),
    "types_two_of_three": ("wan", {"patch_size": [1, 2]}),
    "types_of_an_image": ("wan", {"image_dim": [1280]}),
    "types_nothing_said": ("sdxl", {"block_out_channels": None}),
    "types_one_for_all": ("sdxl", {"transformer_layers_per_block": 4}),
    "misfit_images": ("wan", {"image_dim": 1280}),
    "misfit_head_dim": ("wan", {"attention_head_dim": 127}),
    "misfit_levels": ("sdxl", {"attention_head_dim": [5, 10]}),
    "misfit_groups": ("sdxl", {"norm_num_groups": 48}),
    "misfit_heads": ("sdxl", {"attention_head_dim": [5, 10, 24]}),
    "misfit_pooled": ("sdxl", {"projection_class_embeddings_input_dim": 1536}),
    "misfit_blocks": ("sdxl", {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"] * 2}),
    "misfit_way_up": ("sdxl", {"up_block_types": ["UpBlock2D"] * 3}),
}


@pytest.mark.parametrize("case", MISFITS)
def test_sizes_that_do_not_fit_are_said(case: str, tmp_path: Path) -> None:
    family, changed = MISFITS[case]
    folder = write(tmp_path, FAMILIES[family]().config() | changed)
    check_refused(f"generate/{case}", WeightsError, FAMILIES[family].of_folder, folder)


UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"action_dim": 30}) for family in FAMILIES},
    "misspelt": ("wan", {"num_layer": 2}),
    "lcm": ("sdxl", {"time_cond_proj_dim": 256}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_setting_that_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, more = UNKNOWN[case]
    with pytest.raises(WeightsError) as error:
        said = FAMILIES[family]().config() | more
        said.pop("num_layers" if case == "misspelt" else "", None)
        FAMILIES[family].of_folder(write(tmp_path, said))
    check_golden(f"generate/unknown_{case}", str(error.value))


@pytest.mark.parametrize("value", ["3", 0, True, 2.0, [3]])
def test_a_length_of_blocks_is_a_whole_number(value: Any, tmp_path: Path) -> None:
    write(tmp_path, {"frames_per_block": value})
    with pytest.raises(WeightsError, match=r"frames_per_block: .*\n.*a whole number from 1"):
        frames_per_block(tmp_path)


def test_what_files_say_beside_the_sizes_is_known(tmp_path: Path) -> None:
    """Versions, training settings, defaults without effect, and maxattn's own keys are accepted."""
    said = {"_diffusers_version": "0.33.0", "_name_or_path": "x"}
    for family, more in {
        "wan": {"rope_max_seq_len": 512, "frames_per_block": 3, "pos_embed_seq_len": None},
        "flux": {"out_channels": None},
        "sdxl": sdxl.USUAL_ALONE | {"sample_size": 128, "dropout": 0.0}
        | {"upcast_attention": None, "class_embeddings_concat": None, "only_cross_attention": None},
    }.items():  # fmt: skip
        kind = FAMILIES[family]
        assert kind.of_folder(write(tmp_path, kind().config() | said | more)) == kind()


# ---- the folder that is given, and the model that is named ---------------------------------------


def drawn(config: str, *arguments: object) -> None:
    generate.main([str(ROOT / "configs" / f"{config}.yml"), *map(str, arguments)])


def pipeline(path: Path, family: str, sizes: Any) -> Path:
    write(path / PARTS[family], sizes.config())
    (path / "model_index.json").write_text(json.dumps({"_class_name": KINDS[family]}))
    return path


# The command's config, and the family and sizes of the folder that is given; None: no folder.
GIVEN: dict[str, tuple[str, str | None, Any]] = {
    "schnell_for_dev": ("flux", "flux", flux.SIZES["flux.1-schnell"]),
    "other_wan": ("wan_14b", "wan", wan.Sizes(num_layers=7, ffn_dim=64)),
    "no_folder_flux": ("flux", None, None),
    "no_folder_wan_a14b": ("wan_a14b", None, None),
    "sdxl_for_wan_a14b": ("wan_a14b", "sdxl", sdxl.Sizes()),
    "flux_for_sdxl": ("sdxl", "flux", flux.Sizes()),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_folder_of_another_model_is_named_as_such(case: str, tmp_path: Path) -> None:
    config, family, sizes = GIVEN[case]
    folder = pipeline(tmp_path / "model", family, sizes) if family else tmp_path / "nowhere"
    with pytest.raises((ConfigError, WeightsError)) as error:
        drawn(config, "--model", folder, "--prompt", "a fox", "--out", tmp_path / "out")
    check_golden(f"generate/given_{case}", str(error.value).replace(str(tmp_path), "."))


@pytest.mark.parametrize(
    ("family", "key"), [("sdxl", "block_out_channels"), ("wan", "scale_factor_spatial")]
)
def test_a_vae_of_wrong_types_is_refused(family: str, key: str, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "model", family, FAMILIES[family]())
    write(folder / "vae", {key: "8"})
    config = {"sdxl": "sdxl", "wan": "wan_1_3b"}[family]
    with pytest.raises((ConfigError, WeightsError), match=f"{key}: '8'\n"):
        drawn(config, "--model", folder, "--prompt", "a fox", "--out", tmp_path / "out")

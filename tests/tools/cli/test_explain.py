"""`maxattn explain`, as golden text."""

from __future__ import annotations

from shlex import split

import pytest

from maxattn.target import Target
from tests.golden_text import check_golden
from tests.tools.cli.command import run

GOOD = {
    "ring_on_v5p": (
        "configs/wan_14b.yml attention=ring --shape wan-14b-720p --shape wan-14b-cross --target "
        "v5p --mesh context=4"
    ),
    "mesh_of_the_config": (
        "configs/wan_14b.yml --shape 1,4096,4096,40,128 --batch 4 --target cpu --devices 16 "
        "attention=dot_product"
    ),
    "why": "attention=dot_product --shape 1,4096,4096,6,64 --target v5p --mesh context=4 --why",
    "masks": (
        "attention=dot_product --shape 1,4096,4096,8,64 --mask video:8,512,1,4+window:100,0 "
        "--dtype f32 --target cpu use_memory_efficient_attention=true"
    ),
    "block_window": "--shape swba-1560x7 --target v6e attention=flash",
    "model_of_the_file": "configs/wan_tiny.yml --target cpu training.batch_size=8",
    "grouped_heads": "attention=dot_product --shape 2,300,300,8,64,2 --target cpu --role cross",
}
BAD = {
    "no_shape": "configs/attention.yml --target cpu",
    "shape": "attention=auto --shape wan-14b-721p --target cpu",
    "shape_numbers": "attention=auto --shape 1,2,3 --target cpu",
    "shape_key_heads": "attention=auto --shape 1,64,64,8,64,3 --target cpu",
    "target": "attention=auto --shape sdxl-64 --target 'TPU v5q'",
    "packages_without_target": "attention=auto --shape sdxl-64 --with tokamax",
    "package_misspelt": "attention=auto --shape wan-14b-480p --target H200 --with tokamx=0.0.17",
    "package_unknown": (
        "attention=auto --shape wan-14b-480p --target H200 --with tokamax=0.0.17 --with nonsense=1"
    ),
    "mesh": "attention=auto --shape sdxl-64 --target cpu --mesh contxt=4",
    "mesh_size": "attention=auto --shape sdxl-64 --target cpu --mesh context",
    "mesh_axis_twice": "attention=auto --shape sdxl-64 --target cpu --mesh fsdp=2 --mesh fsdp=4",
    "devices": "configs/wan_14b.yml --shape sdxl-64 --target cpu --devices 12",
    "mask": "attention=auto --shape sdxl-64 --target cpu --mask casual",
    "mask_numbers": "attention=auto --shape sdxl-64 --target cpu --mask block-window:1560",
    "mask_rectangle": (
        "attention=auto --shape sdxl-64 --target cpu --mask rectangle:0,64,0,4096,64,77"
    ),
    "mask_rectangle_beyond": (
        "--shape sdxl-cross --target cpu --mask rectangle:0,64,0,77,64,4096,0,78"
    ),
    "mask_lengths_beyond": "--shape 2,64,64,4,8 --target cpu --mask full+lengths:64,65",
    "dtype": "attention=auto --shape sdxl-64 --target cpu --dtype int8",
    "batch": "attention=auto --shape wan-cross --target cpu --mesh fsdp=2",
    "kernel": "attention=cudnn_flash_te --shape sdxl-64 --target v5p",
    "override": "attention=rng --shape sdxl-64 --target cpu",
    "override_empty": "attention= --shape sdxl-64 --target cpu",
    "package_not_named": "attention=tokamax_flash --shape sdxl-64 --target H200",
    "package_without_version": (
        "attention=tokamax_flash --shape sdxl-64 --target H200 --with tokamax"
    ),
    "package_te": "attention=cudnn_flash_te --shape sdxl-64 --target H200",
    "no_devices": "attention=auto --shape sdxl-64 --target cpu --devices 0",
    "devices_beside_a_mesh": (
        "attention=auto --shape sdxl-64 --target cpu --mesh context=4 --devices 2"
    ),
    "mask_of_cross_attention": "attention=auto --shape wan-cross --target cpu --mask causal",
    "maxdiffusion": "tests/config/maxdiffusion/video.yml --shape sdxl-64 --target cpu",
}


@pytest.mark.parametrize("name", GOOD)
def test_plans(capsys, name):
    ran = run(capsys, "explain", *split(GOOD[name]))
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"cli/explain/{name}", ran.out)


@pytest.mark.parametrize("name", BAD)
def test_mistakes(capsys, name):
    ran = run(capsys, "explain", *split(BAD[name]))
    assert (ran.status, ran.out) == (1, "") and "remedy" in ran.err
    check_golden(f"cli/explain/bad_{name}", ran.err)


def test_a_package_of_the_named_target(capsys):
    words = split("explain attention=tokamax_flash --shape sdxl-64 --target v5p fallback=warn")
    assert "refused tokamax_flash" in run(capsys, *words).out
    assert "refused tokamax_flash" not in run(capsys, *words, "--with", "tokamax=0.0.17").out


def test_a_package_of_this_machine_is_brought_by_pip():
    for package, extra in (
        ("tokamax", "tokamax"),
        ("transformer-engine-jax", "te"),
        ("fa4-jax", "fa4"),
    ):
        this_machine = Target("gpu", "NVIDIA H200", (("jax", "0.10.2"),))
        assert this_machine.remedy_for(package) == f'pip install "maxattn[{extra}]"'
        named = Target.named("NVIDIA H200")
        assert named.remedy_for(package).startswith(f"add --with {package}=")
    assert "jax" in dict(Target.here().packages)


@pytest.mark.parametrize("command", ["explain", "check", "tune", "check configs/attention.yml"])
def test_each_command_refuses_a_package_that_is_not_known(capsys, command):
    """`check` refuses it without a shape too."""
    shape = "" if "yml" in command else "configs/wan_14b.yml --shape sdxl-64"
    ran = run(capsys, *split(f"{command} {shape} --target v5p --with tokamx"))
    assert (ran.status, ran.out) == (1, "") and "--with: tokamx\n" in ran.err


@pytest.mark.parametrize("more", ["--devices 8", "--mesh context=4"])
def test_devices_and_meshes_that_are_said_apart(capsys, more):
    words = split("explain attention=ring --shape sdxl-64 --target cpu --mesh")
    together = run(capsys, *words, "fsdp=2,context=4").out
    said = "fsdp=2" if "mesh" in more else "fsdp=2,context=4"
    assert run(capsys, *words, said, *split(more)).out == together

"""Targets: this machine, a named one, and one that is assumed while tracing."""

from __future__ import annotations

import doctest
import re
import threading
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

import maxattn as ma
from maxattn import devices
from maxattn.block_sizes.sizes import CHIPS
from maxattn.config import target_names
from maxattn.devices import DEVICES, GIB, device_of, families, machine_of, memory_of
from maxattn.errors import ConfigError
from maxattn.jax_private import versions
from maxattn.jax_private.versions import TESTED, numbers
from maxattn.kernels.auto import choose
from maxattn.kernels.fa4 import problem
from maxattn.kernels.fused import limits
from maxattn.kernels.table import EXTRAS
from maxattn.target import Target
from maxattn.target import _kind_of as kind_of
from tests.block_sizes.compiler import TOPOLOGIES

ROOT = Path(__file__).parents[1]


def test_an_assumed_target_is_what_is_here_in_its_thread_until_an_error():
    here, tpu, gpu = Target.here(), Target.named("TPU v5p"), Target.named("NVIDIA H200")
    seen: list[Target] = []
    with pytest.raises(ZeroDivisionError), tpu.assumed():
        with gpu.assumed():
            assert Target.here() is gpu
        assert Target.here() is tpu
        other = threading.Thread(target=lambda: seen.append(Target.here()))
        other.start()
        other.join()
        raise ZeroDivisionError
    assert [*seen, Target.here()] == [here, here]


PACKAGES: list[Any] = [
    {"fa4-jax": "0.1.0"}, [("fa4-jax", "0.1.0")], [["fa4-jax", "0.1.0"]], (("fa4-jax", "0.1.0"),)
]  # fmt: skip
FLASH = ma.AttentionConfig(attention="flash")


@pytest.mark.parametrize("packages", PACKAGES, ids=str)
def test_packages_are_a_mapping_or_pairs(packages: Any) -> None:
    call = ma.Call(1, 256, 256, 2, 2, 128, "bfloat16")
    target = Target.named("H200", packages)
    assert ma.plan(call, FLASH, None, target).kernel.name == "flash"
    assert target == Target("gpu", "NVIDIA H200", packages) == Target.named("H200", PACKAGES[3])
    env = Target("gpu", "NVIDIA H200", env=packages, tuned=[], kernel_times=[])  # type: ignore[arg-type]
    assert hash(env) == hash(Target("gpu", "NVIDIA H200", env=PACKAGES[3]))


OTHERS = [
    "fa4-jax", ["fa4-jax"], {"fa4-jax": 0.1}, [("a", "b", "c")], {("a", "b")}, None, 3,
    [[["a"], "b"]],
]  # fmt: skip


@pytest.mark.parametrize("packages", OTHERS, ids=str)
def test_what_names_no_packages_is_refused(packages: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Target.named("H200", packages)
    assert caught.value.setting == "packages"
    assert caught.value.rule == "it must have names and versions of packages, both as text"
    assert caught.value.remedy == ('pass packages={name: version}, such as {"fa4-jax": "0.1.0"}')
    with pytest.raises(ConfigError, match="it must have text as names and values"):
        Target("gpu", "NVIDIA H200", env=packages)


def test_attention_is_traced_for_it():
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), "bfloat16")
    config = ma.AttentionConfig(attention="flash")
    with Target.named("TPU v5p").assumed():
        traced = jax.jit(lambda q: ma.attention(q, q, q, config=config)).trace(q)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_every_device_has_its_figures() -> None:
    for kind, device in DEVICES.items():
        assert device.machine and device.kind == kind
        assert bool(device.peak) == bool(device.memory) == (device.platform != "cpu")
        assert bool(device.vmem) == (device.platform == "tpu")
        assert bool(device.family.shared_memory) == bool(device.sms) == (device.platform == "gpu")
    tpus = {kind for kind, device in DEVICES.items() if device.platform == "tpu"}
    assert set(CHIPS) == set(TOPOLOGIES) == tpus


def test_figures_are_of_what_jax_calls_a_device() -> None:
    """On v7x a device is half a chip, whose maker gives 2307e12 FLOP/s, 192 GB and 7.4 TB/s."""
    one = DEVICES["TPU v7x"]
    assert one.peak == pytest.approx(2307e12 / 2, rel=1e-3)
    assert machine_of(Target.named("TPU v7x")).hbm == pytest.approx(7.4e12 / 2, rel=1e-2)
    assert one.memory is not None
    assert memory_of("TPU v7x") == one.memory < 192 * GIB / 2


def test_a_mesh_has_the_links_of_the_devices_that_take_part() -> None:
    """Each of an MI300X's seven links receives 64 GB/s, of which 75% are assumed."""
    mesh, switch = (machine_of(Target.named(k)) for k in ("AMD Instinct MI300X", "NVIDIA H100"))
    assert mesh.neighbour == mesh.permuted(8) == mesh.gathered(2) == mesh.exchanged(2) == 48e9
    assert [mesh.gathered(n) / mesh.neighbour for n in (4, 8, 16)] == [3, 7, 7]
    assert mesh.gathered(8) == mesh.exchanged(8) == mesh.gather == mesh.exchange
    assert switch.gathered(2) == switch.gathered(8) == switch.gather
    assert switch.exchanged(2) == switch.permuted(8) == switch.exchange


SPELLINGS = {
    "TPU7x": "TPU v7x", "TPU v5 lite": "TPU v5e", "NVIDIA H100 80GB HBM3": "NVIDIA H100",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe", "NVIDIA GH200 480GB": "NVIDIA GH200",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100", "NVIDIA H200": "NVIDIA H200",
    "NVIDIA L40": "NVIDIA L40", "AMD Instinct MI300X": "AMD Instinct MI300X",
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_jax_s_names_of_devices_are_known(spelling: str) -> None:
    name = SPELLINGS[spelling]
    assert device_of(spelling).kind == name
    assert (device_of(spelling).peak is None) == (name not in DEVICES)


@pytest.mark.parametrize(
    ("kind", "family", "sms", "cudnn", "fa4"),
    [
        ("NVIDIA H200", "hopper", 132, 256, 256),
        ("NVIDIA H100 PCIe", "hopper", 114, 256, 256),
        ("NVIDIA H20", "hopper", 78, 256, 256),
        ("NVIDIA GH200 480GB", "hopper", 132, 256, 256),
        ("NVIDIA H800 PCIe", "hopper", 114, 256, 256),
        ("NVIDIA H100 NVL", "hopper", 132, 256, 256),
        ("NVIDIA B200", "blackwell", 148, 128, 128),
        ("NVIDIA GB200", "blackwell", 152, 128, 128),
        ("NVIDIA B300 SXM6 AC", "blackwell-ultra", 148, 128, 128),
        ("NVIDIA GB300", "blackwell-ultra", 152, 128, 128),
        ("NVIDIA GeForce RTX 5090", "blackwell-rtx", 170, 128, 256),
        ("NVIDIA GeForce RTX 5060 Ti", "blackwell-rtx", 170, 128, 256),
        ("NVIDIA GB10", "blackwell-rtx", 170, 128, 256),
        ("NVIDIA A100-SXM4-80GB", "ampere", 108, 128, 256),
        ("NVIDIA A30", "ampere", 56, 128, 256),
        ("NVIDIA A10G", "before-hopper", 80, 128, 256),
        ("NVIDIA L40S", "before-hopper", 142, 128, 256),
        ("NVIDIA GeForce RTX 4090", "before-hopper", 128, 128, 256),
        ("NVIDIA RTX 5000 Ada Generation", "before-hopper", 132, 128, 256),
        ("Tesla T4", "before-ampere", 40, 128, 128),
        ("NVIDIA X", "nvidia", 132, 128, 128),
        ("AMD Instinct MI325X", "amd-cdna3", 304, 128, 128),
        ("AMD Instinct MI300A", "amd-cdna3", 228, 128, 128),
        ("AMD Radeon RX 7900 XTX", "amd", 132, 128, 128),
    ],
)
def test_a_gpu_has_the_facts_of_its_family(kind: str, family: str, sms: int, cudnn: int, fa4: int):
    its = device_of(kind)
    assert (its.family.name, its.sms) == (family, sms)
    assert (limits.head_limit(its), problem.head_limit(its)) == (cudnn, fa4)


# developer.nvidia.com/cuda-gpus.
CAPABILITIES = {
    "NVIDIA A100": "8.0", "NVIDIA H20": "9.0", "NVIDIA H100": "9.0", "NVIDIA H100 PCIe": "9.0",
    "NVIDIA H800": "9.0", "NVIDIA H800 PCIe": "9.0", "NVIDIA H200": "9.0", "NVIDIA GH200": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA GB200": "10.0", "NVIDIA B300": "10.3", "NVIDIA GB300": "10.3",
    "NVIDIA GeForce RTX 5090": "12.0", "NVIDIA GeForce RTX 5080": "12.0",
    "NVIDIA GeForce RTX 5070 Ti": "12.0", "NVIDIA GeForce RTX 5070": "12.0",
    "NVIDIA RTX PRO 6000 Blackwell": "12.0",
}  # fmt: skip


def test_nvidia_gpus_have_their_compute_capability() -> None:
    known = {kind: d.capability_text for kind, d in DEVICES.items() if d.capability is not None}
    assert known == CAPABILITIES
    nvidia = {kind for kind, device in DEVICES.items() if device.vendor == "NVIDIA"}
    assert nvidia == CAPABILITIES.keys()


@pytest.mark.parametrize(
    ("kind", "capability", "family", "fa4"),
    [
        ("NVIDIA Graphics Device", "10.3", "blackwell-ultra", 128),
        ("NVIDIA Graphics Device", "9.0", "hopper", 256),
        ("NVIDIA L4", "8.9", "before-hopper", 256),
        ("NVIDIA Thor", "11.0", "nvidia", 128),
        ("NVIDIA B200", "", "blackwell", 128),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "amd", 128),
    ],
)
def test_what_jax_says_of_a_gpu_comes_before_its_name(
    kind: str, capability: str, family: str, fa4: int
) -> None:
    device = Target("gpu", kind, capability=capability).device
    assert (device.family.name, problem.head_limit(device)) == (family, fa4)
    assert device.capability_text == (capability if "." in capability else device.capability_text)


def test_the_sms_that_jax_counts_come_before_the_kind_s() -> None:
    part = Target("gpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", sms=16)
    assert part.device.sms == 16 and Target.named("H100").device.sms == 132
    assert replace(part, sms=0).device.sms == 132


@pytest.mark.parametrize(
    "kind", ["NVIDIA GeForce RTX 5090 Laptop GPU", "NVIDIA GeForce RTX 5090 D",
             "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
)  # fmt: skip
def test_another_card_of_a_similar_name_has_no_figures_of_the_first(kind: str) -> None:
    assert device_of(kind).kind == kind and device_of(kind).peak is None
    assert device_of(kind).capability == (12, 0)
    assert device_of("NVIDIA GeForce RTX 5070 Ti").kind == "NVIDIA GeForce RTX 5070 Ti"


def test_a_device_that_nobody_knows_has_the_usual_figures_of_its_platform() -> None:
    assert machine_of(Target("tpu", "TPU v99")) == DEVICES["TPU v5p"].machine
    assert machine_of(Target("gpu", "NVIDIA X")) == DEVICES["NVIDIA H100"].machine
    assert machine_of(Target("gpu", "AMD X")) == DEVICES["AMD Instinct MI300X"].machine
    assert memory_of("NVIDIA A100-SXM4-40GB") is None


def test_the_extras_bring_versions_that_kernels_were_tested_with() -> None:
    """Otherwise pip could install a version that a kernel refuses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for package, (extra, example) in EXTRAS.items():
        lower, below = re.findall(r"[\d.]+(?=[,;]|$)", extras[extra][0].partition(";")[0].strip())
        tested = TESTED[package]
        assert numbers(lower) >= numbers(tested.first) and below == tested.below
        assert tested.hold(example) and not tested.hold(below)
    assert f"jax>={TESTED['jax'].first}" in project["dependencies"]


def test_a_gpu_that_rocm_runs_on_is_amd_s() -> None:
    def device(kind: str, version: str) -> Any:
        return SimpleNamespace(device_kind=kind, client=SimpleNamespace(platform_version=version))

    assert kind_of(device("AMD Instinct MI300X", "rocm 60400")) == "AMD Instinct MI300X"
    assert device_of(kind_of(device("Graphics", "PJRT C API\nrocm 60400"))).vendor == "AMD"
    assert device_of(kind_of(device("Graphics", "cuda 12090"))).vendor == "NVIDIA"


@pytest.mark.parametrize(
    "module", [families, devices, target_names, versions, choose], ids=lambda m: m.__name__
)
def test_examples_run(module: Any) -> None:
    ran = doctest.testmod(module)
    assert ran.attempted > 0 and ran.failed == 0

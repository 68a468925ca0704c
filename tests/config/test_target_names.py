"""Spellings of a target, for the command line and `Target.named` alike."""

from __future__ import annotations

import pytest

import maxattn as ma
from maxattn.config.target_names import _ends, _spellings, read_target
from maxattn.devices import DEVICES
from maxattn.errors import ConfigError
from tests.golden_text import check_golden
from tests.tools.cli.command import run

SPELT = {
    "cpu": ("cpu", "CPU"),
    "TPU v4": ("TPU v4", "tpu-v4", "v4"),
    "TPU v5e": ("TPU v5e", "v5e", "TPU v5 lite", "v5litepod"),
    "TPU v5p": ("TPU v5p", "tpu v5p", "v5p", "V5P", "TPU v5", "tpu"),
    "TPU v6e": ("TPU v6e", "tpu v6e", "tpu_v6e", "v6e", "Trillium", "TPU v6 lite", "tpu6e"),
    "TPU v7x": ("TPU v7x", "tpu7x", "TPU7x", "v7x", "Ironwood", "tpu v7", "tpu7"),
    "NVIDIA A100": ("A100", "nvidia-a100"),
    "NVIDIA H20": ("H20", "nvidia h20"),
    "NVIDIA H100": ("H100", "gpu"),
    "NVIDIA H100 PCIe": ("H100 PCIe", "h100-pcie"),
    "NVIDIA H800": ("H800",),
    "NVIDIA H800 PCIe": ("H800 PCIe",),
    "NVIDIA GH200": ("GH200",),
    "NVIDIA H200": ("NVIDIA H200", "H200", "h200", "Nvidia H200"),
    "NVIDIA B200": ("b200",),
    "NVIDIA GB200": ("GB200", "gb200 nvl72", "nvidia gb200"),
    "NVIDIA B300": ("B300",),
    "NVIDIA GB300": ("gb300", "GB300-NVL72"),
    "NVIDIA GeForce RTX 5090": ("RTX 5090", "rtx5090", "5090", "GeForce RTX 5090", "NVIDIA 5090"),
    "NVIDIA GeForce RTX 5080": ("RTX 5080", "5080"),
    "NVIDIA GeForce RTX 5070 Ti": ("RTX 5070 Ti", "rtx 5070ti", "5070ti", "NVIDIA RTX 5070 Ti"),
    "NVIDIA GeForce RTX 5070": ("RTX 5070", "5070"),
    "NVIDIA RTX PRO 6000 Blackwell": ("RTX PRO 6000", "RTX PRO 6000 Blackwell", "pro 6000"),
    "AMD Instinct MI300X": ("MI300X", "AMD MI300X", "Instinct MI300X", "mi300"),
}
TOPOLOGIES = {
    "v5p:2x2x1": ("TPU v5p", "v5p:2x2x1", 4),
    "TPU v6e:2x4": ("TPU v6e", "v6e:2x4", 8),
    "Trillium:2x2": ("TPU v6e", "v6e:2x2", 4),
    "tpu7x:2x2x1": ("TPU v7x", "tpu7x:2x2x1", 8),
    "v7x:1x1x1": ("TPU v7x", "tpu7x:1x1x1", 2),
    "v4": ("TPU v4", "v4:2x2x1", None),
    "v5e": ("TPU v5e", "v5e:2x2", None),
}
WRONG = ("TPU v5q", "TPU v3", "H2000", "nonsense", "", "v5p:", "v5p:2x", "v5p:0x2", "v5p:8",
         "H200:2x2", "v5q:2x2", "v6e-8")  # fmt: skip


def test_every_spelling_of_a_kind() -> None:
    assert SPELT.keys() == DEVICES.keys()
    for kind, texts in SPELT.items():
        assert {ma.Target.named(text) for text in texts} == {ma.Target.named(kind)}
        assert {read_target(text).kind for text in texts} == {kind}


def test_no_spelling_names_two_kinds() -> None:
    """No row of the table may have a name that an earlier row has."""
    assert all(_spellings()[name] == kind for kind in DEVICES for name in [_bare(kind)])
    ends = [_bare(end) for kind in DEVICES for end in _ends(kind)]
    assert len(set(ends)) == len(ends)


def _bare(kind: str) -> str:
    return kind.replace(" ", "").lower()


def test_topologies() -> None:
    for text, want in TOPOLOGIES.items():
        name = read_target(text)
        assert (name.kind, name.topology, name.devices) == want, text


def test_names_that_are_none_get_a_guess() -> None:
    said = []
    for text in WRONG:
        with pytest.raises(ConfigError) as refused:
            read_target(text)
        said.append(f"# {text!r}\n{refused.value}")
    check_golden("inputs/target_names", "\n".join(said))


@pytest.mark.parametrize(
    ("command", "text"), [("explain", "tpu7x"), ("check", "Trillium"), ("tune", "RTX 5090")]
)
def test_commands_take_the_same_names(capsys, command: str, text: str) -> None:
    words = [command, "attention=auto", "--shape", "1,512,512,4,64", "--target"]
    short = run(capsys, *words, text)
    assert short.status == 0, short.err
    assert short == run(capsys, *words, read_target(text).kind)


@pytest.mark.parametrize("command", ["explain", "check"])
def test_the_chips_of_a_topology_are_the_devices(capsys, command: str) -> None:
    words = [command, "ici_context_parallelism=-1", "ici_data_parallelism=1"]
    words += ["--shape", "1,512,512,4,64", "--target"]
    said = run(capsys, *words, "v5p:2x2x1")
    assert said.status == 0 and "mesh context=4" in said.out
    assert said == run(capsys, *words, "v5p", "--devices", "4")
    assert "mesh context=2" in run(capsys, *words, "v5p:2x2x1", "--devices", "2").out


def test_more_devices_than_a_topology_has_are_refused(capsys) -> None:
    words = ["explain", "attention=ring", "--shape", "1,512,512,8,64", "--target", "v5p:2x2x1"]
    asked = (["--mesh", "context=8"], ["--devices", "8"])
    check_golden(
        "cli/explain/too_few_chips", "\n".join(run(capsys, *words, *a).text for a in asked)
    )


def test_an_unknown_target_is_said_before_anything_else(capsys) -> None:
    shape = ["--shape", "sdxl-64"]
    for words in (["check"], ["check", *shape], ["explain", *shape], ["compile", *shape]):
        ran = run(capsys, *words, "attention=flash", "--target", "v5q:2x2")
        assert (ran.status, ran.out) == (1, "")
        assert "target: v5q:2x2" in ran.err and "did you mean 'TPU v5" in ran.err


def test_compile_is_for_tpus(capsys) -> None:
    ran = run(capsys, "compile", "attention=flash", "--shape", "sdxl-64", "--target", "H200")
    check_golden("cli/compile/no_tpu", ran.text)

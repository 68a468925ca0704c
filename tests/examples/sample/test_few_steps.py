"""Few-step runs: latents equal diffusers', meshes agree, and unsuitable settings are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from maxattn_examples.flux.sampling import FluxSamplingTask
from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.flux.settings import Settings as FluxSettings
from maxattn_examples.sample.inputs import Paths
from maxattn_examples.sample.weights import lora_scale
from safetensors.numpy import load_file, save_file

from maxattn.errors import ConfigError
from tests.examples.conftest import ROOT
from tests.fixtures import make_few_step_runs as made
from tests.golden_text import check_golden
from tests.packages import skip_without
from tests.waiting import but

from .pipelines import EXACT, FIXTURES, MORE, check, draw, lora, prepared, run, sizes_of

FILE = "diffusion_pytorch_model.safetensors"


def ours(name: str, path: Path) -> np.ndarray:
    """Sample a case from a folder whose scheduler file names another sampler."""
    case = made.CASES[name]
    folder, options = prepared(path, case.pipeline)
    return run(folder, case.pipeline, *options, f"guidance_scale={case.guidance}", *case.ours)


def lora_of_flux(path: Path, model: Path) -> None:
    """Write LoRA weights for one layer of a Flux model."""
    layer = "transformer_blocks.0.attn.to_q"
    wide = len(load_file(model / "transformer" / FILE)[f"{layer}.weight"])
    sides = {"A": np.ones((2, wide), np.float32), "B": np.ones((wide, 2), np.float32)}
    tensors = {f"transformer.{layer}.lora_{side}.weight": x for side, x in sides.items()}
    save_file(tensors, path)


@pytest.mark.parametrize("name", but(made.CASES, ("self_forcing",)))
def test_a_whole_run_is_diffusers(name: str, tmp_path: Path) -> None:
    check(ours(name, tmp_path), load_file(FIXTURES / "diffusers_run_few_steps.safetensors")[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", made.CASES)
def test_a_whole_run_is_diffusers_live(name: str, tmp_path: Path) -> None:
    skip_without("torch", "diffusers", "transformers")
    case = made.CASES[name]
    check(ours(name, tmp_path), made.run(case, made.inputs(case.pipeline)).numpy())


@pytest.mark.slow
def test_meshes_and_batches_draw_the_same(tmp_path: Path) -> None:
    folder, options = prepared(tmp_path)
    told_alone = options[:2]
    how = (*told_alone, "sampler=flow_lcm", "guidance_scale=1", "--seed", 3)
    ring = ("ici_fsdp_parallelism=1", "ici_context_parallelism=8")
    many = run(folder, "wan", *how, "--per-prompt", 8, "ici_fsdp_parallelism=8")
    check(run(folder, "wan", *how, "--per-prompt", 3, *ring), many[:3])
    # All eight places again, in the rows of one sample and what fills up the devices.
    check(run(folder, "wan", *how, "ici_fsdp_parallelism=8"), many[:1])
    assert len({x.tobytes() for x in many}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("batched", ["true", "false"])
def test_the_second_transformer_without_guidance_has_one_branch(batched: str, tmp_path, capsys):
    """Its latents equal those with a guidance of almost no effect, in half the forwards."""
    folder, options = prepared(tmp_path, "wan_a14b")
    mesh = ("ici_fsdp_parallelism=1", "ici_context_parallelism=8")
    how = (*options, f"guidance_batched={batched}", *mesh)
    got = run(folder, "wan_a14b", *how, "guidance_scale_2=1")
    printed = capsys.readouterr().out
    assert "expert    transformer, steps 1 to 2, guidance 4\n" in printed
    assert "expert    transformer_2, steps 3 to 4, guidance none: 2 forwards\n" in printed
    assert "approximate" not in printed
    check(got, run(folder, "wan_a14b", *how, "guidance_scale_2=1.000001"))
    assert "guidance 1\n" in capsys.readouterr().out


def test_lora_of_few_steps_is_refused_with_other_settings(tmp_path: Path, capsys, monkeypatch):
    """A run that follows the remedies succeeds."""
    monkeypatch.chdir(tmp_path)
    folder, options = prepared(Path())
    file = Path("wan2.1_t2v_14b_lora_rank64_lightx2v_4step.safetensors")
    lora(file, folder)
    how = (*options, "--lora", file, "--steps", 50)
    with pytest.raises(ConfigError) as error:
        run(folder, "wan", *how)
    check_golden("generate/lora_of_few_steps", str(error.value))
    assert error.value.remedy.startswith("set sampling.distilled=lightx2v")
    with pytest.raises(ConfigError) as error:
        run(folder, "wan", *how, "sampling.distilled=lightx2v")
    text = str(error.value).replace(f"{ROOT}/", "")
    check_golden("generate/distilled_with_guidance", text)
    remedies = ("sampling.num_inference_steps=4", "sampling.guidance_scale=1")
    assert all(f"set {remedy}, or leave it out" in str(error.value) for remedy in remedies)
    run(folder, "wan", *how, "sampling.distilled=lightx2v", "--steps", 4, *remedies[1:])
    printed = capsys.readouterr().out
    assert "distilled lightx2v: LightX2V's 4-step models and LoRA of Wan 2.1 and 2.2" in printed
    wanted = "sampler   flow_euler, shift 5.0, times 1000 937.5 833.3 625 (scheduler/"
    assert wanted in printed and "guidance  none: 4 forwards\n" in printed


def test_lora_of_another_count_of_steps(tmp_path: Path) -> None:
    folder, options = prepared(tmp_path, "flux")
    file = "Hyper-FLUX.1-dev-16steps-lora.safetensors"
    lora_of_flux(tmp_path / file, folder)
    how = (*options, "--lora", tmp_path / file, "guidance_scale=3.5", "true_cfg_scale=1")
    with pytest.raises(ConfigError, match=r"16steps.*\n.* the run has 8\n.*num_inference_steps=16"):
        run(folder, "flux", *how, "distilled=hyper_flux", "num_inference_steps=8")


LIST = "expert    transformer{}, steps {}, guidance none: 2 forwards\n"
# Of a pipeline with words behind the command: what its plan has.
PLANS = {
    "two transformers share the list": (
        "wan_a14b",
        ("distilled=lightx2v", "guidance_scale=1", "guidance_scale_2=1"),
        (LIST.format("", "1 to 2"), LIST.format("_2", "3 to 4")),
    ),
    "a guidance below 1 is none": (
        "wan",
        ("guidance_scale=0.5", "--steps", 8, "fast.cache.first_block.first=2"),
        ("none: at most 8 forwards\n",),
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_plans(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, words, lines = PLANS[case]
    folder, _ = prepared(tmp_path, name)
    draw(name, "--model", folder, *EXACT, *MORE.get(name, ()), *sizes_of(name), *words, "--plan")
    printed = capsys.readouterr().out
    assert not [line for line in lines if line not in printed], printed


def test_guidance_below_one_is_none(tmp_path: Path) -> None:
    """As in diffusers' pipelines, guidance is off unless its scale is above 1."""
    folder, options = prepared(tmp_path)
    save_file({"text": load_file(options[1])["text"]}, options[1])
    found = run(folder, "wan", *options, "guidance_scale=0.5")
    check(found, run(folder, "wan", *options, "guidance_scale=1"))


def test_lora_has_the_scale_of_its_row() -> None:
    settings = FluxSettings(sampling={"distilled": "hyper_flux", "guidance_scale": 3.5})
    task = FluxSamplingTask(settings, FLUX_SIZES["flux.1-dev"], Path())
    assert lora_scale(task, Paths(Path())) == 0.125
    assert lora_scale(task, Paths(Path(), lora_scale=0.5)) == 0.5

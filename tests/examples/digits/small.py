"""The shipped settings of the digits model, with small sizes."""

from __future__ import annotations

from pathlib import Path

from maxattn_examples.digits.settings import Settings

from tests.examples.conftest import ROOT

CONFIG = ROOT / "configs" / "digits_large.yml"
SMALL = (
    "model.num_attention_heads=2", "model.attention_head_dim=12", "model.num_layers=2",
    "model.ffn_dim=16", "model.freq_dim=8", "sampling.height=64", "sampling.width=96",
    "sampling.frames=17", "sampling.prompt=null", "data.digit=4", "training.batch_size=2",
    "training.log_every=1", "training.checkpoint_every=1",
)  # fmt: skip


def overrides(folder: Path, *more: str) -> list[str]:
    """Return overrides of the shipped file for training a small model in a folder."""
    return [*SMALL, f"training.output_dir={folder}", *more]


def settings(folder: Path, *more: str) -> Settings:
    """Read the shipped file with small sizes."""
    return Settings.from_yaml(CONFIG, overrides(folder, *more))

"""Weights in diffusers' names and layouts: loaded onto a mesh, saved, and merged with LoRA."""

from maxattn.weights.checks import Loaded
from maxattn.weights.files import SafeTensors
from maxattn.weights.fused import fuse_lora
from maxattn.weights.load import check_diffusers, load_diffusers, save_diffusers, to_diffusers
from maxattn.weights.lora import LoraLayers, check_lora, lora_prefix, merge_lora
from maxattn.weights.names import entries

__all__ = [
    "Loaded",
    "LoraLayers",
    "SafeTensors",
    "check_diffusers",
    "check_lora",
    "entries",
    "fuse_lora",
    "load_diffusers",
    "lora_prefix",
    "merge_lora",
    "save_diffusers",
    "to_diffusers",
]

"""What others' programs take for the steps that `benchmarks/measure.py` times, in torch.

Commands, no tests: `python -m tests.beside.diffusers` and `python -m tests.beside.torch_stream`.
torch is imported where they run; nothing else here needs it.
"""

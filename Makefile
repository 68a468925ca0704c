# Every target sets up what it needs in .venv, from nothing but python3.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=

.PHONY: demo demo-stream docs check test test-all test-newest test-diffusers test-gpu test-tpu-compile test-fa4-compile test-cuda-compile fuzz lint release clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("maxattn needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "installing maxattn and the packages of its tests into $(VENV) (1.1 GB): two or three minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

# MESH="fsdp=2 context=4" spreads the demo over so many devices, which a CPU plays.
SPREAD := $(foreach axis,$(MESH),ici_$(subst =,_parallelism=,$(axis)))
COUNT  := $(shell echo $$(( 1 $(foreach axis,$(MESH),* $(lastword $(subst =, ,$(axis)))) )) 2>/dev/null)

# Every step takes and gives back its memory: in large pages, where Linux has them, a step takes a fifth less time.
demo: $(READY)  ## train the small video model on moving digits, then draw samples (out/wan_tiny); MESH="fsdp=2 context=4"
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
	$(if $(MESH),XLA_FLAGS="$(XLA_FLAGS) --xla_force_host_platform_device_count=$(COUNT)") \
	$(BIN)/python examples/digits.py configs/wan_tiny.yml $(SPREAD) $(ARGS)

demo-stream: $(READY)  ## train the small model by forcing, then stream digits that move for ever (out/wan_tiny_stream)
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python examples/train.py wan configs/wan_tiny_stream.yml $(ARGS)

# Compilers take and give back memory all the time: large pages save a part of it, as in the demo.
test: $(READY)  ## the tests, on two cores
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check: $(READY)  ## in a minute: style, types and tests of what changed since the main branch
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.changed $(ARGS)

# NEWEST_PYTHON names the python of an environment that has all packages already.
test-newest:  ## a part of the tests on the newest Python found here, with the newest jax, flax and tokamax
	MAXATTN_NEWEST_PYTHON=$(NEWEST_PYTHON) $(PYTHON) -m tests.newest $(ARGS)

test-all: $(READY)  ## the tests, all pairs and the full products of the matrices
	MAXATTN_TEST_ALL=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

# Beside a GPU, with FUZZ_PYTHON a python of jax for CUDA, it draws the GPU's kernels; JAX_PLATFORMS=cpu keeps to the CPU.
FUZZ_PYTHON ?= $(BIN)/python
FUZZ := $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY))
fuzz: $(if $(filter $(BIN)/python,$(FUZZ_PYTHON)),$(READY))  ## draw calls, plans, files and command lines, each right or refused; SEED=1 SECONDS=600 ONLY=attention,plans, or CASE=attention:17 again
	$(FUZZ_PYTHON) -m tests.fuzz $(if $(CASE),--case $(CASE),$(FUZZ)) $(ARGS)

# MAXATTN_TORCH_PYTHON names the python of an environment that has torch and diffusers already.
TORCH_READY := .venv-torch/.ready
LIVE := weights/test_diffusers.py $(addprefix examples/,samplers/test_samplers.py test_models.py sample/test_generate_live.py sample/test_few_steps.py sample/test_media.py test_folder.py)

$(TORCH_READY): pyproject.toml
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,torch]"
	@touch $@

test-diffusers: $(if $(MAXATTN_TORCH_PYTHON),,$(TORCH_READY))  ## beside diffusers itself: modules, models, samplers, pipelines, Wan 1.3B and SDXL at real size (11 GB of memory)
	$(or $(MAXATTN_TORCH_PYTHON),.venv-torch/bin/python) -m pytest -n 0 -s -rs -m "" $(addprefix tests/,$(LIVE)) $(ARGS)

# On a machine with NVIDIA GPUs: GPU_PYTHON is a python with jax for CUDA and the extras te, fa4 and tokamax. Elsewhere
# every case is skipped, and says why.
GPU_PYTHON ?= $(BIN)/python
test-gpu:  ## the GPU kernels against float64, on NVIDIA GPUs
	JAX_PLATFORMS= XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON) -m pytest -m gpu tests/gpu $(ARGS)

# The TPU's compiler needs no TPU; MAXATTN_TPU_PYTHON names the python of an environment that has it already.
TPU_READY := .venv-tpu/.ready

$(TPU_READY): pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install --quiet --disable-pip-version-check -e ".[tpu,tokamax]"
	@touch $@

test-tpu-compile: $(READY) $(if $(MAXATTN_TPU_PYTHON),,$(TPU_READY))  ## compile for every TPU what the block sizes promise (hours; a kill loses nothing)
	MAXATTN_TPU_PYTHON=$(or $(MAXATTN_TPU_PYTHON),$(CURDIR)/.venv-tpu/bin/python) \
	$(BIN)/python -m pytest -n 0 -s -m "" tests/block_sizes/test_compiles.py tests/tools/estimate $(ARGS)

# So does FlashAttention-4's need no GPU; MAXATTN_FA4_PYTHON names a python of 3.12 or newer that has fa4-jax.
FA4_READY := .venv-fa4/.ready

$(FA4_READY): pyproject.toml
	$(PYTHON) -m venv .venv-fa4
	.venv-fa4/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev,fa4]"
	@touch $@

test-fa4-compile: $(if $(MAXATTN_FA4_PYTHON),,$(FA4_READY))  ## what fa4-jax takes on every GPU, and that its kernels compile as maxattn calls them (half an hour)
	$(or $(MAXATTN_FA4_PYTHON),.venv-fa4/bin/python) -m pytest -n 0 -s -m "" tests/gpu/test_fa4_capabilities.py tests/gpu/test_fa4_compiles.py $(ARGS)

CUDA_READY := .venv-cuda/.ready

$(CUDA_READY): pyproject.toml
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" "jax[cuda13]"
	@touch $@

test-cuda-compile: $(if $(MAXATTN_CUDA_PYTHON),,$(CUDA_READY))  ## what XLA makes of models for H200s: no copies of weights, transfers of eight beside kernels; no GPU needed
	$(or $(MAXATTN_CUDA_PYTHON),.venv-cuda/bin/python) -m pytest -n 0 -m "" tests/gpu/test_programs_compile.py tests/gpu/test_meshes_compile.py $(ARGS)

DOCS_READY := .venv-docs/.ready

$(DOCS_READY): pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

docs: $(DOCS_READY)  ## the pages as a site, with the API and notebooks that run: docs/_build/html/index.html
	.venv-docs/bin/python -m sphinx -W --keep-going -n -b html docs docs/_build/html $(ARGS)

# tests/test_package.py reads the files that MAXATTN_DIST holds, and builds its own where it is unset.
release: $(READY)  ## from a clean checkout: sdist, and from it the wheel, in dist/; both checked, and README's first screen run by the wheel alone
	@test -z "$$(git status --porcelain)" || { git status --short; echo "make release: these files are not committed: commit or remove them"; exit 1; }
	rm -rf dist build
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check build twine
	.venv-release/bin/python -m build --outdir dist .
	.venv-release/bin/python -m twine check --strict dist/*
	MAXATTN_DIST=$(CURDIR)/dist $(BIN)/python -m pytest -n 0 -m "" tests/test_package.py $(ARGS)
	@echo "Nothing was uploaded. Tag this commit v$$($(BIN)/python -m maxattn --version | sed 's/.* //'), then: twine upload" dist/*

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:  ## remove the environment and everything that was made
	rm -rf $(VENV) .venv-tpu .venv-torch .venv-docs .venv-newest .venv-fa4 .venv-cuda .venv-release docs/_build out build dist *.egg-info examples/build examples/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

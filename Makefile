# The commands that people and CI run. `make help` lists them. Settings go along: `make run QUIRE_HTTP_PORT=8100`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test sanitize chaos acceptance clients peers lint type protos client-wheel release-protos requirements sbom audit aot gpu-check clean
.PHONY: bench bench-sweep bench-steps bench-pairs bench-pressure bench-recovery bench-journal bench-kernels bench-quality bench-formats bench-greedy
.PHONY: bench-security bench-deterministic bench-grammars bench-grammar-engines bench-simulator bench-docs bench-continuous-batching bench-sync-client bench-embeddings bench-decoder-embeddings bench-offline bench-openvino bench-architectures bench-gguf bench-gguf-quality bench-checkpoints bench-loading bench-all

help:  ## List the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## Make the environment in .venv

# The environment follows pyproject.toml and requirements/. pip itself shows how far it is.
$(STAMP): pyproject.toml $(addprefix requirements/,install.sh dev.txt torch-cpu.txt torch-cuda.txt)
	@$(PYTHON) -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "quire: $(PYTHON) must be Python 3.11 or later, with venv (Debian: apt install python3-venv)" >&2; \
		exit 1; }
	@echo "quire: making the environment in $(VENV), a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	sh requirements/install.sh $(BIN)/python dev --editable .
	@touch $@

run: $(STAMP)  ## Start everything on this machine; Ctrl-C ends it
	@exec $(BIN)/python -m svc_common.supervisor

# A file's tests share fixtures that take long to make, so they stay in one process. Tests of deployments wait a quarter of
# their time: one process more than processors does in 158 s what takes 201 s.
TEST_PROCESSES ?= $(shell echo $$(($$(nproc) + 1)))
test: $(STAMP) $(if $(filter true,$(CI)),build/tools/.installed)  ## Run all tests that need no GPU, in up to 4 processes; TEST_PROCESSES=1
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

# PROCESSOR: which instructions the kernels are compiled for, as -march of the compiler names them, or amx: this processor's with AVX-512, and
# AMX emulated. The first run compiles for minutes.
PROCESSOR ?= native
SANITIZER_LIBRARIES = $(foreach name,asan ubsan,$(shell c++ -print-file-name=lib$(name).so)) $(realpath $(shell c++ -print-file-name=libstdc++.so))
sanitize: $(STAMP)  ## Test the kernels for processors with sanitizers of addresses and undefined behavior; PROCESSOR=haswell, amx; TESTS=...
	CXX=$(CURDIR)/tests/kernels/cpu/sanitized_compiler.sh PROCESSOR=$(PROCESSOR) QUIRE_CACHE_DIR=$(CURDIR)/build/sanitize/$(PROCESSOR) \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 LD_PRELOAD="$(SANITIZER_LIBRARIES)" \
		$(BIN)/python -m pytest $(or $(TESTS),tests/kernels/cpu)

FAULTS ?= 200
CLIENTS ?= 32
SEED ?= 1
chaos: $(STAMP)  ## Inject faults under load and check every token; FAULTS=200 CLIENTS=32 SEED=1
	@PYTHONPATH=tests/support $(BIN)/python -m tests.chaos --faults $(FAULTS) --clients $(CLIENTS) --seed $(SEED)

acceptance: $(STAMP)  ## Run the large checks, hours in all, and write benchmarks/results/acceptance.json; PARTS=chaos
	$(BIN)/python -m tests.acceptance $(if $(PARTS),--parts $(PARTS))

clients: $(STAMP)  ## Use Quire through clients of other projects, from the package indexes; ONLY=openai,langchain
	@PYTHONPATH=tests/support $(BIN)/python -m tests.clients $(if $(ONLY),--clients $(ONLY))

peers: $(STAMP)  ## Run the HTTP tests of other servers, from the package index, against Quire; SUITE=vllm TESTS="*test_chat*" RESUME=1
	@PYTHONPATH=tests/support $(BIN)/python -m tests.peers $(if $(SUITE),--suites $(SUITE)) $(if $(TESTS),--tests "$(TESTS)") $(if $(RESUME),--resume)

lint: $(STAMP)  ## Check style, contracts, their code, images and chart
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(RELEASED_CONTRACTS)
	$(BIN)/python protos/generate.py --check
	$(BIN)/hadolint deploy/docker/*.Dockerfile
	$(BIN)/helm lint --strict --quiet deploy/helm/quire

type: $(STAMP)  ## Check types
	$(BIN)/mypy

protos: $(STAMP)  ## Generate the contracts' code, and build/contracts.binpb, a descriptor set of the public ones
	$(BIN)/python protos/generate.py
	$(MAKE) build/contracts.binpb

.PHONY: build/contracts.binpb
build/contracts.binpb: $(STAMP)
	@mkdir -p build
	$(BIN)/buf build $(foreach name,$(PUBLIC_CONTRACTS),--path protos/quire/$(name)) --output $@

# The baseline of the public contracts: those of the last release, or a state before the first one. They stay compatible with it: lint compares them. Others may change.
PUBLIC_CONTRACTS := admin inference
RELEASED_CONTRACTS := protos/released.binpb
release-protos: protos  ## Make the present public contracts those of the release; part of each release
	$(BIN)/buf build build/contracts.binpb --exclude-source-info --output $(RELEASED_CONTRACTS)

client-wheel: $(STAMP)  ## Build the wheel of the client, which has no server: build/quire_client-….whl
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir build ./client

# The tools' packages are apart from Quire's.
TOOLS := build/tools
$(TOOLS)/.installed: requirements/tools.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --disable-pip-version-check --require-hashes --requirement requirements/tools.txt
	@touch $@

# CPU_TORCH: where the CPU builds of torch are, a folder or an index; needed when torch's version changes.
requirements: $(TOOLS)/.installed  ## Resolve and hash all packages again; UPGRADE="NAME ..." CPU_TORCH=INDEX
	$(TOOLS)/bin/python requirements/lock.py $(if $(UPGRADE),--upgrade $(UPGRADE)) $(if $(CPU_TORCH),--cpu-torch $(CPU_TORCH))

# What an image installs, by the image. A worker's has one of two builds of torch.
CONTENTS := gateway scheduler worker-cpu worker-cuda
sbom: $(addprefix build/sbom/,$(addsuffix .cdx.json,$(CONTENTS)))  ## Write each image's bill of materials (CycloneDX)
build/sbom/gateway.cdx.json: requirements/gateway.txt
build/sbom/scheduler.cdx.json: requirements/scheduler.txt
build/sbom/worker-cpu.cdx.json: requirements/worker.txt requirements/torch-cpu.txt
build/sbom/worker-cuda.cdx.json: requirements/worker.txt requirements/torch-cuda.txt
build/sbom/%.cdx.json: pyproject.toml $(TOOLS)/.installed
	@mkdir -p $(@D)
	cat $(filter requirements/%,$^) | $(TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file $@ -

audit: $(TOOLS)/.installed  ## Look up known vulnerabilities of all pinned packages, except of tested clients
	@$(TOOLS)/bin/python requirements/audit.py

# A file beside the other results, for the figures of another kind of processor: OUTPUT=serving_avx512.json.
TO = $(if $(OUTPUT),--output benchmarks/results/$(OUTPUT))
bench: $(STAMP)  ## Compare with vLLM (where VLLM_VENV names its environment) and transformers
	$(BIN)/python -m benchmarks.serving $(TO)

bench-continuous-batching: $(STAMP)  ## The same with transformers' continuous batching: one run, of a quarter of an hour
	$(BIN)/python -m benchmarks.serving --systems quire,vllm,continuous_batching,static_batches --runs 1 \
		--output benchmarks/results/continuous_batching.json

bench-sweep: $(STAMP)  ## Measure them over concurrency
	$(BIN)/python -m benchmarks.serving.sweep

bench-steps: $(STAMP)  ## Measure what a step costs beside the forward pass
	$(BIN)/python -m benchmarks.steps

bench-pairs: $(STAMP)  ## Compare with another checkout, in pairs: TREE=../quire-before
	$(BIN)/python -m benchmarks.pairs $(TREE)

bench-security: $(STAMP)  ## Measure what TLS and limits of API keys cost, in ten minutes
	@PYTHONPATH=tests/support $(BIN)/python -m benchmarks.security

bench-pressure: $(STAMP)  ## Measure swap against recompute, and streams beside a long prompt
	$(BIN)/python -m benchmarks.pressure

bench-recovery: $(STAMP)  ## Measure how long streams stand still when a process dies
	@PYTHONPATH=tests/support $(BIN)/python -m benchmarks.recovery

bench-journal: $(STAMP)  ## Measure what the journal costs
	$(BIN)/python -m benchmarks.journal

bench-deterministic: $(STAMP)  ## Measure what deterministic mode costs
	$(BIN)/python -m benchmarks.deterministic

bench-grammars: $(STAMP)  ## Measure what masks of grammars cost
	$(BIN)/python -m benchmarks.grammars

bench-grammar-engines: $(STAMP)  ## Compare the compiler of grammars with xgrammar
	$(BIN)/python -m benchmarks.grammar_engines

bench-kernels: $(STAMP)  ## Measure each op beside its peers, on a processor
	$(BIN)/python -m benchmarks.kernels $(TO)

bench-formats: $(STAMP)  ## Measure the steps of formats of weights
	$(BIN)/python -m benchmarks.formats $(TO)

bench-greedy: $(STAMP)  ## Measure decode steps of greedy requests with few logits and with all
	$(BIN)/python -m benchmarks.greedy $(TO)

bench-quality: $(STAMP)  ## Measure the perplexity of formats of weights
	$(BIN)/python -m benchmarks.quality

bench-embeddings: $(STAMP)  ## Compare the rate of embeddings with sentence-transformers and infinity-emb
	$(BIN)/python -m benchmarks.embeddings

bench-decoder-embeddings: $(STAMP)  ## The same with the default model, beside sentence-transformers
	$(BIN)/python -m benchmarks.embeddings --model decoder $(TO)

bench-offline: $(STAMP)  ## Compare quire.LLM with vLLM's class, where VLLM_VENV names its environment; REQUESTS=96
	$(BIN)/python -m benchmarks.offline $(if $(REQUESTS),--requests $(REQUESTS)) $(TO)

bench-openvino: $(STAMP)  ## Compare quire.LLM with OpenVINO GenAI on the default model's GGUF file
	$(BIN)/python -m benchmarks.offline.gguf

bench-architectures: $(STAMP)  ## Compare other architectures with transformers, and with vLLM where VLLM_VENV names it
	$(BIN)/python -m benchmarks.architectures $(TO)

bench-loading: $(STAMP)  ## Measure the peak of memory while a model is loaded
	$(BIN)/python -m benchmarks.loading

bench-gguf: $(STAMP)  ## Compare GGUF files with llama.cpp's server, which is compiled first
	@PYTHONPATH=tests/support $(BIN)/python -m benchmarks.gguf

bench-gguf-quality: $(STAMP)  ## Compare the perplexity of GGUF files with llama.cpp's
	$(BIN)/python -m benchmarks.gguf.quality

bench-checkpoints: $(STAMP)  ## Compare the perplexity of GPTQ, AWQ and compressed-tensors checkpoints with that of their tools
	$(BIN)/python -m benchmarks.checkpoints

bench-simulator: $(STAMP)  ## Judge scheduling policies on modelled workers
	$(BIN)/python -m benchmarks.simulator

bench-sync-client: $(STAMP)  ## Compare the blocking client with one on asyncio's event loop
	$(BIN)/python -m benchmarks.sync_client

bench-all: $(STAMP)  ## Measure anew what docs/ show of older code, for hours; goes on where it was stopped
	@PYTHONPATH=tests/support $(BIN)/python -m benchmarks.all

bench-docs: $(STAMP)  ## Write figures and plots in docs/ from the results
	$(BIN)/python -m benchmarks.docs

# Machines with a GPU have other versions of Triton than the pinned one: this one stands before it in the path.
OLDER_TRITON := build/triton-3.6
$(OLDER_TRITON)/.installed: requirements/aot-triton36.txt $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --only-binary :all: --require-hashes \
		--upgrade --target $(OLDER_TRITON) --requirement $<
	@touch $@

aot: $(STAMP) $(OLDER_TRITON)/.installed  ## Compile all Triton kernels for seven GPUs that need not be there; TARGETS=sm_90; RECOMPILE=1: unchanged ones too, a quarter of an hour
	$(BIN)/python -m benchmarks.aot $(if $(TARGETS),--targets $(TARGETS)) $(if $(RECOMPILE),--recompile)
	$(if $(filter-out sm_90,$(TARGETS)),,PYTHONPATH=$(OLDER_TRITON) $(BIN)/python -m benchmarks.aot --targets sm_90 $(if $(RECOMPILE),--recompile))

gpu-check:  ## Run GPU tests and benchmarks with the Python at hand; installs nothing
	$(PYTHON) -m benchmarks.gpu

clean:  ## Remove the environment, what was built, and the embedded Redis's data
	rm -rf $(VENV) build run *.egg-info client/build client/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

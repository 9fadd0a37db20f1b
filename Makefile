# Needs Python 3.11 or 3.12, git and make. Everything else goes into $(VENV).
#
#   make demo     measure a branching model here, show a report from an H200 beside it: under a minute
#   make docs     build the documentation's site in site/: python -m http.server --directory site
#   make test     lint, types, import contracts, and the tests of the inner loop: under 8 minutes on two cores
#   make test-all the slow compiler, browser and notebook tests too; before submitting what touches any of these
#   make fuzz     random models beside eager, FUZZ cases of them (20000); goes on where it was stopped
#   make paper    the claims of the Nimble paper beside what is measured here (docs/paper.md); goes on where it stopped
#   make bench    scheduling and replay benchmarks (benchmarks/README.md)
#   make clean    remove what these made
#
# On a machine whose Python has torch already and that should be used as it is (an offline GPU machine, say):
#   make demo VENV_FLAGS=--system-site-packages
# The pins of constraints.txt are then left out, so that pip keeps what it finds. Where no registry can be reached:
#   PIP_FLAGS="--no-index --find-links DIRECTORY_OF_WHEELS --no-build-isolation"
#
# Tests run in WORKERS processes, each file whole in one of them. There are two; on a GPU, which they would share and
# time, one (0: no processes beside it).

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
PIP_FLAGS ?=
WORKERS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),0,2)

BIN := $(VENV)/bin
PINS := $(if $(findstring --system-site-packages,$(VENV_FLAGS)),,--constraint constraints.txt)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check $(PIP_FLAGS) $(PINS)

.PHONY: demo docs test test-all lint fuzz paper bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m examples.demo

docs: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) --editable '.[docs]'
	$(BIN)/python -m mkdocs build --strict

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy --strict nimble_core nimble_viz
	$(BIN)/lint-imports --no-logo

FUZZ ?= 20000
fuzz: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz --count $(FUZZ) --out fuzz.jsonl

# Begins nothing after PAPER_S seconds. Without a GPU the page is written of what was measured before.
PAPER ?= benchmarks/results/paper-h200.jsonl.gz
PAPER_S ?= 20000
paper: $(VENV)/.test
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  $(BIN)/python -m benchmarks.runner --models benchmarks.paper --rows all --together 0 --anchor graph \
	    --ways eager,torchscript,compile,graph,one-stream,fused,selected,several,streams,drop-in-one-stream,drop-in-several \
	    --out $(PAPER) --cache .inductor --limit-s $(PAPER_S); fi
	$(BIN)/python -m benchmarks.paper --store $(PAPER)

bench: $(VENV)/.test
	-$(BIN)/python -m benchmarks.scheduling --calls 10000
	-$(BIN)/python -m benchmarks.host
	@if command -v nvidia-smi >/dev/null 2>&1; then echo "On this GPU: $(BIN)/python -m benchmarks.policies --out FILE"; \
	  echo "Against torch.compile and others, hours: $(BIN)/python -m benchmarks.runner --out FILE --cache .inductor"; fi

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -f report.html report-h200.html report.nimble fuzz.jsonl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit("nimble_viz needs Python 3.11 or newer, not " + sys.version.split()[0] + ": make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(VENV): this takes a few minutes, once."
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@touch $@

# The CUDA extra that torch was built for, where there is a GPU; none where torch has no CUDA.
$(VENV)/.demo: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) --editable .
	@if command -v nvidia-smi >/dev/null 2>&1; then \
	  major=$$($(BIN)/python -c 'import torch; print((torch.version.cuda or "").split(".")[0])') && \
	  if [ -n "$$major" ]; then $(INSTALL) --editable ".[cuda$$major]"; \
	  else echo "There is a GPU, but this torch was built without CUDA: the demo runs on the CPU."; fi; fi
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(INSTALL) --editable '.[test]'
	@touch $@

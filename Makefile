# Every target makes its own virtual environment (.venv) when needed. Needs Python >= 3.10 and make, nothing else.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
SOAK_MINUTES ?= 10
SOAK_LEGS ?= tiny-llama
FUZZ_SCENARIOS ?= 2000

.DEFAULT_GOAL := help
.PHONY: help install demo test lint fuzz soak clean

help:
	@echo "make demo   the whole loop (profile, calibrate, simulate, tune, generate, bench, report) on SmolLM2, about 10 minutes on 2 cores"
	@echo "make test   all tests that need no GPU"
	@echo "make lint   ruff, and mypy --strict on the pure core"
	@echo "make fuzz   random scenarios against the invariants, longer (FUZZ_SCENARIOS=$(FUZZ_SCENARIOS), about 20 minutes)"
	@echo "make soak   random traffic through the engine for SOAK_MINUTES=$(SOAK_MINUTES) (SOAK_LEGS=$(SOAK_LEGS); on a GPU: tiny-llama smollm2-135m:float32 smollm2-135m)"
	@echo "make clean  remove .venv and caches"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "Python %d.%d is too old: 3.10 or newer is needed (make PYTHON=python3.12 ...)" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,tune,dev]'
	@touch $(STAMP)

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not gpu" tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy --strict aspire/scheduler calibration/aspire_calibration simulator/aspire_simulator

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.invariants.fuzz --scenarios $(FUZZ_SCENARIOS)

soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --model $(SOAK_LEGS) --minutes $(SOAK_MINUTES)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# Two commands are all there is to setting up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The interpreter that serves, with SGLang 0.5.12 and deployctl's dependencies; and further options of tests/gpu.
GPU_PYTHON ?= python3
GPU_OPTIONS ?=

.PHONY: demo test check test-engine test-gpu check-patches benchmark clean
.DEFAULT_GOAL := help

help:
	@echo "make demo           the whole story on this machine"
	@echo "make test           lint, types, imports, and all tests but the real engine's"
	@echo "make test-engine    the loop on real SGLang on the CPU (builds its environment once: some GB)"
	@echo "make test-gpu       the shipped dynamic speculation on this machine's NVIDIA GPU (GPU_PYTHON, GPU_OPTIONS)"
	@echo "make check-patches  the shipped patches on the wheels they are for"
	@echo "make benchmark      against scp, ssh and ssh by hand; how fast a report opens"

$(STAMP): pyproject.toml
	$(PYTHON) scripts/make_venv.py $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	$(BIN)/python scripts/install_groups.py test lint
	touch $(STAMP)

$(VENV)/.demo: pyproject.toml
	$(PYTHON) scripts/make_venv.py $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/deployctl demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python scripts/system_needs.py
	$(BIN)/python -m pytest --numprocesses 2 --ignore tests/engine --ignore tests/patches --cov deployctl.agent --cov deployctl.domain --cov deployctl.yamlconf --cov-branch --cov-report term:skip-covered --cov-fail-under 95

test-engine: $(STAMP)
	$(BIN)/python scripts/system_needs.py
	$(BIN)/python -m pytest tests/engine

test-gpu:
	$(GPU_PYTHON) -m tests.gpu $(GPU_OPTIONS)

check-patches: $(STAMP)
	$(BIN)/python -m pytest tests/patches

benchmark: $(STAMP)
	$(BIN)/python benchmarks/push.py
	$(BIN)/python scripts/system_needs.py
	$(BIN)/python benchmarks/report.py

clean:
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache

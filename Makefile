# Each target does its own set-up: a .venv in this folder, re-used, and made anew when the requirements change.
# PYTHON=/path/to/python chooses the Python (>= 3.11) that it is made with; WORKERS=4 the processes that run the tests.

PYTHON ?=
WORKERS ?= auto
BIN := .venv/bin
SETUP := PYTHON="$(PYTHON)" scripts/setup
# One thread a worker: the tests' tensors are small, and two workers with two threads each would fight for two cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test slow lint format bench docs

help: ## what can be made
	@awk -F ': ## ' '/^[a-z]+: ## /{printf "make %-7s %s\n", $$1, $$2}' Makefile

demo: ## train, compare and report on the data that ships with the package; results under runs/demo
	@$(SETUP)
	@$(BIN)/creditscope demo --out runs/demo

test: ## the complete fast suite
	@$(SETUP) dev
	$(PYTEST)

slow: ## what takes longer: kills, real data (CREDITSCOPE_DATA), accuracy bands, the docs
	@$(SETUP) dev docs
	$(PYTEST) -m slow

lint: ## ruff, pyright, and the borders between the packages (import-linter)
	@$(SETUP) dev
	@failed=0; for check in "ruff check ." "ruff format --check ." "pyright --pythonpath $(BIN)/python" lint-imports; do \
		echo "$$check"; $(BIN)/$$check || failed=1; done; exit $$failed # all of them, for one round of mending

format: ## let ruff format the code and mend what it can
	@$(SETUP) dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: ## speed against plain PyTorch, as ratios of one interleaved run
	@$(SETUP) dev
	$(BIN)/python benchmarks/run.py

docs: ## the documentation, warnings as errors; docs/_build/html/index.html
	@$(SETUP) docs
	$(BIN)/python -m sphinx -b html -W --keep-going docs docs/_build/html

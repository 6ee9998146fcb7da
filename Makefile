# make demo and make test set everything up by themselves. Python to use: make PYTHON=python3.12
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check format site bench proof coverage mutants emulators clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt tools/make-venv
	@echo "Setting up .venv, torch included; on a first run this downloads and takes a while."
	PYTHON=$(PYTHON) sh tools/make-venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

demo: setup
	$(BIN)/holdfast demo

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The documents as pages, in build/site. They open without a server; only their search needs one.
site: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -W error -m mkdocs build --strict

.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# Of ARGS: --quick, --resume, names of benchmarks.
bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)

# Goes on where it was broken off. For less time: make proof MINUTES=10
proof: .venv/proof-ready
	$(BIN)/python proof/run.py --minutes $(or $(MINUTES),120)

# How much of the core the quick tests run, in branches; and how many of 500 small wrong changes to it
# they notice. Both go on where they were broken off.
coverage: .venv/proof-ready
	$(BIN)/python proof/_covering.py

mutants: .venv/proof-ready
	$(BIN)/python proof/mutants.py

.venv/proof-ready: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[proof]"
	touch $@

# A real Azure server for the tests of az://, which are left out without it. Needs npm.
emulators: setup
	npm install --no-fund --no-audit --prefix .venv/azurite azurite

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache src/*.egg-info

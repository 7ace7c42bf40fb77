PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: run test install-test check lint types imports bench clean

run: .venv/run-installed
	@$(BIN)/python -m settled.spark.jobs.demo

test: .venv/dev-installed
	@# Most tests wait for a broker, so six files run at a time; Spark needs the cores, and has two. Nobody may
	@# wait for a message longer than a second, and that is judged where the servers have the cores.
	$(BIN)/python -m pytest -n 6 --dist loadfile --ignore tests/spark --ignore tests/install --ignore tests/queue/test_starving.py
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/queue/test_starving.py
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/spark

install-test: .venv/dev-installed
	@# Each install line of the docs in a fresh environment; `make install-test ONLY='-m essential'` for a few.
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/install $(ONLY)

check: lint types imports

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev-installed
	$(BIN)/mypy

imports: .venv/dev-installed
	$(BIN)/lint-imports

bench: .venv/dev-installed
	$(BIN)/python bench/core.py

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Settled needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv

.venv/run-installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv, a few minutes the first time'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli,server,client,spark]'
	@touch $@

.venv/dev-installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv, a few minutes the first time'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ .venv/run-installed

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache

# `make help` says what there is. The environment is built by tools/environment.py.

PYTHON ?= python3
# Where torch comes from: another version, a file, a URL; and arguments for pip, such as
#   make test TORCH_PIP_ARGS="--index-url <an index with CPU builds>"
TORCH_SPEC ?= torch==2.13.0
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
export TORCH_SPEC TORCH_PIP_ARGS

BIN := .venv/bin

.PHONY: help demo test build check environment format clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo:  ## a real model stays warm after kill -9 (needs 512 MB of shared memory)
	@$(PYTHON) tools/environment.py demo
	@$(BIN)/hostcache demo

test:  ## all tests; a part of them on each other CPython that is found
	@$(PYTHON) tools/environment.py package
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
	@$(BIN)/python tools/other_pythons.py

build:  ## compile the core and install the package into .venv
	@$(PYTHON) tools/environment.py package

check:  ## formatters, linters, types, a build with warnings as errors
	@$(PYTHON) tools/environment.py tools
	@$(BIN)/python tools/check.py

format:  ## let ruff and clang-format rewrite the sources
	@$(PYTHON) tools/environment.py tools
	@$(BIN)/python tools/check.py --fix

environment:  ## .venv without the package
	@$(PYTHON) tools/environment.py tools

clean:  ## remove all that was built, .venv included
	rm -rf build dist .venv .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

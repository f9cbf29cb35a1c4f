# Everything a fresh machine needs: python3 (3.11 or newer), make, g++.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE_SOURCES := $(wildcard ams/core/csrc/*) CMakeLists.txt pyproject.toml constraints.txt
NAMES := ams bridge workers

.PHONY: help install links
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## .venv with the package (editable) and the development tools

$(STAMP): $(CORE_SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@$(MAKE) -s links
	@touch $@

links:  ## git-ignored links that show ams/, bridge/, workers/ under their import names (for mypy and editors)
	@for name in $(NAMES); do ln -sfn ../$$name geartrain/$$name; done

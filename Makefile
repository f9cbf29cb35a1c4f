# Everything a fresh machine needs: python3 (3.11 or newer), make, g++.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
WHEELS ?=
PYTEST_ARGS ?=
# One more than there are cores: many tests wait for processes of theirs.
TEST_JOBS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
EXAMPLES_STAMP := $(VENV)/.installed-examples
PAGE_STAMP := $(VENV)/.installed-page
KUBE_STAMP := $(VENV)/.installed-kube
BUILD_FILES := $(wildcard ams/kernels/csrc/*/*) CMakeLists.txt pyproject.toml constraints.txt
NAMES := ams bridge workers serving
SOURCES := ams bridge workers serving geartrain scripts benchmarks examples tests
# By environment, so that pip's build environments follow the constraints too, in old and new pips alike. Not quiet: what
# takes minutes shows what it does.
PIP := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
PIP_INSTALL := $(PIP) install $(PIP_ARGS)

.PHONY: help quickstart install wheel wheel-check dev test test-slow hops processors sanitize docs campaign lint format size words proto bench examples-check ray-check gpu-check kernels compose-check kube-check manifests watch-check page-check pictures links clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

quickstart: install  ## a trained 40,992-class model in runs/quickstart, from nothing
	$(BIN)/geartrain quickstart

install: $(STAMP)  ## .venv with the package

wheel: | $(BIN)/python  ## dist/geartrain-*.whl for this Python: it installs elsewhere without a compiler
	@echo "Building the wheel: the C++ core takes one to three minutes."
	rm -rf dist
	$(PIP) wheel . --no-deps -w dist $(PIP_ARGS)
	@echo "pip install $$(ls dist/*.whl) && geartrain quickstart --small"

wheel-check:  ## the wheel in a fresh environment without a compiler: installed, a model trained (PIP_ARGS as above)
	$(PYTHON) scripts/wheel_check.py $(PIP_ARGS)

dev: $(DEV_STAMP)  ## .venv with the package and the development tools

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Geartrain needs Python 3.11 or newer, not " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BUILD_FILES) | $(BIN)/python
	@echo "Installing Geartrain and what it needs into $(VENV). With CPU wheels of torch that is about 300 MB to"
	@echo "download; the default wheels of the public index are CUDA builds of several GB (docs/start/install.md)."
	@echo "Then the C++ core is built: one to three minutes."
	$(PIP_INSTALL) -e .
	@touch $@

$(DEV_STAMP): $(BUILD_FILES) | $(BIN)/python
	@echo "Installing Geartrain, what it needs and the development tools into $(VENV)."
	$(PIP_INSTALL) -e '.[dev,docs]'
	@touch $@ $(STAMP)

$(EXAMPLES_STAMP): $(STAMP)
	$(PIP_INSTALL) -e '.[examples]'
	@touch $@

$(KUBE_STAMP): $(DEV_STAMP)
	$(PIP_INSTALL) -e '.[dev,kube,s3]'
	@touch $@

$(PAGE_STAMP): $(DEV_STAMP)
	$(PIP_INSTALL) -e '.[dev,page]'
	@touch $@

links:  ## git-ignored links that show ams/, bridge/, workers/, serving/ under their import names (for mypy and editors)
	@for name in $(NAMES); do ln -sfn ../$$name geartrain/$$name; done

# Compiled modules are kept, also where the environment says that they are not: a run starts hundreds of processes.
test test-slow: export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
test: dev links  ## every test that is no slow one, a process for each core and one more (TEST_JOBS=0: in one process)
	$(PYTEST) $(PYTEST_ARGS)

test-slow: dev links  ## the tests marked slow: what pages say, each kernel compiled, pods, browsers, Ray, mutants (what is not installed is skipped)
	$(PYTEST) --slow -m slow $(PYTEST_ARGS)

docs: dev links  ## the documentation site in site/, strictly: a broken link or a missing docstring fails
	@echo "Building the site takes half a minute."
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "site/index.html; with its search: $(BIN)/python -m http.server -d site"

# What asserts how well something learned.
TRAINING := $(addprefix tests/,integration/jobs/test_classify_and_predict.py integration/embedding/test_click_examples.py \
	integration/jobs/test_knn_job.py integration/jobs/test_hosted_job.py \
	integration/jobs/test_quickstart_small.py integration/jobs/test_quickstart_signs.py \
	integration/head/test_sixteen_bit_heads.py unit/bridge/head/test_precision.py unit/bridge/head/test_statistics.py \
	unit/workers/ctr unit/workers/models unit/examples)
# Functions, files and calls of a warm step, at most.
HOPS := pull=8/4/10 push=20/6/25 head=155/39/183 embeddings=88/22/99 embeddings18=88/22/99 classify=56/16/64
hops: dev  ## how much Python a warm step passes through, by path, within the limits above
	$(BIN)/python scripts/hops.py $(HOPS)

processors: dev links  ## tests that train, as each class of processor that this one can be, with other random numbers, too
	@set -e; for isa in baseline avx2 avx512 amx; do \
		GEARTRAIN_ISA=$$isa $(BIN)/python -c 'import geartrain.ams.kernels.ops' 2>/dev/null || { echo "== $$isa: not this processor"; continue; }; \
		for shift in 0 1 2; do \
			echo "== $$isa, random numbers $$shift"; \
			GEARTRAIN_ISA=$$isa $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --perturb $$shift $(TRAINING) $(PYTEST_ARGS); \
		done; done

sanitize: dev  ## the C++ core under AddressSanitizer, UBSan and ThreadSanitizer (PYTEST_ARGS: other tests than its own)
	$(BIN)/python scripts/sanitize.py $(PYTEST_ARGS)

campaign: dev  ## faults for BUDGET_MINUTES=40, added to docs/campaign.json; one seed again: ONLY=kills SEED=123
	$(if $(ONLY),,$(BIN)/python -m pytest --slow tests/faults/test_the_suite.py tests/faults/test_exactly_once.py)
	$(BIN)/python -m tests.faults.campaign --budget-minutes $(or $(BUDGET_MINUTES),40) \
		$(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

lint: dev links  ## ruff and mypy, as CI runs them
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	@echo "mypy takes up to a minute."
	$(BIN)/mypy

format: dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

size:  ## code lines and tokens by capability, beside their ceilings
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/size.py

words:  ## docstrings and names that docs/explanation/words.md asks to write another way
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/words.py --list

proto: dev  ## the stubs in ams/pb/v1 and serving/kserve/pb, anew from proto/
	$(BIN)/python scripts/generate_protos.py

bench: dev  ## every bench, ours against its rivals
	$(BIN)/geartrain bench rows
	$(BIN)/geartrain bench head

examples-check: $(EXAMPLES_STAMP)  ## the examples that need no cluster or data, with the frameworks they train under
	@set -e; for example in examples/replace_your_linear.py examples/train_and_serve.py examples/train_with_*.py; do echo "== $$example"; $(BIN)/python $$example; done

ray-check: $(EXAMPLES_STAMP)  ## clusters on Ray: actors of each kind killed, a drained node, the tutorial (some minutes)
	$(BIN)/python -m pytest --slow tests/integration/on_ray

gpu-check: links  ## a check of a GPU host, without a network: build, CUDA tests, kernels and steps beside their model (WHEELS=folder, OUT=folder)
	$(firstword $(wildcard $(BIN)/python) $(PYTHON)) scripts/gpu_check.py $(if $(WHEELS),--wheels $(WHEELS)) $(if $(OUT),--out $(OUT))

kernels: dev  ## kernels compiled for GPUs that are not here, beside scripts/kernels/compiled.json
	$(BIN)/python -m scripts.kernels.compile

compose-check:  ## docker-compose.yml for real: up, healthy, a training against it, down (COMPOSE="docker compose")
	scripts/compose_check.sh

kube-check: links $(KUBE_STAMP)  ## the manifests of Kubernetes against its schemas, and their pods run in network namespaces (root; helm, if it is there)
	$(BIN)/python -m pytest --slow tests/integration/kubernetes $(PYTEST_ARGS)

manifests:  ## deploy/kubernetes/*.yaml, rendered anew from the chart by helm
	helm template geartrain deploy/helm/geartrain > deploy/kubernetes/cluster.yaml
	helm template geartrain deploy/helm/geartrain -f deploy/kubernetes/everything.values.yaml > deploy/kubernetes/everything.yaml

watch-check: links  ## Prometheus, its alerts and the dashboard for real, beside a cluster that trains and is broken (Debian: apt-get install prometheus)
	$(BIN)/python -m scripts.watch_check

page-check: links $(PAGE_STAMP)  ## the pages in headless Chromium (Debian: apt-get install chromium); PAGE_OUT=FOLDER keeps pictures
	$(BIN)/python -m pytest --slow -rs tests/integration/watch/test_dashboard_in_a_browser.py tests/integration/serving/test_page_in_a_browser.py $(PYTEST_ARGS)

pictures: links $(PAGE_STAMP)  ## the pictures of pages in docs/assets, anew from a cluster that trains (some minutes)
	$(BIN)/python -m scripts.pictures

clean:  ## what was built; .venv, caches of rendered data and runs/ stay
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ams bridge workers serving geartrain tests scripts benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

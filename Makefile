# Everything on a fresh machine with Python 3.11-3.13, git and make: `make serve`, `make test`.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: serve test lint setup clean

serve: setup
	$(BIN)/python -m fastverify.launch --model tiny $(ARGS)

# Whole files to each of two workers: a module's servers are started once.
test: lint
	$(BIN)/python -m pytest -m "not gpu" -n 2 --dist loadfile $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.ready

# uv installs the SGLang stack (about 11 GB) in a minute where pip takes seven.
$(VENV)/.ready: pyproject.toml pins.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))" || \
	  { $(PYTHON) --version; echo "fastverify needs Python 3.11 to 3.13: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --python $(BIN)/python -r pins.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info

# make demo    trains a small Llama in BF16 and with COAT on this machine's own text and shows the two side by side
# make test    runs the tests
# make docs    builds the documentation into build/site
# make figures writes the tables of README and docs/ again from results/*.json
# Each creates .venv first; nothing but python3 (3.11 or newer) is needed. VENV, PYTHON and PYTEST_ARGS can be set.

VENV ?= .venv
PYTHON ?= $(shell for p in python$$(cat .python-version) python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN = $(VENV)/bin

.PHONY: demo test docs figures clean

demo: $(VENV)/.installed-demo
	$(BIN)/coat-jax compare

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

figures: $(VENV)/.installed-test
	$(BIN)/python tests/support/figures.py

# One stamp for each set of extras; installed in place, so that the sources are read from here.
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), a minute or two"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or name it: make PYTHON=/path/to/python3"; exit 2; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build *.egg-info out

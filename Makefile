# `make run` and `make test` do all the set-up: git, python3 and make are enough.
PYTHON ?= python3
VENV ?= .venv
# `make test EXTRAS=test,tpu` also compiles for TPU slices (libtpu: 480 MB).
EXTRAS ?= test
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt
SETUP = setup.cfg pyproject.toml constraints.txt

.PHONY: run test slow clean

run: $(VENV)/core
	$(BIN)/python -m experiments.ablation --workdir=runs/ablation

# Two processes: more only fight for the cores of a small machine.
test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(VENV)/test
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A stamp a set of packages: unchanged requirements install nothing.
$(VENV)/core: $(BIN)/python $(SETUP)
	$(PIP) --editable .
	touch $@

$(VENV)/test: $(BIN)/python $(SETUP)
	$(PIP) --editable '.[$(EXTRAS)]'
	touch $@ $(VENV)/core

clean:
	rm -rf $(VENV) runs

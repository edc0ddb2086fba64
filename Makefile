# Everything runs in .venv, which `make setup` fills; `make demo` and `make test` set it up when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
WHEEL_ROOT := $(CURDIR)/build/wheel-root
# each test worker computes on one thread: two workers on two threads each would only wait for one another
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, os.cpu_count() or 1))")

.PHONY: setup demo test lint types wheel pytest clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "torch==2.14.1" "torchvision==0.29.1" || $(BIN)/python -m pip install -q torch torchvision
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m lowtide demo

test: lint types wheel pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/basedpyright

# the tests import the built wheel, not src: a file that the wheel lacks must fail here, not at a user's
wheel: $(STAMP)
	rm -rf build dist
	$(BIN)/python -m build -q --wheel --no-isolation
	$(BIN)/python -m pip install -q --no-deps --target $(WHEEL_ROOT) dist/*.whl

pytest: wheel
	PYTHONPATH=$(WHEEL_ROOT) LOWTIDE_EXPECT_ROOT=$(WHEEL_ROOT) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

clean:
	rm -rf build dist $(VENV)

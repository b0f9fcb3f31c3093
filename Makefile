# `make demo` renders a clip, `make test` runs everything CI runs, `make quick` the daily part of it, and `make wheel`
# puts a wheel with the compiled kernels, and the source distribution, into dist/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1

.PHONY: demo test quick lint wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/videoattn render --output clips/demo.mp4 --timing clips/demo.timing.jsonl

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

quick: lint
	$(BIN)/pytest -q -m "not slow and not gpu" -n 2

# Three on two cores: servers, clusters and killed commands are waited for.
test: lint
	$(BIN)/pytest -q -m "not gpu" -n 3

wheel: $(VENV)/.installed
	$(BIN)/python scripts/build_wheel.py dist

clean:
	rm -rf $(VENV) build dist clips *.egg-info

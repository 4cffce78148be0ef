# Two commands are enough on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-full lint package clean

demo: .venv/ready ## the main job on a real model
	rm -rf runs/demo runs/demo-text
	$(BIN)/python -m examples.demo runs/demo

test: .venv/ready lint package ## everything but the long grids
	$(BIN)/python -m pytest -q -m "not full"

test-full: .venv/ready lint package ## everything
	$(BIN)/python -m pytest -q

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

package: .venv/ready ## sdist → wheel → a clean environment that imports all three
	rm -rf dist build/wheel-check
	$(BIN)/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd build && wheel-check/bin/python -c "import dew, dew.converters, dew.bridges; \
	    print('imported from', dew.__file__)"
	rm -rf build/wheel-check

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all,dev]'
	touch $@

clean:
	rm -rf .venv build dist runs .cache

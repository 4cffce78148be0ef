# Two commands are enough on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
# What is imported is compiled then; compiling all of torch beforehand takes longer.
INSTALL := pip install --quiet --no-compile --constraint constraints.txt
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo demo-distill test test-full lint package docs clean

demo: .venv/ready ## the main job on a real model
	rm -rf runs/demo runs/demo-text
	$(BIN)/python -m examples.demo runs/demo

demo-distill: .venv/ready ## a student cut from its teacher, taught and compared
	rm -rf runs/distill
	$(BIN)/python -m examples.distill_demo runs/distill

test: .venv/ready lint package ## everything but the long grids
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not full"

test-full: .venv/ready lint package ## everything
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# The theme announces its successor on every build.
docs: .venv/ready ## the site, in site/; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# First without torch, as a user may have it; then with it, which bridges needs. A star
# resolves every lazy name of a face.
CLEAN := build/clean/bin
package: .venv/ready ## sdist → wheel → a clean environment that imports all three
	rm -rf dist build
	$(BIN)/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv build/clean
	$(CLEAN)/$(INSTALL) dist/*.whl
	cd build && clean/bin/python -c "from dew import *; from dew.converters import *" && clean/bin/dew --help
	$(CLEAN)/$(INSTALL) "$$(echo dist/*.whl)[torch]"
	cd build && clean/bin/python -c "from dew import *; from dew.bridges import *; \
	    import dew; print('all three imported from', dew.__file__)"
	rm -rf build

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/$(INSTALL) --editable '.[all,dev,docs]'
	touch $@

clean:
	rm -rf .venv build dist site runs .cache

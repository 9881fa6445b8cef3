PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint types bench clean
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,peer,tensorboard]'
	touch $@

demo: install
	$(BIN)/quiver compare configs/quickstart.toml --methods local,fedavg,dfedpgp --out runs/demo

test: install lint types
	$(BIN)/pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

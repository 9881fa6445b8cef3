PYTHON ?= python3
BIN := .venv/bin
# Where torch comes from, if not from the default index: the index address that pytorch.org's
# install page shows for the build you want (CPU-only, CUDA, ROCm).
TORCH_INDEX ?=

.PHONY: install demo test slow soak kills docs lint types bench bench-frameworks clean
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,docs,peer,tensorboard,ray,datasets,privacy]'
	touch $@

demo: install
	$(BIN)/quiver compare configs/quickstart.toml --methods local,fedavg,dfedpgp --out runs/demo

test: install lint types
	$(BIN)/pytest -n 3

slow: install
	$(BIN)/pytest -m slow

# Peers for an hour: kills, partitions, new keys, a malicious member. SECONDS=600 is shorter.
SECONDS ?= 3600
soak: install
	QUIVER_SOAK_SECONDS=$(SECONDS) $(BIN)/pytest -m slow tests/peer/test_soak.py -k month -s

# A thousand kill -9 over eight peers. KILLS=100 is shorter.
KILLS ?= 1000
kills: install
	QUIVER_KILLS=$(KILLS) $(BIN)/pytest -m slow tests/peer/test_swarm.py -k hundred -s

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks

bench-frameworks: install
	$(BIN)/python -m benchmarks frameworks

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache site

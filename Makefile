# make demo: compare every preset on a small MiMo-V2 model.  make test: the tests.
# A machine's own torch is used where it sees a GPU; without a GPU one known version is installed
# first (pip takes the small CPU build where an index that has it is configured).
PYTHON ?= python3
CPU_TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test faults lint docs types wheel clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/ottava compare runs/demo.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto tests

# Every fault that a run must survive, injected into real runs: benchmarks/faults.md (about 4 minutes).
faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m ottava.bench.faults

lint: $(INSTALLED)
	@test -x $(BIN)/ruff || $(BIN)/pip install -q ruff
	$(BIN)/ruff check ottava tests
	$(BIN)/ruff format --check ottava tests

# The documentation as a site, every warning an error: build/site/index.html.
docs: $(INSTALLED)
	@test -x $(BIN)/mkdocs || $(BIN)/pip install -q -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site
	@echo build/site/index.html

# Are the types of what users import complete, and does code that uses them check?
types: $(INSTALLED)
	@test -x $(BIN)/pyright || $(BIN)/pip install -q pyright
	$(BIN)/python tests/typed_use.py --check

# The wheel, installed with all it needs into an environment that has nothing else, and tried there.
wheel: $(INSTALLED)
	@$(BIN)/python -c "import build" 2>/dev/null || $(BIN)/pip install -q build
	rm -rf build/wheel build/empty
	$(BIN)/python -m build --wheel --outdir build/wheel .
	$(PYTHON) -m venv build/empty
	@command -v nvidia-smi >/dev/null || build/empty/bin/pip install -q "$(CPU_TORCH)"
	build/empty/bin/pip install -q build/wheel/*.whl
	cd build/empty && bin/ottava --version && bin/ottava plan --model mimo-v2-nano --gib 24 >/dev/null

.venv: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); \
	fi
	@command -v nvidia-smi >/dev/null || $(BIN)/pip install -q "$(CPU_TORCH)"
	$(BIN)/pip install -q -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache

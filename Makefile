PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint check bench soak clean

demo: $(READY)
	$(BIN)/python -m titan_ckpt.training.demo

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile

check: lint test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: $(READY)
	$(BIN)/python -m benchmarks.all

soak: $(READY)
	TITAN_CKPT_SOAK=1 $(BIN)/python -m pytest --timeout=14400 -o faulthandler_timeout=14000 tests/faults

clean:
	rm -rf outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find titan_ckpt converters tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and alone, so that a wheel at hand (CPU, or a CUDA version) is taken before anything asks for torch.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

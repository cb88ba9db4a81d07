# Everything runs in an environment of its own: `make test` and `make demo` need only Python, pip and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin

PEERS := benchmarks/.venv-peers

# The fault campaign: how often each class of faults is drawn, and from which seed on.
ROUNDS ?= 5
SEED ?= 0

PYTEST := $(RUN)/python -m pytest -n auto --maxprocesses 4

.PHONY: test test-long test-integration test-faults demo bench bench-full check format lock clean

test: $(VENV)/ready
	$(PYTEST) --dist worksteal --ignore tests/integration -m 'not long'

# What takes minutes: 10,000 schedules of a lying storage, kills at every request, a round of all faults, whole trainings.
test-long: $(VENV)/ready
	$(PYTEST) --dist worksteal --ignore tests/integration -m long

# On real storage systems, after installing them (root and apt). INSTALL=: takes what is there and skips the rest.
# Tests of one system share its server, so one worker runs them all (loadgroup, which does not survive a crash).
INSTALL ?= tests/integration/install.sh
test-integration: $(VENV)/ready
	$(INSTALL)
	$(PYTEST) --dist loadgroup --max-worker-restart 0 tests/integration

test-faults: $(VENV)/ready
	$(RUN)/python tests/faults/campaign.py --rounds $(ROUNDS) --seed $(SEED) --json test-faults.json

demo: $(VENV)/ready
	$(RUN)/python examples/demo.py

bench: $(VENV)/bench-ready $(PEERS)/ready
	$(RUN)/python -m benchmarks

bench-full: $(VENV)/bench-ready $(PEERS)/ready
	$(RUN)/python -m benchmarks --full

check: $(VENV)/ready
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/mypy

format: $(VENV)/ready
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/bench-ready: $(VENV)/ready
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

# The peers' SDKs may need other versions than ours: an environment of their own, all of it pinned.
$(PEERS)/ready: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers.txt
	touch $@

# The newest versions that agree with each other, for every Python we support. torch's local version suffix
# (+cpu) is left out: which build is installed is the machine's choice.
COMPILE := uv pip compile --quiet --universal --python-version 3.10 --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links
NO_TORCH := '/^(torch==|nvidia|cuda|triton)/d'

lock: $(VENV)/ready
	$(RUN)/python -m pip install --quiet uv
	$(RUN)/$(COMPILE) --extra dev --extra bench pyproject.toml | sed -E $(NO_TORCH) > constraints.new
	echo 'torch==2.13.0' >> constraints.new
	sort -o constraints.txt constraints.new && rm constraints.new
	$(RUN)/$(COMPILE) benchmarks/peers.in | sed -E $(NO_TORCH) > benchmarks/peers.new
	echo 'torch==2.13.0' >> benchmarks/peers.new
	sort -o benchmarks/peers.txt benchmarks/peers.new && rm benchmarks/peers.new

clean:
	rm -rf $(VENV) $(PEERS) benchmarks/.scratch build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-run test-faults.json

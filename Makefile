# Everything runs in an environment of its own: `make test` and `make demo` need only Python, pip and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin

PEERS := benchmarks/.venv-peers
DATA_PEERS := benchmarks/.venv-data-peers
MLPERF := benchmarks/.venv-mlperf
DOCS := website/.venv

# The fault campaign: how often each class of faults is drawn, and from which seed on; the seed of the law of states.
ROUNDS ?= 5
SEED ?= 0

# Tests start some hundred processes: without compiled files each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Four workers also on two cores: much of the time goes into waits for servers, ranks and deadlines.
PYTEST := $(RUN)/python -m pytest -n 4

# The tiers of the tests: what a test uses says where it belongs (tests/support/tiers.py).
QUICK := not long and not integration and (smoke or not (ranks or server or slow))
RANKS := (ranks or server or slow) and not (smoke or long or integration)
LONG := (long or hypothesis) and not integration

.DEFAULT_GOAL := help
.PHONY: help test test-ranks test-long test-integration test-law test-adapters test-browser test-faults test-fuzz wheel demo docs screens bench bench-adapters bench-full bench-data bench-mlperf check format lock clean

help:  ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(VENV)/ready  ## Touch every promise once: what to run between two edits (3 minutes).
	$(PYTEST) --dist worksteal --ignore tests/integration --ignore tests/adapters --ignore tests/browser -m '$(QUICK)'

SHARD ?= 1/1
test-ranks: $(VENV)/ready  ## Run the other tests with several ranks, moto as S3 server, or programs of their own (SHARD=1/2: half).
	SHARD=$(SHARD) $(PYTEST) --dist worksteal --ignore tests/integration --ignore tests/adapters --ignore tests/browser -m '$(RANKS)'

# 10,000 schedules of a lying storage, kills at every request, a round of all faults, whole trainings;
# and all of Hypothesis's examples, of which the other tiers draw a twentieth.
test-long: $(VENV)/ready  ## Run what takes minutes: kills, deadlines in real time, all schedules and examples (SHARD=1/3: a third).
	HYPOTHESIS_PROFILE=full SHARD=$(SHARD) $(PYTEST) --dist worksteal --ignore tests/integration --ignore tests/adapters --ignore tests/browser -m '$(LONG)'

# Tests of one system share its server, so one worker runs them all (loadgroup, which does not survive a crash).
INSTALL ?= tests/integration/install.sh
test-integration: $(VENV)/ready  ## Run on real storage systems, installed by root and apt (INSTALL=: skips what is missing).
	$(INSTALL)
	$(PYTEST) --dist loadgroup --max-worker-restart 0 tests/integration

test-faults: $(VENV)/ready  ## Run the fault campaign: ROUNDS of all faults, from SEED on.
	PYTHONPATH=tests $(RUN)/python -m faults.campaign --rounds $(ROUNDS) --seed $(SEED) --json test-faults.json

RECORDS ?= 100000
PROCESSES ?= 2000
test-fuzz: $(VENV)/ready  ## Run RECORDS hostile records through decoders and commands, PROCESSES as a user does (SEED= draws others).
	FUZZ_RECORDS=$(RECORDS) FUZZ_PROCESSES=$(PROCESSES) FUZZ_SEED=$(SEED) $(PYTEST) --dist worksteal tests/tools/test_hostile_cli.py -k mutated

test-law: $(VENV)/ready  ## Try all pairs of wrapper, optimizer, parts, phase, ranks and way of saving (SEED= draws others).
	LAW_COMBINATIONS=all LAW_SEED=$(SEED) $(PYTEST) --dist worksteal tests/trainer/test_law_of_states.py

# The frameworks disagree about versions: each has an environment of its own (tests/adapters/<host>.txt).
HOSTS ?=
test-adapters: $(VENV)/ready  ## Run the law of the adapters, inside the frameworks that people train with (HOSTS=ray: one).
	$(PYTEST) --dist loadgroup tests/adapters -k '$(HOSTS)'

# Pages, in a real browser: what it needs comes from Debian, npm and PyPI, and only here.
BROWSER_INSTALL ?= tests/browser/install.sh
test-browser: $(VENV)/browser  ## Open what `ckpt report` writes in Chromium, which it installs (root, apt, npm): numbers, keyboard, axe-core.
	$(BROWSER_INSTALL)
	$(RUN)/python -m pytest tests/browser

wheel: $(VENV)/ready  ## Build the wheel and the sdist into dist/, and use both in clean environments.
	rm -rf dist
	$(RUN)/python -m build --no-isolation --outdir dist
	DIST=dist $(RUN)/python -m pytest tests/project/test_wheel.py

demo: $(VENV)/ready  ## Train, kill, resume and verify, before your eyes.
	$(RUN)/python tests/project/demo.py

docs: $(DOCS)/ready  ## Build the documentation site into build/website/site; a warning or a broken link is an error.
	$(DOCS)/bin/python -m website

screens: $(VENV)/ready  ## Draw what the command shows, for the documentation, from its real output.
	PYTHONPATH=tests $(RUN)/python -m website.screens

bench: $(VENV)/ready $(PEERS)/ready  ## Measure against stock PyTorch and the peers.
	$(RUN)/python -m benchmarks

bench-adapters: $(VENV)/ready  ## Compare saves through the adapters with those of the frameworks.
	PYTHONPATH=tests $(RUN)/python -m adapters.overhead

bench-full: $(VENV)/ready $(PEERS)/ready  ## Measure at full size; write docs/results.md and the README's chart.
	$(RUN)/python -m benchmarks --full --docs docs

bench-data: $(VENV)/ready $(DATA_PEERS)/ready  ## Compare the data loader with Grain, mosaicml-streaming and torchdata.
	$(RUN)/python -m benchmarks.studies.data_peers

bench-mlperf: $(VENV)/ready $(MLPERF)/ready  ## Run MLPerf Storage's checkpoint workload: `make bench-mlperf DLIO=dlio_benchmark`, a clone.
	$(RUN)/python -m benchmarks.mlperf_storage --dlio $(DLIO)

check: $(VENV)/ready  ## Lint, check the format, check the types.
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/mypy

format: $(VENV)/ready  ## Mend what the linter can, and format.
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

$(VENV)/ready: pyproject.toml constraints.txt tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement tests/requirements.txt --editable '.[all,bench,dev,tune]'
	touch $@

$(VENV)/browser: $(VENV)/ready tests/browser/requirements.txt
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --requirement tests/browser/requirements.txt
	touch $@

# The peers' SDKs may need other versions than ours: an environment of their own, all of it pinned.
$(PEERS)/ready: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/peers.txt
	touch $@

$(DATA_PEERS)/ready: benchmarks/data_peers.txt
	$(PYTHON) -m venv $(DATA_PEERS)
	$(DATA_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement benchmarks/data_peers.txt
	touch $@

$(MLPERF)/ready: benchmarks/mlperf_storage/requirements.txt constraints.txt
	$(PYTHON) -m venv $(MLPERF)
	$(MLPERF)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement benchmarks/mlperf_storage/requirements.txt --editable '.[s3]'
	touch $@

# The tools that build the site share no dependency with the library: they only read its source.
$(DOCS)/ready: website/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement website/requirements.txt
	touch $@

# The newest versions that agree with each other, for every Python we support. torch's local version suffix
# (+cpu) is left out: which build is installed is the machine's choice.
COMPILE := uv pip compile --quiet --universal --python-version 3.10 --no-annotate --no-header \
	--no-emit-index-url --no-emit-find-links
NO_TORCH := '/^(torch==|nvidia|cuda|triton)/d'

lock: $(VENV)/ready  ## Take the newest versions that agree with each other into constraints.txt.
	$(RUN)/python -m pip install --quiet uv
	$(RUN)/$(COMPILE) --all-extras pyproject.toml tests/requirements.txt | sed -E $(NO_TORCH) > constraints.new
	echo 'torch==2.13.0' >> constraints.new
	sort -o constraints.txt constraints.new && rm constraints.new
	$(RUN)/$(COMPILE) benchmarks/peers.in | sed -E $(NO_TORCH) > benchmarks/peers.new
	echo 'torch==2.13.0' >> benchmarks/peers.new
	sort -o benchmarks/peers.txt benchmarks/peers.new && rm benchmarks/peers.new
	$(RUN)/$(COMPILE) website/requirements.in > website/requirements.txt

clean:  ## Remove the environments and all that was built.
	rm -rf $(VENV) $(PEERS) $(DATA_PEERS) $(MLPERF) $(DOCS) tests/adapters/.venvs benchmarks/.scratch build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis tests/browser/node_modules demo-run test-faults.json

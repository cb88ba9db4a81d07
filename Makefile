# Everything runs in an environment of its own: `make test` and `make demo` need only Python, pip and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin

.PHONY: test demo check format lock clean

test: $(VENV)/ready
	$(RUN)/python -m pytest

demo: $(VENV)/ready
	$(RUN)/python examples/demo.py

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

# The newest versions that agree with each other, for every Python we support. torch's local version suffix
# (+cpu) is left out: which build is installed is the machine's choice.
lock: $(VENV)/ready
	$(RUN)/python -m pip install --quiet uv
	$(RUN)/uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links pyproject.toml | sed -E '/^(torch|nvidia|cuda|triton)/d' > constraints.new
	echo 'torch==2.13.0' >> constraints.new
	sort -o constraints.txt constraints.new && rm constraints.new

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-run

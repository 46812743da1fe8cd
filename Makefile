# make serve   installs on first use, then serves the demo model on http://127.0.0.1:8000
# make test    installs on first use, then lints and runs the tests, all but the slow ones: ARGS="-m ''" runs every test
# make setup   installs only (.venv in this folder)
# make triton-server   installs NVIDIA's tritonserver for its test (it needs an older numpy, so it has a folder of its own)

PYTHON ?= python3
ARGS ?=

.PHONY: setup serve test lint triton-server

setup: .venv/.installed

# torch comes first: it decides between the CPU and the CUDA build, and nothing after it may replace it.
.venv/.installed: pyproject.toml
	@echo "== installing Pensieve and its tests into .venv (a few minutes the first time)"
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check 'torch>=2.11,<2.14'
	.venv/bin/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

serve: setup
	@echo "== serving the demo model on http://127.0.0.1:8000 (make serve ARGS='--port 9000' for other settings)"
	.venv/bin/pensieve serve --engine demo $(ARGS)

triton-server: setup
	@echo "== installing tritonserver into .venv/triton-server (223 MB)"
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target .venv/triton-server nvidia-pytriton==0.7.0 numpy==1.26.4

lint: setup
	@echo "== lint and type check"
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

test: lint
	@echo "== tests"
	.venv/bin/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

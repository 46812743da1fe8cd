# make serve   installs on first use, then serves a small chat model on http://127.0.0.1:8000 (ARGS="--engine demo": the tiny one that comes along)
# make test    installs on first use, then lints and runs the tests, all but the slow ones: ARGS="-m ''" runs every test
# make pytest  the same without the lint: ARGS="tests/builder" runs some of them
# make setup   installs only (.venv in this folder; PYTHON=python3.13 VENV=.venv-3.13 for another Python beside it)
# make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu   with a torch for CPUs, where pip's own is for CUDA
# make triton-server   installs NVIDIA's tritonserver for its test (it needs an older numpy, so it has a folder of its own)
# make small-model   downloads the model that `make serve` serves, for its test (93 MB)
# make ray     installs Ray for its test (481 MB, in an environment of its own that sees this one)
# make kv-events   installs Dynamo's router and frontend for their tests (83 MB; 240 MB on the disk)
# make mooncake   installs Mooncake Store for its tests (46 MB; three small libraries come from Debian's packages)
# make chat-templates   downloads public chat templates for their test (2.5 MB)
# make litellm, make aiperf   installs a client for its test (they pin other versions, so each has an environment of its own)
# make clients installs coding agents for their tests (1.3 GB on the disk, under a minute; npm is needed)

PYTHON ?= python3
VENV = .venv
ARGS ?=
TORCH_INDEX ?=

.PHONY: setup serve test lint pytest triton-server litellm aiperf ray kv-events mooncake chat-templates small-model clients

setup: $(VENV)/.installed

# torch comes first: it decides between the CPU and the CUDA build, and nothing after it may replace it.
$(VENV)/.installed: pyproject.toml
	@echo "== installing Pensieve and its tests into $(VENV) (a few minutes the first time, 3 GB and more)"
	@$$(test -x $(VENV)/bin/python && echo $(VENV)/bin/python || echo $(PYTHON)) \
		-c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: remove $(VENV) if it is there, and name one, as PYTHON=python3.12"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "== 1 of 2: torch"
	$(VENV)/bin/pip install --disable-pip-version-check 'torch>=2.11,<2.14' $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@echo "== 2 of 2: Pensieve and all that its tests need"
	$(VENV)/bin/pip install --disable-pip-version-check --editable '.[test]'
	@touch $@
	@echo "== installed in $$(( $$(date +%s) - $(shell date +%s) )) s"

serve: setup
	@echo "== starting a server; its log gives the address (make serve ARGS='--port 9000' for other settings)"
	$(VENV)/bin/pensieve serve $(ARGS)

triton-server: setup
	@echo "== installing tritonserver into $(VENV)/triton-server (223 MB)"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/triton-server nvidia-pytriton==0.7.0 numpy==1.26.4

# Some releases of litellm need the extra `mcp` for requests with tools.
litellm aiperf: setup
	@echo "== installing $@ into $(VENV)/$@ (a minute or two)"
	test -x $(VENV)/$@/bin/python || $(VENV)/bin/python -m venv $(VENV)/$@
	$(VENV)/$@/bin/pip install --quiet --disable-pip-version-check --no-compile $(if $(filter litellm,$@),'litellm[mcp]',$@)

chat-templates: setup
	$(VENV)/bin/pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/chat-templates trl==1.16.0 axolotl==0.19.0

small-model: setup
	$(VENV)/bin/python -c 'from pensieve.builder.small_model import small_model; print(small_model(print))'

ray: setup
	@echo "== installing ray into $(VENV)/ray (two minutes)"
	test -x $(VENV)/ray/bin/python || $(VENV)/bin/python -m venv $(VENV)/ray
	$(VENV)/ray/bin/pip install --quiet --disable-pip-version-check --no-compile 'ray[serve]>=2.60,<3'
	echo "import site; site.addsitedir('$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(VENV)/ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pensieve.pth

kv-events: setup
	@echo "== installing Dynamo into $(VENV)/kv-events (83 MB)"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target $(VENV)/kv-events \
		ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 uvloop==0.23.0

# Debian's libraries go where the wheel looks for its own: that needs no rights, and no LD_LIBRARY_PATH.
mooncake: setup
	@echo "== installing Mooncake Store into $(VENV)/mooncake (183 MB)"
	rm -rf $(VENV)/mooncake
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $(VENV)/mooncake mooncake-transfer-engine-non-cuda==0.3.13.post1
	mkdir $(VENV)/mooncake/packages
	cd $(VENV)/mooncake/packages \
		&& apt-get download --quiet libibverbs1 libnl-3-200 libnl-route-3-200 \
		&& for package in *.deb; do dpkg-deb --extract "$$package" .; done \
		&& find . -name '*.so.*' -exec mv {} ../mooncake_transfer_engine_non_cuda.libs \; \
		|| echo "apt-get cannot download libibverbs1, libnl-3-200 and libnl-route-3-200: install them as your system does"
	rm -r $(VENV)/mooncake/packages

clients: setup
	@echo "== installing coding agents into $(VENV)/clients (1.3 GB)"
	npm install --silent --no-audit --no-fund --no-save --prefix $(VENV)/clients \
		@anthropic-ai/claude-code@2.1.332 opencode-ai@1.18.33 @openai/codex@0.171.0
	test -x $(VENV)/clients/openai-agents/bin/python || $(VENV)/bin/python -m venv $(VENV)/clients/openai-agents
	$(VENV)/clients/openai-agents/bin/pip install --quiet --disable-pip-version-check --no-compile openai-agents==0.24.0

lint: setup
	@echo "== lint and type check"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint pytest

pytest: setup
	@echo "== tests"
	$(VENV)/bin/python -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

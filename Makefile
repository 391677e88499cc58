# make demo: get a real model (93 MB, once) and answer a question with it. make test: everything CI checks.
# make dist: a wheel and a source distribution in dist/.
# make soak MINUTES=30: mixed load with cancelled requests, killed workers and damaged caches, and against a server; memory must stay flat.
# make mutants: plants faults in the modules that decide what is exact; the tests must see them. It tries MOST=60 of each
# module, drawn with SEED=1; MOST=1000 tries all.
# make heads DATA=prompts.jsonl: train the heads of models/smollm2-135m again, or go on training; hours on two cores.
PYTHON ?= python3
BIN := .venv/bin

# PyPI's torch for Linux is the CUDA build, several GB. Without a GPU the CPU build is taken, unless pip has been told where to look.
PIP_KNOWS = $(shell command -v nvidia-smi || $(PYTHON) -m pip config list 2>/dev/null | grep -E 'index-url|find-links')
INDEX = $(if $(PIP_KNOWS),,--extra-index-url https://download.pytorch.org/whl/cpu)

# uv takes a tenth of pip's time. It does not read pip's configuration, so it is told what that says; where it fails, pip
# installs. Neither compiles what it installs, a minute's work on one core: a fifth of that is ever imported, and what is
# imported first is kept.
unexport PYTHONDONTWRITEBYTECODE
pip_says = $(shell $(PYTHON) -m pip config list 2>/dev/null | sed -n "s/^[^=]*[.]$(1)='\(.*\)'$$/\1/p" | tail -n 1)
FROM = $(foreach option,index-url extra-index-url find-links,$(foreach place,$(call pip_says,$(option)),--$(option) $(place)))
CERTIFICATES = $(addprefix SSL_CERT_FILE=,$(call pip_says,cert))
WANTED := --quiet --constraint constraints.txt --editable '.[dev]'

.venv/installed: pyproject.toml constraints.txt
	@echo "installing into .venv: a minute or more, 2 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv && $(CERTIFICATES) $(BIN)/uv pip install \
	  --python $(BIN)/python --index-strategy unsafe-best-match $(FROM) $(INDEX) $(WANTED) || \
	$(BIN)/python -m pip install --no-compile $(INDEX) $(WANTED)
	touch $@

install: .venv/installed

model: .venv/installed
	$(BIN)/talon models get smollm2-135m

demo: model
	$(BIN)/talon generate "Give three tips for staying healthy." --max-tokens 128

dist: .venv/installed
	rm -rf dist
	$(BIN)/hatchling build --directory dist

HEADS := block eagle3 medusa hydra eagle sps
heads: model
	test -n "$(DATA)" || { echo 'make heads: name the prompts: DATA=prompts.jsonl, a "prompt" per line'; exit 2; }
	for head in $(HEADS); do \
	  $(BIN)/talon train $$head --target smollm2-135m --data "$(DATA)" --out out/heads/$$head \
	    $$(test -e out/heads/$$head/training/state.pt && echo --resume) || exit 1; \
	  mkdir -p models/smollm2-135m/$$head && cp out/heads/$$head/*.json out/heads/$$head/*.safetensors models/smollm2-135m/$$head/; \
	done

evidence: .venv/installed
	test -n "$(EVAL)" || { echo 'make evidence: name the folder of question files: EVAL=DIR'; exit 2; }
	$(BIN)/talon evidence --questions $(EVAL) --out $(or $(OUT),out/evidence) --minutes $(or $(MINUTES),60) $(if $(RIVALS),--rivals $(RIVALS)) $(if $(GGUF),--gguf $(GGUF))

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

PYTEST := $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The tests of kernels go first, beside mypy: they compile what others use, which three processes would each compile.
# Three processes share two cores, since tests often wait for a worker. BESIDE names another target to make meanwhile.
test: lint
	$(MAKE) --jobs 2 types test-kernels
	$(MAKE) --jobs 2 test-others $(BESIDE)

test-kernels: .venv/installed
	$(PYTEST) -n 2 tests/engine/kernels

test-others: .venv/installed
	$(PYTEST) -n 3 --ignore tests/engine/kernels

# All kernels of this processor, and each as on one of the others (without --spread on all of them, which takes
# much longer): minutes of compiling, with what the tests leave of the cores.
check-kernels: .venv/installed
	nice -n 19 $(BIN)/talon check --kernels --spread

# make agents: try the agents that install in less than a minute, each in a folder of its own, with the 0.5 B coder.
AGENTS := llm openai-agents pydantic-ai langgraph smolagents
WHEELS_pydantic-ai := pydantic-ai-slim[openai]
WHEELS_langgraph := langgraph langchain langchain-openai
WHEELS_smolagents := smolagents[openai]
.venv-clients/%:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet $(patsubst %,'%',$(or $(WHEELS_$*),$*)) || { rm -r $@; echo "$*: not installed"; }

agents: .venv/installed $(AGENTS:%=.venv-clients/%)
	$(BIN)/python -m pytest -m slow -rs tests/engine/server/test_agents.py

soak: .venv/installed
	TALON_SOAK_MINUTES=$(or $(MINUTES),30) $(BIN)/python -m pytest -m slow -s tests/faults/test_soak.py tests/engine/server/test_soak.py

mutants: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants --most $(or $(MOST),60) --seed $(or $(SEED),1) --children $(or $(CHILDREN),2)

clean:
	rm -rf mutants .venv .venv-clients build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: install model demo dist heads evidence lint types test test-kernels test-others check-kernels agents soak mutants clean

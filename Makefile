# make demo: answer a question with the demo model. make test: everything CI checks.
PYTHON ?= python3
BIN := .venv/bin

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench,dev]'
	touch $@

install: .venv/installed

demo: .venv/installed
	$(BIN)/talon generate "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell altogether in April and May?" --max-tokens 128

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest

clean:
	rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: install demo lint types test clean

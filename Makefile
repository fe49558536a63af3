# The commands that CONTRIBUTING.md names. Run them inside the environment that `make install` fills.
.PHONY: install smoke test test-full lint ci nightly docs

install:
	pip install -c constraints.txt -e ".[dev]"

smoke: ## a minute: one path through every room
	pytest -m smoke -n 2

test: ## the default suite
	pytest -n 2

test-full: ## all examples of the property tests
	pytest -n 2 --hypothesis-profile full

lint:
	ruff check .
	ruff format --check .
	lint-imports
	pyright

ci: ## from nothing: what protects a landing, in half an hour
	bash .ci/run

nightly: ## from nothing: everything, with a table of times
	bash .ci/nightly

docs: ## needs pip install "agl-slime[docs]"
	mkdocs build --strict

"""Programs that tests run with AGL_ENV_PYTHON: verifiers is there, and Agent Lightning is not."""

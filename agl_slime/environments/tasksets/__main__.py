"""verifiers' evaluation program, which finds this package's plug-ins."""

from verifiers.v1.cli.eval.main import main

from agl_slime.environments.plugins import add_to_path

if __name__ == "__main__":
    add_to_path()
    main()

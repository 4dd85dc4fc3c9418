"""``python -m longdraft``: the same as the command ``longdraft``."""

from longdraft.cli.main import run

if __name__ == "__main__":
    run()

"""The command ``longdraft``, and ``python -m longdraft``."""

import signal


def run() -> None:
    """Runs the command. Ctrl-C ends the process silently while the modules of the command are imported."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a background job ignores SIGINT, and still does
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from longdraft.cli.main import run as run_command

    signal.signal(signal.SIGINT, handler)
    run_command()


if __name__ == "__main__":
    run()

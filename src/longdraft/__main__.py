"""The command ``longdraft``, and ``python -m longdraft``."""

import signal


def run() -> None:
    """The entry point of the command. While it imports the command line, Ctrl-C ends the process silently."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not in background jobs, which ignore SIGINT
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from longdraft.cli.main import run as run_command

    signal.signal(signal.SIGINT, handler)
    run_command()


if __name__ == "__main__":
    run()

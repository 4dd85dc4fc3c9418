"""The command ``longdraft``, and ``python -m longdraft``."""

import signal


def run() -> None:
    """The entry point of the command. Until the command handles Ctrl-C, that just ends the process."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from longdraft.cli.main import run

    signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    run()

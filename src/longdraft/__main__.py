"""The command ``longdraft``, and ``python -m longdraft``."""

import signal


def run() -> None:
    """The entry point of the command. Until it can answer Ctrl-C itself, that just ends the process."""
    taken = signal.getsignal(signal.SIGINT)
    if taken is signal.default_int_handler:  # not where it is ignored, as in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from longdraft.cli.main import run

    signal.signal(signal.SIGINT, taken)
    run()


if __name__ == "__main__":
    run()

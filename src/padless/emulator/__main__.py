"""`ptx-emulate` and `python -m padless.emulator`: the emulator's own command, which imports no torch by itself."""

import sys


def main() -> None:
    """The command; one sentence and exit code 2 where its packages are not installed."""
    try:
        import typer  # noqa: F401
    except ImportError:
        print("ptx-emulate: the command needs typer and rich; pip install 'padless[cli]'", file=sys.stderr)
        sys.exit(2)
    from padless.emulator.cli import main as command

    command("ptx-emulate")


if __name__ == "__main__":
    main()

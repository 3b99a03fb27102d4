"""`python -m padless` and the `padless` command, whose packages are an extra that the library does without."""

import sys


def main() -> None:
    """The command; one sentence and exit code 2 where its packages are not installed."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("padless: the command needs typer and rich; pip install 'padless[cli]'", file=sys.stderr)
        sys.exit(2)
    from padless.cli import main as command

    command()


if __name__ == "__main__":
    main()

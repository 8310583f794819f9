"""Entry point of the command `sbeval`, and of `python -m sbeval`, which launchers such as `accelerate launch` need."""

from sbeval.processes.ending import reporting_errors
from sbeval.processes.garbage import skip_collections_at_exit


def main() -> None:
    """Runs the command; its signal handlers are installed before its imports begin."""
    skip_collections_at_exit()
    with reporting_errors():
        from sbeval.commands.cli import app  # imported inside the context, since a signal may arrive meanwhile

        app()


if __name__ == "__main__":
    main()

"""Starts the command: `sbeval`, and `python -m sbeval`, which launchers such as `accelerate launch` need."""

from sbeval.processes.ending import told_in_one_sentence


def main() -> None:
    """Runs the command, signals heeded while its parts are still being imported."""
    with told_in_one_sentence():
        from sbeval.commands.cli import app  # takes a moment, within which a signal may come

        app()


if __name__ == "__main__":
    main()

"""Environment variables that several modules read."""

METADATA_VARIABLE = "SBEVAL_METADATA"
"""Environment variable with settings of tasks, for programs that do not pass `--metadata` on (`task_metadata`)."""

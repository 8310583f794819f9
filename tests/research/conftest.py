import sys
from pathlib import Path

from training_problems import data_folder, source_texts  # noqa: F401

sys.path.append(str(Path(__file__).parents[1] / "reports"))

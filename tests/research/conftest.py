from training_problems import data_folder, source_texts  # noqa: F401

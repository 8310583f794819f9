from training_data import data_folder, source_texts  # noqa: F401

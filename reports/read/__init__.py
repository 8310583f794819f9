"""From results files to typed rows: files are found, runs and samples read, and numbers laid out one a row."""

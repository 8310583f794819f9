"""RULER's tasks: needles, variable tracking, word extraction and question answering at any context length."""

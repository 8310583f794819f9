"""One file a section of the page: figures, sentences and tables, from `section.Material`, before any file exists."""

"""What a run records and how sure its numbers are: the records, the intervals, the command line."""

"""From rows to what may be said about them: statistics, RULER and recall, paired differences, claims and findings."""

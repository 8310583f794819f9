"""The records in results files, confidence intervals, atomic saving of lm-eval's files, and printed tables.

- `records`: the fields that sbeval adds to results files, and the command line in them
- `schema`: the meaning of these fields and their JSON schema
- `intervals`: confidence intervals by the cluster bootstrap, and how they are written as text
- `saving`: results and samples files are moved into place only when they are complete
- `terminal`: the tables that a run prints

Decisions:

- Results files are the product. Reports read nothing else, import neither torch nor lm-eval, and can be built again
  years later. `records` defines the fields once. Readers keep fields that they do not know. Missing is null, never 0 or
  -1.
- Intervals are over documents, since windows of one document are not independent. Samples files hold sums for each
  document, which are resampled as clusters. Below 20 documents there is no interval. If documents differ much in size
  (standard deviation of log tokens above 1), intervals cover less than their nominal share, whichever way one
  resamples: a large document that was not drawn leaves no trace. Such intervals are marked as doubtful. A method with
  wider intervals (jackknife errors, few degrees of freedom) covers 90 to 99 % there, with intervals 1.3 to 2 times as
  wide (benchmarks/results/intervals.md). It is not used: bands over lengths would need it too, and if documents have
  similar sizes it covers more than its nominal share.
- A results file names the command that made it. lm-eval stores only its arguments, so the adapter adds the command
  line, with secrets and user names in addresses removed.
"""

"""
Fold staged changes into rows: the net effect of a run of changes, for every mode.

There is one fold by key, `fold`: a timeline for each key over the segments of a run.  The modes in `fold_modes` use the
same timelines and keep more of them.  Two folds are different computations: `keyless` counts equal rows, because
without a key there is no timeline; `lake.writes.write_fold` folds the typed rows of a Spark query, in an
order that the query names, and reads unsent cells from the table itself.
"""

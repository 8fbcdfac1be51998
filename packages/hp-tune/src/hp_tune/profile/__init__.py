"""``hp-tune profile``: measure a cluster, and write its description.

`shapes` says what is measured, `worker` is what every rank runs, `overlay` makes the description
of what the ranks found, and `running` starts them and checks it.
"""

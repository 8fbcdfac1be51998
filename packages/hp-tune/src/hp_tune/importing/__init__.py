"""``hp-tune import``: logs of nccl-tests and hccl_test become the change of a cluster description.

`log` says what a log is, `nccl` and `hccl` read the two kinds, `overlay` makes the description.
"""

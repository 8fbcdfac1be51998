"""Our context parallelism beside other libraries', in one run: ``nox -s bench_peers``.

The library calls stand in ``adapters``, one file a library; nothing of theirs is copied.
"""

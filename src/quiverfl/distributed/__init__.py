"""One federation on many ranks of torch.distributed: the same rounds, the same numbers.

Every rank holds a shard of the clients and runs the same round loop. Ranks compute the product of
mixing weights and messages together (columns.py). Rank 0 alone writes the run folder.
"""

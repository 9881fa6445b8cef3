"""One federation on many ranks of torch.distributed: the same rounds, the same numbers.

Every rank holds a shard of the clients and plays the same round loop; only the product of mixing
weights and messages is computed together (columns.py). Rank 0 alone writes the run folder.
"""

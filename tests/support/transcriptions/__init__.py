"""The eleven methods once more, written from their specification and not from the product.

Plain loops over rounds, clients, epochs, batches and named tensors, in float64. They share nothing
but what the specification states once for all methods (`spec.py`). Each takes `mutant`, the name of
a deliberate error: the tests show that the product differs from every one of them.
"""

from transcriptions.dfedavgm import dfedavgm
from transcriptions.dfedavgmp import dfedavgmp
from transcriptions.dfedpgp import dfedpgp
from transcriptions.dispfl import dispfl
from transcriptions.ditto import ditto
from transcriptions.fedavg import fedavg
from transcriptions.fedbabu import fedbabu
from transcriptions.fedper import fedper
from transcriptions.fedrep import fedrep
from transcriptions.local import local
from transcriptions.osgp import osgp

__all__ = [
    "dfedavgm",
    "dfedavgmp",
    "dfedpgp",
    "dispfl",
    "ditto",
    "fedavg",
    "fedbabu",
    "fedper",
    "fedrep",
    "local",
    "osgp",
]
